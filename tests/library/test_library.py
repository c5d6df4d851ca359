"""libkvproto as an engine's author meets it: built, installed, linked, misused, and out of memory. Its codec and plans are in tests/conformance."""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto.wire import encode_struct, from_json
from kvproto.wire.messages import Geometry
from kvproto_conformance.cases import load
from tests.library.abi import CONSTANTS, KEPT, LIBRARY, built, constants
from tests.plan.wild_worlds import world
from tools import c_programs
from tools.equality.__main__ import KVPROTO, Implementations, equal, smallest
from tools.equality.__main__ import run as run_equality
from tools.equality.frames import bases
from tools.specgen.registry import ROOT

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
HERE = Path(__file__).parent
SANITIZED = [
    "-std=c11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
LINES, BYTES = 12_000, 300_000
DIGEST = "bd082f9dfdf71cf6f8a20ac97694d2e5c01834ffc5ff0c96279309dbe9957972"
"""Of the plan of examples/plan.c, as kvproto computes it (test_its_plan_is_that_of_kvproto)."""


def sanitized(source: Path, folder: Path) -> str:
    program = folder / source.stem
    subprocess.run(
        ["gcc", *SANITIZED, f"-I{LIBRARY}/include", "-o", program, source, LIBRARY / "src/kvproto.c"],
        check=True,
        timeout=100,
    )
    return str(program)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of `make install`."""
    folder = tmp_path_factory.mktemp("library")
    subprocess.run(
        ["make", "-s", "-C", LIBRARY, "install", f"BUILD={folder}/build", f"PREFIX={folder}/usr"],
        check=True,
        timeout=100,
    )
    return folder / "usr"


def said(program: Path, libraries: Path) -> str:
    command = ["env", f"LD_LIBRARY_PATH={libraries}", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def test_it_exports_nothing_else(installed: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", installed / "lib/libkvproto.so"], check=True, capture_output=True, text=True
    )
    names = {line.split()[2].partition("@")[0] for line in listed.stdout.splitlines() if line.split()[1] != "A"}
    declared = set(re.findall(r"KVP_API [^;(]*?\b(kvp_\w+)\(", (LIBRARY / "include/kvproto.h").read_text()))
    assert names == declared


def test_it_has_no_globals_and_calls_no_more_than_memory(installed: Path) -> None:
    """No data that can be written; of a C library what copies, compares, formats, jumps and, by default, allocates."""
    library = installed / "lib/libkvproto.a"
    sections = subprocess.run(["size", "-A", library], check=True, capture_output=True, text=True).stdout
    assert {row.split()[0]: row.split()[1] for row in sections.splitlines() if row.startswith((".data ", ".bss "))} == {
        ".data": "0",
        ".bss": "0",
    }
    listed = subprocess.run(["nm", "-u", library], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines() if line.startswith(" ")}
    called = {name.lstrip("_").removesuffix("_chk") for name in names} - {"stack_chk_fail", "GLOBAL_OFFSET_TABLE_"}
    assert called <= {
        "malloc",
        "free",
        "memcpy",
        "memcmp",
        "memmove",
        "memset",
        "strlen",
        "strchr",
        "strcmp",
        "snprintf",
        "setjmp",
        "longjmp",
    }


def test_it_is_small(installed: Path, tmp_path: Path) -> None:
    lines = sum(
        len(path.read_text().splitlines()) for path in [LIBRARY / "include/kvproto.h", *(LIBRARY / "src").glob("*.c")]
    )
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", stripped, installed / "lib/libkvproto.so"], check=True)
    assert lines < LINES
    assert stripped.stat().st_size < BYTES


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_the_example_builds_by_pkg_config(installed: Path, tmp_path: Path) -> None:
    found = ["env", f"PKG_CONFIG_PATH={installed}/lib/pkgconfig", "pkg-config", "--cflags", "--libs", "kvproto"]
    flags = subprocess.run(found, check=True, capture_output=True, text=True).stdout.split()
    subprocess.run(
        ["gcc", "-std=c11", "-o", tmp_path / "plan", LIBRARY / "examples/plan.c", *flags], check=True, timeout=60
    )
    assert said(tmp_path / "plan", installed / "lib").startswith(DIGEST)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize("target", ["kvproto", "static"])
def test_the_example_builds_by_cmake(tmp_path: Path, target: str) -> None:
    prefix, build = tmp_path / "usr", tmp_path / "build"
    steps = [
        ["cmake", "-S", LIBRARY, "-B", build, f"-DCMAKE_INSTALL_PREFIX={prefix}"], ["cmake", "--build", build], ["cmake", "--install", build],
        ["cmake", "-S", tmp_path, "-B", tmp_path / "engine", f"-DCMAKE_PREFIX_PATH={prefix}"], ["cmake", "--build", tmp_path / "engine"],
    ]  # fmt: skip
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(engine C)\nfind_package(kvproto 0.1 CONFIG REQUIRED)\n"
        f"add_executable(plan {LIBRARY}/examples/plan.c)\ntarget_link_libraries(plan kvproto::{target})\n"
    )
    for step in steps:
        subprocess.run(step, check=True, capture_output=True, timeout=100)
    assert said(tmp_path / "engine/plan", prefix / "lib").startswith(DIGEST)


def test_one_file_is_enough(tmp_path: Path) -> None:
    subprocess.run([sys.executable, LIBRARY / "amalgamate.py", tmp_path], check=True)
    subprocess.run(
        ["gcc", "-std=c11", "-I.", "-o", "plan", LIBRARY / "examples/plan.c", "kvproto.c"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    assert said(tmp_path / "plan", tmp_path).startswith(DIGEST)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_header_is_one_of_cpp_too(tmp_path: Path) -> None:
    (tmp_path / "engine.cpp").write_text(
        '#include <kvproto.h>\nint main() { return kvp_layout_named("Transfer", 8) != KVP_TRANSFER; }\n'
    )
    library = tmp_path / "kvproto.o"
    subprocess.run(
        ["gcc", "-std=c11", "-c", f"-I{LIBRARY}/include", "-o", library, LIBRARY / "src/kvproto.c"],
        check=True,
        timeout=60,
    )
    subprocess.run(
        [
            "g++",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            f"-I{LIBRARY}/include",
            "-o",
            tmp_path / "engine",
            tmp_path / "engine.cpp",
            library,
        ],
        check=True,
        timeout=60,
    )
    subprocess.run([tmp_path / "engine"], check=True)


def test_who_misuses_it_is_told(tmp_path: Path) -> None:
    found = subprocess.run([sanitized(HERE / "misuse.c", tmp_path)], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_threads_share_what_they_read(tmp_path: Path) -> None:
    """Under ThreadSanitizer: Descriptions that are planned from, and a message that is written, by four at once."""
    pair = world(4)
    frame = next(case.asks[0].question["frame"] for case in load() if case.id == "Transfer/full")
    files = {"source": encode_struct(pair.source), "sink": encode_struct(pair.sink), "frame": bytes.fromhex(frame)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{LIBRARY}/include"]
    program = tmp_path / "threads"
    subprocess.run(
        ["gcc", *flags, "-o", program, HERE / "threads.c", LIBRARY / "src/kvproto.c"], check=True, timeout=100
    )
    found = subprocess.run([program, *(tmp_path / name for name in files)], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stderr) == (0, "")


def test_without_memory_it_refuses_and_gives_back_what_it_has(tmp_path: Path) -> None:
    """At each allocation of all that it does."""
    pair = world(4)
    frames = (case.asks[0].question["frame"] for case in load() if case.id == "Transfer/full")
    files = {
        "frame": bytes.fromhex(next(frames)),
        "source": encode_struct(pair.source),
        "sink": encode_struct(pair.sink),
    }
    files["json"] = b'{"replica": "0", "facts": [], "groups": [' + GROUP + b'], "ranks": [{"rank": "0", "owns": []}]}'
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = subprocess.run(
        [sanitized(HERE / "memory.c", tmp_path), *(tmp_path / name for name in files)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split()[0]) > 20


GROUP = (
    b'{"id": "0", "name": "kv", "model": "0", "kind": "PAGE", "rows": "16", "tokens_per_row": "1", "cp_size": "1", "interleave": "1", "origin": "0", '
    b'"parts": [{"name": "k", "dtype": "BF16", "lanes": "8", "lane_bytes": "256"}]}'
)


def test_its_interface_is_that_which_was_kept(tmp_path: Path) -> None:
    """An addition is kept by `make lib-abi`; what programs use already changes with the first number of the version alone."""
    now = constants()
    before = dict(line.split() for line in CONSTANTS.read_text().splitlines())
    assert {name: now.get(name) for name in before} == before
    assert now.keys() == before.keys(), "make lib-abi"
    if shutil.which("abidiff") is None or platform.machine() != "x86_64":
        pytest.skip("no abidiff, or not the machine of what was kept")
    found = subprocess.run(["abidiff", KEPT, built(tmp_path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("clang") is None, reason="no clang, whose libFuzzer this needs")
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """For a while, from the vectors' frames and wild worlds; `make lib-fuzz` goes on as long as one likes."""
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for i, frame in enumerate(bases()[::8]):
        (seeds / f"frame-{i}").write_bytes(b"\0" + frame)
    for i in range(60):
        source, sink = (encode_struct(side) for side in (world(i).source, world(i).sink))
        (seeds / f"pair-{i}").write_bytes(b"\3" + len(source).to_bytes(2, "big") + source + sink)
    sanitizers = "-fsanitize=fuzzer,address,undefined"
    subprocess.run(
        [
            "clang",
            "-std=c11",
            "-O1",
            "-g",
            sanitizers,
            "-fno-sanitize-recover=all",
            f"-I{LIBRARY}/include",
            "-o",
            tmp_path / "fuzz",
            LIBRARY / "fuzz/fuzz.c",
            LIBRARY / "src/kvproto.c",
        ],
        check=True,
        timeout=100,
    )
    options = ["-runs=20000", "-seed=1", "-max_len=6000", "-timeout=20", "-rss_limit_mb=2000"]
    found = subprocess.run(
        [tmp_path / "fuzz", *options, seeds], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-4000:]


@pytest.mark.thorough
def test_it_is_equal_to_kvproto(tmp_path: Path) -> None:
    """On worlds and frames that an adversary makes up, for some seconds; `python -m tools.equality` goes on as long as one likes."""
    program = tmp_path / "testee"
    subprocess.run(c_programs.command("testee", program), check=True, timeout=60)
    both = Implementations([KVPROTO, [str(program)]])
    try:
        counts, difference = run_equality(both, 1, 0.4, 20)
    finally:
        both.close()
    assert difference is None
    assert (
        min(
            counts["plan: accepted"],
            counts["plan: BAD_GEOMETRY"],
            counts["decode: accepted"],
            counts["decode: NOT_CANONICAL"],
        )
        > 20
    )


def test_a_difference_is_found_and_made_small(tmp_path: Path) -> None:
    """Of a library that deals units from another rank on, and reads numbers in a form too long."""
    broken = shutil.copytree(LIBRARY, tmp_path / "libkvproto")
    shutil.copytree(ROOT / "conformance/testees/c", tmp_path / "conformance/testees/c")
    plan, read = broken / "src/plan.c", broken / "src/read.c"
    plan.write_text(
        plan.read_text().replace("(u + plan->sink->replica) % s.count", "(u + 1 + plan->sink->replica) % s.count")
    )
    read.write_text(read.read_text().replace("least = first == 0xcc ? 0x80 :", "least = first == 0xcc ? 0 :"))
    subprocess.run(c_programs.command("testee", tmp_path / "testee", root=tmp_path), check=True, timeout=60)
    both = Implementations([KVPROTO, [str(tmp_path / "testee")]])
    try:
        for share, short in ((1.0, 1800), (0.0, 200)):
            _, difference = run_equality(both, 2, share, 60)
            assert difference is not None
            question, answers = difference
            assert not equal(answers)
            assert len(str(question)) < short
            assert smallest(both, question, answers)[0] == question
    finally:
        both.close()


def test_its_plan_is_that_of_kvproto() -> None:
    from kvproto.planning.plan import plan

    def engine(ranks: int) -> Geometry:
        group = {
            "id": "0",
            "name": "kv",
            "model": "0",
            "kind": "PAGE",
            "rows": "16",
            "tokens_per_row": "1",
            "cp_size": "1",
            "interleave": "1",
            "origin": "0",
        }
        parts = [{"name": name, "dtype": "BF16", "lanes": "8", "lane_bytes": "256"} for name in "kv"]
        lanes = [
            [{"part": str(p), "lo": str(8 * r // ranks), "hi": str(8 * (r + 1) // ranks)} for p in range(2)]
            for r in range(ranks)
        ]
        owns = [
            {"rank": str(r), "owns": [{"group": "0", "layers": ["0", "1"], "cp_rank": "0", "lanes": lanes[r]}]}
            for r in range(ranks)
        ]
        return from_json(Geometry, {"replica": "0", "facts": [], "groups": [group | {"parts": parts}], "ranks": owns})

    assert plan(engine(1), engine(2)).digest.hex() == DIGEST
