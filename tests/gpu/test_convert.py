"""The conversion kernel on GPUs, over the worlds of the host's tests: byte for byte, in the mapped memory of a peer too."""

import numpy as np
import pytest

from kvproto.copying.execute import execute
from kvproto.errors import LocalError
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.wire.enums import ErrorCode
from tests.conversions import WORLDS, Engine, Rank
from tests.errors import raises
from tests.gpu.memory import get, put
from tests.plan.test_conversion import World, regions
from tests.pools import contents


def on(device: int, rank: Rank) -> DeviceMemory:
    """The same bytes on a GPU."""
    memory = DeviceMemory(contents(rank.pool).size, device)
    put(memory, contents(rank.pool))
    return memory


@pytest.mark.parametrize(("source", "sink"), [*WORLDS, (Engine("bf16", 1, 4), Engine("e4m3_block", 1, 8, blocks=16))])
def test_every_byte_is_that_of_the_host(devices: tuple[int, int], source: Engine, sink: Engine) -> None:
    enable_peer(0, 1) if max(devices) else None
    copier = Copier(0)
    for a, b, program in World.of(source, sink).programs:
        here, there = on(devices[0], a), on(devices[1], b)
        copy = copier.convert(program, {0: here.address}, {0: there.address})
        copy.wait()
        assert (copy.done, copy.bytes) == (True, program.bytes)
        execute(program, regions(a), regions(b))
        assert np.array_equal(get(there), contents(b.pool))
        here.close()
        there.close()


def test_many_launches_follow_one_another() -> None:
    """Each has buffers of its own until it is done."""
    a, b, program = World.of(*WORLDS[0]).programs[0]
    here, there, copier = on(0, a), on(0, b), Copier(0, slots=4)
    copies = [copier.convert(program, {0: here.address}, {0: there.address}) for _ in range(4)]
    copies[0].wait()
    copier.convert(program, {0: here.address}, {0: there.address}).wait()
    execute(program, regions(a), regions(b))
    assert np.array_equal(get(there), contents(b.pool))


def test_rows_beyond_the_pool_are_refused() -> None:
    a, b, program = World.of(*WORLDS[0]).programs[0]
    here, there = on(0, a), on(0, b)
    program.maps[0].sink_item[0] = 1 << 20
    with raises(LocalError, code=ErrorCode.OUT_OF_REGION):
        Copier(0).convert(program, {0: here.address}, {0: there.address})
    assert np.array_equal(get(there), contents(b.pool))
