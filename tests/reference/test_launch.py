"""An engine whose other rank is killed says so, whatever its first rank was doing with it then."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from kvproto_reference.engine.launch import launch
from kvproto_reference.engine.lockstep import Lockstep
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.gather import gather, scatter_sum

from ..processes import Command


def waits(world: World) -> None:
    Lockstep(world).wait([], None, False)


def rings(world: World) -> None:
    while True:
        world.bells[0].send(b"!")


def gathers(world: World) -> None:
    gather(torch.zeros(1), world.size, world.group)


def sums(world: World) -> None:
    scatter_sum(torch.zeros(2, 1), world.group)


BUSY = {does.__name__: does for does in (waits, rings, gathers, sums)}


def rank(name: str, world: World) -> int:
    gather(torch.zeros(1), world.size, world.group)  # all have met
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    BUSY[name](world)
    raise AssertionError("did it without the other rank")


def engine() -> int:
    return launch(rank, sys.argv[1], 2, Path(sys.argv[2]))


def refused(_: str, world: World) -> int:
    gather(torch.zeros(1), world.size, world.group)
    if world.rank == 1:
        raise EngineError("five ranks of four heads")
    gather(torch.zeros(1), world.size, world.group)
    raise AssertionError("did it without the other rank")


def refused_engine() -> int:
    return launch(refused, sys.argv[1], 3, Path(sys.argv[2]))


def broken(_: str, world: World) -> int:
    gather(torch.zeros(1), world.size, world.group)
    if not world.rank:
        raise RuntimeError("a mistake of this rank")
    Lockstep(world).wait([], None, False)
    return 0


def broken_engine() -> int:
    return launch(broken, sys.argv[1], 2, Path(sys.argv[2]))


@pytest.mark.parametrize("does", BUSY)
def test_another_rank_is_killed(tmp_path: Path, does: str) -> None:
    status, _, said = Command(engine, [does, tmp_path]).wait(30)
    assert (status, said.strip()) == (1, "error: another rank of this engine has ended")


def test_one_rank_says_why_and_the_first_that_it_has_ended(tmp_path: Path) -> None:
    status, _, said = Command(refused_engine, ["", tmp_path]).wait(30)
    assert status == 1
    assert sorted(said.splitlines()) == [
        "error: another rank of this engine has ended",
        "error: five ranks of four heads",
    ]


def test_what_is_wrong_here_is_told_as_it_is(tmp_path: Path) -> None:
    status, _, said = Command(broken_engine, ["", tmp_path]).wait(30)
    assert status == 1
    assert "RuntimeError: a mistake of this rank" in said
