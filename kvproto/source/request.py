"""The record of one request at a source: its handle for the engine, its rows, its ticket, and its sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvproto.errors import KvprotoError, LocalError, bad, check_type, check_whole
from kvproto.events import Over
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import KINDS, NO_AXES
from kvproto.prompt import Prompt, Ticket
from kvproto.rank.base import EngineRank
from kvproto.rank.handles import Handle
from kvproto.rank.machine import machine
from kvproto.rank.page_tables import PageRules, PageTables, RequestTables, Since
from kvproto.rank.pool import Pool
from kvproto.session.tickets import TicketState
from kvproto.source.prefill import Computed, Finished, Prefill
from kvproto.source.schedule import Send
from kvproto.wire.enums import ErrorCode, Outcome

if TYPE_CHECKING:
    from kvproto.source.node import SourceNode

_HOWEVER_LONG = -1.0
"""The timeout of a lock that is waited for without end."""
_AT_ONCE = 1 << 20
"""Bytes that `finish` may copy in the thread that calls it."""


class Request(Handle[Over]):
    """The handle of a request at a source, from its ticket until its pages are free.

    It ends with Freed, with Undelivered if a sink rank may not have the request, or with Expired after its deadline.
    """

    def __init__(self, rank: EngineRank, calls: SourceNode, ticket: Ticket, prompt: Prompt) -> None:
        super().__init__(rank)
        self._calls, self.pool = calls, rank.pool
        self.ticket, self.prompt, self._length = ticket, prompt, len(prompt)
        self.computed_at: float | None = None
        """The time at which `finish` was called, in seconds of `machine.monotonic`."""
        self._finished = False
        self._tables = RequestTables(self.pool.page_rules)
        """The page table so far, as the engine has stated it."""
        self._ends: dict[tuple[int, int], int] = {}
        """The number of tokens computed so far, by model and layer."""
        # of the thread that takes turns
        self.prefill = Prefill(prompt.axes)
        """The rows computed so far."""
        self.state: TicketState | None = None
        """The session's state of its ticket; None until the request was accepted."""
        self.sends: list[Send] = []
        """The copies to each sink rank."""
        self.changed_for: dict[int, KvprotoError] = {}
        """By sink rank, the pages that were changed after `finish` and before its copy was over."""
        self.over: Over | None = None
        """The event with which it ends, once known; it ends when nothing reads its items any more."""

    def accept(self) -> None:
        """Have the rank answer the sinks that ask for this request."""
        digest, tokens, axes = self.prompt.digest, len(self.prompt), self.prompt.axes
        self._post(lambda: self._calls.expect(self, digest, tokens, axes))

    def computed(
        self,
        pages: PageTables,
        tokens: int,
        *,
        layers: tuple[int, int] | None = None,
        model: int = 0,
        after: int | None = None,
        since: Since | None = None,
    ) -> None:
        """Report that tokens [0, `tokens`) of layers [lo, hi) of a model (None: of all its layers) are in the pages.

        `pages` is the page table by group name: page ids, [pages], from the page of token 0 on, or the id of a slot.
        Rows on other axes are due at `finish`; until then the table of such a group may be empty. The I/O thread, or
        the next `step`, copies the rows while prefill goes on, so that this never holds up a forward pass. `after` is
        the handle of a CUDA event after which the rows are written. `since` is the first token whose rows are still
        held, for all groups of tokens or by group name (None: as before): earlier pages may be in use again, their
        entries are ignored, and a sink that asks for them is refused (KVP-GRANT-HELD). Harmless once the request has
        ended, by its deadline for example. Raises LocalError: OUT_OF_RANGE for a number outside its range; BAD_GRANT
        for tables that do not fit or contradict earlier calls, and for fewer tokens of a layer than before;
        OUT_OF_REGION; ITEM_ALIAS for a page named twice; UNEXPECTED_MESSAGE after `finish`.
        """
        if self.pool is not self._rank.pool:  # the pool was taken back, which ended the request
            return
        tokens, model = self._checked(tokens), check_whole("model", model, 0)
        _check_after(after, self.pool)
        stated = self._tables.check(pages, tokens, NO_AXES, since)
        self._check_open("computed")
        span = _layers(self.pool, model)
        if layers is not None:
            depth = _depth(self.pool.geometry, model)
            if not _is_span(layers) or not 0 <= layers[0] <= layers[1] <= depth:
                raise LocalError(ErrorCode.OUT_OF_RANGE, "layers", f"(lo, hi) of {depth} layers", str(layers))
            span = int(layers[0]), int(layers[1])
        reported = [(model, layer) for layer in range(*span)]
        earlier = max((self._ends.get(layer, 0) for layer in reported), default=0)
        if tokens < earlier:
            advice = "tokens counts from the start of the prompt, those of earlier calls included"
            raise LocalError(ErrorCode.BAD_GRANT, "tokens", f"{earlier} or more, as before", str(tokens), advice)
        self._tables.record(stated)
        self._ends |= dict.fromkeys(reported, tokens)
        computed = Computed(stated.items, tokens, span, model, after, stated.since)
        self._post(lambda: self._calls.computed(self, computed), at_once=False)

    def finish(
        self,
        pages: PageTables,
        *,
        tokens: int | None = None,
        handoff: Mapping[str, Mapping[str, bytes]] | None = None,
        finished: bool = False,
        after: int | None = None,
        since: Since | None = None,
    ) -> None:
        """Report that prefill is over: tokens [0, `tokens`) (None: all) and all other axes are in the pages.

        `pages`, `after` and `since` are as for `computed`. `handoff` holds the bytes of the hand-off groups that this
        rank owns, by group and part name; `finished` states that the first token ends the text. Leave the pages from
        `since` on unchanged until this handle is done. Up to 1 MiB is copied before this returns. Harmless once the
        request has ended. Raises LocalError as `computed` does, and OUT_OF_RANGE for a `handoff` that the geometry does
        not state.
        """
        if self.pool is not self._rank.pool:
            return
        end = self._length if tokens is None else self._checked(tokens)
        stated = self._tables.check(pages, end, self.prompt.axes, since)
        rules = self.pool.page_rules
        data = _handoff(rules, handoff) if rules.handoffs or handoff is not None else {}
        check_type("finished", finished, bool, "True or False")
        _check_after(after, self.pool)
        outcome = Outcome.FINISHED if finished else Outcome.CONTINUE
        self._check_open("finish")
        self._tables.record(stated)
        self._finished, self.computed_at = True, machine.monotonic()
        prefilled = Finished(stated.items, end, outcome, data, after, stated.since)
        if self._rank.options.debug_pages:  # before the engine goes on and can change them
            axes, ask = self.prompt.axes, self._rank._driver.between_turns
            guarded = ask(lambda: self._calls.guard(prefilled, axes), _HOWEVER_LONG)
            prefilled = attrs.evolve(prefilled, guarded=guarded)
        # a large request is left to the I/O thread, so that its copy does not hold up the engine
        small = end * self.pool.token_bytes <= _AT_ONCE
        self._post(lambda: self._calls.finish(self, prefilled), at_once=small)

    def fail(self, reason: str | KvprotoError) -> None:
        """Report that this request cannot be produced; sinks that wait for it receive the reason."""
        check_type("reason", reason, (str, KvprotoError), "a str or a KvprotoError")
        error = reason if isinstance(reason, KvprotoError) else LocalError(ErrorCode.ABORTED, "", advice=reason)
        self._post(lambda: self._calls.refuse(self, error))

    def release(self) -> None:
        """End the request on a rank that takes part in no transfer, without handing anything over.

        Its pages are free when this handle is done. The ranks in `Freed.routed` decide the outcome (KVP-TRN-DUMMY).
        """
        self.fail("released by its engine")

    def _give_up(self, error: KvprotoError) -> None:
        self._calls.refuse(self, error)

    def lent(self, now: float) -> bool:
        """Whether a sink may still read items that it was offered."""
        return self.state is not None and any(attempt.lent(now) for attempt in self.state.users.values())

    def _check_open(self, call: str) -> None:
        if self._finished and not self.done:
            mine, advice = "nothing more after finish", "finish a request once"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, call, mine, "another call", advice)

    def _checked(self, tokens: int) -> int:
        return check_whole("tokens", tokens, 0, self._length, f"0 to {self._length}, the prompt's")


