"""SGLang's own pools of every class that kvproto_sglang states hand a prompt over: `ENGINE/python -m tools.engines.sglang_handover`.

The pools are SGLang's objects, made on the CPU with the shapes that its model configs make of a rank. Rows are written by
`set_kv_buffer` and states by `load_cpu_copy`; what arrived is read from what the pool gives to attention, and by
`get_cpu_copy`. Prints a line for each kind of pool, or for those named: other page sizes, other numbers of ranks, and
one bit that flips.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvproto_engines.memory import ShareableMemory
from tests.sglang.handover import SLOT, Model, Side, differences, hand_over
from tests.sglang.kinds import KINDS, side

COMMON = {"device": "cpu", "enable_memory_saver": False}
SIZES = (((64, 1), (16, 1)), ((1, 1), (32, 2)), ((16, 2), (64, 1)))
"""Tokens of a page, and ranks, of both engines."""


class Own:
    """Makes SGLang's pools, for `tests.sglang.kinds`."""

    def __init__(self, heads_first: bool = False) -> None:
        self._heads_first = heads_first

    def _made(self, cls: Any, **given: Any) -> Any:
        os.environ["SGLANG_USE_HND_KVCACHE"] = str(int(self._heads_first))
        with ShareableMemory():
            return cls(**given)

    def mha(self, **given: Any) -> Any:
        return self._made(MHATokenToKVPool, **COMMON, **given)

    def mla(self, kv_cache_dim: int, **given: Any) -> Any:
        return self._made(MLATokenToKVPool, **COMMON, **given)

    def dsa(self, **given: Any) -> Any:
        return self._made(DSATokenToKVPool, **COMMON, **given)

    def swa(self, **given: Any) -> Any:
        return self._made(SWAKVPool, **COMMON, **given)

    def hybrid(self, full: Any, ids: list[int], layers: list[int], shape: Any) -> Any:
        params = KimiLinearCacheParams if isinstance(shape, KimiLinearStateShape) else Mamba2CacheParams
        mamba = self._made(
            MambaPool, size=SLOT + 4, spec_state_size=0, mamba_layer_ids=layers,
            cache_params=params(shape=shape, layers=layers), **COMMON,
        )  # fmt: skip
        return HybridLinearKVPool(
            size=full.size, dtype=full.dtype, page_size=full.page_size, head_num=getattr(full, "head_num", 1),
            head_dim=getattr(full, "head_dim", 1), full_attention_layer_ids=ids, device="cpu", mamba_pool=mamba,
            use_mla=isinstance(full, MLATokenToKVPool), full_kv_pool=full,
        )  # fmt: skip

    def shape(self, model: Model, ranks: int) -> Any:
        """As the configs of SGLang's models do it."""
        (heads, dim, width), (blocks, inputs) = model.matrix, model.conv
        if model.rows_first:
            return KimiLinearStateShape.create(
                tp_world_size=ranks, num_heads=heads, head_dim=dim, conv_kernel_size=inputs + 1
            )
        if not width:
            return Mamba2StateShape.create(
                tp_world_size=ranks, intermediate_size=blocks[0], n_groups=1, num_heads=ranks, head_dim=dim,
                state_size=0, conv_kernel=inputs + 1,
            )  # fmt: skip
        return Mamba2StateShape.create(
            tp_world_size=ranks, intermediate_size=heads * dim, n_groups=2, num_heads=heads, head_dim=dim,
            state_size=width, conv_kernel=inputs + 1, conv_shard_groups=list(blocks) if model.said else None,
        )  # fmt: skip


def buffers() -> Any:
    """SGLang's own, for a draft whose hidden states have 24 elements."""
    return MetadataBuffers(
        size=4, hidden_size=24, hidden_states_dtype=torch.bfloat16, max_sampling_mask_tokens=8,
        output_dsa_topk_indices_dim=6,
    )  # fmt: skip


def made(kind: str, page: int, ranks: int, heads_first: bool = False) -> Side:
    found = side(kind, page, ranks, Own(heads_first))
    found.buffers = buffers()
    return found


def tried(kind: str, place: Path) -> list[str]:
    """Differences after hand-overs of a kind of pool."""
    found, only = [], KINDS[kind].page
    at = f"ipc://{place}/{time.monotonic_ns()}-{{rank}}"
    for sizes in SIZES:
        one, two = (made(kind, *each) for each in sizes)
        found += [f"{sizes}: {line}" for line in hand_over(one, two, at)]
        found += [f"{sizes}, moved by SGLang: {line}" for line in moved(two)]
    if not only and "k" in [part for part, _, _ in KINDS[kind].models[0].parts] and not KINDS[kind].states:
        found += [f"pages of heads: {line}" for line in hand_over(made(kind, 64, 1, True), made(kind, 16, 2), at)]

    def spoil(source: Side) -> None:
        KINDS[kind].flip(source.ranks[0], source)

    if len(wrong := hand_over(made(kind, 64, 1), made(kind, 16, 1), at, spoil=spoil)) != 1:
        found.append(f"one bit that flips: {wrong} differ")
    return found


def moved(engine: Side) -> list[str]:
    """Rows that SGLang does not find again where its own `move_kv_cache` takes the tokens of an indexed pool."""
    if "dsa" not in engine.states:
        return []
    before, free = engine.slots(False), max(engine.pages) + 1
    engine.pages = list(range(free, free + len(engine.pages)))
    for pools in engine.ranks:
        for pool in pools:
            pool.move_kv_cache(engine.slots(False), before)
    return [line for rank in range(len(engine.ranks)) for line in differences(engine, rank)]


def main(chosen: list[str]) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, get_parallel().override(attn_dcp_size=1, dcp_enabled=False):
        for kind in chosen or KINDS:
            try:
                found = tried(kind, Path(folder))
            except Exception as error:  # told, and the others go on
                found = [f"{type(error).__name__}: {error}"]
            wrong += bool(found)
            print(
                f"{'DIFFERS' if found else 'same   '} SGLang's own pools, {kind}",
                *found[:6],
                sep="\n        ",
                flush=True,
            )
    print(f"{wrong} differ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
