"""Real engines that can do both: pages are copied, a running request moves, roles change; no token differs."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvproto_reference.checkpoint import CHECKPOINTS
from kvproto_reference.commands import engine, router
from kvproto_reference.demo.options import draft_folder
from kvproto_reference.demo.prompts import Prompt
from kvproto_reference.demo.router import Request
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.moving.__main__ import main
from kvproto_reference.moving.router import Copy, Move, PeerRouter
from tests.demo.test_by_hand import free_port
from tests.processes import Command, imported

imported("kvproto_reference.moving.engine", "kvproto_reference.moving.__main__", "kvproto_reference.router.server")

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "


class Engines:
    """Engines that can do both, and their router in this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder, self.commands = folder, list[Command]()

    def start(self, *roles: str, target: str = "gqa", draft: str = "none", more: dict[int, list[object]]) -> None:
        """Start an engine for each role, and wait until all are connected."""
        self.target, self.draft = target, draft
        shared = ["--dir", self.folder, "--target", target, "--draft", draft, "--sources", len(roles), "--quiet"]
        for replica, role in enumerate(roles):
            given = [*shared, "--replica", replica, "--role", role, *more.get(replica, [])]
            self.commands.append(Command(engine, given))
        self.router = PeerRouter(self.folder, len(roles))
        self.router.wait_ready(60)

    def ask(self, prompt: bytes, max_new: int = 48, sampling: SamplingParams | None = None) -> Request:
        """Have a prompt answered."""
        how = Prompt(name="", tokens=list(prompt), sampling=sampling or SamplingParams())
        request = Request(0, how, max_new)
        self.router.add(request)
        return request

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until something holds."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            self.router.turn(lambda request: None, 50)

    def copied(self, tokens: list[int], here: str, there: str) -> Copy:
        """Copy pages, and wait for it."""
        ended: list[Copy] = []
        self.router.copy(Prompt(name="", tokens=tokens), here, there, ended.append)
        self.until(lambda: bool(ended))
        return ended[0]

    def moved(self, request: Request, there: str, ahead: bool = True) -> Move:
        """Move a request, and wait for it."""
        ended: list[Move] = []
        self.router.move(request, there, ended.append, ahead)
        self.until(lambda: bool(ended))
        return ended[0]

    def expected(self, request: Request) -> list[int]:
        """The tokens of one undivided engine."""
        draft = draft_folder(self.draft, 4, self.target)
        whole = Undivided(CHECKPOINTS / f"target-{self.target}", *([] if draft is None else [draft]), pages=64)
        prompt = request.prompt
        return whole.generate(prompt.tokens, max_new=request.max_new, sampling=prompt.sampling).tokens

    def end(self) -> None:
        for command in self.commands:
            command.process.kill()
        self.router.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "kv")
    yield made
    made.end()


def other(name: str) -> str:
    return {"engine-1": "engine-2", "engine-2": "engine-1"}[name]


DRAWN = SamplingParams(temperature=0.9, seed=3, presence=0.5, logprobs=2)


@pytest.mark.parametrize(
    ("target", "draft", "sampling", "more"),
    [
        ("gqa", "none", None, ["--tp", 2, "--page-size", 32]),
        ("mla", "gqa", DRAWN, ["--page-size", 8]),
        ("mla", "eagle", None, ["--tp", 2, "--dcp", 2, "--interleave", 4]),
        ("hybrid", "gqa", None, ["--tp", 2]),
        ("gqa", "none", None, ["--tp", 2, "--framework", "jax"]),
    ],
    ids=["TP 2 and longer pages", "a draft, drawn tokens", "a head, DCP 2", "states, windows and a draft, TP 2", "JAX"],
)
def test_a_request_moves_to_and_fro(
    engines: Engines, target: str, draft: str, sampling: SamplingParams | None, more: list[object]
) -> None:
    """Its tokens, penalties and proposals go on as if it had stayed; its log probabilities too."""
    shared: list[object] = ["--max-logprobs", 2]
    engines.start(
        "prefill", "decode", "decode", target=target, draft=draft, more={0: shared, 1: shared, 2: [*shared, *more]}
    )
    request = engines.ask(TEXT.encode(), 200, sampling)
    for number, ahead in enumerate((False, True, True)):
        engines.until(partial(_has_written, request, 12 * number + 4))
        move = engines.moved(request, other(request.engines[1]), ahead)
        assert (move.error, request.error) == ("", None)
        assert move.gap > 0
        if ahead and target != "hybrid":  # the copy left only what came since, and the last page
            assert move.copy is not None
            assert (move.copy.error, move.copy.tokens > 0) == ("", True)
            assert move.fetched < move.rows - move.copy.tokens + 32  # whole pages there
    engines.until(lambda: request.over)
    assert request.tokens == engines.expected(request)
    assert request.tries == 1
    assert len(request.logprobs) == (len(request.tokens) if sampling else 0)


