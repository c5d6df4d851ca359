"""Slots, credit and chunks in every order that completions may come, and peers that break the rules."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire.enums import CreditKind, ErrorCode, Proof
from kvproto.wire.messages import Chunk, Credit
from tests.errors import raises


@attrs.define
class Event:
    """Done when the test says so; what it does happens then and not before."""

    work: Callable[[], None]
    over: bool = False
    error: KvprotoError | None = None

    def ready(self) -> bool:
        if self.error:
            raise self.error
        return self.over

    def happen(self) -> None:
        if not self.over and not self.error:
            self.work()
            self.over = True


class Slots:
    """Slots in this process; `write` is a copy that happens later."""

    def __init__(self, slots: int, slot_bytes: int, events: list[Event]) -> None:
        self.slots, self.slot_bytes, self._events = slots, slot_bytes, events
        self._memory = bytearray(slots * slot_bytes)

    def slot(self, number: int, length: int) -> memoryview:
        assert 0 <= number < self.slots
        assert 0 <= length <= self.slot_bytes
        return memoryview(self._memory)[number * self.slot_bytes :][:length]

    def write(self, source: memoryview, to: memoryview) -> Event:
        def copy() -> None:
            to[:] = source

        self._events.append(Event(copy))
        return self._events[-1]


class Bytes:
    """A stream that is a buffer, packed and unpacked later, as by a GPU."""

    def __init__(self, memory: bytearray, events: list[Event]) -> None:
        self.memory, self._events, self.length = memory, events, len(memory)

    def chunk_size(self, offset: int, most: int) -> int:
        return most

    def pack(self, offset: int, out: memoryview) -> Event:
        def copy() -> None:
            out[:] = self.memory[offset : offset + len(out)]

        self._events.append(Event(copy))
        return self._events[-1]

    def unpack(self, offset: int, data: memoryview) -> Event:
        def copy() -> None:
            self.memory[offset : offset + len(data)] = data

        self._events.append(Event(copy))
        return self._events[-1]


class World:
    """A source and a sink whose events wait for the test."""

    def __init__(self, own: int = 3, theirs: int = 4, size: int = 7) -> None:
        self.events: list[Event] = []
        self.target = Slots(theirs, size, self.events)
        self.link = StagedLink(Slots(own, size + 2, self.events), self.target)
        self.receiver = StagedReceiver(self.target)

    def credit(self) -> None:
        credit = self.receiver.credit(1)
        if credit is not None:
            self.link.grant(credit)

    def happen(self) -> None:
        for event in self.events:
            event.happen()


@settings(deadline=None, max_examples=150)
@given(
    st.integers(3, 5), st.integers(3, 6), st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(0, 2**32)
)
def test_streams_arrive_whole_in_any_order_of_events(own: int, theirs: int, sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    world = World(own, theirs)
    sent = [bytearray(rng.randbytes(n)) for n in sizes]
    got = [bytearray(n) for n in sizes]
    senders = [StagedSender(world.link, Bytes(memory, world.events)) for memory in sent]
    for i, memory in enumerate(got):
        world.receiver.open(i + 1, Bytes(memory, world.events))
    wire: list[Chunk | Credit] = []
    while not all(world.receiver.finish(i + 1) for i in range(len(sent))):
        act = rng.randrange(4)
        if act == 0 and (credit := world.receiver.credit(1)):
            wire.append(credit)
        elif act == 1:
            i = rng.randrange(len(senders))
            wire += [p.notice(1, i + 1) for p in senders[i].step()]
        elif act == 2 and wire:
            message = wire.pop(0)
            if isinstance(message, Credit):
                world.link.grant(message)
            else:
                world.receiver.chunk(message)
        elif world.events:
            rng.choice(world.events).happen()
    assert got == sent
    assert all(s.done for s in senders)


def sending(size: int) -> tuple[World, StagedSender]:
    """A stream of so many bytes, with credit for every slot."""
    world = World()
    world.credit()
    return world, StagedSender(world.link, Bytes(bytearray(size), world.events))


def test_three_slots_are_under_way_at_once() -> None:
    _, sender = sending(50)
    for _ in range(5):
        assert sender.step() == []
    assert sender.under_way == 3


def test_a_credit_of_very_many_slots_is_taken_at_once() -> None:
    many: Any = SimpleNamespace(slots=200_000, slot_bytes=1)
    link = StagedLink(many, many)
    link.grant(Credit(session=1, kind=CreditKind.STAGING, slots=np.arange(many.slots, dtype=np.uint32)))
    assert len(link.granted) == many.slots


def test_chunks_come_in_order_though_writes_do_not() -> None:
    world, sender = sending(21)
    for _ in range(3):
        sender.step()
    world.happen()
    sender.step()  # packed, so written
    first, second, third = world.events[-3:]
    third.happen()
    second.happen()
    assert sender.step() == []
    first.happen()
    assert [(p.offset, p.bytes, p.last) for p in sender.step()] == [(0, 7, False), (7, 7, False), (14, 7, True)]
    assert sender.done


def test_an_empty_stream_has_no_chunk() -> None:
    world = World()
    sender = StagedSender(world.link, Bytes(bytearray(), world.events))
    world.receiver.open(1, Bytes(bytearray(), world.events))
    assert sender.step() == []
    assert sender.done
    assert world.receiver.finish(1)


def test_abort_with_patience_is_proven_and_gives_the_slots_back() -> None:
    world, sender = sending(50)
    for _ in range(3):
        sender.step()
    world.events[0].happen()
    sender.step()
    assert sender.stop() is None
    world.happen()
    assert sender.stop() == Proof.PROVEN
    assert sender.step() == []
    assert (sorted(world.link.free), sorted(world.link.granted)) == ([0, 1, 2], [0, 1, 2, 3])


def test_a_write_that_fails_fails_its_stream_alone() -> None:
    world = World()
    world.credit()
    bad, good = (StagedSender(world.link, Bytes(bytearray(b"x" * 7), world.events)) for _ in range(2))
    bad.step()
    world.happen()
    bad.step()
    world.events[-1].error = LocalError(ErrorCode.TRANSPORT_FAILED, "")
    with pytest.raises(KvprotoError):
        bad.step()
    assert bad.stop() == Proof.UNPROVABLE
    assert not bad.done
    good.step()
    world.happen()
    good.step()
    world.happen()
    assert [p.last for p in good.step()] == [True]


def test_a_pack_that_cannot_begin_loses_no_slot() -> None:
    world = World()
    world.credit()
    sender = StagedSender(world.link, Broken(bytearray(20), world.events))
    with pytest.raises(KvprotoError):
        sender.step()
    assert sender.stop() == Proof.PROVEN
    assert (len(world.link.free), len(world.link.granted)) == (3, 4)


def granted() -> World:
    world = World()
    world.credit()
    world.receiver.open(1, Bytes(bytearray(20), world.events))
    return world


def returned(world: World) -> list[int]:
    """The slots of the sink's next credit."""
    credit = world.receiver.credit(1)
    assert credit is not None
    assert credit.slots is not None
    return [int(slot) for slot in credit.slots]


