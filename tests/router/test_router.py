"""`kvproto-router` over real engines: OpenAI's forms, streams, clients that go away, engines that come and go."""

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproto import Finder
from kvproto_reference.checkpoint import CHECKPOINTS, load_tokenizer
from kvproto_reference.commands import decode, prefill, router
from kvproto_reference.demo.options import rank_address
from kvproto_reference.demo.prompts import Prompt
from kvproto_reference.demo.router import Request
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.router.balance import BalancedRouter
from kvproto_reference.router.form import Form
from tests.demo.test_by_hand import free_port
from tests.processes import Command, imported

imported("kvproto_reference.demo.decode", "kvproto_reference.demo.prefill", "kvproto_reference.router.server")

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank"


class Fleet:
    """Engines and their router."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.commands = folder, free_port(), dict[str, Command]()

    def start(self, name: str, *more: object) -> Command:
        """Start an engine, or the router, with the options that all have."""
        role, _, replica = name.partition("-")
        shared: list[object] = ["--dir", self.folder, "--target", "gqa"]
        if role == "router":
            given = [*shared, "--http", f"127.0.0.1:{self.port}", *more]
        else:
            given = [*shared, "--draft", "none", "--max-logprobs", 3, "--replica", replica, *more]
        made = self.commands[name] = Command({"prefill": prefill, "decode": decode, "router": router}[role], given)
        return made

    def ask(self, path: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def ready(self, *not_ready: str) -> None:
        """Wait until all engines but these take requests, and these do not."""
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                engines = self.ask("/ready")[1]["engines"]
                if {name for name, why in engines.items() if why} == set(not_ready):
                    return
            assert time.monotonic() < end

    def end(self) -> None:
        for command in self.commands.values():
            command.process.terminate()
        for command in self.commands.values():
            command.wait(20)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "kv").mkdir(mode=0o700)
    made = Fleet(tmp_path / "kv")
    yield made
    made.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A router with a prefill and a decode engine."""
    folder = tmp_path_factory.mktemp("pair") / "kv"
    folder.mkdir(mode=0o700)
    made = Fleet(folder)
    for name in ("prefill-0", "decode-0", "router"):
        made.start(name)
    made.ready()
    yield made
    made.end()


def whole(most: int) -> str:
    """The answer of one undivided engine."""
    return Undivided(CHECKPOINTS / "target-gqa").generate(TEXT.encode(), max_new=most).text.decode()


