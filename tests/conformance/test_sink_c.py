"""A sink in C, of the pages alone, beside the reference engine and under the live driver, with sanitizers."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto_conformance.codec import read_struct
from kvproto_conformance.live import list_scenarios, moving, run
from kvproto_conformance.live.engine import Engine
from kvproto_conformance.live.scenario import Prompt, handoff, rows_of, shares

TESTEES = Path(__file__).parents[2] / "conformance/testees"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all"]  # fmt: skip

LEFT_OUT = {"LIVE-329", "LIVE-845"}
"""No sink has to watch the process that writes, or to say in what two ranks differ.

This one does neither.
"""


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("gcc") is None or not any(Path(folder, "zmq.h").exists() for folder in INCLUDES):
        pytest.skip("no gcc, or no libzmq3-dev")
    program = tmp_path_factory.mktemp("sink") / "sink"
    subprocess.run(["gcc", *FLAGS, "-o", program, TESTEES / "c/sink.c", "-lzmq"], check=True, timeout=100)
    return str(program)


INCLUDES = ("/usr/include", "/usr/local/include")


@pytest.fixture
def address() -> Iterator[str]:
    """Of a socket in a directory that nobody else enters; its path is short."""
    with tempfile.TemporaryDirectory(prefix="kvproto-") as folder:
        yield f"ipc://{folder}/engine"


@pytest.mark.parametrize("transport", ["SHM", "INLINE"])
@pytest.mark.parametrize("world", ["gqa", "mla", "hybrid"])
def test_it_fetches_from_the_reference_engine(sink: str, address: str, world: str, transport: str) -> None:
    """Every byte as the C engine's attention reads it; three requests, one of which begins behind a prefix."""
    source, decode = Engine([sys.executable, str(TESTEES / "live_source.py")]), Engine([sink])
    try:
        opened = {"world": world, "transport": transport}
        geometry = read_struct("Geometry", bytes.fromhex(
            source.ask("open", role="source", name="prefill", listen=address, **opened)["geometry"]
        ))  # fmt: skip
        decode.ask("open", role="sink", name="decode", **opened)
        decode.ask("connect", engine="prefill", address=address)
        for number, (tokens, first) in enumerate([(45, 0), (17, 0), (61, 32 if world == "gqa" else 0)]):
            key = f"{number:032x}"
            prompt = Prompt(key[20:], key, [100 * number + i for i in range(tokens)], {})
            asked = {"id": prompt.id, "key": key, "engine": "prefill", "deadline": 60_000, "tokens": prompt.tokens}
            decode.ask("fetch", first=first, **asked)
            source.ask("request", **asked)
            held = {}
            for group, share in shares(geometry):
                rows = rows_of(group, tokens)
                for layer in map(int, share["layers"]):
                    for part in group["parts"]:
                        width = int(part["lanes"]) * int(part["lane_bytes"])
                        data = moving.label(key, int(group["model"]), layer, part["name"], rows, 0, width)
                        at = {"group": group["name"], "layer": layer, "part": part["name"]}
                        source.ask("fill", id=prompt.id, first=rows.start, data=data.tobytes().hex(), **at)
                        skipped = max(first, rows.start) if group["kind"] == "PAGE" else rows.start
                        held[str(at)] = at, skipped, data[skipped - rows.start :].tobytes().hex(), rows.stop - skipped
            stated = handoff(geometry, prompt)
            source.ask("finish", id=prompt.id, handoff=stated, finished=False)
            found = decode.ask("wait", id=prompt.id, seconds=20.0)
            assert (found["state"], found["handoff"]) == ("arrived", stated)
            for at, start, data, count in held.values():
                assert decode.ask("read", id=prompt.id, first=start, count=count, **at)["data"] == data, at
            assert source.ask("wait", id=prompt.id, seconds=20.0)["state"] == "freed"
            decode.ask("release", id=prompt.id)
    finally:
        decode.stop()
        source.stop()


def test_it_ends_without_a_leak(sink: str) -> None:
    lines = b'{"seq": 1, "op": "open", "world": "mla", "transport": "SHM", "name": "d"}\n{"seq": 2, "op": "stop"}\n'
    ended = subprocess.run([sink], input=lines, capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("level", ["L3", "L4"])
def test_it_passes_the_live_driver(sink: str, level: str) -> None:
    """All scenarios of sinks but the slow ones, which `make conformance ARGS="--live"` runs too, and what it lacks."""
    chosen = [
        each
        for each in list_scenarios("sink")
        if each.level == level and not each.slow and {*each.extensions} <= {"INLINE"} and each.id not in LEFT_OUT
    ]
    assert len(chosen) > 20
    found = {each.id: (each.status, each.text) for each in run([sink], chosen)}
    assert found == {each.id: ("pass", "") for each in chosen}
