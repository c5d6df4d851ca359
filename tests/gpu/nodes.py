"""A source node and a sink node with pools on GPUs, and what their bytes must be."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvproto.net import Dialer, Listener, private_address
from kvproto.net.sockets import wait
from kvproto.node import Finished, SinkNode, SourceNode
from kvproto.node.pool import Pool, allocate
from kvproto.session import Party
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.wire.enums import Outcome
from kvproto.wire.messages import Ticket
from tests.gpu.memory import Bytes, get, put
from tests.session.driver import geometry

ITEMS = {0: 12, 1: 12}
CONTENT = b"c" * 32
TOKENS, ROWS = 11, 4
HERE, THERE = [2, 0, 5], [7, 1, 9]
"""Items of the source, of the sink."""
TOKEN = {(2, "token"): b"\7\0\0\0"}
FINISHED = Finished({0: HERE, 1: HERE}, TOKENS, Outcome.CONTINUE, TOKEN)


def filled(device: int, seed: int) -> tuple[Pool, Bytes]:
    """A pool of one rank on a GPU, and its bytes."""
    pool = allocate(geometry(1), 0, ITEMS, device)
    return pool, fill(pool, seed)


def fill(pool: Pool, seed: int) -> Bytes:
    memory = device_memory(pool)
    data = np.random.default_rng(seed).integers(0, 256, memory.length, np.uint8)
    put(memory, data)
    return data


def device_memory(pool: Pool) -> DeviceMemory:
    assert isinstance(pool.memory, DeviceMemory)
    return pool.memory


def bytes_of(pool: Pool) -> Bytes:
    return get(device_memory(pool))


def expected(pool: Pool, sent: Bytes, before: Bytes, groups: tuple[int, ...] = (0, 1), layers: int = 99) -> Bytes:
    """The sink's bytes after a hand-over between pools of one layout: those of no row that was sent are as before."""
    out = before.copy()
    for share in pool.side.geometry.ranks[0].owns:
        for layer in [n for n in share.layers.tolist() if n < layers] if share.group in groups else []:
            for part in pool.side.group(share.group).parts:
                offset, shape = pool.place(share.group, layer, part.name)
                here, there = (np.ndarray(shape, np.uint8, data, offset) for data in (sent, out))
                for n, (i, j) in enumerate(zip(HERE, THERE, strict=True)):
                    rows = min(ROWS, TOKENS - n * ROWS)
                    there[j, :rows] = here[i, :rows]
    return out


class Sink:
    """A sink node, and what it has told."""

    def __init__(self, address: str, pool: Pool, sources: list[SourceNode]) -> None:
        self.dialer, self.told, self.sources = Dialer(), list[Any](), sources
        self.node = SinkNode(Party("d", 0, 0, secrets.randbits(60)), geometry(1), pool, self.dialer, address)
        OPEN.append(self)

    def turn(self) -> None:
        for source in self.sources:
            self.told += source.poll()
        self.told += self.node.poll()

    def until(self, condition: Callable[[], Any]) -> Any:
        for _ in range(3000):
            self.turn()
            if found := condition():
                return found
            wait(self.dialer.sockets, 0.01)
        raise AssertionError(self.told)

    def first(self, *kinds: type) -> Any:
        return self.until(lambda: [e for e in self.told if isinstance(e, kinds)])[0]

    def close(self) -> None:
        self.node.close("over")
        for source in self.sources:
            source.close("over")

    def ask(self, made: Ticket) -> int:
        """Once registered."""
        self.until(lambda: self.node.endpoint.ready)
        self.told.clear()
        return self.node.transfer(made, CONTENT, 0, TOKENS, {0: THERE, 1: THERE})


OPEN: list[Sink] = []
"""For a fixture to close."""


def source(address: str, pool: Pool) -> SourceNode:
    """A source node that hands over every part at once."""
    party = Party("p", 0, 0, secrets.randbits(60))
    return SourceNode(party, geometry(1), pool, Listener(address), {0: address}, part=1, late=0)


def place(folder: Path) -> str:
    """An address of its own."""
    return private_address(folder, f"kv-{secrets.token_hex(4)}")
