"""The scheduler's side: which requests are handed over and fetched, and what workers have to do in each step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, LocalError, Prompt, Ticket, new_ticket
from kvproto.errors import ErrorCode
from kvproto_engines.orders import Computed, Load, Orders, Tables
from kvproto_engines.settings import kept
from kvproto_vllm.hints import Hints
from kvproto_vllm.params import answer, check_ours, prompt_of, read_params, shorten
from kvproto_vllm.settings import Settings

__all__ = ["Scheduling"]

logger = logging.getLogger("vllm.kvproto")

_ENDED = [0]
"""The prompt of a request that vLLM makes up and aborts, with the parameters of one that it has refused or failed.

The source cannot be told by it: it would refuse the ticket, as this is not the prompt (KVP-TKT-CONTENT).
"""


class Holds:
    """References to blocks that sinks may read, beside those of their requests: vLLM reuses none of these blocks.

    vLLM holds the blocks of a request that is over until workers say that it is sent, but not those of one that it
    preempts, nor those that a sliding window leaves.
    """

    def __init__(self, workers: int = 1) -> None:
        """`workers` have to say of a preemption that nobody reads its blocks."""
        self._workers = workers
        self._pool: Any = None
        self._of: dict[str, dict[int, Any]] = {}
        """Blocks by id, of each request that is handed over."""
        self._preempted: dict[int, list[Any]] = {}
        """Blocks by the number of a preemption."""
        self._free, self._busy = Counter[int](), set[int]()
        self._numbers = 0

    def bind(self, pool: Any) -> None:
        """Hold blocks of this BlockPool of vLLM."""
        self._pool = pool

    def add(self, name: str, tables: Tables) -> None:
        """Hold the blocks of a request."""
        if self._pool is None:
            return
        held = self._of.setdefault(name, {})
        every = (self._pool.blocks[block] for table in tables for block in table if block not in held)
        new = {each.block_id: each for each in every if not each.is_null}
        self._pool.touch(list(new.values()))
        held |= new

    def preempted(self, name: str) -> int:
        """Hold the blocks of a request whose own references are gone; the number of the preemption."""
        self._numbers += 1
        if blocks := self._of.pop(name, None):
            self._preempted[self._numbers] = list(blocks.values())
        return self._numbers

    def told(self, free: Mapping[int, int], busy: Mapping[int, int]) -> None:
        """Give back blocks of preemptions of which as many workers as there are have said that nobody reads them."""
        self._busy |= busy.keys()
        self._free.update(free)
        for number in [number for number in free if self._free[number] >= self._workers]:
            del self._free[number]
            self._busy.discard(number)
            self._give_back(self._preempted.pop(number, []))

    def sent(self, names: Iterable[str]) -> None:
        """Give back blocks of requests that workers have sent, or will not send."""
        for name in names:
            self._give_back(list(self._of.pop(name, {}).values()))

    def _give_back(self, blocks: list[Any]) -> None:
        if blocks:
            self._pool.free_blocks(blocks[::-1])  # as vLLM does: the tail is evicted first

    @property
    def pending(self) -> bool:
        """Whether blocks of a preempted request are likely to come back with the next step of the workers."""
        unheard = [blocks for blocks in self._of.values() if blocks and blocks[next(reversed(blocks))].ref_cnt == 1]
        return bool(unheard) or bool(self._preempted.keys() - self._busy)


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
        states: bool = False, early: bool = True, workers: int = 1, recomputes: bool = False,
    ) -> None:  # fmt: skip
        """`windows`: the engine gives up blocks that a sliding window has left. `states`: some layers have states.

        `early`: chunks are handed over while later ones are computed, as the engine waits a step for blocks that are
        held rather than preempting one request after another. `recomputes`: it computes prompts whose loads fail, so
        that it may follow hints.
        """
        self.holds, self._early = Holds(workers), early
        self._settings, self._replica, self._roles = settings, replica, (producer, consumer)
        self._only, self._states = windows or states, states
        self._hints = Hints(settings.sources) if consumer and recomputes else None
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._orders = Orders()

    def arrived(self, request: Any) -> None:
        """A request is new: workers answer sinks that come before it is computed."""
        asked = read_params(request.kv_transfer_params, *self._roles)
        if asked is None:
            self._advised(request)
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
            ticket = ticket and kept(ticket, self._settings.deadline)
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

    def _advised(self, request: Any) -> None:
        """A router's hint says where the pages of a prompt are: fetch them, if it can be followed."""
        hint = None if self._hints is None else self._hints.read(getattr(request, "kv_hints", None))
        if hint is None:
            return
        name, tokens = request.request_id, min(hint.tokens or request.num_prompt_tokens, request.num_prompt_tokens)
        try:
            if self._states and tokens < request.num_prompt_tokens:
                raise LocalError(ErrorCode.STATE_POSITION, "tokens", "all of the prompt, for states", str(tokens))
            whole = prompt_of(request)
            prompt = Prompt(request.prompt_token_ids[:tokens], whole.adapter, whole.salts)
            self._receives[name] = _Receive((kept(hint.ticket, self._settings.deadline), prompt), "")
        except KvprotoError as refusal:
            logger.warning("the hint of request %s is not followed: %s", name, refusal)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens to fetch beyond those that this engine has, and whether between steps; no side effects.

        The last token of the prompt is left to this engine, which samples from it.
        """
        receive = self._receives.get(request.request_id)
        wanted = _last(request, receive) - computed
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
            tokens = _last(request, receive)
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
                if send.over or self._early:
                    blocks = tables(name)
                    if send.over or not send.made:  # a sink may have the ticket, or will soon
                        self.holds.add(name, blocks)
                    self._orders.computed.append(Computed(name, tokens, blocks, send.over))
        made, self._orders = self._orders, Orders()
        return made

    def _preempted(self, name: str) -> None:
        """Blocks of a request are reused: a ticket that nobody has yet is replaced, another is lost."""
        send = self._sends.get(name)
        if send is None or not send.tokens or send.lost:
            return
        self._orders.preempted[self.holds.preempted(name)] = name
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


def _last(request: Any, receive: _Receive | None) -> int:
    """The token up to which a request is fetched: all but the last of its prompt, or what the ticket is for."""
    most: int = request.num_prompt_tokens - 1
    return most if receive is None or receive.wanted is None else min(most, len(receive.wanted[1]))


def _scheduled(step: Any) -> Iterator[tuple[str, int]]:
    """Requests that a step computes, and how many of their tokens were computed before."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = step.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
