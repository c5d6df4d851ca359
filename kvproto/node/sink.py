"""A sink rank: it dials a source, registers its pool, and asks for requests by ticket."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, Runs, Side, Window, windows
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.net import Dialer
from kvproto.node.pool import Pool, pack
from kvproto.node.pulling import Puller
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.session import Party, Registration, SinkEndpoint
from kvproto.session.events import Arrived, Event, Lost, Offered, Proven, RegisterAsked, SessionRefused
from kvproto.transport import default
from kvproto.transport.base import StagedDelivery, Transport
from kvproto.transport.process import Watch
from kvproto.wire.enums import ErrorCode, Feature, ItemKind, Outcome, Proof
from kvproto.wire.messages import Done, Grants, Handle, Region, Ticket

__all__ = ["Received", "SinkNode"]


QUARANTINE = 0.5
"""Share of a pool that may wait for proof."""


@attrs.frozen
class Received:
    """Everything of a request is here."""

    transfer: int
    outcome: Outcome
    handoff: dict[tuple[int, str], bytes]
    """By this side's group id and part name."""
    checksums: dict[tuple[int, int], tuple[int, int]]
    """(source rank, group) to (as sent, as arrived); equal, or the transfer is Lost with VERIFY_FAILED."""
    bytes: dict[int, int]
    """Written by each source rank."""
    seconds: float


