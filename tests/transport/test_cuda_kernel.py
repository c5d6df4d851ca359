"""The copy kernel's own source, compiled for the host, against the numpy executor: random programs, byte for byte."""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvproto.transport.cuda
from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.errors import LocalError
from kvproto.planning.layout import Cache, lay_out
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.cuda import kernel
from kvproto.wire.enums import DType, ErrorCode
from tests.plan.programs import random_pairs

HERE = Path(__file__).parent
SOURCE = Path(kvproto.transport.cuda.__file__).parent / "kernel.cu"
WORDS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}
DRIVER = """
#include "kernel.cu"
void run_expand(const Map *maps, u32 n, u32 blocks) { EACH_THREAD(blocks, n) expand(maps); }
void run_checksum(const Sum *sums, u32 n, u32 blocks) { EACH_THREAD(blocks, n) checksum(sums); }
void run_part(const Part *part, u32 blocks) { EACH_THREAD(blocks, 1) copy_part(*part); }
void run_few(const Few *few, u32 blocks) { EACH_THREAD(blocks, 1) copy_few(*few); }
void run_copy(const Class *classes, u32 n, u32 chunks, u32 blocks) { EACH_THREAD(blocks, 1) copy(classes, n, chunks); }
"""

Kernels = dict[int, ctypes.CDLL]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "driver.c").write_text(DRIVER)
    made = {}
    for word, name in WORDS.items():
        library = folder / f"copy{word}.so"
        flags = ["-O1", "-w", "-shared", "-fPIC", "-fsanitize=bounds"]
        flags += [
            f"-DWORD={name}",
            "-DTHREADS=64",
            "-DDEPTH=3",
            f"-DFEW_CLASSES={kernel.FEW_CLASSES}",
            f"-DFEW_WORDS={kernel.FEW_WORDS}",
        ]
        places = ["-I", str(SOURCE.parent), "-include", str(HERE / "host_gpu.h")]
        subprocess.run(["gcc", *flags, *places, "-o", str(library), str(folder / "driver.c")], check=True, timeout=60)
        made[word] = ctypes.CDLL(str(library))
    return made


def run(
    kernels: Kernels,
    works: Sequence[kernel.CopyJob],
    blocks: int,
    long: int = kernel.LONG,
    after: Callable[[int], None] | None = None,
) -> kernel.UploadedLaunch:
    """As the executor does it: an image, the rows expanded, a copy for each width of word; `after` each work."""
    most, rows = kernel.sizes(works)
    memory, expanded = np.full(most + 64, 0xEE, np.uint8), np.full(rows + 64, 0xEE, np.uint8)
    image_at, rows_at = (-(-a.ctypes.data // 16) * 16 for a in (memory, expanded))
    start = image_at - memory.ctypes.data
    made = kernel.launch(works, memory[start : start + most], image_at, rows_at, long, separate=after is not None)
    assert made.size <= most
    assert (memory[start + most :] == 0xEE).all()
    if made.n_maps:
        kernels[16].run_expand(ctypes.c_void_p(image_at), made.n_maps, 2)
    for k, group in enumerate(made.groups):
        for source, sink, length in (run for long in group.long for run in long.runs().T.tolist()):
            ctypes.memmove(sink, source, length)
        for word, offset, n, chunks in group.classes:
            kernels[word].run_copy(ctypes.c_void_p(image_at + offset), n, chunks, blocks)
        if after:
            after(k)
    assert (expanded[rows_at - expanded.ctypes.data + rows :] == 0xEE).all()
    return made


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.cuda.kernel.THREADS", 64)
    monkeypatch.setattr("kvproto.transport.cuda.kernel.DEPTH", 3)
    monkeypatch.setattr("kvproto.transport.cuda.kernel._FIRST_RUNS", 3)
    monkeypatch.setattr("kvproto.copying.program._SMALL", 2)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.integers(1, 9),
    cut=st.booleans(),
    direct=st.booleans(),
    long=st.sampled_from([1, 24, 1 << 30]),
    most=st.integers(1, 4),
)
def test_random_programs(
    kernels: Kernels, seed: int, blocks: int, cut: bool, direct: bool, long: int, most: int
) -> None:
    """Several rank pairs in one launch; all of it, or the layers of an interval."""
    rng = random.Random(seed)
    dice = np.random.default_rng(seed)
    pairs = random_pairs(rng)
    layers = tuple(sorted(rng.sample(range(6), 2))) if cut else None
    works, checks = [], []
    for program, from_lengths, to_lengths in pairs:
        here = {r: dice.integers(0, 256, n, np.uint8) for r, n in from_lengths.items()}
        there = {r: dice.integers(0, 256, n, np.uint8) for r, n in to_lengths.items()}
        wanted = {r: a.copy() for r, a in there.items()}
        part = program if layers is None else program.select(layers=range(*layers))
        execute(part, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in wanted.items()})
        made = kernel.table(
            program, {r: a.ctypes.data for r, a in here.items()}, {r: a.ctypes.data for r, a in there.items()}
        )
        works.append(kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), program.maps, layers))
        checks.append((there, wanted, here, part.bytes))
    image = np.zeros(kernel.INLINE_BYTES, np.uint8)
    small = kernel.inline_launch(works, image, 1000, long) if direct else None
    if small is not None:
        kernels[small.word].run_few(ctypes.c_void_p(image.ctypes.data), blocks)
    assert len(kernel.parts(works, most)) <= most
    launched = [small] if small else [run(kernels, part, blocks, long) for part in kernel.parts(works, most)]
    assert sum(each.bytes for each in launched) == sum(n for *_, n in checks)
    for there, wanted, _, _ in checks:
        assert all(np.array_equal(there[r], wanted[r]) for r in there)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 9), long=st.sampled_from([24, 1 << 30]))
