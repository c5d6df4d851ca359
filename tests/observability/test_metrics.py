"""Metrics of real Sources and Sinks, read back as Prometheus would."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvproto
import kvproto.session.limits
from kvproto import Fetch, LocalError, Options, Pool, Sink, new_ticket
from kvproto import events as told
from kvproto.metrics import Collector
from kvproto.wire import messages as m
from kvproto.wire.tables import SPEC
from tests.door.doors import GEOMETRY, PAGES, PROMPT, Two, two
from tools.specgen.registry import load

SEEN = Options(thread=False, metrics=True)
Shown = dict[tuple[str, ...], float]


def scraped(*shown: object) -> str:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(Collector(*shown))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def values(*shown: object) -> Shown:
    """By name, role, and values of the labels that not every metric has, in the order of their names."""
    found: Shown = {}
    for family in text_string_to_metric_families(scraped(*shown)):
        for sample in family.samples:
            rest = [v for k, v in sorted(sample.labels.items()) if k not in ("engine", "replica", "rank", "role")]
            found[sample.name, sample.labels["role"], *rest] = sample.value
    return found


def ask(both: Two) -> Fetch:
    ticket = new_ticket("prefill")
    both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
    return both.sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})


def serve(both: Two, number: int = 1) -> None:
    for _ in range(number):
        found, freed = ask(both), len(of(both, told.Freed))
        both.until(lambda found=found, freed=freed: found.done and len(of(both, told.Freed)) > freed)


def of(both: Two, kind: type) -> list[told.Event]:
    return [event for event in both.told if isinstance(event, kind)]


def connected(both: Two) -> None:
    both.until(lambda: len(of(both, told.Connected)) == 2)


def failed(both: Two) -> None:
    """A request that the source gives up."""
    connected(both)
    request, lost = both.asked([9, 0, 5])
    request.fail("no memory")
    both.until(lambda: lost.done and request.done)


def test_they_are_named_as_the_registry_says(tmp_path: Path) -> None:
    """KVP-SEE-NAMES; those of `Tiers` in test_tiers_metrics.py."""
    with two(tmp_path, SEEN) as both:
        serve(both)
        text = scraped(both.source, both.sink)
    registry = load()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {n.removesuffix("_total") for n in registry["metric"]} == families.keys()
    for name, row in registry["metric"].items():
        if row["roles"] == ["tiers"]:
            continue
        family = families[name.removesuffix("_total")]
        assert family.type == row["type"]
        for sample in family.samples:
            labels = {
                "engine",
                "replica",
                "rank",
                "role",
                *row["labels"],
                *(["le"] if "_bucket" in sample.name else []),
            }
            assert sample.labels.keys() == labels
            assert sample.labels["role"] in row["roles"]
            for label in row["labels"]:
                assert sample.labels[label] in registry["metric_label"].get(
                    label, {"", "kv", kvproto.__version__, SPEC}
                )
    ends = [
        s.labels["le"]
        for s in families["kvproto_phase_seconds"].samples
        if "copy" in s.labels.values() and "le" in s.labels
    ]
    assert [float(end) for end in ends if end != "+Inf"] == registry["metric_buckets"]["second"]


def test_transfers_bytes_and_phases(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        serve(both, 3)
        found = values(both.source, both.sink)
    for role, outcome, phases in (
        ("source", "sent", ("prefill", "copy", "hold")),
        ("sink", "arrived", ("transfer", "fetch")),
    ):
        assert found["kvproto_transfers_total", role, "", outcome] == 3
        assert found["kvproto_bytes_total", role] == 3 * 320
        for phase in phases:
            assert found["kvproto_phase_seconds_count", role, phase] == 3
            assert 0 < found["kvproto_phase_seconds_sum", role, phase] < 60
    assert found["kvproto_requests_total", "source", "freed"] == 3


def test_each_rank_says_which_software_it_runs(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        for role, series in (("source", values(both.source)), ("sink", values(both.sink))):
            assert series["kvproto_build_info", role, SPEC, kvproto.__version__] == 1


def test_what_is_lost_has_its_code(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        failed(both)
        found = values(both.source, both.sink)
    assert found["kvproto_transfers_total", "sink", "ABORTED", "lost"] == 1
    assert found["kvproto_bytes_total", "sink"] == 0


def test_what_is_under_way(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        connected(both)
        request, found = both.asked([9, 0, 5])
        during = values(both.source, both.sink)
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: found.done and request.done)
        after = values(both.source, both.sink)
    for role in ("source", "sink"):
        assert (during["kvproto_in_flight", role], after["kvproto_in_flight", role]) == (1, 0)
        assert after["kvproto_peers", role] == 1
        assert after["kvproto_suspects", role] == 0


def test_pages_that_may_still_be_written(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        connected(both)
        request, found = both.asked([9, 0, 5])
        both.until(lambda: request.state is not None and request.state.asking())
        both.sink.disconnect("prefill")
        while not found.done:
            both.sink.step(0.005)
        assert not found.pages_free
        assert values(both.sink)["kvproto_quarantined_pages", "sink", "kv"] == 3


def test_pages_that_may_still_be_read(tmp_path: Path) -> None:
    """Of a request that its engine has given up while a sink reads what it was offered."""
    options = attrs.evolve(SEEN, pull=True, lease=1.0)
    with two(tmp_path, options) as both:
        connected(both)
        request, found = both.asked([9, 0, 5])
        both.until(lambda: request.state is not None and request.state.asking())
        request.finish({"kv": [3, 1, 2]})
        both.source.step(0.0)
        assert values(both.source)["kvproto_quarantined_pages", "source", "kv"] == 0
        request.fail("the client is gone")
        assert both.source.quarantined == {"kv": 3}
        assert values(both.source)["kvproto_quarantined_pages", "source", "kv"] == 3
        while not request.done:
            both.source.step(0.005)
        assert values(both.source)["kvproto_quarantined_pages", "source", "kv"] == 0
        assert not found.done


def test_a_peer_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvproto.session.limits, "PING_SILENCE", 0.5)
    monkeypatch.setattr(kvproto.session.limits, "RESEND", 0.05)
    with two(tmp_path, SEEN) as both:
        connected(both)
        during: dict[tuple[str, ...], float] = {}
        while not (during and during["kvproto_suspects", "sink"] and during["kvproto_resends_total", "sink"]):
            both.sink.step(0.01)
            during = values(both.sink)
        assert during["kvproto_suspects", "sink"] == 1
        both.until(lambda: values(both.sink)["kvproto_suspects", "sink"] == 0)
        after = values(both.sink)
    assert after["kvproto_suspicions_total", "sink"] >= during["kvproto_suspicions_total", "sink"] >= 1


def test_resends_of_a_source_that_was_left_still_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvproto.session.limits, "RESEND", 0.01)
    with two(tmp_path, SEEN) as both:
        while values(both.sink)["kvproto_resends_total", "sink"] < 2:
            both.sink.step(0.01)
        before = values(both.sink)["kvproto_resends_total", "sink"]
        both.sink.disconnect("prefill")
        both.sink.step(0.01)
        assert both.sink._node.census().peers == 0
        assert values(both.sink)["kvproto_resends_total", "sink"] >= before


@contextmanager
def stranger(address: str) -> Iterator["zmq.Socket[bytes]"]:
    """A client that is none of ours."""
    context = zmq.Context()
    made: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(address)
    yield made
    context.destroy(0)


def test_no_peer_makes_series(tmp_path: Path) -> None:
    """KVP-SEE-LABELS: neither by its name, nor by what it says of its frames."""
    with two(tmp_path, SEEN) as both, stranger(f"ipc://{tmp_path}/prefill") as bad:
        serve(both)
        bad.send(b"garbage")
        both.until(lambda: of(both, told.ProtocolError))
        before = values(both.source)
        with ExitStack() as stack:
            for i in range(8):
                name = f"engine-{i}"
                sink = Sink(name, Pool.allocate(GEOMETRY, PAGES), {"prefill": f"ipc://{tmp_path}/prefill"}, SEEN)
                stack.enter_context(sink)
                both.until(lambda sink=sink: any(isinstance(e, told.Connected) for e in sink.step(0.001)))
                bad.send(f"{i}, garbage".encode())
        both.until(lambda: len(of(both, told.ProtocolError)) == 9)
        after, text = values(both.source), scraped(both.source)
    assert after.keys() == before.keys()
    assert "engine-" not in text
    [broken] = [key for key in after if key[0] == "kvproto_refusals_total"]
    assert (broken[2], after[broken]) == ("frame", 9)


def test_codes_that_nobody_knows_share_one_value(tmp_path: Path) -> None:
    """KVP-SEE-LABELS: a source of a later version, or one that makes codes up."""
    with two(tmp_path, SEEN) as both:
        connected(both)
        for code in range(60_000, 60_005):
            request, lost = both.asked([9, 0, 5], new_ticket("prefill"))
            both.until(lambda request=request: request.state is not None and request.state.asking())
            assert request.state is not None
            [asked] = request.state.asking()
            session, ids = asked.session, {"sequence": asked.sequence}
            refusal = {"code": code, "path": "", "mine": "", "yours": ""}
            session.notice(m.Failed(session=session.session, request=asked.transfer.request, **ids, **refusal))
            both.until(lambda lost=lost: lost.done)
            request.release()
        found = values(both.sink)
    assert [value for key, value in found.items() if "lost" in key] == [5]


def test_they_are_plain_values_that_another_process_can_show(tmp_path: Path) -> None:
    with two(tmp_path, SEEN) as both:
        serve(both)
        sent = json.dumps([*both.source.metrics(), *both.sink.metrics()])
        assert values(lambda: json.loads(sent)) == values(both.source, both.sink)


def test_without_the_option_nothing_is_counted(tmp_path: Path) -> None:
    with two(tmp_path, Options(thread=False)) as both, pytest.raises(LocalError, match=r"Options\(metrics=True\)"):
        both.sink.metrics()
