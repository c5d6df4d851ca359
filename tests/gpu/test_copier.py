"""The copy kernel on GPUs: random programs over random layouts, byte for byte, and what it refuses."""

import random
from typing import Any

import attrs
import numpy as np
import pytest
from cuda.bindings import driver

from kvproto.copying.execute import checksums, execute
from kvproto.errors import LocalError
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.transport import CudaTransport
from kvproto.wire.enums import ErrorCode
from tests.errors import raises
from tests.gpu.memory import get, put
from tests.plan.programs import random_pairs

SEEDS = 150


@pytest.mark.parametrize("parts", [False, True])
def test_random_programs(devices: tuple[int, int], parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rank pairs in one launch, or in parts; every byte of every region, written or not."""
    if parts:
        for name in ("FEW_RUNS", "_FIRST_RUNS"):
            monkeypatch.setattr(f"kvproto.transport.cuda.kernel.{name}", 2)
    copiers = Copier(0), Copier(0, long=64), Copier(0, blocks=2)
    enable_peer(0, 1) if max(devices) else None
    for seed in range(SEEDS):
        copier = copiers[seed % len(copiers)]
        rng, dice = random.Random(seed), np.random.default_rng(seed)
        layers = tuple(sorted(rng.sample(range(6), 2))) if seed % 3 == 0 else None
        jobs, checks, keep = [], [], []
        for program, from_lengths, to_lengths in random_pairs(rng):
            held = []
            for lengths, device in ((from_lengths, devices[0]), (to_lengths, devices[1])):
                host = {r: dice.integers(0, 256, n, np.uint8) for r, n in lengths.items()}
                memory = {r: DeviceMemory(n, device) for r, n in lengths.items()}
                for r in lengths:
                    put(memory[r], host[r])
                held.append((host, memory))
            (here, source), (there, sink) = held
            part = program if layers is None else program.select(layers=range(*layers))
            execute(part, {r: memoryview(a) for r, a in here.items()}, {r: memoryview(a) for r, a in there.items()})
            prepared = copier.prepare(
                program, {r: m.address for r, m in source.items()}, {r: m.address for r, m in sink.items()}
            )
            jobs.append(CopyJob(prepared, program.maps, layers))
            checks.append((there, sink, part.bytes))
            keep += [*source.values(), *sink.values()]
            sums = copier.begin_checksums(program, {r: m.address for r, m in source.items()}, sink=False)
            assert sums() == checksums(program, {r: memoryview(a) for r, a in here.items()}, sink=False)
        copy = copier.submit(jobs)
        copy.wait()
        assert copy.done
        assert copy.bytes == sum(n for *_, n in checks)
        for there, sink, _ in checks:
            for r, memory in sink.items():
                assert np.array_equal(get(memory), there[r]), (seed, r)
        for memory in keep:
            memory.close()


def test_refused_before_any_byte_moves_and_the_next_runs() -> None:
    copier = Copier(0)
    program, from_lengths, to_lengths = next(
        p for seed in range(99) for p in random_pairs(random.Random(seed)) if p[0].bytes and len(p[0].maps[0].rows)
    )
    source = {r: DeviceMemory(n, 0) for r, n in from_lengths.items()}
    sink = {r: DeviceMemory(n, 0) for r, n in to_lengths.items()}
    before = {r: np.random.default_rng(r).integers(0, 256, m.length, np.uint8) for r, m in sink.items()}
    for r, m in sink.items():
        put(m, before[r])
    prepared = copier.prepare(
        program, {r: m.address for r, m in source.items()}, {r: m.address for r, m in sink.items()}
    )
    bad = attrs.evolve(program.maps[0], sink_item=program.maps[0].sink_item + 1000)
    with raises(LocalError, code=ErrorCode.OUT_OF_REGION):
        copier.submit([CopyJob(prepared, [bad, *program.maps[1:]])])
    assert all(np.array_equal(get(m), before[r]) for r, m in sink.items())
    copier.submit([CopyJob(prepared, program.maps)]).wait()
    assert not all(np.array_equal(get(m), before[r]) for r, m in sink.items())


def test_more_launches_than_slots_are_busy_not_lost() -> None:
    copier = Copier(0, slots=2)
    size = 1 << 28
    source, sink = DeviceMemory(size), DeviceMemory(size)
    program = scattered(1024, size // (64 * 1024), run=64)
    prepared = copier.prepare(program, {0: source.address}, {0: sink.address})
    copies = [copier.submit([CopyJob(prepared, program.maps)] * 40) for _ in range(2)]
    refused = 0
    for _ in range(8):
        try:
            copies.append(copier.submit([CopyJob(prepared, program.maps)]))
        except LocalError as error:
            refused += error.code == ErrorCode.BUSY
    for copy in copies:
        copy.wait()
    assert refused
    copier.submit([CopyJob(prepared, program.maps)]).wait()


@pytest.mark.parametrize("what", ["allocate", "_copy"])
def test_what_fails_midway_leaves_nothing_under_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of four parts gets no memory, or cannot be launched."""
    for name in ("FEW_RUNS", "_FIRST_RUNS"):
        monkeypatch.setattr(f"kvproto.transport.cuda.kernel.{name}", 2)
    copier, size = Copier(0), 1 << 25
    source, sink = DeviceMemory(size), DeviceMemory(size)
    data, want = np.random.default_rng(1).integers(0, 256, size, np.uint8), np.full(size, 0xEE, np.uint8)
    put(source, data)
    put(sink, want)
    program = scattered(1024, size // (8 * 1024), run=8)
    prepared = copier.prepare(program, {0: source.address}, {0: sink.address})
    real, calls = getattr(Copier, what), []

    def second(self: Copier, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "", "memory", "none is left")
        return real(self, *given)

    monkeypatch.setattr(Copier, what, second)
    with pytest.raises(LocalError):
        copier.submit([CopyJob(prepared, program.maps)])
    assert all(driver.cuStreamQuery(s.handle)[0] == driver.CUresult.CUDA_SUCCESS for s in copier.streams)
    if what == "allocate":
        assert np.array_equal(get(sink), want)
    copier.submit([CopyJob(prepared, program.maps)]).wait()
    execute(program, {0: memoryview(data)}, {0: memoryview(want)})
    assert np.array_equal(get(sink), want)


@pytest.mark.parametrize("numbers", [{"blocks": 0}, {"background": 0}])
def test_no_multiprocessor_is_refused(numbers: dict[str, int]) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
        CudaTransport(0, **numbers)


def test_checksums_of_several_requests_are_taken_at_once_and_collected_in_any_order() -> None:
    copier, found, wanted, keep = Copier(0), [], [], []
    for seed in range(12):
        for program, lengths, _ in random_pairs(random.Random(seed)):
            host = {r: np.random.default_rng(seed).integers(0, 256, n, np.uint8) for r, n in lengths.items()}
            memory = {r: DeviceMemory(n) for r, n in lengths.items()}
            for r, data in host.items():
                put(memory[r], data)
            keep += memory.values()
            found.append(copier.begin_checksums(program, {r: m.address for r, m in memory.items()}, sink=False))
            wanted.append(checksums(program, {r: memoryview(a) for r, a in host.items()}, sink=False))
    abandoned = found.pop(0)
    assert [begun() for begun in reversed(found)] == wanted[:0:-1]
    del abandoned
    copier.settle()
    for each in keep:
        each.close()
