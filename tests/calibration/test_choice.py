"""What movers choose by a probe's file, against a search over every length."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.calibration.measure.choice import long_runs, nixl_costs
from kvproto.calibration.probe import Constants, Host, Measured, Probe, Sample
from kvproto.copying.program import Runs
from kvproto.transport.nixl.direct import WriteMode, choose, threshold

LENGTHS = (256, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
rates = st.lists(st.integers(1, 9), min_size=len(LENGTHS), max_size=len(LENGTHS))


def measured(transport: str, way: str, rates: list[int], source: str = "gpu0", sink: str = "gpu1") -> Measured:
    some = tuple(Sample(n, 4, 4 * n / rate) for n, rate in zip(LENGTHS, rates, strict=False))
    return Measured(transport, way, source, sink, some, Constants(max(rates), 1e-6, 1e-6))


def probe_of(*found: Measured) -> Probe:
    return Probe("2026-01-02T03:04:05+00:00", True, 1 << 29, Host(2, "x86_64, Linux"), found)


@given(rates, rates, rates)
def test_the_copy_engine_takes_runs_from_where_it_stays_ahead(
    pull: list[int], push: list[int], engine: list[int]
) -> None:
    found = probe_of(measured("cuda", "pull", pull), measured("cuda", "push", push), measured("cuda", "engine", engine))
    ahead = [
        n for i, n in enumerate(LENGTHS)
        if all(e >= max(a, b) for a, b, e in zip(pull[i:], push[i:], engine[i:], strict=True))
    ]  # fmt: skip
    assert long_runs(found) == min(ahead, default=sys.maxsize)


def test_the_slowest_pair_decides_and_copies_within_a_gpu_do_not() -> None:
    def pair(sink: str, engine: list[int]) -> list[Measured]:
        return [
            measured("cuda", way, r, sink=sink) for way, r in (("pull", [5] * 5), ("push", [5] * 5), ("engine", engine))
        ]

    one, other, within = pair("gpu1", [1, 1, 6, 6, 6]), pair("gpu2", [1, 1, 1, 6, 6]), pair("gpu0", [1] * 5)
    assert long_runs(probe_of(*one)) == 1 << 20
    assert long_runs(probe_of(*one, *other, *within)) == 8 << 20
    assert long_runs(probe_of(*within)) is None
    assert long_runs(probe_of(measured("shm", "copy", [1] * 5, "host", "host"))) is None


@pytest.mark.parametrize("place", [("host", "host"), ("gpu0", "gpu1")])
def test_nixl_writes_long_runs_directly(place: tuple[str, str]) -> None:
    gpus = place[0] != "host"
    found = probe_of(
        measured("nixl", "direct", [10**9] * 5, *place), measured("nixl", "packed", [8 * 10**8] * 5, *place)
    )
    costs = nixl_costs(found, gpus)
    assert costs is not None
    assert (costs.descriptor, costs.link, costs.packed) == (1e-6, 1e9, 0.8)
    for run in (1, 10000):
        assert choose(Runs(4, 4 * run), costs) == (WriteMode.DIRECT if run >= threshold(costs) else WriteMode.PACKED)
    assert nixl_costs(found, not gpus) is None
    assert nixl_costs(probe_of(found.measured[0]), gpus) is None


def test_packing_that_seems_faster_than_a_long_write_costs_something_all_the_same() -> None:
    found = probe_of(measured("nixl", "direct", [10**11] * 5), measured("nixl", "packed", [2 * 10**11] * 5))
    costs = nixl_costs(found, True)
    assert costs is not None
    assert choose(Runs(1, 1 << 20), costs) is WriteMode.PACKED
    assert choose(Runs(1, 1 << 30), costs) is WriteMode.DIRECT
