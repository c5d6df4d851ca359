"""KV hints, which a router attaches to a request of vLLM (`kv_hints`): the action `kv.fetch`, where it has a ticket.

    {"protocol_version": "0.1", "message_id": ..., "actions": [{"action_id": ..., "action_type": "kv.fetch",
     "action_version": "1.0", "payload": {"source_control_endpoint": "tcp://prefill:7100", "block_hashes": [...],
                                          "ticket": {...}, "tokens": 4096}}]}

The router has asked the source for the same tokens by the same ticket. A hint is advice: one that cannot be followed is
logged, and the prompt is computed here. Hashes are of the source's blocks, which may be of another size: they are left
unread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, Seed, Ticket, read_ticket
from kvproto_discovery import FoundSources

__all__ = ["Hint", "Hints"]

logger = logging.getLogger("vllm.kvproto")

_PROTOCOL, _ACTION, _VERSION = "0.1", "kv.fetch", "1"
"""Versions are of the envelope, and the major one of the action."""
_MOST = 100
"""The most reasons that are logged."""


@attrs.frozen
class Hint:
    """A fetch to which a router advises: the first `tokens` tokens of the prompt (None: all) by a ticket."""

    ticket: Ticket
    tokens: int | None


class Hints:
    """The reader of an engine's hints. Nothing that a router made up raises."""

    def __init__(self, sources: Mapping[tuple[str, int], Seed]) -> None:
        """A source is one of `sources`, at the address that is stated there: no other is ever dialled."""
        self._sources = sources
        self._said: set[str] = set()

    def read(self, envelope: Any) -> Hint | None:
        """The first action that can be followed; None where there is none."""
        if envelope is None:
            return None
        if (version := _of(envelope, "protocol_version")) != _PROTOCOL:
            self._say(f"of protocol_version {_PROTOCOL}, not {_short(version)}")
            return None
        actions = _of(envelope, "actions")
        for action in actions if isinstance(actions, list | tuple) else ():
            if _of(action, "action_type") != _ACTION:
                continue  # of another component
            if (reason := next(_refusals(action, self._sources), None)) is None:
                payload = _of(action, "payload")
                return Hint(read_ticket(payload["ticket"]), payload.get("tokens"))
            self._say(reason)
        return None

    def _say(self, reason: str) -> None:
        """Log a reason once, as a router sends such hints with each request."""
        if reason not in self._said and len(self._said) < _MOST:
            self._said.add(reason)
            logger.warning("a KV hint is not followed, and its prompt is computed here; followed are hints %s", reason)


def _refusals(action: Any, sources: Mapping[tuple[str, int], Seed]) -> Iterator[str]:
    """Reasons for which this action is not followed."""
    version, payload = _of(action, "action_version"), _of(action, "payload")
    if not isinstance(version, str) or version.partition(".")[0] != _VERSION:
        yield f"{_ACTION} of version {_VERSION}, not {_short(version)}"
    if not isinstance(payload, Mapping):
        yield "with an object as payload"
        return
    if payload.get("mode", "copy") != "copy" or "no_retain" in payload:
        yield "of mode copy, which leaves the source its pages"
    if payload.get("ticket") is None:
        yield "with the ticket by which the source was asked for the same tokens"
        return
    tokens = payload.get("tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        yield f"with a number of tokens, not {_short(tokens)}"
    try:
        ticket = read_ticket(payload["ticket"])
    except KvprotoError as error:
        yield f"with a ticket that can be read: {error}"
        return
    seed, place = sources.get((ticket.engine, ticket.replica)), payload.get("source_control_endpoint")
    if isinstance(sources, FoundSources):  # which the worker follows: its Sink refuses an engine that it does not know
        return
    if seed is None or place not in (None, seed.address):
        yield f"of an engine in `sources` at its address there, not {_short(place or ticket.engine)}"


def _of(value: Any, name: str) -> Any:
    """A field of vLLM's own structures, or of an object in JSON."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _short(value: Any) -> str:
    return repr(value)[:80]
