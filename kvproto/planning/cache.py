"""The cache of some layers of one model, stated in a line, before it is known which rank owns what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from kvproto.errors import bad, check_type, check_whole
from kvproto.planning import geometry as g
from kvproto.planning.axes import TOKENS
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import kind_of
from kvproto.planning.sizes import BITS, Sizes, bytes_of, called, check_parts, check_size, ids_of, parts_of, scales_of
from kvproto.wire.enums import DType, ItemKind

__all__ = ["BITS", "BLOCK_SCALED", "Block", "Cache", "bytes_of"]

BLOCK_SCALED: dict[str, dict[str, Any]] = {
    "NVFP4": {"dtype": DType.F4E2M1, "scale_block": 16, "scale_dtype": DType.F8E4M3},
    "MXFP4": {"dtype": DType.F4E2M1, "scale_block": 32, "scale_dtype": DType.F8E8M0},
}
"""Arguments of `Cache.gqa` and `Cache.mla`, by the name of the format."""


@attrs.frozen
class Block:
    """Lanes that tensor-parallel ranks divide among themselves in units of `unit` lanes, such as a head's channels.

    If there are more ranks than units, consecutive ranks hold the same unit.
    """

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


Made = TypeVar("Made")
Given = ParamSpec("Given")
_LEAST = {"model": 0, "rope": 0, "scratch_rows": 0}
"""The least values of arguments that may be less than 1."""


def _checked(make: Callable[Concatenate[type[Cache], Given], Made]) -> Callable[Concatenate[type[Cache], Given], Made]:
    """Raise LocalError, naming the argument, for numbers that are too small and for what is not an element type."""

    @wraps(make)
    def checked(cls: type[Cache], /, *args: Given.args, **named: Given.kwargs) -> Made:
        for name, given in named.items():
            if name.endswith("dtype") and (given is not None or name != "scale_dtype"):
                check_type(f"Cache.{name}", given, DType, "a kvproto.DType")
            elif name not in ("name", "layers", "parts", "blocks", "part", "split", "axis", "of") and given is not None:
                check_whole(f"Cache.{name}", given, _LEAST.get(name, 1))
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

    @called
    def over(
        self, *, tp: int | None = None, cp: int | None = None, dcp: int | None = None, interleave: int | None = None,
        origin: int | None = None, deal: str | tuple[int, ...] | None = None, stages: tuple[int, ...] | None = None,
        virtual: int | None = None, copies: bool = True,
    ) -> Cache:  # fmt: skip
        """The same cache with sizes of `Parallel` that differ from the engine's; those that are not named do not.

        A draft of TP 2 in an engine of TP 8 is `over(tp=2)`: ranks 0 to 3 hold its first half and ranks 4 to 7 the
        other. With `copies=False` only ranks 0 and 1 hold it. Naming `stages` divides a draft over pipeline stages
        instead of keeping it on the last, and naming a deal has its tokens dealt. Raises LocalError(OUT_OF_RANGE) for a
        deal of items that are not pages, and `lay_out` does for sizes that the engine's ranks cannot have.
        """
        deals = {"dcp": dcp, "interleave": interleave, "origin": origin, "deal": deal}
        named = {"tp": tp, "cp": cp, "stages": stages, "virtual": virtual} | deals
        own = tuple((name, size) for name, size in named.items() if size is not None)
        deals_it = (cp or 1) > 1 or (dcp or 1) > 1 or any(x is not None for x in (interleave, origin, deal))
        if wrong := [name for name, size in deals.items() if size is not None and not kind_of(self.group).paged]:
            path = f"{self.group.name!r}.over.{wrong[0]}"
            raise bad(path, "pages, as tokens are dealt by rows", "items of another kind")
        dealt = True if deals_it and self.dealt is None and kind_of(self.group).paged else self.dealt
        return attrs.evolve(self, own=own, copies=copies, dealt=dealt)

    def replicated(self) -> Cache:
        """The same cache with every token on each context-parallel rank, for the heads of its TP rank."""
        return attrs.evolve(self, dealt=False)

    def sharded(self) -> Cache:
        """The same cache with its tokens dealt among context-parallel ranks, which drafts do not have by default.

        Raises LocalError(OUT_OF_RANGE) for items that are not pages.
        """
        if not kind_of(self.group).paged:
            raise bad(f"{self.group.name!r}.sharded", "pages, as tokens are dealt by rows", "items of another kind")
        return attrs.evolve(self, dealt=True)

    def along(self, axis: str) -> Cache:
        """The same cache with rows that stand for positions of `axis`, such as "image", instead of tokens.

        Raises LocalError(OUT_OF_RANGE) for items that are not pages, for a name not of 1 to 64 bytes, and for "tokens".
        """
        check_type("axis", axis, str, 'the name of an axis, such as "image"')
        if not kind_of(self.group).paged or axis == TOKENS or not 0 < len(axis.encode()) <= 64:
            found = repr(axis) if kind_of(self.group).paged else "items of another kind"
            raise bad(f"{self.group.name!r}.along", f"pages, and a name of 1 to 64 bytes, not {TOKENS!r}", found)
        return attrs.evolve(self, group=attrs.evolve(self.group, axis=axis))

    @classmethod
    @_checked
    def gqa(
        cls, name: str, layers: int | Iterable[int], *, kv_heads: int, head_dim: int, page: int,
        v_head_dim: int | None = None, dtype: DType = DType.BF16, scale_block: int | None = None,
        scale_dtype: DType | None = None, model: int = 0,
    ) -> Cache:  # fmt: skip
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
        cls, name: str, layers: int | Iterable[int], *, latent: int, rope: int, page: int, dtype: DType = DType.BF16,
        scale_block: int | None = None, scale_dtype: DType | None = None, split: bool = False, model: int = 0,
    ) -> Cache:  # fmt: skip
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
        cls, name: str, layers: int | Iterable[int], *, kv_heads: int, head_dim: int, page: int,
        dtype: DType = DType.BF16, axis: str = "image", model: int = 0,
    ) -> Cache:  # fmt: skip
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
        cls, name: str, layers: int | Iterable[int], *, head_dim: int, page: int, dtype: DType = DType.F8E4M3,
        scale_block: int | None = 128, model: int = 0,
    ) -> Cache:  # fmt: skip
        """Paged keys of a sparse-attention indexer with an F32 scale for every `scale_block`; whole on every rank."""
        parts: dict[str, Sizes] = {"index": (dtype, 1, bytes_of(dtype, head_dim, "Cache.head_dim"))}
        parts |= scales_of({"index": head_dim}, 1, scale_block)
        return cls.paged(name, layers, parts=parts, page=page, model=model).replicated()

    @classmethod
    @_checked
    def page_scales(
        cls, name: str, layers: int | Iterable[int], *, page: int, kv_heads: int | None = None, of: str = "kv",
        model: int = 0,
    ) -> Cache:  # fmt: skip
        """One F32 scale for each page and KV head of K and of V, or with `of="latent"` one for each page.

        Both sides must have equal pages. The scale of a page that is not full moves too (KVP-GRANT-PARTIAL). The scale
        of a whole tensor is no cache, but a fact.
        """
        if of not in ("kv", "latent"):
            raise bad("Cache.of", "'kv' or 'latent'", repr(of))
        if (kv_heads is None) == (of == "kv"):
            raise bad("Cache.kv_heads", "the KV heads of K and V, and none of a latent", f"{kv_heads} of {of!r}")
        names = ("k_scale", "v_scale") if of == "kv" else ("latent_scale",)
        parts = tuple(g.Part(name=p, dtype=DType.F32, lanes=kv_heads or 1, lane_bytes=4) for p in names)
        return cls._of(name, layers, model, ItemKind.PAGE, 1, parts, tokens_per_row=page, partial=True)

    @classmethod
    @_checked
    def compressed(
        cls, name: str, layers: int | Iterable[int], *, dim: int, tokens_per_row: int, page_rows: int,
        dtype: DType = DType.BF16, part: str = "latent", model: int = 0,
    ) -> Cache:  # fmt: skip
        """Pages of `page_rows` rows that each cover `tokens_per_row` tokens (4 or 128, say), in one lane of `part`."""
        parts = (g.Part(name=part, dtype=dtype, lanes=1, lane_bytes=bytes_of(dtype, dim, "Cache.dim")),)
        return cls._of(name, layers, model, ItemKind.PAGE, page_rows, parts, tokens_per_row=tokens_per_row)

    @classmethod
    @_checked
    def window(
        cls, name: str, layers: int | Iterable[int], *, kv_heads: int, head_dim: int, ring_rows: int,
        dtype: DType = DType.BF16, model: int = 0,
    ) -> Cache:  # fmt: skip
        """K and V of a sliding window, in a ring for each request: row = position mod `ring_rows`.

        The two sides may have rings of different lengths.
        """
        size = bytes_of(dtype, head_dim, "Cache.head_dim")
        parts = tuple(g.Part(name=p, dtype=dtype, lanes=kv_heads, lane_bytes=size) for p in ("k", "v"))
        return cls._of(name, layers, model, ItemKind.RING, ring_rows, parts)

    @classmethod
    @_checked
    def paged(
        cls, name: str, layers: int | Iterable[int], *, parts: Mapping[str, Sizes], page: int, model: int = 0,
    ) -> Cache:  # fmt: skip
        """Any other paged parts: name to element type, lanes, and bytes of a lane.

        A tuple of bytes states a lane's sections, each of which lies in a separate buffer.
        """
        return cls._of(name, layers, model, ItemKind.PAGE, page, parts_of(parts))

    @classmethod
    @_checked
    def state(
        cls, name: str, layers: int | Iterable[int], *, parts: Mapping[str, Sizes], rows: int = 1,
        scratch_rows: int = 0, blocks: Mapping[str, Sequence[Block]] | None = None, model: int = 0,
    ) -> Cache:  # fmt: skip
        """Recurrent state, in a slot for each request: `rows` live rows, then scratch rows, which are never sent."""
        rows_ = {"live_rows": rows}
        return cls._of(name, layers, model, ItemKind.SLOT, rows + scratch_rows, parts_of(parts), blocks, **rows_)

    @classmethod
    @_checked
    def mamba1(
        cls, name: str, layers: int | Iterable[int], *, channels: int, state: int, kernel: int,
        dtype: DType = DType.BF16, state_dtype: DType = DType.F32, scratch_rows: int = 0, model: int = 0,
    ) -> tuple[Cache, Cache]:  # fmt: skip
        """Conv and SSM state of Mamba 1 (arXiv 2312.00752), both divided by channels."""
        ssm = (state_dtype, channels, bytes_of(state_dtype, state, "Cache.state"))
        return cls._recurrent(name, layers, (Block(channels),), kernel, dtype, ssm, scratch_rows, model)

    @classmethod
    @_checked
    def mamba2(
        cls, name: str, layers: int | Iterable[int], *, heads: int, head_dim: int, groups: int, state: int, kernel: int,
        dtype: DType = DType.BF16, state_dtype: DType = DType.F32, scratch_rows: int = 0, model: int = 0,
    ) -> tuple[Cache, Cache]:  # fmt: skip
        """Conv and SSM state of Mamba 2 (arXiv 2405.21060): x is divided by heads, B and C each by groups."""
        ssm = (state_dtype, heads, bytes_of(state_dtype, head_dim * state, "Cache.state"))
        conv = (Block(heads * head_dim, head_dim), Block(groups * state, state), Block(groups * state, state))
        return cls._recurrent(name, layers, conv, kernel, dtype, ssm, scratch_rows, model)

    @classmethod
    @_checked
    def gdn(
        cls, name: str, layers: int | Iterable[int], *, key_heads: int, key_dim: int, value_heads: int, value_dim: int,
        kernel: int, dtype: DType = DType.BF16, state_dtype: DType = DType.F32, scratch_rows: int = 0, model: int = 0,
    ) -> tuple[Cache, Cache]:  # fmt: skip
        """Conv and recurrent state of gated delta nets (arXiv 2412.06464): q, k and v are each divided by heads."""
        ssm = (state_dtype, value_heads, bytes_of(state_dtype, key_dim * value_dim, "Cache.key_dim"))
        key = Block(key_heads * key_dim, key_dim)
        conv = (key, key, Block(value_heads * value_dim, value_dim))
        return cls._recurrent(name, layers, conv, kernel, dtype, ssm, scratch_rows, model)

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
        cls, name: str, layers: int | Iterable[int], blocks: tuple[Block, ...], kernel: int, dtype: DType,
        ssm: Sizes, scratch_rows: int, model: int,
    ) -> tuple[Cache, Cache]:  # fmt: skip
        layers = ids_of(layers)
        parts = {"conv": (dtype, sum(b.lanes for b in blocks), bytes_of(dtype, 1, "Cache.dtype"))}
        conv = cls.state(
            f"{name} conv", layers, parts=parts, rows=kernel - 1, scratch_rows=scratch_rows, blocks={"conv": blocks},
            model=model,
        )  # fmt: skip
        return conv, cls.state(f"{name} ssm", layers, parts={"ssm": ssm}, model=model)

    @classmethod
    def _of(
        cls, name: str, layers: int | Iterable[int], model: int, kind: ItemKind, rows: int, parts: tuple[g.Part, ...],
        blocks: Mapping[str, Sequence[Block]] | None = None, **more: Any,
    ) -> Cache:  # fmt: skip
        numbers = {"tokens_per_row": 1, "cp_size": 1, "interleave": 1, "origin": 0} | more
        group = Group(id=0, name=name, model=model, kind=kind, rows=rows, parts=parts, **numbers)
        given = blocks or {}
        unknown = given.keys() - {p.name for p in parts}
        if unknown:
            raise bad("blocks", ", ".join(p.name for p in parts), sorted(unknown)[0])
        return cls(group, ids_of(layers), tuple(tuple(given.get(p.name, (Block(p.lanes),))) for p in parts))
