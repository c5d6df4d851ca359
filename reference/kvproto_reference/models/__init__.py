"""Model kinds, their sizes, and how TP, DCP and pipeline ranks share them."""

from .base import Attention, Dense, Model, Rows
from .config import ModelConfig, MoeConfig
from .decoder import Decoder
from .ops import FusedOps, Ops
from .parallel import SOLO, Pipeline, TensorParallel, cut, kv_head_of, kv_head_range

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
    "Pipeline",
    "Rows",
    "TensorParallel",
    "cut",
    "kv_head_of",
    "kv_head_range",
]
