"""Probes over HTTP: alive, ready and why not, metrics, and draining from this host."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto import LocalError, Options, Pool, Sink, Source, new_ticket
from kvproto.probes import Probes
from kvproto.source.node import SourceNode
from tests.door.doors import GEOMETRY, PAGES, PROMPT, address_in, filled

SEEN = Options(metrics=True)


def ask(probes: Probes, path: str, method: str = "GET") -> tuple[int, Any]:
    """The status, and the JSON or text, of an answer."""
    host, _, port = probes.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, json.loads(body) if answer.getheader("Content-Type") == "application/json" else body


def until(probes: Probes, status: int, path: str = "/ready") -> tuple[Any, float]:
    """The first answer of this status, and after how many seconds it came."""
    began = time.monotonic()
    while time.monotonic() < began + 60:
        found, said = ask(probes, path)
        if found == status:
            return said, time.monotonic() - began
    raise AssertionError(said)


def decode(address: str, options: Options = SEEN) -> Sink:
    return Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, options)


def test_a_sink_is_ready_with_its_source_and_says_why_not(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    with decode(address) as sink, Probes("127.0.0.1:0", sink) as probes:
        status, said = ask(probes, "/ready")
        assert status == 503
        (rank,) = said["ranks"]
        assert (rank["engine"], rank["replica"], rank["rank"], rank["role"]) == ("decode", 0, 0, "sink")
        assert rank["sources"] == {"prefill/0": "it has not answered yet"}
        with Source("prefill", filled(), address, SEEN) as source:
            said, _ = until(probes, 200)
            assert said["ranks"][0]["sources"] == {"prefill/0": ""}
            source.close("maintenance")
            said, _ = until(probes, 503)
            assert "maintenance" in said["ranks"][0]["why"]
        assert ask(probes, "/live")[0] == 200


def test_a_source_is_ready_until_it_drains_which_this_host_may_ask_for(tmp_path: Path) -> None:
    with Source("prefill", filled(), address_in(tmp_path), SEEN) as source, Probes("127.0.0.1:0", source) as probes:
        assert ask(probes, "/ready") == (
            200, {"ready": True, "ranks": [
                {"engine": "prefill", "replica": 0, "rank": 0, "role": "source", "ready": True, "why": ""}]},
        )  # fmt: skip
        with decode(address_in(tmp_path)) as sink:
            ticket = new_ticket("prefill")
            request, fetch = source.request(ticket, PROMPT), sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
            while request.state is None or not request.state.users:
                assert not fetch.done
            assert ask(probes, "/drain?seconds=0", "POST") == (504, {"drained": False})
            assert ask(probes, "/ready")[1]["ranks"][0]["why"] == "it drains"
            answers: list[Any] = []
            waiting = threading.Thread(target=lambda: answers.append(ask(probes, "/drain", "POST")))
            waiting.start()
            request.finish({"kv": [3, 1, 2]})
            waiting.join(60)
            assert answers == [(200, {"drained": True})]
            fetch.wait(30)
        assert ask(probes, "/live")[0] == 200


def test_another_host_may_not_have_it_drain(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        outside = probe.getsockname()[0]
    with Source("prefill", filled(), address_in(tmp_path)) as source, Probes(f"{outside}:0", source) as probes:
        assert ask(probes, "/drain", "POST")[0] == 403
        assert ask(probes, "/ready")[0] == 200


def test_a_thread_that_has_died_is_neither_alive_nor_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Source("prefill", filled(), address_in(tmp_path), SEEN) as source, Probes("127.0.0.1:0", source) as probes:

        def die(node: SourceNode, ready: object = None) -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(SourceNode, "turn", die)
        with pytest.raises(MemoryError):
            source.request(new_ticket("prefill"), PROMPT)
        said, seconds = until(probes, 503, "/live")
        assert seconds < 1.0 + 5.0  # on a machine that is busy
        assert "none left" in said["dead"][0]["why"]
        assert ask(probes, "/ready")[0] == 503


def test_metrics_are_those_of_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with Source("prefill", filled(), address_in(tmp_path), SEEN) as source, Probes("127.0.0.1:0", source) as probes:
        status, text = ask(probes, "/metrics")
        assert status == 200
        assert 'kvproto_in_flight{engine="prefill",rank="0",replica="0",role="source"} 0.0' in text
    options = attrs.evolve(SEEN, metrics=False)
    with Source("prefill", filled(), address_in(tmp_path), options) as source, Probes("127.0.0.1:0", source) as probes:
        assert ask(probes, "/metrics")[0] == 404


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/", 404), ("GET", "/drain", 404), ("POST", "/ready", 404), ("POST", "/drain?seconds=soon", 400),
])  # fmt: skip
def test_anything_else_is_refused(method: str, path: str, status: int, tmp_path: Path) -> None:
    with Source("prefill", filled(), address_in(tmp_path)) as source, Probes("127.0.0.1:0", source) as probes:
        assert ask(probes, path, method)[0] == status
        assert not source.drained


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:70000", "192.0.2.1:1"])
def test_an_address_that_cannot_be_used_is_named(address: str) -> None:
    with pytest.raises(LocalError, match="OUT_OF_RANGE at probes") as refused:
        Probes(address)
    assert address in str(refused.value)
