"""The probe of transport `cuda` on GPUs: every way, the bytes it moves, and its file."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvproto.calibration import LENGTHS, fit, load, load_costs, probe, save
from kvproto.errors import LocalError
from kvproto.transport.bench import program
from kvproto.transport.cuda import bench as cuda
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.nixl.bench import job as nixl_job
from kvproto.wire.enums import ErrorCode
from tests.gpu.conftest import FOUND
from tests.gpu.memory import get, put

MEMORY = 64 << 20


def ends(count: int) -> set[tuple[str, str]]:
    if count == 1:
        return {("gpu0", "gpu0")}
    return {(f"gpu{a}", f"gpu{b}") for a in range(count) for b in range(count) if a != b}


def test_every_pair_is_measured_or_named_as_apart(tmp_path: Path) -> None:
    found = probe(("cuda",), memory=MEMORY)
    by_pair: dict[tuple[str, str], set[str]] = {}
    for one in found.measured:
        by_pair.setdefault((one.source, one.sink), set()).add(one.way)
        assert one.constants == fit(one.samples)
        assert one.samples[0].runs == 1
        assert {s.run for s in one.samples} == {n for n in LENGTHS if n <= MEMORY * 4 // 10}
    assert all(ways == {"pull", "push", "engine"} for ways in by_pair.values())
    apart = {(a.what.split()[1], a.what.split()[3]) for a in found.absent}
    assert by_pair.keys() | apart == ends(FOUND)
    assert not by_pair.keys() & apart
    assert len(found.host.gpus) == FOUND
    assert found.host.driver
    path = tmp_path / "costs.json"
    save(found, path)
    assert load(path) == found
    assert [c.name for c in load_costs(path)] == ["kernel", "kernel, push"]


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("run", [256, 64 << 10])
def test_a_path_copies_what_its_program_says(devices: tuple[int, int], way: str, run: int) -> None:
    if devices not in cuda.pairs()[0] and devices != (0, 0):
        pytest.skip("no peers")
    for here, there in (devices, devices[::-1]):
        enable_peer(here, there)
    source, sink = (DeviceMemory(MEMORY // 4, device) for device in devices)
    with closing(source), closing(sink):
        path = cuda.kernel(way, source, sink)
        data = np.random.default_rng(1).integers(0, 256, path.pool, np.uint8)
        want = np.full(path.pool, 0xEE, np.uint8)
        put(source, data)
        put(sink, want)
        assert path.prepare(program(run, 128, path.pool))() > 0
        made = program(run, 128, path.pool)
        m = made.maps[0]
        width = int(made.ops["lane_bytes"][0])
        for op in made.ops:
            for a, b, n in zip(m.source_row.tolist(), m.sink_row.tolist(), m.rows.tolist(), strict=True):
                from_, to = (int(op[f"{side}_offset"]) + row * width for side, row in (("source", a), ("sink", b)))
                want[to : to + n * width] = data[from_ : from_ + n * width]
        assert np.array_equal(get(sink), want)


def test_pools_are_freed_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(length: int, device: int) -> DeviceMemory:
        pools.append(DeviceMemory(length, device))
        return pools[-1]

    def fails() -> None:
        with cuda.job(MEMORY, 0, 0).open():
            pools[0].check()
            raise ZeroDivisionError

    pools: list[DeviceMemory] = []
    monkeypatch.setattr(cuda, "DeviceMemory", allocate)
    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(pools) == 2
    for pool in pools:
        with pytest.raises(LocalError) as caught:
            pool.check()
        assert caught.value.code == ErrorCode.POOL_MOVED


def test_nixl_between_gpus_is_direct_and_packed() -> None:
    pytest.importorskip("nixl")
    if FOUND < 2:
        pytest.skip("needs two GPUs")
    with nixl_job(MEMORY, "gpu0", "gpu1").open() as paths:
        assert [(path.transport, path.way, path.source, path.sink) for path in paths] == [
            ("nixl", "direct", "gpu0", "gpu1"),
            ("nixl", "packed", "gpu0", "gpu1"),
        ]
        for path in paths:
            go = path.prepare(program(1 << 20, 4, path.pool))
            assert go() > 0
            assert go() > 0
