"""`kvproto-decode`: fetches the caches of target and draft by ticket and decodes speculatively."""

import sys
from collections import deque
from typing import Any

import attrs
from torch import Tensor

from kvproto import Fetch, ItemKind, Plan, Prompt, Sink, Ticket, lay_out, read_ticket
from kvproto.errors import DeviceFault, KvprotoError
from kvproto.events import (
    Arrived,
    Connected,
    Disconnected,
    Event,
    Lost,
    PagesFree,
    PagesWanted,
    Recovered,
    Refused,
    Suspected,
)

from ..cache.windows import first_row
from ..engine.claims import Claim, claimed
from ..engine.description import (
    FIRST,
    HIDDEN,
    bytes_a_token,
    caches,
    hidden_from,
    hidden_of,
    hidden_type,
    state_bytes,
    windows_of,
)
from ..engine.launch import launch
from ..engine.lockstep import Said
from ..engine.prefix import PrefixCache
from ..engine.runner import Chunk
from ..engine.sequence import TokenSequence, rows_needed
from ..engine.speculative import SpeculativeDecoder
from ..engine.world import World
from ..errors import EngineError, code_of
from .lines import PASSING, Lines
from .options import EngineOptions, parse, unknown_hosts
from .rank import EngineProcess

SAYS = {
    "suspected": "hears nothing of {peer}: nothing new is asked of it",
    "recovered": "hears {peer} again",
    "gone": "has lost {peer}: {error}",
    "refused": "has no source: {error}",
}
"""The sentence on stderr for each event of a peer; a rank's name comes before it."""


@attrs.define(eq=False)
class Job:
    """One request inside the engine."""

    id: str
    ticket: Ticket
    prompt: Prompt
    sequence: TokenSequence
    fetches: dict[int, Fetch] = attrs.Factory(dict)
    """The fetch of each rank in this process, once it has begun; ranks that kvproto refused at once are missing."""
    claim: Claim | None = None
    """The claim on its pages, where they are claimed only when they are of use."""
    cached: int = 0  # tokens of the prompt that this engine had already
    found: dict[str, int] = attrs.Factory(dict)
    """Those tokens by place, with --host-pages."""
    verdicts: dict[int, dict[str, Any]] = attrs.Factory(dict)
    """The word "arrived" or "lost" of each rank's fetch."""
    pages_free: set[int] = attrs.Factory(set)
    """Ranks on which nothing can write the pages any more."""

    @property
    def rows(self) -> int:
        """The most rows that the caches will hold."""
        return rows_needed(len(self.prompt), self.sequence.max_new)


