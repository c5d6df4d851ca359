"""An engine's cache as kvproto sees it: the memory that holds it, and where each layer, page, token and head lies."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.copying.aliasing import overlapping
from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError, check_type, type_name
from kvproto.planning.geometry import Geometry, Group, column_names, validate
from kvproto.planning.kinds import kind_of
from kvproto.rank.page_tables import PageRules, PagesInUse
from kvproto.rank.rank_pool import pack
from kvproto.rank.tensor_layout import Column, columns_of
from kvproto.session import limits
from kvproto.transport import memory as shareable
from kvproto.transport.base import Memory
from kvproto.wire import to_json
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns

__all__ = ["Pool"]


class Pool:
    """One rank's cache, in tensors of the engine or in memory that `allocate` makes.

    A pool serves one Source at a time, alongside Sinks. The engine keeps its tensors, and must leave them where they
    are until all of these are closed.
    """

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Any],
        *,
        rank: int = 0,
        axes: str | Mapping[str, str] = "page token head dim",
        shared: bool = False,
    ) -> None:
        """Wrap the engine's tensors: `tensors` by group name, and `axes` for all groups or by the name of each.

        For each group, pass one tensor per layer of this rank, in order, or one tensor with an axis "layer"; or a
        mapping of part names ("k", "v", "latent") to either. A tensor is any object with `__dlpack__`, in CUDA memory
        or in host memory that transports can share (`kvproto.allocate`). `axes` names the axes in order: "layer",
        "part", "page" (or "slot"), "token" (or "row"), "head" (or "lane") and "dim". NHD is "page token head dim", HND
        "page head token dim", joint K and V "part page token head dim". An axis of one element may be left out. For a
        part in sections, pass a tensor for each section, under names such as "latent[0:1024]". With `shared`, layers
        that share a cache may be given the same tensor; such a pool is for a Source. Raises LocalError: BAD_COLUMNS,
        naming the tensor and the axis, also where layers or parts share some of their bytes; TOO_LARGE for too many
        allocations; NO_TRANSPORT for memory that cannot be shared. Raises PlanError for a geometry that contradicts
        itself.
        """
        check_type("shared", shared, bool, "True or False")
        check_type("geometry", geometry, Geometry, "a kvproto.Geometry", "lay_out makes one")
        check_type("tensors", tensors, Mapping, "a mapping of group name to tensors")
        check_type("axes", axes, (str, Mapping), "words, or a mapping of group name to words")
        groups = _groups(geometry, rank)
        if missing := groups.keys() ^ tensors.keys():
            yours = f"{sorted(map(str, tensors))}: {sorted(map(str, missing))} differ"
            raise _bad("tensors", f"the groups {sorted(groups)}", yours)
        if isinstance(axes, Mapping) and (missing := groups.keys() ^ axes.keys()):
            yours = f"{sorted(map(str, axes))}: {sorted(map(str, missing))} differ"
            raise _bad("axes", f"the groups {sorted(groups)}", yours)
        by_group: dict[str, tuple[int, list[Column]]] = {}
        for name, (group, share) in groups.items():
            order = axes if isinstance(axes, str) else axes[name]
            check_type(f'axes["{name}"]', order, str, 'words, such as "page token head dim"')
            by_group[name] = columns_of(group, share, tensors[name], order, f'tensors["{name}"]')
        views = {id(c.view): c.view for _, columns in by_group.values() for c in columns}
        self.memories, region_of = shareable.adopt_all(views)
        if len(self.memories) > limits.MAX_REGIONS:
            mine, yours = f"at most {limits.MAX_REGIONS} allocations", str(len(self.memories))
            advice = "allocate layers together: peers map each allocation"
            raise LocalError(ErrorCode.TOO_LARGE, "tensors", mine, yours, advice)
        registered = {}
        for name, (items, columns) in by_group.items():
            homes = [region_of[id(c.view)] for c in columns]
            region = np.array([region for region, _ in homes], np.uint32)
            offset = np.array([c.address - base for c, (_, base) in zip(columns, homes, strict=True)], np.uint64)
            if len(set(zip(region.tolist(), offset.tolist(), strict=True))) < len(columns) and not shared:
                wanted = "a place of its own for each layer and part; `shared` for layers that share a cache"
                raise _bad(f'tensors["{name}"]', wanted, "two at one address")
            names = ("item_stride", "row_stride", "lane_stride")
            strides = {stride: np.array([getattr(c, stride) for c in columns], np.uint64) for stride in names}
            group = groups[name][0]
            registered[group.id] = Columns(group=group.id, items=items, region=region, offset=offset, **strides)
            if both := overlapping(geometry, rank, registered[group.id]):
                one, other = sorted(columns[k].path for k in both)
                wanted = f"bytes that {one} does not have" if one != other else "layers and parts that lie apart"
                advice = "let each layer and part lie apart; layers that share a cache share all of it (`shared`)"
                raise LocalError(ErrorCode.BAD_COLUMNS, other, wanted, "some of the same bytes", advice)
        self._open(RankLayout(geometry, rank, registered), shared)

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        pages: int | Mapping[str, int],
        *,
        rank: int = 0,
        device: int | None = None,
        heads_first: bool = False,
    ) -> Pool:
        """Allocate zeroed memory for so many pages of every group, or by group name: on GPU `device`, or on the host.

        Pages are [token, head, byte] (NHD), or [head, token, byte] with `heads_first` (HND), without gaps. Raises
        LocalError: BAD_COLUMNS for wrong `pages` or `rank`, TRANSPORT_FAILED if memory is short, NO_TRANSPORT if no
        transport knows GPUs.
        """
        groups = _groups(geometry, rank)
        wanted = dict(pages) if isinstance(pages, Mapping) else dict.fromkeys(groups, pages)
        for count in wanted.values():
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise _bad("pages", "a number of pages, or a mapping of group name to one", type_name(count))
        if wanted.keys() != groups.keys() or min(wanted.values(), default=1) < 1:
            raise _bad("pages", f"1 at least for each of {sorted(groups)}", str(pages))
        numbers = {group.id: wanted[name] for name, (group, _) in groups.items()}
        columns, length = pack(geometry, rank, numbers, heads_first)
        pool = cls.__new__(cls)
        try:
            pool.memories = {0: shareable.allocate(max(length, 1), device)}
        except LocalError as error:
            raise error.at("pages" if error.path == "length" else error.path) from error
        pool._owned = True
        pool._open(RankLayout(geometry, rank, columns))
        return pool

    memories: Mapping[int, Memory]
    """Memory by region id; each has `__dlpack__`, which gives access to its bytes without a copy."""
    _owned = False

    def _open(self, side: RankLayout, shared: bool = False) -> None:
        self.layout, self._shared = side, shared
        self._users: list[str] = []
        self._pages = PagesInUse(side)
        self._closed = False

    @cached_property
    def page_rules(self) -> PageRules:
        """What the page tables of any request must satisfy."""
        return PageRules(self.layout)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all caches of this rank, on average."""
        total = 0
        for id in self.layout.columns:
            group, share = self.layout.group(id), self.layout.owns(id)
            lanes = sum((span.hi - span.lo) * group.parts[span.part].lane_bytes for span in share.lanes)
            total += lanes * share.layers.size // (group.tokens_per_row * group.cp_size)
        return total

    @property
    def geometry(self) -> Geometry:
        """The shares of all ranks of this engine's replica."""
        return self.layout.geometry

    @property
    def description(self) -> str:
        """The geometry as JSON, as `kvproto check` and `kvproto plan` read it from a file."""
        return json.dumps(to_json(self.geometry))

    @property
    def rank(self) -> int:
        """The rank whose cache this is."""
        return self.layout.rank

    def group(self, name: str) -> Group:
        """The group of this name; raises LocalError(BAD_COLUMNS) if this rank owns none."""
        groups = _groups(self.geometry, self.rank)
        if name not in groups:
            raise _bad("group", f"one of {list(groups)}", repr(name))
        return groups[name][0]

    def pages(self, name: str) -> int:
        """The number of pages, or slots, of a group; raises LocalError(BAD_COLUMNS) for an unknown name."""
        return self.layout.columns[self.group(name).id].items

    def place(self, group: str, layer: int, part: str) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Where a layer and part lies: region id, offset, shape [pages, tokens, heads of this rank, bytes] and strides.

        Offset and strides are in bytes. Raises LocalError(BAD_COLUMNS) for a name that this rank does not own.
        """
        spec = self.group(group)
        share, columns = self.layout.owns(spec.id), self.layout.columns[spec.id]
        parts, layers = column_names(spec), share.layers.tolist()
        if part not in parts or layer not in layers:
            raise _bad(group, f"a part of {parts}, a layer of {layers}", f"part {part!r}, layer {layer}")
        p = parts.index(part)
        k = layers.index(layer) * len(parts) + p
        lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
        shape = (columns.items, spec.rows, lanes, spec.parts[p].lane_bytes)
        strides = (int(columns.item_stride[k]), int(columns.row_stride[k]), int(columns.lane_stride[k]), 1)
        return int(columns.region[k]), int(columns.offset[k]), shape, strides

    def array(self, group: str, layer: int, part: str) -> npt.NDArray[np.uint8]:
        """A view of a layer and part of a pool in host memory: uint8 [pages, tokens, heads of this rank, bytes].

        Raises LocalError(BAD_COLUMNS) for memory of a GPU, or a name that this rank does not own.
        """
        region, offset, shape, strides = self.place(group, layer, part)
        if self.memories[region].__dlpack_device__()[0] != 1:
            raise _bad("Pool.array", "a pool in host memory", "memory of a GPU: see Pool.place and Pool.memories")
        whole = np.from_dlpack(self.memories[region]).view(np.uint8)
        return np.ndarray(shape, np.uint8, whole, offset, strides)

    def close(self) -> None:
        """Free the memory of `allocate`; raises LocalError(UNEXPECTED_MESSAGE) while a Source or Sink uses the pool."""
        if self._users:
            advice = "close them first: peers may still read and write the pool"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "Pool.close", "no user", ", ".join(self._users), advice)
        if not self._closed:
            for memory in self.memories.values() if self._owned else ():
                with contextlib.suppress(BufferError):
                    memory.close()
                    continue
                gc.collect()  # frames of an error that was handled may still use it, in a reference cycle
                memory.close()
            self._closed = True

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _use(self, who: str) -> None:
        if self._closed:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "pool", "an open pool", "a closed one", "make another")
        if who.startswith("Sink ") and self._shared:
            advice = "state layers that share a cache once, under the layer that writes it"
            raise LocalError(ErrorCode.ITEM_ALIAS, "pool", "a pool that is not `shared`", "one that is", advice)
        if who.startswith("Source ") and (
            other := [each for each in self._users if each.startswith("Source ") and each != who]
        ):
            advice = "close it first: a pool serves one Source, alongside Sinks"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "pool", "a pool without a Source", other[0], advice)
        self._users.append(who)

    def _unuse(self, who: str) -> None:
        self._users.remove(who)


def _groups(geometry: Geometry, rank: int) -> dict[str, tuple[Group, Any]]:
    """The groups with memory that a rank owns, with its share of each, by name."""
    validate(geometry)
    groups = {g.id: g for g in geometry.groups}
    names = [g.name for g in geometry.groups]
    if len(set(names)) < len(names):
        raise _bad("geometry.groups", "names that differ", str(names))
    ranks = {r.rank: r for r in geometry.ranks}
    if rank not in ranks:
        raise _bad("rank", f"one of {sorted(ranks)}", str(rank))
    shares = [s for s in ranks[rank].owns if kind_of(groups[s.group]).has_memory]
    return {groups[s.group].name: (groups[s.group], s) for s in shares}


def _bad(path: str, mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours)
