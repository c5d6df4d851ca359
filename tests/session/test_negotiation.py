"""The vectors of negotiation, and what the two sides make of each other's Hello and Welcome."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto.errors import RemoteError
from kvproto.session.negotiation import Terms, check_features, check_version, greased, negotiate
from kvproto.wire import decode, tables
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.messages import Endpoint, Hello, Limits, Version, VersionRange, Welcome
from tests.session.driver import World, geometry

CASES = json.loads((Path(__file__).parents[2] / "spec/v1/vectors/negotiation.json").read_text())["cases"]


def terms(row: dict[str, Any]) -> Terms:
    ranges = []
    for text in row["versions"]:
        major, minors = text.split(".")
        low, high = minors.split("-")
        ranges.append(VersionRange(major=int(major), min_minor=int(low), max_minor=int(high)))
    return Terms(tuple(map(int, row["offered"])), tuple(map(int, row["needed"])), tuple(ranges))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_vectors(case: dict[str, Any]) -> None:
    """KVP-NEG-VERSION, KVP-NEG-FEATURE, KVP-NEG-CHOOSE, KVP-NEG-IGNORE."""
    sink, source = terms(case["sink"]), terms(case["source"])
    if "error" in case:
        with pytest.raises(RemoteError) as caught:
            negotiate(sink, source)
        assert (caught.value.code.name, caught.value.path) == (case["error"], case["path"])
        return
    for seed in (0, 7, 2**64 - 1):
        version, features = negotiate(greased(sink, seed), source)
        assert (f"{version.major}.{version.minor}", [str(f) for f in features]) == (
            case["version"],
            case["features"],
        )


def welcome(**changes: Any) -> Welcome:
    made = Welcome(
        session=1, request=1, version=Version(major=1, minor=0), engine="s", incarnation=1, rank=0, replica=0, features=(Feature.VERIFY,),
        limits=Limits(max_body=1, max_transfers=1), endpoints=(Endpoint(rank=0, address="a"),),
    )  # fmt: skip
    return attrs.evolve(made, **changes)


def test_welcome_may_choose_only_what_was_offered() -> None:
    """KVP-NEG-CHECK."""
    mine = Terms((Feature.VERIFY, Feature.PULL), (Feature.VERIFY,))
    check_version(mine, welcome())
    for features in ((Feature.VERIFY,), (Feature.VERIFY, Feature.PULL)):
        check_features(mine, welcome(features=features))
    for check, changes, path in (
        (check_version, {"version": Version(major=1, minor=1)}, "version"),
        (check_version, {"version": Version(major=2, minor=0)}, "version"),
        (check_features, {"features": (Feature.VERIFY, Feature.INTENT)}, "features"),
        (check_features, {"features": (Feature.PULL,)}, "features"),
    ):
        with pytest.raises(RemoteError) as caught:
            check(mine, welcome(**changes))
        assert (caught.value.code, caught.value.path) == (ErrorCode.FEATURE_MISSING, path)


def test_hello_is_greased() -> None:
    """KVP-GREASE-SEND."""
    sink = World(geometry(1)).sink("greasy", geometry(1))
    ((_, frame),) = sink.to_send(0.0)
    hello = decode(frame)
    assert isinstance(hello, Hello)
    assert hello.versions[-1].major == tables.GREASE_MAJOR
    assert [f for f in hello.offered if f in tables.GREASE_FEATURES]
    assert any(b"\xcd" + i.to_bytes(2, "big") in frame for i in tables.GREASE_FIELD_IDS)


def test_a_greased_version_is_one_that_may_be_said() -> None:
    """KVP-GREASE-SEND: whatever it is made of."""
    for seed in range(600):
        (*_, made) = greased(Terms(), seed).versions
        assert made.min_minor <= made.max_minor == 255
