"""The packed stream by the copy kernel's own source, compiled for the host, against the numpy packer: byte for byte."""

import ctypes
import random
from typing import Any, Literal

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.copying.execute import execute
from kvproto.copying.program import EMPTY_MAP, CopyProgram
from kvproto.errors import LocalError
from kvproto.transport.cuda.stream import StreamSide, StreamTable
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode
from tests.conversions import WORLDS
from tests.errors import raises
from tests.plan.programs import random_pairs
from tests.plan.test_conversion import World, regions
from tests.pools import contents
from tests.transport.test_cuda_kernel import Kernels, kernels, plain, small_blocks
from tests.transport.test_packed import chunks

__all__ = ["kernels", "small_blocks"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def stream(
    program: CopyProgram, side: Literal["source", "sink"], addresses: dict[int, int], lengths: dict[int, int]
) -> StreamTable:
    return StreamTable(StreamSide(program, side, addresses, lengths), program.maps)


class Emulated:
    """A stream as the device runs it: its image and rows in host memory, each launch by the compiled kernel."""

    def __init__(
        self, kernels: Kernels, program: CopyProgram, side: Literal["source", "sink"], regions: dict[int, Bytes], blocks: int,
        before: CopyProgram | None = None,
    ) -> None:  # fmt: skip
        """`before`: another request of the rank pair, for which what both share was made."""
        self.kernels, self.blocks = kernels, blocks
        addresses, lengths = {i: a.ctypes.data for i, a in regions.items()}, {i: a.size for i, a in regions.items()}
        self.table = StreamTable(StreamSide(before or program, side, addresses, lengths), program.maps)
        most, rows = self.table.sizes
        self.image, self.rows = np.full(most + 64, 0xEE, np.uint8), np.full(rows + 64, 0xEE, np.uint8)
        image_at, rows_at = (-(-a.ctypes.data // 16) * 16 for a in (self.image, self.rows))
        start = image_at - self.image.ctypes.data
        assert self.table.write(self.image[start : start + most], image_at, rows_at) <= most
        if self.table.n_maps:
            kernels[16].run_expand(ctypes.c_void_p(image_at), self.table.n_maps, 2)
        assert (self.rows[rows_at - self.rows.ctypes.data + rows :] == 0xEE).all()

    def run(self, offset: int, slot: Bytes) -> None:
        made = self.table.chunk(offset, slot.size, slot.ctypes.data)
        for source, sink, length in made.pieces:
            ctypes.memmove(sink, source, length)
        for part in made.parts:
            room = np.frombuffer(part.parameters, np.uint8).copy()
            self.kernels[part.word].run_part(ctypes.c_void_p(room.ctypes.data), self.blocks)


def slot(length: int, misaligned: int) -> tuple[Bytes, Bytes]:
    """Memory as long as a chunk, between bytes that must stay."""
    room = np.full(length + 96, 0xEE, np.uint8)
    at = -room.ctypes.data % 16 + 16 + misaligned
    return room, room[at : at + length]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 5), misaligned=st.sampled_from([0, 0, 4, 1]))
def test_any_program_cut_anywhere(kernels: Kernels, seed: int, blocks: int, misaligned: int) -> None:
    rng, dice = random.Random(seed), np.random.default_rng(seed)
    for program, from_lengths, to_lengths in random_pairs(rng):
        here = {r: dice.integers(0, 256, n, np.uint8) for r, n in from_lengths.items()}
        there = {r: dice.integers(0, 256, n, np.uint8) for r, n in to_lengths.items()}
        wanted = {r: a.copy() for r, a in there.items()}
        execute(program, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in wanted.items()})
        by_hand = PackedStream(program, "source", {r: memoryview(a) for r, a in here.items()})
        out, into = (
            Emulated(kernels, program, "source", here, blocks),
            Emulated(kernels, program, "sink", there, blocks),
        )
        assert out.table.order.length == into.table.order.length == by_hand.length
        stream = np.zeros(by_hand.length, np.uint8)
        by_hand.pack(0, stream)
        for a, b in chunks(rng, by_hand.length, rng.choice([1, 6, 40])):
            room, data = slot(b - a, misaligned)
            out.run(a, data)
            assert np.array_equal(data, stream[a:b])
            assert (room != 0xEE).sum() <= b - a
            into.run(a, data)
        assert all(np.array_equal(there[r], wanted[r]) for r in there)


