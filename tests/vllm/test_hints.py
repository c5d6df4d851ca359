"""A router's KV hints: which are followed, which are left, and what is fetched of a prompt."""

import logging
from typing import Any

import pytest

from kvproto import Seed, new_ticket, write_ticket
from kvproto_vllm.hints import Hints
from kvproto_vllm.scheduling import Scheduling
from kvproto_vllm.settings import Settings
from tests.vllm.test_scheduling import TOKENS, blocks, request, step

PLACE = "tcp://10.0.0.1:7100"
SOURCES = {("them", 1): Seed(PLACE)}
TICKET = new_ticket("them", 1, deadline=60)


def action(**more: Any) -> dict[str, Any]:
    """An action that is followed, but for these members."""
    payload = {"source_control_endpoint": PLACE, "block_hashes": [1], "ticket": write_ticket(TICKET)}
    made = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    for name, value in more.items():
        (made if name in made else payload)[name] = value
    return made


def envelope(*actions: Any, version: Any = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def test_an_action_that_is_followed() -> None:
    hints = Hints(SOURCES)
    found = hints.read(envelope({"action_type": "kv.pin"}, 7, None, action(tokens=64, later_member=1)))
    assert found is not None
    assert (found.ticket, found.tokens) == (TICKET, 64)
    assert hints.read(envelope(action(action_version="1.7", source_control_endpoint=None))) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (envelope(action(), version="0.2"), "protocol_version 0.1, not '0.2'"),
        (envelope(action(), version=None), "protocol_version 0.1"),
        (envelope(action(action_version="2.0")), "version 1, not '2.0'"),
        (envelope(action(action_version=1)), "version 1, not 1"),
        (envelope(action(payload=[])), "an object as payload"),
        (envelope(action(mode="move")), "mode copy"),
        (envelope(action(no_retain=False)), "mode copy"),
        (envelope(action(ticket=None)), "the ticket by which"),
        (envelope(action(ticket={"engine": "them"})), "a ticket that can be read"),
        (envelope(action(tokens=0)), "a number of tokens"),
        (envelope(action(tokens=True)), "a number of tokens"),
        (envelope(action(source_control_endpoint="tcp://10.0.0.9:7100")), "an engine in `sources`"),
        (envelope(action(ticket=write_ticket(new_ticket("them", 2)))), "an engine in `sources`"),
        (envelope(action(ticket=write_ticket(new_ticket("others", 1)))), "an engine in `sources`"),
    ],
)
def test_an_action_that_is_left(given: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason is logged once, as routers send such hints again and again; the next action is looked at."""
    hints = Hints(SOURCES)
    with caplog.at_level(logging.WARNING, "vllm.kvproto"):
        assert hints.read(given) is None
        assert hints.read(given) is None
    (record,) = caplog.records
    assert says in record.getMessage()
    if given["protocol_version"] == "0.1":
        assert hints.read(envelope(*given["actions"], action())) is not None


@pytest.mark.parametrize("nothing", [None, {}, 7, "text", envelope(), envelope(version=7), {"protocol_version": "0.1"}])
def test_envelopes_of_which_nothing_is_followed(nothing: Any) -> None:
    assert Hints(SOURCES).read(nothing) is None


def advised(tokens: int | None, states: bool = False, recomputes: bool = True) -> tuple[Scheduling, Any]:
    """A request of 100 tokens with a hint for the first of them."""
    made = Scheduling(Settings(name="me", sources=SOURCES), 0, True, True, states=states, recomputes=recomputes)
    asked = request(None)
    asked.kv_hints = envelope(action(**({"tokens": tokens} if tokens else {})))
    made.arrived(asked)
    return made, asked


@pytest.mark.parametrize(("tokens", "end"), [(None, 99), (100, 99), (7000, 99), (64, 64), (1, 1)])
def test_a_hint_is_fetched_up_to_its_last_token(tokens: int | None, end: int) -> None:
    made, asked = advised(tokens)
    assert made.matched(asked, 0) == (end, True)
    made.allocated(asked, blocks([1, 2]), end)
    (load,) = step(made).loads
    assert (load.cached, load.tokens, len(load.prompt)) == (0, end, min(tokens or 100, 100))
    assert load.ticket.key == TICKET.key
    assert made.matched(asked, 0) == (0, False)  # once
    assert load.prompt.tokens.tolist() == TOKENS[: len(load.prompt)]


def test_nothing_is_fetched_of_what_is_cached() -> None:
    made, asked = advised(64)
    assert made.matched(asked, 64) == (0, False)
    made.allocated(asked, blocks([1, 2]), 0)
    (spared,) = step(made).spared
    assert (spared.cached, spared.tokens) == (64, 64)  # the source is told


def test_a_state_is_that_of_the_whole_prompt() -> None:
    made, asked = advised(64, states=True)
    assert made.matched(asked, 0) == (0, False)
    made, asked = advised(None, states=True)
    assert made.matched(asked, 0) == (99, True)


def test_an_engine_that_fails_requests_whose_loads_fail_follows_no_advice() -> None:
    made, asked = advised(None, recomputes=False)
    assert made.matched(asked, 0) == (0, False)


def test_parameters_of_a_hand_over_come_before_hints() -> None:
    made = Scheduling(Settings(name="me", sources=SOURCES), 0, True, True, recomputes=True)
    other = new_ticket("them", 1)
    asked = request({"do_remote_prefill": True, "ticket": write_ticket(other)})
    asked.kv_hints = envelope(action(tokens=64))
    made.arrived(asked)
    made.allocated(asked, blocks([1, 2]), made.matched(asked, 0)[0])
    assert step(made).loads[0].ticket.key == other.key
