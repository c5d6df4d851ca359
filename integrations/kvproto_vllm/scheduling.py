"""The scheduler's side: which requests are handed over and fetched, and what workers have to do in each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvproto import KvprotoError, Prompt, Ticket, new_ticket
from kvproto_engines.orders import Computed, Load, Orders, Tables
from kvproto_engines.settings import kept
from kvproto_vllm.params import answer, check_ours, prompt_of, read_params, shorten
from kvproto_vllm.settings import Settings

__all__ = ["Scheduling"]

logger = logging.getLogger("vllm.kvproto")

_ENDED = [0]
"""The prompt of a request that vLLM makes up and aborts, with the parameters of one that it has refused or failed.

The source cannot be told by it: it would refuse the ticket, as this is not the prompt (KVP-TKT-CONTENT).
"""


@attrs.define
class _Send:
    """A request that is handed over.

    Fields:
        made: Whether the ticket is ours, so that nobody has it before the request is finished.
        end: Tokens to compute: with states all but the last, which cannot be taken back from a state.
        tokens: Computed so far, as workers were told.
        over: Whether prefill is.
        lost: Why it is not handed over after all.
    """

    ticket: Ticket
    prompt: Prompt
    made: bool
    end: int
    tokens: int = 0
    over: bool = False
    lost: str = ""


@attrs.define
class _Receive:
    """A request that is fetched, once, by its ticket and prompt; without them `error` says why it cannot be."""

    wanted: tuple[Ticket, Prompt] | None
    error: str
    asked: bool = False


class Scheduling:
    """Of one engine. What a request's parameters say never raises: it fails that request alone."""

    def __init__(
        self, settings: Settings, replica: int, producer: bool, consumer: bool, windows: bool = False,
        states: bool = False,
    ) -> None:  # fmt: skip
        """`windows`: the engine gives up blocks that a sliding window has left. `states`: some layers have states."""
        self._settings, self._replica, self._roles = settings, replica, (producer, consumer)
        self._only, self._states = windows or states, states
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._orders = Orders()

    def arrived(self, request: Any) -> None:
        """A request is new: workers answer sinks that come before it is computed."""
        asked = read_params(request.kv_transfer_params, *self._roles)
        if asked is None:
            return
        name, error, prompt = request.request_id, asked.error, None
        if asked.prefill is None:
            logger.warning("request %s is computed here: %s", name, error)
            return
        ticket, here = asked.ticket, self._settings.name
        try:
            prompt = prompt_of(request, only=asked.prefill and self._only)
            if asked.prefill and error is None:
                ticket = ticket or new_ticket(here, self._replica, self._settings.deadline)
                check_ours(ticket, here, self._replica)
                ticket = kept(ticket, self._settings.deadline)
        except KvprotoError as refusal:
            error = refusal
        wanted = (ticket, prompt) if error is None and ticket is not None and prompt is not None else None
        if not asked.prefill:
            self._receives[name] = _Receive(wanted, str(error or ""))
        if wanted is None:
            logger.error("request %s is not handed over: %s", name, error)
        elif asked.prefill:
            if self._states and request.num_prompt_tokens > 1:
                shorten(request)
            self._sends[name] = _Send(*wanted, asked.ticket is None, request.num_prompt_tokens)
            self._orders.requests[name] = wanted

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens to fetch beyond those that this engine has, and whether between steps; no side effects.

        The last token of the prompt is left to this engine, which samples from it.
        """
        wanted = request.num_prompt_tokens - 1 - computed
        receive = self._receives.get(request.request_id)
        if receive is None or receive.asked or wanted < 1:
            return 0, False
        return wanted, True

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request has its blocks: fetch `external` tokens into them; vLLM calls again when they are there."""
        name = request.request_id
        receive = self._receives.get(name)
        if receive is None or receive.asked:
            return
        receive.asked = True
        if not external:
            self._spare(name, receive)
        elif receive.wanted is None:
            self._orders.refused[name] = receive.error, blocks.get_block_ids()
        else:
            ticket, prompt = receive.wanted
            tokens = len(prompt) - 1
            load = Load(name, ticket, prompt, blocks.get_block_ids(), tokens - external, tokens)
            self._orders.loads.append(load)

    def _spare(self, name: str, receive: _Receive) -> None:
        """Tell the source that nothing of a request is needed, so that its blocks go free."""
        if receive.wanted is not None:
            ticket, prompt = receive.wanted
            self._orders.spared.append(Load(name, ticket, prompt, (), len(prompt), len(prompt)))

    def orders(self, step: Any, tables: Callable[[str], Tables]) -> Orders:
        """The work of workers in a step of vLLM's scheduler; `tables` gives the blocks of a request."""
        for name in sorted(step.preempted_req_ids or ()):
            self._preempted(name)
        for name, before in _scheduled(step):
            send = self._sends.get(name)
            if send is None or send.over or send.lost:
                continue
            tokens = min(before + step.num_scheduled_tokens.get(name, 0), send.end)
            if tokens > send.tokens:
                send.tokens, send.over = tokens, tokens == send.end
                self._orders.computed.append(Computed(name, tokens, tables(name), send.over))
        made, self._orders = self._orders, Orders()
        return made

    def _preempted(self, name: str) -> None:
        """Blocks of a request are reused: a ticket that nobody has yet is replaced, another is lost."""
        send = self._sends.get(name)
        if send is None or not send.tokens or send.lost:
            return
        self._orders.preempted.append(name)
        if send.made:
            ticket = new_ticket(self._settings.name, self._replica, self._settings.deadline)
            self._sends[name] = _Send(ticket, send.prompt, True, send.end)
            self._orders.requests[name] = ticket, send.prompt
        else:
            send.lost = "preempted"

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks are held, and what goes back to whoever sent it."""
        name = request.request_id
        receive = self._receives.pop(name, None)
        if receive is not None and receive.asked:
            self._orders.aborted.append(name)
        elif receive is not None and request.prompt_token_ids != _ENDED:
            self._spare(name, receive)
        send = self._sends.pop(name, None)
        if send is None:
            return False, None
        self._orders.held.append(name)
        if send.over and not send.lost:
            return True, answer(send.ticket)
        self._orders.failed[name] = send.lost or "the request ended before its prompt was computed"
        return True, None

    def taken(self, ranks: dict[str, tuple[int, ...]]) -> None:
        """Workers told which source ranks handed a request over."""
        self._orders.taken |= ranks


def _scheduled(step: Any) -> Iterator[tuple[str, int]]:
    """Requests that a step computes, and how many of their tokens were computed before."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = step.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
