"""Packed bytes inside a session: what is counted, what is refused, and what a lying side can do: nothing."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvproto import Pool
from kvproto.errors import RemoteError
from kvproto.session import Registration
from kvproto.session.inline import SourceInline
from kvproto.session.limits import MAX_CREDIT
from kvproto.session.records import SinkTransfer
from kvproto.transport.inline.transport import DataPiece, InlineLink, InlineReceiver, InlineStream
from kvproto.wire import decode
from kvproto.wire.enums import CreditKind, ErrorCode, Feature, Proof, Transport
from kvproto.wire.messages import Begin, Credit, Data, Handle, Hello, Limits
from tests.pools import memory
from tests.session.driver import Hearing, geometry, grants, ticket
from tests.session.test_hostile import CONTENT
from tests.steps import least_steps

WINDOW, SIZE, LENGTH = 16, 8, 25
STREAM = bytes(range(100, 100 + LENGTH))


class Whole:
    """A stream that is a buffer."""

    def __init__(self, memory: bytearray) -> None:
        self.memory, self.length = memory, len(memory)

    def pack(self, offset: int, out: bytearray) -> None:
        out[:] = self.memory[offset : offset + len(out)]

    def unpack(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data


class Inline(Hearing):
    """Every pair is inline; bytes go when the test says so."""

    features = (Feature.INLINE, Feature.VERIFY)

    def __init__(self, sinks: int = 1, transport: Transport = Transport.INLINE) -> None:
        self.transport, self.links = transport, list[InlineLink]()
        self.pages: list[bytearray] = []
        """Where the stream of each request is unpacked to."""
        super().__init__(geometry(1))
        for k in range(sinks):
            self.sink(f"d{k}", geometry(1), engine=f"d{k}")
        self.run()

    def staging(self, name: str, pool: Pool) -> Any:
        region = attrs.evolve(memory(pool).region, handles=(Handle(transport=Transport.INLINE, data=b""),))
        return lambda source: Registration((region,), {Transport.INLINE: InlineReceiver(WINDOW)})

    def accept(self, address: str, session: int) -> None:
        self.links.append(InlineLink())
        self.sources[address].sessions[session].accept_register(self.transport, self.links[-1])

    def ask(self, name: str = "d0", late: bool = False) -> SinkTransfer:
        """A request that is finished; its stream is a byte shorter for each token with which a late window begins."""
        made, source, sink = ticket(), self.sources["s0"], self.sinks[name]
        source.prefill(made, CONTENT, self.now)
        asked = grants(self.pools[name], 6)
        asked[0] = attrs.evolve(asked[0], late=late or None)

        def unpacker(begins: Any) -> Whole:
            self.pages.append(bytearray(LENGTH - begins.get(0, 0)))
            return Whole(self.pages[-1])

        number = sink.transfer(bytes(made.key), CONTENT, asked, self.now, {0: unpacker})
        self.run()
        return number

    def data(self, offset: int, data: bytes, last: bool = False, begins: tuple[Begin, ...] = ()) -> None:
        """The source sends these bytes for the last request."""
        asked = self.events("s0", "TransferRequested")[-1]
        self.sources["s0"].stream(asked, DataPiece(offset, bytearray(data), last), begins)
        self.run()

    def send(self, length: int = LENGTH) -> None:
        """All of the last stream, as credit comes, if it is wanted."""
        if not self.sources["s0"].active(self.events("s0", "TransferRequested")[-1]):
            return
        for at in range(0, length, SIZE):
            end = min(at + SIZE, length)
            self.data(at, STREAM[at:end], end == length)

    def totals(self) -> list[int | None]:
        """Of every Credit so far."""
        return [credit.total for credit in self.of(Credit)]

    def session(self) -> int:
        return next(iter(self.sources["s0"].sessions))

    def still_serves(self, name: str = "d0") -> None:
        before = len(self.events(name, "Arrived"))
        self.ask(name)
        self.send()
        self.serve()
        assert len(self.events(name, "Arrived")) == before + 1
        assert self.pages[-1] == STREAM


def test_a_stream_arrives_and_what_came_is_granted_again() -> None:
    """KVP-INL-COUNT, KVP-STG-END."""
    world = Inline()
    assert world.totals() == [WINDOW]
    world.ask()
    world.send()
    assert not world.events("d0", "Arrived")
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    assert world.pages == [bytearray(STREAM)]
    assert world.totals() == [WINDOW, WINDOW + SIZE, WINDOW + 2 * SIZE, WINDOW + 3 * SIZE]
    world.still_serves()
    assert world.totals()[-1] == 2 * LENGTH - 1 + WINDOW  # the last byte waits for more


@pytest.mark.parametrize(
    ("offset", "size", "last", "code"),
    [
        (0, SIZE, False, ErrorCode.OUT_OF_RANGE),
        (SIZE - 1, SIZE, False, ErrorCode.OUT_OF_RANGE),
        (SIZE + 1, SIZE, False, ErrorCode.OUT_OF_RANGE),
        (SIZE, LENGTH - SIZE, True, ErrorCode.CREDIT),
        (2**63, SIZE, False, ErrorCode.OUT_OF_RANGE),
        (SIZE, SIZE, True, ErrorCode.FIELD_CONFLICT),
    ],
    ids=["again", "overlapping", "gap", "beyond credit", "elsewhere", "last too early"],
)
def test_lying_data_touches_nothing_and_costs_its_transfer_alone(
    offset: int, size: int, last: bool, code: ErrorCode
) -> None:
    """KVP-INL-BEYOND, KVP-INL-NEXT, KVP-INL-LAST."""
    world = Inline(sinks=2)
    world.ask()
    world.data(0, STREAM[:SIZE])
    world.data(offset, b"!" * size, last)
    assert world.errors() == [(code, Data.TYPE)]
    assert world.lost() == [(code, Proof.PROVEN)]
    assert world.pages[0] == STREAM[:SIZE] + bytes(LENGTH - SIZE)
    assert len(world.events("s0", "Released")) == 1
    for name in ("d1", "d0"):
        world.still_serves(name)


@pytest.mark.parametrize(("size", "code"), [(9, ErrorCode.FIELD_CONFLICT), (10, ErrorCode.OUT_OF_RANGE)])
def test_data_ends_where_its_stream_does(size: int, code: ErrorCode) -> None:
    """KVP-INL-NEXT beyond the end, KVP-INL-LAST at it."""
    world = Inline()
    world.ask()
    for at in (0, SIZE):
        world.data(at, STREAM[at : at + SIZE])
    world.data(2 * SIZE, b"!" * size, size > 9)
    assert world.errors() == [(code, Data.TYPE)]
    assert world.pages[0] == STREAM[: 2 * SIZE] + bytes(LENGTH - 2 * SIZE)
    world.still_serves()


def test_done_before_the_last_data_loses_the_transfer() -> None:
    """KVP-STG-FIRST: what a source owes, seen at the sink."""
    world = Inline()
    world.ask()
    world.data(0, STREAM[:SIZE])
    world.serve()
    assert world.lost() == [(ErrorCode.UNEXPECTED_MESSAGE, Proof.PROVEN)]
    world.still_serves()


@pytest.mark.parametrize("state", ["unknown", "over"])
def test_data_outside_a_transfer_is_refused_and_counted(state: str) -> None:
    """KVP-INL-COUNT."""
    world = Inline()
    if state == "over":
        world.still_serves()
    total = world.totals()[-1]
    data = Data(session=world.session(), sequence=1, offset=0, data=b"!" * SIZE, last=False)
    world.hears("d0", data)
    assert world.errors() == [(ErrorCode.UNEXPECTED_MESSAGE, Data.TYPE)]
    assert world.totals()[-1] >= (total or 0) + SIZE
    assert not world.events("d0", "Lost")
    assert all(pages == STREAM for pages in world.pages)


def test_data_that_crosses_an_abort_is_counted_and_dropped() -> None:
    """KVP-INL-COUNT."""
    world = Inline()
    number = world.ask()
    world.sinks["d0"].abort(number, RemoteError(ErrorCode.ABORTED, "", "", ""), world.now)
    world.data(0, b"!" * SIZE)  # before the source hears of it
    assert not world.errors()
    assert world.pages == [bytearray(LENGTH)]
    assert world.totals() == [WINDOW, WINDOW + SIZE]
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN
    world.still_serves()


@pytest.mark.parametrize("total", [WINDOW - 1, MAX_CREDIT + SIZE + 1, 2**64 - 1])
def test_credit_that_falls_or_is_without_bounds_is_refused(total: int) -> None:
    """KVP-INL-CREDIT: a slow reader bounds what the source holds for it."""
    world = Inline(sinks=2)
    world.ask()
    world.data(0, STREAM[:SIZE])
    room = world.links[0].room
    world.from_sink(Credit(session=world.session(), kind=CreditKind.INLINE, total=total))
    assert world.errors("d0") == [(ErrorCode.CREDIT, Credit.TYPE)]
    assert world.links[0].room == room
    world.data(SIZE, STREAM[SIZE : 2 * SIZE])
    world.data(2 * SIZE, STREAM[2 * SIZE :], last=True)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    world.still_serves("d1")


def test_the_first_data_says_where_a_late_window_begins() -> None:
    """KVP-GRANT-LATE: the stream is as much shorter; Done says the same."""
    world = Inline()
    world.ask(late=True)
    begins = (Begin(group=0, first=4),)
    for at in range(0, LENGTH - 4, SIZE):
        end = min(at + SIZE, LENGTH - 4)
        world.data(at, STREAM[at:end], end == LENGTH - 4, begins)
    world.done("s0", world.events("s0", "TransferRequested")[-1], begins=begins)
    world.run()
    (arrived,) = world.events("d0", "Arrived")
    assert [each.begins for each in arrived.done] == [begins]
    assert [data.begins for data in world.of(Data)] == [begins, None, None]


@pytest.mark.parametrize("begins", [(Begin(group=0, first=0),), (Begin(group=1, first=4),)])
def test_a_window_that_cannot_begin_there_is_refused_and_nothing_is_unpacked(begins: tuple[Begin, ...]) -> None:
    """KVP-GRANT-BEGINS."""
    world = Inline()
    world.ask(late=True)
    world.data(0, b"!" * SIZE, begins=begins)
    assert world.errors() == [(ErrorCode.BAD_GRANT, Data.TYPE)]
    assert not any(map(any, world.pages))
    world.still_serves()


def streamed(world: Inline, name: str = "d0") -> InlineStream:
    """A request whose stream the transport packs."""
    world.ask(name)
    return InlineStream(world.links[-1], Whole(bytearray(STREAM)), False)


def pump(world: Inline, stream: InlineStream, asked: Any) -> bool:
    """A look of the node at a copy."""
    done = stream.done
    for piece in stream.take():
        world.sources["s0"].stream(asked, piece)
    world.run()
    return done


def reconnect(world: Inline, lose: Sequence[type]) -> None:
    """The sink's connection has broken, and what was on its way is lost."""
    world.keep = lambda to, frame: 0 if isinstance(decode(frame), tuple(lose)) else 1
    world.run()
    world.keep = world.hear
    session = world.sinks["d0"].sessions["s0"]
    assert session.resume(world.now)
    world.run()


