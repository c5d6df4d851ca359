"""Model kinds, their sizes, and how TP, DCP and pipeline ranks share them."""

from .base import Attention, Cached, Dense, Model, Rows, Taps
from .config import HeadConfig, ModelConfig, MoeConfig
from .decoder import Decoder
from .head import Head, head_among
from .ops import FusedOps, Ops
from .parallel import SOLO, Pipeline, TensorParallel, cut, kv_head_of, kv_head_range

__all__ = [
    "SOLO",
    "Attention",
    "Cached",
    "Decoder",
    "Dense",
    "FusedOps",
    "Head",
    "HeadConfig",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "Ops",
    "Pipeline",
    "Rows",
    "Taps",
    "TensorParallel",
    "cut",
    "head_among",
    "kv_head_of",
    "kv_head_range",
]
