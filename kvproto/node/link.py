"""A sink rank's link to one source replica: its sessions, what it reads of it, and what has become of each transfer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import attrs

from kvproto.copying.late import begun
from kvproto.copying.page_sums import page_sums
from kvproto.copying.program import CopyProgram, windows
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.node.backstage import Backstage
from kvproto.node.expected import Expected
from kvproto.node.pool import RankPool
from kvproto.node.pulling import Puller
from kvproto.node.quarantine import Quarantine
from kvproto.node.registrar import register
from kvproto.node.told import Received, TransferLost, TransferProven
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.session import Exposed, Party, Registration, SinkEndpoint
from kvproto.session.events import Arrived, Lost, Offered, Planned, Proven, Ready, RegisterAsked
from kvproto.session.push import Unpacker
from kvproto.session.timers import Timer
from kvproto.transport.base import StreamDelivery, Transport
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof
from kvproto.wire.messages import Done, Grants, Offer

__all__ = ["Here", "SourceLink"]


@attrs.frozen
class Here:
    """What all links of a sink rank share."""

    party: Party
    pool: RankPool
    transports: tuple[Transport, ...]
    readers: tuple[Transport, ...]
    """Those that read a source's memory; empty without PULL."""
    features: tuple[Feature, ...]
    quarantine: Quarantine
    backstage: Backstage
    runs: dict[tuple[str, int, int], int] = attrs.Factory(dict)
    """The latest run of each source rank, whichever link has met it."""


@attrs.frozen
class _Wanted:
    """A transfer that waits for the link to be ready."""

    ticket: bytes = attrs.field(repr=False)
    content: bytes
    grants: Mapping[int, Grants]
    axes: Collection[str]


