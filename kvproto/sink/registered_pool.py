"""A pool of a sink as one source replica fills it: registered under a plan, unpacked into, and verified."""

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import attrs
import numpy as np

from kvproto.copying.execute import PageSums
from kvproto.copying.grants import cut_to_begins, items_needed, size_of
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, Operations, RankLayout, Runs, Window, windows
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Plan
from kvproto.rank.background import Background
from kvproto.rank.checksums import PageSumming, Sums
from kvproto.rank.handles import LentPool
from kvproto.rank.pool import columns_without_gaps
from kvproto.rank.registration import register
from kvproto.session import Exposed, Registration, SinkEndpoint
from kvproto.session.plan_cache import Planned
from kvproto.session.push import Unpacker
from kvproto.transport.base import StreamDelivery, Transport
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.messages import Done, Grants, Offer


class Quarantine:
    """Pages of lost transfers that a peer may still write: counted, limited, freed only by proof (KVP-END-REUSE)."""

    def __init__(self, layout: RankLayout, share: float) -> None:
        """`share` of a group's items, 0 to 1, may be in quarantine before `check` raises."""
        self._layout, self._share = layout, share
        self._held: dict[Hashable, Counter[int]] = {}
        self.counts: dict[int, int] = {}
        """The number of items by group id; never modified in place, so that any thread may read it."""

    def hold(self, fetch: Hashable, grants: Mapping[int, Grants]) -> None:
        """Add the pages of a fetch that was lost while its writes may still arrive."""
        self._held[fetch] = Counter({id: size_of(grant) for id, grant in grants.items()})
        self._count()

    def free(self, fetch: Hashable) -> None:
        """Remove the pages of a fetch, as nothing can write them any more."""
        if self._held.pop(fetch, None) is not None:
            self._count()

    def check(self) -> None:
        """Raise LocalError(BUSY) if too many items are in quarantine."""
        for group, count in self.counts.items():
            whole = self._layout.columns[group].items
            if count > self._share * whole:
                raise LocalError(
                    ErrorCode.BUSY,
                    f"quarantine[{self._layout.groups[group].name}]",
                    f"at most {self._share:.0%} of {whole} pages",
                    str(count),
                    "end the engines that may still write them, or restart this one",
                )

    def _count(self) -> None:
        self.counts = dict(sum(self._held.values(), Counter()))


@attrs.define(eq=False)
class LentSinkPool(LentPool):
    """A pool of a sink, which sources fill."""

    quarantine: Quarantine = attrs.field(kw_only=True)


