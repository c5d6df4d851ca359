"""A request at a source: what the engine has said of it, and what of that goes to one sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, Window, windows
from kvproto.errors import RemoteError
from kvproto.node.parts import There
from kvproto.transport.base import Layer
from kvproto.wire.enums import ErrorCode, ItemKind, Outcome
from kvproto.wire.messages import Grants, HandOff

__all__ = ["Computed", "Finished", "Request", "asked", "check"]


@attrs.frozen
class Finished:
    """A request whose prefill is over."""

    items: Mapping[int, list[int]]
    """Item ids by this side's group id, from the one that holds token 0."""
    tokens: int
    """Positions [0, tokens) hold real rows."""
    outcome: Outcome
    handoff: Mapping[tuple[int, str], bytes]
    """Bytes of each hand-off part, by group id and part name."""
    after: int | None = None
    """Handle of the device event that the rows wait for; None: they are there."""

    @property
    def events(self) -> tuple[int, ...]:
        """That, if any."""
        return () if self.after is None else (self.after,)

    def handoffs(self, pair: Pair) -> tuple[HandOff, ...]:
        """The bytes of hand-off groups that go to the pair's sink."""
        found = []
        for route in pair.routes:
            group = pair.sink.group(route.group)
            if group.kind == ItemKind.HANDOFF:
                parts = sorted({(box.part, box.source_group) for box in route.boxes})
                data = b"".join(self.handoff[source, group.parts[p].name] for p, source in parts)
                found.append(HandOff(group=group.id, data=data))
        return tuple(found)


@attrs.frozen
class Computed:
    """Rows that are there while others of the request still compute: say so of all layers of a model, or of none."""

    items: Mapping[int, list[int]]
    """Item ids by this side's group id, from the one that holds token 0; those of the rows that are there suffice."""
    tokens: int
    """Positions [0, tokens) hold real rows ..."""
    layers: tuple[int, int]
    """... in layers [lo, hi) ..."""
    model: int = 0
    """... of this model."""
    after: int | None = None
    """Handle of the device event that these rows wait for; None: they are there."""


@attrs.define(eq=False)
class Request:
    """How far a request is."""

    items: Mapping[int, list[int]] = attrs.Factory(dict)
    there: dict[Layer, There] = attrs.Factory(dict)
    tokens: dict[int, int] = attrs.Factory(dict)
    """By model: the most of any layer."""
    finished: Finished | None = None
    news: int = 0
    """Rises with every Computed."""

    def add(self, computed: Computed) -> None:
        """The engine has computed more."""
        self.items = computed.items
        self.news += 1
        self.tokens[computed.model] = max(self.tokens.get(computed.model, 0), computed.tokens)
        there = There(computed.tokens, () if computed.after is None else (computed.after,))
        for layer in range(*computed.layers):
            self.there[computed.model, layer] = there

    def program(self, pair: Pair, grants: Sequence[Grants], whole: bool) -> CopyProgram:
        """All rows that go to a sink; before prefill is over those that any layer has, or the `whole` to come.

        Raises BAD_GRANT, STATE_POSITION.
        """
        by_group, ends = {g.group: g for g in grants}, asked(pair, grants)
        sinks, sources = windows(grants), {}
        for route in pair.routes:
            for box in route.boxes:
                group = pair.source.group(box.source_group)
                if group.kind == ItemKind.HANDOFF:
                    continue
                items, tokens = self.items, self.tokens.get(group.model, 0)
                if self.finished is not None:
                    check(by_group[route.group], self.finished.tokens)
                    items, tokens = self.finished.items, self.finished.tokens
                elif whole:
                    _, tokens = ends[group.model]
                elif group.kind != ItemKind.SLOT:
                    window = sinks[route.group]
                    count = max(min(window.count, tokens - window.first), 0)
                    sinks[route.group] = attrs.evolve(window, count=count)
                sources[group.id] = Window(0, tokens, np.array(items.get(group.id, []), np.int64))
        return pair.lower(sources, sinks)

    def complete(self, pair: Pair, grants: Sequence[Grants]) -> dict[Layer, tuple[int, ...]]:
        """Layers all of whose rows for a sink are there, and the device events that those wait for."""
        ends = asked(pair, grants)
        return {layer: t.after for layer, t in self.there.items() if t.tokens >= ends.get(layer[0], (0, 0))[1]}


def asked(pair: Pair, grants: Sequence[Grants]) -> dict[int, tuple[int, int]]:
    """Positions [first, end) that a sink asked for, by model."""
    found: dict[int, tuple[int, int]] = {}
    for grant in grants:
        group = pair.sink.group(grant.group)
        if group.kind == ItemKind.HANDOFF:  # its window says nothing (KVP-HND-WINDOW)
            continue
        model = group.model
        first, end = found.get(model, (grant.first, grant.valid))
        found[model] = min(first, grant.first), max(end, grant.valid)
    return found


def check(grant: Grants, tokens: int) -> None:
    """Raise BAD_GRANT or STATE_POSITION where a grant wants what a request of so many tokens does not have."""
    if grant.valid > tokens:
        raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{grant.group}].valid", str(tokens), str(grant.valid))
    if grant.state_after not in (None, tokens):
        path = f"grants[{grant.group}].state_after"
        raise RemoteError(ErrorCode.STATE_POSITION, path, str(tokens), str(grant.state_after))
