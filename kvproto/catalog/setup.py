"""The options of an engine that its pools depend on, and the caches of a model in its element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType

import attrs

from kvproto.catalog.config import Config, number, text
from kvproto.catalog.models import element_type, specs
from kvproto.catalog.tensors import Slab
from kvproto.errors import bad, check_type, check_whole
from kvproto.planning.cache import BITS, Block, Cache, bytes_of
from kvproto.planning.geometry import Geometry, Part
from kvproto.planning.kinds import KINDS
from kvproto.planning.layout import Parallel
from kvproto.wire.enums import DType

__all__ = ["Arranged", "KvDtype", "Make", "Setup", "cache_kind", "caches", "check_heads", "kv_dtype", "model_dtype"]


@attrs.frozen
class Setup:
    """Options of an engine; None stands for its default."""

    parallel: Parallel = attrs.field(factory=Parallel)
    page: int | None = None
    """Tokens of a page: what engines call block_size, page_size or tokens_per_block."""
    kv_dtype: str = "auto"
    backend: str | None = None
    """Attention backend of vLLM."""
    layout: str | None = None
    """Order of a pool: LBNHC and five more of vLLM, NHD or HND of SGLang."""
    state_layout: str = "SD"
    """Order of vLLM's conv states: SD, or DS with channels outermost."""
    dp: int = 1
    """Attention data parallel over the tensor-parallel ranks (SGLang): a replica has tp / dp ranks."""
    state_dtype: DType | None = None
    """Element type of recurrent states."""
    sm: int | None = None
    """Compute capability of the GPUs, such as 90, 100 or 120, if a pool depends on it."""

    def check(self) -> None:
        """Raise LocalError(OUT_OF_RANGE) for an option that no engine has."""
        check_type("parallel", self.parallel, Parallel, "a kvproto.Parallel")
        self.parallel.check()
        for name in ("page", "dp", "sm"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name in ("kv_dtype", "backend", "layout"):
            check_type(name, getattr(self, name), (str, NoneType), "a name")
        if self.state_layout not in ("SD", "DS"):
            raise bad("state_layout", "SD or DS", self.state_layout)
        check_type("state_dtype", self.state_dtype, (DType, NoneType), "a kvproto.DType")


@attrs.frozen
class KvDtype:
    """The form of K and V, and of a latent, under one cache dtype of an engine."""

    element: DType | None = None
    """Element type of K and V; None for that of the model."""
    scaled: bool = False
    """Whether an F32 scale follows K and V of each token and head."""
    row: str = "never"
    """When a latent and its rotary key form a packed row with scales: never, always, or indexed (with an indexer)."""
    packed: tuple[DType, int, DType, DType, str | None] = (DType.F8E4M3, 128, DType.F32, DType.BF16, None)
    """Fields of such a row: element type of the latent, elements that share a scale, type of the scales, element type
    of the rotary key, and the encoding of scales that lie in an order of their own.
    """
    blocks: tuple[int, DType] | None = None
    """The number of elements of K and V, or of a latent, that share a scale, and its type."""
    apart: Mapping[str, int] = {}
    """Scales that are a separate group, and the number of tokens whose scales each of their rows interleaves."""
    of: tuple[str, ...] = ("attention", "mla", "indexer", "conv", "ssm")
    """The kinds of caches that a model may have for this dtype to be possible."""
    backends: tuple[str, ...] = ()
    """Attention backends that support it; empty for all."""
    layouts: tuple[str, ...] = ()
    """Pool layouts that support it; empty for all."""
    page: int | None = None
    """Tokens of its pages, if it supports only one size."""
    by_sm: Mapping[int, KvDtype] = {}
    """Its form by compute capability, if it is not the same on all GPUs."""


Make = Callable[[int], list[Cache]]
"""Makes the caches of a model and its drafts, in pages of that many tokens."""


@attrs.frozen
class Arranged:
    """An engine's caches, in the order of their group ids, and its pools."""

    caches: list[Cache]
    slabs: Callable[[Geometry, int, int], list[Slab]]
    """Makes the slabs of one rank from a Description, the rank, and the number of blocks of its pool."""
    pieces: Mapping[int, int] = {}
    """By group id: how many items one block of the engine's tables is, if more than one."""


def caches(configs: Sequence[Config], page: int, kv: KvDtype, state: Callable[[Config], DType]) -> list[Cache]:
    """The caches of a target and its drafts, in the element types of an engine."""
    stored = []
    for model, config in enumerate(configs):
        for cache in specs(config, model, page, kv.element, state(text(config))):
            kind = cache_kind(cache)
            if kind == "attention" and kv.scaled:
                cache = _with_scales(cache)
            if kind == "mla" and (kv.row == "always" or (kv.row == "indexed" and config.get("index_head_dim"))):
                sizes = number(text(config), "kv_lora_rank"), number(text(config), "qk_rope_head_dim")
                cache = _row(cache, *sizes, kv.packed)
            if kind not in kv.of:
                raise bad("kv_dtype", f"one that supports layers of kind {kind}", "one that does not")
            stored += _blocks(cache, kv) if kv.blocks and kind in ("attention", "mla") else [cache]
    return stored


def kv_dtype(name: str, known: Mapping[str, KvDtype], setup: Setup) -> KvDtype:
    """The cache dtype of that name under a setup; raises LocalError(OUT_OF_RANGE) if the setup does not support it."""
    if name not in known:
        raise bad("kv_dtype", ", ".join(known), name)
    kv = known[name]
    if kv.by_sm:
        if setup.sm is None or setup.sm not in kv.by_sm:
            sms = ", ".join(map(str, sorted(kv.by_sm)))
            raise bad("sm", f"the GPUs' compute capability, as {name} depends on it: {sms}", setup.sm)
        kv = kv.by_sm[setup.sm]
    for path, wanted in (("backend", kv.backends), ("layout", kv.layouts)):
        if wanted and getattr(setup, path) not in (None, *wanted):
            raise bad(path, f"{', '.join(wanted)}, with {name}", getattr(setup, path))
    if kv.page not in (None, setup.page) and setup.page is not None:
        raise bad("page", f"{kv.page}, with {name}", setup.page)
    return kv


def cache_kind(cache: Cache) -> str:
    """attention, mla, indexer, conv or ssm, as the registry groups parts; scales for a cache of scales alone."""
    first = cache.group.parts[0].name
    kinds = {"k": "attention", "latent": "mla", "index": "indexer", "k_scale": "scales", "v_scale": "scales"}
    return kinds.get(first, first)


def model_dtype(config: Config) -> DType:
    """The element type of states: the config's for them, F32 for Kimi delta attention, else that of activations."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if config.get(key):
            return element_type({"dtype": config[key]})
    return DType.F32 if config.get("linear_attn_config") else element_type(config)


def _with_parts(
    cache: Cache, parts: Sequence[tuple[str, DType, int]], encodings: Mapping[str, str] | None = None
) -> Cache:
    """The same cache with parts of these names, types and bytes of a lane."""
    lanes, encoding = cache.group.parts[0].lanes, encodings or {}
    stated = tuple(
        Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=size, encoding=encoding.get(name))
        for name, dtype, size in parts
    )
    blocks = tuple((Block(lanes),) for _ in stated)
    return attrs.evolve(cache, group=attrs.evolve(cache.group, parts=stated), blocks=blocks)


def _with_scales(cache: Cache) -> Cache:
    sizes = [(p.name, DType(p.dtype), p.lane_bytes) for p in cache.group.parts]
    return _with_parts(cache, [row for n, d, size in sizes for row in ((n, d, size), (f"{n}_scale", DType.F32, 4))])


def _row(cache: Cache, latent: int, rope: int, packed: tuple[DType, int, DType, DType, str | None]) -> Cache:
    element, block, scale, rotary, encoding = packed
    values = "latent", element, bytes_of(element, latent)
    scales = "latent_scale", scale, bytes_of(scale, -(-latent // block))
    key = "rope", rotary, bytes_of(rotary, rope)
    if encoding is None:
        return _with_parts(cache, [values, scales, key])
    return _with_parts(cache, [values, key, scales], {"latent_scale": encoding})


def _blocks(cache: Cache, kv: KvDtype) -> list[Cache]:
    """A cache with the scales of its blocks, and a separate cache for each part of scales that lies apart."""
    assert kv.blocks is not None
    block, dtype = kv.blocks
    scales = {}
    for part in cache.group.parts:
        elements = part.lane_bytes * 8 // BITS[part.dtype]
        if elements % block:
            raise bad("kv_dtype", f"one whose blocks divide {elements} elements of {part.name}", f"blocks of {block}")
        scales[part.name] = f"{part.name}_scale", dtype, bytes_of(dtype, elements // block)
    parts = [
        part
        for p in cache.group.parts
        for part in ((p.name, DType(p.dtype), p.lane_bytes), scales[p.name])
        if part[0] not in kv.apart
    ]
    stored = [_with_parts(cache, parts)]
    for name, tokens in kv.apart.items():
        if cache.group.rows % tokens:
            raise bad("page", f"a multiple of {tokens}, as {name} lies by so many tokens", cache.group.rows)
        apart = _with_parts(cache, [(name, dtype, scales[name.removesuffix("_scale")][2] * tokens)])
        name, partial = f"{apart.group.name} {name}", tokens > 1 or None
        rows = cache.group.rows // tokens
        group = attrs.evolve(apart.group, name=name, rows=rows, tokens_per_row=tokens, partial=partial)
        stored.append(attrs.evolve(apart, group=group))
    return stored


def check_heads(cache: Cache, ranks: int) -> None:
    """Raise LocalError unless an engine can divide heads over so many ranks; heads of states are never replicated."""
    for part, blocks in zip(cache.group.parts, cache.blocks, strict=True):
        for block in blocks:
            units = block.lanes // block.unit
            copies = ranks % units == 0 and (KINDS[cache.group.kind].paged or len(blocks) > 1)
            if units > 1 and units % ranks and not copies:
                raise bad("tp", f"a size that divides {units} heads of {part.name} in {cache.group.name!r}", ranks)
