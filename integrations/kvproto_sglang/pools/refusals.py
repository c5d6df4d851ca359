"""SGLang's classes of pools and components of state that this back end does not state, by name, and what each holds."""

from __future__ import annotations

__all__ = ["COMPONENTS", "REFUSED"]

_UNIFIED = "slots of one memory that SGLang moves, under ids that are not places (unified memory)"
_STRIPED = "a share of the pages, dealt among context-parallel ranks"
_HISPARSE = "copies of what is in host memory (HiSparse)"
_NPU = "the order of axes of an NPU"
_SHELL = "no rows of its own: what derives from it has them"
REFUSED = {
    "BaseSWAKVPool": _SHELL,
    "DSV4NPUTokenToKVPool": _NPU,
    "DeepSeekV4IndexerPool": "a part of DeepSeek V4's pool, and no pool of a model",
    "DeepSeekV4SingleKVPool": "a part of DeepSeek V4's pool, and no pool of a model",
    "DeepSeekV4UniformFP8KVPool": "a part of DeepSeek V4's pool, and no pool of a model",
    "DeepSeekV4UnifiedKVPool": "rings and rows of DeepSeek V4 in one buffer, for ROCm",
    "HiSparseC4DevicePool": _HISPARSE,
    "HiSparseDSATokenToKVPool": _HISPARSE,
    "HiSparseMHAMainPool": _HISPARSE,
    "LayerSplitDSATokenToKVPool": "some of the layers, dealt among context-parallel ranks",
    "MHATokenToKOnlyPool": "a part of MiniMax-M3's pool, and no pool of a model",
    "MiniMaxM3Nvfp4IndexKPool": "NVFP4 with scales in tiles of a kernel, which strides do not describe",
    "MiniMaxM3Nvfp4KVPool": "NVFP4 with scales in tiles of a kernel, which strides do not describe",
    "MiniMaxM3Nvfp4MainKVPool": "NVFP4 with scales in tiles of a kernel, which strides do not describe",
    "NPUCompressStatePool": _NPU,
    "NPUDeepSeekV4IndexerPool": _NPU,
    "NPUDeepSeekV4SingleKVPool": _NPU,
    "NPUMHATokenToKOnlyPool": _NPU,
    "NPUMHATokenToKVPool": _NPU,
    "NPUMLATokenToKVPool": _NPU,
    "NPUMiniMaxSparseKVPool": _NPU,
    "NoOpMHATokenToKVPool": "nothing: an engine without a cache",
    "PageInterleaveDSATokenToKVPool": _STRIPED,
    "PageInterleaveMHATokenToKVPool": _STRIPED,
    "PageInterleaveMLATokenToKVPool": _STRIPED,
    "PageMajorMHATokenToKVPool": "pages of all layers, of which `--enable-page-major-kv-layout` alone makes use",
    "UnifiedDraftKVPool": _UNIFIED,
    "UnifiedDraftMambaPool": _UNIFIED,
    "UnifiedDraftSWAKVPool": _UNIFIED,
    "UnifiedHybridLinearKVPool": _UNIFIED,
    "UnifiedMHATokenToKVPool": _UNIFIED,
    "UnifiedMLATokenToKVPool": _UNIFIED,
    "UnifiedMambaPool": _UNIFIED,
    "UnifiedSWAKVPool": _UNIFIED,
    "_DummyKVCache": "nothing: MLX keeps its caches elsewhere",
}
COMPONENTS = {
    "request_row": "from which position on rows of a draft of DeepSeek V4 (DSpark) are those of the request",
    "swa_ring": "rings of DeepSeek V4 on ROCm",
}
"""Components of a request's state, by SGLang's name of their type."""
