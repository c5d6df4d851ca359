"""Offers, leases and their ends, frame by frame (feature PULL)."""

from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Pool
from kvproto.errors import RemoteError
from kvproto.session.limits import RESEND
from kvproto.session.table import TransferState
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, ErrorCode, Feature, Outcome, Proof, Transport
from tests.pools import allocate, memory
from tests.session import driver

CONTENT = b"c" * 32
LEASE = 10.0


class PullWorld(driver.Hearing):
    """One in which sinks read; a copy takes no time and moves 1 byte."""

    features = (Feature.VERIFY, Feature.PULL)

    def __init__(self, source: m.Geometry) -> None:
        super().__init__(source)
        self.kept: dict[str, Pool] = {
            f"s{r.rank}": allocate(source, r.rank, {g.id: driver.PAGES for g in source.groups}) for r in source.ranks
        }

    def accept(self, address: str, session: int) -> None:
        pool, made = self.kept[address], self.sources[address].sessions[session]
        made.accept_register(Transport.SHM)
        if made.pulls:
            made.owner.register(1, pool, (memory(pool).region,), tuple(pool.layout.columns.values()), self.now)

    def run(self) -> None:
        super().run()
        for name, sink in self.sinks.items():
            for event in self.events(name, "MemoryAsked"):
                self.told[name].remove(event)
                sink.accept_register(event.session, Transport.SHM, self.now)
                super().run()
            for event in self.events(name, "MemoryUnwanted"):
                self.told[name].remove(event)
                sink.unmapped(event.session, event.epoch, self.now)
                super().run()

    def serve(self, address: str = "s0", **changes: Any) -> None:
        """Offer whatever was asked for."""
        self.run()
        for event in self.events(address, "TransferRequested"):
            if self.sources[address].active(event):
                self.offer(address, event, **changes)
        self.run()

    def go_on(self) -> None:
        """Answer what is asked, and read what is offered."""
        for address in self.sources:
            self.serve(address, lease=100.0)
        for name in self.sinks:
            self.read(name)

    def offer(self, address: str, serve: driver.TransferRequested, lease: float = LEASE, items: Any = None) -> None:
        made, session = driver.grants(self.kept[address], 6), self.sources[address].sessions[serve.session]
        assert session.described is not None
        assert session.peer is not None
        routes = session.described.plan.between(self.sources[address].me.rank, session.peer.rank)
        drawn = sorted({box.source_group for route in routes for box in route.boxes})
        offered = tuple(made[g] if items is None else attrs.evolve(made[g], **items(g)) for g in drawn)
        self.sources[address].offer(
            serve, self.now, lease, offered, Outcome.CONTINUE, self.handoff(address, serve.session), ()
        )

    def read(self, name: str, begin: bool = True) -> None:
        """Read every offer that may be read."""
        sink = self.sinks[name]
        for event in self.events(name, "Offered"):
            if not begin or sink.may_read(event.attempt, self.now):
                sink.read(event.attempt, 1, self.now)
        self.run()


def ready(source_tp: int = 2, sink_tp: int = 1) -> PullWorld:
    return PullWorld(driver.geometry(source_tp)).ready(sink_tp)


def test_a_source_whose_register_cannot_be_read_ends_the_session() -> None:
    """KVP-ERR-ANSWER: no other Register follows, and a sink that waited for one would wait for ever."""
    world = PullWorld(driver.geometry(1))

    def damaged(to: str, frame: bytes) -> int:
        message = decode(frame)
        if isinstance(message, m.Register) and message.access == Access.READ:
            world.sinks[to].receive("s0", frame[:-1], world.now)
            return 0
        return world.hear(to, frame)

    world.keep = damaged
    sink = world.join("d0", driver.geometry(1))
    assert not any(session.open for session in world.sources["s0"].sessions.values())
    assert sink.over
    assert len(world.events("d0", "Disconnected")) == 1


def asked(world: PullWorld, deadline: float = 60.0) -> int:
    """A request that is finished and asked for by every sink rank; the number of the last."""
    made = driver.ticket(deadline)
    world.prefill(made, CONTENT)
    numbers = [world.transfer(name, made, CONTENT) for name in world.sinks]
    world.run()
    return numbers[-1]


