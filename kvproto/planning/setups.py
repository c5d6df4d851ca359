"""How an engine is started, as far as its pools depend on it, and the caches of a model in its element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType

import attrs

from kvproto.errors import check_type, check_whole
from kvproto.planning.cache import BITS, Block, Cache, bytes_of
from kvproto.planning.describe import element_type, specs
from kvproto.planning.families import Config, bad, number, text
from kvproto.planning.geometry import Geometry, Part
from kvproto.planning.kinds import kind_of
from kvproto.planning.layout import Parallel
from kvproto.planning.pools import Slab
from kvproto.wire.enums import DType

__all__ = ["Arranged", "KvDtype", "Make", "Setup", "caches", "check_heads", "kind_of_cache", "kv_dtype", "model_dtype"]


@attrs.frozen
class Setup:
    """Options of an engine; None is its default."""

    parallel: Parallel = attrs.field(factory=Parallel)
    page: int | None = None
    """Tokens of a page: block_size, page_size, tokens_per_block."""
    kv_dtype: str = "auto"
    backend: str | None = None
    """Attention backend of vLLM."""
    layout: str | None = None
    """Order of a pool: LBNHC and five more of vLLM, NHD or HND of SGLang."""
    state_layout: str = "SD"
    """Order of vLLM's conv states: SD, or DS with channels outside."""
    dp: int = 1
    """Attention data parallel over the tensor-parallel ranks (SGLang): a replica has tp / dp ranks."""
    state_dtype: DType | None = None
    """Of recurrent states."""
    sm: int | None = None
    """Compute capability of the GPUs, 10 times the major one, where a pool depends on it: 90, 100, 120."""

    def check(self) -> None:
        """Raise LocalError for what no engine has."""
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
    """What a cache dtype of an engine makes of K and V, and of a latent."""

    element: DType | None = None
    """None: that of the model."""
    scaled: bool = False
    """Behind K and V of each token and head lies an F32 scale."""
    row: str = "never"
    """When a latent and its rotary key are a packed row with scales: never, always, or indexed."""
    packed: tuple[DType, int, DType, DType, str | None] = (DType.F8E4M3, 128, DType.F32, DType.BF16, None)
    """Such a row: element of the latent, how many have a scale, its type, element of the rotary key, and the encoding
    of scales that lie in another order.
    """
    blocks: tuple[int, DType] | None = None
    """So many elements of K and V, or of a latent, have a scale of this type."""
    apart: Mapping[str, int] = {}
    """Scales that are a group of their own, and how many tokens a row of them stands for: within it they are mixed."""
    of: tuple[str, ...] = ("attention", "mla", "indexer", "conv", "ssm")
    """The kinds of caches that an engine has beside such pages."""
    backends: tuple[str, ...] = ()
    """Attention backends that take it; none: any."""
    layouts: tuple[str, ...] = ()
    """Orders of a pool that it may have; none: any."""
    page: int | None = None
    """Tokens of its pages, where no other number will do."""
    by_sm: Mapping[int, KvDtype] = {}
    """What it is on GPUs of these compute capabilities, where it is not the same on all."""


Make = Callable[[int], list[Cache]]
"""The caches of a model and its drafts, in pages of so many tokens."""


@attrs.frozen
class Arranged:
    """An engine's caches, group ids in order, and its pools."""

    caches: list[Cache]
    slabs: Callable[[Geometry, int, int], list[Slab]]
    """Of a Description's rank whose pool has a number of blocks."""
    pieces: Mapping[int, int] = {}
    """Items of a group that one block of the engine's tables is, where that is more than one."""


def caches(configs: Sequence[Config], page: int, kv: KvDtype, state: Callable[[Config], DType]) -> list[Cache]:
    """The caches of a target and its drafts, in the element types of an engine."""
    made = []
    for model, config in enumerate(configs):
        for cache in specs(config, model, page, kv.element, state(text(config))):
            kind = kind_of_cache(cache)
            if kind == "attention" and kv.scaled:
                cache = _scaled(cache)
            if kind == "mla" and (kv.row == "always" or (kv.row == "indexed" and config.get("index_head_dim"))):
                sizes = number(text(config), "kv_lora_rank"), number(text(config), "qk_rope_head_dim")
                cache = _row(cache, *sizes, kv.packed)
            if kind not in kv.of:
                raise bad("kv_dtype", f"one that layers of kind {kind} have too", "one that they lack")
            made += _blocks(cache, kv) if kv.blocks and kind in ("attention", "mla") else [cache]
    return made


