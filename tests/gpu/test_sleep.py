"""Device memory that is asked back while the engine of the other process runs on: it is free, and what takes its place serves."""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Prompt, RemoteError, Sink, Source, Ticket, lay_out, new_ticket
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.wire.enums import ErrorCode
from tests.gpu.memory import Bytes, get, on_gpu, put

GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=8, head_dim=128, page=16, dtype=DType.BF16)])
PAGES = 2048
"""256 MiB a pool, which nobody takes for chance."""
PROMPT = Prompt(range(160))
HERE, THERE = list(range(100, 110)), list(range(2000, 2010))
OPTIONS = Options(thread=False, transports=["cuda"])


def filled(device: int, seed: int) -> tuple[Pool, Bytes]:
    """A pool on a GPU, and its bytes."""
    pool = Pool.allocate(GEOMETRY, PAGES, device=device)
    data = np.random.default_rng(seed).integers(1, 256, on_gpu(pool).length, np.uint8)
    put(on_gpu(pool), data)
    return pool, data


def rows(pool: Pool, data: Bytes, table: list[int]) -> list[Bytes]:
    """What pages hold, by layer and part."""
    found = []
    for layer in range(2):
        for part in ("k", "v"):
            _, offset, shape, strides = pool.place("kv", layer, part)
            found.append(np.ndarray(shape, np.uint8, data, offset, strides)[table].copy())
    return found


def prefill(conn: Connection, address: str, device: int) -> None:
    """A prefill engine: it serves tickets, sleeps and wakes as it is told."""
    seed = 1
    pool, _ = filled(device, seed)
    with Source("prefill", pool, address, OPTIONS) as source:
        conn.send("listening")
        sleeping = None
        while True:
            source.step(0.002)
            if sleeping is not None and sleeping.done:
                sleeping.pool.close()
                sleeping = None
                conn.send("asleep")
            if not conn.poll():
                continue
            match conn.recv():
                case Ticket() as made:
                    source.request(made, PROMPT).finish({"kv": HERE})
                case "sleep":
                    sleeping = source.sleep()
                case "wake":
                    seed += 1
                    source.wake(filled(device, seed)[0])
                    conn.send(seed)
                case _:
                    return


def free(device: int) -> int:
    """Bytes that a GPU has left, for all processes."""
    current(device)
    found: int = call(driver.cuMemGetInfo(), "free")[0]
    return found


class Pair:
    """A sink here, and a source in another process."""

    def __init__(self, sink: Sink, conn: Connection, devices: tuple[int, int]) -> None:
        self.sink, self.conn, self.devices, self.seed = sink, conn, devices, 1

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(20_000):
            self.sink.step(0.005)
            if condition():
                return
        raise AssertionError("it never came")

    def hear(self) -> Any:
        self.until(self.conn.poll)
        return self.conn.recv()

    def hand_over(self) -> None:
        """A request arrives, each byte of it."""
        made = new_ticket("prefill")
        self.conn.send(made)
        fetch = self.sink.fetch(made, PROMPT, {"kv": THERE})
        self.until(lambda: fetch.done)
        fetch.wait(0)
        pool = self.sink.pool
        sent = np.random.default_rng(self.seed).integers(1, 256, on_gpu(pool).length, np.uint8)
        for there, here in zip(rows(pool, get(on_gpu(pool)), THERE), rows(pool, sent, HERE), strict=True):
            assert np.array_equal(there, here)


@pytest.fixture
def pair(devices: tuple[int, int], tmp_path: Path) -> Iterator[Pair]:
    address = f"ipc://{tmp_path}/prefill"
    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, address, devices[0]), daemon=True)
    process.start()
    assert conn.recv() == "listening"
    pool = Pool.allocate(GEOMETRY, PAGES, device=devices[1])
    with Sink("decode", pool, {"prefill": address}, OPTIONS) as sink:
        yield Pair(sink, conn, devices)
    conn.send("end")
    process.join(20)
    assert process.exitcode == 0


def test_a_sink_sleeps_and_its_memory_is_free_while_the_source_runs_on(pair: Pair) -> None:
    """KVP-EPO-FREE, KVP-EPO-UNMAP: the other process has unmapped it, so the GPU has it back."""
    pair.hand_over()
    for _ in range(3):
        before = free(pair.devices[1])
        sleeping = pair.sink.sleep()
        pair.until(lambda: sleeping.done)  # noqa: B023
        size = on_gpu(sleeping.pool).length
        sleeping.pool.close()
        assert free(pair.devices[1]) - before >= size
        pair.sink.wake(Pool.allocate(GEOMETRY, PAGES, device=pair.devices[1]))
        pair.hand_over()


def test_a_sink_moves_while_requests_go_on(pair: Pair) -> None:
    """KVP-EPO-RISE."""
    pair.hand_over()
    moved = pair.sink.move(Pool.allocate(GEOMETRY, PAGES, device=pair.devices[1]))
    pair.hand_over()
    pair.until(lambda: moved.done)
    before = free(pair.devices[1])
    size = on_gpu(moved.pool).length
    moved.pool.close()
    assert free(pair.devices[1]) - before >= size
    pair.hand_over()


def test_a_source_sleeps_and_serves_from_other_memory(pair: Pair) -> None:
    """KVP-EPO-MOVED."""
    pair.hand_over()
    before = free(pair.devices[0])
    pair.conn.send("sleep")
    assert pair.hear() == "asleep"
    assert free(pair.devices[0]) - before >= on_gpu(pair.sink.pool).length
    pair.conn.send("wake")
    pair.seed = pair.hear()
    pair.hand_over()


def test_what_waits_ends_with_pool_moved(pair: Pair) -> None:
    """KVP-EPO-MOVED: pages of a fetch that never got bytes are free at once."""
    pair.hand_over()
    fetch = pair.sink.fetch(new_ticket("prefill"), PROMPT, {"kv": THERE})
    sleeping = pair.sink.sleep()
    pair.until(lambda: fetch.done and sleeping.done)
    with pytest.raises(RemoteError) as lost:
        fetch.wait(0)
    assert lost.value.code == ErrorCode.POOL_MOVED
