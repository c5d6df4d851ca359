"""Packed bytes through a session: when Chunk and Credit are legal, what is refused, and when a transfer is over."""

import contextlib
import random
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Pool
from kvproto.errors import LocalError, RemoteError
from kvproto.session import Registration
from kvproto.session.records import SinkTransfer
from kvproto.transport.staging.staged import ChunkPiece, StagedLink, StagedReceiver, StagedSender
from kvproto.wire import decode
from kvproto.wire.enums import CreditKind, ErrorCode, Feature, Proof, Transport
from kvproto.wire.messages import Begin, Chunk, Credit, Data, Handle
from tests.cases import sampled
from tests.pools import memory
from tests.session.driver import Hearing, World, geometry, grants, ticket
from tests.session.test_hostile import CONTENT, twister
from tests.session.test_inline import Inline
from tests.transport.test_staged import Bytes, Event, Slots

SLOTS, SLOT, LENGTH = 4, 7, 25


class Staged(Hearing):
    """Every pair is staged; bytes of slots move at once, unpacking ends when the test says so."""

    features = (Feature.STAGED, Feature.VERIFY)

    def __init__(self, source_tp: int = 1, sinks: int = 1, transport: Transport = Transport.NIXL) -> None:
        self.slots: dict[str, list[Slots]] = {}
        self.events_: list[Event] = []
        self.transport = transport
        super().__init__(geometry(source_tp))
        for k in range(sinks):
            self.sink(f"d{k}", geometry(1), engine=f"d{k}")
        self.run()

    def staging(self, name: str, pool: Pool) -> Any:
        def registration(source: int) -> Any:
            slots = Slots(SLOTS, SLOT, self.events_)
            self.slots.setdefault(name, []).append(slots)
            region = attrs.evolve(memory(pool).region, handles=(Handle(transport=Transport.NIXL, data=b""),))
            return Registration((region,), {Transport.NIXL: StagedReceiver(slots)})

        return registration

    def accept(self, address: str, session: int) -> None:
        source = self.sources[address].sessions[session]
        self.link = StagedLink(Slots(SLOTS, SLOT, self.events_), Slots(SLOTS, SLOT, self.events_))
        source.accept_register(self.transport, self.link if self.transport == Transport.NIXL else None)

    def ask(self, name: str = "d0", late: bool = False) -> SinkTransfer:
        """A request that is finished at every source; its stream has LENGTH bytes from each, one less for each token
        with which its late window of the target begins.
        """
        made = ticket()
        self.prefill(made, CONTENT)
        sink = self.sinks[name]
        asked = grants(self.pools[name], 6)
        asked[0] = attrs.evolve(asked[0], late=late or None)
        unpackers = {
            rank: lambda begins: Bytes(bytearray(LENGTH - begins.get(0, 0)), self.events_)
            for rank in range(len(self.sources))
        }
        number = sink.transfer(bytes(made.key), CONTENT, asked, self.now, unpackers)
        self.run()
        return number

    def chunk(
        self, slot: int, offset: int, bytes_: int, last: bool = False, address: str = "s0",
        begins: tuple[Begin, ...] = (),
    ) -> None:  # fmt: skip
        """The source says that bytes of the last transfer asked of it are in a slot."""
        serve = self.events(address, "TransferRequested")[-1]
        self.sources[address].stream(serve, ChunkPiece(slot, offset, bytes_, last), begins)
        self.run()

    def stream(self, address: str = "s0") -> None:
        """All chunks of a transfer, unless it is aborted."""
        for k in range(0, LENGTH, SLOT):
            if self.sources[address].active(self.events(address, "TransferRequested")[-1]):
                self.chunk(k // SLOT, k, min(SLOT, LENGTH - k), k + SLOT >= LENGTH, address)

    def happen(self) -> None:
        """Unpacking ends."""
        for event in self.events_:
            event.happen()
        for sink in self.sinks.values():
            sink.on_time(self.now)
        self.run()

    def asked(self) -> Any:
        """The last transfer that was asked for."""
        return self.events("s0", "TransferRequested")[-1]

    def credits(self) -> list[list[int]]:
        """Slots of every Credit so far."""
        return [credit.slots.tolist() for credit in self.of(Credit)]

    def refuses(self, message: Any) -> ErrorCode:
        """The source's answer to a frame of a sink."""
        self.from_sink(message)
        (*_, (code, about)) = self.errors("d0")
        assert about == type(message).TYPE
        return code

    def send(self) -> None:
        """All of the last stream, as far as it is wanted."""
        self.stream()
        self.serve()
        self.happen()

    def still_serves(self, name: str = "d0") -> None:
        """A whole request of this sink."""
        self.ask(name)
        self.send()
        assert len(self.events(name, "Arrived")) == 1


def credit(world: Staged, *slots: int) -> Credit:
    (session, *_) = world.sources["s0"].sessions
    return Credit(session=session, kind=CreditKind.STAGING, slots=np.array(slots, np.uint32))


def reconnect(world: Staged) -> None:
    """The sink's connection has broken, and with it what was on its way was lost."""
    world.keep = world.hear
    assert world.sinks["d0"].sessions["s0"].resume(world.now)
    world.run()


def test_chunks_that_are_lost_with_their_connection_cost_no_slot() -> None:
    """KVP-STG-RESUMED, KVP-STG-BROKEN: more often than there are slots."""
    world = Staged()
    for _ in range(SLOTS + 2):
        world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), Chunk)
        world.ask()
        sender, asked = StagedSender(world.link, Bytes(bytearray(LENGTH), world.events_)), world.asked()
        while not (pieces := sender.step()):
            world.happen()
        world.sources["s0"].stream(asked, pieces[0], ())
        world.run()
        reconnect(world)
        with pytest.raises(RemoteError) as broken:
            sender.step()
        assert broken.value.code == ErrorCode.PEER_LOST
        while sender.stop() is None:
            world.happen()
        world.sources["s0"].failed(asked, broken.value, world.now)
        world.run()
    assert [e.error.code for e in world.events("d0", "Lost")] == [ErrorCode.PEER_LOST] * (SLOTS + 2)
    assert world.credits()[-1] == list(range(SLOTS))
    assert sorted(world.link.granted) == list(range(SLOTS))
    world.still_serves("d0")


