"""The back end's settings: read from the environment, and each mistake named."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto import LocalError, Seed, new_ticket, write_ticket
from kvproto_sglang.settings import VARIABLE, Settings, check_release
from kvproto_sglang.tickets import asked_of, ticket_of
from tests.sglang.test_tickets import request

PREFILL = {"name": "h:1", "listen": "ipc:///run/kv/p-{rank}"}
DECODE = {"sources": {"h:1": "ipc:///run/kv/p-0"}}


def test_they_are_json_or_a_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.json").write_text(json.dumps(PREFILL))
    for text in (json.dumps(PREFILL), str(tmp_path / "s.json")):
        monkeypatch.setenv(VARIABLE, text)
        assert Settings.of_environment(True).name == "h:1"


@pytest.mark.parametrize(("given", "seconds"), [({}, 60), ({"verify": False}, 60), ({"ticket_wait": 7}, 7)])
def test_a_fetch_waits_until_sglang_has_read_the_prompt(given: Any, seconds: float) -> None:
    assert Settings.read(PREFILL | {"options": given}, True).options.ticket_wait == seconds


@pytest.mark.parametrize("text", ["", "{", "/nowhere/s.json", "/dev/zero"])
def test_no_settings_are_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(LocalError, match=VARIABLE):
        Settings.of_environment(True)


def test_a_source_is_called_by_host_and_port_or_by_host_alone() -> None:
    made = Settings.read({"sources": {"h:1": "ipc:///a", "h:1/1": "ipc:///b", "vllm": "ipc:///c"}}, False)
    assert made.sources["h:1", 1] == Seed("ipc:///b")
    assert (made.source_of("h:1"), made.source_of("vllm:7")) == ("h:1", "vllm")
    assert (made.replicas("h:1"), made.replicas("vllm")) == (2, 1)
    with pytest.raises(LocalError, match="h:2"):
        made.source_of("h:2")


@pytest.mark.parametrize(
    ("name", "host", "port"),
    [("h:1", "h", 1), ("h", "h", 7), ("[::1]:1", "::1", 1), ("[::1]:1", "[::1]", 1), ("h:1", None, None)],
)
def test_prefill_serves_requests_that_call_it(name: str, host: Any, port: Any) -> None:
    made, called = (
        Settings.read(PREFILL | {"name": name, "deadline": 20}, True),
        request(bootstrap_host=host, bootstrap_port=port),
    )
    assert made.ticket_here(called, asked_of(called), 1) == ticket_of(1, name, 1, 20)


@pytest.mark.parametrize(
    ("name", "host", "port"), [("h:1", "h", 2), ("h:1", "g", 1), ("h", "g", 1), ("[::1]:1", "::1", 2)]
)
def test_prefill_refuses_a_request_that_calls_another_engine_at_once(name: str, host: str, port: int) -> None:
    """The load balancer was given another port, for example: nobody would come for the pages."""
    made, called = Settings.read(PREFILL | {"name": name}, True), request(bootstrap_host=host, bootstrap_port=port)
    with pytest.raises(LocalError, match=rf"WRONG_PEER at bootstrap_host: expected .*, got .*:{port}"):
        made.ticket_here(called, asked_of(called), 0)


def test_a_ticket_goes_before_what_a_request_calls() -> None:
    ticket = new_ticket("h:1")
    called = request({"ticket": json.dumps(write_ticket(ticket))}, bootstrap_host="router", bootstrap_port=0)
    assert Settings.read(PREFILL, True).ticket_here(called, asked_of(called), 0) == ticket


def test_what_a_client_says_of_deadlines_does_not_outlast_the_setting() -> None:
    ticket = new_ticket("h:1", deadline=1 << 22)
    called = request({"ticket": json.dumps(write_ticket(ticket))}, bootstrap_host="router", bootstrap_port=0)
    made = Settings.read(PREFILL | {"deadline": 20}, True)
    assert made.ticket_here(called, asked_of(called), 0) == attrs.evolve(ticket, deadline=20_000)
    made = Settings.read(DECODE | {"deadline": 20}, False)
    assert made.ticket_there(1, "h:1", asked_of(called)) == attrs.evolve(ticket, deadline=20_000)
    assert made.ticket_there(1, "h:1", asked_of(request())).deadline == 20_000


def test_replicas_listen_apart() -> None:
    made = Settings.read({"name": "h:1", "listen": "ipc:///run/kv/p-{replica}-{rank}"}, True)
    assert [made.places_of(n, 2) for n in range(2)] == [(f"ipc:///run/kv/p-{n}-{{rank}}", None) for n in range(2)]
    with pytest.raises(LocalError, match="2 replicas"):
        Settings.read(PREFILL, True).places_of(1, 2)
    outside = PREFILL | {"listen": "tcp://*:710{replica}{rank}", "advertise": "tcp://h:7100"}
    with pytest.raises(LocalError, match=r"KVPROTO_SGLANG\.advertise"):
        Settings.read(outside, True).places_of(1, 2)
    assert Settings.read(outside, True).places_of(0, 1) == ("tcp://*:7100{rank}", "tcp://h:7100")


@pytest.mark.parametrize(
    ("given", "prefill", "says"),
    [
        ([], True, "list"),
        ({}, True, "listen"),
        ({"listen": "ipc:///a"}, True, "name"),
        ({}, False, "sources"),
        (PREFILL | {"lisden": 1}, True, "lisden"),
        (DECODE | {"metadata": "some"}, False, "metadata"),
        (PREFILL | {"deadline": 0}, True, "deadline"),
        (PREFILL | {"options": {"ticket_wait": "1"}}, True, "ticket_wait"),
        (PREFILL | {"options": {"verfy": 1}}, True, "verfy"),
        ({"sources": 7}, False, "sources"),
        ({"sources": {"p/x": "ipc:///a"}}, False, "p/x"),
        ({"sources": {"p": {"adress": "ipc:///a"}}}, False, "adress"),
    ],
)
def test_a_mistake_is_named(given: Any, prefill: bool, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        Settings.read(given, prefill)


def test_a_release_that_is_not_known_is_refused() -> None:
    check_release("0.5.23")
    for version in ("0.5.22", "0.5.230", "0.6"):
        with pytest.raises(LocalError, match=version):
            check_release(version)
