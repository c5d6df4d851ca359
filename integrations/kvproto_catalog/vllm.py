"""vLLM's pools: one allocation of blocks, which the layers of every block table overlay; releases 0.32 and 0.33.

A layer's block is [heads, tokens, content], and a layout orders these, layers and blocks: LBNHC and five more.
Layers that need equal blocks share a block table; hybrids have several tables with equally many layers each.
"""

from collections.abc import Mapping
from functools import partial
from math import lcm

import attrs

from kvproto.errors import bad
from kvproto.planning.cache import Cache
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import KINDS
from kvproto_catalog.config import Config
from kvproto_catalog.models import Arranged, Make, Setup, cache_kind
from kvproto_catalog.tensors import Slab


@attrs.frozen
class Backend:
    """An attention backend: the layouts and block sizes that its kernels support."""

    layouts: tuple[str, ...] = ()
    """The preferred one first; empty for all."""
    multiple: int = 1
    sizes: tuple[int, ...] = ()
    """Block sizes of its kernels in tokens, if there are only a few; a larger block consists of several of them."""
    planes: bool = False
    """Whether a block is K of all heads, then V of all heads, instead of K and V side by side in each head."""
    encoding: str | None = None
    """Encoding of bytes that strides cannot describe."""

    def kernel_block(self, block: int) -> int:
        """Tokens of a kernel's block within a block of `block` tokens; raises LocalError if none fits."""
        fits = [n for n in self.sizes or (block,) if block % n == 0 and block % self.multiple == 0]
        if not fits:
            raise bad("page", f"a multiple of {self.sizes or self.multiple}", block)
        return max(fits)

    @property
    def least(self) -> int:
        """The smallest block of its kernels."""
        return min(self.sizes, default=self.multiple)


LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""All layouts, the default first. With KV connectors vLLM chooses LBHNC if the backend supports it."""
BACKENDS: dict[str, dict[str, Backend]] = {
    "attention": {
        "FLASH_ATTN": Backend(multiple=16),
        "FLASH_ATTN_DIFFKV": Backend(multiple=16),
        "TRITON_ATTN": Backend(multiple=16),
        "FLASHINFER": Backend(sizes=(16, 32, 64)),
        "FLEX_ATTENTION": Backend(("LBNHC",), multiple=16),
        "HPC_ATTN": Backend(("LBNHC",), sizes=(64,)),
        "B12X": Backend(("LBHNC", "BLHNC"), sizes=(64, 128), planes=True),
        "ROCM_AITER_FA": Backend(("LBHNC", "LHBNC"), sizes=(16, 32)),
        "ROCM_AITER_UNIFIED_ATTN": Backend(("LBHNC", "LHBNC"), multiple=16),
        "ROCM_ATTN": Backend(("LHBNC", "LBHNC"), multiple=16, planes=True, encoding="vllm.rocm_attn"),
        "CPU_ATTN": Backend(("LBHNC",), multiple=32, encoding="vllm.cpu_attn"),
    },
    "mla": {
        "FLASHMLA": Backend(sizes=(64,)),
        "CUTLASS_MLA": Backend(sizes=(128,)),
        "FLASHINFER_MLA": Backend(sizes=(32, 64)),
        "FLASH_ATTN_MLA": Backend(multiple=16),
        "TOKENSPEED_MLA": Backend(sizes=(32, 64)),
        "TRITON_MLA": Backend(multiple=16),
        "ROCM_AITER_MLA": Backend(),
        "CPU_MLA": Backend(sizes=(16,)),
    },
    "sparse": {
        "FLASHMLA_SPARSE": Backend(multiple=64),
        "FLASH_ATTN_MLA_SPARSE": Backend(multiple=64),
        "FLASHINFER_MLA_SPARSE": Backend(multiple=32),
        "FLASHINFER_MLA_SPARSE_SM120": Backend(multiple=64),
        "FLASHINFER_MLA_SPARSE_SM90": Backend(multiple=64),
    },
}
"""By kind of attention: K and V, a latent, or a latent with an index; the default first."""
_BLOCK = 16
"""Tokens of a block, unless the kernels of a backend need more."""
_MLA_BLOCK = 128
_BY_PLANES = ("nvfp4", "nvfp4_4over6")
"""Cache dtypes whose blocks are all of K, the scales of K, all of V, and the scales of V."""


@attrs.frozen
class _Layer:
    """A layer as vLLM's cache manager sees it: what decides its block table, its bytes, and its caches."""

    table: tuple[str, bool]
    """Its kind, and whether its tokens are dealt over ranks: layers that agree in both may share a block table."""
    page: int
    order: str
    layer: int
    caches: tuple[int, ...]


