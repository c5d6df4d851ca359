"""A process with pools and staging slots on a GPU, for tests of transport `nixl`: it does what its pipe says."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvproto.copying.program import CopyProgram
from kvproto.transport.cuda.driver import uuid
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.nixl.agent import Agent
from kvproto.transport.nixl.device import DeviceBackend
from kvproto.transport.staging.staged import StagedReceiver
from tests.gpu.memory import get, put

EDGE = 4096
"""Bytes before and after each pool that must stay."""
ARENA = 64 << 20


@contextmanager
def pools(
    lengths: dict[int, int], device: int, seed: int
) -> Iterator[tuple[dict[int, DeviceMemory], dict[int, DeviceMemory]]]:
    """Noise, edges and all; and the pools inside."""
    whole = {r: DeviceMemory(n + 2 * EDGE, device) for r, n in lengths.items()}
    for r, memory in whole.items():
        put(memory, noise(r, memory.length, seed))
    yield whole, {r: DeviceMemory.adopt(whole[r].address + EDGE, n, r) for r, n in lengths.items()}
    for memory in whole.values():
        memory.close()


def noise(region: int, length: int, seed: int) -> Any:
    return np.random.default_rng((seed, region)).integers(0, 256, length, np.uint8)


def places(lengths: dict[int, int]) -> tuple[dict[int, int], int]:
    """Offsets of pools in the arena that is written directly, with edges between them, and the end of the last edge."""
    found, at = {}, EDGE
    for r, n in lengths.items():
        found[r] = at
        at += -(-n // 256) * 256 + EDGE
    assert at <= ARENA
    return found, at


def sink(conn: Connection, device: int, slots: int, slot_bytes: int) -> None:
    place, arena = DeviceBackend(device), DeviceMemory(ARENA, device)
    with Agent(place.eager) as agent:
        staging = agent.register(place.allocate(slots * slot_bytes), slot_bytes)
        written = agent.register(place.of(arena))
        conn.send([staging.region(1, uuid(device)), written.region(0, uuid(device))])
        receiver = StagedReceiver(staging)
        sequence = 0
        while True:
            try:
                program, lengths, direct, seed = conn.recv()
            except EOFError:
                return
            if direct:
                size = places(lengths)[1]
                put(arena, noise(0, size, seed))
                conn.send("ready")
                conn.recv()  # every write is complete
                conn.send(get(arena, size))
                continue
            with pools(lengths, device, seed) as (whole, inside):
                sequence += 1
                receive(conn, receiver, sequence, place, program, inside)
                conn.send({r: get(m) for r, m in whole.items()})


def receive(
    conn: Connection, receiver: StagedReceiver, sequence: int, place: DeviceBackend, program: CopyProgram,
    memory: dict[int, DeviceMemory],
) -> None:  # fmt: skip
    receiver.open(sequence, place.packer(program, "sink", memory))
    while not receiver.finish(sequence):
        if (credit := receiver.credit(1)) is not None:
            conn.send(credit)
        if conn.poll(0):
            receiver.chunk(conn.recv())
    receiver.close(sequence)
    conn.send(None)
