"""Copies under way at a source, by a transport whose copies end when the test says."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError, RemoteError
from kvproto.rank.registration import PeerMapping
from kvproto.session.table import TransferState
from kvproto.source.copies import Copies
from kvproto.source.prefill import Prefill
from kvproto.source.progress import CopyStep
from kvproto.source.schedule import Scheduler, Send
from kvproto.transport.staging.staged import ChunkPiece
from kvproto.wire.enums import ErrorCode, Proof
from tests.node.nodes import finished
from tests.node.stages import HERE, THERE, TOKENS, Stage
from tests.node.test_parts import Device
from tests.pools import column, contents

FAULT = LocalError(ErrorCode.TRANSPORT_FAILED, "", "a device", "a fault")
ENOUGH = RemoteError(ErrorCode.ABORTED, "", "enough", "")


class Dispatched:
    """Copies of a source, and the transport."""

    def __init__(self) -> None:
        self.stage, self.device = Stage(), Device(room=2)
        contents(self.stage.source)[:] = np.arange(contents(self.stage.source).size, dtype=np.uint8)
        self.peer: PeerMapping = self.stage.peer(self.device)
        self.pieces: list[ChunkPiece] = []
        self.copies = Copies(self.stage.source.memories, lambda _, piece: self.pieces.append(piece))

    def send(self, sequence: int = 1) -> tuple[Send, Sequence[CopyStep]]:
        prefill = Prefill(finished=finished({0: HERE, 1: HERE}, TOKENS, {(2, "token"): b"\7\0\0\0"}), version=1)
        made = self.stage.send(self.peer, sequence, prefill=prefill)
        return made, Scheduler(1, None).steps(made)

    def start(self, *batch: tuple[Send, Sequence[CopyStep]]) -> Any:
        return self.copies.start(batch)

    def abort(self, send: Send) -> None:
        """Its sink wants it no more."""
        send.attempt.state = TransferState.ABORTING

    def copied(self) -> bool:
        there, here = (column(pool, 0, 0, "latent") for pool in (self.stage.sink, self.stage.source))
        return np.array_equal(there[THERE[:2]], here[HERE[:2]])

    def close(self) -> None:
        self.peer.connection.close()
        self.stage.source.close()
        self.stage.sink.close()


@pytest.fixture
def made() -> Iterator[Dispatched]:
    each = Dispatched()
    yield each
    each.close()


def test_a_copy_is_over_when_its_bytes_are_there(made: Dispatched) -> None:
    attempt, parts = made.send()
    assert not made.copies.under_way
    assert made.start((attempt, parts)) is not None
    assert (bool(made.copies.under_way), attempt.copies) == (True, 1)
    assert not made.copies.advance()
    assert not made.copied()
    made.device.launches[0].end()
    assert made.copies.advance()
    assert made.copied()
    assert (bool(made.copies.under_way), attempt.copies) == (False, 0)
    assert (attempt.failure, attempt.proof) == (None, Proof.PROVEN)


def test_how_long_to_sleep_is_what_the_transport_says(made: Dispatched) -> None:
    assert made.copies.poll_interval() is None
    made.start(made.send())
    assert made.copies.poll_interval() == made.device.capabilities.poll_interval
    made.device.launches[0].end()
    made.copies.advance()
    assert made.copies.poll_interval() is None


def test_a_busy_transport_is_asked_again_soon_and_nobody_fails(made: Dispatched) -> None:
    """Without a turn after a turn: it sleeps a little between them."""
    made.device.room = 0
    attempt, parts = made.send()
    attempt.seen = 3
    assert made.start((attempt, parts)) is None
    assert (attempt.failure, attempt.copies, attempt.seen) == (None, 0, 0)
    assert made.copies.poll_interval() is not None
    assert 0 < made.copies.poll_interval() <= 0.01
    made.device.room = 1
    assert made.start((attempt, parts)) is not None
    made.device.launches[0].end()
    made.copies.advance()
    assert made.copies.poll_interval() is None


def test_a_copy_that_cannot_start_fails_all_that_it_serves(made: Dispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise FAULT

    monkeypatch.setattr(made.device, "start", refuse)
    first, second = made.send(1), made.send(2)
    assert made.start(first, second) is None
    assert [attempt.failure for attempt, _ in (first, second)] == [FAULT, FAULT]
    assert not made.copies.under_way


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
        attempt, parts = made.send()
        with monkeypatch.context() as patch:
            if at == "start":
                patch.setattr(made.device, "start", fail)
                assert made.start((attempt, parts)) is None
            else:
                made.start((attempt, parts))
                patch.setattr(type(made.device.launches[0]), "done", property(fail))
                patch.setattr(type(made.device.launches[0]), "stop", lambda launch: Proof.PROVEN)
                assert made.copies.advance()
        assert attempt.failure is not None
        assert [view() is None for view in views] == [True]
    finally:
        gc.enable()


def test_a_copy_for_several_goes_on_while_one_wants_it(made: Dispatched) -> None:
    first, second = made.send(1), made.send(2)
    made.start(first, second)
    made.abort(first[0])
    assert not made.copies.advance()
    made.device.launches[0].end()
    assert made.copies.advance()
    assert [(attempt.failure, attempt.copies) for attempt, _ in (first, second)] == [(None, 0), (None, 0)]


def test_a_copy_that_nobody_wants_ends_when_it_no_longer_writes(made: Dispatched) -> None:
    """KVP-END-PROVEN: before that nothing is proven, and its items are read."""
    attempt, parts = made.send()
    made.start((attempt, parts))
    made.abort(attempt)
    for _ in range(3):
        assert not made.copies.advance()
        assert attempt.copies
    made.device.launches[0].end()
    assert made.copies.advance()
    assert attempt.failure is not None
    assert (attempt.failure.code, attempt.proof, attempt.copies) == (ErrorCode.ABORTED, Proof.PROVEN, 0)


def test_stop_ends_the_copies_of_one_attempt_alone(made: Dispatched) -> None:
    first, second = made.send(1), made.send(2)
    made.start(first)
    made.start(second)
    made.copies.stop(first[0], ENOUGH)
    for launch in made.device.launches:
        launch.end()
    assert made.copies.advance()
    assert [attempt.failure for attempt, _ in (first, second)] == [ENOUGH, None]


def test_what_a_broken_copy_proves_is_kept_over_later_ones(made: Dispatched) -> None:
    attempt, parts = made.send()
    made.start((attempt, parts))
    made.start((attempt, parts))
    assert attempt.copies == 2
    made.device.launches[0].error = FAULT
    assert made.copies.advance()
    assert (attempt.failure, attempt.proof, attempt.copies) == (FAULT, Proof.UNPROVABLE, 1)
    made.device.launches[1].end()
    assert made.copies.advance()
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
    made.start(made.send())
    stream = Pieces(waiting=["a", "b"])
    made.device.launches[0].stream = stream  # type: ignore[assignment]
    assert not made.copies.advance()
    assert made.pieces == ["a", "b"]
    stream.waiting.append("c")
    made.device.launches[0].end()
    assert made.copies.advance()
    assert made.pieces == ["a", "b", "c"]
