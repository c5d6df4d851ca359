"""What a request of SGLang says of its hand-over: a room is a ticket, and what a user made up is refused by name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvproto import KvprotoError, LocalError, new_ticket, write_ticket
from kvproto_sglang.settings import Settings
from kvproto_sglang.tickets import asked_of, ticket_of
from kvproto_vllm.params import answer, prompt_of, read_params
from tests.vllm.adapters import adapter

TICKET = attrs.evolve(new_ticket("vllm", 1, 20), key=b"sixteen secrets!")


def request(kvproto: Any = None, **more: Any) -> Any:
    """What SGLang calls a request, as far as the back end looks."""
    params = SimpleNamespace(custom_params={"kvproto": kvproto} if kvproto is not None else None)
    known = {
        "origin_input_ids": [3, 4, 5], "sampling_params": params, "input_embeds": None, "lora_id": None,
        "return_logprob": False, "bootstrap_room": 1, "vocab_size": 100,
    }  # fmt: skip
    return SimpleNamespace(**known | more)


def test_both_engines_make_one_ticket_of_a_room() -> None:
    one, two = (ticket_of(7, "p", 1, 30) for _ in range(2))
    assert one == two
    assert (one.engine, one.replica, one.deadline) == ("p", 1, 30_000)
    assert one.key != ticket_of(8, "p", 1, 30).key


@pytest.mark.parametrize("room", [-1, 0, 1 << 63, True, None, "7"])
def test_what_is_no_room_is_refused(room: Any) -> None:
    with pytest.raises(LocalError, match="bootstrap_room"):
        ticket_of(room, "p")


def test_a_request_without_params_goes_by_its_room() -> None:
    asked = asked_of(request())
    assert (asked.ticket, asked.first_token, asked.prompt.tokens.tolist()) == (None, None, [3, 4, 5])


@pytest.mark.parametrize("ticket", [write_ticket(TICKET), json.dumps(write_ticket(TICKET))])
def test_a_router_says_ticket_and_first_token(ticket: Any) -> None:
    asked = asked_of(request({"ticket": ticket, "first_token": 9}))
    assert (asked.ticket, asked.first_token) == (TICKET, 9)


def test_a_router_says_tokens_that_another_engine_computes_itself() -> None:
    asked = asked_of(request({"more": [9]}))
    assert (asked.prompt.tokens.tolist(), asked.tokens) == ([3, 4, 5, 9], 3)


def test_what_keys_of_pages_have_beside_tokens_is_part_of_the_prompt() -> None:
    """`extra_key` and `cache_salt`, but for the sizes that SGLang adds for itself."""
    ways = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "a"},
            {"cache_salt": "\ud800"}, {"extra_key": "\ud800"}]  # fmt: skip
    digests = [asked_of(request(**way)).prompt.digest for way in ways]
    assert len({*digests}) == len(ways)
    for n, key in ((0, "elastic_ep_size=4"), (3, "a|elastic_ep_size=4")):
        assert asked_of(request(extra_key=key)).prompt.digest == digests[n]


def test_vllm_has_the_same_prompt_of_an_adapter_and_a_tenant(tmp_path: Path) -> None:
    """SGLang's id of the adapter, which it adds to `extra_key`, is its own."""
    folder = str(adapter(tmp_path))
    theirs = SimpleNamespace(lora_name="law", lora_path=folder)
    asked = SimpleNamespace(prompt_token_ids=[3, 4, 5], lora_request=theirs, cache_salt="tenant", max_tokens=1)
    known = [
        SimpleNamespace(lora_id="2e", lora_name="tax", lora_path="/tax"),
        SimpleNamespace(lora_id="2f", **vars(theirs)),
    ]
    ours = asked_of(request(cache_salt="tenant", lora_id="2f", extra_key="2f"), known).prompt
    assert ours.adapter == "law"
    assert ours.digest == prompt_of(asked).digest


