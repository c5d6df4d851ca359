"""Allocations of SGLang itself: its own pools, made on the CPU. Runs in the engines' environment.

    python sglang_pools.py < cases.json > answers.jsonl

A case names a pool class and the numbers that the package's own model runner would hand it on one rank.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

COMMON = {"device": "cpu", "enable_memory_saver": False}


def said(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def view(tensor: torch.Tensor) -> dict[str, Any]:
    """The allocation, the place in it, and byte strides."""
    size = tensor.element_size()
    return {
        "allocation": tensor.untyped_storage().data_ptr(), "bytes": tensor.untyped_storage().nbytes(),
        "at": tensor.storage_offset() * size, "shape": list(tensor.shape), "size": size,
        "strides": [stride * size for stride in tensor.stride()],
    }  # fmt: skip


def pages(case: dict[str, Any]) -> dict[str, Any]:
    """K and V, or a latent and an index, of each layer."""
    numbers = case["numbers"] | {"dtype": getattr(torch, case["dtype"])} | COMMON
    os.environ["SGLANG_USE_HND_KVCACHE"] = str(case["layout"] == "HND")
    classes = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool, "dsa": DSATokenToKVPool}
    with get_parallel().override(attn_dcp_size=1):
        pool = classes[case["pool"]](**numbers)
    if case["pool"] == "mha":
        return {"k": [view(t) for t in pool.k_buffer], "v": [view(t) for t in pool.v_buffer]}
    found = {"latent": [view(t) for t in pool.kv_buffer]}
    return found | ({"index": [view(t) for t in pool.index_k_with_scale_buffer]} if case["pool"] == "dsa" else {})


def states(case: dict[str, Any]) -> dict[str, Any]:
    """Conv and recurrent states of all layers."""
    shapes = {
        "mamba2": (Mamba2StateShape.create, Mamba2CacheParams),
        "mamba1": (Mamba2StateShape.create_full_rank, Mamba2CacheParams),
        "kda": (KimiLinearStateShape.create, KimiLinearCacheParams),
    }
    create, params = shapes[case["pool"]]
    layers = case["layers"]
    pool = MambaPool(
        size=case["slots"] - 1, spec_state_size=0, mamba_layer_ids=layers,
        cache_params=params(shape=create(**case["numbers"]), layers=layers), **COMMON,
    )  # fmt: skip
    return {"conv": [view(t) for t in pool.mamba_cache.conv], "ssm": [view(pool.mamba_cache.temporal)]}


def main() -> None:
    said({"release": importlib.metadata.version("sglang")})
    for case in json.load(sys.stdin):
        try:
            said({"id": case["id"], **(states(case) if "slots" in case else pages(case))})
        except Exception as error:  # told, and the others go on
            said({"id": case["id"], "not_run": f"{type(error).__name__}: {str(error)[-300:]}"})


if __name__ == "__main__":
    main()