class RegisteredPool:
    """One pool, registered with all ranks of one replica under one plan."""

    def __init__(self, endpoint: SinkEndpoint, lent: LentSinkPool, transports: Sequence[Transport]) -> None:
        self.lent, self._endpoint, self._transports = lent, endpoint, tuple(transports)
        columns = tuple(lent.pool.layout.columns.values())
        self.exposed = Exposed(lent.number, columns, self._register)
        """The pool as the endpoint knows it."""
        self.digests: tuple[bytes, bytes] | None = None
        """Digests of the Descriptions that the plan is made from, once they are known."""
        self._programs: SinkPrograms | None = None
        self._prepared: tuple[Plan, SinkPrograms] | None = None
        """The programs that were computed outside turns, and their plan."""
        self._deliveries: dict[tuple[int, int], StreamDelivery] = {}
        """Deliveries of packed streams, by source rank and transport."""

    @property
    def programs(self) -> "SinkPrograms":
        """The programs of the source ranks; only once both Descriptions are known."""
        if self._programs is None:
            plan, source = self._endpoint.plan, self._endpoint.source
            assert plan is not None
            assert source is not None
            ready, programs = self._prepared or (None, None)
            self._programs = (
                programs if programs and ready is plan else SinkPrograms(plan, source, self.lent.pool.layout)
            )
            self.digests = self._endpoint.digests
        return self._programs

    def prepare(self, planned: Planned) -> None:
        """Lower each pair ahead of use, which takes long if rows lie in many ways; may be called from any thread."""
        layout = self.lent.pool.layout
        programs = SinkPrograms(planned.plan, planned.theirs.geometry, layout)
        with contextlib.suppress(KvprotoError):  # raised again in the turn that needs it
            for writer in planned.plan.required(layout.rank):
                programs.pair(writer)
        self._prepared = planned.plan, programs

    @property
    def unpacking(self) -> bool:
        """Whether anything is being unpacked into the pool."""
        return bool(self._deliveries) and any(delivery.receiver.busy for delivery in self._deliveries.values())

    def _register(self, source: int) -> Registration:
        """Register what one source rank may write: the pages, staging slots instead of them, or nothing."""
        programs, memories = self.programs, self.lent.pool.memories
        nothing = programs.pair(source).nothing
        registration, packed = register(self._transports, memories, nothing, lambda: programs.runs(source))
        self._deliveries |= {(source, transport): delivery for transport, delivery in packed.items()}
        return registration

    def close(self) -> None:
        """Release what was registered in addition to the pool; no source may still write it."""
        for delivery in self._deliveries.values():
            delivery.close()
        self._deliveries.clear()

    def unpacker(self, writer: int, transport: int, grants: Mapping[int, Grants]) -> Unpacker:
        """The function that makes the unpacker of a source rank's stream, by where late windows begin; BAD_GRANT."""
        delivery, programs = self._deliveries[writer, transport], self.programs
        whole = delivery.unpacker(programs.program(writer, grants))
        return lambda begins: (
            delivery.unpacker(programs.program(writer, self.begun(grants, begins))) if begins else whole
        )

    def unpackers(
        self, streamed: Mapping[int, int], grants: Mapping[int, Grants], lacking: bool = False
    ) -> dict[int, Unpacker]:
        """Unpackers of source ranks whose bytes are packed, by rank; with `lacking`, only where all items are named."""
        unpackers = {}
        for writer, transport in streamed.items():
            with contextlib.suppress(KvprotoError) if lacking else contextlib.nullcontext():
                unpackers[writer] = self.unpacker(writer, transport, grants)
        return unpackers

    def begun(self, grants: Mapping[int, Grants], begins: Mapping[int, int]) -> Mapping[int, Grants]:
        """The grants, reduced to the rows that a source rank holds."""
        if not begins:
            return grants
        return {g.group: g for g in cut_to_begins(self.lent.pool.layout, tuple(grants.values()), begins)}

    def sums(self, done: Done, grants: Mapping[int, Grants]) -> Sums:
        """The checksums of what a source rank has sent, computed over this side's memory; raises BAD_GRANT."""
        program = self.programs.program(done.writer, self.begun(grants, begins_stated(done)))
        return Sums(program, self._transports[0], self.lent.pool.memories, sink=True)

    def difference(self, done: Done, sums: Sums) -> int | None:
        """The first group whose checksum by a source rank is not this side's; None if all are equal."""
        sent = {checksum.group: checksum.value for checksum in done.checksums or ()}
        for group, value in sums.by_group.items():
            if sent.get(group) != value:
                return group
        return None

    def pages(self, done: Done, sums: Sums, group: int) -> PageSumming | None:
        """The checksums of single pages of a group, to find what differs, if the source rank has sent its own."""
        stated = any(checksum.group == group for checksum in done.checksums or ())
        if not stated or Feature.VERIFY_PAGES not in self._endpoint.features():
            return None
        ops = Operations(sums.program.ops[sums.program.ops["group"] == group])
        return sums.of_pages([self.lent.pool.layout.groups[group]], attrs.evolve(sums.program, operations=ops))

    def failure(self, done: Done, sums: Sums, group: int, pages: PageSums | None) -> RemoteError:
        """The error for a checksum that differs, and where, if sums of `pages` are known (KVP-VERIFY-SINK)."""
        sent = {checksum.group: checksum for checksum in done.checksums or ()}
        path = f"checksums[{self.lent.pool.layout.groups[group].name}]"
        mine, theirs = f"{sums.by_group[group]:016x}", f"{sent[group].value:016x}" if group in sent else "none"
        advice = f"from source rank {done.writer}: the bytes changed on their way; do not decode from them"
        if pages is not None:
            advice = f"{pages.first_difference(sent[group].pages)}; {advice}"
        return RemoteError(ErrorCode.VERIFY_FAILED, path, mine, theirs, advice)


