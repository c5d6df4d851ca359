"""A small router: makes tickets, hands each prompt to both engines, collects their answers, and retries."""

import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import zmq

from kvproto import new_ticket, write_ticket

from ..errors import EngineError
from .control import Line
from .engines import Engines
from .prompts import Prompt

DEADLINE = 60.0
"""Seconds for which a ticket is valid."""
START = 60.0
"""Seconds that an engine which runs already may take to answer."""
LOAD = 900.0
"""Seconds that an engine may take to answer if it was just started and has to load its models."""
_TURN = 50
"""The most milliseconds that one turn waits."""
ENCODER = "encoder-0"
"""The engine that encodes images, if there is one."""
TRIES = 5
"""The most tickets that one request gets."""
AGAIN = {
    "ABORTED", "BUSY", "DEADLINE", "DRAINING", "NOT_ALLOWED", "PEER_LOST", "POOL_MOVED", "SUPERSEDED",
    "TRANSPORT_FAILED", "UNKNOWN_SESSION", "UNKNOWN_TICKET",
}  # fmt: skip
"""Codes after which a new ticket, or another engine, may succeed."""


@attrs.define(eq=False)
class Request:
    """One prompt, and what the engines have said of the present try; a failed try leaves only its reason."""

    number: int
    prompt: Prompt
    max_new: int
    id: str = ""
    """Names the try between router and engines, unlike any other router's; empty while the request waits."""
    engines: tuple[str, ...] = ()
    """The prefill and the decode engine of this try."""
    tries: int = 0
    lost: list[str] = attrs.Factory(list)
    """The reason why each earlier try failed."""
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[list[tuple[int, float]]] = attrs.Factory(list)
    """Of each token, as `engine.logprobs` has them, if the prompt's sampling asks for them."""
    arrived: list[dict[str, Any]] | None = None
    """For each decode rank: seconds, bytes by source rank, checksums by source rank and group."""
    rows: list[dict[str, Any]] = attrs.Factory(list)
    """The "rows" words, one for each encoder rank and each rank of prefill that it sent rows of images."""
    sent: list[dict[str, Any]] = attrs.Factory(list)
    """The "sent" words, one for each pair of ranks that copied."""
    freed: bool = False
    """Whether prefill has freed its pages."""
    left: bool = False
    """Whether decode has freed its pages, after its end or after a cancel."""
    orphan: bool = False
    """Whether prefill went away before it freed them, so that some "sent" words may be missing."""
    found: dict[str, dict[str, int]] = attrs.Factory(dict)
    """Tokens of the prompt that an engine which keeps pages found, by engine and by place."""
    cached: int = 0
    """Tokens of the prompt that decode had already."""
    stats: dict[str, Any] | None = None
    error: str | None = None
    code: str | None = None
    """The code of kvproto's with which it ended; None for an error of the engine's own."""
    at: dict[str, float] = attrs.Factory(dict)
    """Times at which this try was asked, and the last word of each op came, by time.monotonic."""

    def body(self, ticket: Any) -> dict[str, Any]:
        """The fields of the words with which both engines are asked."""
        prompt = self.prompt
        body = {"id": self.id, "ticket": ticket, "prompt": prompt.tokens, "max_new": self.max_new}
        how = {"sampling": attrs.asdict(prompt.sampling), "adapter": prompt.adapter, "cache_salt": prompt.cache_salt}
        return body | how

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return self.stats is not None or self.error is not None

    @property
    def replicas(self) -> tuple[int, int]:
        """The numbers of these engines."""
        here, there = map(_number, self.engines)
        return here, there

    @property
    def under_way(self) -> bool:
        """Whether it was asked and has not arrived at decode yet."""
        return bool(self.id) and self.arrived is None and not self.over


def _number(name: str) -> int:
    """The replica that an engine is, by its name."""
    return int(name.rpartition("-")[2])


@attrs.define(eq=False)
class EngineLine:
    """One engine as the router knows it."""

    line: Line
    there: bool = False
    """Whether it has said that it is ready, and is not lost since."""
    takes: bool = False
    """Whether it takes requests."""
    role: str = ""
    """The requests that it takes, if it can take others too: those of "prefill", of "decode" or of "both"."""
    sources: frozenset[int] = frozenset()
    """For decode, the prefill replicas that answer it."""
    said: str = "does not run: nothing listens at {path} (an engine that ended says why where it was started)"
    """The reason why it is not ready."""