def offered(world: PullWorld, **changes: Any) -> driver.Offered:
    """The offer that the first sink has."""
    asked(world)
    for address in world.sources:
        world.serve(address, **changes)
    event: driver.Offered = world.events("d0", "Offered")[-1]
    return event


def serves_another(world: PullWorld) -> None:
    before = len(world.events("d0", "Arrived"))
    for name in world.told:
        world.told[name] = [e for e in world.told[name] if not isinstance(e, driver.Offered | driver.TransferRequested)]
    asked(world)
    for address in world.sources:
        world.serve(address)
    for name in world.sinks:
        world.read(name)
    assert len(world.events("d0", "Arrived")) == before + 1


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 1), (2, 1), (1, 2)])
def test_offer_pulled_released(source_tp: int, sink_tp: int) -> None:
    world = ready(source_tp, sink_tp)
    asked(world)
    for address in world.sources:
        world.serve(address)
    for name in world.sinks:
        assert not world.events("s0", "Released")
        world.read(name)
    assert [len(world.events(d, "Arrived")) for d in world.sinks] == [1] * sink_tp
    assert [len(world.events(s, "Released")) for s in world.sources] == [1] * source_tp
    assert [len(world.of(x)) for x in (m.Offer, m.Pulled, m.Released, m.Done)] == [source_tp * sink_tp] * 3 + [0]
    done = [d for name in world.sinks for e in world.events(name, "Arrived") for d in e.done]
    assert sorted(d.writer for d in done) == sorted(list(range(source_tp)) * sink_tp)
    serves_another(world)


def test_released_of_one_rank_comes_while_another_is_awaited() -> None:
    world = ready(2)
    asked(world)
    world.serve("s0")
    world.read("d0")
    assert [len(world.of(x)) for x in (m.Pulled, m.Released, m.Error)] == [1, 1, 0]
    world.serve("s1")
    world.told["d0"] = [e for e in world.told["d0"] if not isinstance(e, driver.Offered) or e.offer.writer == 1]
    world.read("d0")
    assert len(world.events("d0", "Arrived")) == 1


def test_both_sides_register() -> None:
    world = ready(1)
    sink, source = sorted(world.of(m.Register), key=lambda x: int(x.access))
    assert (sink.access, source.access) == (Access.WRITE, Access.READ)
    assert [bytes(h.data) for r in sink.regions for h in r.handles] == [b""]
    assert (sink.source, sink.sink, sink.plan, sink.routes) == (source.source, source.sink, source.plan, source.routes)


LIES: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "digest": ({"source": bytes(32)}, ErrorCode.DESCRIPTION_MISMATCH, "source"),
    "access": ({"access": Access.WRITE}, ErrorCode.NO_TRANSPORT, "access"),
    "routes": ({"routes": ()}, ErrorCode.ROUTE_MISMATCH, "routes[0]"),
    "plan": ({"plan": bytes(32)}, ErrorCode.ROUTE_MISMATCH, "plan"),
    "columns": ({"columns": ()}, ErrorCode.BAD_COLUMNS, "columns"),
    "regions": ({"regions": ()}, ErrorCode.BAD_COLUMNS, "columns[0].region[0]"),
}


def twist(world: driver.World, cls: type, **changes: Any) -> None:
    """Change what sources say."""
    for source in world.sources.values():
        original = source.to_send

        def to_send(now: float, original: Any = original) -> list[Any]:
            out = []
            for conn, frame in original(now):
                message = decode(frame)
                out.append((conn, encode(attrs.evolve(message, **changes)) if isinstance(message, cls) else frame))
            return out

        source.to_send = to_send  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_lies_of_its_memory_is_refused(lie: str) -> None:
    changes, code, path = LIES[lie]
    world = PullWorld(driver.geometry(1))
    twist(world, m.Register, **changes)
    world.join("d0", driver.geometry(1))
    for name, by_us in (("d0", True), ("s0", False)):
        (event,) = world.events(name, "Refused")
        assert (event.error.code, event.error.path, event.by_us) == (code, path, by_us)
    assert not world.sinks["d0"].ready


