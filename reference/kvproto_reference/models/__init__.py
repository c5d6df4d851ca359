"""Model kinds, their sizes and their TP cut."""

from .base import DenseCache, LayerCaches, Model
from .config import ModelConfig
from .decoder import Decoder
from .parallel import SOLO, TensorParallel, kv_head_range, shard

__all__ = [
    "SOLO",
    "Decoder",
    "DenseCache",
    "LayerCaches",
    "Model",
    "ModelConfig",
    "TensorParallel",
    "kv_head_range",
    "shard",
]
