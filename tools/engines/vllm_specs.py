"""Statements of the adapter about each class of cache that a vLLM has: `ENGINE/python -m tools.engines.vllm_specs`.

Every class of specification, wherever the package defines it, and every kind of state is stated, or refused with a reason.
Those whose engine needs a GPU are stated of what the package itself allocates: its specifications, shapes and views.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm import _custom_ops
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvproto import Parallel, Pool, lay_out
from kvproto_engines.memory import ShareableMemory
from kvproto_engines.records import WINDOW
from kvproto_vllm.pools.caches import Layers, Stated, state
from kvproto_vllm.pools.states import KINDS, states
from kvproto_vllm.specs import REFUSED, STATED
from tests.vllm import backends, families, family_engines

_ROOT = "KVCacheSpec"
_NO_CACHES = {"AttentionSpec", "UniformTypeKVCacheSpecs"}
"""Classes that others derive from, and a case for specifications of several layers."""
_OTHERS = {"CUSTOM"}
"""Kinds of states that a plugin registers."""


def classes() -> set[str]:
    """Names of the classes that derive from the root, in all files of the package."""
    bases: dict[str, set[str]] = {}
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "Spec)" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    found = {_ROOT}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - {_ROOT} - _NO_CACHES


Parts = dict[str, tuple[int, int, int]]
"""By part: lanes of all ranks, bytes of a lane, rows of a page or slot."""
BLOCKS, LAYERS = 5, 2
_HEADS, _DIM, _WIDTH, _RANKS = 4, 8, 16, 2


def _state(kind: str, shapes: Any, *dtypes: torch.dtype) -> Any:
    return theirs.MambaSpec(
        block_size=64, shapes=tuple(shapes), dtypes=dtypes, mamba_type=MambaAttentionBackendEnum[kind]
    )


def _latent(size: int, **more: Any) -> Any:
    return theirs.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=size, dtype=torch.uint8, **more)


_F16, _F32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[Callable[[], Any], Parts]] = {
    "Mamba 1": (
        lambda: _state("MAMBA1", Shapes.mamba1_state_shape(_RANKS, 64, _WIDTH, 4), _F16, _F32),
        {"conv": (64, 2, 3), "ssm": (64, 4 * _WIDTH, 1)},
    ),
    "linear attention": (
        lambda: _state("LINEAR", Shapes.linear_attention_state_shape(_HEADS, _RANKS, _DIM), _F32),
        {"ssm": (_HEADS, 4 * _DIM * _DIM, 1)},
    ),
    "Kimi's delta attention": (
        lambda: _state("GDN_ATTN", Shapes.kda_state_shape(_RANKS, _HEADS, _DIM), _F16, _F32),
        {"conv": (3 * _HEADS * _DIM, 2, 3), "ssm": (_HEADS, 4 * _DIM * _DIM, 1)},
    ),
    "an index": (
        lambda: _latent(132, cache_role=theirs.SparseCacheRole.INDEXER),
        {"index": (1, 128, 64), "index_scale": (1, 4, 64)},
    ),
    "quantized rows of sparse MLA": (
        lambda: _latent(576, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
        {"latent": (1, 512, 64), "latent_scale": (1, 16, 64), "rope": (1, 128, 64)},
    ),
}


class _Rows:
    """A layer of sparse MLA: vLLM stores its rows by a kernel of GPUs."""

    kv_lora_rank, kv_cache_dtype, _k_scale = 512, "fp8_ds_mla", None

    @property
    def impl(self) -> Any:
        return self

    def do_kv_cache_update(self, latent: Any, rope: Any, cache: Any, slots: Any, *_: Any) -> None:
        blocks = [backends.quantized(each) for each in latent.split(128, -1)]
        data, scales = (torch.cat(each, -1) for each in zip(*blocks, strict=True))
        row = torch.cat([data, scales.view(torch.uint8), rope[:, 0].view(torch.uint8)], -1)
        cache[slots // cache.shape[1], slots % cache.shape[1]] = row


def stated(spec: Any, layout: KVCacheLayout) -> list[Stated]:
    """Statements of the adapter about layers that vLLM allocates by a specification."""
    names, page = [f"model.layers.{n}.mixer" for n in range(LAYERS)], spec.page_size_bytes
    inner = layout.name.startswith("B")
    strides = (page, page * LAYERS) if inner else (page * BLOCKS, page)
    tensor = theirs.KVCacheTensor(
        size=page * BLOCKS * LAYERS, layers=names, layer_stride=strides[0], block_stride=strides[1]
    )
    with ShareableMemory(torch.int8):
        raw = torch.zeros(tensor.size, dtype=torch.int8)
    views = theirs.create_kv_cache_views(raw, spec, BLOCKS, layout, tensor)
    stateful = isinstance(spec, theirs.MambaSpec)
    layers = Layers(
        title="layers", layer=_Rows(), backend="DEEPSEEK_V32_INDEXER", spec=spec, names=names, ids=list(range(LAYERS)),
        tensors=[_bound(spec, view) for view in views] if stateful else views, heads=1, ranks=_RANKS, blocks=BLOCKS, computed=_F16,
        stored="auto", scales=[(1.0, 1.0)] * LAYERS,
    )  # fmt: skip
    return states(layers, True) if stateful else [state(layers, True)]


def _bound(spec: Any, view: torch.Tensor) -> Any:
    """The states of a layer, as vLLM's own base class of such layers makes them of its view."""
    layer = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes, kv_cache=None)
    MambaBase.bind_kv_cache(layer, view)
    return layer.kv_cache


