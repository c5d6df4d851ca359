"""Cases of two engines that both prefill and decode: pages, running requests and hints move by the connector alone.

A router needs nothing but ordinary requests: what an engine keeps in its prefix cache it hands over when it is asked to
prefill that text, and computes no more of it than its last block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproto import new_ticket, write_ticket
from tools.engines.vllm_engine import ASK, Engine, new_name, over, prompts

_FIRST = 9
"""Tokens that the first engine has written when a request moves."""


def next_turn(one: Engine, two: Engine) -> Iterator[str]:
    """Decode hands the pages of a turn back to prefill, which then finds the next turn's beginning."""
    (prompt,), (more,) = prompts(1, 150, 151, 21), prompts(1, 40, 41, 22)
    text = prompt + over(one, two, prompt, 60)[0]
    name = new_name()
    copied = over(two, one, text, 1, name)
    if copied[1] != "length" or name not in one.fetched:
        yield f"the pages were not fetched: {copied}"
    alone = two.run(new_name(), text + more, 16)[0]
    again = one.run(new_name(), text + more, 1, ASK)
    if again[3] < len(text) // 64 * 64:
        yield f"{again[3]} of the {len(text)} tokens were found at {one.name}"
    if (tokens := two.run(new_name(), text + more, 16, again[2])[0]) != alone:
        yield f"{tokens}, not {alone}"


def moves(one: Engine, two: Engine) -> Iterator[str]:
    """A request is aborted where it is decoded, after some tokens, and goes on at the other engine, each way."""
    for seed, (here, there) in enumerate(((one, two), (two, one))):
        (prompt,) = prompts(1, 180, 181, 23 + seed)
        alone = there.run(new_name(), prompt, 40)[0]
        there.forget()
        running = new_name()
        here.add(running, prompt, 300)
        while here.rounds(running) < _FIRST:
            pass
        here.abort(running)
        text = prompt + alone[:_FIRST]  # as the router has streamed it
        asked = here.run(new_name(), text, 1, ASK)
        if asked[3] < len(text) // 64 * 64 - 64:
            yield f"{here.name} found {asked[3]} of {len(text)} tokens that it had"
        name = new_name()
        tokens = there.run(name, text, 40 - _FIRST, asked[2])[0]
        if alone[:_FIRST] + tokens != alone or name not in there.fetched:
            yield f"{here.name} to {there.name}: {alone[:_FIRST]} and {tokens}, not {alone}, or not fetched"


def hint(ticket: Any, place: str | None, **more: Any) -> dict[str, Any]:
    """A router's envelope with the one action that is followed."""
    payload = {"block_hashes": [1, 2], "ticket": ticket, **({"source_control_endpoint": place} if place else {})}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    for name, value in more.items():
        (payload if name in ("tokens", "mode", "no_retain") else envelope if name in envelope else action)[name] = value
    return envelope


def hints(one: Engine, two: Engine) -> Iterator[str]:
    """`kv.fetch` moves the pages of a prompt's beginning; what cannot be followed is computed, and never dialled."""
    place = two.settings["kv"]["kv_connector_extra_config"]["sources"][one.name]
    (prompt,), (more,) = prompts(1, 192, 193, 25), prompts(1, 50, 51, 26)
    one.run(new_name(), prompt, 1)
    alone = one.run(new_name(), prompt + more, 16)[0]
    for tokens in (None, 192, 128):
        two.forget()
        ticket = write_ticket(new_ticket(one.name, deadline=20))
        text, name = (prompt + more)[: tokens or None], new_name()
        one.add(asked := new_name(), text, 1, ASK | {"ticket": ticket})
        answer = two.run(name, prompt + more, 16, hints=hint(ticket, place, **({"tokens": tokens} if tokens else {})))
        one.result(asked)
        if answer[0] != alone or name not in two.fetched:
            yield f"the first {tokens} tokens: {answer}, not {alone}, or not fetched"
        if answer[3] < (tokens or len(text)) - 32:
            yield f"{answer[3]} of {tokens} tokens came from the other engine"
    ticket = write_ticket(new_ticket(one.name, deadline=3))
    elsewhere = write_ticket(new_ticket("elsewhere", deadline=3))
    for wrong, says in (
        (hint(ticket, "tcp://127.0.0.1:9"), "an engine in `sources`"),
        (hint(elsewhere, None), "an engine in `sources`"),
        (hint(ticket, place, protocol_version="7.0"), "protocol_version 0.1"),
        (hint(ticket, place, action_version="2.0"), "kv.fetch of version 1"),
        (hint(ticket, place, mode="move"), "mode copy"),
        (hint(ticket, place, no_retain=True), "mode copy"),
        (hint(None, place), "the ticket"),
        (hint("nonsense", place), "a ticket that can be read"),
        (hint(ticket, place, action_type="kv.pin"), ""),
        (hint(ticket, place), "UNKNOWN_TICKET"),  # nobody has asked the source
    ):
        two.forget()
        name = new_name()
        answer = two.run(name, prompt + more, 16, hints=wrong)
        if answer[0] != alone or name in two.fetched or says not in two.said():
            yield f"{says}: {answer}, not {alone}, or fetched, or not said"
