"""Model kinds, their sizes and their TP cut."""

from .base import DenseCache, LayerCaches, Model
from .config import ModelConfig, MoeConfig
from .decoder import Decoder
from .parallel import SOLO, TensorParallel, cut, kv_head_range

__all__ = [
    "SOLO",
    "Decoder",
    "DenseCache",
    "LayerCaches",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "TensorParallel",
    "cut",
    "kv_head_range",
]