@pytest.mark.parametrize("world", [0, 3])
def test_a_sink_gets_converted_bytes_and_a_source_converts_none(kernels: Kernels, world: int) -> None:
    """Packed by the host's packer, and refused by a GPU's; KVP-CNV-EXACT."""
    for a, b, program in World.of(*WORLDS[world]).programs:
        by_hand = PackedStream(program, "source", regions(a))
        there = {id: np.frombuffer(memory, np.uint8).copy() for id, memory in regions(b).items()}
        into = Emulated(kernels, program, "sink", there, 3)
        assert into.table.order.length == by_hand.length
        for at in range(0, by_hand.length, 500):
            data = np.zeros(min(500, by_hand.length - at), np.uint8)
            by_hand.pack(at, data)
            into.run(at, data)
        execute(program, regions(a), regions(b))
        assert np.array_equal(there[0], contents(b.pool))
        with raises(LocalError, code=ErrorCode.NO_TRANSPORT):
            stream(program, "source", {0: 0}, {0: contents(a.pool).size})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_requests_of_one_pair_share_a_side(kernels: Kernels, seed: int) -> None:
    rng, dice = random.Random(seed), np.random.default_rng(seed)
    for whole, from_lengths, to_lengths in random_pairs(rng):
        lo = rng.randrange(12)
        hi = lo + rng.choice([0, 1, 5, 40])
        maps = tuple(m if m.whole else m.between(lo, hi) for m in whole.maps)
        program = attrs.evolve(whole, maps=maps)
        here = {r: dice.integers(0, 256, n, np.uint8) for r, n in from_lengths.items()}
        there = {r: dice.integers(0, 256, n, np.uint8) for r, n in to_lengths.items()}
        wanted = {r: a.copy() for r, a in there.items()}
        execute(program, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in wanted.items()})
        before = rng.choice([whole, attrs.evolve(whole, maps=(EMPTY_MAP,) * len(maps))])  # as at registration
        out = Emulated(kernels, program, "source", here, 2, before=before)
        into = Emulated(kernels, program, "sink", there, 2, before=before)
        data = np.zeros(program.bytes, np.uint8)
        by_hand = np.zeros_like(data)
        assert out.table.order.length == into.table.order.length == data.size
        for a, b in chunks(rng, data.size, 6):
            out.run(a, data[a:b])
            into.run(a, data[a:b])
        PackedStream(program, "source", {r: memoryview(a) for r, a in here.items()}).pack(0, by_hand)
        assert np.array_equal(data, by_hand)
        assert all(np.array_equal(there[r], wanted[r]) for r in there)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), most=st.integers(1, 700))
def test_a_sender_ends_chunks_with_records_where_they_fit(seed: int, most: int) -> None:
    rng = random.Random(seed)
    for program, lengths, _ in random_pairs(rng):
        made = stream(program, "source", dict.fromkeys(lengths, 1 << 20), lengths)
        order = made.order
        ends = {0}
        for start, end, width in zip(
            order.start.tolist(), order.end.tolist(), order.columns.width.tolist(), strict=True
        ):
            ends |= set(range(start, end + 1, width))
        at = 0
        while at < order.length:
            size = made.chunk_size(at, min(most, order.length - at))
            assert 0 < size <= most
            assert at + size in ends or not any(at < e <= at + size for e in ends)
            if at in ends:
                assert {p.word for p in made.chunk(at, size, 1 << 20).parts} <= set(made._side.words)
            at += size
        assert at == order.length


def test_wide_words_where_the_chunk_begins_with_a_record() -> None:
    program, here, _, _ = plain(rows=5, width=96)
    made = stream(program, "source", {0: here.ctypes.data}, {0: here.size})
    assert [p.word for p in made.chunk(96, 192, 1 << 16).parts] == [16]
    assert not made.chunk(96, 192, 1 << 16).pieces
    assert [p.word for p in made.chunk(96, 192, (1 << 16) + 4).parts] == [4]
    assert made.chunk(97, 95, 1 << 16).pieces
    assert not made.chunk(97, 95, 1 << 16).parts


def test_an_operation_of_too_many_words_is_cut(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.cuda.kernel.MOST", 24)
    program, here, _, _ = plain(rows=90, width=96)
    made = Emulated(kernels, program, "source", {0: here}, 3)
    stream = np.zeros(made.table.order.length, np.uint8)
    made.run(0, stream)
    assert len(made.table.chunk(0, stream.size, stream.ctypes.data).parts) == 3  # 23 classes of 4 rows
    by_hand = np.zeros_like(stream)
    PackedStream(program, "source", {0: memoryview(here)}).pack(0, by_hand)
    assert np.array_equal(stream, by_hand)


def test_what_is_beyond_the_stream_is_refused() -> None:
    program, here, _, _ = plain(rows=5, width=96)
    regions = {0: here}
    made = stream(
        program, "source", {r: a.ctypes.data for r, a in regions.items()}, {r: a.size for r, a in regions.items()}
    )
    for offset, length in ((-1, 4), (0, made.order.length + 1), (made.order.length, 1)):
        with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
            made.chunk(offset, length, 1 << 20)
    with raises(LocalError, code=ErrorCode.OUT_OF_REGION):
        stream(program, "source", dict.fromkeys(regions, 1 << 20), {r: a.size - 1 for r, a in regions.items()})
