"""The probe on host memory, the fit of its constants, its file, and what it calls slow."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto import calibration
from kvproto.copying.program import Runs
from kvproto.errors import LocalError
from kvproto.transport.bench import Absent, Constants, Measured, Sample, program
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

MOVED = 128 << 20
SIZES = [(256, 1), *((n, max(MOVED // n, 1)) for n in calibration.LENGTHS)]

constants = st.builds(
    Constants,
    st.floats(8, 12).map(lambda x: 10**x),
    st.floats(-9, -5).map(lambda x: 10**x),
    st.floats(-6, -3).map(lambda x: 10**x),
)


def made_by(true: Constants, noise: list[float]) -> list[Sample]:
    return [Sample(n, k, true.seconds(n * k, k) * f) for (n, k), f in zip(SIZES, noise, strict=True)]


@given(constants)
def test_the_fit_recovers_the_constants(true: Constants) -> None:
    found = calibration.fit(made_by(true, [1.0] * len(SIZES)))
    assert [found.link, found.run, found.start] == pytest.approx([true.link, true.run, true.start], rel=1e-3)


@given(constants, st.lists(st.floats(0.97, 1.03), min_size=len(SIZES), max_size=len(SIZES)))
def test_the_fit_of_noisy_samples_foretells_what_is_true(true: Constants, noise: list[float]) -> None:
    found = calibration.fit(made_by(true, noise))
    for n, k in SIZES:
        assert found.seconds(n * k, k) == pytest.approx(true.seconds(n * k, k), rel=0.1)


@given(constants, st.integers(2, len(calibration.LENGTHS) - 1), st.sampled_from([0.4, 4.0]))
def test_one_outlier_moves_the_fit_little(true: Constants, which: int, factor: float) -> None:
    found = calibration.fit(made_by(true, [factor if i == which else 1.0 for i in range(len(SIZES))]))
    for n, k in SIZES:
        assert found.seconds(n * k, k) == pytest.approx(true.seconds(n * k, k), rel=0.2)


samples = st.builds(
    Sample, st.integers(1, 1 << 30), st.integers(1, 1 << 30), st.floats(-12, 6).map(lambda x: float(10**x))
)


@given(st.lists(samples, min_size=1, max_size=12))
def test_the_fit_is_positive_whatever_was_measured(some: list[Sample]) -> None:
    found = calibration.fit(some)
    assert all(np.isfinite([found.link, found.run, found.start, found.error]))
    assert min(found.link, found.run, found.start) > 0


def test_nothing_to_fit_is_refused() -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
        calibration.fit([])


@given(st.sampled_from(calibration.LENGTHS), st.integers(1, 200))
def test_a_program_has_the_runs_that_its_sample_says(run: int, runs: int) -> None:
    runs = min(runs, max(MOVED // run, 1))
    runs -= runs % 64 if runs > 64 else 0
    pool = run * runs + run // 2
    made = program(run, runs, pool)
    assert (made.runs().count, made.runs().bytes) == (runs, run * runs)
    memory = memoryview(np.empty(pool, np.uint8))
    for side in ("source", "sink"):  # which refuses what leaves the memory
        assert PackedStream(made, side, {0: memory}).length == run * runs


def measured(transport: str, way: str, rate: float, source: str = "host", sink: str = "host") -> Measured:
    return Measured(transport, way, source, sink, (Sample(1 << 20, 1, (1 << 20) / rate),), Constants(rate, 1e-9, 1e-6))


def result(*found: Measured, absent: tuple[Absent, ...] = ()) -> calibration.Probe:
    return calibration.Probe(
        "2026-01-02T03:04:05+00:00", True, 1 << 29, calibration.Host(2, "x86_64, Linux", ("A",), "1.2"), found, absent
    )


ALL = {256, 4 << 10, 64 << 10, 1 << 20}


@pytest.fixture(scope="module")
def real() -> calibration.Probe:
    """A quick probe, with more time than `--quick` has: where other tests run beside it, it would pass lengths over."""
    heard: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvproto.calibration._QUICK_SECONDS", (60.0, 100.0))
        found = calibration.probe(("shm", "nixl"), quick=True, memory=8 << 20, tell=lambda *what: heard.append(what))
    assert heard[0][:2] == ("shm", 0)
    assert heard[-1] == ("done", 3, 3)
    return found


def test_host_memory_is_measured_every_way(real: calibration.Probe) -> None:
    assert not real.absent
    assert [(m.transport, m.way, m.gpus) for m in real.measured] == [
        ("shm", "copy", False), ("nixl", "direct", False), ("nixl", "packed", False),
    ]  # fmt: skip
    for one in real.measured:
        assert one.samples[0].runs == 1
        assert {s.run for s in one.samples} >= ALL
        assert all(s.run * s.runs <= real.memory * 3 // 10 for s in one.samples)
        assert one.constants == calibration.fit(one.samples)


def test_a_file_is_what_was_found(real: calibration.Probe, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for found in (
        real,
        result(absent=(Absent("cuda", "no GPU", "buy one", True),)),
        result(measured("shm", "copy", 1.0)),
    ):
        calibration.save(found, path)
        assert calibration.load(path) == found


def test_what_a_later_version_adds_is_passed_over(real: calibration.Probe) -> None:
    data = json.loads(json.dumps(real.to_dict())) | {"weather": "fine"}
    data["measured"][0]["colour"] = "red"
    assert calibration.Probe.from_dict(data) == real


BROKEN: dict[str, tuple[list[Any], Any, ErrorCode]] = {
    "another version": (["kvproto_probe"], 2, ErrorCode.UNSUPPORTED_VERSION),
    "no version": (["kvproto_probe"], None, ErrorCode.BAD_TYPE),
    "quick": (["quick"], 1, ErrorCode.BAD_TYPE),
    "host": (["host"], [], ErrorCode.BAD_TYPE),
    "host.gpus[0]": (["host", "gpus"], [7], ErrorCode.BAD_TYPE),
    "measured": (["measured"], {}, ErrorCode.BAD_TYPE),
    "measured[1]": (["measured", 1], "fast", ErrorCode.BAD_TYPE),
    "measured[0].way": (["measured", 0, "way"], 1, ErrorCode.BAD_TYPE),
    "measured[0].samples": (["measured", 0, "samples"], [], ErrorCode.OUT_OF_RANGE),
    "measured[0].samples[1].runs": (["measured", 0, "samples", 1, "runs"], 0.5, ErrorCode.BAD_TYPE),
    "measured[2].constants.link": (["measured", 2, "constants", "link"], 0, ErrorCode.OUT_OF_RANGE),
    "measured[1].constants.run": (["measured", 1, "constants", "run"], -1e-9, ErrorCode.OUT_OF_RANGE),
    "measured[1].constants.start": (["measured", 1, "constants", "start"], float("nan"), ErrorCode.OUT_OF_RANGE),
    "measured[1].constants.error": (["measured", 1, "constants", "error"], float("inf"), ErrorCode.OUT_OF_RANGE),
    "measured[0].constants.link": (["measured", 0, "constants", "link"], True, ErrorCode.BAD_TYPE),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_with_the_place(case: str, real: calibration.Probe, tmp_path: Path) -> None:
    (*way, last), value, code = BROKEN[case]
    data = json.loads(json.dumps(real.to_dict()))
    at = data
    for step in way:
        at = at[step]
    at[last] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with raises(LocalError, code=code) as caught:
        calibration.load_costs(path)
    assert caught.value.path == f"{path}: {case if 'version' not in case else 'kvproto_probe'}"


@pytest.mark.parametrize("name", ["date", "memory", "host", "measured", "absent"])
def test_files_without_a_field_are_refused(name: str, real: calibration.Probe) -> None:
    data = real.to_dict()
    del data[name]
    with raises(LocalError, code=ErrorCode.MISSING_FIELD, path=name):
        calibration.Probe.from_dict(data)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000, '"\\ud800'])
def test_files_that_are_no_probe_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text(text)
    with raises(LocalError, path=str(path)):
        calibration.load(path)


def test_bytes_that_are_no_text_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    for path in (tmp_path / "bytes", tmp_path, tmp_path / "nowhere"):
        with raises(LocalError, path=str(path)):
            calibration.load(path)


@pytest.mark.parametrize("floor", calibration.floors(), ids=lambda f: f"{f.transport} {'gpus' if f.gpus else 'host'}")
def test_a_path_below_its_floor_is_slow(floor: Any) -> None:
    ends = ("gpu0", "gpu1") if floor.gpus else ("host", "host")
    for way in floor.ways:
        below, above = (measured(floor.transport, way, floor.floor * f, *ends) for f in (0.9, 1.1))
        assert [(s.what, s.floor, s.advice) for s in result(below).slow()] == [(below.name, floor.floor, floor.advice)]
        assert result(above).slow() == ()


def test_what_failed_is_slow_and_what_is_not_installed_is_not() -> None:
    failed, missing = Absent("nixl", "UCX fell over", "look", slow=True), Absent("cuda", "not installed", "install it")
    assert [(s.what, s.rate, s.advice) for s in result(absent=(failed, missing)).slow()] == [
        ("nixl", None, "UCX fell over; look")
    ]


def test_costs_are_those_between_gpus_and_of_the_slowest_pair(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    calibration.save(
        result(
            measured("nixl", "packed", 9e9), measured("shm", "copy", 5e9),
            measured("cuda", "pull", 400e9, "gpu0", "gpu1"), measured("cuda", "pull", 20e9, "gpu0", "gpu2"),
            measured("cuda", "engine", 10e9, "gpu0", "gpu2"), measured("nixl", "direct", 50e9, "gpu0", "gpu1"),
        ),
        path,
    )  # fmt: skip
    assert [(c.name, c.constants.link, c.kind) for c in calibration.load_costs(path)] == [
        ("kernel", 20e9, "copy"), ("descriptors", 50e9, "direct"),
    ]  # fmt: skip


def test_a_file_without_a_way_to_send_gives_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    calibration.save(result(measured("cuda", "engine", 400e9, "gpu0", "gpu1")), path)
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=f"{path}: measured"):
        calibration.load_costs(path)


@given(st.integers(8, 30), st.integers(0, 12))
def test_advice_is_direct_where_descriptors_are_hardly_slower_than_packing(run: int, count: int) -> None:
    runs = Runs(1 << count, 1 << run + count)
    by_name = {e.name: e.seconds for e in calibration.estimates(runs)}
    hardly = by_name["descriptors"] <= 1.5 * by_name["pack + copy + unpack"]
    assert calibration.advise(calibration.estimates(runs)).kind == ("direct" if hardly else "pack")


def test_advice_needs_no_way_in_particular() -> None:
    kernel, packed, descriptors = calibration.reference_costs()
    short, long = Runs(100_000, 100_000 * 512), Runs(4, 1 << 30)
    kinds = [
        [calibration.advise(calibration.estimates(runs, some)).kind for runs in (short, long)]
        for some in ([kernel], [packed], [descriptors], [kernel, descriptors], [kernel, packed])
    ]
    assert kinds == [["copy", "copy"], ["pack", "pack"], ["direct", "direct"], ["pack", "direct"], ["pack", "pack"]]


@pytest.mark.parametrize(
    "options", [{"transports": ()}, {"transports": ("shm", "carrier pigeon")}, {"memory": 1 << 20}]
)
def test_what_cannot_be_probed_is_refused(options: dict[str, Any]) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
        calibration.probe(**options)


def test_shm_keeps_to_its_memory_and_loads_no_other_library() -> None:
    code = """
import os, sys
from pathlib import Path
from kvproto.calibration import probe
link = lambda n: os.readlink("/proc/self/fd/" + n) if os.path.lexists("/proc/self/fd/" + n) else ""
import kvproto.transport.shm.provider
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
before = peak()
probe(("shm",), quick=True, memory=128 << 20)
assert peak() - before < 128 << 20, peak() - before
assert peak() - before > 32 << 20, "the pools were never touched"
assert not [n for n in os.listdir("/proc/self/fd") if "memfd:kvproto" in link(n)]
assert not {"torch", "cuda", "nixl", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_samples_have_a_rate() -> None:
    one = Sample(1000, 3, 0.5)
    assert one.rate == 6000
    assert attrs.evolve(measured("shm", "copy", 1e9), samples=(one, Sample(1000, 3, 1.0))).rate == 6000
