"""Two nodes in one process, over real sockets and shared memory."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto.net import Dialer, Listener, private_address
from kvproto.node import Finished, SinkNode, SourceNode
from kvproto.node.pool import allocate
from kvproto.node.sink import Received
from kvproto.node.source import PART
from kvproto.planning.geometry import Geometry
from kvproto.session import Party
from kvproto.session.events import Arrived, Lost, Ready, Released
from kvproto.transport.base import Transport
from kvproto.wire.enums import ErrorCode, Outcome, Proof
from tests.node.nodes import Nodes
from tests.session.driver import geometry, ticket

ITEMS = {0: 12, 1: 12}
CONTENT = b"c" * 32
TOKENS = 11
FIRST = {(2, "token"): b"\7\0\0\0"}
"""The hand-off part: the first token."""


class Flipping(SinkNode):
    """A decode rank whose memory loses one bit between arrival and use."""

    def _received(self, event: Arrived) -> Received | Lost:
        item = int(self._grants[event.transfer][1].items[0])
        self.pool.array(1, 0, "v")[item, 0, 0, 3] ^= 0x40
        return super()._received(event)


class Pair(Nodes):
    """Source ranks and sink ranks."""

    def __init__(
        self, folder: Path, source: Geometry, sink: Geometry, node: type[SinkNode] = SinkNode, verify: bool = True,
        give: Callable[[], Sequence[Transport]] = list, take: Callable[[], Sequence[Transport]] = list,
        part: int = PART,
        pull: bool = False, pull_source: bool = False, pull_sink: bool = False, lease: float = 10.0,
        late: float | None = None,
    ) -> None:  # fmt: skip
        self._give = give
        self._more: dict[str, Any] = {"part": part, "pull": pull or pull_source, "lease": lease, "late": late}
        self.sent: tuple[dict[int, Any], dict[int, list[int]]] = {}, {}
        addresses = {r.rank: private_address(folder, f"kv-{r.rank}") for r in source.ranks}
        sinks = [
            node(
                Party("d", 0, r.rank, secrets.randbits(60)),
                sink,
                allocate(sink, r.rank, ITEMS),
                Dialer(),
                addresses[0],
                verify,
                take(),
                pull or pull_sink,
            )
            for r in sink.ranks
        ]
        super().__init__([self._source(source, r, addresses, verify) for r in addresses], sinks)

    def _source(self, source: Geometry, rank: int, addresses: dict[int, str], verify: bool) -> SourceNode:
        pool = allocate(source, rank, ITEMS)
        party = Party("p", 0, rank, secrets.randbits(60))
        return SourceNode(party, source, pool, Listener(addresses[rank]), addresses, verify, self._give(), **self._more)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    tmp_path.chmod(0o700)
    made: list[Pair] = []

    def make(source_tp: int, sink_tp: int, node: type[SinkNode] = SinkNode, verify: bool = True) -> Pair:
        made.append(Pair(tmp_path, geometry(source_tp), geometry(sink_tp), node, verify))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(pair: Pair, rng: np.random.Generator, deadline: float = 60.0) -> list[dict[int, list[int]]]:
    """Fill the sources alike, ask for one request; items of each sink rank."""
    data = {g: rng.integers(0, 256, (12, 3, 4, 2, 40), np.uint8) for g in (0, 1)}
    made = ticket(deadline)
    source_items = {g: rng.permutation(12)[:3].tolist() for g in (0, 1)}
    for node in pair.sources:
        fill(node, data)
        node.expect(made, CONTENT)
        node.finish(bytes(made.key), Finished(source_items, TOKENS, Outcome.CONTINUE, FIRST))
    pair.until(lambda: pair.count(Ready) == len(pair.sinks))
    pair.sent = data, source_items
    sink_items = []
    for sink in pair.sinks:
        items = {g: rng.permutation(12)[:3].tolist() for g in (0, 1)}
        sink_items.append(items)
        sink.transfer(made, CONTENT, 0, TOKENS, items)
    return sink_items


def hand_over(pair: Pair, rng: np.random.Generator) -> list[dict[int, list[int]]]:
    """Ask for one request, until all is over."""
    sink_items = ask(pair, rng)
    pair.until(
        lambda: pair.count(Received) + pair.count(Lost) == len(pair.sinks) and pair.count(Released) == len(pair.sources)
    )
    return sink_items


def fill(node: SourceNode, data: dict[int, np.ndarray[Any, Any]]) -> None:
    """Every rank holds its part of one global cache: bytes [item, layer, row, head, byte]."""
    for share in next(r for r in node.pool.side.geometry.ranks if r.rank == node.pool.side.rank).owns:
        for layer in share.layers.tolist() if share.group < 2 else []:
            group = node.pool.side.group(share.group)
            for p, part in enumerate(group.parts):
                span = next(s for s in share.lanes if s.part == p)
                view = node.pool.array(share.group, layer, part.name)
                view[:] = data[share.group][:, layer, :, span.lo : span.hi, : part.lane_bytes] + np.uint8(100 * p)


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2)])
def test_every_byte_arrives(pair: Callable[..., Pair], source_tp: int, sink_tp: int) -> None:
    made = pair(source_tp, sink_tp)
    sink_items = hand_over(made, np.random.default_rng())
    check(made, sink_items)


def check(made: Pair, sink_items: list[dict[int, list[int]]]) -> None:
    """Every byte of the items is there."""
    data, source_items = made.sent
    for sink, items in zip(made.sinks, sink_items, strict=True):
        for share in next(r for r in sink.pool.side.geometry.ranks if r.rank == sink.pool.side.rank).owns:
            for layer in share.layers.tolist() if share.group < 2 else []:
                group = sink.pool.side.group(share.group)
                for p, part in enumerate(group.parts):
                    span = next(s for s in share.lanes if s.part == p)
                    got = sink.pool.array(share.group, layer, part.name)
                    wanted = np.zeros_like(got)
                    for here, there in zip(items[share.group], source_items[share.group], strict=True):
                        wanted[here] = data[share.group][there, layer, :, span.lo : span.hi, : part.lane_bytes]
                        wanted[here] += np.uint8(100 * p)
                    wanted[items[share.group][-1], TOKENS % 4 :] = 0
                    assert np.array_equal(got, wanted)
    received = [e for e in made.told if isinstance(e, Received)]
    assert all(a == b for e in received for a, b in e.checksums.values())
    assert all(e.handoff == FIRST for e in received)


def test_flipped_bit_is_found(pair: Callable[..., Pair]) -> None:
    """KVP-VERIFY-SOURCE, KVP-VERIFY-SINK: the request is lost, though every writer said Done."""
    made = pair(2, 1, Flipping)
    hand_over(made, np.random.default_rng())
    (lost,) = [e for e in made.told if isinstance(e, Lost)]
    assert (lost.error.code, lost.error.path, lost.proof) == (ErrorCode.VERIFY_FAILED, "checksums[draft]", Proof.PROVEN)


def test_flipped_bit_passes_without_verify(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, Flipping, verify=False)
    hand_over(made, np.random.default_rng())
    assert made.count(Received) == 1
