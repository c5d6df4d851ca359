"""The choice of engines for a request: by load, and by the part of its prompt that they have already."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import zmq

from kvproto import Finder, KvprotoError

from ..demo.engines import Engines
from ..demo.router import EngineLine, Request, Router

_PAGE = 16
"""Tokens after which prefixes are remembered."""
_MOST = 65536
"""The most prefixes that are remembered."""
_UNMET = {
    "prefill": "no decode engine that takes requests has a session with it",
    "decode": "has a session with no prefill engine that takes requests",
    "engine": "has a session with no engine of the other role that takes requests",
}
"""The reason that an engine which takes requests gets none, by its role."""


class BalancedRouter(Router):
    """A router that sends each request to the engines with the least to do, less what they need not compute or fetch.

    What has to be done is counted in tokens: those of prompts that have not arrived, for prefill, and those of prompts
    and answers that are not over, for decode.
    """

    def __init__(
        self, folder: Path, prefill_name: str, prefill: int, decode: int, finder: Finder | None = None
    ) -> None:
        """As `Router` does; `finder` watches prefill engines that keep pages."""
        super().__init__(folder, prefill_name, Engines(), prefill, decode, lambda text: None)
        self._finder = finder
        self._bell: int | None = None
        self._seen: OrderedDict[bytes, str] = OrderedDict()
        """The decode engine that last had each prefix, the latest last."""

    def why(self) -> dict[str, str]:
        """The reason that each engine gets no requests; empty for those that do."""
        joined = {name for pair in self._pairs() if self._joined(pair) for name in pair}
        return {
            name: "" if name in joined
            else _UNMET[name.partition("-")[0]] if engine.takes
            else engine.said.format(path=engine.line.path)
            for name, engine in self._engines.items()
        }  # fmt: skip

    @property
    def open(self) -> bool:
        """Whether a request could be sent to any pair of engines now."""
        return any(self._joined(pair) for pair in self._pairs())

    def roles(self) -> dict[str, str]:
        """The role of each engine that can have several and has said which it has."""
        return {name: engine.role for name, engine in self._engines.items() if engine.role}

    def bell(self, descriptor: int) -> None:
        """Have a turn end when an eventfd becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)
        self._bell = descriptor

    def turn(self, on_news: Callable[[Request], None], patience: int) -> None:
        """Ask what waits, and wait up to `patience` milliseconds; raises EngineError for a misfit."""
        self._ask()
        self._turn(on_news, patience)
        if self._bell is not None:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def add(self, request: Request) -> None:
        """Take a request, to be asked in the next turn."""
        self.requests.append(request)

    def forget(self, request: Request) -> None:
        """Forget a request that is over, and note which decode engine has its rows."""
        self.requests.remove(request)
        if request.stats is not None:
            self._has(request.engines[1], request.prompt.tokens)

    def _has(self, name: str, tokens: list[int]) -> None:
        """Note that an engine has the rows of a text."""
        for digest in _prefixes(tokens):
            self._seen[digest] = name
            self._seen.move_to_end(digest)
        while len(self._seen) > _MOST:
            self._seen.popitem(last=False)

    def _lost(self, name: str, engine: EngineLine) -> None:
        """Ask again at once what a prefill engine that has gone has not handed over."""
        super()._lost(name, engine)
        for request in self.requests:
            if request.engines[:1] == (name,) and request.under_way:
                self._again(request, f"{name} is gone", "PEER_LOST")

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for here in range(self._replicas["prefill"]):
            for there in range(self._replicas["decode"]):
                yield f"prefill-{here}", f"decode-{there}"

    def _pair(self, request: Request) -> tuple[str, str] | None:
        pairs = [pair for pair in self._pairs() if self._joined(pair)]
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        left = dict.fromkeys(self._engines, 0)
        for other in self.requests:
            if other.id and not other.over:
                prompt = len(other.prompt.tokens)
                left[other.engines[0]] += 0 if other.arrived is not None else prompt
                left[other.engines[1]] += prompt + other.max_new - len(other.tokens)
        for name, tokens in (self._held(request) | self._cached(request)).items():
            left[name] -= tokens
        turn = request.number + request.tries
        return min(pairs, key=lambda pair: (left[pair[0]] + left[pair[1]], hash((pair, turn))))

    def _held(self, request: Request) -> dict[str, int]:
        """Tokens of the prompt that each prefill engine keeps, as far as they are known."""
        if self._finder is None:
            return {}
        try:
            return {f"prefill-{held.replica}": held.tokens for held in self._finder.find(request.prompt.tokens)}
        except KvprotoError:  # it is busy: the load alone decides
            return {}

    def _cached(self, request: Request) -> dict[str, int]:
        """Tokens of the prompt that the decode engine which had its longest known prefix may have yet."""
        found: dict[str, int] = {}
        for pages, digest in enumerate(_prefixes(request.prompt.tokens), 1):
            if (name := self._seen.get(digest)) is None:
                break
            found = {name: pages * _PAGE}
        return found


def _prefixes(tokens: list[int]) -> Iterator[bytes]:
    """A digest of each prefix of whole pages, the shortest first."""
    digest = sha256()
    for end in range(_PAGE, len(tokens) + 1, _PAGE):
        digest.update(repr(tokens[end - _PAGE : end]).encode())
        yield digest.digest()[:16]
