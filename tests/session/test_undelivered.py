"""What a source says of a request that a sink rank has not acknowledged."""

from typing import Any

import pytest

from kvproto.errors import RemoteError
from kvproto.session.limits import PATIENCE
from kvproto.wire import decode
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.messages import DoneAck, Ticket
from tests.session.driver import World, geometry, ticket

CONTENT = b"c" * 32


def asked(sinks: int = 1) -> tuple[World, Ticket]:
    """Prefill is finished, and each sink rank has asked for the request."""
    world, made = World(geometry(1)).ready(sinks), ticket(300.0)
    world.sources["s0"].expect(made, CONTENT, world.now)
    for name in list(world.sinks):
        world.transfer(name, made, CONTENT)
    world.sources["s0"].finish(bytes(made.key))
    world.run()
    return world, made


def lost(world: World) -> dict[int, ErrorCode]:
    """By sink rank."""
    (over,) = world.events("s0", "Released")
    return {rank: error.code for rank, error in over.lost.items()}


def deaf() -> Any:
    """Acknowledgements never arrive."""
    return lambda to, frame: not isinstance(decode(frame), DoneAck)


def test_what_is_acknowledged_is_lost_to_nobody() -> None:
    world, _ = asked(2)
    world.serve()
    assert lost(world) == {}


def test_a_done_that_nobody_acknowledges_is_lost_to_that_sink() -> None:
    world, _ = asked()
    world.keep = deaf()
    world.serve()
    for _ in range(int(PATIENCE)):
        assert not world.events("s0", "Released")
        world.pass_time(1.0)
    world.pass_time(1.0)
    assert lost(world) == {0: ErrorCode.PEER_LOST}


def test_goodbye_in_place_of_an_acknowledgement() -> None:
    world, _ = asked(2)
    world.keep = deaf()
    world.serve()
    world.keep = lambda to, frame: True
    world.sinks["d1"].goodbye("over")
    world.run()
    world.pass_time(3.0)  # the Done of the other is sent again
    assert lost(world) == {1: ErrorCode.PEER_LOST}


def test_a_copy_that_fails() -> None:
    world, _ = asked()
    (event,) = world.events("s0", "TransferRequested")
    world.sources["s0"].failed(event, RemoteError(ErrorCode.INTERNAL, "", "", ""), world.now, Proof.PROVEN)
    world.run()
    assert lost(world) == {0: ErrorCode.INTERNAL}


def test_an_abort_is_no_loss() -> None:
    world, _ = asked()
    (transfer,) = world.sinks["d0"].transfers
    world.abort("d0", transfer)
    assert lost(world) == {}


@pytest.mark.parametrize("served", [True, False])
def test_a_sink_rank_that_comes_again(served: bool) -> None:
    """What its later session says is what counts."""
    world, made = asked(2)
    world.sinks["d0"].goodbye("starts anew")
    world.run()
    world.join("again", geometry(2), 0)
    world.fetch("again", made, CONTENT)
    world.keep = (lambda to, frame: True) if served else deaf()
    world.serve()
    world.sinks["again"].goodbye("over")
    world.run()
    world.keep = lambda to, frame: True
    world.pass_time(3.0)
    assert lost(world) == ({} if served else {0: ErrorCode.PEER_LOST})
