"""Streams of device memory: every byte in its place, none beside it, whatever a chunk cuts; after the producer's events."""

import random

import numpy as np
import pytest

from kvproto.copying.execute import execute
from kvproto.errors import LocalError
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.nixl.device import DeviceBackend
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode
from tests.gpu.memory import get, put
from tests.plan.programs import random_pairs
from tests.transport.test_packed import chunks

SEEDS = 60


def until_ready(begun: object) -> None:
    while not begun.ready():  # type: ignore[attr-defined]
        pass


def test_random_programs_cut_anywhere() -> None:
    out, into = DeviceBackend(0), DeviceBackend(0)
    for seed in range(SEEDS):
        rng, dice = random.Random(seed), np.random.default_rng(seed)
        for program, from_lengths, to_lengths in random_pairs(rng):
            here = {r: dice.integers(0, 256, n, np.uint8) for r, n in from_lengths.items()}
            there = {r: dice.integers(0, 256, n, np.uint8) for r, n in to_lengths.items()}
            source, sink = ({r: DeviceMemory(n) for r, n in m.items()} for m in (from_lengths, to_lengths))
            for memory, data in ((source, here), (sink, there)):
                for r in data:
                    put(memory[r], data[r])
            by_hand = PackedStream(program, "source", {r: memoryview(a) for r, a in here.items()})
            execute(program, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in there.items()})
            packing, unpacking = out.packer(program, "source", source), into.packer(program, "sink", sink)
            assert packing.length == unpacking.length == by_hand.length
            room = DeviceMemory(by_hand.length + 512)
            for a, b in chunks(rng, by_hand.length, 6):
                put(room, np.full(room.length, 0xEE, np.uint8))
                slot = out.of(room).part(256, b - a)
                until_ready(packing.pack(a, slot))
                want = np.full(room.length, 0xEE, np.uint8)
                by_hand.pack(a, want[256 : 256 + b - a])
                assert np.array_equal(get(room), want), seed
                until_ready(unpacking.unpack(a, slot))
            for r, memory in sink.items():
                assert np.array_equal(get(memory), there[r]), (seed, r)
            for memory in (*source.values(), *sink.values(), room):
                memory.close()


def test_what_a_producer_writes_late_is_packed() -> None:
    size = 1 << 30
    place, pool = DeviceBackend(0), DeviceMemory(size)
    pool.zero()
    program = scattered(1 << 20, size >> 21, pool=size >> 20, seed=3)
    slot = place.allocate(program.bytes)
    device = current(0)
    stream = device.create_stream()
    for value in (*range(1, 200), 7):
        call(driver.cuMemsetD8Async(pool.address, value, size, stream.handle), "fill")
    event = stream.record()
    packing = place.packer(program, "source", {0: pool}, [int(event.handle)])
    begun = packing.pack(0, slot)
    assert not place.happened([int(event.handle)])
    assert not begun.ready()
    until_ready(begun)
    out = np.empty(program.bytes, np.uint8)
    call(driver.cuMemcpyDtoH(out.ctypes.data, slot.address, out.nbytes), "get")
    assert (out == 7).all()
    place.close()
    pool.close()


def test_memory_of_another_place_is_refused() -> None:
    place = DeviceBackend(0)
    with pytest.raises(LocalError) as caught:
        place.of(object())  # type: ignore[arg-type]
    assert caught.value.code == ErrorCode.NO_TRANSPORT