def events(fleet: Fleet, body: object) -> list[Any]:
    """The events of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        said = [line.removeprefix(b"data: ").strip() for line in answer if line.strip()]
    assert said.pop() == b"[DONE]"
    return [json.loads(each) for each in said]


def test_an_answer_is_that_of_one_engine_whole_and_streamed(pair: Fleet) -> None:
    expected = whole(24)
    status, said = pair.ask("/v1/completions", {"prompt": TEXT, "max_tokens": 24})
    assert (status, said["object"], said["model"]) == (200, "text_completion", "gqa")
    assert said["choices"] == [{"index": 0, "text": expected, "finish_reason": "length"}]
    assert said["usage"] == {"prompt_tokens": len(TEXT), "completion_tokens": 24}
    told = events(pair, {"prompt": list(TEXT.encode()), "max_tokens": 24, "stream": True})
    assert "".join(each["choices"][0]["text"] for each in told) == expected
    assert [each["choices"][0]["finish_reason"] for each in told[:-1]] == [None] * (len(told) - 1)
    assert len(told) > 5
    assert told[-1]["choices"][0]["finish_reason"] == "length"
    assert pair.ask("/v1/models")[1]["data"][0]["id"] == "gqa"
    assert pair.ask("/health")[0] == 200


def test_words_that_end_a_text_are_not_in_it(pair: Fleet) -> None:
    text = whole(24)
    words = text[9:12]
    body = {"prompt": TEXT, "max_tokens": 24, "stop": [words, "no such words"]}
    choice = pair.ask("/v1/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(words)], "stop")
    told = events(pair, body | {"stream": True})
    assert "".join(each["choices"][0]["text"] for each in told) == choice["text"]
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    kept = pair.ask("/v1/completions", {"prompt": TEXT, "max_tokens": 24, "stop": text[-1:] + "?"})[1]["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (text, "length")


def test_log_probabilities_come_with_tokens(pair: Fleet) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "logprobs": 2}
    choice = pair.ask("/v1/completions", body)[1]["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == whole(8)
    assert found["text_offset"] == list(range(8))  # tokens are bytes
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert max(top.values()) == top[token] == pytest.approx(logprob)  # greedy
        assert len(top) == 2
    told = [each["choices"][0].get("logprobs") for each in events(pair, body | {"stream": True})]
    streamed = [each for each in told if each]
    assert [p for each in streamed for p in each["token_logprobs"]] == pytest.approx(found["token_logprobs"])
    assert [at for each in streamed for at in each["text_offset"]] == found["text_offset"]
    assert "logprobs" not in pair.ask("/v1/completions", {"prompt": TEXT, "max_tokens": 8})[1]["choices"][0]


def test_a_chat_has_log_probabilities_in_its_own_form() -> None:
    tokenizer = load_tokenizer(CHECKPOINTS / "target-gqa")
    form = Form("gqa", True, tokenizer, Prompt(name="", tokens=[1, 2]), 2)
    form.take(([72, 105], [[(72, -0.5), (72, -0.5), (74, -1.0)], [(105, -0.25), (105, -0.25), (106, -2.0)]]))
    choice = form.whole()["choices"][0]
    assert choice["message"]["content"] == "Hi"
    content = choice["logprobs"]["content"]
    assert [(each["token"], each["logprob"], each["bytes"]) for each in content] == [
        ("H", -0.5, [72]),
        ("i", -0.25, [105]),
    ]
    assert [[top["token"] for top in each["top_logprobs"]] for each in content] == [["H", "J"], ["i", "j"]]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b"no json", 400, "no JSON"),
        ("/v1/completions", b"[" * 100000, 400, "no JSON"),
        ("/v1/completions", [], 400, "JSON object"),
        ("/v1/completions", {}, 400, "prompt is"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt is"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt is"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n is 1"),
        ("/v1/completions", {"prompt": "a", "logprobs": 4}, 400, "--max-logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "a", "model": "another"}, 404, "the model here is gqa, not 'another'"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a" * 5000}, 400, "pages"),
        ("/v1/completions", {"prompt": [99999]}, 400, "token"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 400, "no chat template"),
        ("/v1/else", {}, 404, "/v1/completions"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_costs_no_other(
    pair: Fleet, path: str, body: object, status: int, says: str
) -> None:
    found, said = pair.ask(path, body)
    assert (found, says in said["error"]["message"]) == (status, True), said
    assert pair.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_client_that_goes_away_ends_its_request(pair: Fleet) -> None:
    connection, before = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=60), pair.ask("/ready")[1]["served"]
    body = {"prompt": TEXT, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    began = time.monotonic()
    assert pair.ask("/v1/completions", {"prompt": TEXT, "max_tokens": 4})[0] == 200
    while pair.ask("/ready")[1]["under_way"]:
        assert time.monotonic() < began + 30
    assert pair.ask("/ready")[1]["served"] == before + 1


def test_an_engine_that_is_killed_loses_no_request(fleet: Fleet) -> None:
    """Streams go on where they were, by another engine and a new ticket."""
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        fleet.start(name, *(["--sources", 2] if name.startswith("decode") else []))
    fleet.start("router", "--prefill", 2, "--decode", 2)
    fleet.ready()
    expected = whole(200)
    connections = [http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60) for _ in range(6)]
    body = {"prompt": TEXT, "max_tokens": 200, "stream": True}
    for connection in connections:
        connection.request("POST", "/v1/completions", json.dumps(body))
    answers = [connection.getresponse() for connection in connections]
    for answer in answers:
        assert answer.readline()
    for name in ("decode-0", "prefill-1"):
        fleet.commands.pop(name).process.kill()
    fleet.ready("decode-0", "prefill-1")
    for answer in answers:
        data = answer.read()
        assert data.endswith(b"data: [DONE]\n\n")
    status, said = fleet.ask("/v1/completions", body | {"stream": False})
    assert (status, said["choices"][0]["text"]) == (200, expected)
    assert fleet.ask("/ready")[1]["retried"] > 0
    for connection in connections:
        connection.close()


def test_without_engines_a_request_waits_until_there_are_some(fleet: Fleet) -> None:
    fleet.start("router")
    fleet.ready("prefill-0", "decode-0")
    status, said = fleet.ask("/ready")
    assert (status, said["ready"]) == (503, False)
    assert str(fleet.folder) in said["engines"]["prefill-0"]
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": TEXT, "max_tokens": 4}))
    for name in ("prefill-0", "decode-0"):
        fleet.start(name)
    assert connection.getresponse().status == 200
    connection.close()


def test_an_engine_that_no_other_reaches_says_so(fleet: Fleet) -> None:
    """It takes requests, and no other is there to answer them with."""
    fleet.start("router")
    fleet.start("prefill-0")
    fleet.ready("prefill-0", "decode-0")
    end = time.monotonic() + 60
    while "no decode engine" not in (said := fleet.ask("/ready")[1]["engines"]["prefill-0"]):
        assert time.monotonic() < end, said
    fleet.start("decode-0")
    fleet.ready()
    assert fleet.ask("/ready")[0] == 200


def test_a_prompt_goes_where_its_beginning_went_unless_others_have_less_to_do(tmp_path: Path) -> None:
    """Before any engine is asked: the choice alone."""
    tmp_path.chmod(0o700)
    made = BalancedRouter(tmp_path, "prefill", 2, 2)
    for name, engine in made._engines.items():
        engine.takes, engine.sources = True, frozenset({0, 1} if name.startswith("decode") else ())

    def asked(tokens: list[int], number: int = 0) -> Request:
        request = Request(number, Prompt(name="", tokens=tokens), 8)
        made.add(request)
        made._ask()
        return request

    first = asked(list(range(64)))
    first.stats = {}
    made.forget(first)
    again = asked([*range(48), *range(1000, 1016)], 1)
    assert again.engines[1] == first.engines[1]
    other = asked([*range(48), *range(2000, 2016)], 2)
    assert other.engines[1] != first.engines[1]
    assert other.engines[0] != again.engines[0]
    made.close()


def test_a_finder_sends_a_prompt_to_the_prefill_engine_that_keeps_its_pages(fleet: Fleet) -> None:
    for name in ("prefill-0", "prefill-1", "decode-0"):
        fleet.start(name, *(["--sources", 2] if name == "decode-0" else ["--host-pages", 64]))
    tokens = list(TEXT.encode())
    with Finder([rank_address(f"ipc://{fleet.folder}/kv", n, 0) for n in range(2)]) as finder:
        made = BalancedRouter(fleet.folder, "prefill", 2, 1, finder)
        made.wait_ready(60)
        chosen = list[str]()
        for number in range(6):
            request = Request(number, Prompt(name="", tokens=tokens), 2)
            made.add(request)
            while not request.over:
                made.turn(lambda request: None, 20)
            assert request.error is None
            made.forget(request)
            chosen.append(request.engines[0])
            deadline = time.monotonic() + 30
            while not [held for held in finder.find(tokens) if held.tokens and f"prefill-{held.replica}" == chosen[0]]:
                made.turn(lambda request: None, 20)
                assert time.monotonic() < deadline
        made.close()
    assert len(set(chosen)) == 1
