"""The conversion kernel's own source, compiled for the host, against the numpy executor: byte for byte."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import kvproto.transport.cuda
from kvproto import Cache, DType, Parallel, lay_out
from kvproto.copying.converting import convert
from kvproto.copying.execute import checksums, execute
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.errors import LocalError
from kvproto.planning.conversion import Made
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.cuda import kernel
from kvproto.wire.enums import ErrorCode, Feature
from tests.conversions import LAYERS, WORLDS, Engine, Rank, narrow
from tests.errors import raises
from tests.plan.test_conversion import World, regions
from tests.pools import contents

HERE = Path(__file__).parent
SOURCE = Path(kvproto.transport.cuda.__file__).parent
DRIVER = """
#include "kernel.cu"
void run_expand(const Map *maps, u32 n, u32 blocks) { EACH_THREAD(blocks, n) expand(maps); }
void run_checksum(const Sum *sums, u32 n, u32 blocks) { EACH_THREAD(blocks, n) checksum(sums); }
void run_copy(const Class *classes, u32 n, u32 chunks, u32 blocks) { EACH_THREAD(blocks, 1) copy(classes, n, chunks); }
"""
CONVERT = """
#include "convert.cu"
void run_convert(const Convert *ops, u32 n, u32 chunks, u32 blocks) { EACH_THREAD(blocks, 1) convert(ops, n, chunks); }
void run_sums(const Convert *ops, u32 n, u32 chunks, u32 blocks) { EACH_THREAD(blocks, 1) sum_converted(ops, n, chunks); }
u32 narrow(float y) { return to_e4m3(y); }
u32 wide(u32 code, float scale) { return to_bf16(code, scale); }
u32 wrong_quotients(u32 first, u32 apart)
{
    u32 wrong = 0;
    for (u32 m = first; m < 1 << 23; m += apart)
        for (u32 k = 0; k < 1 << 7; k++) {
            const float scale = __uint_as_float(127 << 23 | m), x = __uint_as_float(127 << 23 | k << 16);
            wrong += quotient(x, scale, 1 / scale) != x / scale;
        }
    return wrong;
}
"""
WORDS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}
PAIRS = [*WORLDS, (Engine("bf16", 1, 4), Engine("e4m3_block", 1, 8, blocks=16))]


@attrs.frozen
class Kernels:
    copying: dict[int, ctypes.CDLL]
    """By width of a word."""
    converting: dict[int, ctypes.CDLL]
    """By step."""


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """A group is one thread, as threads of a host come one after the other."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("convert")

    def compiled(name: str, text: str, *macros: str) -> ctypes.CDLL:
        (folder / f"{name}.c").write_text(text)
        flags = ["-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fsanitize=alignment"]
        flags += ["-fsanitize-undefined-trap-on-error", "-DTHREADS=64", *(f"-D{macro}" for macro in macros)]
        places = ["-I", str(SOURCE), "-include", str(HERE / "host_gpu.h")]
        library = folder / f"{name}.so"
        subprocess.run(["gcc", *flags, *places, "-o", str(library), str(folder / f"{name}.c")], check=True, timeout=60)
        return ctypes.CDLL(str(library))

    few = f"FEW_CLASSES={kernel.FEW_CLASSES}", f"FEW_WORDS={kernel.FEW_WORDS}"
    copying = {word: compiled(f"copy{word}", DRIVER, f"WORD={name}", "DEPTH=3", *few) for word, name in WORDS.items()}
    converting = {}
    for step, (words, load, store, scale) in kernel.STEPS.items():
        types = f"STEP={max(step, 1)}", f"WORDS={words}", f"LOAD={load}", f"STORE={store}", f"SCALE={scale}"
        converting[step] = made = compiled(f"step{step}", CONVERT, f"DEPTH={kernel.CONVERT_DEPTH}", *types)
        made.narrow.argtypes, made.wide.argtypes = [ctypes.c_float], [ctypes.c_uint, ctypes.c_float]
    return Kernels(copying, converting)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.cuda.kernel.THREADS", 64)
    monkeypatch.setattr("kvproto.transport.cuda.kernel.CONVERT_THREADS", 64)
    monkeypatch.setattr("kvproto.transport.cuda.kernel.DEPTH", 3)
    monkeypatch.setattr("kvproto.transport.cuda.kernel.GROUP", 1)


def aligned(size: int) -> Any:
    room = np.full(size + 16, 0xEE, np.uint8)
    return room[-room.ctypes.data % 16 :][:size]


def addresses(rank: Rank, shift: int = 0) -> dict[int, int]:
    return {id: np.frombuffer(memory, np.uint8).ctypes.data + shift for id, memory in regions(rank).items()}


def job(program: CopyProgram, *sides: dict[int, int], layers: tuple[int, int] | None = None) -> kernel.CopyJob:
    table = kernel.table(program, *sides)
    conversions = kernel.convert_table(program, *sides)
    return kernel.CopyJob(kernel.Prepared(table, table.ops.ctypes.data, None, conversions), program.maps, layers)