def test_layers_of_one_upload_are_there_one_after_the_other(
    kernels: Kernels, seed: int, blocks: int, long: int
) -> None:
    rng, dice = random.Random(seed), np.random.default_rng(seed)
    pairs = random_pairs(rng)
    assume(pairs)
    program, from_lengths, to_lengths = pairs[0]
    here = {r: dice.integers(0, 256, n, np.uint8) for r, n in from_lengths.items()}
    there = {r: dice.integers(0, 256, n, np.uint8) for r, n in to_lengths.items()}
    wanted = {r: a.copy() for r, a in there.items()}
    ends = sorted({rng.randrange(1, 7), 7})
    cuts = list(zip([0, *ends], ends, strict=False))
    made = kernel.table(
        program, {r: a.ctypes.data for r, a in here.items()}, {r: a.ctypes.data for r, a in there.items()}
    )
    works = [kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), program.maps, cut) for cut in cuts]
    assert kernel.sizes(works)[1] == kernel.sizes(works[:1])[1], "rows are expanded once"

    def after(k: int) -> None:
        part = program.select(layers=range(*cuts[k]))
        execute(part, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in wanted.items()})
        assert all(np.array_equal(there[r], wanted[r]) for r in there)

    launched = run(kernels, works, blocks, long, after)
    assert launched.bytes == program.bytes
    assert len(launched.groups) == len(cuts)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 5))
