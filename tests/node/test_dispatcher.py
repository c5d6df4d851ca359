"""Copies under way at a source, by a transport whose copies end when the test says."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.rank.registration import PeerMapping
from kvproto.source.copies import Dispatcher
from kvproto.source.prefill import Request
from kvproto.source.progress import Part
from kvproto.source.schedule import Attempt, Scheduler
from kvproto.transport.staging.staged import ChunkPiece
from kvproto.wire.enums import ErrorCode, Proof
from tests.node.nodes import finished
from tests.node.stages import HERE, KEY, THERE, TOKENS, Stage
from tests.node.test_parts import Device
from tests.pools import column, contents

FAULT = LocalError(ErrorCode.TRANSPORT_FAILED, "", "a device", "a fault")
ENOUGH = RemoteError(ErrorCode.ABORTED, "", "enough", "")


class Dispatched:
    """A dispatcher, the transport, and which attempts nobody wants any more."""

    def __init__(self) -> None:
        self.stage, self.device = Stage(), Device(room=2)
        contents(self.stage.source)[:] = np.arange(contents(self.stage.source).size, dtype=np.uint8)
        self.peer: PeerMapping = self.stage.peer(self.device)
        self.unwanted: dict[int, KvprotoError] = {}
        self.pieces: list[ChunkPiece] = []
        self.dispatcher = Dispatcher(
            self.stage.source.memories, lambda a: self.unwanted.get(a.asked.transfer.sequence),
            lambda _, piece: self.pieces.append(piece),
        )  # fmt: skip

    def attempt(self, sequence: int = 1) -> tuple[Attempt, Sequence[Part]]:
        made = self.stage.attempt(self.peer, sequence)
        request = Request(finished=finished({0: HERE, 1: HERE}, TOKENS, {(2, "token"): b"\7\0\0\0"}))
        return made, Scheduler(1, None).parts(made, request)

    def start(self, *batch: tuple[Attempt, Sequence[Part]]) -> Any:
        return self.dispatcher.start(batch, lambda attempt: False)

    def copied(self) -> bool:
        there, here = (column(pool, 0, 0, "latent") for pool in (self.stage.sink, self.stage.source))
        return np.array_equal(there[THERE[:2]], here[HERE[:2]])

    def close(self) -> None:
        self.peer.close()
        self.stage.source.close()
        self.stage.sink.close()


@pytest.fixture
def made() -> Iterator[Dispatched]:
    each = Dispatched()
    yield each
    each.close()


def test_a_copy_is_over_when_its_bytes_are_there(made: Dispatched) -> None:
    attempt, parts = made.attempt()
    assert not made.dispatcher.busy
    assert made.start((attempt, parts)) is not None
    assert (made.dispatcher.busy, attempt.copies, made.dispatcher.reads(KEY)) == (True, 1, True)
    assert not made.dispatcher.reads(b"another")
    assert not made.dispatcher.advance()
    assert not made.copied()
    made.device.launches[0].end()
    assert made.dispatcher.advance()
    assert made.copied()
    assert (made.dispatcher.busy, attempt.copies, made.dispatcher.reads(KEY)) == (False, 0, False)
    assert (attempt.failure, attempt.proof) == (None, Proof.PROVEN)


def test_how_long_to_sleep_is_what_the_transport_says(made: Dispatched) -> None:
    assert made.dispatcher.poll_interval is None
    made.start(made.attempt())
    assert made.dispatcher.poll_interval == made.device.capabilities.poll_interval
    made.device.launches[0].end()
    made.dispatcher.advance()
    assert made.dispatcher.poll_interval is None


def test_a_busy_transport_is_asked_again_soon_and_nobody_fails(made: Dispatched) -> None:
    """Without a turn after a turn: it sleeps a little between them."""
    made.device.room = 0
    attempt, parts = made.attempt()
    attempt.seen = 3
    assert made.start((attempt, parts)) is None
    assert (attempt.failure, attempt.copies, attempt.seen) == (None, 0, 0)
    assert made.dispatcher.poll_interval is not None
    assert 0 < made.dispatcher.poll_interval <= 0.01
    made.device.room = 1
    assert made.start((attempt, parts)) is not None
    made.device.launches[0].end()
    made.dispatcher.advance()
    assert made.dispatcher.poll_interval is None


def test_a_copy_that_cannot_start_fails_all_that_it_serves(made: Dispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise FAULT

    monkeypatch.setattr(made.device, "start", refuse)
    first, second = made.attempt(1), made.attempt(2)
    assert made.start(first, second) is None
    assert [attempt.failure for attempt, _ in (first, second)] == [FAULT, FAULT]
    assert not made.dispatcher.busy


@pytest.mark.parametrize("at", ["start", "done"])
def test_a_failure_that_is_kept_holds_no_memory(made: Dispatched, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Its frames would: pools that are free could not be closed before the garbage collector has run."""
    views: list[weakref.ref[Any]] = []

    def fail(_: Any) -> Any:
        view = contents(made.stage.source)[:4]
        views.append(weakref.ref(view))
        try:
            raise ValueError(f"of {view.size} bytes")
        except ValueError as error:
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "", str(error)) from error

    gc.disable()
    try:
        attempt, parts = made.attempt()
        with monkeypatch.context() as patch:
            if at == "start":
                patch.setattr(made.device, "start", fail)
                assert made.start((attempt, parts)) is None
            else:
                made.start((attempt, parts))
                patch.setattr(type(made.device.launches[0]), "done", property(fail))
                patch.setattr(type(made.device.launches[0]), "stop", lambda launch: Proof.PROVEN)
                assert made.dispatcher.advance()
        assert attempt.failure is not None
        assert [view() is None for view in views] == [True]
    finally:
        gc.enable()