def arrange(make: Make, setup: Setup, target: Config) -> Arranged:
    """The caches, divided into a group for each block table, and the slabs of the one allocation; raises LocalError."""
    backends = _backends(make(_BLOCK), setup)
    block = setup.page or max([_BLOCK, *(backend.least for backend in backends.values())])
    caches = make(block)
    states = [c for c in caches if KINDS[c.group.kind].is_state]
    if states and len(states) < len(caches):
        block = _aligned(make, block, [*backends.values()], setup)
        caches = make(block)
    caches = [c.sharded() if cache_kind(c) == "indexer" else c for c in caches]  # dealt like the latent that it indexes
    layout = _layout([*backends.values()], caches, setup)
    layers = _layers(caches, backends, layout, setup)
    if states:
        widest = max(layer.page for layer in layers)
        layers = [attrs.evolve(layer, page=widest) if layer.table[0] == "state" else layer for layer in layers]
    return _divided(caches, _tables(layers), backends, layout, block, setup)


def _needs(cache: Cache, caches: list[Cache]) -> str:
    """The kind of attention backend that a cache needs."""
    indexed = {c.group.model for c in caches if cache_kind(c) == "indexer"}
    kind = cache_kind(cache)
    if kind == "scales":
        return "attention"
    return "sparse" if kind in ("mla", "indexer") and cache.group.model in indexed else kind


def _backends(caches: list[Cache], setup: Setup) -> dict[str, Backend]:
    """The backend of each kind of attention that there is; the first is the target's."""
    kinds = dict.fromkeys(n for c in caches if (n := _needs(c, caches)) in BACKENDS)
    if setup.backend and not any(setup.backend in BACKENDS[kind] for kind in kinds):
        raise bad("backend", ", ".join(name for kind in kinds for name in BACKENDS[kind]), setup.backend)
    return {kind: BACKENDS[kind].get(setup.backend or "", next(iter(BACKENDS[kind].values()))) for kind in kinds}


def _layout(backends: list[Backend], caches: list[Cache], setup: Setup) -> str:
    """The requested layout, or the first that all backends support; blocks of unequal size must be contiguous."""
    known = [layout for layout in LAYOUTS if all(layout in (b.layouts or LAYOUTS) for b in backends)]
    ranks = setup.parallel.tp
    if len({(_width(c, 0, ranks), _bytes(c, ranks), KINDS[c.group.kind].is_state) for c in caches}) > 1:
        known = [layout for layout in known if {*layout[:2]} == {"L", "B"}]
    preferred = [b.layouts[0] for b in backends if b.layouts and b.layouts[0] in known]
    if not known or (setup.layout is not None and setup.layout not in known):
        raise bad("layout", ", ".join(known) or "a backend with a layout of contiguous blocks", setup.layout)
    return setup.layout or next(iter([*preferred, *known]))