class SinkNode:
    """Everything that a decode rank needs of kvproto, for one source replica; call `poll` often."""

    def __init__(
        self,
        party: Party,
        geometry: Geometry,
        pool: Pool,
        dialer: Dialer,
        seed: str,
        verify: bool = True,
        movers: Sequence[Transport] = (),
        pull: bool = False,
        quarantine: float = QUARANTINE,
    ) -> None:
        """`movers` are offered in order of preference; without any, the one of the pool's memory is.

        With `pull` this side reads, where the source offers that too (feature PULL). With more than the share
        `quarantine` of a group's items without proof, `transfer` refuses.
        """
        self.movers = tuple(movers) or (default(pool.memories),)
        features: tuple[Feature, ...] = (Feature.VERIFY,) if verify else ()
        features += tuple({f for m in movers for f in m.capabilities.features})
        features += (Feature.PULL,) if pull else ()
        self.pool, self._dialer = pool, dialer
        columns = tuple(pool.side.columns.values())
        regions = tuple(attrs.evolve(m.region, id=id) for id, m in pool.memories.items())
        self.endpoint = SinkEndpoint(
            party, geometry, regions, columns, features, seed, self._registration,
            proving=[m.capabilities.code for m in self.movers if m.capabilities.death_is_proof],
        )  # fmt: skip
        self._grants: dict[int, dict[int, Grants]] = {}
        self._unproven: dict[int, dict[int, int]] = {}
        """Items in quarantine, by transfer and group."""
        self._stand_ins: dict[int, Pair] = {}
        """Pairs of source ranks, with a layout of ours in place of theirs ..."""
        self._stood: tuple[Plan, Geometry] | None = None
        """... by this plan, of this source."""
        self._most = quarantine
        self._watches: dict[int, Watch | None] = {}
        """Of the writers' processes, by session; None: its end cannot be seen from here."""
        self._failed: list[Event] = []
        self._deliveries: dict[int, StagedDelivery] = {}
        """The latest of each source rank."""
        readers = [m for m in self.movers if m.capabilities.reads] if pull else []
        if pull and not readers:
            readers = [default(pool.memories)]
        self._puller = Puller(self.endpoint, pool, readers, lambda: time.monotonic())
        self.endpoint.dial(time.monotonic())

    def _registration(self, source: int) -> Registration:
        """What one source rank may write: the pages by some transports, staging memory by others."""
        memories = self.pool.memories
        handles: dict[int, list[Handle]] = {id: [] for id in memories}
        more: list[Region] = []
        self._deliveries.pop(source, None)
        staged_by = None
        nothing = self._stand_in(source).nothing
        for mover in self.movers:
            next_id = max(memories, default=-1) + 1 + len(more)
            exposed = mover.expose(memories, next_id, nothing, lambda: self._runs(source))
            for id, some in exposed.handles.items():
                handles[id] += some
            more += exposed.regions
            if exposed.staged is not None:
                self._deliveries[source] = exposed.staged
                staged_by = mover.capabilities.code
        regions = [attrs.evolve(m.region, id=id, handles=tuple(handles[id])) for id, m in memories.items()]
        delivery = self._deliveries.get(source)
        return Registration((*regions, *more), None if delivery is None else delivery.receiver, staged_by)

    def _runs(self, source: int) -> Runs:
        """Those of a source rank's part of two items, apart in memory, in each group of pages; none: not known."""
        grants = {}
        mine = next(r for r in self.endpoint.geometry.ranks if r.rank == self.pool.side.rank)
        shares = {share.group: share for share in mine.owns}
        for group in self.endpoint.geometry.groups:
            rows = 2 * group.rows * group.cp_size if group.kind == ItemKind.PAGE else 1
            first, count = group.origin if group.cp_size > 1 else 0, rows * group.tokens_per_row
            need = items_needed(group, shares[group.id].cp_rank, first, count) if group.id in shares else 0
            items = np.arange(need, dtype=np.uint32)[::-1] * 2
            grants[group.id] = Grants(group=group.id, first=first, count=count, valid=first + count, items=items)
        try:
            return self._seen(source, grants).runs()
        except KvprotoError:  # a source that deals its tokens from later on
            return Runs(0, 0)

    def transfer(self, ticket: Ticket, content: bytes, first: int, tokens: int, items: dict[int, list[int]]) -> int:
        """Ask for tokens [first, tokens); `items` by group id, from the one that holds the first owned row.

        Raises BUSY where too many items are in quarantine.
        """
        self._check_quarantine()
        grants = {}
        for group in self.endpoint.geometry.groups:
            real = group.kind != ItemKind.HANDOFF
            window = (first, tokens - first, tokens) if real else (0, 0, 0)
            grants[group.id] = Grants(
                group=group.id, first=window[0], count=window[1], valid=window[2],
                items=np.array(items[group.id] if real else [], np.uint32),
            )  # fmt: skip
        packers = {
            source: self._deliveries[source].unpacker(self._seen(source, grants)) for source in self.endpoint.staged()
        }
        number = self.endpoint.transfer(bytes(ticket.key), content, grants, time.monotonic(), packers)
        self._grants[number] = grants
        return number

    def abort(self, transfer: int, reason: str) -> None:
        """Stop a transfer; Lost follows."""
        self.endpoint.abort(transfer, RemoteError(ErrorCode.ABORTED, "", reason, ""), time.monotonic())

    def poll(self) -> list[Event | Received]:
        """Receive and answer; returns what the engine should know."""
        now = time.monotonic()
        self._flush()
        dead = self._dead()
        for address, frame in self._dialer.receive():  # what they said last is heard before they are given up
            self.endpoint.receive(address, frame, now)
        for session in dead:
            self.endpoint.died(session, now)
        for session, process in self.endpoint.writers().items():
            if session not in self._watches:
                self._watches[session] = Watch.of(process)
        self.endpoint.on_time(now)
        self._flush()
        told: list[Event | Received] = [*self._failed]
        self._failed.clear()
        more = True
        while more:
            for event in self.endpoint.take_events():
                if isinstance(event, Arrived):
                    told.append(self._received(event))
                elif isinstance(event, RegisterAsked):
                    self._puller.map(event)
                elif isinstance(event, Offered):
                    self._puller.offered(event, windows(self._grants[event.transfer].values()))
                else:
                    if isinstance(event, Lost):
                        grants = self._grants.pop(event.transfer, {})
                        if event.proof != Proof.PROVEN:
                            self._unproven[event.transfer] = {
                                g: 0 if some.items is None else len(some.items) for g, some in grants.items()
                            }
                    elif isinstance(event, Proven):
                        self._unproven.pop(event.transfer, None)
                    told.append(event)
            more = self._puller.advance()
        self._flush()
        return told

    def _dead(self) -> list[int]:
        """Sessions whose writer has ended."""
        found = [session for session, watch in self._watches.items() if watch is not None and watch.ended]
        for session in found:
            self._watches[session] = None
        return found

    @property
    def quarantined(self) -> dict[int, int]:
        """Items by group id that may still be written: nothing proves that they are not. Poll on until there are none.

        They come back with Proven, once their writers have ended; to replace this node by one for the source's next
        incarnation, keep this one until then.
        """
        total: dict[int, int] = {}
        for items in self._unproven.values():
            for group, count in items.items():
                total[group] = total.get(group, 0) + count
        return {group: count for group, count in total.items() if count}

    def _check_quarantine(self) -> None:
        for group, count in self.quarantined.items():
            whole = self.pool.side.columns[group].items
            if count > self._most * whole:
                raise LocalError(
                    ErrorCode.BUSY, f"quarantine[{self.pool.side.group(group).name}]",
                    f"at most {self._most:.0%} of {whole} items", str(count),
                    "end the engines that may still write them, or start this one anew",
                )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether this side reads or unpacks, so that `poll` has something to find out soon."""
        return self._puller.busy or any(each.receiver.busy for each in self._deliveries.values())

    def _flush(self) -> None:
        for address, frame in self.endpoint.to_send(time.monotonic()):
            try:
                self._dialer.send(address, frame)
            except KvprotoError as error:  # an address of Welcome that may not be used
                self._failed.append(SessionRefused(str(address), error, by_us=True))

    def _received(self, event: Arrived) -> Received | Lost:
        grants = self._grants.pop(event.transfer)
        sums: dict[tuple[int, int], tuple[int, int]] = {}
        handoff: dict[tuple[int, str], bytes] = {}
        try:
            for done in event.done:
                handoff |= self._handoff(done)
                if done.checksums is not None and Feature.VERIFY in self.endpoint.features():
                    sums |= self._verify(done, grants)
        except KvprotoError as error:
            # every writer is Done, so nothing can arrive any more
            return Lost(event.transfer, error, Proof.PROVEN)
        outcome = Outcome.FINISHED if all(d.outcome == Outcome.FINISHED for d in event.done) else Outcome.CONTINUE
        return Received(event.transfer, outcome, handoff, sums, {d.writer: d.bytes for d in event.done}, event.seconds)

    def _handoff(self, done: Done) -> dict[tuple[int, str], bytes]:
        plan = self.endpoint.plan
        assert plan is not None
        found = {}
        routes = {r.group: r for r in plan.between(done.writer, self.pool.side.rank)}
        for part in done.handoff:
            group = self.pool.side.group(part.group)
            parts = [group.parts[p] for p in sorted({box.part for box in routes[part.group].boxes})]
            if len(part.data) != sum(p.lane_bytes for p in parts):
                raise RemoteError(
                    ErrorCode.OUT_OF_RANGE,
                    "handoff.data",
                    f"{sum(p.lane_bytes for p in parts)} bytes",
                    f"{len(part.data)} bytes",
                )
            at = 0
            for p in parts:
                found[group.id, p.name] = bytes(part.data[at : at + p.lane_bytes])
                at += p.lane_bytes
        return found

    def _seen(self, writer: int, grants: Mapping[int, Grants]) -> CopyProgram:
        """A source rank's program as seen from here: its layout does not matter, so a packed one stands in for it."""
        plan, source = self.endpoint.plan, self.endpoint.source
        assert plan is not None
        assert source is not None
        rank = next(r for r in source.ranks if r.rank == writer)
        groups = {g.id: g for g in source.groups}
        drawn: dict[int, list[Grants]] = {}
        for route in plan.between(writer, self.pool.side.rank):
            for id in {box.source_group for box in route.boxes}:
                drawn.setdefault(id, []).append(grants[route.group])
        sources = {}
        for share in rank.owns:
            some = drawn.get(share.group, [])
            first = min((g.first for g in some), default=0)
            count = max((g.first + g.count for g in some), default=0) - first
            items = max(items_needed(groups[share.group], share.cp_rank, first, count), 1)
            sources[share.group] = Window(first, count, np.arange(items))
        return self._stand_in(writer).lower(sources, windows(grants.values()))

    def _stand_in(self, writer: int) -> Pair:
        """A source rank's pair; its side of it is asked for nothing but what a stream's order depends on."""
        plan, source = self.endpoint.plan, self.endpoint.source
        assert plan is not None
        assert source is not None
        if self._stood is None or self._stood[0] is not plan or self._stood[1] is not source:
            if self._stood != (plan, source):  # each session has its own, as a rule equal
                self._stand_ins.clear()
            self._stood = plan, source
        known = self._stand_ins.get(writer)
        if known is None:
            columns = pack(source, writer, {g.id: 1 for g in source.groups})[0]
            known = Pair(plan.between(writer, self.pool.side.rank), Side(source, writer, columns), self.pool.side)
            self._stand_ins[writer] = known
        return known

    def _verify(self, done: Done, grants: dict[int, Grants]) -> dict[tuple[int, int], tuple[int, int]]:
        """Compare checksums."""
        program = self._seen(done.writer, grants)
        here = self.movers[0].checksums(program, self.pool.memories, sink=True)
        sent = {c.group: c.value for c in done.checksums or ()}
        for group, value in here.items():
            if sent.get(group) != value:
                name = self.pool.side.group(group).name
                raise RemoteError(
                    ErrorCode.VERIFY_FAILED, f"checksums[{name}]", f"{value:016x}", f"{sent.get(group, 0):016x}",
                    f"from source rank {done.writer}: the bytes changed on their way; decode nothing of it",
                )  # fmt: skip
        return {(done.writer, g): (sent[g], v) for g, v in here.items()}

    @property
    def name_of_groups(self) -> dict[int, str]:
        """Group id to name."""
        return {g.id: g.name for g in self.endpoint.geometry.groups}

    def close(self, reason: str) -> None:
        """Goodbye to all, then close."""
        self._puller.close()
        self.endpoint.goodbye(reason)
        self._flush()
        for watch in self._watches.values():
            if watch is not None:
                watch.close()
        self._dialer.close()
        for mover in self.movers:
            mover.close()