def test_log_probabilities_are_needed_where_they_were_asked_for() -> None:
    assert asked_of(request()).needs == ()
    assert "logprob" in asked_of(request(return_logprob=True)).needs


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (request(7), "custom_params.kvproto"),
        (request({"tikcet": "{}"}), "tikcet"),
        (request({"ticket": 7}), "ticket"),
        (request({"ticket": {}}), "key"),
        (request({"ticket": ""}), "ticket"),
        (request({"ticket": "nonsense"}), "ticket"),
        (request({"first_token": -1}), "first_token"),
        (request({"first_token": True}), "first_token"),
        (request({"first_token": 100}), "first_token: expected 0 to 99, got 100"),
        (request({"first_token": [5]}), "first_token"),
        (request({"more": 7}), "more"),
        (request({"more": [-1]}), "more"),
        (request({"more": [5, 10**7]}), "more: expected 0 to 99, got 10000000"),
        (request(bootstrap_room=0), "bootstrap_room"),
        (request(input_embeds=[[0.5]]), "input_embeds"),
        (request(lora_id="2f"), "lora_id"),
        (request(origin_input_ids=[]), "tokens"),
    ],
)
def test_what_cannot_be_handed_over_is_named(made: Any, says: str) -> None:
    with pytest.raises(KvprotoError, match=says):
        asked_of(made)


@pytest.mark.parametrize(
    "given",
    [
        {"tiket": json.dumps(write_ticket(TICKET))},
        {"tiket": write_ticket(TICKET), "first_token": 3},
        {"ticket": write_ticket(TICKET) | {"room": "7"}},
        {"ticket": json.dumps(write_ticket(TICKET))[:-1]},
        {"ticket": json.dumps(write_ticket(TICKET) | {"room": "7"})},
        {"first_token": write_ticket(TICKET)["key"]},
        {"more": write_ticket(TICKET)},
        {"more": [write_ticket(TICKET)]},
        json.dumps(write_ticket(TICKET)),
        [write_ticket(TICKET)],
        write_ticket(TICKET),
    ],
)
def test_a_refusal_does_not_repeat_the_ticket(given: Any) -> None:
    """KVP-SECRET-LOG: its text becomes an HTTP answer and a line of SGLang's log."""
    with pytest.raises(KvprotoError) as refused:
        asked_of(request(given))
    assert bytes(TICKET.key).hex() not in f"{refused.value} {refused.value!r}"


def test_an_unknown_name_is_said_and_its_value_is_not() -> None:
    with pytest.raises(LocalError, match=r"names ticket, first_token, more, got tiket \("):
        asked_of(request({"tiket": "8"}))


def test_the_router_of_the_page_has_both_engines_agree_on_a_ticket() -> None:
    """What it posts is read as each engine reads it; the answer of vLLM is as its connector makes it."""
    page = (Path(__file__).parents[2] / "docs/sglang-reference.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    router: dict[str, Any] = {}
    exec(program, router)
    posted: list[tuple[str, Any]] = []
    first = {"choices": [{"token_ids": [17], "text": "b"}], "kv_transfer_params": answer(TICKET), "text": "b"}

    def post(url: str, body: Any) -> Any:
        posted.append((url.rpartition("/")[2], json.loads(json.dumps(body))))
        return first

    class Thread:
        """Begins at once, as no engine is there to wait for."""

        def __init__(self, target: Any, args: Any) -> None:
            self.start = lambda: target(*args)

    router |= {"post": post, "threading": SimpleNamespace(Thread=Thread)}
    assert router["from_sglang"]("a") == router["to_sglang"]("a") == "b"
    (one, prefill), (two, decode), (three, before), (four, after) = posted
    assert [one, two, three, four] == ["generate", "completions", "completions", "generate"]
    room, wanted = as_sglang(prefill), read_params(decode["kv_transfer_params"], False, True)
    assert wanted is not None
    ours = Settings.read({"name": "127.0.0.1:8998", "listen": "ipc:///a"}, True)
    assert ours.ticket_here(room, asked_of(room), 0) == wanted.ticket
    asked = read_params(before["kv_transfer_params"], True, False)
    assert asked is not None
    assert (asked.prefill, before["return_token_ids"]) == (True, True)
    found = asked_of(as_sglang(after))
    assert found.ticket is not None
    assert (found.ticket.key, found.first_token) == (TICKET.key, 17)


def as_sglang(body: Any) -> Any:
    """SGLang's request of the body of an HTTP request."""
    params = SimpleNamespace(custom_params=body["sampling_params"].get("custom_params"))
    named = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    return request(**{name: body[name] for name in named}, sampling_params=params)