def test_checksums_are_those_of_the_host(kernels: Kernels, seed: int, blocks: int) -> None:
    dice = np.random.default_rng(seed)
    for program, *lengths in random_pairs(random.Random(seed)):
        for sink, length in enumerate(lengths):
            memory = {r: dice.integers(0, 256, n, np.uint8) for r, n in length.items()}
            addresses = {r: a.ctypes.data for r, a in memory.items()}
            summing = kernel.sum_table(program, addresses, bool(sink))
            most, rows = summing.sizes(program.maps)
            image, expanded = aligned(most), aligned(rows)
            image[:], expanded[:] = 0xEE, 0xEE
            at = image.ctypes.data
            size, _ = summing.write(program.maps, image, at, expanded.ctypes.data)
            assert size <= most
            kernels[16].run_expand(ctypes.c_void_p(at), summing.n_maps, 2)
            for word, offset, count in summing.launches:
                kernels[word].run_checksum(ctypes.c_void_p(at + offset), count, blocks)
            found = summing.sums(program.maps, image[size - 8 * len(summing.groups) : size])
            assert found == checksums(program, {r: memoryview(a) for r, a in memory.items()}, bool(sink))


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 24])
def test_words_are_as_wide_as_the_alignment_allows(kernels: Kernels, shift: int) -> None:
    program, here, there, make = plain(rows=5, width=96)
    room = np.zeros(there.size + 64, np.uint8)
    at = -(-room.ctypes.data // 16) * 16 - room.ctypes.data + shift
    made = make(room.ctypes.data + at)
    assert [s.word for s in made.shapes] == [{0: 16, 1: 1, 2: 2, 4: 4, 8: 8, 24: 8}[shift]]
    run(kernels, [kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), program.maps)], 3)
    execute(program, {0: memoryview(here)}, {0: memoryview(there)})
    assert np.array_equal(room[at : at + there.size], there)
    assert not room[:at].any()
    assert not room[at + there.size :].any()


def test_an_operation_of_too_many_words_is_cut(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.cuda.kernel.MOST", 100)
    program, here, there, make = plain(rows=90, width=96)
    room = aligned(there.size)
    made = make(room.ctypes.data)
    launched = run(kernels, [kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), program.maps)], 3)
    assert launched.groups[0].classes[0][2] == 6  # 90 rows of 6 words, 16 rows at a time
    execute(program, {0: memoryview(here)}, {0: memoryview(there)})
    assert np.array_equal(room, there)


@pytest.mark.parametrize(
    ("column", "value", "path"),
    [("source_item", 9, "source item"), ("sink_row", -1, "sink row"), ("rows", 7, "source row")],
)
def test_rows_beyond_the_pool_are_refused_before_any_launch(column: str, value: int, path: str) -> None:
    program, _, there, make = plain(rows=5, width=96, flat=False)
    made = make(there.ctypes.data)
    bad = attrs.evolve(program.maps[0], **{column: np.full_like(program.maps[0].rows, value)})
    kernel.check([kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), program.maps)])
    with pytest.raises(LocalError) as caught:
        kernel.check([kernel.CopyJob(kernel.Prepared(made, made.ops.ctypes.data), [bad])])
    assert (caught.value.code, caught.value.path) == (ErrorCode.OUT_OF_REGION, path)


def aligned(size: int) -> np.ndarray:
    room = np.zeros(size + 16, np.uint8)
    at = -room.ctypes.data % 16
    return room[at : at + size]


def plain(
    rows: int, width: int, flat: bool = True
) -> tuple[CopyProgram, np.ndarray, np.ndarray, Callable[[int], object]]:
    """A latent of `width` bytes from pages of 4 rows to pages of 2, both in no order; a table for a sink at an address."""
    specs = [Cache.mla("m", 1, latent=width - 1, rope=1, page=p, dtype=DType.U8) for p in (4, 2)]
    geometries = [lay_out([s]) for s in specs]
    dice = np.random.default_rng(1)
    sides, windows, sizes_ = [], [], []
    for g in geometries:
        need = items_needed(g.groups[0], 0, 0, rows)
        columns, length = columns_without_gaps(g, 0, {0: need})
        if not flat:
            columns[0] = attrs.evolve(columns[0], item_stride=columns[0].item_stride + np.uint64(width))
            length += need * width
        sides.append(RankLayout(g, 0, columns))
        windows.append({0: Window(0, rows, dice.permutation(need))})
        sizes_.append(length)
    program = Pair(plan(*geometries).routes, *sides).lower(*windows)
    here = aligned(sizes_[0])
    here[:] = dice.integers(0, 256, here.size, np.uint8)
    return (
        program,
        here,
        np.zeros(sizes_[1], np.uint8),
        lambda at: kernel.table(program, {0: here.ctypes.data}, {0: at}),
    )
