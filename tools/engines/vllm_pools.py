"""Allocations of vLLM itself: its model classes, cache specs, block tables and views. Runs in the engines' environment.

    python vllm_pools.py < cases.json > answers.jsonl

A case names a config.json, the architecture that loads it, parallel and block sizes and a layout. The model is built of
meta tensors, its layers say their specs, and the package's own functions make tables, tensors and views of them. A case
may list layers instead, of an architecture that does not build without a GPU: their specs are made of the package's own
classes and shape calculators.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    create_kv_cache_views,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

registry._run_in_subprocess = lambda look: look()  # only to save the seconds of a fresh interpreter
torch.cpu._is_avx512_bf16_supported = lambda: False  # with it vLLM keeps states in float32, on a CPU alone
NEEDED = {"vocab_size": 128, "intermediate_size": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
BYTES = 1 << 46
"""Of a pool on no device."""


def said(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def backends() -> dict[str, Any]:
    """Facts of each backend by its own word: asked in a process each, as some end it where they do not belong."""
    rows: dict[str, Any] = {}
    for member in AttentionBackendEnum:
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            try:
                row = backend(member)
            except BaseException as error:
                row = {"not_run": f"{type(error).__name__}: {error}"[:200]}
            os.write(there, json.dumps(row).encode())
            os._exit(0)
        os.close(there)
        with os.fdopen(here, "rb") as pipe:
            rows[member.name] = json.loads(pipe.read() or b'{"not_run": "its import ends the process"}')
        os.waitpid(child, 0)
    return rows


def backend(member: AttentionBackendEnum) -> dict[str, Any]:
    """The facts of one backend."""
    cls = member.get_class()
    probe = FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    sizes, layouts = cls.get_supported_kernel_block_sizes(), cls.supported_kv_cache_layouts()
    return {
        "layouts": [x.name for x in layouts] if layouts is not None else None,
        "multiple": [s.base for s in sizes if isinstance(s, MultipleOf)],
        "sizes": [s for s in sizes if not isinstance(s, MultipleOf)],
        "planes": not cls.is_mla() and cls.customize_spec(probe).num_heads == 2,
    }


def config_of(case: dict[str, Any]) -> Any:
    """The engine's configuration of a case, on one rank that takes itself for one of `tp`."""
    folder = Path(tempfile.mkdtemp())
    text = {**NEEDED, **case["config"], **case.get("more", {}), "architectures": [case["architecture"]]}
    (folder / "config.json").write_text(json.dumps(text))
    given = {"block_size": case["page"]} if case["page"] else {}
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=2048,
        enforce_eager=True, enable_prefix_caching=False, **given,
    ).create_engine_config()  # fmt: skip
    config.parallel_config.tensor_parallel_size = case["tp"]
    return config


def specs_of(config: Any, case: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """Of every layer with a cache, by its name; block sizes aligned as the platform aligns them."""
    group = parallel_state.get_tp_group()
    before, group.world_size = group.world_size, case["tp"]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(case["device"]):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        found: dict[str, KVCacheSpec] = get_kv_cache_spec(config)
        return found
    finally:
        torch.set_default_dtype(dtype)
        group.world_size = before


def listed(case: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """Specs of the layers that a case lists: name to kind and numbers."""
    made: dict[str, KVCacheSpec] = {}
    for name, kind, numbers in case["layers"]:
        dtypes = [getattr(torch, d) for d in numbers.pop("dtypes", ["bfloat16"])]
        if kind in ("FullAttentionSpec", "MLAAttentionSpec"):
            made[name] = getattr(kv_cache_interface, kind)(block_size=case["page"], dtype=dtypes[0], **numbers)
        else:
            shapes = getattr(MambaStateShapeCalculator, kind)(**numbers)
            made[name] = MambaSpec(2048, shapes=tuple(shapes), dtypes=tuple(dtypes), page_size_padded=case["padded"])
    return made


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Address and strides in bytes of every layer, and the block table that it is in."""
    config = config_of(case)
    with set_current_vllm_config(config):
        specs = listed(case) if "layers" in case else specs_of(config, case)
        config.cache_config.kv_cache_layout = case["layout"]
        config.cache_config.num_gpu_blocks_override = case["blocks"]
        kind = dict.fromkeys(type(s).__name__ for s in specs.values())
        groups = planning.get_kv_cache_groups(config, specs)
        *_, third = inspect.signature(planning.get_kv_cache_config_from_groups).parameters
        room = case["blocks"] if third == "num_blocks" else BYTES
        made = planning.get_kv_cache_config_from_groups(config, groups, room)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        raw = torch.empty(made.kv_cache_tensors[0].size, dtype=torch.int8, device="meta")
        of = {name: (g, spec) for g, group in enumerate(made.kv_cache_groups) for name, spec in pairs(group)}
        layers = {}
        for tensor in made.kv_cache_tensors:
            spec = of[tensor.layers[0]][1]
            views = create_kv_cache_views(raw, spec, made.num_blocks, layout, tensor)
            for name, view in zip(tensor.layers, views, strict=True):
                size = view.element_size()
                row = {
                    "table": of[name][0], "block": spec.block_size, "at": view.storage_offset() * size,
                    "shape": [*view.shape[:3], view.shape[3] * size], "strides": [s * size for s in view.stride()],
                }  # fmt: skip
                if isinstance(spec, MambaSpec):
                    row["states"] = states(spec, row["at"])
                layers[name] = row
        return {"blocks": made.num_blocks, "bytes": raw.numel(), "specs": [*kind], "layers": layers}


def pairs(group: Any) -> list[tuple[str, KVCacheSpec]]:
    """Layers of a block table, each with its own spec."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [(name, inner[name] if inner else group.kv_cache_spec) for name in group.layer_names]


def states(spec: MambaSpec, at: int) -> list[dict[str, Any]]:
    """States of a layer, one behind the other in its block."""
    found: list[dict[str, Any]] = []
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = torch.empty((), dtype=dtype).element_size()
        found.append(
            {"at": at, "bytes": prod(shape) * size, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        )
        at += found[-1]["bytes"]
    return found


def main() -> None:
    cases = json.load(sys.stdin)
    said({"release": vllm.__version__, "backends": backends()})
    for case in cases:
        try:
            if not torch.distributed.is_initialized():
                config = config_of(cases[0] | {"tp": 1})
                with set_current_vllm_config(config):
                    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meeting", 0, "gloo")
                    ensure_model_parallel_initialized(1, 1)
            said({"id": case["id"], **answer(case)})
        except Exception as error:  # a model that does not build is told, and the others go on
            said({"id": case["id"], "not_run": f"{type(error).__name__}: {str(error)[-300:]}"})


if __name__ == "__main__":
    main()