def differences(make: Callable[[], Any], wanted: Parts) -> list[str]:
    """Differences between statements and a model's sizes, in vLLM's layouts of layers."""
    wrong = []
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC):
        made = stated(make(), layout)
        caches = [each.cache for each in made]
        Pool(
            lay_out(caches, Parallel(tp=_RANKS)), {each.cache.group.name: each.tensors for each in made},
            axes="page head token dim",
        )  # fmt: skip
        found = {part.name: (part.lanes, part.lane_bytes, c.group.rows) for c in caches for part in c.group.parts}
        if found != wanted:
            wrong.append(f"{layout.name}: {found}, not {wanted}")
    return wrong


def _made(kind: str, fields: dict[str, Any]) -> Any:
    """A specification of vLLM's own class."""
    roles = {"cache_role": theirs.SparseCacheRole.INDEXER} if "cache_role" in fields else {}
    return getattr(theirs, kind)(**fields | roles)


def _views(held: families.Held, spec: Any, setup: Any, blocks: int, memory: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of layers as vLLM makes them of an allocation."""
    page, names = spec.page_size_bytes, [f"model.layers.{n}.{held.name}" for n in held.layers]
    strides = (page, page * len(names)) if setup.order.startswith("B") else (page * blocks, page)
    tensor = theirs.KVCacheTensor(
        size=page * blocks * len(names), layers=names, layer_stride=strides[0], block_stride=strides[1]
    )
    made: list[torch.Tensor] = theirs.create_kv_cache_views(
        memory.view(torch.int8)[: tensor.size], spec, blocks, KVCacheLayout[setup.order], tensor
    )  # fmt: skip
    return made


def moved(name: str) -> list[str]:
    """Caches of a family that are not, byte by byte, as they were in an engine with other ranks, blocks and layout."""
    family, found = families.FAMILIES[name], list[str]()
    one, two = family_engines.setups(family, _made, _views)
    for sizes in ((one, two), (two, one)):
        with tempfile.TemporaryDirectory() as folder:
            wrong = family_engines.hand_over(family, sizes, f"ipc://{folder}/p-{{rank}}")
        found += [f"TP {sizes[0].ranks} to {sizes[1].ranks}: {each}" for each in wrong]
    return found


def stored() -> list[str]:
    """Differences between rows that vLLM's kernel for CPUs stores in a window of DeepSeek V4 and what is read of them."""
    rows, latent = 64, 448
    page = torch.zeros(2, rows * 584, dtype=torch.uint8)
    given = torch.randint(0, 6, (rows, 512), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    still = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)  # nothing is rotated
    _custom_ops.fused_qnorm_rope_kv_insert_cpu(
        torch.zeros(rows, 1, 512, dtype=torch.bfloat16), given, torch.zeros(rows, dtype=torch.int64), page,
        rows + torch.arange(rows), still, 1, 1e-6, rows,
    )  # fmt: skip
    views = {part: view[1, 0] for part, view in WINDOW[584].views(page.view(2, 1, rows, 584)).items()}
    scale = torch.exp2(views["window_latent_scale"].float() - 127).repeat_interleave(64, 1)
    numbers = views["window_latent"].contiguous().view(torch.float8_e4m3fn).float() * scale
    found = torch.cat([numbers, views["window_rope"].contiguous().view(torch.bfloat16).float()], 1)
    wrong = torch.nonzero(found != given.float())
    return (
        [f"{len(wrong)} numbers, the first at {wrong[0].tolist()}, of {latent} and a rotary key"] if len(wrong) else []
    )


def main() -> int:
    """Print what is counted, what is missing and what is stated otherwise; the exit status."""
    _custom_ops.indexer_k_quant_and_cache = backends.indexer_k_quant_and_cache  # a kernel of GPUs
    wrong = int(_told(*_counted()))
    for what, case in CASES.items():
        try:
            found = differences(*case)
        except Exception as error:  # the others go on
            found = [f"{type(error).__name__}: {error}"]
        wrong += _told(f"{what}, of what vLLM allocates", found)
    if vllm.__version__.startswith("0.33"):
        wrong += _told("a window of DeepSeek V4, of what vLLM's kernel stores", stored())
    for name in families.FAMILIES if vllm.__version__.startswith("0.33") else ():
        try:
            found = moved(name)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong += _told(f"{name}: all that vLLM allocates, moved", found)
    return 1 if wrong else 0


def _told(what: str, found: list[str]) -> bool:
    print(f"{'DIFFERS' if found else 'same   '} vllm {vllm.__version__}, {what}", *found, sep="\n        ", flush=True)
    return bool(found)


def _counted() -> tuple[str, list[str]]:
    """The numbers of classes that are stated and refused, and the names of those that are neither."""
    found, kinds = classes(), {each.name for each in MambaAttentionBackendEnum} - _OTHERS
    said = {*STATED, *REFUSED}
    missing = sorted(found - said) + sorted(kinds - {each.upper() for each in KINDS})
    missing += [f"no {name}" for name in sorted(said - found) if vllm.__version__.startswith("0.33")]
    count = len(found & {*STATED})
    what = f"{count} classes of caches stated and {len(found) - count} refused by name, {len(kinds)} kinds of states"
    return what, missing


if __name__ == "__main__":
    sys.exit(main())
