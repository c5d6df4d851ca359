"""The rows of a request that prefill has computed: the program that copies them to one sink, and the items to read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.grants import begins_of, cut_to_begins, held_from, items_before, items_needed, rows_of
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window, windows
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import KINDS, NO_AXES, TOKENS, axis_of, length_of
from kvproto.planning.plan import Route
from kvproto.source.progress import Available, layers_of
from kvproto.transport.staging.packed import Layer
from kvproto.wire.enums import ErrorCode, Outcome
from kvproto.wire.messages import Begin, Grants, HandOff

if TYPE_CHECKING:
    from kvproto.source.page_guard import GuardedPages

IntArray = npt.NDArray[np.int64]

_MORE = "the sink fetches more tokens than were computed: fetch(tokens=...) no more than finish(tokens=...)"
_ELSEWHERE = "a state cannot be rolled back: fetch(tokens=...) exactly as many as finish(tokens=...)"
_NO_ITEMS = np.empty(0, np.int64)


@attrs.frozen
class Finished:
    """A request whose prefill is over."""

    items: Mapping[int, IntArray]
    """Page tables by this side's group id, from the page of token 0 on."""
    tokens: int
    """The number of tokens: positions [0, tokens) hold rows."""
    outcome: Outcome
    handoff: Mapping[tuple[int, str], bytes]
    """The bytes of each hand-off part, by group id and part name."""
    after: int | None = None
    """The handle of the device event after which the rows are written; None: they are already."""
    since: Mapping[int, int] = {}
    """The first token whose row is still held, by this side's group id, unless it is token 0."""
    guarded: "GuardedPages | None" = None
    """The checksums of its pages, with `Options.debug_pages`."""

    @property
    def events(self) -> tuple[int, ...]:
        """The handle of the device event, if there is one."""
        return () if self.after is None else (self.after,)

    def handoffs(self, pair: Pair) -> tuple[HandOff, ...]:
        """The hand-off groups that go to the pair's sink, with their bytes."""
        handoffs = []
        for route in pair.routes if self.handoff else ():
            group = pair.sink.groups[route.group]
            if not KINDS[group.kind].has_memory:
                parts = sorted({(box.part, box.source_group) for box in route.boxes})
                data = b"".join(self.handoff[source, group.parts[p].name] for p, source in parts)
                handoffs.append(HandOff(group=group.id, data=data))
        return tuple(handoffs)


@attrs.frozen
class Computed:
    """Rows that are computed while prefill goes on: positions [0, tokens) in some layers of a model."""

    items: Mapping[int, IntArray]
    """Page tables by this side's group id, from the page of token 0 on, as far as rows are computed."""
    tokens: int
    layers: tuple[int, int]
    """The layers [lo, hi) that have these rows."""
    model: int = 0
    after: int | None = None
    """The handle of the device event after which these rows are written; None: they are already."""
    since: Mapping[int, int] = {}
    """The first token whose row is still held, by this side's group id, unless it is token 0."""


@attrs.define(eq=False)
class Prefill:
    """The computed part of a request."""

    axes: Mapping[str, int] = NO_AXES
    """Lengths of the axes other than the tokens; their rows are computed when prefill is over."""
    items: Mapping[int, IntArray] = attrs.Factory(dict)
    available: dict[Layer, Available] = attrs.Factory(dict)
    tokens: dict[int, int] = attrs.Factory(dict)
    """By model, the most tokens computed in any layer."""
    finished: Finished | None = None
    since: Mapping[int, int] = {}
    """The first token whose row is still held, by group id, unless it is token 0; it only rises."""
    version: int = 0
    """Rises with each report of the engine."""

    @property
    def reach(self) -> tuple[dict[int, int], dict[int, int], bool]:
        """The tokens of each model, where groups begin, and whether prefill is over: which rows there are."""
        return dict(self.tokens), dict(self.since), self.finished is not None

    def add(self, computed: Computed) -> None:
        """Record rows that the engine has computed."""
        self.items, self.since = computed.items, computed.since
        self.version += 1
        self.tokens[computed.model] = max(self.tokens.get(computed.model, 0), computed.tokens)
        available = Available(computed.tokens, () if computed.after is None else (computed.after,))
        for layer in range(*computed.layers):
            self.available[computed.model, layer] = available

    def finish(self, finished: Finished) -> None:
        """Record that prefill is over."""
        self.finished, self.since = finished, finished.since
        self.version += 1

    def program(self, pair: Pair, grants: Sequence[Grants], whole: bool) -> CopyProgram:
        """The program of rows that any layer has, or of the `whole` request; raises BAD_GRANT or STATE_POSITION."""
        finished, sources = self.finished, {}
        begun = self.begun(pair, grants) if self.since else grants
        if finished is not None:
            check_ends(pair, grants, finished.tokens, self.axes)
            sinks, items = windows(begun), finished.items
        else:
            sinks, items = windows(grant for grant in begun if not _lacks_state(pair, grant)), self.items
        ends = asked_tokens(pair, grants) if finished is None and whole else {}
        for route in pair.routes:
            for box in route.boxes:
                group = pair.source.groups[box.source_group]
                if group.id in sources or not KINDS[group.kind].has_memory:
                    continue
                if finished is not None:
                    end = length_of(group, finished.tokens, self.axes)
                elif whole:
                    end = length_of(group, ends.get(group.model, (0, 0))[1], self.axes)
                else:
                    end = length_of(group, self.tokens.get(group.model, 0), NO_AXES)
                first = self.since.get(group.id, 0)
                skip = items_before(group, pair.source.shares[group.id].cp_rank, first) if first else 0
                table = items.get(group.id, _NO_ITEMS)[skip:]
                sources[group.id] = Window(first, max(end - first, 0), table)
        if finished is None and not whole:
            self._cut(pair, sinks)
        return pair.lower(sources, sinks)

    def _cut(self, pair: Pair, sinks: dict[int, Window]) -> None:
        """Cut the sink's windows to the rows that are computed, for a program of what there is."""
        for route in pair.routes:
            for box in route.boxes:
                group = pair.source.groups[box.source_group]
                if route.group in sinks and KINDS[group.kind].has_memory and not KINDS[group.kind].is_state:
                    window, end = sinks[route.group], length_of(group, self.tokens.get(group.model, 0), NO_AXES)
                    count = max(min(window.count, end - window.first), 0)
                    sinks[route.group] = attrs.evolve(window, count=count)

    def begins(self, pair: Pair, grants: Sequence[Grants]) -> tuple[Begin, ...]:
        """Beginnings of a sink's late windows, as Done states them (KVP-GRANT-LATE)."""
        if not self.since:
            return ()
        return begins_of(held_from(pair.routes, {g.id: g for g in pair.sink.geometry.groups}, self.since), grants)

    def begun(self, pair: Pair, grants: Sequence[Grants]) -> Sequence[Grants]:
        """The grants of a sink, reduced to the rows that are still held."""
        begins = self.begins(pair, grants)
        return cut_to_begins(pair.sink, grants, {b.group: b.first for b in begins}) if begins else grants

    def complete(self, pair: Pair, grants: Sequence[Grants]) -> dict[Layer, tuple[int, ...]]:
        """The layers whose rows for a sink are all computed, with the device events that those wait for."""
        ends, ops = asked_tokens(pair, grants), pair.nothing.ops
        later = layers_of(ops[np.isin(ops["map"], list(pair.nothing.others))])
        early = {layer: available for layer, available in self.available.items() if layer not in later}
        return {
            layer: available.after
            for layer, available in early.items()
            if available.tokens >= ends.get(layer[0], (0, 0))[1]
        }