def test_a_session_that_is_resumed_counts_anew_and_ends_what_was_under_way() -> None:
    """KVP-INL-RESUMED, KVP-INL-BROKEN: also where all that was on its way is lost, and with it all credit."""
    world = Inline()
    stream = streamed(world)
    (asked,) = world.events("s0", "TransferRequested")
    world.keep = lambda to, frame: not isinstance(decode(frame), Data)
    assert not pump(world, stream, asked)
    assert world.links[0].room == 0
    reconnect(world, [Data])
    with pytest.raises(RemoteError) as broken:
        _ = stream.done
    assert broken.value.code == ErrorCode.PEER_LOST
    assert stream.stop() == Proof.PROVEN
    world.sources["s0"].failed(asked, broken.value, world.now)
    world.run()
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.PEER_LOST
    assert world.totals()[-1] == world.links[0].room == WINDOW
    world.still_serves()


def test_no_credit_is_said_while_a_session_is_being_resumed() -> None:
    """KVP-INL-RESUMED: it would be of what was counted before, and come after what is counted anew."""
    world = Inline()
    world.ask()
    before = world.totals()
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), Hello)
    assert world.sinks["d0"].sessions["s0"].resume(world.now)
    world.data(0, STREAM[:SIZE])
    assert bytes(world.pages[0][:SIZE]) == STREAM[:SIZE]
    assert world.totals() == before