def _has_written(request: Request, tokens: int) -> bool:
    return len(request.tokens) >= tokens


def test_a_request_stays_where_it_is_if_the_other_engine_has_no_room(engines: Engines) -> None:
    engines.start("prefill", "decode", "decode", more={2: ["--pages", 8]})
    for number in range(20):  # until one is decoded where there is room
        request = engines.ask(TEXT.encode() * 2, 48)
        request.number = number
        engines.until(partial(_begun, request))
        if request.error is None:
            break
    move = engines.moved(request, "engine-2")
    assert "the pools have 8" in move.error
    assert not move.arrived
    engines.until(lambda: request.over)
    assert (request.tokens, request.engines[1]) == (engines.expected(request), "engine-1")


def _begun(request: Request) -> bool:
    return request.over or len(request.tokens) >= 4


def test_a_request_is_asked_again_if_the_engine_that_it_moves_to_dies(engines: Engines) -> None:
    engines.start("prefill", "decode", "decode", more={})
    request = engines.ask(TEXT.encode(), 64)
    engines.until(lambda: len(request.tokens) >= 4)
    there = other(request.engines[1])
    ended: list[Move] = []
    os.kill(engines.commands[int(there[-1])].pid, signal.SIGSTOP)  # so that it has been handed over, and is not there
    engines.router.move(request, there, ended.append, ahead=False)
    engines.until(lambda: request.engines[1] == there)
    os.kill(engines.commands[int(there[-1])].pid, signal.SIGKILL)
    engines.until(lambda: request.over)
    assert [move.error for move in ended] == [f"{there} is gone"]
    assert request.tokens == engines.expected(request)


def test_a_request_that_its_client_gives_up_while_it_moves_leaves_no_page(engines: Engines) -> None:
    engines.start("prefill", "decode", "decode", more={})
    request = engines.ask(TEXT.encode(), 400)
    engines.until(lambda: len(request.tokens) >= 4)
    here, there = request.engines[1], other(request.engines[1])
    ended: list[Move] = []
    engines.router.move(request, there, ended.append, ahead=False)
    engines.router.cancel(request)
    assert [move.error for move in ended] == ["the request is given up"]
    told: list[str] = []
    for name in (here, there):  # a request that takes nearly all pages finds them free in each
        count = len(told)
        engines.router.switch(other(name), "prefill", lambda: told.append(""))
        engines.until(partial(_has_told, told, count + 1))
        whole = engines.ask(TEXT[::-1].encode() * 20, 300)
        engines.until(partial(_is_over, whole))
        assert (whole.error, whole.engines[1]) == (None, name)
        engines.router.switch(other(name), "decode", lambda: told.append(""))
        engines.until(partial(_has_told, told, count + 2))


def _has_told(told: list[str], count: int) -> bool:
    return len(told) == count


def _is_over(request: Request) -> bool:
    return request.over