def test_the_sink_is_ready_once_it_has_mapped_what_it_reads() -> None:
    """Not with the next frame: none need come."""
    world = PullWorld(driver.geometry(1))
    sink = world.sink("d0", driver.geometry(1))
    driver.World.run(world)
    (asked,) = world.events("d0", "MemoryAsked")
    assert not sink.ready
    sink.accept_register(asked.session, Transport.SHM, world.now)
    assert sink.ready


def test_memory_that_cannot_be_mapped() -> None:
    world = PullWorld(driver.geometry(1))
    sink = world.sink("d0", driver.geometry(1))
    error = RemoteError(ErrorCode.TRANSPORT_FAILED, "regions[0].handles", "", "")
    sink.accept_register = lambda number, _, now: sink.refuse_register(number, error, now)  # type: ignore[method-assign]
    world.run()
    assert world.events("s0", "Refused")[0].error.code == ErrorCode.TRANSPORT_FAILED
    assert not sink.ready


def test_without_the_feature_the_source_may_not_register_or_offer() -> None:
    world = driver.World(driver.geometry(1))
    world.join("d0", driver.geometry(1))
    (session,) = world.sources["s0"].sessions.values()
    pool, described = world.pools["d0"], session.described
    session.request(
        m.Register, 0.0, source=described.of_source.digest, sink=described.of_sink.digest, epoch=1, access=Access.READ,
        regions=(memory(pool).region,), columns=tuple(pool.layout.columns.values()), plan=described.plan.digest,
        routes=described.refs,
    )  # fmt: skip
    world.run()
    assert world.events("d0", "ProtocolError")[0].error.code == ErrorCode.UNEXPECTED_MESSAGE
    assert not [e for e in world.told["d0"] if isinstance(e, driver.RegisterAsked)]


BAD: dict[str, tuple[dict[str, Any], ErrorCode]] = {
    "writer": ({"writer": 1}, ErrorCode.WRONG_PEER),
    "epoch": ({"epoch": 2}, ErrorCode.BAD_GRANT),
    "handoff": ({"handoff": (m.HandOff(group=9, data=b"x"),)}, ErrorCode.WRONG_PEER),
    "begins": ({"begins": (m.Begin(group=0, first=4),)}, ErrorCode.BAD_GRANT),
}
BAD_ITEMS: dict[str, tuple[Any, ErrorCode]] = {
    "beyond the pool": (np.array([0, driver.PAGES], np.uint32), ErrorCode.OUT_OF_REGION),
    "too few": (np.array([3], np.uint32), ErrorCode.BAD_GRANT),
    "none": (None, ErrorCode.BAD_GRANT),
}


def nothing_was_read(world: PullWorld, code: ErrorCode) -> None:
    assert not world.events("d0", "Offered")
    assert world.lost() == [(code, Proof.PROVEN)]
    assert not world.of(m.Pulled)
    assert len(world.events("s0", "Released")) == 1


@pytest.mark.parametrize("case", [*BAD, "other groups"])
def test_an_offer_that_lies_is_refused_and_nothing_is_read(case: str) -> None:
    world = ready(1)
    others = {"grants": tuple(driver.grants(world.kept["s0"], 6)[g] for g in (0, 2))}
    changes, code = BAD.get(case, (others, ErrorCode.BAD_GRANT))
    honest = world.sources["s0"].to_send
    twist(world, m.Offer, **changes)
    asked(world)
    world.serve()
    nothing_was_read(world, code)
    world.sources["s0"].to_send = honest  # type: ignore[method-assign]
    serves_another(world)


@pytest.mark.parametrize("case", BAD_ITEMS)
def test_offered_items_that_lie_are_refused_and_nothing_is_read(case: str) -> None:
    items, code = BAD_ITEMS[case]
    world = ready(1)
    asked(world)
    world.serve(items=lambda group: {"items": items} if group == 1 else {})
    nothing_was_read(world, code)
    serves_another(world)


