"""Nodes in one process, over real sockets and shared memory."""

import contextlib
import select
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvproto.source.node
from kvproto.events import Over
from kvproto.net import Dialer, Listener, private_address
from kvproto.options import Options
from kvproto.planning.geometry import Geometry
from kvproto.rank.base import party_of
from kvproto.source.node import SourceNode
from kvproto.transport.base import Move, Transport
from kvproto.transport.shm.transport import ShmCopy, ShmTransport
from kvproto.wire.enums import ErrorCode
from tests.node.nodes import PREFILL, DrivenSource, Nodes, Received, TransferLost, finished, sink_node
from tests.pools import allocate, column
from tests.session.driver import geometry, ticket

ITEMS = {0: 12, 1: 12}
CONTENT = b"c" * 32
TOKENS = 11
FIRST = {(2, "token"): b"\7\0\0\0"}
"""The hand-off part: the first token."""


class Flipping(ShmTransport):
    """Loses one bit of the draft on its way."""

    def start(self, moves: Sequence[Move]) -> ShmCopy:
        copy = super().start(moves)
        for move in moves:
            for op in move.program.ops[move.program.ops["group"] == 1][-1:]:
                rows, sink = move.program.maps[op["map"]], move.sinks[int(op["sink_region"])]
                item, row = (rows.sink_item[0] * op["sink_item_stride"], rows.sink_row[0] * op["sink_row_stride"])
                sink.buffer[int(op["sink_offset"] + item + row) + 3] ^= 0x40  # type: ignore[union-attr]
        return copy


class Pair(Nodes):
    """Source ranks and sink ranks."""

    def __init__(
        self, folder: Path, source: Geometry, sink: Geometry, verify: bool = True, trust: bool = False,
        give: Callable[[], Sequence[Transport]] = list, take: Callable[[], Sequence[Transport]] = list,
        part_bytes: int = Options().part_bytes, pull: bool = False, pull_source: bool = False, pull_sink: bool = False,
        lease: float = 10.0, first_part_ratio: float | None = None,
    ) -> None:  # fmt: skip
        """`trust`: the sinks alone do not verify."""
        self.sent: tuple[dict[int, Any], dict[int, list[int]]] = {}, {}
        addresses = {r.rank: private_address(folder, f"kv-{r.rank}") for r in source.ranks}
        sources = []
        for rank, address in addresses.items():
            pool = allocate(source, rank, ITEMS)
            sources.append(
                DrivenSource(
                    party_of("p", pool), pool, Listener(address), addresses, verify=verify, transports=give(),
                    pull=pull or pull_source, part_bytes=part_bytes, lease=lease, first_part_ratio=first_part_ratio,
                )
            )  # fmt: skip
        sinks = []
        for each in sink.ranks:
            pool = allocate(sink, each.rank, ITEMS)
            made = sink_node("d", pool, take(), verify=verify and not trust, pull=pull or pull_sink)
            made.connect(PREFILL, addresses[0])
            sinks.append(made)
        super().__init__(sources, sinks)


def pairs(folder: Path, **defaults: Any) -> Iterator[Callable[..., Pair]]:
    """Makes pairs by their sizes and options, and closes them at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda source_tp, sink_tp, **options: stack.enter_context(
            contextlib.closing(Pair(folder, geometry(source_tp), geometry(sink_tp), **defaults | options))
        )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    yield from pairs(tmp_path)


def test_a_turn_that_has_lasted_hears_the_other_frames_in_the_next(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A frame that takes long to check delays nobody by more than itself."""
    monkeypatch.setattr(kvproto.source.node, "RECEIVE_TIME", -1.0)
    (source,) = pair(1, 1).sources
    strangers = Dialer()
    for n in range(3):
        assert strangers.send((n, private_address(tmp_path, "kv-0")), b"no frame of ours")
    told: list[Any] = []
    while len(told) < 3:
        select.select(source.filenos(), [], [], source.timeout())
        told += (some := source.turn())
        assert len(some) <= 1
    strangers.close()