def test_pages_are_copied_to_prefill_for_the_next_turn(engines: Engines) -> None:
    engines.start("prefill", "decode", more={0: ["--page-size", 32]})
    first = engines.ask(TEXT.encode(), 48)
    engines.until(lambda: first.over)
    text = first.prompt.tokens + first.tokens
    copy = engines.copied(text, "engine-1", "engine-0")
    assert (copy.error, copy.tokens) == ("", (len(text) - 1) // 16 * 16)
    assert copy.bytes > 0
    assert engines.copied(text, "engine-1", "engine-0").cached == copy.tokens // 32 * 32  # in whole pages there
    second = engines.ask(bytes(text) + b" And then", 48)
    engines.until(lambda: second.over)
    assert second.found["prefill"] == {"device": copy.tokens // 32 * 32}
    assert second.tokens == engines.expected(second)
    assert "no page of this text" in engines.copied(list(b"never seen"), "engine-1", "engine-0").error


def test_a_copy_is_of_one_tenant(engines: Engines) -> None:
    engines.start("prefill", "decode", more={})
    first = engines.ask(TEXT.encode(), 48)
    engines.until(lambda: first.over)
    ended: list[Copy] = []
    tenant = Prompt(name="", tokens=first.prompt.tokens, cache_salt="another")
    engines.router.copy(tenant, "engine-1", "engine-0", ended.append)
    engines.until(lambda: bool(ended))
    assert "no page of this text" in ended[0].error


def test_an_engine_changes_its_role_and_keeps_its_pages(engines: Engines) -> None:
    engines.start("prefill", "decode", "prefill", more={})
    running = engines.ask(TEXT.encode(), 64)
    engines.until(lambda: len(running.tokens) >= 4)
    told: list[str] = []
    engines.router.switch("engine-1", "prefill", lambda: told.append("engine-1"))
    engines.router.switch("engine-0", "decode", lambda: told.append("engine-0"))
    engines.until(lambda: len(told) == 2)
    assert not running.over  # what it decodes it goes on with
    again = engines.ask(TEXT.encode(), 32)
    engines.until(lambda: running.over and again.over)
    assert running.tokens == engines.expected(running)
    assert (again.tokens, again.engines[1]) == (engines.expected(again), "engine-0")
    engines.router.forget(running)
    third = engines.ask(TEXT.encode() + b"Then", 16)  # whose beginning engine-1 has, as it decoded it
    engines.until(lambda: third.over)
    assert (third.engines[0], third.found["prefill"]) == ("engine-1", {"device": len(TEXT) // 16 * 16})


def test_engines_that_do_both_do_not_wait_for_each_other(engines: Engines) -> None:
    """Each has more prompts for the other than its pool holds; no ticket expires."""
    engines.start("both", "both", more={n: ["--pages", 24] for n in (0, 1)})
    requests = [engines.ask(TEXT[n:].encode() + TEXT[:n].encode(), 32) for n in range(16)]
    for number, request in enumerate(requests):
        request.number = number
    engines.until(lambda: all(request.over for request in requests))
    assert [(request.error, request.tries) for request in requests] == [(None, 1)] * len(requests)
    assert {request.engines for request in requests} == {("engine-0", "engine-1"), ("engine-1", "engine-0")}
    assert all(request.tokens == engines.expected(request) for request in requests[:3])


def test_verbs_that_cannot_be(engines: Engines) -> None:
    engines.start("prefill", "decode", more={})
    request = engines.ask(TEXT.encode(), 8)
    with pytest.raises(EngineError, match="being decoded"):
        engines.router.move(request, "engine-0", lambda move: None)
    with pytest.raises(EngineError, match="there is no engine engine-7"):
        engines.copied([1], "engine-0", "engine-7")
    with pytest.raises(EngineError, match="no session"):
        engines.copied([1], "engine-0", "engine-0")
    with pytest.raises(EngineError, match="a role is one of"):
        engines.router.switch("engine-0", "cook")


def test_pages_of_a_hybrid_are_not_copied(engines: Engines) -> None:
    engines.start("prefill", "decode", target="hybrid", more={})
    first = engines.ask(TEXT.encode(), 16)
    engines.until(lambda: first.over)
    assert first.tokens == engines.expected(first)
    copy = engines.copied(first.prompt.tokens, "engine-1", "engine-0")
    assert "move the request instead" in copy.error


def test_pages_on_the_host_are_refused_by_name(tmp_path: Path) -> None:
    made = Command(engine, ["--dir", tmp_path / "kv", "--draft", "none", "--host-pages", 9])
    status, _, said = made.wait(60)
    assert (status, "pages on the host do not move yet" in said) == (1, True)


class Served:
    """A `kvproto-router` of engines that can do both."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.port = free_port()
        shared = ["--dir", folder, "--target", "gqa"]
        self.commands = [Command(router, [*shared, "--engines", 3, "--http", f"0.0.0.0:{self.port}"])]
        for replica, role in enumerate(("prefill", "decode", "decode")):
            own = ["--draft", "none", "--replica", replica, "--role", role, "--sources", 3]
            self.commands.append(Command(engine, [*shared, *own]))
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if not any(self.ask("/ready")[1]["engines"].values()):
                    return
            assert time.monotonic() < end

    def ask(self, path: str, body: object = None, host: str = "127.0.0.1") -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection(host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served") / "kv")
    yield made
    for command in made.commands:
        command.process.kill()


def test_roles_over_http(served: Served) -> None:
    assert served.ask("/ready")[1]["roles"] == {"engine-0": "prefill", "engine-1": "decode", "engine-2": "decode"}
    assert served.ask("/admin/role", {"engine": "engine-2", "role": "both"}) == (
        200,
        {"engine": "engine-2", "role": "both"},
    )
    assert served.ask("/ready")[1]["roles"]["engine-2"] == "both"
    assert served.ask("/admin/role", {"engine": "engine-2", "role": "decode"})[0] == 200
    for wrong in ({"engine": "engine-9", "role": "decode"}, {"engine": "engine-2"}, {"engine": 2, "role": "decode"}):
        assert served.ask("/admin/role", wrong)[0] == 400


def test_a_stream_goes_on_while_its_request_moves_over_http(served: Served) -> None:
    expected = Undivided(CHECKPOINTS / "target-gqa").generate(TEXT.encode(), max_new=400).text.decode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        body = {"prompt": TEXT, "max_tokens": 400, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        text = _text(answer.readline())
        moved = [served.ask("/admin/move", {"from": f"engine-{n}", "to": f"engine-{3 - n}"})[1] for n in (1, 2)]
        text += "".join(_text(line) for line in answer)
    assert text == expected
    assert sum(len(each["moved"]) for each in moved) >= 1
    assert not any(each["stayed"] for each in moved)


def _text(line: bytes) -> str:
    data = line.removeprefix(b"data: ").strip()
    return json.loads(data)["choices"][0]["text"] if data.startswith(b"{") else ""


def test_copies_over_http(served: Served) -> None:
    text = TEXT[::-1]
    assert served.ask("/v1/completions", {"prompt": text, "max_tokens": 16})[0] == 200
    told = [served.ask("/admin/copy", {"from": f"engine-{n}", "to": "engine-0", "prompt": text}) for n in (1, 2)]
    (said,) = [said for status, said in told if status == 200]  # the one that decoded it
    assert said["tokens"] == len(text) // 16 * 16
    assert served.ask("/admin/copy", {"from": "engine-1", "to": "engine-1", "prompt": text})[0] == 400
    assert served.ask("/admin/copy", {"from": "engine-1", "to": "engine-0"})[0] == 400


def test_verbs_are_for_this_host(served: Served) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        outside = probe.getsockname()[0]
    status, said = served.ask("/admin/role", {"engine": "engine-2", "role": "both"}, outside)
    assert (status, "this host" in said["error"]["message"]) == (403, True)
    assert served.ask("/ready")[1]["roles"]["engine-2"] == "decode"


def test_the_demo() -> None:
    given = ["--tokens", 300, "--moves", 3, "--requests", 9, "--json", "--target", "mla", "--draft", "gqa"]
    status, out, said = Command(main, given).wait(110)
    assert status == 0, out + said
    told = json.loads(out)
    assert told["answers"] == {"asked": 13, "lost": 0, "wrong": 0}
    assert told["move"]["whole"]["fetched"] == told["move"]["rows"] > told["move"]["ahead"]["fetched"]
    assert told["copy"]["found"] > 200
    assert told["switch"]["found"] >= 96