def test_done_in_place_of_an_offer_is_refused() -> None:
    world = ready(1)
    asked(world)
    (event,) = world.events("s0", "TransferRequested")
    done = m.Done(
        session=event.session, request=99, sequence=1, writer=0, groups=event.transfer.writers, bytes=1,
        outcome=Outcome.CONTINUE, handoff=(),
    )  # fmt: skip
    world.hears("d0", done)
    nothing_was_read(world, ErrorCode.UNEXPECTED_MESSAGE)


def test_released_while_it_is_read_spoils_the_transfer() -> None:
    world = ready(1)
    event = offered(world)
    sink = world.sinks["d0"]
    assert sink.may_read(event.attempt, world.now)
    offer = event.offer
    notice = m.Released(session=offer.session, sequence=offer.sequence)
    sink.receive("s0", encode(notice), world.now)
    assert not sink.wanted(event.attempt)
    assert not world.events("d0", "Lost")  # its own copy writes on
    sink.unread(event.attempt, None, world.now)
    world.run()
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.UNEXPECTED_MESSAGE


def test_the_lease_counts_from_what_it_answers() -> None:
    """KVP-PUL-SPEED: the source sends its Offer 8 s after the Transfer; of 10 s, less than 2 are left."""
    world = ready(1)
    asked(world)
    world.pass_time(8.0)
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Renew)
    world.serve()
    (event,) = world.events("d0", "Offered")
    assert not world.sinks["d0"].may_read(event.attempt, world.now)
    world.keep = world.hear
    world.pass_time(2.0)  # it comes again
    assert len(world.of(m.Renew)) == 2
    ((session, *_),) = [world.sinks["d0"].sessions.values()]
    lease = session.attempts[1].lease
    assert lease.end == 8.0 + LEASE * 63 / 64  # from when the Renew was sent first
    assert lease.offer == event.offer


def test_renew_in_time_is_answered_by_what_the_ticket_leaves() -> None:
    world = ready(1)
    asked(world, deadline=12)
    world.serve()
    assert world.of(m.Offer)[0].lease == 10_000
    world.pass_time(6.0)
    (renewed,) = world.of(m.Renewed)
    assert renewed.lease == 6_000
    world.read("d0")
    assert len(world.events("d0", "Arrived")) == 1


def test_renew_too_late_is_refused_and_nothing_is_read() -> None:
    """KVP-PUL-RENEW, KVP-PUL-READ."""
    world = ready(1)
    event = offered(world)
    world.now += 10.5
    assert not world.sinks["d0"].may_read(event.attempt, world.now)
    world.pass_time(0.0)
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path, lost.proof) == (ErrorCode.DEADLINE, "lease", Proof.PROVEN)
    assert not world.of(m.Pulled)
    assert len(world.events("s0", "Released")) == 1
    serves_another(world)


def test_a_copy_that_outlives_its_lease_is_lost() -> None:
    """KVP-PUL-READ."""
    world = ready(1)
    event = offered(world)
    sink = world.sinks["d0"]
    assert sink.may_read(event.attempt, world.now)
    sink.read(event.attempt, 1, world.now + 10.0)
    world.run()
    assert world.lost() == [(ErrorCode.DEADLINE, Proof.PROVEN)]
    assert not world.of(m.Pulled)
    serves_another(world)


@pytest.mark.parametrize("proof", list(Proof))
def test_abort_waits_for_the_sinks_own_copy(proof: Proof) -> None:
    world = ready(2)
    number = asked(world)
    for address in world.sources:
        world.serve(address)
    first, second = world.events("d0", "Offered")
    sink = world.sinks["d0"]
    assert sink.may_read(first.attempt, world.now)
    sink.abort(number, RemoteError(ErrorCode.ABORTED, "", "", ""), world.now)
    world.run()
    assert [x.session for x in world.of(m.Abort)] == [second.offer.session]
    assert [len(world.events(s, "Released")) for s in world.sources] == [0, 1]
    assert not world.events("d0", "Lost")
    assert not sink.may_read(second.attempt, world.now)
    sink.unread(first.attempt, None, world.now, proof)
    world.run()
    assert world.events("d0", "Lost")[0].proof == proof
    assert [len(world.events(s, "Released")) for s in world.sources] == [1, 1]
    serves_another(world)