CHUNK = Chunk(session=1, sequence=1, slot=0, offset=0, bytes=7, last=False)


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ({"slot": 4}, ErrorCode.CREDIT, "slot"),
        ({"offset": 1}, ErrorCode.OUT_OF_RANGE, "offset"),
        ({"bytes": 8}, ErrorCode.OUT_OF_RANGE, "bytes"),
        ({"last": True}, ErrorCode.FIELD_CONFLICT, "last"),
    ],
)
def test_chunks_that_are_refused(change: dict[str, int], code: ErrorCode, path: str) -> None:
    """KVP-STG-BEYOND for the slot, KVP-STG-NEXT for what is in it."""
    world = granted()
    with raises(KvprotoError, code=code, path=path):
        world.receiver.chunk(attrs.evolve(CHUNK, **change))
    world.receiver.chunk(attrs.evolve(CHUNK, slot=1))  # and it goes on
    world.happen()
    assert not world.receiver.finish(1)


def test_a_slot_is_used_once_per_grant() -> None:
    """KVP-STG-BEYOND"""
    world = granted()
    world.receiver.chunk(CHUNK)
    with raises(KvprotoError, code=ErrorCode.CREDIT):
        world.receiver.chunk(attrs.evolve(CHUNK, offset=7))


def test_no_slot_is_returned_before_it_is_unpacked() -> None:
    """KVP-STG-RETURN"""
    world = granted()
    world.receiver.chunk(CHUNK)
    assert world.receiver.credit(1) is None
    world.happen()
    assert returned(world) == [0]