def run(kernels: Kernels, *jobs: kernel.CopyJob) -> kernel.UploadedLaunch:
    """As the executor does it, of one launch."""
    size, rows = kernel.sizes(jobs)
    image, expanded = aligned(size + 64), aligned(rows + 64)
    kernel.check(jobs)
    assert kernel.inline_launch(jobs, np.zeros(kernel.INLINE_BYTES, np.uint8), 1000) is None
    made = kernel.launch(jobs, image[:size], image.ctypes.data, expanded.ctypes.data)
    kernels.copying[16].run_expand(ctypes.c_void_p(image.ctypes.data), made.n_maps, 2)
    (group,) = made.groups
    for word, offset, n, chunks in group.classes:
        kernels.copying[word].run_copy(ctypes.c_void_p(image.ctypes.data + offset), n, chunks, 3)
    for step, offset, n, chunks in group.conversions:
        kernels.converting[step].run_convert(ctypes.c_void_p(image.ctypes.data + offset), n, chunks, 3)
    assert (image[size:] == 0xEE).all()
    assert (expanded[rows:] == 0xEE).all()
    return made


def steps(made: kernel.UploadedLaunch) -> set[int]:
    return {step for step, *_ in made.groups[0].conversions}


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_every_byte_is_that_of_the_host(kernels: Kernels, source: Engine, sink: Engine) -> None:
    """Blocks of eight elements and more are converted in words, shorter ones one by one."""
    for a, b, program in World.of(source, sink).programs:
        made = run(kernels, job(program, addresses(a), addresses(b)))
        assert (steps(made), made.bytes) == ({1 if sink.blocks > 4 else 32}, program.bytes)
        found = contents(b.pool).copy()
        execute(program, regions(a), regions(b))
        assert np.array_equal(found, contents(b.pool))


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_scales_are_made_where_their_block_is_converted(source: Engine, sink: Engine) -> None:
    """So a lane is read once: half as many operations as the program has."""
    for a, b, program in World.of(source, sink).programs:
        table = kernel.convert_table(program, addresses(a), addresses(b))
        assert len(table.ops) * (1 + (sink.form == "e4m3_block")) == len(program.ops)


def test_many_pairs_and_layers_share_a_launch(kernels: Kernels) -> None:
    """Two sinks of one source, and of the second pair one layer."""
    world = World.of(*WORLDS[0])
    jobs = [(a, b, program, None if n else (1, 2)) for n, (a, b, program) in enumerate(world.programs)]
    made = run(kernels, *(job(p, addresses(a), addresses(b), layers=layers) for a, b, p, layers in jobs))
    assert made.bytes == sum(p.bytes for _, _, p, layers in jobs) - world.programs[0][2].bytes * (LAYERS - 1) // LAYERS
    found = {b.rank: contents(b.pool).copy() for _, b, _, _ in jobs}
    for _, b, _, _ in jobs:
        contents(b.pool)[:] = 0xA5
    for a, b, program, layers in jobs:
        part = program if layers is None else program.select(layers=range(*layers))
        execute(part, regions(a), regions(b))
    assert all(np.array_equal(found[b.rank], contents(b.pool)) for _, b, _, _ in jobs)


