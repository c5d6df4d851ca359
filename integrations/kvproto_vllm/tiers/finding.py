"""The scheduler's side of the tiers: which prompts workers look for, what is loaded, and what is kept.

A request is looked for when it comes, so that storage is read while it waits. Each worker says how many of its pages
are on its host; what all have is loaded between steps. Pages are kept as steps complete them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs

from kvproto import LocalError
from kvproto_engines.apart import names_of
from kvproto_engines.orders import Tables
from kvproto_engines.settings import refuse
from kvproto_engines.tiers import Tiered, read
from kvproto_vllm.settings import WHERE

__all__ = ["Finding", "Found", "Keep", "Look", "Place", "TierOrders", "TierSettings"]

Found = dict[str, tuple[int, int]]
"""By request, how many pages workers have, and how many workers say so."""
_WRITES = ("write_through", "write_through_selective")
_PREFETCHES = ("best_effort", "wait_complete", "timeout")


@attrs.frozen(kw_only=True)
class TierSettings(Tiered):
    """The settings of one engine; policies and bounds are called as in SGLang's HiCache.

    Fields:
        host_bytes: Memory of the host for pages, of each rank.
        write_policy: Whether a page is kept when it was computed, or once a second request has found it.
        prefetch_policy: Whether a request takes what has come when its turn does, waits for all, or for a time.
        prefetch_threshold: Tokens of a prompt below which it is not looked for.
        prefetch_timeout_base: Seconds that storage may take, with `timeout`.
        prefetch_timeout_per_ki_token: And more seconds for each 1,024 tokens.
    """

    host_bytes: int = 1 << 30
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25

    @classmethod
    def of(cls, given: Any) -> TierSettings:
        """Raises LocalError naming the setting that is unknown, missing or wrong."""
        sizes = ("most", "host_bytes", "prefetch_threshold")
        made: TierSettings = read(WHERE, cls, given, sizes, ("prefetch_timeout_base", "prefetch_timeout_per_ki_token"))
        if made.write_policy == "write_back":
            advice = "choose one of these: vLLM does not say which block it is about to give up"
            raise refuse(WHERE, "write_policy", " or ".join(_WRITES), made.write_policy, advice)
        for name, known in (("write_policy", _WRITES), ("prefetch_policy", _PREFETCHES)):
            if (found := getattr(made, name)) not in known:
                raise refuse(WHERE, name, " or ".join(known), repr(found), "leave it out")
        return made

    def patience(self, tokens: int) -> float:
        """Seconds that storage may take for a prompt."""
        if self.prefetch_policy == "timeout":
            return self.prefetch_timeout_base + tokens / 1024 * self.prefetch_timeout_per_ki_token
        return float("inf")


@dataclass
class Look:
    """Look for the pages of a prompt, which have these `names` beside those of the models."""

    request: str
    tokens: list[int]
    names: dict[str, str]


@dataclass
class Place:
    """Load pages of a prompt, from page `first` on, into these blocks."""

    request: str
    first: int
    blocks: list[int]


@dataclass
class Keep:
    """After this step the first pages of a request are in these blocks; `tokens` follow the known ones."""

    request: str
    tokens: list[int]
    blocks: list[int]
    names: dict[str, str]


@dataclass
class TierOrders:
    """Of one step.

    Fields:
        hurried: Requests whose turn has come: take what has been read of them.
        dropped: Requests into whose blocks nothing is to be loaded any more.
        over: Requests that have ended.
    """

    looks: list[Look] = field(default_factory=list)
    hurried: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)


@attrs.define
class _Known:
    """A request.

    Fields:
        looked: Tokens that are read, or held on hosts, until they are loaded or dropped.
        names: The adapter and the tenant.
        found: Pages that all workers have on their hosts, until they are loaded or dropped; None: not known yet.
        answers: Workers that have said what they have, and the fewest pages.
        settled: Whether nothing more is to be loaded.
        told: Tokens that workers know.
        kept: Pages that need not be kept; None: before its first step.
    """

    request: Any
    names: dict[str, str]
    looked: int = 0
    found: int | None = None
    answers: tuple[int, int] = (0, 1 << 30)
    hurried: bool = False
    settled: bool = False
    told: int = 0
    kept: int | None = None


class Finding:
    """Of one engine, with blocks of `page` tokens and so many `workers`."""

    def __init__(self, settings: TierSettings, page: int, workers: int, ahead: bool, most: int) -> None:
        """`ahead`: rows of a draft depend on the next token. `most` tokens are read or held on hosts at once."""
        self._settings, self._page, self._workers, self._ahead = settings, page, workers, int(ahead)
        self._most = most
        self._known: dict[str, _Known] = {}
        self._orders = TierOrders()

    def arrived(self, request: Any) -> None:
        """A request is new: look for its pages while it waits."""
        if (names := _names(request)) is not None:
            settled = bool(request.skip_reading_prefix_cache)
            known = self._known[request.request_id] = _Known(request, names, settled=settled)
            self._look(known)

    def _look(self, known: _Known) -> None:
        """Unless its prompt is too short, or too much is being read."""
        request = known.request
        wanted = len(request.all_token_ids) - 1
        if known.settled or wanted < max(self._settings.prefetch_threshold, self._page):
            known.settled = True
            return
        reading = sum(each.looked for each in self._known.values())
        if not reading or reading + wanted <= self._most:
            known.looked = wanted
            self._orders.looks.append(Look(request.request_id, self._tokens(known), known.names))

    def _tokens(self, known: _Known) -> list[int]:
        """Requests that workers do not know yet."""
        tokens = list(known.request.all_token_ids[known.told :])
        known.told += len(tokens)
        return tokens

    def answered(self, found: Found) -> None:
        """Workers have said what they have."""
        for name, (pages, workers) in found.items():
            if (known := self._known.get(name)) is not None:
                count, least = known.answers
                known.answers = count + workers, min(least, pages)
                if known.answers[0] == self._workers:
                    known.found = known.answers[1]

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond those that this engine has, and whether between steps; None: not known yet."""
        known = self._known.get(request.request_id)
        if known is None or known.settled:
            return 0, False
        if computed >= self._loadable(request) * self._page:  # the device has all, so that no answer is waited for
            self._settle(known)
            return 0, False
        if not known.looked:
            self._look(known)
            if not known.looked:  # what may be read at once is being read
                known.settled = True
                return 0, False
        if known.found is None:
            if self._settings.prefetch_policy == "best_effort" and not known.hurried:
                known.hurried = True
                self._orders.hurried.append(request.request_id)
            return None, False
        wanted = self._usable(known) * self._page - computed
        if wanted < 1:
            self._settle(known)
            return 0, False
        return wanted, True

    def _usable(self, known: _Known) -> int:
        """Pages that were found and may be loaded."""
        return min(known.found or 0, self._loadable(known.request))

    def _loadable(self, request: Any) -> int:
        """Pages of a prompt without its last token, from which the engine samples."""
        return (len(request.all_token_ids) - 1) // self._page

    def _settle(self, known: _Known) -> None:
        """Load nothing more, and have workers drop what they look for, if they were told to look."""
        known.settled, known.found, known.looked = True, None, 0
        name, looks = known.request.request_id, self._orders.looks
        untold = [look for look in looks if look.request == name]
        if not untold:
            self._orders.dropped.append(name)
        for look in untold:
            known.told -= len(look.tokens)
            looks.remove(look)

    def allocated(self, request: Any, tables: Tables, external: int) -> None:
        """The request has its blocks: load so many tokens, the last of the found ones."""
        known = self._known.get(request.request_id)
        if known is None or known.settled or known.found is None:
            return
        if not external:  # another connector loads
            self._settle(known)
            return
        last = self._usable(known)
        first = last - external // self._page
        self._orders.places.append(Place(request.request_id, first, list(tables[0][first:last])))
        known.settled, known.found, known.looked = True, None, 0

    def orders(self, step: Any, tables: Callable[[str], Tables]) -> TierOrders:
        """The work of workers in a step; `tables` gives the blocks of a request."""
        new = {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        for name, before in {**new, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}.items():
            if (known := self._known.get(name)) is not None:
                self._keep(known, before, before + step.num_scheduled_tokens.get(name, 0), tables)
        made, self._orders = self._orders, TierOrders()
        return made

    def _keep(self, known: _Known, before: int, after: int, tables: Callable[[str], Tables]) -> None:
        """Keep what a step completes; what it computes of tokens that a draft proposed may be refused."""
        request, page = known.request, self._page
        rows = min(after, max(request.num_prompt_tokens, len(request.all_token_ids) - 1))
        pages = min(rows, len(request.all_token_ids) - self._ahead) // page
        if self._settings.write_policy == "write_through_selective":
            pages = before // page if known.kept is None else 0  # which an earlier request has computed
            known.kept = known.kept or 0
        elif known.kept is None:
            known.kept = before // page
        if pages > known.kept:
            known.kept = pages
            keep = Keep(
                request.request_id, self._tokens(known), list(tables(request.request_id)[0][:pages]), known.names
            )
            self._orders.keeps.append(keep)

    def finished(self, request: Any) -> None:
        """A request is over."""
        if self._known.pop(request.request_id, None) is not None:
            self._orders.over.append(request.request_id)


def _names(request: Any) -> dict[str, str] | None:
    """The adapter and the tenant of a request; None if these and its tokens do not say all of its prompt."""
    plain = request.prompt_token_ids is not None and not getattr(request, "mm_features", None)
    if not plain or getattr(request, "prompt_embeds", None) is not None:
        return None
    try:
        return names_of(request.lora_request and request.lora_request.lora_path, request.cache_salt)
    except LocalError:  # vLLM cannot load such an adapter either
        return None


def merged(one: Mapping[str, tuple[int, int]], two: Mapping[str, tuple[int, int]]) -> Found:
    """The pages that two sets of workers have."""
    found = dict(one)
    for name, (pages, workers) in two.items():
        least, others = found.get(name, (pages, 0))
        found[name] = min(least, pages), others + workers
    return found
