"""Pools of families that no table of K and V describes, as engines of any page size and number of ranks.

Where a row of a prompt lies is said here by SGLang's own arithmetic of slots, and not by what the back end states. Pools
are stand-ins, or SGLang's own (tools/engines/sglang_handover.py): both have the buffers that are named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from tests.sglang.handover import REQUEST_ROWS, SLOT, TOKENS, Model, Rows, Side, model_of

WINDOW = 37
"""Tokens of a window."""
HEADS, DIM = 2, 16
BF16 = torch.bfloat16


@attrs.frozen
class Family:
    """A model and its pools.

    Fields:
        pools: Of a rank: of classes, a page size, and a number of ranks.
        rows: Where the rows of a prompt lie in a rank's pools.
        states: The types of the components of SGLang's state.
        pages: The page sizes that SGLang has it with.
        slots: Of the pools, those of states beside the pools of pages.
        dcp: Ranks that deal the tokens.
    """

    pools: Callable[[Any, int, int], tuple[Any, ...]]
    rows: Callable[[Side, int], Iterator[Rows]]
    states: tuple[str, ...] = ()
    pages: tuple[int, ...] = ()
    text: Mapping[str, Any] = attrs.field(factory=dict)
    heads: int = HEADS
    models: int = 1
    slots: int = 0
    dcp: int = 1

    def side(self, page: int, ranks: int, classes: Any) -> Side:
        """An engine with this page size, or the nearest that SGLang has."""
        page = min(self.pages, key=lambda each: abs(each - page)) if self.pages else page
        dcp = ranks if self.dcp > 1 else 1
        made = [self.pools(classes, page, ranks) for _ in range(ranks)]
        kept = [each[: len(each) - self.slots] for each in made]
        models = tuple(Model(self.heads, tokens=WINDOW if "swa" in self.states else 0) for _ in range(self.models))
        configs = tuple(model_of(self.heads, 5, **self.text) for _ in models)
        return Side(
            models, configs, kept, page * dcp, self.states, rows=self.rows, dcp=dcp,
            slots_of=[each[len(each) - self.slots :] for each in made] if self.slots else [],
        )  # fmt: skip


def _tokens(page: int) -> int:
    """Room for two prompts, in whole pages."""
    return 2 * -(-TOKENS // page) * page + 2 * page


def _at(buffer: torch.Tensor, index: Any, size: int) -> torch.Tensor:
    """Byte offsets of `size` bytes that begin where rows [index] of the buffer do, [row, 1]."""
    places = torch.as_tensor(np.asarray(index), dtype=torch.int64)
    return (places * buffer.stride(0) * buffer.element_size())[:, None]


def _heads(key: Any, buffer: torch.Tensor, slots: torch.Tensor, rank: int, ranks: int, heads: int) -> Rows:
    """Of each token the heads of a rank, in a buffer [slot, head, dim]."""
    size, held = buffer.shape[2] * buffer.element_size(), buffer.shape[1]
    lanes = torch.arange(held) * buffer.stride(1) * buffer.element_size()
    at = _at(buffer, slots, size) + lanes
    return Rows(key, buffer, at, size, lanes=(heads, heads * rank // ranks))


def _kv(
    side: Side, pool: Any, rank: int, layers: Sequence[int], model: int = 0, window: bool = False
) -> Iterator[Rows]:  # fmt: skip
    for n, layer in enumerate(layers):
        for part in ("k", "v"):
            for name in (part, f"{part}_scale"):
                if (buffers := getattr(pool, f"{name}_buffer", None)) is not None:
                    held = buffers[n].view(torch.uint8)
                    held = held.view(len(held), pool.head_num, -1)
                    yield _heads((model, layer, name), held, side.slots(window), rank, len(side.ranks), HEADS)


def _whole(key: Any, buffer: torch.Tensor, index: Any, size: int = 0, first: int = 0) -> Rows:
    """Rows of a part that each rank has whole."""
    return Rows(key, buffer, _at(buffer, index, size), size or buffer[0].nbytes, first)


def _packed(
    key: Any, buffer: torch.Tensor, slots: torch.Tensor, rows: int, places: Sequence[tuple[int, int]], size: int,
    first: int = 0,
) -> Rows:  # fmt: skip
    """Rows in pages of bytes: `places` says where the first of a page begins and how far apart they are."""
    ((base, stride),) = places
    at = (slots // rows) * buffer.stride(0) * buffer.element_size() + base + slots % rows * stride
    return Rows(key, buffer, at[:, None], size, first)


# MiniMax-M3: K and V of all layers, index keys of the sparse ones


def _minimax(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return (
        classes.minimax(
            size=_tokens(page), page_size=page, dtype=BF16, head_num=max(1, HEADS // ranks), head_dim=DIM,
            idx_head_dim=8, dense_layer_ids=[0], sparse_layer_ids=[1, 2],
        ),
    )  # fmt: skip


def _minimax_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    yield from _kv(side, pool.main_pool, rank, range(3))
    for n, layer in enumerate((1, 2)):
        yield _whole((0, layer, "index"), pool.index_k_pool.k_buffer[n], side.slots(False))


# DeepSeek V4 and V4.1

_V4_WINDOW = {"latent": (0, 448), "rope": (448, 128), "latent_scale": (None, 7)}
_V41_WINDOW = {"latent": (0, 512), "latent_scale": (None, 16)}
_FP4_ROW = {"latent": (0, 256), "latent_scale": (None, 32)}
_LAYOUTS = {"v4": (_V4_WINDOW, 576, 8), "v41": (_V41_WINDOW, 512, 16), "v41_fp4": (_FP4_ROW, 256, 32)}
"""Of each layout of a row: where its parts begin, bytes of its data, and how far its scales are apart."""


def _v4(
    ratios: Sequence[int], layout: str, sources: Sequence[int] = (), drafts: int = 0
) -> Callable[[Any, int, int], tuple[Any, ...]]:
    return lambda classes, page, ranks: (
        classes.v4(_tokens(page), page, ratios, layout, sources, REQUEST_ROWS, drafts),
    )  # fmt: skip


def _latents(model: int, name: str, layer: int, buffer: torch.Tensor, slots: torch.Tensor, rows: int, layout: str,
    first: int = 0) -> Iterator[Rows]:  # fmt: skip
    parts, data, scale = _LAYOUTS[layout]
    for part, (at, size) in parts.items():
        place = (rows * data, scale) if at is None else (at, data)
        yield _packed((model, layer, name + part), buffer, slots, rows, [place], size, first)


def _v4_rows(ratios: Sequence[int], layouts: tuple[str, str], sources: Sequence[int], key: int, scale: int) -> Any:
    def rows(side: Side, rank: int) -> Iterator[Rows]:
        for model, pool in enumerate(side.ranks[rank]):
            kinds = ratios if not model else [0]
            window = side.slots(True)
            for layer, buffer in enumerate(pool.swa_kv_pool.kv_buffer):
                live = max(0, TOKENS - WINDOW)
                yield from _latents(model, "window_", layer, buffer, window[live:], side.page, layouts[0], live)
            for ratio in sorted({*kinds} - {0}):
                of = [n for n in (sources or range(len(kinds))) if kinds[n] == ratio]
                yield from _compressed(side, pool, ratio, of, layouts[1], key, scale)

    return rows


def _compressed(
    side: Side, pool: Any, ratio: int, layers: Sequence[int], layout: str, key: int, scale: int
) -> Iterator[Rows]:  # fmt: skip
    count = TOKENS // ratio
    slots = side.slots(False)[: count * ratio : ratio] // ratio
    for n, layer in enumerate(layers):
        yield from _latents(0, "", layer, pool.kv_pools[ratio].kv_buffer[n], slots, side.page // ratio, layout)
        if ratio in pool.index_pools:
            index, rows = pool.index_pools[ratio].index_k_with_scale_buffer[n], pool.index_pools[ratio].page_size
            yield _packed((0, layer, "index"), index, slots, rows, [(0, key)], key)
            yield _packed((0, layer, "index_scale"), index, slots, rows, [(rows * key, scale)], scale)
        for name, states in (("", pool.compress_state_pools), ("index_", pool.indexer_compress_state_pools)):
            if (state := states[layer]) is None:
                continue
            live = (TOKENS // ratio - (ratio == 4)) * ratio
            at = torch.arange(live, TOKENS)
            if state.request_scoped:
                index = side.row * state.ring_size + at % state.ring_size
            else:
                pages = side.slots(True)[live:] // side.page
                index = pages * state.ring_size + at % state.ring_size
            yield _whole((0, layer, f"{name}compress_state"), state.kv_score_buffer.kv_score, index, first=live)


# Indexes of which a key stands for several tokens


def _kpool(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return (
        classes.dsa(
            size=_tokens(page), page_size=page, dtype=BF16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=2,
            kv_cache_dim=576, index_head_dim=128, index_kpool=4, index_kpool_compress=True, max_running_requests=7,
            skip_topk_layers=[False, True],
        ),
    )  # fmt: skip


def _kpool_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    count, page = TOKENS // 4, side.page // 4
    for layer, buffer in enumerate(pool.kv_buffer):
        yield _whole((0, layer, "latent"), buffer, side.slots(False))
    slots, index = side.slots(False)[: count * 4 : 4] // 4, pool.index_k_with_scale_buffer[0]
    yield _packed((0, 0, "index"), index, slots, page, [(0, 128)], 128)
    yield _packed((0, 0, "index_scale"), index, slots, page, [(page * 128, 4)], 4)
    at = torch.arange(count * 4, TOKENS) % 4
    for name, part in (("pending_index", "k"), ("sglang.pending_score", "score")):
        buffer = getattr(pool, f"_compress_tail_{part}")[0]
        yield _whole((0, 0, name), buffer.view(-1, 128), side.row * 4 + at, first=count * 4)


def _qsa(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return (
        classes.qsa(
            size=_tokens(page), dtype=BF16, page_size=page, head_num=max(1, HEADS // ranks), head_dim=DIM,
            full_attention_layer_ids=[1, 3], mamba_pool=_states(classes, [0, 2], 1 / ranks, ple=True),
            qsa_index_kv_heads=1, qsa_index_head_dim=32, qsa_compress_ratio=4, num_request_slots=REQUEST_ROWS,
        ),
    )  # fmt: skip


def _states(classes: Any, layers: Sequence[int], share: float, ple: bool = False) -> Any:
    """States of gated delta nets, of a rank with this share of the heads; and those of embeddings per layer."""
    mine = [int(n * share) for n in (12, 12, 32)]
    return classes.mamba(layers, (sum(mine), 3), (int(4 * share), 8, 6), [12, 12, 32], ple)


def _state_rows(side: Side, pool: Any, rank: int, layers: Sequence[int], model: int = 0) -> Iterator[Rows]:
    """Of a slot: each channel is a lane of its block, and each head of the matrix."""
    ranks, (conv,), matrix = len(side.ranks), pool.mamba_cache.conv, pool.mamba_cache.temporal
    for n, layer in enumerate(layers):
        lo = 0
        for block, width in enumerate((12, 12, 32)):
            held, flat = width // ranks, conv[n, SLOT]
            size = flat.shape[1] * flat.element_size()
            at = (torch.arange(lo, lo + held) * flat.stride(0) * flat.element_size())[None]
            yield Rows((model, layer, f"conv {block}"), flat, at, size, lanes=(width, rank * held))
            lo += held
        if matrix.numel():
            flat = matrix[n, SLOT]
            size, held = flat[0].nbytes, len(flat)
            at = (torch.arange(held) * size)[None]
            yield Rows((model, layer, "ssm"), flat, at, size, lanes=(held * ranks, rank * held))
    for sibling in pool._slot_siblings:
        for name in ("conv_state", "context"):
            if (held := getattr(sibling, name, None)) is not None:
                row = held[0, SLOT] if name == "conv_state" else held[SLOT]
                yield Rows((model, 0, name), row, torch.zeros(1, 1, dtype=torch.int64), row.nbytes)


def _qsa_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    count = TOKENS // 4
    yield from _kv(side, pool.full_kv_pool, rank, (1, 3))
    yield from _state_rows(side, pool.mamba_pool, rank, (0, 2))
    at = torch.arange(count * 4, TOKENS)
    ring = side.row * 4 + at % 4
    for n, layer in enumerate((1, 3)):
        slots = side.slots(False)[: count * 4 : 4] // 4
        yield _whole((0, layer, "index"), pool.qsa_compressed_k_buffer_pool[n], slots)
        yield _whole((0, layer, "pending_index"), pool.qsa_key_state_buffer_pool[n], ring, first=count * 4)
    yield _whole((0, 0, "pending_position"), pool.qsa_rope_position_buffer, ring, first=count * 4)


# Scales in buffers of their own


def _scaled(name: str) -> Callable[[Any, int, int], tuple[Any, ...]]:
    def make(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
        held = max(1, HEADS // ranks)
        return (getattr(classes, name)(size=_tokens(page), page_size=page, head_num=held, head_dim=64, layer_num=2),)

    return make


def _scaled_rows(side: Side, rank: int) -> Iterator[Rows]:
    yield from _kv(side, side.ranks[rank][0], rank, range(2))


def _scaled_windows(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return (
        classes.swa_mxfp8(
            size=_tokens(page), size_swa=_tokens(page), page_size=page, head_num=max(1, HEADS // ranks), head_dim=64,
            swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3],
        ),
    )  # fmt: skip


def _scaled_windows_rows(side: Side, rank: int) -> Iterator[Rows]:
    yield from _window_rows(side, side.ranks[rank][0], rank, (1, 3), (0, 2), 0)


def _mla_four(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return (classes.mla_fp4(size=_tokens(page), page_size=page, layer_num=2),)


def _mla_four_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    for layer in range(2):
        yield _whole((0, layer, "latent"), pool.kv_buffer[layer], side.slots(False))
        yield _whole((0, layer, "latent_scale"), pool.kv_scale_buffer[layer], side.slots(False))


# States of Mamba 1 and of linear attention


def _mamba1(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    channels = 64 // ranks
    states = classes.mamba([0, 1], (channels, 3), (channels, 1, 16), None)
    return (classes.hybrid_of(_kv_pool(classes, page, ranks, 0), [], states),)


def _mamba1_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    (conv,), matrix = pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal
    for layer in range(2):
        for part, held in (("conv", conv[layer, SLOT]), ("ssm", matrix[layer, SLOT])):
            size, lanes = held[0].nbytes, len(held)
            at = (torch.arange(lanes) * size)[None]
            yield Rows((0, layer, part), held, at, size, lanes=(lanes * len(side.ranks), rank * lanes))


def _linear(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    states = classes.mamba([0, 2], (0, 0), (4 // ranks, 8, 8), None)
    return (classes.hybrid_of(_kv_pool(classes, page, ranks, 2), [1, 3], states),)


def _kv_pool(classes: Any, page: int, ranks: int, layers: int, heads: int = HEADS) -> Any:
    held = max(1, heads // ranks)
    return classes.mha(size=_tokens(page), page_size=page, dtype=BF16, head_num=held, head_dim=DIM, layer_num=layers)


def _linear_rows(side: Side, rank: int) -> Iterator[Rows]:
    (pool,) = side.ranks[rank]
    yield from _kv(side, pool.full_kv_pool, rank, (1, 3))
    for n, layer in enumerate((0, 2)):
        held = pool.mamba_pool.mamba_cache.temporal[n, SLOT]
        size, lanes = held[0].nbytes, len(held)
        at = (torch.arange(lanes) * size)[None]
        yield Rows((0, layer, "ssm"), held, at, size, lanes=(lanes * len(side.ranks), rank * lanes))


# Windows beside states, and drafts


def _windows(classes: Any, page: int, ranks: int, full: list[int], swa: list[int]) -> Any:
    return classes.swa(
        size=_tokens(page), size_swa=_tokens(page), page_size=page, dtype=BF16, head_num=max(1, HEADS // ranks),
        head_dim=DIM, swa_attention_layer_ids=swa, full_attention_layer_ids=full,
    )  # fmt: skip


def _window_rows(
    side: Side, pool: Any, rank: int, full: Sequence[int], swa: Sequence[int], model: int
) -> Iterator[Rows]:
    yield from _kv(side, pool.full_kv_pool, rank, full, model)
    live = TOKENS - WINDOW
    for rows in _kv(side, pool.swa_kv_pool, rank, swa, model, window=True):
        yield attrs.evolve(rows, at=rows.at[live:], first=live)


def _inkling(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    held = max(1, HEADS // ranks) * DIM
    streams = classes.streams(range(4), [(3, held)] * 4 + [(3, 24)] * 2)
    return _windows(classes, page, ranks, [1, 3], [0, 2]), streams


def _inkling_rows(side: Side, rank: int) -> Iterator[Rows]:
    yield from _window_rows(side, side.ranks[rank][0], rank, (1, 3), (0, 2), 0)
    convolutions, ranks = side.slots_of[rank][0].mamba_cache.conv, len(side.ranks)
    for n, held in enumerate(convolutions):
        lanes = held.shape[3]
        every = HEADS * DIM if n < 4 else lanes
        for layer in ((1, 3), (1, 3), (0, 2), (0, 2), range(4), range(4))[n]:
            slot = held[layer, SLOT]  # [input, channel]
            at = (torch.arange(3) * slot.stride(0))[:, None] + torch.arange(lanes) * slot.stride(1)
            lo = rank * lanes if every == lanes * ranks else 0
            yield Rows((0, layer, f"conv {n}"), slot, at * slot.element_size(), slot.element_size(), lanes=(every, lo))


def _layers_of_mtp(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return tuple(_kv_pool(classes, page, ranks, n) for n in (2, 1, 1, 1))


def _mtp_rows(side: Side, rank: int) -> Iterator[Rows]:
    for model, pool in enumerate(side.ranks[rank]):
        yield from _kv(side, pool, rank, range(1 if model else 2), model)


def _draft_of_windows(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    return _windows(classes, page, ranks, [1, 3], [0, 2]), _windows(classes, page, ranks, [1], [0, 2])


def _draft_windows_rows(side: Side, rank: int) -> Iterator[Rows]:
    target, draft = side.ranks[rank]
    yield from _window_rows(side, target, rank, (1, 3), (0, 2), 0)
    yield from _window_rows(side, draft, rank, (1,), (0, 2), 1)


def _draft_with_states(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
    target = classes.hybrid_of(_kv_pool(classes, page, ranks, 2), [1, 3], _states(classes, [0, 2], 1 / ranks))
    draft = classes.hybrid_of(_kv_pool(classes, page, ranks, 1), [1], _states(classes, [0], 1 / ranks))
    return target, draft


def _draft_states_rows(side: Side, rank: int) -> Iterator[Rows]:
    for model, (full, states) in enumerate((((1, 3), (0, 2)), ((1,), (0,)))):
        pool = side.ranks[rank][model]
        yield from _kv(side, pool.full_kv_pool, rank, full, model)
        yield from _state_rows(side, pool.mamba_pool, rank, states, model)


# Context parallel: rank = slot mod ranks, and the row of it is slot // ranks


def _dealt(name: str) -> Callable[[Any, int, int], tuple[Any, ...]]:
    def make(classes: Any, page: int, ranks: int) -> tuple[Any, ...]:
        given: dict[str, Any] = {"size": _tokens(page), "page_size": page, "dtype": BF16, "layer_num": 2}
        if name == "mha":
            return (classes.mha(head_num=HEADS, head_dim=DIM, **given),)
        index = {"index_head_dim": 128, "index_buf_size": (_tokens(page) + page) * ranks - page}
        more = index if name == "dsa" else {}
        return (getattr(classes, name)(kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dim=576, **given, **more),)

    return make


def _dealt_rows(side: Side, rank: int) -> Iterator[Rows]:
    """`side.slots` counts the slots of all ranks together."""
    (pool,), ranks = side.ranks[rank], side.dcp
    slots = side.slots(False)
    mine = torch.nonzero(slots % ranks == rank)[:, 0]
    for layer in range(2):
        if hasattr(pool, "k_buffer"):
            for part in ("k", "v"):
                found = _heads(
                    (0, layer, part), getattr(pool, f"{part}_buffer")[layer], slots[mine] // ranks, 0, 1, HEADS
                )
                yield attrs.evolve(found, which=mine)
            continue
        found = _whole((0, layer, "latent"), pool.kv_buffer[layer], slots[mine] // ranks)
        yield attrs.evolve(found, which=mine)
        if hasattr(pool, "index_k_with_scale_buffer"):
            index, page = pool.index_k_with_scale_buffer[layer], pool.page_size
            yield _packed((0, layer, "index"), index, slots, page, [(0, 128)], 128)
            yield _packed((0, layer, "index_scale"), index, slots, page, [(page * 128, 4)], 4)


_V4, _V41 = (0, 4, 128, 4), (0, 1, 2, 1, 2)
_LOW = (1, 2)
"""Of V4.1, the layers that write rows of several tokens, which later ones read."""
FAMILIES: dict[str, Family] = {
    "MiniMax-M3": Family(_minimax, _minimax_rows, ("minimax_index_k", "minimax_dense_kv")),
    "DeepSeek V4": Family(
        _v4(_V4, "v4"), _v4_rows(_V4, ("v4", "v4"), (), 128, 4), ("swa", "c128_state"), (128, 256), heads=1,
    ),
    "DeepSeek V4.1": Family(
        _v4(_V41, "v41", _LOW), _v4_rows(_V41, ("v41", "v41_fp4"), _LOW, 64, 4), ("swa", "c128_state"), (128, 256), heads=1,
    ),
    "DeepSeek V4 with MTP": Family(
        lambda classes, page, ranks: tuple(
            pool for ratios in (_V4, (0,)) for pool in _v4(ratios, "v4", drafts=2)(classes, page, ranks)
        ),
        _v4_rows(_V4, ("v4", "v4"), (), 128, 4), ("swa", "c128_state", "swa"), (128, 256), heads=1, models=2,
    ),
    "GLM-5-Next": Family(_kpool, _kpool_rows, ("dsa", "dsa_tail"), (256,), heads=1),
    "Qwen4-Exp": Family(_qsa, _qsa_rows, ("mamba", "qsa_pending", "qsa_compressed"), (16, 64)),
    "MXFP8": Family(_scaled("mxfp8"), _scaled_rows, ("block_scale",), (1, 16, 32, 64)),
    "MXFP8 with windows": Family(
        _scaled_windows, _scaled_windows_rows, ("swa", "block_scale", "block_scale_swa"), (1, 16, 32, 64),
    ),
    "FP4": Family(_scaled("fp4"), _scaled_rows),
    "MLA in FP4": Family(_mla_four, _mla_four_rows, heads=1),
    "Mamba 1": Family(_mamba1, _mamba1_rows, ("mamba",)),
    "linear attention": Family(_linear, _linear_rows, ("mamba",)),
    "Inkling": Family(
        _inkling, _inkling_rows, ("swa", "mamba"), slots=1, text={"local_layer_ids": [0, 2], "hidden_size": 24},
    ),
    "MTP of three layers": Family(_layers_of_mtp, _mtp_rows, models=4),
    "a draft with windows": Family(_draft_of_windows, _draft_windows_rows, ("swa",), models=2),
    "a draft with states": Family(_draft_with_states, _draft_states_rows, ("mamba",), models=2),
    "MLA, tokens dealt": Family(_dealt("mla"), _dealt_rows, heads=1, dcp=2),
    "heads, tokens dealt": Family(_dealt("mha"), _dealt_rows, dcp=2),
    "sparse MLA, tokens dealt": Family(_dealt("dsa"), _dealt_rows, ("dsa",), (64,), heads=1, dcp=2),
}  # fmt: skip
"""By name; those whose tokens are dealt have as many ranks as deal them, or one that does not."""
