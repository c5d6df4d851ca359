"""SGLang's own pools of every class that kvproto_sglang states hand a prompt over: `ENGINE/python -m tools.engines.sglang_handover`.

The pools are SGLang's objects, made on the CPU with the shapes that its model configs make of a rank. Rows are written by
`set_kv_buffer` and states by `load_cpu_copy`; what arrived is read from what the pool gives to attention, and by
`get_cpu_copy`. Families that only kernels of a GPU write are filled where SGLang's arithmetic of slots says that their
rows lie (tests/sglang/families.py). Prints a line for each kind of pool, or for those named: other page sizes, other numbers of ranks, and
one bit that flips.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.inkling import InklingConvCacheParams, InklingConvStateShape
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.mem_cache import deepseek_v4_memory_pool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvproto_engines.memory import ShareableMemory
from tests.sglang.families import FAMILIES
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

    def mla(self, kv_cache_dim: int = 0, **given: Any) -> Any:
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
        return self.hybrid_of(full, ids, mamba)

    def hybrid_of(self, full: Any, ids: list[int], mamba: Any) -> Any:
        return HybridLinearKVPool(
            size=full.size, dtype=full.dtype, page_size=full.page_size, head_num=getattr(full, "head_num", 1),
            head_dim=getattr(full, "head_dim", 1), full_attention_layer_ids=ids, device="cpu", mamba_pool=mamba,
            use_mla=isinstance(full, MLATokenToKVPool), full_kv_pool=full,
        )  # fmt: skip

    def mamba(
        self, layers: Any, conv: tuple[int, int], temporal: tuple[int, int, int], groups: list[int] | None, ple: bool = False
    ) -> Any:  # fmt: skip
        """States of these shapes, and perhaps what embeddings per layer keep."""
        shape = Mamba2StateShape(
            conv=[conv], temporal=temporal, intermediate_size=conv[0], conv_dim=conv[0], ssm_state_size=temporal[2],
            num_heads=temporal[0], head_dim=temporal[1], state_size=temporal[2], conv_kernel=conv[1] + 1,
            conv_shard_groups=groups,
        )  # fmt: skip
        made = self._made(
            MambaPool, size=SLOT + 4, spec_state_size=0, mamba_layer_ids=list(layers),
            cache_params=Mamba2CacheParams(shape=shape, layers=list(layers)), **COMMON,
        )  # fmt: skip
        if ple:
            kept = {"size": SLOT + 4, "device": "cpu"}
            made.register_slot_state(
                self._made(ShortConvPool, state_shape=(24, 3), layer_ids=[0], dtype=torch.bfloat16, **kept)
            )
            made.register_slot_state(self._made(NGramPool, context_len=5, eos_token_id=2, **kept))
        return made

    def streams(self, layers: Any, shapes: list[tuple[int, int]]) -> Any:
        """States of several convolutions, [input, channel] each."""
        shape = InklingConvStateShape(conv=shapes, temporal=(0, 0, 0))
        params = InklingConvCacheParams(shape=shape, layers=list(layers))
        return self._made(
            MambaPool, size=SLOT + 4, spec_state_size=0, mamba_layer_ids=list(layers), cache_params=params, **COMMON
        )

    def minimax(self, **given: Any) -> Any:
        layers = len(given["dense_layer_ids"]) + len(given["sparse_layer_ids"])
        more = {"disable_value_sparse_layer_ids": given["sparse_layer_ids"], "start_layer": 0, "end_layer": layers}
        return self._made(MiniMaxSparseKVPool, **COMMON, **given, **more)

    def mxfp8(self, **given: Any) -> Any:
        return self._made(MHATokenToKVPoolMXFP8, dtype=torch.float8_e4m3fn, **COMMON, **given)

    def swa_mxfp8(self, **given: Any) -> Any:
        named = {"token_to_kv_pool_class": MHATokenToKVPoolMXFP8, "dtype": torch.float8_e4m3fn}
        return self._made(SWAKVPool, **named, **COMMON, **given)

    def fp4(self, **given: Any) -> Any:
        return self._made(MHATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2, **COMMON, **given)

    def mla_fp4(self, **given: Any) -> Any:
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
        return self._made(MLATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2, **sizes, **COMMON, **given)

    def v4(self, size: int, page: int, ratios: Any, layout: str, sources: Any, request_rows: int, drafts: int) -> Any:
        """Of a size in tokens, beside so many drafts."""
        module: Any = deepseek_v4_memory_pool
        ring = 16 if drafts else 8
        spec = SimpleNamespace(speculative_algorithm="EAGLE" if drafts else None, speculative_num_draft_tokens=drafts)
        module.get_spec = lambda: spec
        return self._made(
            module.DeepSeekV4TokenToKVPool, max_num_reqs=request_rows - 1, swa_size=size,
            c4_size=size // 4, c128_size=-(-size // 128), c4_state_pool_size=size // page * ring, c128_state_pool_size=0,
            page_size=page, swa_page_size=page, dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128,
            layer_num=len(ratios), compression_ratios=list(ratios), kv_layout=layout, kv_source_layers=list(sources),
            full_size=size, **COMMON,
        )  # fmt: skip

    def qsa(self, **given: Any) -> Any:
        return self._made(QSATokenToKVPool, device="cpu", qsa_token_topk=64, **given)

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


def settle() -> None:
    """Answer what DeepSeek V4's pool asks of an SGLang that runs: no drafts, on a GPU that is not the newest."""
    module: Any = deepseek_v4_memory_pool
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    module.get_exec = lambda: SimpleNamespace(kernel=kernel, features=features)
    module.get_platform = lambda: SimpleNamespace(is_sm120=False, is_sm100=False)
    module.uses_draft_swa_ring = lambda: False


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


def family(name: str, place: Path) -> list[str]:
    """Differences after hand-overs of a family, and where one bit of its last part flips."""
    found, at = [], f"ipc://{place}/{time.monotonic_ns()}-{{rank}}"

    def side_of(page: int, ranks: int) -> Side:
        with get_parallel().override(attn_dcp_size=ranks if FAMILIES[name].dcp > 1 else 1):
            made = FAMILIES[name].side(page, ranks, Own())
        made.buffers = buffers()
        return made

    for sizes in SIZES:
        one, two = (side_of(*each) for each in sizes)
        found += [f"{sizes}: {line}" for line in hand_over(one, two, at)]

    def spoil(source: Side) -> None:
        assert source.rows is not None
        whole, place = [each for each in source.rows(source, 0) if len(each.at)][-1].place
        whole[place[-1, 0, 0]] ^= 1

    if len(wrong := hand_over(side_of(64, 1), side_of(16, 1), at, spoil=spoil)) != 1:
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
        settle()
        for kind in chosen or (*KINDS, *FAMILIES):
            try:
                found = (tried if kind in KINDS else family)(kind, Path(folder))
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
