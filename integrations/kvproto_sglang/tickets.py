"""What a request of SGLang says of its hand-over: the ticket, what is computed, and the first token where it has it.

SGLang's load balancer gives both engines one body with `bootstrap_host`, `bootstrap_port` and a random
`bootstrap_room`. The room is the ticket: both engines make the same key of it. A router that has a ticket of another
engine puts it into `sampling_params`:

    "custom_params": {"kvproto": {"ticket": "the JSON text of write_ticket", "first_token": 1234, "more": [17]}}

`more` are tokens of the prompt behind those that SGLang is asked for: an engine that computes the last token of a
prompt itself needs, and hands over, recurrent states of the tokens before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, LocalError, Prompt, Ticket, new_ticket, read_ticket
from kvproto.errors import ErrorCode
from kvproto_sglang.metadata import MASKED

__all__ = ["DEADLINE", "Asked", "asked_of", "ticket_of"]

DEADLINE = 300.0
"""Seconds for which a ticket of a room is good: SGLang's own patience."""
_U32 = (1 << 32) - 1


def ticket_of(room: int, engine: str, replica: int = 0, deadline: float = DEADLINE) -> Ticket:
    """The ticket of a bootstrap room, the same for everybody who knows the room; raises LocalError(OUT_OF_RANGE).

    For a router that gives the room to SGLang and the ticket to another engine.
    """
    _check_room(room)
    key = hashlib.sha256(b"kvproto sglang room" + room.to_bytes(8, "little")).digest()[:16]
    return attrs.evolve(new_ticket(engine, replica, deadline), key=key)


@attrs.frozen
class Asked:
    """What one request asks for.

    Fields:
        prompt: What the engines agree on.
        tokens: How many of it SGLang is asked for, from the first on.
        ticket: As a router made it; None: that of the room.
        first_token: What another engine sampled, where its pages come without it.
        needs: Parts of the metadata without which the request cannot go on here.
    """

    prompt: Prompt
    tokens: int
    ticket: Ticket | None = None
    first_token: int | None = None
    needs: tuple[str, ...] = ()


def asked_of(request: Any) -> Asked:
    """What a request of SGLang asks for; raises KvprotoError for what cannot be handed over."""
    _check_room(request.bootstrap_room)
    for name, what in (("input_embeds", "embeddings"), ("lora_id", "a LoRA adapter, whose id no other engine knows")):
        if getattr(request, name, None) is not None:
            raise _bad(name, "a prompt of tokens", what)
    params = getattr(request.sampling_params, "custom_params", None)
    given = params.get("kvproto") if isinstance(params, Mapping) else None
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or given.keys() - {"ticket", "first_token", "more"}:
        raise _bad("custom_params.kvproto", '{"ticket": ..., "first_token": ..., "more": ...}', repr(given)[:80])
    token, more, ours = given.get("first_token"), given.get("more", []), request.origin_input_ids
    for name, found in (("first_token", [token or 0]), ("more", more)):
        if not isinstance(found, list) or any(type(each) is not int or not 0 <= each <= _U32 for each in found):
            raise _bad(f"custom_params.kvproto.{name}", "token ids", repr(given[name])[:80])
    ticket = given.get("ticket")
    if ticket is not None and not isinstance(ticket, str):
        raise _bad("custom_params.kvproto.ticket", "the JSON text of a ticket", type(ticket).__name__)
    masks = MASKED if getattr(request, "return_sampling_mask", False) else ()
    needs = (*(("logprob", "sglang.top_logprobs") if request.return_logprob else ()), *masks)
    return Asked(Prompt([*ours, *more]), len(ours), read_ticket(ticket) if ticket else None, token, needs)


def _check_room(room: Any) -> None:
    """SGLang takes 0 for a request whose metadata has not come."""
    if isinstance(room, bool) or not isinstance(room, int) or not 0 < room < 1 << 63:
        raise _bad("bootstrap_room", "a random number of 63 bits, above 0", repr(room)[:80])


def _bad(path: str, mine: str, yours: str) -> KvprotoError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, yours, "see docs/sglang.md")
