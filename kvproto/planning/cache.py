"""The cache of some layers of one model, stated in a line, before it is known which rank owns what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from kvproto.errors import LocalError, bad, check_type, check_whole
from kvproto.planning import geometry as g
from kvproto.planning.conversion import stating
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import KINDS, TOKENS
from kvproto.planning.parts import CONVERSIONS
from kvproto.wire.enums import DType, ErrorCode, ItemKind

BITS: dict[int, int] = {
    DType.F32: 32, DType.F16: 16, DType.BF16: 16, DType.F8E4M3: 8, DType.F8E5M2: 8, DType.F8E8M0: 8, DType.F4E2M1: 4,
    DType.U8: 8, DType.I8: 8, DType.U32: 32, DType.I32: 32, DType.I64: 64,
}  # fmt: skip
"""Bits of an element of each known type."""

Sizes = tuple[DType, int, int | tuple[int, ...]]
"""Element type, lanes, and bytes of a lane or of each of its sections."""
LayerIds = int | Iterable[int]
"""A number of layers, or their ids."""
BLOCK_SCALED: dict[str, dict[str, Any]] = {
    "NVFP4": {"dtype": DType.F4E2M1, "scale_block": 16, "scale_dtype": DType.F8E4M3},
    "MXFP4": {"dtype": DType.F4E2M1, "scale_block": 32, "scale_dtype": DType.F8E8M0},
}
"""P of `Cache.gqa` and `Cache.mla`, by the name of the format."""


@attrs.frozen
class Block:
    """Lanes that TP ranks divide in units of `unit`, such as a head's channels; more ranks than units share them."""

    lanes: int
    unit: int = 1
    shares: tuple[tuple[int, int], ...] | None = None
    """Lanes [lo, hi) of each rank, for engines that divide them differently."""

    def cut(self, rank: int, ranks: int) -> tuple[int, int]:
        """Lanes [lo, hi) of `rank` out of `ranks`; raises LocalError(OUT_OF_RANGE) if there are not as many shares."""
        if self.shares is not None:
            if len(self.shares) != ranks:
                raise bad("Cache.divided", f"lanes of each of {ranks} ranks", len(self.shares))
            return self.shares[rank]
        units = self.lanes // self.unit
        lo = units * rank // ranks
        hi = lo + 1 if ranks >= units else units * (rank + 1) // ranks
        return lo * self.unit, hi * self.unit


Blocks = Sequence[Block]
T = TypeVar("T")
P = ParamSpec("P")


def called(make: Callable[P, T]) -> Callable[P, T]:
    """Make missing and unknown arguments of `make` a LocalError instead of a TypeError."""
    signature = inspect.signature(make)

    @wraps(make)
    def checked(*args: P.args, **named: P.kwargs) -> T:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"Cache.{make.__name__}", advice=str(error)) from None
        return make(*args, **named)

    return checked


_LEAST = {"model": 0, "rope": 0, "scratch_rows": 0}
"""The least values of arguments that may be less than 1."""
_NO_NUMBERS = ("name", "layers", "parts", "blocks", "part", "split", "axis", "of")


def _checked(make: Callable[Concatenate[type[Cache], P], T]) -> Callable[Concatenate[type[Cache], P], T]:
    """Raise LocalError, naming the argument, for a number that is too small or a dtype that is no `DType`."""

    needed = {name: row.default is row.empty for name, row in inspect.signature(make).parameters.items()}

    @wraps(make)
    def checked(cls: type[Cache], /, *args: P.args, **named: P.kwargs) -> T:
        for name, value in named.items():
            if name.endswith("dtype") and (value is not None or name != "scale_dtype"):
                check_type(f"Cache.{name}", value, DType, "a kvproto.DType")
            elif name not in _NO_NUMBERS and (value is not None or needed.get(name)):
                check_whole(f"Cache.{name}", value, _LEAST.get(name, 1))
        return make(cls, *args, **named)

    return called(checked)