class DecodeProcess(EngineProcess):
    """One process of a decode engine."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        super().__init__(options, world)
        self.doors = self.sinks = {
            rank: Sink(options.name, pool, options.seeds, options.kvproto()) for rank, pool in self.pools.items()
        }
        self._lines = Lines(self.sinks, options.seeds)
        self._decoder = SpeculativeDecoder(self.target, self.draft, options.speculate)
        ahead = self.draft.ahead if self.draft is not None else 0
        self._hybrid = options.configs[0].hybrid
        """Whether rows are not all that a request needs: states arrive, each in the page of the prompt's last token."""
        self._prefixes = PrefixCache(list(self.pages.values()), self.shards, ahead, self._hybrid)
        self._answering: dict[int, set[int]] = {}
        """Prefill replicas that answer, by rank."""
        self._plan: dict[str, Any] = {}
        self._cold = False
        """Whether prefill lacks the draft, so that nothing of its cache comes."""
        self._asked = False
        self._warned: dict[int, str] = {}
        """The last sentence on stderr about each rank's sources."""
        self._tired = False
        """Whether to sleep as soon as nothing is being decoded."""
        self._queue: deque[Job] = deque()
        self._fetching: dict[str, Job] = {}
        self._ids: dict[Fetch, str] = {}
        self._running: dict[TokenSequence, Job] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is being decoded."""
        return bool(self._running)

    @property
    def held(self) -> bool:
        """Whether a request is not over; a lost one is, though it may still wait for proof about its pages."""
        waits = (job for job in self._fetching.values() if len(job.verdicts) < self.ranks)
        return bool(self._running or self._queue or any(waits))

    def words(self, rank: int, event: Event) -> Said:
        """Words for what happened to a source or to a fetch."""
        match event:
            case Connected():
                self._plan, self._cold = self._shown(event.plan), bool(event.plan.cold)
                return [{"op": "peer", "event": "connected", "peer": event.peer.rpartition(" rank ")[0]}]
            case Suspected() | Recovered():
                return [{"op": "peer", "event": type(event).__name__.lower(), "peer": event.peer}]
            case Disconnected():
                return [{"op": "peer", "event": "gone", "peer": event.peer, "error": event.reason}]
            case Refused():
                names = (self.options.name, event.peer) if event.by_us else (event.peer, self.options.name)
                error = f"{names[0]} refused {names[1]}: {event.error.between(*names)}"
                fits = event.error.code.name in PASSING or self._lines.known
                return [{"op": "peer", "event": "refused", "peer": event.peer, "error": error, "misfit": not fits}]
            case Arrived(fetch):
                handed = event.handoff.get(FIRST, {})
                token, hidden = handed.get("token"), handed.get(HIDDEN)
                return [{
                    "op": "arrived", "id": self._ids[fetch], "seconds": event.seconds,
                    "first": None if token is None else int.from_bytes(token, "little"),
                    "hidden": None if hidden is None else hidden.hex(),
                    "bytes": {str(source): count for source, count in event.bytes.items()},
                    "checksums": [[source, group, f"{sum:016x}"] for (source, group), sum in event.checksums.items()],
                }]  # fmt: skip
            case Lost(fetch):
                said = {"error": str(event.error), "code": event.error.code.name}
                return [{"op": "lost", "id": self._ids[fetch], "pages_free": event.pages_free, **said}]
            case PagesWanted(fetch):
                return [{"op": "wanted", "id": self._ids[fetch], "tokens": event.tokens}]
            case PagesFree(fetch):
                return [{"op": "pages_free", "id": self._ids[fetch]}]
        return super().words(rank, event)

    def on_time(self) -> None:
        """Dial lost sources again, and tell all ranks which sources answer."""
        super().on_time()
        self.said += self._lines.turn()

    def next_timer(self) -> float | None:
        """The next dial or what any engine has to do next, by time.monotonic; None: nothing is planned."""
        return min((at for at in (super().next_timer(), self._lines.next_timer()) if at is not None), default=None)

    def _shown(self, plan: Plan) -> dict[str, Any]:
        """The plan as the demo's report shows it, with groups by name."""
        names = {group.id: group.name for group in self.geometry.groups}
        undealt = attrs.evolve(self.options.layout, dcp=1, deal="cyclic")
        whole = lay_out(caches(self.options.configs, undealt, self.options.page_size), undealt.parallel)
        stored, without = bytes_a_token(self.geometry), bytes_a_token(whole)
        return {
            "stored": {name: [stored[name], without[name]] for name in stored},
            "states": state_bytes(self.geometry),
            "groups": list(names.values()), "plan": plan.digest.hex(),
            "routes": [{"source": route.source, "sink": route.sink, "group": names[route.group],
                        "digest": route.digest.hex()} for route in plan.routes],
            "required": {str(rank): list(plan.required(rank)) for rank in range(self.ranks)},
        }  # fmt: skip

    def advance(self) -> None:
        """Fetch the requests there are pages for, and decode one step of all that have arrived."""
        self._use_pages()
        if self._decode():
            self._use_pages()  # what is over has freed some, and no word tells of it
        if self._tired:
            self.on_sleep(0, {})

    def _use_pages(self) -> None:
        """Fetch and claim as far as there are free pages."""
        if not self._tired and self._slept is None:
            self._fetch()
        self._claim()

    def on_hello(self, rank: int, word: dict[str, Any]) -> None:
        """The router greets: say when this engine is ready, and keep it informed from now on."""
        self._asked = True
        self._tell_ready()

    def on_sources(self, rank: int, word: dict[str, Any]) -> None:
        """Other prefill replicas than before answer a rank."""
        self._answering[rank] = set(word["replicas"])
        self._tell_ready()

    def _tell_ready(self) -> None:
        """Tell the router from which replicas every rank can fetch; none before there is a plan."""
        if self._asked and len(self._answering) == self.ranks:
            answering = set.intersection(*self._answering.values()) if self._plan else set[int]()
            self.tell("ready", sources=sorted(answering), **self._plan)

    def on_peer(self, rank: int, word: dict[str, Any]) -> None:
        """A source rank has come, gone or refused; a misfit ends the engine, if it has no other source."""
        self.tell("peer", rank=rank, **{k: v for k, v in word.items() if k not in ("op", "rank")})
        if word["event"] == "connected":
            self._tell_ready()
        if word.get("misfit") and len(self.options.seeds) == 1:
            self.tell("fatal", error=word["error"])
            if 0 in self.pools:
                print(f"error: {word['error']}", file=sys.stderr, flush=True)
            self.status = 1
        elif rank in self.pools and not self.options.quiet and (what := SAYS.get(word["event"])):
            sentence = what.format(**{"error": "", **word})
            if self._warned.get(rank) != sentence:  # a source that stays away is dialled again and again
                self.warn(rank, sentence)
            self._warned[rank] = sentence

    def on_sleep(self, rank: int, word: dict[str, Any]) -> None:
        """Sleep once the running requests are decoded to their end: sleep would lose their rows."""
        self._tired = bool(self._running)
        if not self._tired:
            super().on_sleep(rank, word)

    def forget_rows(self) -> None:
        """Forget the prefixes too, whose rows are gone."""
        self._prefixes.clear()

    def on_drain(self, rank: int, word: dict[str, Any]) -> None:
        """Drain, and refuse the requests that wait for pages."""
        super().on_drain(rank, word)
        for job in self._queue:
            self._drop(job)
            self._refuse(job.id)
        self._queue.clear()

    def on_drop(self, rank: int, word: dict[str, Any]) -> None:
        """The router has given the request up here: drop it, whether it waits, is being fetched or decoded."""
        for job in [job for job in self._queue if job.id == word["id"]]:
            self._queue.remove(job)
            self._drop(job)
        if (fetching := self._fetching.get(word["id"])) is not None:
            for fetch in fetching.fetches.values():
                fetch.abort("dropped by the router")
        for job in [job for job in self._running.values() if job.id == word["id"]]:
            del self._running[job.sequence]
            self.rest()
            self._leave(job.sequence, job.sequence.shared)
            self.tell("dropped", id=job.id, available=(self.kept or self._prefixes).available)

    def _drop(self, job: Job) -> None:
        """Forget a request that waited for pages."""
        if self.kept is not None:
            self.kept.drop(job.id)

    def _refuse(self, id: str) -> None:
        self.tell("failed", id=id, error="this engine drains: ask another", code="DRAINING")

    def on_decode(self, rank: int, word: dict[str, Any]) -> None:
        """Take a request of the router, or tell it why not."""
        if self.draining:
            self._refuse(word["id"])
            return
        try:
            sequence = self.sequence(word)
            job = Job(word["id"], read_ticket(word["ticket"]), Prompt(word["prompt"]), sequence)
            self.check_room(job.rows)
        except (EngineError, KvprotoError) as error:
            self.tell("failed", id=word["id"], error=str(error), code=code_of(error))
            return
        self._queue.append(job)
        if self.kept is not None:
            self.kept.begin(job.id, sequence, len(sequence.prompt) - self._hybrid)

    def _fetch(self) -> None:
        """Fetch the caches of waiting requests while there are pages; Sink takes what it needs of the page tables."""
        while self._queue:
            job = self._queue[0]
            later = self.options.intent or self.options.spans
            cached = self._take(job, later)
            if later and cached == len(job.prompt):  # nothing is left that could be claimed later
                self._prefixes.free(job.sequence, 0)
                later, cached = False, self._prefixes.allocate(job.sequence, self.need(job.rows))
            if cached is None:
                return
            job.cached, job.claim = cached, Claim(job.sequence, self.need(job.rows)) if later else None
            self._fetching[job.id] = self._queue.popleft()
            how: dict[str, Any] = {"spans": self.options.spans} if later else {"pages": self.tables(job.sequence)}
            for rank, sink in self.sinks.items():
                try:
                    fetch = job.fetches[rank] = sink.fetch(job.ticket, job.prompt, cached=self._first(job), **how)
                    self._ids[fetch] = job.id
                except KvprotoError as error:
                    said = {"error": str(error), "code": code_of(error)}
                    self.said.append({"op": "lost", "rank": rank, "id": job.id, "pages_free": True, **said})

    def _first(self, job: Job) -> int | dict[str, int]:
        """The first token of a request to fetch: of layers with a sliding window, only what the next token reads."""
        windows = windows_of(self.options.configs)
        if not windows:
            return job.cached
        had = job.cached if self.kept is not None else 0  # else the pages in which its windows move hold nothing
        paged = (group.name for group in self.geometry.groups if group.kind == ItemKind.PAGE)
        return {
            name: max(first_row(windows[name], len(job.prompt)), had) if name in windows else job.cached
            for name in paged
        }

    def _take(self, job: Job, later: bool) -> int | None:
        """Give a request its pages; returns how many tokens of its prompt they hold, None while too few are free."""
        if self.kept is None:
            return self._prefixes.allocate(job.sequence, self.need(0 if later else job.rows))
        if (taken := self.kept.allocate(job.id, job.rows)) is None:
            return None
        cached, job.found = taken
        return cached

    def _leave(self, sequence: TokenSequence, valid: int) -> None:
        """Take a request's pages back, keeping those of its first `valid` tokens for others."""
        if self.kept is None:
            self._prefixes.free(sequence, valid)
            return
        reach = max(windows_of(self.options.configs).values(), default=0)
        self.kept.free(sequence, valid, first_row(reach, len(sequence.prompt)) if reach else 0)

    def on_wanted(self, rank: int, word: dict[str, Any]) -> None:
        """One rank's sources have a use for pages; all ranks claim the same ones, once each has said so."""
        job = self._fetching.get(word["id"])
        if job is not None and job.claim is not None:
            job.claim.useful[rank] = word["tokens"]

    def _claim(self) -> None:
        """Claim the pages that are of use, as far as there are free ones."""
        waiting = [job.claim for job in self._fetching.values() if job.claim is not None]
        running = [sum(len(s.tables[model]) for s in self._running) for model in range(len(self.pages))]
        for job in self._fetching.values():
            claim = job.claim
            if claim is None or (tokens := claim.wanted(self.ranks)) <= claim.tokens:
                continue
            need = claim.whole if tokens == len(job.prompt) else self.need(tokens)
            if claimed(claim, need, waiting, running, self._prefixes):
                claim.tokens = tokens
                for fetch in job.fetches.values():
                    fetch.grant(self.tables(job.sequence), tokens)

    def on_arrived(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has received its share of a request."""
        self._verdict(rank, word)

    def on_lost(self, rank: int, word: dict[str, Any]) -> None:
        """A rank's fetch failed: abort those of the other ranks in this process."""
        job = self._fetching[word["id"]]
        job.claim = None
        for other, fetch in job.fetches.items():
            if other != rank:
                fetch.abort("lost by another rank")
        self._verdict(rank, word)

    def _verdict(self, rank: int, word: dict[str, Any]) -> None:
        """Start a request when all ranks have received it; fail it when all have reported and one has lost it."""
        job = self._fetching[word["id"]]
        job.verdicts[rank] = word
        if word.get("pages_free", True):
            job.pages_free.add(rank)
        if len(job.verdicts) < self.ranks:
            return
        words = [job.verdicts[r] for r in range(self.ranks)]
        lost = next((w for w in words if w["op"] == "lost"), None)
        if lost is not None:
            self.tell("failed", id=job.id, error=lost["error"], code=lost["code"])
            self._free_lost(job)
            return
        self._forget(job)
        self.target.begin(job.sequence.tables[0], job.cached)
        self.target.arrived(job.sequence.tables[0], len(job.prompt))
        first, hidden = next((w["first"], w["hidden"]) for w in words if w["first"] is not None)
        if self._cold:
            self._begin_draft(job)
        job.sequence.append([first])
        job.sequence.hidden = self._hidden(hidden)
        fields = [{k: w[k] for k in ("seconds", "bytes", "checksums")} for w in words]
        self.tell("arrived", id=job.id, ranks=fields, tokens=[first], cached=job.cached, found=job.found)
        self._running[job.sequence] = job

    def _hidden(self, said: str | None) -> Tensor | None:
        """What an EAGLE-3 head goes on from, as prefill handed it over in hex, or zeros for one that starts cold."""
        if not hidden_of(self.options.configs):
            return None
        data = bytes.fromhex(said) if said else bytes(hidden_type(self.options.configs)[1])
        return hidden_from(data, self.options.configs, self.device)

    def _begin_draft(self, job: Job) -> None:
        """Give the draft rows of a prompt of which prefill had none: zeros, or what it computes from the tokens."""
        assert self.draft is not None
        table, prompt, step = job.sequence.tables[1], job.sequence.prompt, self.options.chunk
        if self.options.cold_draft == "zero":
            self.draft.clear(table[self.draft.shard.pages(job.cached) :])
            return
        for at in range(job.cached, len(prompt), step):
            self.draft.run([Chunk(prompt[at : at + step], at, table)])

    def on_pages_free(self, rank: int, word: dict[str, Any]) -> None:
        """Nothing can write a lost request's pages on one rank any more."""
        job = self._fetching[word["id"]]
        job.pages_free.add(rank)
        if len(job.verdicts) == self.ranks:
            self._free_lost(job)

    def _free_lost(self, job: Job) -> None:
        if len(job.pages_free) == self.ranks:
            self._forget(job)
            self._leave(job.sequence, 0)

    def _forget(self, job: Job) -> None:
        """Forget a request's fetches, of which no more events come."""
        del self._fetching[job.id]
        for fetch in job.fetches.values():
            del self._ids[fetch]

    def _decode(self) -> bool:
        """Compute one speculative step of all running requests together; returns whether one of them is over."""
        running = list(self._running.values())
        if not running:
            return False
        for job, tokens in zip(running, self._decoder.step([job.sequence for job in running]), strict=True):
            if tokens:
                self.tell("tokens", id=job.id, tokens=tokens)
            if job.sequence.finished:
                del self._running[job.sequence]
                self.rest()
                self._leave(job.sequence, job.sequence.shared)
                stats = job.sequence.stats
                self.tell(
                    "finished",
                    id=job.id,
                    tokens=job.sequence.generated,
                    steps=stats.steps,
                    decoded=stats.tokens,
                    accepted=stats.accepted,
                    proposed=stats.proposed,
                    available=(self.kept or self._prefixes).available,
                )
        return len(self._running) < len(running)


def _run(options: EngineOptions, world: World) -> int:
    return DecodeProcess(options, world).serve("decode")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse("decode", argv)
        options.check("decode")
        for address, why in unknown_hosts(options.seeds).items():
            print(f"warning: the host of {address} is not known here, yet: {why}", file=sys.stderr)
        return launch(_run, options, options.processes, options.folder)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