def _is_span(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(bound, int | np.integer) and not isinstance(bound, bool) for bound in value)
    )


def _check_after(after: Any, pool: Pool) -> None:
    if after is not None:
        check_type("after", after, int, "the handle of a CUDA event, an int", "torch: event.cuda_event")
        if all(memory.device is None for memory in pool.memories.values()):
            raise bad("after", "None, as the pool is in host memory", after, "call once the rows are written")


def _handoff(rules: PageRules, handoff: Mapping[str, Mapping[str, bytes]] | None) -> dict[tuple[int, str], bytes]:
    """Hand-off data by group id and part name; raises LocalError(OUT_OF_RANGE) if the geometry states other data."""
    handoff = {} if handoff is None else handoff
    check_type("handoff", handoff, Mapping, "a mapping of group name to a mapping of part name to bytes")
    groups = rules.owned_handoffs
    data_of = {}
    for name, group in groups.items():
        parts = handoff.get(name, {})
        check_type(f'handoff["{name}"]', parts, Mapping, "a mapping of part name to bytes")
        if unknown := sorted(parts.keys() - {part.name for part in group.parts}):
            known = [part.name for part in group.parts]
            raise LocalError(ErrorCode.OUT_OF_RANGE, f'handoff["{name}"]', f"parts of {known}", repr(unknown[0]))
        for part in group.parts:
            data = parts.get(part.name)
            path = f'handoff["{name}"]["{part.name}"]'
            if data is not None:
                advice = "of an array, pass its tobytes()"
                check_type(path, data, (bytes, bytearray, memoryview), f"{part.lane_bytes} bytes", advice)
                data = bytes(data)
            if data is None or len(data) != part.lane_bytes:
                came = "nothing" if data is None else f"{len(data)} bytes"
                advice = "pass what the geometry states"
                raise LocalError(ErrorCode.OUT_OF_RANGE, path, f"{part.lane_bytes} bytes", came, advice)
            data_of[group.id, part.name] = data
    if unknown := [name for name in handoff if name not in rules.handoffs]:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "handoff", f"hand-off groups of {sorted(groups)}", repr(unknown[0]))
    return data_of


def _layers(pool: Pool, model: int) -> tuple[int, int]:
    """The layers [lo, hi) of a model from the first to the last that a rank owns."""
    models = {group.id: group.model for group in pool.geometry.groups if KINDS[group.kind].has_memory}
    layout = pool.layout
    owned = [int(layer) for id in layout.columns if models[id] == model for layer in layout.shares[id].layers]
    if not owned and model not in models.values():
        raise bad("model", f"one of {sorted(set(models.values()))}", model)
    return (min(owned), max(owned) + 1) if owned else (0, 0)


def _depth(geometry: Geometry, model: int) -> int:
    """The number of layers of a model, up to the highest that any rank owns."""
    models = {group.id: group.model for group in geometry.groups}
    shares = [share for rank in geometry.ranks for share in rank.owns if models[share.group] == model]
    return max((int(layer) + 1 for share in shares for layer in share.layers), default=0)