def test_a_slot_that_is_still_written_when_it_is_granted_again() -> None:
    """KVP-STG-AFTER: it waits, and the others serve."""
    world = Staged()
    sender = StagedSender(world.link, Bytes(bytearray(LENGTH), world.events_))
    sender.step()
    world.happen()
    sender.step()  # the first is being written
    world.ask()
    reconnect(world)
    assert sorted(world.link.granted) == [2, 3]
    with pytest.raises(RemoteError, match="connection broke"):
        sender.step()
    assert sender.stop() is None
    assert sorted(world.link.granted) == [2, 3]
    world.happen()
    while sender.stop() is None:
        world.happen()
    assert sorted(world.link.granted) == list(range(SLOTS))


def test_a_stream_that_has_not_begun_survives_a_new_connection() -> None:
    """KVP-STG-BROKEN: none of its chunks was lost; and Credit is not counted twice."""
    world = Staged()
    world.ask()
    sender, asked = StagedSender(world.link, Bytes(bytearray(LENGTH), world.events_)), world.asked()
    reconnect(world)
    while not sender.done:
        for piece in sender.step():
            world.sources["s0"].stream(asked, piece, ())
        world.run()
        world.happen()
    world.serve()
    world.happen()
    assert len(world.events("d0", "Arrived")) == 1
    assert not world.errors()


def test_all_slots_are_granted_once_after_registered() -> None:
    world = Staged()
    assert world.credits() == [list(range(SLOTS))]
    kinds = [type(m).__name__ for _, m in world.heard]
    assert kinds.index("Credit") > kinds.index("Registered")


def test_a_slot_is_returned_when_it_is_unpacked() -> None:
    """KVP-STG-RETURN."""
    world = Staged()
    world.ask()
    world.chunk(2, 0, SLOT)
    assert len(world.credits()) == 1
    world.happen()
    assert world.credits()[1:] == [[2]]


