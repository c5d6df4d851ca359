"""What transports choose by measured costs, against a search over every length."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.copying.program import Runs
from kvproto.transport.bench import Constants, Measured, Sample
from kvproto.transport.cuda.provider import long_runs
from kvproto.transport.nixl.direct import WriteMode, choose, threshold
from kvproto.transport.nixl.provider import costs_of

LENGTHS = (256, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
rates = st.lists(st.integers(1, 9), min_size=len(LENGTHS), max_size=len(LENGTHS))


def measured(transport: str, way: str, rates: list[int], source: str = "gpu0", sink: str = "gpu1") -> Measured:
    some = tuple(Sample(n, 4, 4 * n / rate) for n, rate in zip(LENGTHS, rates, strict=False))
    return Measured(transport, way, source, sink, some, Constants(max(rates), 1e-6, 1e-6))


@given(rates, rates, rates)
def test_the_copy_engine_takes_runs_from_where_it_stays_ahead(
    pull: list[int], push: list[int], engine: list[int]
) -> None:
    found = (measured("cuda", "pull", pull), measured("cuda", "push", push), measured("cuda", "engine", engine))
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
    assert long_runs(one) == 1 << 20
    assert long_runs([*one, *other, *within]) == 8 << 20
    assert long_runs(within) is None
    assert long_runs([measured("shm", "copy", [1] * 5, "host", "host")]) is None


@pytest.mark.parametrize("place", [("host", "host"), ("gpu0", "gpu1")])
def test_nixl_writes_long_runs_directly(place: tuple[str, str]) -> None:
    gpus = place[0] != "host"
    found = (measured("nixl", "direct", [10**9] * 5, *place), measured("nixl", "packed", [8 * 10**8] * 5, *place))
    costs = costs_of(found, gpus)
    assert costs is not None
    assert (costs.descriptor, costs.link, costs.packed) == (1e-6, 1e9, 0.8)
    for run in (1, 10000):
        assert choose(Runs(4, 4 * run), costs) == (WriteMode.DIRECT if run >= threshold(costs) else WriteMode.PACKED)
    assert costs_of(found, not gpus) is None
    assert costs_of(found[:1], gpus) is None


def test_packing_that_seems_faster_than_a_long_write_costs_something_all_the_same() -> None:
    found = (measured("nixl", "direct", [10**11] * 5), measured("nixl", "packed", [2 * 10**11] * 5))
    costs = costs_of(found, True)
    assert costs is not None
    assert choose(Runs(1, 1 << 20), costs) is WriteMode.PACKED
    assert choose(Runs(1, 1 << 30), costs) is WriteMode.DIRECT