def _aligned(make: Make, block: int, backends: list[Backend], setup: Setup) -> int:
    """Tokens of a block that is at least as large as a recurrent layer's state."""
    least = max(backends[0].least, block)
    latent = any(cache_kind(c) == "mla" for c in make(block))
    least = max(least, _MLA_BLOCK) if latent else least
    ranks = setup.parallel.tp
    caches = make(least)
    a_token = max(_bytes(c, ranks) for c in caches if KINDS[c.group.kind].paged) // least
    state = sum(_bytes(c, ranks) for c in caches if KINDS[c.group.kind].is_state and c.group.model == 0)
    whole = lcm(*(b.least for b in backends))
    wanted = -(-least * -(-state // (least * a_token)) // whole) * whole
    return max(block, wanted)


def _width(cache: Cache, part: int, ranks: int) -> int:
    """Lanes of a part on a rank."""
    return sum(hi - lo for lo, hi in (block.cut(0, ranks) for block in cache.blocks[part]))


def _bytes(cache: Cache, ranks: int) -> int:
    """Bytes of one item of one layer on a rank."""
    return cache.group.rows * sum(_width(cache, i, ranks) * p.lane_bytes for i, p in enumerate(cache.group.parts))


def _layers(caches: list[Cache], backends: dict[str, Backend], layout: str, setup: Setup) -> list[_Layer]:
    """All layers, the target's first; the conv and recurrent states of a layer count as one."""
    layers: dict[tuple[int, bool, str, int], _Layer] = {}
    outer = layout.translate({ord(c): None for c in "HNC"})
    for i, cache in enumerate(caches):
        group, kind = cache.group, cache_kind(cache)
        is_state = KINDS[group.kind].is_state
        dealt = setup.parallel.dcp > 1 and not is_state and (cache.dealt or group.model == 0)
        ranks = setup.parallel.tp // (setup.parallel.dcp if dealt else 1)
        inner = "PHN" if is_state and setup.state_layout == "DS" else "PNH"
        order = outer + inner if is_state or kind == "indexer" else layout.replace("C", "P")
        if kind == "attention" and backends[kind].planes:
            order = layout.translate(str.maketrans("HC", "PH"))
        if setup.kv_dtype in _BY_PLANES and kind in ("attention", "scales"):
            order = f"{outer}P{layout[2:4]}"
        # separate scales lie in the blocks of the group that they scale
        name = group.name.removesuffix(f" {group.parts[0].name}") if kind == "scales" else group.name
        last = name.split()[-1]
        table = "state" if is_state else last if last in ("window", "chunked") else "full"
        for layer in cache.layers:
            key = group.model, is_state, "state" if is_state else name, layer
            before = layers.get(key)
            page = _bytes(cache, ranks) + (before.page if before else 0)
            layers[key] = _Layer((table, dealt), page, order, layer, (*(before.caches if before else ()), i))
    return sorted(layers.values(), key=lambda layer: (caches[layer.caches[0]].group.model, layer.layer))


def _tables(layers: list[_Layer]) -> list[list[_Layer]]:
    """The layers of each block table: one table if all are of one kind, else tables of equally many layers."""
    if len({layer.table for layer in layers}) == 1:
        return [layers]
    if len(sizes := sorted({layer.page for layer in layers})) > 1:
        blocks = f"blocks of {', '.join(map(str, sizes))} bytes"
        raise bad("config", "layers of several kinds with blocks of one size", blocks)
    kinds: dict[tuple[tuple[str, bool], str], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault((layer.table, layer.order), []).append(layer)
    fewest, most = (f(map(len, kinds.values())) for f in (min, max))
    number = most if most < fewest * 1.5 else fewest
    tables = []
    for of_kind in kinds.values():
        count = -(-len(of_kind) // number)
        tables += [of_kind[i::count] for i in range(count)]
    return tables


def _divided(
    caches: list[Cache], tables: list[list[_Layer]], backends: dict[str, Backend], layout: str, block: int, setup: Setup
) -> Arranged:
    """A group for each cache and block table, and the slabs that hold the tables' layers."""
    divided: list[Cache] = []
    pieces: dict[int, int] = {}
    ids: dict[tuple[int, int], int] = {}
    for c, cache in enumerate(caches):
        homes = [t for t, table in enumerate(tables) if any(c in layer.caches for layer in table)]
        group, kind = cache.group, cache_kind(cache)
        backend = backends.get(_needs(cache, caches))
        rows = block
        if backend is not None and KINDS[group.kind].paged:
            kernel_rows = backend.kernel_block(block)
            planes = backend.planes or setup.kv_dtype in _BY_PLANES
            if kind in ("attention", "scales") and (planes or "HN" in layout):
                rows = kernel_rows
            if backend.encoding and kind == "attention":
                parts = tuple(attrs.evolve(part, encoding=backend.encoding) for part in group.parts)
                group = attrs.evolve(group, parts=parts)
        if rows < block:
            group = attrs.evolve(group, rows=rows // group.tokens_per_row)
        for n, t in enumerate(homes):
            ids[c, t] = len(divided)
            if rows < block:
                pieces[len(divided)] = block // rows
            name = group.name if len(homes) == 1 else f"{group.name} {n}"
            layers = tuple(layer.layer for layer in tables[t] if c in layer.caches)
            divided.append(attrs.evolve(cache, group=attrs.evolve(group, name=name), layers=layers))
    return Arranged(divided, partial(_slabs, tables, ids, divided, pieces), pieces)


def _slabs(
    tables: list[list[_Layer]],
    of: Mapping[tuple[int, int], int],
    groups: list[Cache],
    pieces: Mapping[int, int],
    geometry: Geometry,
    rank: int,
    blocks: int,
) -> list[Slab]:
    """The slabs of the tables' layers, each table from byte 0 on; `of` has group ids by index of cache and of table."""
    owned = {o.group: set(o.layers.tolist()) for r in geometry.ranks if r.rank == rank for o in r.owns}
    mine = [
        [layer for layer in table if all(layer.layer in owned.get(of[c, t], ()) for c in layer.caches)]
        for t, table in enumerate(tables)
    ]
    widest = max(sum(layer.page for layer in table) for table in mine)
    slabs = []
    for t, table in enumerate(mine):
        offset = 0
        shapes: dict[tuple[str, int, tuple[str, bool]], list[_Layer]] = {}
        for layer in table:
            shapes.setdefault((layer.order, layer.page, layer.table), []).append(layer)
        for (order, page, _), layers in shapes.items():
            places = tuple((layer.layer, tuple(of[c, t] for c in layer.caches)) for layer in layers)
            ids = dict.fromkeys(id for _, of_layer in places for id in of_layer)
            outermost = order.startswith("B")
            least = 0 if ids.keys() & pieces.keys() else page, widest if outermost else 0
            name = "+".join(dict.fromkeys(groups[id].group.name for id in ids))
            slabs.append(Slab(name, order, places, *least, "kv", offset))
            offset += len(layers) * page * (1 if outermost else blocks)
    return slabs