def test_arrival_waits_for_the_last_byte() -> None:
    """KVP-STG-END: KVP-STG-END"""
    world = Staged()
    world.ask()
    world.stream()
    world.serve()
    assert not world.events("d0", "Arrived")
    world.happen()
    assert len(world.events("d0", "Arrived")) == 1


def test_arrival_waits_for_the_streams_of_all_writers() -> None:
    world = Staged(source_tp=2)
    world.ask()
    world.stream("s0")
    world.serve("s0")
    world.happen()
    assert not world.events("d0", "Arrived")
    world.stream("s1")
    world.serve("s1")
    world.happen()
    assert len(world.events("d0", "Arrived")) == 1


def test_done_before_the_last_chunk_loses_the_transfer() -> None:
    """KVP-STG-FIRST: what a source owes, seen at the sink."""
    world = Staged()
    world.ask()
    world.chunk(0, 0, SLOT)
    world.serve()
    world.happen()
    assert world.lost() == [(ErrorCode.UNEXPECTED_MESSAGE, Proof.PROVEN)]


def test_what_cannot_be_unpacked_loses_the_transfer() -> None:
    world = Staged()
    world.ask()
    world.stream()
    world.serve()
    world.events_[0].error = LocalError(ErrorCode.POOL_MOVED, "", "", "")
    world.happen()
    assert world.lost() == [(ErrorCode.POOL_MOVED, Proof.PROVEN)]
    assert not world.events("d0", "Arrived")


@pytest.mark.parametrize(
    ("slot", "offset", "bytes_", "last", "code"),
    [
        (SLOTS, SLOT, SLOT, False, ErrorCode.CREDIT),
        (0, SLOT, SLOT, False, ErrorCode.CREDIT),
        (1, 0, SLOT, False, ErrorCode.OUT_OF_RANGE),
        (1, SLOT + 1, SLOT, False, ErrorCode.OUT_OF_RANGE),
        (1, SLOT, SLOT + 1, False, ErrorCode.OUT_OF_RANGE),
        (1, SLOT, LENGTH, False, ErrorCode.OUT_OF_RANGE),
        (1, SLOT, SLOT, True, ErrorCode.FIELD_CONFLICT),
    ],
    ids=["not there", "not granted", "again", "gap", "beyond the slot", "beyond the stream", "not the last"],
)
def test_a_refused_chunk_costs_its_transfer_alone(
    slot: int, offset: int, bytes_: int, last: bool, code: ErrorCode
) -> None:
    """KVP-STG-BEYOND, KVP-STG-NEXT."""
    world = Staged(sinks=2)
    world.ask()
    world.chunk(0, 0, SLOT)
    world.chunk(slot, offset, bytes_, last)
    assert world.errors() == [(code, Chunk.TYPE)]
    assert not world.events("d0", "Lost")  # bytes are being unpacked into its pages
    world.happen()
    assert world.lost() == [(code, Proof.PROVEN)]
    assert len(world.events("s0", "Released")) == 1
    world.still_serves("d1")
    assert not world.events("d1", "ProtocolError")


def test_a_chunk_that_crosses_an_abort_returns_its_slot() -> None:
    world = Staged()
    number = world.ask()
    world.sinks["d0"].abort(number, RemoteError(ErrorCode.ABORTED, "", "", ""), world.now)
    world.chunk(3, 0, SLOT)  # before the source hears of it
    assert not world.errors()
    assert world.lost() == [(ErrorCode.ABORTED, Proof.PROVEN)]
    assert world.credits()[1:] == [[3]]


def test_pages_are_free_when_our_own_unpacking_is_over_whatever_the_source_can_prove() -> None:
    world = Staged()
    number = world.ask()
    source = world.sources["s0"]
    (serve,) = world.events("s0", "TransferRequested")
    source.copying(serve)
    world.chunk(0, 0, SLOT)
    world.abort("d0", number)
    source.failed(serve, RemoteError(ErrorCode.PEER_LOST, "", "", ""), world.now, Proof.UNPROVABLE)
    world.run()
    assert not world.events("d0", "Lost")
    world.happen()
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN


