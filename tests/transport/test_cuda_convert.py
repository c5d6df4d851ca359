"""The conversion kernel's own source, compiled for the host, against the numpy executor: byte for byte."""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import kvproto.transport.cuda
from kvproto.copying.converting import convert
from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.planning.conversion import Made
from kvproto.transport.cuda import kernel
from tests.conversions import WORLDS, Engine, Rank, narrow
from tests.plan.test_conversion import World, regions
from tests.pools import contents

HERE = Path(__file__).parent
SOURCE = Path(kvproto.transport.cuda.__file__).parent
DRIVER = """
#include "kernel.cu"
void run_expand(const Map *maps, u32 n, u32 blocks) { EACH_THREAD(blocks, n) expand(maps); }
"""
CONVERT = """
#include "convert.cu"
void run_convert(const Convert *ops, u32 n, u32 blocks) { EACH_THREAD(blocks, n) convert(ops); }
u32 narrow(float y) { return to_e4m3(y); }
u32 wide(u32 code, float scale) { return to_bf16(code, scale); }
"""


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """By step; 0: the one that expands rows. A group is one thread, as threads of a host come one after the other."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("convert")
    many = ["WORD=uint4", "DEPTH=3", f"FEW_CLASSES={kernel.FEW_CLASSES}", f"FEW_WORDS={kernel.FEW_WORDS}"]
    made = {}
    for step, text, macros in (
        (0, DRIVER, many),
        *(
            (step, CONVERT, [f"STEP={step}", f"LOAD={a}", f"STORE={b}", "GROUP=1"])
            for step, (a, b) in kernel.STEPS.items()
        ),
    ):
        (folder / f"{step}.c").write_text(text)
        flags = [
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            "-DTHREADS=64",
            *(f"-D{macro}" for macro in macros),
        ]
        places = ["-I", str(SOURCE), "-include", str(HERE / "host_gpu.h")]
        library = folder / f"{step}.so"
        subprocess.run(["gcc", *flags, *places, "-o", str(library), str(folder / f"{step}.c")], check=True, timeout=60)
        made[step] = ctypes.CDLL(str(library))
        if step:
            made[step].narrow.argtypes, made[step].wide.argtypes = [ctypes.c_float], [ctypes.c_uint, ctypes.c_float]
    return made


def addresses(rank: Rank) -> dict[int, int]:
    return {id: np.frombuffer(memory, np.uint8).ctypes.data for id, memory in regions(rank).items()}


def run(kernels: dict[int, ctypes.CDLL], program: CopyProgram, source: Rank, sink: Rank) -> int:
    """As the executor does it; returns the step."""
    table = kernel.convert_table(program, addresses(source), addresses(sink))
    size, rows = table.sizes(program.maps)
    image, expanded = np.full(size + 16, 0xEE, np.uint8), np.full(rows + 16, 0xEE, np.uint8)
    at, rows_at = (-(-a.ctypes.data // 16) * 16 for a in (image, expanded))
    view = image[at - image.ctypes.data :][:size]
    offset = table.write(program.maps, view, at, rows_at)
    kernels[0].run_expand(ctypes.c_void_p(at), len(program.maps), 2)
    kernels[table.step].run_convert(ctypes.c_void_p(at + offset), len(table.ops), 3)
    assert (expanded[rows_at - expanded.ctypes.data + rows :] == 0xEE).all()
    return table.step


@pytest.mark.parametrize(("source", "sink"), [*WORLDS, (Engine("bf16", 1, 4), Engine("e4m3_block", 1, 8, blocks=16))])
def test_every_byte_is_that_of_the_host(kernels: dict[int, ctypes.CDLL], source: Engine, sink: Engine) -> None:
    """Blocks of eight elements and more are converted eight at once, shorter ones one by one."""
    world = World.of(source, sink)
    for a, b, program in world.programs:
        assert run(kernels, program, a, b) == (1 if sink.blocks > 4 else 8)
        found = contents(b.pool).copy()
        execute(program, regions(a), regions(b))
        assert np.array_equal(found, contents(b.pool))


def test_arithmetic_is_that_of_the_host(kernels: dict[int, ctypes.CDLL]) -> None:
    """All BF16 and some other float32; all F8E4M3 by scales of any size."""
    rng = np.random.default_rng(1)
    near = [rng.integers(low, high, 1 << 16, np.uint32) for low, high in ((0, 1 << 32), (0x3A000000, 0x44000000))]
    y = np.concatenate([np.arange(1 << 16, dtype=np.uint32) << 16, *near]).view(np.float32)
    wanted = narrow(torch.from_numpy(y), torch.ones(1)).numpy()
    assert np.array_equal(np.array([kernels[8].narrow(float(one)) & 0xFF for one in y], np.uint8), wanted)
    for scale in (1.0, 0.0123, 3e38, 2.0**-126):
        stated = int(np.float32(scale).view(np.uint32))
        wide = convert(Made.WIDE, np.arange(256, dtype=np.uint8), stated, 0).view("<u2")
        assert [kernels[1].wide(code, scale) & 0xFFFF for code in range(256)] == wide.tolist()


def test_rows_that_do_not_align_are_converted_one_by_one(kernels: dict[int, ctypes.CDLL]) -> None:
    world = World.of(*WORLDS[2])
    a, b, program = world.programs[0]
    table = kernel.convert_table(program, addresses(a), {id: at + 4 for id, at in addresses(b).items()})
    assert (table.step, kernel.convert_table(program, addresses(a), addresses(b)).step) == (1, 8)
    assert sorted(itertools.chain(*kernel.STEPS.values())) == ["uint2", "uint4", "unsigned char", "unsigned short"]