def prepared(
    background: Background, current: Callable[[], RegisteredPool | None], wake: Callable[[], None]
) -> Callable[[Callable[[], Planned], Callable[[Planned | KvprotoError], None]], None]:
    """A function that plans outside turns, prepares the current pool for the plan, and calls `wake`."""

    def defer(work: Callable[[], Planned], then: Callable[[Planned | KvprotoError], None]) -> None:
        registered = current()  # that of the Description to plan with; the pool may move before the plan is there

        def both() -> Planned:
            planned = work()
            if registered is not None:
                registered.prepare(planned)
            return planned

        def pass_on(planned: Planned | KvprotoError) -> None:
            then(planned)
            wake()

        background.defer(both, pass_on)

    return defer


def begins_stated(said: Done | Offer) -> dict[int, int]:
    """Beginnings of late windows that a Done or an Offer states, by group id."""
    return {begin.group: begin.first for begin in said.begins} if said.begins else {}


class SinkPrograms:
    """The programs of one source replica, by source rank, computed on the sink's side alone.

    The sink does not know the source's layout, but what it needs from a program (the order of a packed stream, the rows
    of a checksum, the number of runs) does not depend on it. So a packed layout stands in for it.
    """

    def __init__(self, plan: Plan, source: Geometry, own: RankLayout) -> None:
        self._plan, self._source, self._own = plan, source, own
        self._pairs: dict[int, Pair] = {}

    def pair(self, writer: int) -> Pair:
        """The rank pair, cached, with a stand-in for the source's layout."""
        known = self._pairs.get(writer)
        if known is None:
            columns = columns_without_gaps(self._source, writer, {g.id: 1 for g in self._source.groups})[0]
            routes = self._plan.between(writer, self._own.rank)
            known = self._pairs[writer] = Pair(routes, RankLayout(self._source, writer, columns), self._own)
        return known

    def program(self, writer: int, grants: Mapping[int, Grants]) -> CopyProgram:
        """The program of a source rank's writes; places on the source's side have no meaning. Raises BAD_GRANT."""
        pair, drawn = self.pair(writer), dict[int, list[Grants]]()
        for route in pair.routes:
            for id in {box.source_group for box in route.boxes}:
                drawn.setdefault(id, []).append(grants[route.group])
        sources = {}
        for share in pair.source.shares.values():
            first, count = 0, 0
            if spans := [(grant.first, grant.first + grant.count) for grant in drawn.get(share.group, ())]:
                first = min(spans)[0]
                count = max([end for _, end in spans]) - first
            items = max(items_needed(pair.source.groups[share.group], share.cp_rank, first, count), 1)
            sources[share.group] = Window(first, count, np.arange(items))
        return pair.lower(sources, windows(grants.values()))

    def runs(self, writer: int) -> Runs:
        """The runs that a source rank writes for two scattered pages of each group; none if that cannot be computed."""
        grants = {}
        shares = {s.group: s for r in self._own.geometry.ranks if r.rank == self._own.rank for s in r.owns}
        for group in self._own.geometry.groups:
            rows = 2 * group.rows * group.cp_size if KINDS[group.kind].paged else 1
            first, count = group.origin if group.cp_size > 1 else 0, rows * group.tokens_per_row
            need = items_needed(group, shares[group.id].cp_rank, first, count) if group.id in shares else 0
            items = np.arange(need, dtype=np.uint32)[::-1] * 2
            grants[group.id] = Grants(group=group.id, first=first, count=count, valid=first + count, items=items)
        try:
            return self.program(writer, grants).runs()
        except KvprotoError:  # the source deals its tokens from a later one on
            return Runs(0, 0)

    def handoff(self, done: Done) -> dict[tuple[int, str], bytes]:
        """The hand-off bytes of a Done that `check_outcome` accepted, by this side's group id and part name."""
        parts_of = {}
        routes = {r.group: r for r in self._plan.between(done.writer, self._own.rank)}
        for handoff in done.handoff:
            group = self._own.groups[handoff.group]
            parts = [group.parts[p] for p in sorted({box.part for box in routes[handoff.group].boxes})]
            at = 0
            for p in parts:
                parts_of[group.id, p.name] = bytes(handoff.data[at : at + p.lane_bytes])
                at += p.lane_bytes
        return parts_of