def test_a_copy_of_pages_that_cannot_be_proved_stays_so_when_it_is_aborted_again() -> None:
    world = World(geometry(1))
    sink, made = world.sink("d0", geometry(1)), ticket()
    world.run()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    (serve,) = world.events("s0", "TransferRequested")
    world.sources["s0"].copying(serve)
    world.sources["s0"].failed(serve, LocalError(ErrorCode.TRANSPORT_FAILED, "", "", ""), 0.0, Proof.UNPROVABLE)
    world.run()  # Failed, then Abort, then Drained
    assert world.lost() == [(ErrorCode.TRANSPORT_FAILED, Proof.UNPROVABLE)]
    assert sink.ready


def begin(first: int, group: int = 0) -> tuple[Begin, ...]:
    return (Begin(group=group, first=first),)


def test_the_first_chunk_says_where_a_late_window_begins() -> None:
    """KVP-GRANT-LATE: the stream is as much shorter; Done says the same."""
    world = Staged()
    world.ask(late=True)
    world.chunk(0, 0, SLOT, begins=begin(4))
    for k in range(SLOT, LENGTH - 4, SLOT):
        world.chunk(k // SLOT, k, SLOT, k + SLOT >= LENGTH - 4)
    (asked,) = world.events("s0", "TransferRequested")
    world.done("s0", asked, begins=begin(4))
    world.run()
    world.happen()
    (arrived,) = world.events("d0", "Arrived")
    assert [each.begins for each in arrived.done] == [begin(4)]
    assert [chunk.begins for chunk in world.of(Chunk)] == [begin(4), None, None]


@pytest.mark.parametrize(
    ("late", "chunk", "done", "path"),
    [
        (False, begin(4), None, "begins[0].group"),
        (True, begin(4, 1), None, "begins[0].group"),
        (True, begin(0), None, "begins[0].first"),
        (True, begin(7), None, "begins[0].first"),
        (True, begin(4), begin(3), "begins"),
        (True, begin(4), (), "begins"),
        (True, (), begin(4), "begins"),
    ],
)
def test_windows_that_cannot_begin_there_are_refused(
    late: bool, chunk: tuple[Begin, ...], done: tuple[Begin, ...] | None, path: str
) -> None:
    """KVP-GRANT-BEGINS: the slot comes back, and the next request is served."""
    world = Staged()
    world.ask(late=late)
    world.chunk(0, 0, SLOT, begins=chunk)
    if done is not None:
        world.done("s0", world.events("s0", "TransferRequested")[-1], begins=done)
        world.run()
    world.happen()
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path) == (ErrorCode.BAD_GRANT, path)
    assert lost.proof == Proof.PROVEN
    world.events_.clear()
    world.still_serves("d0")


def test_a_credit_for_what_the_source_has_or_for_no_slot_is_refused() -> None:
    """KVP-STG-TWICE."""
    world = Staged(sinks=2)
    for slots in ((0,), (SLOTS,), (1, 2**32 - 1)):
        assert world.refuses(credit(world, *slots)) == ErrorCode.CREDIT
    world.still_serves("d1")


@pytest.mark.parametrize(
    ("made", "kind", "credit"),
    [(Staged, CreditKind.INLINE, {"total": 9}), (Inline, CreditKind.STAGING, {"slots": np.array([0], np.uint32)})],
)
def test_credit_of_another_kind_is_refused(made: type[Staged | Inline], kind: CreditKind, credit: Any) -> None:
    """KVP-STG-KIND."""
    world = made()
    (session,) = world.sources["s0"].sessions
    world.from_sink(Credit(session=session, kind=kind, **credit))
    assert world.errors("d0") == [(ErrorCode.UNEXPECTED_MESSAGE, Credit.TYPE)]
    world.still_serves()


def test_credit_before_registered_is_refused() -> None:
    world = Staged(sinks=0)
    world.accept = lambda address, session: None  # type: ignore[method-assign]
    world.join("d0", geometry(1))
    assert world.refuses(credit(world, 0)) == ErrorCode.UNEXPECTED_MESSAGE