def test_a_chunk_of_a_transfer_that_is_over_returns_its_slot() -> None:
    world = granted()
    world.receiver.chunk(CHUNK)
    assert not world.receiver.close(1)  # still unpacking into its pages
    world.receiver.chunk(attrs.evolve(CHUNK, slot=1, offset=7))
    world.happen()
    assert world.receiver.close(1)
    assert returned(world) == [0, 1]


def test_an_unpack_that_fails_is_told_by_its_transfer() -> None:
    world = granted()
    world.receiver.chunk(CHUNK)
    world.events[-1].error = LocalError(ErrorCode.TRANSPORT_FAILED, "")
    with pytest.raises(KvprotoError):
        world.receiver.finish(1)


class Broken(Bytes):
    """A stream whose device takes nothing."""

    def pack(self, offset: int, out: memoryview) -> Event:
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "")

    unpack = pack


def test_an_unpack_that_cannot_begin_is_told_by_its_transfer_and_gives_its_slot_back() -> None:
    world = World()
    world.credit()
    world.receiver.open(1, Broken(bytearray(7), world.events))
    world.receiver.chunk(attrs.evolve(CHUNK, last=True))
    with raises(KvprotoError, code=ErrorCode.TRANSPORT_FAILED):
        world.receiver.finish(1)
    assert returned(world) == [0]


@pytest.mark.parametrize("slots", [[1, 1], [2, 1, 2]])
def test_a_slot_is_granted_once_by_a_credit(slots: list[int]) -> None:
    """KVP-STG-TWICE"""
    world = World()
    with raises(KvprotoError, code=ErrorCode.CREDIT, path=f"slots[{len(slots) - 1}]"):
        world.link.grant(Credit(session=1, kind=CreditKind.STAGING, slots=np.array(slots, np.uint32)))
    world.credit()
    assert sorted(world.link.granted) == [0, 1, 2, 3]


@pytest.mark.parametrize("slots", [[4], [0]])
def test_credit_that_is_not_the_sinks_to_give(slots: list[int]) -> None:
    """KVP-STG-TWICE"""
    world = World()
    world.credit()
    credit = Credit(session=1, kind=CreditKind.STAGING, slots=np.array(slots, np.uint32))
    with raises(KvprotoError, code=ErrorCode.CREDIT, path="slots[0]"):
        world.link.grant(credit)


@pytest.mark.parametrize(("slots", "size"), [(2, 7), (0, 7), (3, 0)])
def test_too_few_slots(slots: int, size: int) -> None:
    with raises(KvprotoError, code=ErrorCode.OUT_OF_RANGE):
        StagedReceiver(Slots(slots, size, []))
    with pytest.raises(KvprotoError):
        StagedLink(Slots(slots, size, []), Slots(3, 7, []))


def test_a_stream_that_ends_early_is_refused() -> None:
    """KVP-STG-EARLY"""
    world = granted()
    world.receiver.chunk(CHUNK)
    world.happen()
    with raises(KvprotoError, code=ErrorCode.UNEXPECTED_MESSAGE, path="sequence"):
        world.receiver.check_end(1)


def test_a_stream_is_done_only_when_its_last_chunk_was_handed_out() -> None:
    """KVP-STG-FIRST: a node says Done where this says so, and sends what `step` returns before."""
    world, sender = sending(21)
    given: list[bool] = []
    while not any(given):
        assert not sender.done
        world.happen()
        assert not sender.done
        given += [piece.last for piece in sender.step()]
    assert given == [False, False, True]
    assert sender.done