class SourceLink:
    """One source replica as a sink rank sees it; transfers carry the sink's own numbers."""

    def __init__(
        self, here: Here, key: int, seed: str, replica: tuple[str, int] | None = None, server: bytes | None = None
    ) -> None:
        """Greets the rank that listens at `seed`, where `replica` must answer; `key` tells links apart.

        `server` is the public key that every rank of the source must have, where addresses need one (KVP-NET-KEY).
        """
        self._here, self.key, self.seed, self.server = here, key, seed, server
        columns = tuple(here.pool.layout.columns.values())
        self.endpoint = SinkEndpoint(
            here.party, here.pool.layout.geometry, Exposed(1, columns, self._registration), here.features, seed,
            proving=[t.capabilities.code for t in here.transports if t.capabilities.death_is_proof],
            replica=replica,
        )  # fmt: skip
        self.endpoint.plans.defer, self.endpoint.runs = here.backstage.defer, here.runs
        self._puller = Puller(self.endpoint, here.pool, here.readers)
        self._expected: Expected | None = None
        self._deliveries: dict[tuple[int, int], StreamDelivery] = {}
        """By source rank and transport."""
        self._waiting: dict[int, _Wanted] = {}
        self._numbers: dict[int, int] = {}
        """The endpoint's number of a transfer to ours."""
        self._grants: dict[int, Mapping[int, Grants]] = {}
        self._deadlines: dict[int, Timer] = {}
        """By when the source must have accepted a transfer, by our number."""
        self._lost: list[TransferLost] = []
        self._agreed: Planned | None = None
        self.endpoint.dial(time.monotonic())

    # what the engine says

    def fetch(
        self, number: int, ticket: bytes, content: bytes, grants: Mapping[int, Grants], seconds: float | None = None,
        axes: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Ask for a request, at once or when the link is ready; `seconds`: how long the source may take to accept.

        `axes` are those whose lengths the prompt states: the request is lost where neither side has one of them.
        """
        if seconds is not None:
            deadline = time.monotonic() + seconds
            self._deadlines[number] = self.endpoint.timers.at(deadline, partial(self._check_accepted, number))
        self._waiting[number] = _Wanted(ticket, content, grants, axes)
        self._ask()

    def abort(self, number: int, error: KvprotoError) -> None:
        """Stop a transfer; TransferLost follows."""
        if self._waiting.pop(number, None) is not None:
            self._undo_deadline(number)
            self._lost.append(TransferLost(number, error, True))
            return
        inner = next((n for n, ours in self._numbers.items() if ours == number), None)
        if inner is not None:
            self.endpoint.abort(inner, error, time.monotonic())

    def refuse(self, error: KvprotoError) -> None:
        """The link cannot be used."""
        self.endpoint.refused = self.endpoint.refused or error
        self.fail(error)

    def fail(self, error: KvprotoError) -> None:
        """The link will never be ready: what waits for it is lost."""
        for number in list(self._waiting):
            self.abort(number, error)

    # turns

    @property
    def over(self) -> bool:
        """Whether it was refused or closed, so that only another link leads to the source."""
        return self.endpoint.refused is not None or self.endpoint.over

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way, and nothing of an earlier one waits for proof."""
        return not (self._numbers or self._waiting or self._lost)

    def timeout(self) -> float | None:
        """Seconds until there is something to do."""
        found = [self._puller.poll_interval]
        if self._lost:
            found.append(0.0)
        if any(each.receiver.busy for each in self._deliveries.values()):
            found += [t.capabilities.poll_interval for t in self._here.transports]
        if (deadline := self.endpoint.next_deadline()) is not None:
            found.append(max(deadline - time.monotonic(), 0.0))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def take(self) -> list[Any]:
        """What has happened since the last call."""
        told: list[Any] = []
        more = True
        while more:
            events = self.endpoint.take_events()
            for event in events:
                told += self._hear(event)
            more = self._puller.advance() or bool(events)
            self._ask()
        if self.over:
            self.fail(self.endpoint.refused or _gone(self.seed))
        told += self._lost
        self._lost = []
        return told

    def close(self, reason: str) -> None:
        """Goodbye; stop reading, then unmap."""
        self._puller.close()
        self.endpoint.goodbye(reason)

    def _check_accepted(self, number: int, now: float) -> None:
        """Give up what the source has not accepted in time; once it has, it counts the deadline."""
        inner = next((n for n, ours in self._numbers.items() if ours == number), None)
        if number in self._waiting or (inner is not None and not self.endpoint.accepted(inner)):
            self.abort(number, RemoteError(ErrorCode.DEADLINE, "ticket", advice=_UNANSWERED.format(self.seed)))

    def _undo_deadline(self, number: int) -> None:
        if (timer := self._deadlines.pop(number, None)) is not None:
            timer.cancel()

    def _ask(self) -> None:
        """Send what waits, once the link is ready and no source rank is suspect."""
        if not self._waiting or not self.endpoint.ready or self.endpoint.suspect or self._expected is None:
            return
        waiting, self._waiting = self._waiting, {}
        for number, wanted in waiting.items():
            try:
                self._check_axes(wanted.axes)
                streams = self.endpoint.streamed().items()
                unpackers = {writer: self._unpacker(writer, by, wanted.grants) for writer, by in streams}
                inner = self.endpoint.transfer(
                    wanted.ticket, wanted.content, dict(wanted.grants), time.monotonic(), unpackers
                )
            except KvprotoError as error:
                self._lost.append(TransferLost(number, error, True))
                continue
            self._numbers[inner], self._grants[number] = number, wanted.grants

    def _check_axes(self, axes: Collection[str]) -> None:
        """Raise LocalError for an axis that no group of either side has."""
        sides = self._here.pool.layout.geometry, self.endpoint.source
        known = {axis_of(group) for side in sides if side is not None for group in side.groups} - {TOKENS}
        if unknown := sorted(set(axes) - known):
            mine = f"axes of {sorted(known)}" if known else "none, as all caches of both sides are of tokens"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, repr(unknown[0]))

    def _unpacker(self, writer: int, transport: int, grants: Mapping[int, Grants]) -> Unpacker:
        """What makes the unpacker of a source rank's stream; raises BAD_GRANT."""
        assert self._expected is not None
        delivery, expected = self._deliveries[writer, transport], self._expected
        whole = delivery.unpacker(expected.program(writer, grants))
        return lambda begins: (
            delivery.unpacker(expected.program(writer, self._begun(grants, begins))) if begins else whole
        )

    def _begun(self, grants: Mapping[int, Grants], begins: Mapping[int, int]) -> Mapping[int, Grants]:
        """What was asked for, as far as a source rank holds it."""
        if not begins:
            return grants
        return {g.group: g for g in begun(self._here.pool.layout, tuple(grants.values()), begins)}

    def _hear(self, event: Any) -> list[Any]:
        match event:
            case RegisterAsked():
                self._puller.map(event)
            case Offered():
                grants = self._grants[self._numbers[event.transfer]]
                grants = self._begun(grants, _begins(event.offer))
                self._puller.offered(event, windows(grants.values()))
            case Arrived():
                return [self._received(event)]
            case Lost():
                number = self._numbers[event.transfer]
                grants = self._grants.pop(number)
                self._undo_deadline(number)
                proven = event.proof == Proof.PROVEN
                if proven:
                    del self._numbers[event.transfer]
                else:
                    self._here.quarantine.hold(number, grants)
                return [TransferLost(number, event.error, proven)]
            case Proven():
                number = self._numbers.pop(event.transfer)
                self._here.quarantine.free(number)
                return [TransferProven(number)]
            case Planned():
                self._planned()
                self._agreed = event
            case Ready():
                return [self._agreed]  # an engine hears of a plan when it can be used
            case _:
                return [event]
        return []

    def _planned(self) -> None:
        described = self.endpoint.plan, self.endpoint.source
        if self._expected is None and described[0] is not None and described[1] is not None:
            self._expected = Expected(described[0], described[1], self._here.pool.layout)

    def _registration(self, source: int) -> Registration:
        """What one source rank may write: the pages, staging slots in their place, or nothing."""
        self._planned()
        assert self._expected is not None
        expected = self._expected
        nothing = expected.pair(source).nothing
        made, packed = register(self._here.transports, self._here.pool.memories, nothing, lambda: expected.runs(source))
        self._deliveries |= {(source, transport): each for transport, each in packed.items()}
        return made

    def _received(self, event: Arrived) -> Received | TransferLost:
        number = self._numbers.pop(event.transfer)
        grants = self._grants.pop(number)
        self._undo_deadline(number)
        handoff: dict[tuple[int, str], bytes] = {}
        sums: dict[tuple[int, int], int] = {}
        since: dict[int, int] = {}
        assert self._expected is not None
        try:
            for done in event.done:
                since |= {group: max(first, since.get(group, 0)) for group, first in _begins(done).items()}
                handoff |= self._expected.handoff(done)
                if Feature.VERIFY in self.endpoint.features():
                    sums |= self._verify(done, grants)
        except KvprotoError as error:  # every writer is Done: nothing can arrive any more
            return TransferLost(number, error, True)
        finished = all(d.outcome == Outcome.FINISHED for d in event.done)
        return Received(
            number, Outcome.FINISHED if finished else Outcome.CONTINUE, handoff, sums,
            {d.writer: d.bytes for d in event.done}, event.seconds, since,
        )  # fmt: skip

    def _verify(self, done: Done, grants: Mapping[int, Grants]) -> dict[tuple[int, int], int]:
        """Compare what a source rank has sent with what is here (KVP-VERIFY-SINK)."""
        assert self._expected is not None
        program = self._expected.program(done.writer, self._begun(grants, _begins(done)))

        def take(some: CopyProgram) -> Mapping[int, int]:
            return self._here.transports[0].checksums(some, self._here.pool.memories, sink=True)

        here, sent = take(program), {c.group: c for c in done.checksums or ()}
        for group, value in here.items():
            if group in sent and sent[group].value == value:
                continue
            spec = self._here.pool.layout.group(group)
            path = f"checksums[{spec.name}]"
            theirs = f"{sent[group].value:016x}" if group in sent else "none"
            advice = f"from source rank {done.writer}: the bytes changed on their way; decode nothing of it"
            if group in sent and Feature.VERIFY_PAGES in self.endpoint.features():
                some = CopyProgram(
                    program.maps,
                    program.ops[program.ops["group"] == group],
                    program.tokens_per_row,
                    program.state_after,
                    program.others,
                )
                sums = page_sums(some, {group: spec}, take)[group]
                advice = f"{sums.first_difference(sent[group].pages)}; {advice}"
            raise RemoteError(ErrorCode.VERIFY_FAILED, path, f"{value:016x}", theirs, advice)
        return {(done.writer, group): value for group, value in here.items()}


_UNANSWERED = (
    "the ticket's deadline passed and the source at {} has not answered: see that it runs, and that its name is known"
)


def _begins(said: Done | Offer) -> dict[int, int]:
    return {begin.group: begin.first for begin in said.begins or ()}


def _gone(seed: str) -> RemoteError:
    return RemoteError(ErrorCode.PEER_LOST, "", "waiting", f"the source at {seed} is gone", "make a new ticket")
