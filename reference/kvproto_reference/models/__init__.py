"""Model kinds, their sizes, and how TP and DCP ranks share them."""

from .base import Attention, Dense, Model, Rows
from .config import ModelConfig, MoeConfig
from .decoder import Decoder
from .ops import FusedOps, Ops
from .parallel import SOLO, TensorParallel, cut, kv_head_of, kv_head_range

__all__ = [
    "SOLO",
    "Attention",
    "Decoder",
    "Dense",
    "FusedOps",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "Ops",
    "Rows",
    "TensorParallel",
    "cut",
    "kv_head_of",
    "kv_head_range",
]
