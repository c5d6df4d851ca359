"""An engine's cache as kvproto sees it: its memory, and the place of each layer, page, token and head in it."""

import contextlib
import gc
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.closing import Closing
from kvproto.copying.columns import Place, columns_at, overlapping
from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError, check_type, type_name
from kvproto.planning.geometry import Geometry, Group, column_names, validate
from kvproto.planning.kinds import KINDS
from kvproto.rank.page_tables import PageRules, PagesInUse
from kvproto.rank.tensor_layout import Column, columns_of
from kvproto.session import limits
from kvproto.transport import memory as shareable
from kvproto.transport.base import Memory
from kvproto.transport.tensors import CPU
from kvproto.wire import to_json
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns

_ALIGN = 256
"""Each column of a pool without gaps begins at a multiple of so many bytes."""


class Pool(Closing):
    """One rank's cache, in tensors of the engine or in memory that `allocate` makes.

    A pool serves one Source at a time, alongside Sinks. The engine keeps its tensors, and must not move them until all
    of these are closed.
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
        naming the tensor and the axis, also if layers or parts share some of their bytes; TOO_LARGE for too many
        allocations; NO_TRANSPORT for memory that cannot be shared. Raises PlanError for a geometry that contradicts
        itself.
        """
        check_type("shared", shared, bool, "True or False")
        check_type("geometry", geometry, Geometry, "a kvproto.Geometry", "lay_out makes one")
        check_type("tensors", tensors, Mapping, "a mapping of group name to tensors")
        check_type("axes", axes, (str, Mapping), "words, or a mapping of group name to words")
        groups = _groups(geometry, rank)
        _check_groups("tensors", tensors, groups)
        if isinstance(axes, Mapping):
            _check_groups("axes", axes, groups)
        items: dict[str, int] = {}
        columns: dict[str, list[Column]] = {}
        for name, (group, share) in groups.items():
            words = axes if isinstance(axes, str) else axes[name]
            check_type(f'axes["{name}"]', words, str, 'words, such as "page token head dim"')
            items[name], columns[name] = columns_of(group, share, tensors[name], words, f'tensors["{name}"]')
        views = {id(column.view): column.view for named in columns.values() for column in named}
        self.memories, region_of = shareable.adopt_all(views)
        if len(self.memories) > limits.MAX_REGIONS:
            mine, yours = f"at most {limits.MAX_REGIONS} allocations", str(len(self.memories))
            advice = "allocate layers together: peers map each allocation"
            raise LocalError(ErrorCode.TOO_LARGE, "tensors", mine, yours, advice)
        by_id: dict[int, Columns] = {}
        for name, (group, _) in groups.items():
            by_id[group.id] = _joined(group, items[name], columns[name], region_of, shared)
            _check_overlaps(geometry, rank, by_id[group.id], columns[name])
        self._open(RankLayout(geometry, rank, by_id), shared)

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        pages: int | Mapping[str, int],
        *,
        rank: int = 0,
        device: int | None = None,
        heads_first: bool = False,
    ) -> "Pool":
        """Allocate zeroed memory for `pages` of every group, or by group name: on GPU `device`, or on the host.

        Pages are [token, head, byte] (NHD), or [head, token, byte] with `heads_first` (HND), without gaps. Raises
        LocalError: BAD_COLUMNS for wrong `pages` or `rank`, TRANSPORT_FAILED if memory is short, NO_TRANSPORT if no
        transport knows GPUs.
        """
        groups = _groups(geometry, rank)
        counts = dict(pages) if isinstance(pages, Mapping) else dict.fromkeys(groups, pages)
        for count in counts.values():
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise _bad("pages", "a number of pages, or a mapping of group name to one", type_name(count))
        if counts.keys() != groups.keys() or min(counts.values(), default=1) < 1:
            raise _bad("pages", f"1 at least for each of {sorted(groups)}", str(pages))
        items = {group.id: counts[name] for name, (group, _) in groups.items()}
        columns, length = columns_without_gaps(geometry, rank, items, heads_first)
        pool = cls.__new__(cls)
        try:
            pool.memories = {0: shareable.allocate(max(length, 1), device)}
        except LocalError as error:
            raise error.at("pages" if error.path == "length" else error.path) from error
        pool._owned = True
        pool._open(RankLayout(geometry, rank, columns))
        return pool

    geometry: Geometry
    """The share of every rank of this engine's replica."""
    rank: int
    """The rank whose cache this is."""
    memories: Mapping[int, Memory]
    """Memory by region id; each has `__dlpack__`, which gives access to its bytes without a copy."""
    _owned = False
    """Whether `allocate` made the memory."""

    def _open(self, layout: RankLayout, shared: bool = False) -> None:
        self.layout, self._shared, self.geometry, self.rank = layout, shared, layout.geometry, layout.rank
        self._users: list[str] = []
        self._pages = PagesInUse(layout)
        self._closed = False

    @cached_property
    def page_rules(self) -> PageRules:
        """Rules for the page tables of every request."""
        return PageRules(self.layout)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all caches of this rank, on average."""
        total = 0
        for id in self.layout.columns:
            group, share = self.layout.groups[id], self.layout.shares[id]
            lanes = sum((span.hi - span.lo) * group.parts[span.part].lane_bytes for span in share.lanes)
            total += lanes * share.layers.size // (group.tokens_per_row * group.cp_size)
        return total

    @property
    def description(self) -> str:
        """The geometry as JSON, as `kvproto check` and `kvproto plan` read it from a file."""
        return json.dumps(to_json(self.geometry))

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
        """The region id, offset, shape [pages, tokens, heads of this rank, bytes] and strides of a layer and part.

        Offset and strides are in bytes. Raises LocalError(BAD_COLUMNS) for a name that this rank does not own.
        """
        spec = self.group(group)
        share, columns = self.layout.shares[spec.id], self.layout.columns[spec.id]
        parts, layers = column_names(spec), share.layers.tolist()
        if part not in parts or layer not in layers:
            raise _bad(group, f"a part of {parts}, a layer of {layers}", f"part {part!r}, layer {layer}")
        number = parts.index(part)
        column = layers.index(layer) * len(parts) + number
        lanes = sum(span.hi - span.lo for span in share.lanes if span.part == number)
        shape = (columns.items, spec.rows, lanes, spec.parts[number].lane_bytes)
        by_axis = columns.item_stride, columns.row_stride, columns.lane_stride
        item, row, lane = (int(strides[column]) for strides in by_axis)
        return int(columns.region[column]), int(columns.offset[column]), shape, (item, row, lane, 1)

    def array(self, group: str, layer: int, part: str) -> npt.NDArray[np.uint8]:
        """A view of a layer and part of a pool in host memory: uint8 [pages, tokens, heads of this rank, bytes].

        Raises LocalError(BAD_COLUMNS) for memory of a GPU, or a name that this rank does not own.
        """
        region, offset, shape, strides = self.place(group, layer, part)
        if self.memories[region].__dlpack_device__()[0] != CPU:
            raise _bad("Pool.array", "a pool in host memory", "memory of a GPU: see Pool.place and Pool.memories")
        memory = np.from_dlpack(self.memories[region]).view(np.uint8)
        return np.ndarray(shape, np.uint8, memory, offset, strides)

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

    def _use(self, user: str) -> None:
        """Add a user, such as "Source prefill rank 0"; raises LocalError if it must not use the pool."""
        if self._closed:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "pool", "an open pool", "a closed one", "make another")
        if user.startswith("Sink ") and self._shared:
            advice = "state layers that share a cache once, under the layer that writes it"
            raise LocalError(ErrorCode.ITEM_ALIAS, "pool", "a pool that is not `shared`", "one that is", advice)
        sources = [name for name in self._users if name.startswith("Source ") and name != user]
        if user.startswith("Source ") and sources:
            advice = "close it first: a pool serves one Source, alongside Sinks"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "pool", "a pool without a Source", sources[0], advice)
        self._users.append(user)


def columns_without_gaps(
    geometry: Geometry, rank: int, items: Mapping[int, int], heads_first: bool = False
) -> tuple[dict[int, Columns], int]:
    """Columns without gaps in region 0, NHD or `heads_first`, and its length in bytes; `items` is by group id."""
    groups = {group.id: group for group in geometry.groups}
    owned = next(share.owns for share in geometry.ranks if share.rank == rank)
    columns: dict[int, Columns] = {}
    length = 0
    for share in owned:
        group = groups[share.group]
        if not KINDS[group.kind].has_memory:
            continue
        rows: list[Place] = []
        for _ in share.layers:
            for number, part in enumerate(group.parts):
                row = part.lane_bytes * sum(span.hi - span.lo for span in share.lanes if span.part == number)
                strides = (part.lane_bytes, part.lane_bytes * group.rows) if heads_first else (row, part.lane_bytes)
                rows.append((0, length, row * group.rows, *strides))
                length += -(-row * group.rows * items[group.id] // _ALIGN) * _ALIGN
        columns[group.id] = columns_at(group.id, items[group.id], rows)
    return columns, length


def _joined(
    group: Group, items: int, columns: Sequence[Column], region_of: Mapping[int, tuple[int, int]], shared: bool
) -> Columns:
    """The columns of a group's tensors; `region_of` maps the id of a view to its region and the region's address."""
    regions = [region_of[id(column.view)] for column in columns]
    rows = [
        (region, column.address - base, column.item_stride, column.row_stride, column.lane_stride)
        for column, (region, base) in zip(columns, regions, strict=True)
    ]
    if len({row[:2] for row in rows}) < len(rows) and not shared:
        mine = "a place of its own for each layer and part; `shared` for layers that share a cache"
        raise _bad(f'tensors["{group.name}"]', mine, "two at one address")
    return columns_at(group.id, items, rows)


def _check_overlaps(geometry: Geometry, rank: int, registered: Columns, columns: Sequence[Column]) -> None:
    """Raise LocalError(BAD_COLUMNS) for layers or parts of a group that share only some of their bytes."""
    if numbers := overlapping(geometry, rank, registered):
        one, other = sorted(columns[number].path for number in numbers)
        mine = f"bytes that {one} does not have" if one != other else "layers and parts that lie apart"
        advice = "let each layer and part lie apart; layers that share a cache share all of it (`shared`)"
        raise LocalError(ErrorCode.BAD_COLUMNS, other, mine, "some of the same bytes", advice)


def _check_groups(argument: str, by_name: Mapping[str, object], groups: Mapping[str, object]) -> None:
    """Raise LocalError(BAD_COLUMNS) unless a mapping has exactly the names of the groups that the rank owns."""
    if differing := groups.keys() ^ by_name.keys():
        yours = f"{sorted(map(str, by_name))}: {sorted(map(str, differing))} differ"
        raise _bad(argument, f"the groups {sorted(groups)}", yours)


def _groups(geometry: Geometry, rank: int) -> dict[str, tuple[Group, Any]]:
    """The groups of a rank that have memory, each with the rank's share of it, by name."""
    validate(geometry)
    groups = {group.id: group for group in geometry.groups}
    names = [group.name for group in geometry.groups]
    if len(set(names)) < len(names):
        raise _bad("geometry.groups", "names that differ", str(names))
    owned = {share.rank: share.owns for share in geometry.ranks}
    if rank not in owned:
        raise _bad("rank", f"one of {sorted(owned)}", str(rank))
    shares = [share for share in owned[rank] if KINDS[groups[share.group].kind].has_memory]
    return {groups[share.group].name: (groups[share.group], share) for share in shares}


def _bad(path: str, mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours)