def asked_tokens(pair: Pair, grants: Sequence[Grants]) -> dict[int, tuple[int, int]]:
    """The tokens [first, end) that a sink asked for, by model."""
    spans: dict[int, tuple[int, int]] = {}
    for grant in grants:
        group = pair.sink.groups[grant.group]
        if not KINDS[group.kind].has_memory or axis_of(group) != TOKENS:  # KVP-HND-WINDOW
            continue
        first, end = spans.get(group.model, (grant.first, grant.valid))
        spans[group.model] = min(first, grant.first), max(end, grant.valid)
    return spans


def _lacks_state(pair: Pair, grant: Grants) -> bool:
    """Whether a grant is for a state and does not name its item yet (feature SPANS)."""
    return KINDS[pair.sink.groups[grant.group].kind].is_state and (grant.items is None or not grant.items.size)


def check_ends(pair: Pair, grants: Sequence[Grants], tokens: int, axes: Mapping[str, int] = NO_AXES) -> None:
    """Raise BAD_GRANT or STATE_POSITION if a grant asks for what a request of `tokens` tokens does not have."""
    for i, grant in enumerate(grants):
        group = pair.sink.groups[grant.group]
        if not KINDS[group.kind].has_memory:  # its window has no meaning (KVP-HND-WINDOW)
            continue
        most = length_of(group, tokens, axes)
        if grant.valid > most:
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].valid", str(most), str(grant.valid), _MORE)
        if grant.state_after not in (None, tokens):
            path = f"grants[{i}].state_after"
            raise RemoteError(ErrorCode.STATE_POSITION, path, str(tokens), str(grant.state_after), _ELSEWHERE)


def offered(
    routes: Sequence[Route], side: RankLayout, asked: Sequence[Grants], items: Mapping[int, IntArray]
) -> tuple[Grants, ...]:
    """Items that a sink is to read (PULL), by source group, from page tables that begin with token 0's."""
    by_group = {grant.group: grant for grant in asked}
    windows_of: dict[int, list[Grants]] = {}
    for route in routes:
        for id in {box.source_group for box in route.boxes}:
            windows_of.setdefault(id, []).append(by_group[route.group])
    return tuple(
        _window(side.groups[id], side.shares[id].cp_rank, windows_of[id], items.get(id, _NO_ITEMS))
        for id in sorted(windows_of)
    )


def _window(group: Group, cp_rank: int, asked: Sequence[Grants], items: IntArray) -> Grants:
    """One window that covers all that a sink asks from a group."""
    first = min(grant.first for grant in asked)
    end = max(grant.first + grant.count for grant in asked)
    if group.cp_size > 1:
        first = min(max(first, group.origin), end)
    if KINDS[group.kind].wraps:  # a ring holds no earlier rows
        first = max(first, (rows_of(group, 0, end)[1] - group.rows) * group.tokens_per_row)
    skip = items_before(group, cp_rank, first)
    held = items[skip : skip + items_needed(group, cp_rank, first, end - first)]
    return Grants(group=group.id, first=first, count=end - first, valid=end, items=held.astype(np.uint32))
