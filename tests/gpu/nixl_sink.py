"""A process with pools and staging slots on a GPU, for tests of transport `nixl`: it does what its pipe says."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvproto.program import CopyProgram
from kvproto.transport.cuda.driver import uuid
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.place import DevicePlace
from kvproto.transport.nixl import Agent
from kvproto.transport.staged import StagedReceiver
from tests.gpu.memory import get, put

EDGE = 4096
"""Bytes before and after each pool that must stay."""


@contextmanager
def pools(lengths: dict[int, int], device: int, seed: int) -> Iterator[tuple[dict[int, DeviceMemory], dict[int, DeviceMemory]]]:
    """Noise, edges and all; and the pools inside."""
    whole = {r: DeviceMemory(n + 2 * EDGE, device) for r, n in lengths.items()}
    for r, memory in whole.items():
        put(memory, noise(r, memory.length, seed))
    yield whole, {r: DeviceMemory.adopt(whole[r].address + EDGE, n, r) for r, n in lengths.items()}
    for memory in whole.values():
        memory.close()


def noise(region: int, length: int, seed: int) -> Any:
    return np.random.default_rng((seed, region)).integers(0, 256, length, np.uint8)


def sink(conn: Connection, device: int, slots: int, slot_bytes: int) -> None:
    place = DevicePlace(device)
    with Agent(place.pause) as agent:
        staging = agent.register(place.allocate(slots * slot_bytes), slot_bytes)
        conn.send(staging.region(1 << 20, uuid(device)))
        receiver = StagedReceiver(staging)
        sequence = 0
        while True:
            try:
                program, lengths, direct, seed = conn.recv()
            except EOFError:
                return
            with pools(lengths, device, seed) as (whole, inside):
                sequence += 1
                if direct:
                    registered = {r: agent.register(place.of(m)) for r, m in inside.items()}
                    conn.send([reg.region(r, uuid(device)) for r, reg in registered.items()])
                    conn.recv()  # every write is complete
                else:
                    receive(conn, receiver, sequence, place, program, inside)
                conn.send({r: get(m) for r, m in whole.items()})
                if direct:
                    conn.recv()  # and unmapped
                    for each in registered.values():
                        each.close()


def receive(
    conn: Connection, receiver: StagedReceiver, sequence: int, place: DevicePlace, program: CopyProgram,
    memory: dict[int, DeviceMemory],
) -> None:  # fmt: skip
    receiver.open(sequence, 1, place.packer(program, "sink", memory))
    while not receiver.complete(sequence, 1):
        if (credit := receiver.credit(1)) is not None:
            conn.send(credit)
        if conn.poll(0):
            receiver.chunk(conn.recv())
    receiver.close(sequence, 1)
    conn.send(None)
