"""How an engine is started, as far as its pools depend on it, and the caches of a model in its element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType

import attrs

from kvproto.errors import check_type, check_whole
from kvproto.planning.cache import Block, Cache, bytes_of
from kvproto.planning.describe import element_type, specs
from kvproto.planning.families import Config, bad, number, text
from kvproto.planning.geometry import Geometry, Part
from kvproto.planning.kinds import kind_of
from kvproto.planning.layout import Parallel
from kvproto.planning.pools import Slab
from kvproto.wire.enums import DType

__all__ = ["Arranged", "KvDtype", "Make", "Setup", "caches", "check_heads", "kind_of_cache", "model_dtype"]


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

    def check(self) -> None:
        """Raise LocalError for what no engine has."""
        check_type("parallel", self.parallel, Parallel, "a kvproto.Parallel")
        self.parallel.check()
        for name in ("page", "dp"):
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
    """When a latent is F8 with an F32 scale for each 128 of it and a rotary key of BF16: never, always, or indexed."""


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
                cache = _row(cache, number(text(config), "kv_lora_rank"), number(text(config), "qk_rope_head_dim"))
            made.append(cache)
    return made


def kind_of_cache(cache: Cache) -> str:
    """attention, mla, indexer, conv or ssm: the group of the registry of parts."""
    first = cache.group.parts[0].name
    return {"k": "attention", "latent": "mla", "index": "indexer"}.get(first, first)


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
    sizes = [(p.name, p.dtype, p.lane_bytes) for p in cache.group.parts]
    return _with_parts(cache, [row for n, d, size in sizes for row in ((n, d, size), (f"{n}_scale", DType.F32, 4))])


def _row(cache: Cache, latent: int, rope: int) -> Cache:
    scales = bytes_of(DType.F32, -(-latent // 128))
    rows = [("latent", DType.F8E4M3, latent), ("latent_scale", DType.F32, scales), ("rope", DType.BF16, 2 * rope)]
    return _with_parts(cache, rows)


def check_heads(cache: Cache, ranks: int) -> None:
    """Raise LocalError where an engine does not divide heads so; heads of states are never on several ranks."""
    for part, blocks in zip(cache.group.parts, cache.blocks, strict=True):
        for block in blocks:
            units = block.lanes // block.unit
            copies = ranks % units == 0 and (kind_of(cache.group).paged or len(blocks) > 1)
            if units > 1 and units % ranks and not copies:
                raise bad("tp", f"a size that divides {units} heads of {part.name} in {cache.group.name!r}", ranks)