class Router:
    """Sends each prompt to one prefill and one decode replica, in turn, and retries elsewhere if one of them fails."""

    def __init__(
        self,
        folder: Path,
        prefill_name: str,
        engines: Engines,
        prefill: int = 1,
        decode: int = 1,
        note: Callable[[str], None] = lambda text: None,
        encoder: bool = False,
    ) -> None:
        """Connect to the engines in `folder`; `note` is called with a sentence when one comes, goes or loses something.

        `prefill` and `decode` are the numbers of replicas; `encoder` says whether there is one for images.
        """
        self._replicas = self._counts(prefill, decode)
        names = [f"{role}-{replica}" for role, count in self._replicas.items() for replica in range(count)]
        names += [ENCODER] if encoder else []
        self._engines = {name: EngineLine(Line(folder, name)) for name in names}
        self._poller = zmq.Poller()
        for engine in self._engines.values():
            self._poller.register(engine.line.socket, zmq.POLLIN)
            self._poller.register(engine.line.monitor, zmq.POLLIN)
        self._prefill_name, self._processes, self._note = prefill_name, engines, note
        self.requests: list[Request] = []
        self.plans: dict[int, dict[str, Any]] = {}
        """The plan of each decode replica with a prefill replica, in its words; all of these are alike."""
        self.settled: dict[tuple[str, int], dict[str, Any]] = {}
        """The last "settled" word by engine and rank: how many requests have left pages that are stored now."""
        self._told = time.monotonic()
        """The time at which an engine last said something about a request, by time.monotonic."""

    def _counts(self, prefill: int, decode: int) -> dict[str, int]:
        """The number of engines of each name."""
        return {"prefill": prefill, "decode": decode}

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the first decode replica."""
        return self.plans[min(self.plans)]

    @property
    def several(self) -> bool:
        """Whether a side has more than one replica."""
        return any(count > 1 for count in self._replicas.values())

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The "sent" words of all requests, without those of failed tries."""
        return [word for request in self.requests for word in request.sent]

    def takes(self, name: str) -> bool:
        """Whether an engine takes requests."""
        return self._engines[name].takes

    def wait_ready(self, patience: float, hint_after: float = 3.0) -> None:
        """Wait until all engines are ready; raises EngineError after `patience` seconds.

        After `hint_after` seconds, note once which engines are missing.
        """
        until, hint = time.monotonic() + patience, time.monotonic() + hint_after
        while missing := self._missing():
            self._turn(lambda request: None)
            if time.monotonic() > until:
                raise EngineError(f"not ready in {patience:g} s: {self._why(missing)}")
            if time.monotonic() > hint:
                self._note(f"waiting: {self._why(missing)}")
                hint = until

    def _missing(self) -> list[str]:
        """Engines that take no requests, or are connected to too few others."""
        return [n for n, e in self._engines.items() if not e.takes or len(e.sources) < self._needs(n)]

    def _why(self, names: list[str]) -> str:
        engines = [self._engines[name] for name in names]
        return "; ".join(f"{n} {e.said.format(path=e.line.path)}" for n, e in zip(names, engines, strict=True))

    def _needs(self, name: str) -> int:
        return self._replicas["prefill"] if name.startswith("decode") else 0

    def submit(self, prompts: list[Prompt], max_new: int) -> None:
        """Ask for up to `max_new` tokens of each prompt."""
        self.requests += [Request(number, p, max_new) for number, p in enumerate(prompts, len(self.requests))]
        self._ask()

    def cancel(self, request: Request) -> None:
        """Give up a request that its client does not want any more, wherever it is: both engines free its pages.

        `freed` and `left` say when they have.
        """
        if not request.over:
            request.error = "cancelled"
            self._drop(request)

    def collect(
        self, on_news: Callable[[Request], None], on_turn: Callable[[], bool] = lambda: True, turn: int = _TURN
    ) -> None:
        """Wait until every request is over, prefill has freed its pages, and `on_turn` returns True.

        `on_news` is called with each request that has changed, and `on_turn` every `turn` milliseconds at least. Raises
        EngineError if nothing happens in time.
        """
        self._told = time.monotonic()
        while not on_turn() or not all(r.over and (r.freed or r.error) for r in self.requests):
            self._turn(on_news, turn)
            if time.monotonic() > self._told + DEADLINE + 30:
                why = self._why(self._missing()) or "all engines answer"
                raise EngineError(f"the requests were not over in time: {why}")

    def _turn(self, on_news: Callable[[Request], None], patience: int = _TURN) -> None:
        for name, word in self._listen(patience):
            self._take(name, word, on_news)
        self._processes.check()
        self._ask()

    def _ask(self) -> None:
        """Send each waiting request, with a new ticket, to a pair of engines, if one takes requests."""
        for request in self.requests:
            if request.id or request.over or not (pair := self._pair(request)):
                continue
            request.id, request.engines, request.tries = secrets.token_hex(8), pair, request.tries + 1
            request.at["asked"] = time.monotonic()
            ticket = new_ticket(self._prefill_name, replica=_number(pair[0]), deadline=DEADLINE)
            prompt, body = request.prompt, request.body(write_ticket(ticket))
            if request.lost:
                self._note(f"{prompt.name!r} is asked again, with a new ticket")
            rows = self._encode(request) if prompt.images else {}
            for name, op in zip(pair, ("prefill", "decode"), strict=True):
                self._engines[name].line.send(op, **body, **rows)
                rows.pop("rows", None)  # decode fetches none

    def _encode(self, request: Request) -> dict[str, Any]:
        """Show a request's images to the encoder; returns their digests, and prefill's ticket for what it makes."""
        prompt, ticket = request.prompt, write_ticket(new_ticket("encoder", deadline=DEADLINE))
        images = [image.to_word() for image in prompt.images]
        word = {"id": request.id, "ticket": ticket, "prompt": prompt.tokens, "images": images}
        self._engines[ENCODER].line.send("encode", **word)
        return {"images": [image.digest.hex() for image in prompt.images], "rows": ticket}

    def _pair(self, request: Request) -> tuple[str, str] | None:
        """A prefill and a decode engine that take requests and are connected; turn by turn, another pair is first."""
        turn = request.number + request.tries
        if not all(engine.takes for name, engine in self._engines.items() if name == ENCODER):
            return None
        again = turn // math.lcm(*self._replicas.values())  # how often the pairs would have been the same before
        first = {"prefill": turn, "decode": turn + again}
        prefills, decodes = ([(first[role] + i) % n for i in range(n)] for role, n in self._replicas.items())
        for here in prefills:
            for there in decodes:
                if self._joined(names := (f"prefill-{here}", f"decode-{there}")):
                    return names
        return None

    def _joined(self, names: tuple[str, str]) -> bool:
        """Whether both engines take requests, and decode can fetch from this prefill."""
        source, sink = (self._engines[name] for name in names)
        return source.takes and sink.takes and _number(names[0]) in sink.sources

    def _take(self, name: str, word: dict[str, Any], on_news: Callable[[Request], None]) -> None:
        engine = self._engines[name]
        match word["op"]:
            case "fatal":
                raise EngineError(word["error"])
            case "ready":
                self._ready(name, engine, word)
            case "settled":
                self.settled[name, word["rank"]] = word
            case "draining":
                engine.takes = False
                self._note(f"{name} drains: it finishes what it serves and takes nothing new")
            case "lost":
                self._lost(name, engine)
            case "peer" if self.requests and word["event"] in _SAYS:
                self._note(_SAYS[word["event"]].format(**{"error": "", **word, "name": f"{name} rank {word['rank']}"}))
            case _:
                request = self._request(word.get("id"))
                if request is not None and self._of(
                    name, request, word
                ):  # None: a try that failed, or another router's
                    on_news(request)

    def _request(self, id: str | None) -> Request | None:
        """The request of which this is the present try."""
        return next((r for r in self.requests if r.id and r.id == id), None)

    def _ready(self, name: str, engine: EngineLine, word: dict[str, Any]) -> None:
        was = engine.takes and len(engine.sources) >= self._needs(name)
        engine.there = engine.takes = True
        engine.sources, engine.role = frozenset(word.get("sources", ())), word.get("role", "")
        if name.startswith("decode"):
            engine.said = "runs, and no prefill engine answers it"
            if "plan" in word:
                self.plans[_number(name)] = {k: v for k, v in word.items() if k not in ("op", "sources")}
        if self.requests and not was and len(engine.sources) >= self._needs(name):
            self._note(f"{name} takes requests")

    def _lost(self, name: str, engine: EngineLine) -> None:
        """An engine went away. Decode reports what it lost with a prefill engine, but nobody what a decode lost."""
        engine.there = engine.takes = False
        engine.sources, engine.said = frozenset(), "went away"
        for request in (r for r in self.requests if name in r.engines and r.id and not (r.over and r.freed)):
            if name == request.engines[0]:
                request.freed = request.orphan = True
            elif not request.over:
                self._again(request, f"{name} is gone", "PEER_LOST")
        if self.requests:
            self._told = time.monotonic()
            self._note(f"{name} is gone")

    def _of(self, name: str, request: Request, word: dict[str, Any]) -> bool:
        """Take a word about a request; returns whether there is something to show."""
        self._told = request.at[word["op"]] = time.monotonic()
        if word.get("found"):
            request.found["prefill" if word["op"] == "prefilled" else "decode"] = word["found"]
        match word["op"]:
            case "sent":
                request.sent.append(word)
                return False
            case "rows":
                request.rows.append(word)
                return False
            case "freed":
                request.freed = True
                return False
            case "refused" | "failed":
                if request.over:  # the other engine has said why
                    return False
                if word.get("code") == "DRAINING":
                    self._engines[name].takes = False
                self._again(request, word["error"], word.get("code"))
            case "dropped":
                request.left = True
            case "finished":
                request.left = True
                request.stats = None if request.error else word
            case "arrived" | "tokens":
                request.tokens += word["tokens"]
                request.logprobs += [[(token, p) for token, p in each] for each in word["logprobs"]]
                request.arrived = word.get("ranks", request.arrived)
                request.cached = word.get("cached", request.cached)
                if request.lost and word["op"] == "arrived":
                    self._note(f"{request.prompt.name!r} has its first token")
        return True

    def _again(self, request: Request, why: str, code: str | None) -> None:
        """End a failed try at both engines, and let the request wait for another if that may help."""
        self._drop(request)
        if code not in AGAIN or request.tries == TRIES:
            request.error, request.code = why, code
            return
        self._note(f"{request.prompt.name!r} is {'refused' if code == 'DRAINING' else 'lost'}: {code}")
        kept = Request(request.number, request.prompt, request.max_new, tries=request.tries, lost=[*request.lost, why])
        for field in attrs.fields(Request):
            setattr(request, field.name, getattr(kept, field.name))

    def _drop(self, request: Request) -> None:
        for name in (*request.engines, *([ENCODER] if request.prompt.images else ())):
            self._engines[name].line.send("drop", id=request.id)

    def _listen(self, patience: int = _TURN) -> list[tuple[str, dict[str, Any]]]:
        self._poller.poll(patience)
        return [(name, word) for name, engine in self._engines.items() for word in engine.line.receive()]

    def stop(self) -> None:
        """Stop all engines, decode first, as it would take the Goodbye of a source for a failure."""
        until, running = time.monotonic() + 5, set[str]()
        for role in ("decode", "prefill", *(["encoder"] if ENCODER in self._engines else [])):
            while running and time.monotonic() < until:
                running -= {name for name, word in self._listen() if word["op"] in ("stopped", "lost")}
            some = {name: engine for name, engine in self._engines.items() if name.startswith(role)}
            for engine in some.values():
                engine.line.send("stop")
            running = {name for name, engine in some.items() if engine.there}

    def close(self) -> None:
        """Close the lines."""
        for engine in self._engines.values():
            engine.line.close()


_SAYS = {
    "suspected": "{name} hears nothing of {peer}: it is SUSPECT",
    "recovered": "{name} hears {peer} again",
    "gone": "{name} has lost {peer}: {error}",
    "connected": "{name} is connected to {peer}",
}
"""The note for each event of decode's peers."""