def kv_dtype(name: str, known: Mapping[str, KvDtype], setup: Setup) -> KvDtype:
    """The row of a cache dtype; raises LocalError for a setup that it cannot have."""
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


def kind_of_cache(cache: Cache) -> str:
    """attention, mla, indexer, conv or ssm: the group of the registry of parts; scales, where they are apart."""
    first = cache.group.parts[0].name
    kinds = {"k": "attention", "latent": "mla", "index": "indexer", "k_scale": "scales", "v_scale": "scales"}
    return kinds.get(first, first)


def model_dtype(config: Config) -> DType:
    """Of activations, unless the config has one for states; delta attention of Kimi keeps F32."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if config.get(key):
            return element_type({"dtype": config[key]})
    return DType.F32 if config.get("linear_attn_config") else element_type(config)


def _with_parts(cache: Cache, parts: Sequence[tuple[str, DType, int]]) -> Cache:
    lanes = cache.group.parts[0].lanes
    made = tuple(Part(name=n, dtype=d, lanes=lanes, lane_bytes=size) for n, d, size in parts)
    return attrs.evolve(cache, group=attrs.evolve(cache.group, parts=made), blocks=tuple((Block(lanes),) for _ in made))


def _scaled(cache: Cache) -> Cache:
    sizes = [(p.name, DType(p.dtype), p.lane_bytes) for p in cache.group.parts]
    return _with_parts(cache, [row for n, d, size in sizes for row in ((n, d, size), (f"{n}_scale", DType.F32, 4))])


def _row(cache: Cache, latent: int, rope: int, packed: tuple[DType, int, DType, DType, str | None]) -> Cache:
    element, block, scale, rotary, encoding = packed
    rows = [
        ("latent", element, bytes_of(element, latent)), ("latent_scale", scale, bytes_of(scale, -(-latent // block))),
        ("rope", rotary, bytes_of(rotary, rope)),
    ]  # fmt: skip
    if encoding is None:
        return _with_parts(cache, rows)
    made = _with_parts(cache, [rows[0], rows[2], rows[1]])  # behind the rotary key
    *before, scales = made.group.parts
    parts = (*before, attrs.evolve(scales, encoding=encoding))
    return attrs.evolve(made, group=attrs.evolve(made.group, parts=parts))


def _blocks(cache: Cache, kv: KvDtype) -> list[Cache]:
    """A cache with the scales of its blocks, and those that are apart as caches of their own."""
    assert kv.blocks is not None
    block, dtype = kv.blocks
    scales = {}
    for part in cache.group.parts:
        elements = part.lane_bytes * 8 // BITS[part.dtype]
        if elements % block:
            raise bad("kv_dtype", f"one whose blocks divide {elements} elements of {part.name}", f"blocks of {block}")
        scales[part.name] = f"{part.name}_scale", dtype, bytes_of(dtype, elements // block)
    rows = [
        row
        for p in cache.group.parts
        for row in ((p.name, DType(p.dtype), p.lane_bytes), scales[p.name])
        if row[0] not in kv.apart
    ]
    made = [_with_parts(cache, rows)]
    for name, tokens in kv.apart.items():
        if cache.group.rows % tokens:
            raise bad("page", f"a multiple of {tokens}, as {name} lies by so many tokens", cache.group.rows)
        one = _with_parts(cache, [(name, dtype, scales[name.removesuffix("_scale")][2] * tokens)])
        group = attrs.evolve(
            one.group, name=f"{one.group.name} {name}", rows=cache.group.rows // tokens, tokens_per_row=tokens,
            partial=True if tokens > 1 else None,
        )  # fmt: skip
        made.append(attrs.evolve(one, group=group))
    return made


def check_heads(cache: Cache, ranks: int) -> None:
    """Raise LocalError where an engine does not divide heads so; heads of states are never on several ranks."""
    for part, blocks in zip(cache.group.parts, cache.blocks, strict=True):
        for block in blocks:
            units = block.lanes // block.unit
            copies = ranks % units == 0 and (kind_of(cache.group).paged or len(blocks) > 1)
            if units > 1 and units % ranks and not copies:
                raise bad("tp", f"a size that divides {units} heads of {part.name} in {cache.group.name!r}", ranks)