def ask(pair: Pair, rng: np.random.Generator, deadline: float = 60.0) -> list[dict[int, list[int]]]:
    """Fill the sources alike, ask for one request; items of each sink rank."""
    data = {g: rng.integers(0, 256, (12, 3, 4, 2, 40), np.uint8) for g in (0, 1)}
    made = ticket(deadline)
    source_items = {g: rng.permutation(12)[:3].tolist() for g in (0, 1)}
    for node in pair.sources:
        fill(node, data)
        node.prefilled(made, CONTENT, finished(source_items, TOKENS, FIRST))
    pair.ready()
    pair.sent = data, source_items
    sink_items = []
    for sink in range(len(pair.sinks)):
        items = {g: rng.permutation(12)[:3].tolist() for g in (0, 1)}
        sink_items.append(items)
        pair.fetch(sink, made, CONTENT, TOKENS, items)
    return sink_items


def hand_over(pair: Pair, rng: np.random.Generator) -> list[dict[int, list[int]]]:
    """Ask for one request, until all is over."""
    sink_items = ask(pair, rng)
    pair.until(lambda: pair.count(Received | TransferLost) == len(pair.sinks) and pair.count(Over) == len(pair.sources))
    return sink_items


def fill(node: SourceNode, data: dict[int, np.ndarray[Any, Any]]) -> None:
    """Every rank holds its part of one global cache: bytes [item, layer, row, head, byte]."""
    for share in next(r for r in node.pool.layout.geometry.ranks if r.rank == node.pool.layout.rank).owns:
        for layer in share.layers.tolist() if share.group < 2 else []:
            group = node.pool.layout.groups[share.group]
            for p, part in enumerate(group.parts):
                span = next(s for s in share.lanes if s.part == p)
                view = column(node.pool, share.group, layer, part.name)
                view[:] = data[share.group][:, layer, :, span.lo : span.hi, : part.lane_bytes] + np.uint8(100 * p)


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2)])
def test_every_byte_arrives(pair: Callable[..., Pair], source_tp: int, sink_tp: int) -> None:
    made = pair(source_tp, sink_tp)
    sink_items = hand_over(made, np.random.default_rng())
    check(made, sink_items)
    groups = {(rank, g) for rank in range(source_tp) for g in (0, 1)}
    for received in made.ends(Received, sink_tp):
        assert received.checksums
        assert received.checksums.keys() <= groups


def check(made: Pair, sink_items: list[dict[int, list[int]]]) -> None:
    """Every byte of the items is there."""
    data, source_items = made.sent
    for sink, items in zip(made.sinks, sink_items, strict=True):
        for share in next(r for r in sink.pool.layout.geometry.ranks if r.rank == sink.pool.layout.rank).owns:
            for layer in share.layers.tolist() if share.group < 2 else []:
                group = sink.pool.layout.groups[share.group]
                for p, part in enumerate(group.parts):
                    span = next(s for s in share.lanes if s.part == p)
                    got = column(sink.pool, share.group, layer, part.name)
                    wanted = np.zeros_like(got)
                    for here, there in zip(items[share.group], source_items[share.group], strict=True):
                        wanted[here] = data[share.group][there, layer, :, span.lo : span.hi, : part.lane_bytes]
                        wanted[here] += np.uint8(100 * p)
                    wanted[items[share.group][-1], TOKENS % 4 :] = 0
                    assert np.array_equal(got, wanted)
    received = [e for e in made.told if isinstance(e, Received)]
    assert all(e.handoff == FIRST for e in received)


def test_flipped_bit_is_found(pair: Callable[..., Pair]) -> None:
    """KVP-VERIFY-SOURCE, KVP-VERIFY-SINK: the request is lost, though every writer said Done."""
    made = pair(2, 1, give=lambda: [Flipping()])
    hand_over(made, np.random.default_rng())
    (lost,) = [e for e in made.told if isinstance(e, TransferLost)]
    assert (lost.error.code, lost.error.path, lost.proven) == (ErrorCode.VERIFY_FAILED, "checksums[draft]", True)


def test_flipped_bit_passes_without_verify(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, give=lambda: [Flipping()], verify=False)
    sink_items = hand_over(made, np.random.default_rng())
    assert made.count(Received) == 1
    with pytest.raises(AssertionError):
        check(made, sink_items)
