"""A source node and a sink node with pools on GPUs, and what their bytes must be."""

import secrets
from pathlib import Path

import numpy as np

from kvproto import Pool
from kvproto.net import Listener, private_address
from kvproto.rank.base import party_of
from kvproto.source.node import SourceNode
from kvproto.wire.messages import Ticket
from tests import pools
from tests.gpu.memory import Bytes, get, on_gpu, put
from tests.node.nodes import PREFILL, DrivenSource, Nodes, finished, sink_node
from tests.session.driver import geometry

ITEMS = {0: 12, 1: 12}
CONTENT = b"c" * 32
TOKENS, ROWS = 11, 4
HERE, THERE = [2, 0, 5], [7, 1, 9]
"""Items of the source, of the sink."""
TOKEN = {(2, "token"): b"\7\0\0\0"}
FINISHED = finished({0: HERE, 1: HERE}, TOKENS, TOKEN)


def filled(device: int, seed: int) -> tuple[Pool, Bytes]:
    """A pool of one rank on a GPU, and its bytes."""
    pool = pools.allocate(geometry(1), 0, ITEMS, device)
    return pool, fill(pool, seed)


def fill(pool: Pool, seed: int) -> Bytes:
    memory = on_gpu(pool)
    data = np.random.default_rng(seed).integers(0, 256, memory.length, np.uint8)
    put(memory, data)
    return data


def bytes_of(pool: Pool) -> Bytes:
    return get(on_gpu(pool))


def expected(pool: Pool, sent: Bytes, before: Bytes, groups: tuple[int, ...] = (0, 1), layers: int = 99) -> Bytes:
    """The sink's bytes after a hand-over between pools of one layout: those of no row that was sent are as before."""
    out = before.copy()
    for share in pool.layout.geometry.ranks[0].owns:
        for layer in [n for n in share.layers.tolist() if n < layers] if share.group in groups else []:
            for part in pool.layout.groups[share.group].parts:
                _, offset, shape, strides = pool.place(pool.layout.groups[share.group].name, layer, part.name)
                here, there = (np.ndarray(shape, np.uint8, data, offset, strides) for data in (sent, out))
                for n, (i, j) in enumerate(zip(HERE, THERE, strict=True)):
                    rows = min(ROWS, TOKENS - n * ROWS)
                    there[j, :rows] = here[i, :rows]
    return out


class Sink(Nodes):
    """A sink node with sources of this process, and what it has told."""

    def __init__(self, address: str, pool: Pool, sources: list[SourceNode]) -> None:
        self.node = sink_node("d", pool)
        self.node.connect(PREFILL, address)
        super().__init__(sources, [self.node])
        OPEN.append(self)

    def ask(self, made: Ticket) -> int:
        """Once registered."""
        self.ready()
        self.told.clear()
        return self.fetch(0, made, CONTENT, TOKENS, {0: THERE, 1: THERE})


OPEN: list[Sink] = []
"""For a fixture to close."""


def source(address: str, pool: Pool) -> SourceNode:
    """A source node that hands over every part at once."""
    return DrivenSource(party_of("p", pool), pool, Listener(address), {0: address}, part_bytes=1, first_part_ratio=0)


def place(folder: Path) -> str:
    """An address of its own."""
    return private_address(folder, f"kv-{secrets.token_hex(4)}")