@attrs.frozen
class Cache:
    """One cache of some layers of one model, before it is known which rank owns what.

    Sizes are in elements of `dtype`, pages in tokens, and `layers` is a number of layers or their ids. Whether K and V
    are joint or apart, NHD or HND, padded or not, is stated by the strides of Register, not here. All constructors
    raise LocalError(OUT_OF_RANGE) for arguments that cannot be.
    """

    group: Group
    """`lay_out` gives it an id."""
    layers: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    """For each part, the blocks that follow each other on its lane axis."""
    dealt: bool | None = None
    """Whether context-parallel ranks deal its tokens among themselves; None: only pages of the target's tokens."""
    own: tuple[tuple[str, Any], ...] = ()
    """Sizes of `Parallel` that differ for this cache, by name."""
    copies: bool = True
    """If its own sizes need fewer ranks than a pipeline stage has: whether consecutive ranks hold the same, or none."""
    everywhere: bool = False
    """Whether every pipeline stage holds all of its layers."""

    @called
    def over(
        self,
        *,
        tp: int | None = None,
        cp: int | None = None,
        dcp: int | None = None,
        interleave: int | None = None,
        origin: int | None = None,
        deal: str | tuple[int, ...] | None = None,
        stages: tuple[int, ...] | None = None,
        virtual: int | None = None,
        copies: bool = True,
    ) -> Cache:
        """The same cache with sizes of `Parallel` that differ from the engine's; the others stay as they are.

        A draft of TP 2 in an engine of TP 8 is `over(tp=2)`: ranks 0 to 3 hold its first half and ranks 4 to 7 the
        other. With `copies=False` only ranks 0 and 1 hold it. Naming `stages` divides a draft over pipeline stages
        instead of keeping it on the last, and naming a deal has its tokens dealt. Raises LocalError(OUT_OF_RANGE) for a
        deal of items that are not pages, and `lay_out` does for sizes that the engine's ranks cannot have.
        """
        deals = {"dcp": dcp, "interleave": interleave, "origin": origin, "deal": deal}
        named = {"tp": tp, "cp": cp, "stages": stages, "virtual": virtual} | deals
        own = tuple((name, size) for name, size in named.items() if size is not None)
        deals_it = (cp or 1) > 1 or (dcp or 1) > 1 or any(x is not None for x in (interleave, origin, deal))
        for name in (name for name, size in deals.items() if size is not None):
            self._check_paged(f"over.{name}")
        dealt = True if deals_it and self.dealt is None and KINDS[self.group.kind].paged else self.dealt
        return attrs.evolve(self, own=own, copies=copies, dealt=dealt)

    def converts(self, *names: str, scales: Mapping[str, float | Sequence[float]] | None = None) -> Cache:
        """The same cache, for peers that have it in the other form of one of these conversions (feature CONVERT).

        `names` are those of spec/v1/conversion.md: "e4m3_block" if scales are parts of the FP8 cache (`scale_block`),
        or "e4m3_tensor", whose FP8 cache states them: `scales` has, by part, one for all layers, or one for each layer
        id from 0 on. Raises LocalError(OUT_OF_RANGE) for names or parts that there are not.
        """
        for name in names:
            if name not in CONVERSIONS:
                raise bad("Cache.converts", ", ".join(CONVERSIONS), repr(name))
        stated = dict(scales or {})
        if unknown := stated.keys() - {part.name for part in self.group.parts}:
            raise bad("Cache.converts", ", ".join(part.name for part in self.group.parts), repr(min(unknown)))
        return attrs.evolve(self, group=stating(self.group, names, stated))

    def replicated(self) -> Cache:
        """The same cache with every token on each context-parallel rank, for the heads of its TP rank."""
        return attrs.evolve(self, dealt=False)

    def sharded(self) -> Cache:
        """The same cache, dealt among context-parallel ranks; raises LocalError(OUT_OF_RANGE) for items but pages."""
        self._check_paged("sharded")
        return attrs.evolve(self, dealt=True)

    def on_each_stage(self) -> Cache:
        """The same cache on all pipeline stages, such as a request's state that layers of all of them read."""
        return attrs.evolve(self, everywhere=True)

    def _check_paged(self, method: str) -> None:
        if not KINDS[self.group.kind].paged:
            raise bad(f"{self.group.name!r}.{method}", "pages, as tokens are dealt by rows", "items of another kind")

    def along(self, axis: str) -> Cache:
        """The same cache with rows that stand for positions of `axis`, such as "image", instead of tokens.

        Raises LocalError(OUT_OF_RANGE) for items that are not pages, for a name not of 1 to 64 bytes, and for "tokens".
        """
        check_type("axis", axis, str, 'the name of an axis, such as "image"')
        if not KINDS[self.group.kind].paged or axis == TOKENS or not 0 < len(axis.encode()) <= 64:
            yours = repr(axis) if KINDS[self.group.kind].paged else "items of another kind"
            raise bad(f"{self.group.name!r}.along", f"pages, and a name of 1 to 64 bytes, not {TOKENS!r}", yours)
        return attrs.evolve(self, group=attrs.evolve(self.group, axis=axis))

    @classmethod
    @_checked
    def gqa(
        cls,
        name: str,
        layers: LayerIds,
        *,
        kv_heads: int,
        head_dim: int,
        page: int,
        v_head_dim: int | None = None,
        dtype: DType = DType.BF16,
        scale_block: int | None = None,
        scale_dtype: DType | None = None,
        model: int = 0,
    ) -> Cache:
        """Paged K and V of multi-head or grouped-query attention, with a scale for every `scale_block` elements if set.

        NVFP4 is F4E2M1 with blocks of 16 and scales of F8E4M3, and its scale of the whole tensor is a fact; MXFP4 is
        F4E2M1 with blocks of 32 and scales of F8E8M0 (`BLOCK_SCALED`).
        """
        dims = {"k": head_dim, "v": v_head_dim or head_dim}
        parts: dict[str, Sizes] = {p: (dtype, kv_heads, bytes_of(dtype, n, "Cache.head_dim")) for p, n in dims.items()}
        parts |= scales_of(dims, kv_heads, scale_block, scale_dtype)
        return cls.paged(name, layers, parts=parts, page=page, model=model)

    @classmethod
    @_checked
    def mla(
        cls,
        name: str,
        layers: LayerIds,
        *,
        latent: int,
        rope: int,
        page: int,
        dtype: DType = DType.BF16,
        scale_block: int | None = None,
        scale_dtype: DType | None = None,
        split: bool = False,
        model: int = 0,
    ) -> Cache:
        """Paged latent of multi-head latent attention, rope part included: one lane, whole on every rank.

        With `split` the two lie in separate buffers; they are sections of one part, so a peer may keep them in one.
        `scale_block` and `scale_dtype` are as in `gqa`.
        """
        pieces = {"latent": latent, "rope": rope} if split else {"latent": latent + rope}
        sizes = tuple(bytes_of(dtype, n, f"Cache.{piece}") for piece, n in pieces.items())
        parts: dict[str, Sizes] = {"latent": (dtype, 1, sizes if split else sizes[0])}
        parts |= scales_of({"latent": latent + rope}, 1, scale_block, scale_dtype)
        return cls.paged(name, layers, parts=parts, page=page, model=model)

    @classmethod
    @_checked
    def cross(
        cls,
        name: str,
        layers: LayerIds,
        *,
        kv_heads: int,
        head_dim: int,
        page: int,
        dtype: DType = DType.BF16,
        axis: str = "image",
        model: int = 0,
    ) -> Cache:
        """Paged K and V of cross-attention: a row for every position of `axis` that an encoder saw."""
        sizes = (dtype, kv_heads, bytes_of(dtype, head_dim, "Cache.head_dim"))
        parts = dict.fromkeys(("cross_k", "cross_v"), sizes)
        return cls.paged(name, layers, parts=parts, page=page, model=model).along(axis)

    @classmethod
    @_checked
    def encoder(
        cls, name: str, *, dim: int, page: int, dtype: DType = DType.BF16, axis: str = "image", model: int = 0
    ) -> Cache:
        """Paged output of an encoder, in layer 0: an embedding for every position of `axis`, whole on every rank."""
        parts = {"embedding": (dtype, 1, bytes_of(dtype, dim, "Cache.dim"))}
        return cls.paged(name, 1, parts=parts, page=page, model=model).along(axis)

    @classmethod
    @_checked
    def indexer(
        cls,
        name: str,
        layers: LayerIds,
        *,
        head_dim: int,
        page: int,
        dtype: DType = DType.F8E4M3,
        scale_block: int | None = 128,
        model: int = 0,
    ) -> Cache:
        """Paged keys of a sparse-attention indexer with an F32 scale for every `scale_block`; whole on every rank."""
        parts: dict[str, Sizes] = {"index": (dtype, 1, bytes_of(dtype, head_dim, "Cache.head_dim"))}
        parts |= scales_of({"index": head_dim}, 1, scale_block)
        return cls.paged(name, layers, parts=parts, page=page, model=model).replicated()

    @classmethod
    @_checked
    def page_scales(
        cls, name: str, layers: LayerIds, *, page: int, kv_heads: int | None = None, of: str = "kv", model: int = 0
    ) -> Cache:
        """One F32 scale for each page and KV head of K and of V, or with `of="latent"` one for each page.

        Both sides must have equal pages. The scale of a page that is not full moves too, so a fetch begins where
        a page does (KVP-GRANT-ROW). The scale of a whole tensor is no cache, but a fact.
        """
        if of not in ("kv", "latent"):
            raise bad("Cache.of", "'kv' or 'latent'", repr(of))
        if (kv_heads is None) == (of == "kv"):
            raise bad("Cache.kv_heads", "the KV heads of K and V, and none of a latent", f"{kv_heads} of {of!r}")
        names = ("k_scale", "v_scale") if of == "kv" else ("latent_scale",)
        parts = tuple(g.Part(name=p, dtype=DType.F32, lanes=kv_heads or 1, lane_bytes=4) for p in names)
        rows: dict[str, Any] = {"rows": 1, "tokens_per_row": page, "partial": True}
        return cls._of(name, layers, parts, kind=ItemKind.PAGE, model=model, **rows)

    @classmethod
    @_checked
    def compressed(
        cls,
        name: str,
        layers: LayerIds,
        *,
        dim: int,
        tokens_per_row: int,
        page_rows: int,
        dtype: DType = DType.BF16,
        part: str = "latent",
        model: int = 0,
    ) -> Cache:
        """Pages of `page_rows` rows that each cover `tokens_per_row` tokens (4 or 128, say), in one lane of `part`."""
        parts = (g.Part(name=part, dtype=dtype, lanes=1, lane_bytes=bytes_of(dtype, dim, "Cache.dim")),)
        rows: dict[str, Any] = {"rows": page_rows, "tokens_per_row": tokens_per_row}
        return cls._of(name, layers, parts, kind=ItemKind.PAGE, model=model, **rows)

    @classmethod
    @_checked
    def window(
        cls,
        name: str,
        layers: LayerIds,
        *,
        kv_heads: int,
        head_dim: int,
        ring_rows: int,
        dtype: DType = DType.BF16,
        model: int = 0,
    ) -> Cache:
        """K and V of a sliding window in rings, row = position mod `ring_rows`, which may differ between sides."""
        sizes = (dtype, kv_heads, bytes_of(dtype, head_dim, "Cache.head_dim"))
        return cls.ring(name, layers, parts=dict.fromkeys(("k", "v"), sizes), ring_rows=ring_rows, model=model)

    @classmethod
    @_checked
    def ring(cls, name: str, layers: LayerIds, *, parts: Mapping[str, Sizes], ring_rows: int, model: int = 0) -> Cache:
        """Any other parts of the last tokens, in a ring for each request; sizes as in `paged`."""
        return cls._of(name, layers, parts_of(parts), kind=ItemKind.RING, model=model, rows=ring_rows)

    @classmethod
    @_checked
    def paged(
        cls,
        name: str,
        layers: LayerIds,
        *,
        parts: Mapping[str, Sizes],
        page: int,
        tokens_per_row: int = 1,
        model: int = 0,
    ) -> Cache:
        """Any other paged parts: name to element type, lanes, and bytes of a lane.

        A tuple of bytes states the sections of a lane, each in a buffer of its own. `page` is in tokens, also where a
        row stands for several.
        """
        if page % tokens_per_row:
            raise bad("Cache.page", f"a multiple of {tokens_per_row}, the tokens of a row", page)
        rows: dict[str, Any] = {"rows": page // tokens_per_row, "tokens_per_row": tokens_per_row}
        return cls._of(name, layers, parts_of(parts), kind=ItemKind.PAGE, model=model, **rows)

    @classmethod
    @_checked
    def state(
        cls,
        name: str,
        layers: LayerIds,
        *,
        parts: Mapping[str, Sizes],
        rows: int = 1,
        scratch_rows: int = 0,
        blocks: Mapping[str, Blocks] | None = None,
        model: int = 0,
    ) -> Cache:
        """Recurrent state, in a slot for each request: `rows` live rows, then scratch rows, which are never sent."""
        slot = {"kind": ItemKind.SLOT, "model": model, "rows": rows + scratch_rows, "live_rows": rows}
        return cls._of(name, layers, parts_of(parts), blocks, **slot)

    @classmethod
    @_checked
    def mamba1(
        cls,
        name: str,
        layers: LayerIds,
        *,
        channels: int,
        state: int,
        kernel: int,
        dtype: DType = DType.BF16,
        state_dtype: DType = DType.F32,
        scratch_rows: int = 0,
        model: int = 0,
    ) -> tuple[Cache, Cache]:
        """Conv and SSM state of Mamba 1 (arXiv 2312.00752), both divided by channels."""
        ssm = (state_dtype, channels, bytes_of(state_dtype, state, "Cache.state"))
        return cls._recurrent(name, layers, (Block(channels),), ssm, kernel, dtype, scratch_rows, model)

    @classmethod
    @_checked
    def mamba2(
        cls,
        name: str,
        layers: LayerIds,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state: int,
        kernel: int,
        dtype: DType = DType.BF16,
        state_dtype: DType = DType.F32,
        scratch_rows: int = 0,
        model: int = 0,
    ) -> tuple[Cache, Cache]:
        """Conv and SSM state of Mamba 2 (arXiv 2405.21060): x is divided by heads, B and C each by groups."""
        ssm = (state_dtype, heads, bytes_of(state_dtype, head_dim * state, "Cache.state"))
        conv = (Block(heads * head_dim, head_dim), Block(groups * state, state), Block(groups * state, state))
        return cls._recurrent(name, layers, conv, ssm, kernel, dtype, scratch_rows, model)

    @classmethod
    @_checked
    def gdn(
        cls,
        name: str,
        layers: LayerIds,
        *,
        key_heads: int,
        key_dim: int,
        value_heads: int,
        value_dim: int,
        kernel: int,
        dtype: DType = DType.BF16,
        state_dtype: DType = DType.F32,
        scratch_rows: int = 0,
        model: int = 0,
    ) -> tuple[Cache, Cache]:
        """Conv and recurrent state of gated delta nets (arXiv 2412.06464): q, k and v are each divided by heads."""
        ssm = (state_dtype, value_heads, bytes_of(state_dtype, key_dim * value_dim, "Cache.key_dim"))
        key = Block(key_heads * key_dim, key_dim)
        conv = (key, key, Block(value_heads * value_dim, value_dim))
        return cls._recurrent(name, layers, conv, ssm, kernel, dtype, scratch_rows, model)

    @classmethod
    @_checked
    def handoff(cls, name: str, parts: Mapping[str, tuple[DType, int]]) -> Cache:
        """Bytes that Done carries, such as the first token: part name to element type and length in bytes."""
        check_parts(parts, 2, "element type and bytes")
        for part, (dtype, size) in parts.items():
            check_size(f'Cache.parts["{part}"]', dtype, size)
        group = g.handoff(0, name, parts)
        return cls(group, (0,), tuple((Block(1),) for _ in group.parts))

    def divided(self, shares: Sequence[tuple[int, int]]) -> Cache:
        """The same cache with lanes (KV heads) [lo, hi) = `shares[i]` of every part on tensor-parallel rank i.

        For engines whose ranks do not hold what `Block.cut` says. Shares may overlap. Raises LocalError(OUT_OF_RANGE)
        for shares that reach beyond a part's lanes, or that together leave one out.
        """
        ranks = tuple((int(lo), int(hi)) for lo, hi in shares)
        for part in self.group.parts:
            held = {lane for lo, hi in ranks for lane in range(max(lo, 0), min(hi, part.lanes))}
            if len(held) < part.lanes or any(not 0 <= lo < hi <= part.lanes for lo, hi in ranks):
                raise bad(f"shares of {part.name!r}", f"[lo, hi) within {part.lanes} lanes, each held", ranks)
        return attrs.evolve(self, blocks=tuple((Block(part.lanes, 1, ranks),) for part in self.group.parts))

    @classmethod
    def _recurrent(
        cls, name: str, layers: LayerIds, conv: Blocks, ssm: Sizes, kernel: int, dtype: DType, scratch: int, model: int
    ) -> tuple[Cache, Cache]:
        layers, parts = ids_of(layers), {"conv": (dtype, sum(b.lanes for b in conv), bytes_of(dtype, 1, "Cache.dtype"))}
        slots: dict[str, Any] = {"parts": parts, "rows": kernel - 1, "scratch_rows": scratch, "blocks": {"conv": conv}}
        states = cls.state(f"{name} ssm", layers, parts={"ssm": ssm}, model=model)
        return cls.state(f"{name} conv", layers, model=model, **slots), states

    @classmethod
    def _of(
        cls,
        name: str,
        layers: LayerIds,
        parts: tuple[g.Part, ...],
        blocks: Mapping[str, Blocks] | None = None,
        **group: Any,
    ) -> Cache:
        numbers = {"tokens_per_row": 1, "cp_size": 1, "interleave": 1, "origin": 0} | group
        by_part = blocks or {}
        if unknown := by_part.keys() - {p.name for p in parts}:
            raise bad("blocks", ", ".join(p.name for p in parts), min(unknown))
        divided = tuple(tuple(by_part.get(p.name, (Block(p.lanes),))) for p in parts)
        return cls(Group(id=0, name=name, parts=parts, **numbers), ids_of(layers), divided)


def bytes_of(dtype: DType, elements: int, path: str = "elements") -> int:
    """Bytes of packed elements; raises LocalError(OUT_OF_RANGE) if the last byte would be half full."""
    size, rest = divmod(elements * BITS[dtype], 8)
    if rest:
        raise bad(path, f"an even number of {dtype.name}, two of which make a byte", elements)
    return size


def ids_of(layers: LayerIds) -> tuple[int, ...]:
    """Layer ids; a number n stands for layers 0 to n - 1."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        return tuple(range(check_whole("Cache.layers", layers, 0)))
    return tuple(check_whole("Cache.layers", layer, 0) for layer in layers)


def check_size(path: str, dtype: DType, size: Any) -> int:
    """`size`, once it is known to be bytes of whole elements of `dtype`; raises LocalError otherwise."""
    check_type(path, dtype, DType, "a kvproto.DType")
    if check_whole(path, size, 1) * 8 % BITS[dtype]:
        raise bad(path, f"a multiple of {BITS[dtype] // 8} bytes, an element of {dtype.name}", size)
    return int(size)


def check_parts(parts: Any, values: int, mine: str) -> None:
    """Raise LocalError unless `parts` maps names to `values` values each."""
    check_type("Cache.parts", parts, Mapping, f"a mapping of part name to {mine}")
    for name, stated in parts.items():
        check_type("Cache.parts", name, str, "names of parts, each a str")
        if not isinstance(stated, tuple | list) or len(stated) != values:
            raise bad(f'Cache.parts["{name}"]', mine, stated)


def parts_of(parts: Mapping[str, Sizes]) -> tuple[g.Part, ...]:
    """A part for each name, or a section for each of several sizes."""
    check_parts(parts, 3, "element type, lanes, and bytes of a lane or of each of its sections")
    sections = []
    for name, (dtype, lanes, stated) in parts.items():
        path = f'Cache.parts["{name}"]'
        check_whole(path, lanes, 1)
        if not isinstance(stated, tuple | list):
            sections.append(g.Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=check_size(path, dtype, stated)))
            continue
        sizes = [check_size(path, dtype, size) for size in stated]
        if not sizes:
            raise bad(path, "a section at least", "none")
        for at, end in pairwise(accumulate(sizes, initial=0)):
            sections.append(g.Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=end - at, at=at, whole=sum(sizes)))
    return tuple(sections)


def scales_of(
    elements: Mapping[str, int], lanes: int, block: int | None, dtype: DType | None = None
) -> dict[str, Sizes]:
    """For each part with a scale (F32 by default) a part of one for each of its blocks; none without blocks."""
    if block is None:
        if dtype is not None:
            raise bad("Cache.scale_dtype", "nothing without scale_block", dtype.name)
        return {}
    for part, n in elements.items():
        if n % block:
            raise bad("Cache.scale_block", f"a divisor of {n}, the elements of a lane of {part}", block)
    chosen = DType.F32 if dtype is None else dtype
    return {
        f"{part}_scale": (chosen, lanes, bytes_of(chosen, n // block, "Cache.scale_block"))
        for part, n in elements.items()
    }