def test_credit_is_refused_where_nothing_is_staged() -> None:
    world = Unstaged()
    assert world.refuses(credit(world, 0)) == ErrorCode.UNEXPECTED_MESSAGE


class Unstaged(Staged):
    """The source takes another transport that is offered beside."""

    def __init__(self) -> None:
        super().__init__(sinks=0)
        self.transport = Transport.SHM
        self.join("d0", geometry(1))

    def staging(self, name: str, pool: Pool) -> Any:
        def registration(source: int) -> Any:
            made = super(Unstaged, self).staging(name, pool)(source)
            (region,) = made.regions
            both = attrs.evolve(region, handles=(*memory(pool).region.handles, *region.handles))
            return attrs.evolve(made, regions=(both,))

        return registration


def test_another_transport_needs_no_stream_and_hears_no_chunk() -> None:
    world = Unstaged()
    assert world.sinks["d0"].streamed() == {}
    world.ask()
    (session,) = world.sources["s0"].sessions
    chunk = Chunk(session=session, sequence=1, slot=0, offset=0, bytes=SLOT, last=False)
    world.hears("d0", chunk)
    assert world.errors() == [(ErrorCode.UNEXPECTED_MESSAGE, Chunk.TYPE)]
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.UNEXPECTED_MESSAGE
    world.ask()
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    assert not world.credits()


@pytest.mark.parametrize("state", ["unknown", "over"])
def test_a_chunk_outside_a_transfer_is_refused(state: str) -> None:
    world = Staged()
    (session,) = world.sources["s0"].sessions
    if state == "over":
        world.still_serves("d0")
    chunk = Chunk(session=session, sequence=1, slot=0, offset=0, bytes=1, last=False)
    world.hears("d0", chunk)
    assert world.errors() == [(ErrorCode.UNEXPECTED_MESSAGE, Chunk.TYPE)]
    assert not world.events("d0", "Lost")


@pytest.mark.parametrize(
    ("made", "features", "transport", "code"),
    [
        (Staged, (Feature.STAGED, Feature.VERIFY), Transport.CUDA, ErrorCode.NO_TRANSPORT),
        (Staged, (Feature.VERIFY,), Transport.NIXL, ErrorCode.FEATURE_MISSING),
        (Inline, (Feature.INLINE, Feature.VERIFY), Transport.SHM, ErrorCode.NO_TRANSPORT),
        (Inline, (Feature.VERIFY,), Transport.INLINE, ErrorCode.FEATURE_MISSING),
    ],
)
def test_a_source_that_takes_what_was_not_offered_is_refused(
    made: type[Staged | Inline], features: tuple[Feature, ...], transport: Transport, code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """KVP-REG-INLINE."""
    monkeypatch.setattr(made, "features", features)
    sink = made(transport=transport).sinks["d0"]
    assert not sink.ready
    assert sink.refused is not None
    assert sink.refused.code == code


@pytest.mark.parametrize(("seed", "made"), sampled(range(100), [Staged, Inline], every=5))
def test_nonsense_in_packed_bytes_and_credits_costs_nobody_else_anything(seed: int, made: Any) -> None:
    rng = random.Random(seed)
    world = made(sinks=0)
    bad, source = world.sink("bad", geometry(1), engine="bad"), world.sources["s0"]
    from_sink, from_source = bad.to_send, source.to_send
    twist = twister(rng, rng.choice([0.1, 0.5]), Chunk, Data, Credit)
    bad.to_send = lambda now: [(a, twist(f)) for a, f in from_sink(now)]
    source.to_send = lambda now: [(c, twist(f) if c == "bad" else f) for c, f in from_source(now)]
    world.run()
    for _ in range(6):
        world.ask("bad")
        with contextlib.suppress(RemoteError):
            world.send()
        world.serve()
        world.pass_time(3.0)
    ended = world.events("bad", "Arrived") + world.events("bad", "Lost")
    assert len({e.transfer for e in ended}) == len(ended) == 6
    world.join("good", geometry(1), engine="good")
    world.still_serves("good")