def test_a_copy_for_several_goes_on_while_one_wants_it(made: Dispatched) -> None:
    first, second = made.attempt(1), made.attempt(2)
    made.start(first, second)
    made.unwanted[1] = ENOUGH
    assert not made.dispatcher.advance()
    made.device.launches[0].end()
    assert made.dispatcher.advance()
    assert [(attempt.failure, attempt.copies) for attempt, _ in (first, second)] == [(None, 0), (None, 0)]


def test_a_copy_that_nobody_wants_ends_when_it_no_longer_writes(made: Dispatched) -> None:
    """KVP-END-PROVEN: before that nothing is proven, and its items are read."""
    attempt, parts = made.attempt()
    made.start((attempt, parts))
    made.unwanted[1] = ENOUGH
    for _ in range(3):
        assert not made.dispatcher.advance()
        assert made.dispatcher.reads(KEY)
    made.device.launches[0].end()
    assert made.dispatcher.advance()
    assert (attempt.failure, attempt.proof, attempt.copies) == (ENOUGH, Proof.PROVEN, 0)


def test_stop_ends_the_copies_of_one_attempt_alone(made: Dispatched) -> None:
    first, second = made.attempt(1), made.attempt(2)
    made.start(first)
    made.start(second)
    made.dispatcher.stop(first[0], ENOUGH)
    for launch in made.device.launches:
        launch.end()
    assert made.dispatcher.advance()
    assert [attempt.failure for attempt, _ in (first, second)] == [ENOUGH, None]


def test_what_a_broken_copy_proves_is_kept_over_later_ones(made: Dispatched) -> None:
    attempt, parts = made.attempt()
    made.start((attempt, parts))
    made.start((attempt, parts))
    assert attempt.copies == 2
    made.device.launches[0].error = FAULT
    assert made.dispatcher.advance()
    assert (attempt.failure, attempt.proof, attempt.copies) == (FAULT, Proof.UNPROVABLE, 1)
    made.device.launches[1].end()
    assert made.dispatcher.advance()
    assert (attempt.failure, attempt.proof, attempt.copies) == (FAULT, Proof.UNPROVABLE, 0)


@attrs.define
class Pieces:
    """A stream that has pieces to announce."""

    left: int = 0
    waiting: list[Any] = attrs.Factory(list)

    def mark_ready(self, layers: Any, after: Any) -> None: ...

    def take(self) -> list[Any]:
        taken, self.waiting = self.waiting, []
        return taken


def test_pieces_are_announced_in_order_and_before_the_end(made: Dispatched) -> None:
    """Also those that have arrived with the last byte."""
    made.start(made.attempt())
    stream = Pieces(waiting=["a", "b"])
    made.device.launches[0].stream = stream  # type: ignore[assignment]
    assert not made.dispatcher.advance()
    assert made.pieces == ["a", "b"]
    stream.waiting.append("c")
    made.device.launches[0].end()
    assert made.dispatcher.advance()
    assert made.pieces == ["a", "b", "c"]
