"""Model kinds, their sizes, and how TP, DCP and pipeline ranks share them."""

from .base import Attention, Cached, Dense, Model, Recurrence, Rows, State, Taps
from .config import DeltaConfig, HeadConfig, ModelConfig, MoeConfig, WindowConfig
from .decoder import Decoder
from .expert_parallel import ExpertParallel
from .head import Head, head_among
from .lora import Adapted, Lora
from .ops import FusedOps, Ops
from .parallel import SOLO, Pipeline, TensorParallel, cut, delta_heads, key_head_of, kv_head_of, kv_head_range

__all__ = [
    "SOLO",
    "Adapted",
    "Attention",
    "Cached",
    "Decoder",
    "DeltaConfig",
    "Dense",
    "ExpertParallel",
    "FusedOps",
    "Head",
    "HeadConfig",
    "Lora",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "Ops",
    "Pipeline",
    "Recurrence",
    "Rows",
    "State",
    "Taps",
    "TensorParallel",
    "WindowConfig",
    "cut",
    "delta_heads",
    "head_among",
    "key_head_of",
    "kv_head_of",
    "kv_head_range",
]