def test_a_stream_that_has_not_begun_survives_a_new_connection() -> None:
    """KVP-INL-BROKEN: no byte of it was lost."""
    world = Inline()
    stream = streamed(world)
    (asked,) = world.events("s0", "TransferRequested")
    reconnect(world, [Data])
    for _ in range(4):
        pump(world, stream, asked)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    assert world.pages == [bytearray(STREAM)]


def test_a_turn_costs_the_same_beside_streams_that_wait_for_their_bytes() -> None:
    world = Inline()
    sink = world.sinks["d0"]
    world.ask()
    alone = least_steps(lambda: sink.to_send(world.now), 3)
    for _ in range(100):
        world.ask()
    assert len(sink.transfers) == 101
    assert least_steps(lambda: sink.to_send(world.now), 3) < 2 * alone


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize("last", [True, False])
def test_a_piece_goes_in_bodies_that_the_sink_accepts(most: int, last: bool) -> None:
    """KVP-FRAME-W-LENGTH: every byte once and in order, and only the final Data ends the stream."""
    world = Inline()
    session = world.sources["s0"].sessions[world.session()]
    session.limits = Limits(max_body=64 + most, max_transfers=1)
    for length in range(10):
        said = Data(session=1, sequence=0, offset=100, data=STREAM[:length], last=last)
        made = [one for one in SourceInline(session, world.links[-1]).messages(said) if isinstance(one, Data)]
        assert b"".join(one.data for one in made) == said.data
        assert [one.offset for one in made] == list(range(100, 100 + max(length, 1), most))
        assert [one.last for one in made] == [False] * (len(made) - 1) + [last]
        assert len(made) == max(-(-length // most), 1)
