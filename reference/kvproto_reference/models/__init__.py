"""Model kinds, their sizes, and how TP, DCP and pipeline ranks share them."""

from .base import Attention, Cached, Dense, Model, Rows, Taps
from .config import EagleConfig, ModelConfig, MoeConfig
from .decoder import Decoder
from .eagle import EagleHead, eagle_among
from .ops import FusedOps, Ops
from .parallel import SOLO, Pipeline, TensorParallel, cut, kv_head_of, kv_head_range

__all__ = [
    "SOLO",
    "Attention",
    "Cached",
    "Decoder",
    "Dense",
    "EagleConfig",
    "EagleHead",
    "FusedOps",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "Ops",
    "Pipeline",
    "Rows",
    "Taps",
    "TensorParallel",
    "cut",
    "eagle_among",
    "kv_head_of",
    "kv_head_range",
]