def test_a_copy_of_many_runs_goes_in_parts(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.cuda.kernel._FIRST_RUNS", 1)
    a, b, program = World.of(*WORLDS[1]).programs[0]
    parts = kernel.parts([job(program, addresses(a), addresses(b))], 4)
    assert len(parts) > 1
    assert sum(run(kernels, *part).bytes for part in parts) == program.bytes
    found = contents(b.pool).copy()
    execute(program, regions(a), regions(b))
    assert np.array_equal(found, contents(b.pool))


@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_a_source_sums_what_it_converts(kernels: Kernels, source: Engine, sink: Engine) -> None:
    """KVP-CNV-VERIFY; a sink sums its bytes as ever."""
    for a, b, program in World.of(source, sink).programs:
        execute(program, regions(a), regions(b))
        for rank, is_sink in ((a, False), (b, True)):
            assert summed(kernels, program, rank, is_sink) == checksums(program, regions(rank), is_sink)


def summed(kernels: Kernels, program: CopyProgram, rank: Rank, sink: bool) -> dict[int, int]:
    table = kernel.sum_table(program, addresses(rank), sink)
    size, rows = table.sizes(program.maps)
    image, expanded = aligned(size), aligned(rows)
    at = image.ctypes.data
    end, conversions = table.write(program.maps, image, at, expanded.ctypes.data)
    assert bool(conversions) != sink
    kernels.copying[16].run_expand(ctypes.c_void_p(at), table.n_maps, 2)
    for word, offset, count in table.launches:
        kernels.copying[word].run_checksum(ctypes.c_void_p(at + offset), count, 3)
    for step, offset, n, chunks in conversions:
        kernels.converting[step].run_sums(ctypes.c_void_p(at + offset), n, chunks, 3)
    return table.sums(program.maps, image[end - 8 * len(table.groups) : end])


def test_one_program_converts_some_layers_and_copies_others(kernels: Kernels) -> None:
    """Layer 0 is BF16 on both sides."""
    shape: dict[str, Any] = {"kv_heads": 4, "head_dim": 32}
    first, rest = (Cache.gqa(n, x, page=4, **shape).converts("e4m3_block") for n, x in (("a", (0,)), ("b", (1, 2))))
    fp8 = Cache.gqa("b", (1, 2), page=8, dtype=DType.F8E4M3, scale_block=16, **shape).converts("e4m3_block")
    here, there = lay_out([first, rest]), lay_out([Cache.gqa("a", (0,), page=8, **shape), fp8], Parallel(tp=2))
    made = plan(here, there, (Feature.CONVERT,))
    sides, memory = [], []
    for geometry, rank in ((here, 0), (there, 1)):
        columns, length = columns_without_gaps(geometry, rank, {0: 9, 1: 9})
        sides.append(RankLayout(geometry, rank, columns))
        memory.append(aligned(length))
    memory[0][:] = np.random.default_rng(1).integers(0, 256, memory[0].size, np.uint8)
    windows = [{g: Window(0, 20, np.random.default_rng(n).permutation(9)) for g in (0, 1)} for n in (1, 2)]
    program = Pair(made.between(0, 1), *sides).lower(*windows)
    launched = run(kernels, job(program, *({0: m.ctypes.data} for m in memory)))
    assert launched.bytes == program.bytes
    assert launched.groups[0].classes
    wanted = np.full_like(memory[1], 0xEE)
    execute(program, {0: memoryview(memory[0])}, {0: memoryview(wanted)})
    assert np.array_equal(memory[1], wanted)


def test_arithmetic_is_that_of_the_host(kernels: Kernels) -> None:
    """All BF16 and some other float32; all F8E4M3 by scales of any size."""
    rng = np.random.default_rng(1)
    near = [rng.integers(low, high, 1 << 16, np.uint32) for low, high in ((0, 1 << 32), (0x3A000000, 0x44000000))]
    y = np.concatenate([np.arange(1 << 16, dtype=np.uint32) << 16, *near]).view(np.float32)
    wanted = narrow(torch.from_numpy(y), torch.ones(1)).numpy()
    assert np.array_equal(np.array([kernels.converting[32].narrow(float(one)) & 0xFF for one in y], np.uint8), wanted)
    for scale in (1.0, 0.0123, 3e38, 2.0**-126):
        stated = int(np.float32(scale).view(np.uint32))
        wide = convert(Made.WIDE, np.arange(256, dtype=np.uint8), stated, 0).view("<u2")
        assert [kernels.converting[1].wide(code, scale) & 0xFFFF for code in range(256)] == wide.tolist()


@pytest.mark.parametrize(("first", "apart"), [(0, 331), ((1 << 23) - 2048, 1)])
def test_one_step_divides_exactly(kernels: Kernels, first: int, apart: int) -> None:
    """Every mantissa of BF16 by mantissas of a scale: by all of these, which takes a minute without FMA, none was wrong."""
    assert kernels.converting[32].wrong_quotients(first, apart) == 0


@pytest.mark.parametrize(("shift", "step"), [(0, 32), (8, 32), (4, 1), (3, 0)])
@pytest.mark.parametrize("moved", ["source", "sink"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_that_do_not_align_are_converted_one_by_one(
    kernels: Kernels, world: int, moved: str, shift: int, step: int
) -> None:
    """Wherever they lie: a GPU faults at a word that is not aligned, and here its access traps."""
    for a, b, program in World.of(*WORLDS[world]).programs[:2]:
        sides = []
        for rank, name in ((a, "source"), (b, "sink")):
            room = aligned(contents(rank.pool).size + 16)
            place = room[shift if name == moved else 0 :][: contents(rank.pool).size]
            place[:] = contents(rank.pool)
            sides.append((room, place))
        made = run(kernels, job(program, *({0: place.ctypes.data} for _, place in sides)))
        form = WORLDS[world][moved == "sink"].form
        least = {"bf16": 1 if shift == 8 else step, "e4m3_tensor": max(step, 1), "e4m3_block": step}[form]
        assert steps(made) == {least}, "BF16 is read and written in words of 16 bytes, FP8 of 8; a byte lies anywhere"
        execute(program, regions(a), regions(b))
        assert np.array_equal(sides[1][1], contents(b.pool))
        assert (sides[1][0] == 0xEE).sum() >= 16


def test_more_blocks_than_the_device_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, program = World.of(*WORLDS[0]).programs[0]
    work = job(program, addresses(a), addresses(b))
    kernel.check([work])
    monkeypatch.setattr(kernel, "MOST", 20)
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
        kernel.check([work])