def test_the_failure_of_one_rank_ends_the_offer_of_another() -> None:
    world = ready(2)
    asked(world)
    world.serve("s0")
    (serve,) = world.events("s1", "TransferRequested")
    world.sources["s1"].failed(serve, RemoteError(ErrorCode.INTERNAL, "", "", ""), 0.0)
    world.run()
    assert world.lost() == [(ErrorCode.INTERNAL, Proof.PROVEN)]
    assert not world.sinks["d0"].wanted(world.events("d0", "Offered")[0].attempt)
    serves_another(world)


def test_goodbye_of_a_source_while_it_is_read() -> None:
    world = ready(2)
    asked(world)
    for address in world.sources:
        world.serve(address)
    first, second = world.events("d0", "Offered")
    sink = world.sinks["d0"]
    assert sink.may_read(first.attempt, world.now)
    world.sources["s0"].goodbye("over")
    world.run()
    assert not sink.wanted(first.attempt)
    assert not sink.wanted(second.attempt)
    assert not world.events("d0", "Lost")
    sink.read(first.attempt, 1, world.now)
    world.run()
    assert world.lost() == [(ErrorCode.PEER_LOST, Proof.PROVEN)]


def test_goodbye_of_a_sink_gives_back_what_it_was_lent() -> None:
    world = ready(1)
    offered(world)
    assert not world.events("s0", "Released")
    world.sinks["d0"].goodbye("over")
    world.run()
    assert len(world.events("s0", "Released")) == 1


def test_a_silent_sink_keeps_what_it_was_lent_until_the_lease_ends() -> None:
    """KVP-PUL-OFFER."""
    world = ready(1)
    made = driver.ticket(300.0)
    source = world.sources["s0"]
    source.prefill(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.serve(lease=200.0)
    world.keep = lambda to, frame: 0
    for now in (10.0, 40.0, 199.0):  # Ping, then no Pong: given up
        source.on_time(now)
    assert [e for e in source.take_events() if type(e).__name__ == "Disconnected"]
    assert not [e for e in source.take_events() if type(e).__name__ == "Released"]
    source.on_time(200.0)
    assert [e for e in source.take_events() if type(e).__name__ == "Released"]


def test_an_offer_that_comes_again_is_answered_as_before() -> None:
    world = ready(1)
    asked(world)
    world.serve()
    (offer,) = world.of(m.Offer)
    for _ in range(2):
        world.sinks["d0"].receive("s0", encode(offer), world.now)
    world.run()
    assert len(world.events("d0", "Offered")) == 1
    world.read("d0")
    world.hears("d0", offer)
    assert [x.bytes for x in world.of(m.Pulled)] == [1, 1]
    assert len(world.events("d0", "Arrived")) == 1


def test_an_offer_may_wait_for_its_reader_until_the_deadline_of_its_ticket() -> None:
    """A sink that answers Ping is alive, and its copy may take longer than other requests may."""
    world = ready(1)
    world.now = 100.0
    asked(world, deadline=80.0)
    world.serve(lease=80.0)
    (session,) = world.sources["s0"].sessions.values()
    while world.now + RESEND < 180.0:
        world.pass_time(RESEND)
        assert session.open
    world.pass_time(RESEND)
    assert not session.open


def test_an_offer_that_crosses_an_abort_is_not_read() -> None:
    world = ready(1)
    number = asked(world)
    (serve,) = world.events("s0", "TransferRequested")
    world.offer("s0", serve)
    world.abort("d0", number)
    assert not world.events("d0", "Offered")
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN
    world.pass_time(60.0)
    assert len(world.of(m.Offer)) == 1  # it is not sent again
    serves_another(world)


def test_renew_of_what_was_never_offered() -> None:
    world = ready(1)
    asked(world)
    (number,) = world.sources["s0"].sessions
    world.sources["s0"].receive("d0", encode(m.Renew(session=number, request=99, sequence=1, lease=5)), world.now)
    world.run()
    assert world.events("s0", "ProtocolError")[0].error.code == ErrorCode.DEADLINE
    (session,) = world.sources["s0"].sessions.values()
    assert session.attempts[1].state == TransferState.ACCEPTED
