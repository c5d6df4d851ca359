"""`kv_transfer_params` of a request: who computes it, who fetches it, and by which ticket.

to prefill      {"do_remote_decode": true}                    or with "ticket", made beforehand
from prefill    {"do_remote_prefill": true, "ticket": {...}}  what a proxy hands to decode as it is
to decode       the same
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, LocalError, Prompt, Ticket, read_ticket, write_ticket
from kvproto.errors import ErrorCode, type_name
from kvproto_engines.apart import salts_of

__all__ = ["Asked", "answer", "check_ours", "prompt_of", "read_params", "shorten"]


_FLAGS = "do_remote_decode", "do_remote_prefill"


@attrs.frozen
class Asked:
    """The wishes of a request to this engine.

    Fields:
        prefill: Whether its pages are to be handed over; if not, they are to be fetched. None: neither, and `error`
            says which parameter has no effect.
        ticket: As it came; None: make one.
        error: Why it cannot be done.
    """

    prefill: bool | None
    ticket: Ticket | None = None
    error: KvprotoError | None = None


def read_params(params: Any, producer: bool, consumer: bool) -> Asked | None:
    """Read the wishes in these parameters; None for an ordinary request. Values that a user made up never raise."""
    if not isinstance(params, Mapping):
        return None
    prefill, decode = (params.get(name) is True for name in _FLAGS)
    if prefill == decode:
        given = [f"{name} ({type_name(params[name])})" for name in (*_FLAGS, "ticket") if params.get(name)]
        error = _bad(f"one of {' and '.join(_FLAGS)} to be true", ", ".join(given))
        return Asked(prefill or None, error=error) if given else None
    try:
        ticket = read_ticket(params["ticket"]) if params.get("ticket") is not None else None
    except KvprotoError as error:
        return Asked(prefill, error=error)
    if not (producer if prefill else consumer):
        here, asked = ("decodes", "do_remote_decode") if prefill else ("prefills", "do_remote_prefill")
        return Asked(prefill, error=_bad(f"what an engine that only {here} can do, as kv_role says", asked))
    if not prefill and ticket is None:
        return Asked(False, error=_bad("the ticket that the prefill engine gave, or one made beforehand", "none"))
    return Asked(prefill, ticket)


def check_ours(ticket: Ticket, engine: str, replica: int) -> None:
    """Raise LocalError(WRONG_PEER) for a ticket of another engine or replica, which this one does not hand over."""
    if (ticket.engine, ticket.replica) != (engine, replica):
        mine, yours = f"{engine} replica {replica}", f"{ticket.engine} replica {ticket.replica}"
        raise LocalError(ErrorCode.WRONG_PEER, "ticket", mine, yours, "send the request to the engine of its ticket")


_PROMPTLY = 5000
"""Milliseconds in which an engine that has computed a prompt answers whoever brings its ticket, unless it is gone."""


def answer(ticket: Ticket) -> dict[str, Any]:
    """The answer of a prefill engine: the parameters of the request to the decode engine.

    The ticket's deadline is for whoever brings it: it tells a prefill engine that is slow from one that died since.
    """
    promptly = attrs.evolve(ticket, deadline=min(ticket.deadline, _PROMPTLY))
    return {"do_remote_prefill": True, "do_remote_decode": False, "ticket": write_ticket(promptly)}


def prompt_of(request: Any, only: bool = False) -> Prompt:
    """The prompt of both engines: tokens, LoRA adapter, images and `cache_salt`, as vLLM's block hashes have them.

    Raises LocalError for embeddings, and for an adapter that cannot be read.

    `only`: and for a request that is decoded on, whose window leaves blocks, and whose states change, before they are
    read.
    """
    if only and (request.max_tokens or 0) > 1:
        raise _bad("max_tokens of 1, as this model has sliding windows or states", str(request.max_tokens))
    if request.prompt_token_ids is None:
        raise _bad("a prompt of tokens", "one of embeddings")
    adapter, seen = request.lora_request, getattr(request, "mm_features", None) or ()
    images = [hashlib.sha256(f"{f.modality}:{f.identifier}".encode(errors="surrogatepass")).digest() for f in seen]
    salts = salts_of(adapter and adapter.lora_path, images, getattr(request, "cache_salt", None))
    return Prompt(request.prompt_token_ids, adapter.lora_name if adapter is not None else "", salts)


def shorten(request: Any) -> None:
    """Take the last token from vLLM's request: what is computed is then what whoever samples from that token needs.

    What this engine samples follows the token before; whoever asked for one token and a ticket does not use it.
    """
    request.prompt_token_ids = list(request.prompt_token_ids[:-1])
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1


def _bad(mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, "kv_transfer_params", mine, yours, "see docs/vllm-reference.md")
