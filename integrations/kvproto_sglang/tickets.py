"""Hand-over data in a request of SGLang: the ticket, what is computed, and the first token where it has it.

SGLang's load balancer gives both engines one body with `bootstrap_host`, `bootstrap_port` and a random
`bootstrap_room`. The room is the ticket: both engines make the same key of it. A router that has a ticket of another
engine puts it into `sampling_params`:

    "custom_params": {"kvproto": {"ticket": {...}, "first_token": 1234, "more": [17]}}

`ticket` is what `write_ticket` returns, or its JSON text.

`more` are tokens of the prompt behind those that SGLang is asked for: an engine that computes the last token of a
prompt itself needs, and hands over, recurrent states of the tokens before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, LocalError, Prompt, Ticket, new_ticket, read_ticket
from kvproto.errors import ErrorCode, check_type, check_whole
from kvproto_engines.apart import salts_of

__all__ = ["DEADLINE", "MASKED", "Asked", "asked_of", "ticket_of"]

DEADLINE = 300.0
"""Seconds for which a ticket of a room is good: SGLang's own patience."""
MASKED = ("sglang.mask_length", "sglang.mask_tokens", "sglang.mask_logprobs")
"""Parts of the metadata that a request with a sampling mask needs."""
_ROOMS = 1, (1 << 63) - 1
"""The lowest and the highest room; 0 is what SGLang reads where a request's metadata has not come."""
_IDS = 1 << 32
"""Token ids of a model whose vocabulary SGLang does not say."""
_ELASTIC = re.compile(r"(^|\|)elastic_ep_size=\d+$")
"""The part of an `extra_key` that SGLang adds for the size of its expert parallel ranks, which changes no row."""
_GIVEN, _KEYS = "custom_params.kvproto", ("ticket", "first_token", "more")


def ticket_of(room: int, engine: str, replica: int = 0, deadline: float = DEADLINE) -> Ticket:
    """The ticket of a bootstrap room, the same for everybody who knows the room; raises LocalError(OUT_OF_RANGE).

    For a router that gives the room to SGLang and the ticket to another engine.
    """
    check_whole("bootstrap_room", room, *_ROOMS)
    key = hashlib.sha256(b"kvproto sglang room" + room.to_bytes(8, "little")).digest()[:16]
    return attrs.evolve(new_ticket(engine, replica, deadline), key=key)


@attrs.frozen
class Asked:
    """The hand-over that one request asks for.

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


def asked_of(request: Any, adapters: Iterable[Any] = ()) -> Asked:
    """Read a request of SGLang; raises KvprotoError for what cannot be handed over.

    `adapters` are SGLang's references to those that it was started with (`--lora-paths`).
    """
    check_whole("bootstrap_room", request.bootstrap_room, *_ROOMS)
    if getattr(request, "input_embeds", None) is not None:
        raise _bad("input_embeds", "a prompt of tokens", "embeddings")
    params = getattr(request.sampling_params, "custom_params", None)
    given = params.get("kvproto") if isinstance(params, Mapping) else None
    if given is None:
        given = {}
    check_type(_GIVEN, given, Mapping, '{"ticket": ..., "first_token": ..., "more": ...}')
    if unknown := sorted(map(str, given.keys() - set(_KEYS))):  # names alone: a value may be a ticket, which is secret
        raise _bad(_GIVEN, f"the names {', '.join(_KEYS)}", ", ".join(unknown)[:80])
    token, more, ours = given.get("first_token"), given.get("more", []), request.origin_input_ids
    ticket, last = given.get("ticket"), (request.vocab_size or _IDS) - 1
    check_type(f"{_GIVEN}.more", more, list, "a list of token ids")
    for name, found in (("first_token", [] if token is None else [token]), ("more", more)):
        for each in found:
            check_whole(f"{_GIVEN}.{name}", each, 0, last)
    masks = MASKED if getattr(request, "return_sampling_mask", False) else ()
    needs = (*(("logprob", "sglang.top_logprobs") if request.return_logprob else ()), *masks)
    adapter, place = _adapter(request, adapters)
    prompt = Prompt([*ours, *more], adapter, _salts(request, place))
    return Asked(prompt, len(ours), None if ticket is None else read_ticket(ticket), token, needs)


def _adapter(request: Any, adapters: Iterable[Any]) -> tuple[str, str | None]:
    """The name of a request's LoRA adapter and its folder; SGLang's request has an id."""
    if (wanted := getattr(request, "lora_id", None)) is None:
        return "", None
    for each in adapters:
        if each.lora_id == wanted:
            return each.lora_name, each.lora_path
    raise _bad("lora_id", "an adapter of --lora-paths", "one that was loaded since, whose weights are not known here")


def _salts(request: Any, adapter: str | None) -> list[bytes]:
    """Digests of all that SGLang's keys of pages have beside tokens: adapter, `extra_key` and `cache_salt`."""
    own = _ELASTIC.sub("", getattr(request, "extra_key", None) or "").removesuffix(
        getattr(request, "lora_id", None) or ""
    )
    key = [hashlib.sha256(b"sglang extra_key 1\0" + own.encode(errors="surrogatepass")).digest()] if own else []
    return salts_of(adapter, key, getattr(request, "cache_salt", None))


def _bad(path: str, mine: str, yours: str) -> KvprotoError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, yours, "see docs/sglang-reference.md")
