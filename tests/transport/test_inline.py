"""Streams inside the session at both ends: what is packed when, and what a transport says of itself."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvproto.errors import LocalError, RemoteError
from kvproto.transport.base import Capabilities, PeerRegions
from kvproto.transport.bench import scattered
from kvproto.transport.inline.provider import PROVIDER
from kvproto.transport.inline.transport import FRAME, InlineLink, InlineStream, InlineTransport
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.shm.transport import ShmTransport
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode, Feature, Proof
from tests.errors import raises
from tests.node.stages import Stage

DOCS = Path(__file__).parents[2] / "docs/reference.md"


def stream(link: InlineLink, rows: int, grows: bool = False) -> InlineStream:
    """Of `rows` rows of 4 KiB, one a layer."""
    program = scattered(4096, 1, rows)
    memory = np.arange(program.bytes, dtype=np.uint64).astype(np.uint8)
    return InlineStream(link, PackedStream(program, "source", {0: memory.data}), grows)


def look(each: InlineStream) -> int:
    """Bytes that a look packs."""
    _ = each.done
    return sum(len(piece.data) for piece in each.take())


def test_nothing_is_packed_without_credit_and_no_more_than_it_allows() -> None:
    """KVP-INL-BEYOND, as the source keeps it."""
    link = InlineLink()
    only = stream(link, 64)
    assert look(only) == 0
    link.allow(5000)
    assert (look(only), look(only), link.room) == (5000, 0, 0)
    link.allow(1 << 20)
    assert (look(only), only.done, link.room) == ((256 << 10) - 5000, True, (1 << 20) - (256 << 10) + 5000)


def test_streams_under_way_share_the_credit() -> None:
    """KVP-INL-TURN."""
    link = InlineLink()
    long, other, short = stream(link, 1024), stream(link, 1024), stream(link, 1)
    link.allow(9 * FRAME)
    assert (look(long), look(other), look(short)) == (3 * FRAME, 2 * FRAME, 4096)
    assert link.active == {long, other}
    link.allow(FRAME)
    assert link.room == 5 * FRAME - 4096
    assert other.stop() == Proof.PROVEN
    assert look(long) == 5 * FRAME - 4096


def test_a_piece_has_at_most_a_frame_and_the_last_says_so() -> None:
    link = InlineLink()
    only = stream(link, 40)
    link.allow(1 << 20)
    _ = only.done
    pieces = only.take()
    assert [(p.offset, len(p.data), p.last) for p in pieces] == [(0, FRAME, False), (FRAME, (160 << 10) - FRAME, True)]


def test_rows_that_are_not_there_wait() -> None:
    link = InlineLink()
    only = stream(link, 4, grows=True)
    link.allow(1 << 20)
    assert look(only) == 0
    only.mark_ready([(0, 0), (0, 1)], ())
    assert look(only) == 8192
    only.mark_ready(None, ())
    assert (look(only), only.done) == (8192, True)


@pytest.mark.parametrize(("writes", "features"), [(True, ()), (True, (Feature.STAGED,)), (False, (Feature.INLINE,))])
def test_inline_is_refused_without_its_feature_and_to_read(writes: bool, features: tuple[Feature, ...]) -> None:
    """KVP-REG-INLINE."""
    with raises(RemoteError, code=ErrorCode.NO_TRANSPORT, path="regions[0].handles"):
        InlineTransport().connect(PeerRegions([], [], writes, features, b""))


def test_memory_that_is_not_the_hosts_is_refused() -> None:
    stage = Stage()
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="regions[0]"):
        InlineTransport().expose({0: object()}, 1, stage.pair.nothing, stage.pair.nothing.runs)  # type: ignore[dict-item]


def test_shm_is_preferred_where_nobody_chooses() -> None:
    memory = SharedMemory(4096)
    assert 0 < PROVIDER.preference(memory) < 2
    memory.close()


def test_the_table_for_embedders_says_what_transports_say() -> None:
    rows = {
        name: (feature, pull, proof.split(":")[0])
        for name, feature, pull, proof in re.findall(
            r"^\| `(\w+)` \| \w+ \| [^|]+ \| [^|]+ \| (\w*) ?\| (\w+) \| ([^|]+?) \|$", DOCS.read_text(), re.M
        )
    }
    for name, transport in (("shm", ShmTransport), ("inline", InlineTransport)):
        can: Capabilities = transport.capabilities
        words = [("no", "yes")[flag] for flag in (can.reads, can.death_is_proof)]
        assert rows[name] == ("".join(f.name for f in can.features), *words), name
