"""`kvproto-decode`: fetches the caches of target and draft by ticket and decodes speculatively."""

import sys
from collections.abc import Sequence
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
from ..engine import logprobs
from ..engine.admission import Admission
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
from ..engine.prefill import Prefiller
from ..engine.prefix import PrefixCache
from ..engine.runner import Chunk
from ..engine.sequence import TokenSequence
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
    end: int | None = None
    """The token up to which rows are fetched, if not all of the prompt."""
    claim: Claim | None = None
    """The claim on its pages, where they are claimed only when they are of use."""
    cached: int = 0  # tokens of the prompt that this engine had already
    found: dict[str, int] = attrs.Factory(dict)
    """Tokens that decode keeps, by place, with --host-pages."""
    verdicts: dict[int, dict[str, Any]] = attrs.Factory(dict)
    """The word "arrived" or "lost" of each rank's fetch."""
    pages_free: set[int] = attrs.Factory(set)
    """Ranks on which nothing can write the pages any more."""
    dropped: bool = False
    """Whether it was given up while it was fetched."""
    moved: bool = False
    """Whether another engine has decoded it, and its rows have not arrived here yet."""
    gave_way: int = 0
    """The number of times that it lost its pages while it was decoded."""


def rows_of(sequence: TokenSequence) -> Prompt:
    """The tokens whose rows decode has to have before its next step, as both engines state them."""
    return Prompt(sequence.text(0, sequence.due), sequence.adapter_name, sequence.salts)


class DecodeProcess(EngineProcess):
    """One process of a decode engine."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        super().__init__(options, world)
        self.sinks = {
            rank: Sink(options.name, pool, options.seeds, options.kvproto()) for rank, pool in self.pools.items()
        }
        self.doors = {rank: (sink,) for rank, sink in self.sinks.items()}
        self._lines = Lines(self.sinks, options.seeds)
        if options.found is not None:
            options.found.follow(*self.sinks.values())
            self.listed.append(options.found)
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
        proposed = options.speculate if self.draft is not None else 0
        self._admission = Admission(self._prefixes, self.need, proposed, lambda pages: self.target.begin(pages, 0))
        self._again = Prefiller(self.target, self.draft, options.chunk)
        """Computes requests that gave way again."""
        self._of: dict[TokenSequence, Job] = {}
        """Requests that wait or are decoded."""
        self._fetching: dict[str, Job] = {}
        self._ids: dict[Fetch, str] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is being decoded."""
        return bool(self._admission.running)

    @property
    def held(self) -> bool:
        """Whether a request is not over; a lost one is, though it may still wait for proof about its pages."""
        waits = (job for job in self._fetching.values() if len(job.verdicts) < self.ranks)
        return bool(self._of or any(waits))

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
                return [{
                    "op": "arrived", "id": self._ids[fetch], "seconds": event.seconds,
                    "first": {part: data.hex() for part, data in handed.items()},
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
        self._again.step()
        if self._decode():
            self._use_pages()  # what is over or gave way has freed some, and no word tells of it
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
        if self._asked and not self.draining and len(self._answering) == self.ranks:
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
        """Sleep once the running requests have ended or given way: sleep would lose their rows."""
        self._tired = self.busy
        if not self._tired:
            super().on_sleep(rank, word)

    def forget_rows(self) -> None:
        """Forget the prefixes too, whose rows are gone."""
        self._prefixes.clear()

    def on_drain(self, rank: int, word: dict[str, Any]) -> None:
        """Drain, and refuse the requests that wait for their first pages."""
        super().on_drain(rank, word)
        for sequence in [s for s in self._admission.waiting if not s.generated]:
            self._refuse(self._forget(sequence).id)

    def on_drop(self, rank: int, word: dict[str, Any]) -> None:
        """The router or its client has given the request up: drop it, whether it waits, is being fetched or decoded."""
        if (fetching := self._fetching.get(word["id"])) is not None:
            fetching.dropped = True  # it may have arrived by now
            for fetch in fetching.fetches.values():
                fetch.abort("dropped by the router")
        for sequence in [sequence for sequence, job in self._of.items() if job.id == word["id"]]:
            self._free(sequence)
            self._forget(sequence)
            self.tell("dropped", id=word["id"], available=self._available)

    def _free(self, sequence: TokenSequence) -> None:
        """Take the pages of a request back that is decoded, if it is, and keep those of rows for others."""
        if sequence in self._admission.running:
            rows = self._again.drop(sequence) if sequence in self._again else sequence.shared
            self.rest()
            self._leave(sequence, rows)

    def _forget(self, sequence: TokenSequence) -> Job:
        """Forget a request that waits or is decoded."""
        job = self._of.pop(sequence)
        self._admission.forget(sequence)
        if self.kept is not None:
            self.kept.drop(job.id)
        return job

    def _give_way(self, sequence: TokenSequence) -> None:
        """Take the pages of a request for an older one; once there are some again, its rows are computed here."""
        job = self._of[sequence]
        self._free(sequence)
        if sequence.images:
            self._forget(sequence)
            says = "its pages went to an older request, and the rows of its images are not here to compute it again"
            self.tell("failed", id=job.id, error=says, code="BUSY")
            self.tell("dropped", id=job.id, available=self._available)
            return
        sequence.tables, sequence.hidden = [], None
        job.gave_way += 1
        self.tell("gave_way", id=job.id, tokens=len(sequence.generated))

    @property
    def _available(self) -> list[int]:
        """Pages of each model's pool that no request holds."""
        return (self.kept or self._prefixes).available

    def _refuse(self, id: str) -> None:
        self.tell("failed", id=id, error="this engine drains: ask another", code="DRAINING")

    def on_decode(self, rank: int, word: dict[str, Any]) -> None:
        """Take a request of the router, or tell it why not."""
        if self.draining:
            self._refuse(word["id"])
            return
        try:
            sequence = self.sequence(word)
            job = Job(word["id"], read_ticket(word["ticket"]), rows_of(sequence), sequence)
            job.moved = bool(sequence.generated)
            self.check_room(sequence.rows())
        except (EngineError, KvprotoError) as error:
            self.tell("failed", id=word["id"], error=str(error), code=code_of(error))
            return
        self._of[sequence] = job
        self._admission.add(sequence)
        if self.kept is not None:
            self.kept.begin(job.id, sequence, len(sequence.prompt) - self._hybrid)

    def _fetch(self) -> None:
        """Fetch the caches of waiting requests while there are pages, or compute them again."""
        while self._admission.waiting:
            job = self._of[self._admission.waiting[0]]
            later = bool((self.options.intent or self.options.spans) and not job.sequence.generated)
            cached = self._take(job, later)
            if later and cached == len(job.prompt):  # nothing is left that could be claimed later
                self._prefixes.free(job.sequence, 0)
                later, cached = False, self._admission.take(job.sequence)
            if cached is None:
                return
            self._admission.begin()
            if job.sequence.generated and not job.moved:
                self._come_back(job.sequence, cached)
            else:
                self._begin(job, cached, later)

    def _begin(self, job: Job, cached: int, later: bool) -> None:
        """Fetch a request's cache; Sink takes what it needs of the page tables, which have room for the first step."""
        job.cached, job.claim = cached, Claim(job.sequence, self._admission.step(job.sequence)) if later else None
        self._fetching[job.id] = self._of.pop(job.sequence)
        how: dict[str, Any] = {"spans": self.options.spans} if later else {"pages": self.tables(job.sequence)}
        for rank, sink in self.sinks.items():
            try:
                fetch = job.fetches[rank] = sink.fetch(
                    job.ticket, job.prompt, cached=self._first(job), tokens=job.end, **how
                )
                self._ids[fetch] = job.id
            except KvprotoError as error:
                said = {"error": str(error), "code": code_of(error)}
                self.said.append({"op": "lost", "rank": rank, "id": job.id, "pages_free": True, **said})

    def _come_back(self, sequence: TokenSequence, cached: int) -> None:
        """Compute the rows of a request that gave way again, beside the steps of others, as far as none are kept."""
        self._again.cold = self._cold and self.options.cold_draft == "zero"
        if self._again.cold and self.draft is not None:
            self.draft.clear(sequence.tables[1][self.draft.shard.pages(cached) :])
        if cached < sequence.due:
            self._again.add(sequence, cached)
        self._admission.run(sequence)

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
        """Give a request its pages; returns how many of its tokens have rows there, None while too few are free."""
        if self.kept is None:
            return self._prefixes.allocate(job.sequence, self.need(0)) if later else self._admission.take(job.sequence)
        if (taken := self.kept.allocate(job.id, job.sequence.rows())) is None:
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
        running = [sum(len(s.tables[pool]) for s in self._admission.running) for pool in range(len(self.pages))]
        for job in self._fetching.values():
            claim = job.claim
            if claim is None or (tokens := claim.wanted(self.ranks)) <= claim.tokens:
                continue
            need = claim.whole if tokens == len(job.prompt) else self.need(tokens)
            if claimed(claim, need, waiting, running, self._prefixes, self._admission.spare):
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
        if lost is not None or job.dropped:
            self._free_lost(job)
            return
        self._received(job)
        self.arrived(job, words)

    def arrived(self, job: Job, words: Sequence[dict[str, Any]]) -> None:
        """Decode a request whose rows have arrived; `words` are those of all ranks."""
        sequence = job.sequence
        self.target.begin(sequence.tables[0], job.cached)
        self.target.arrived(sequence.tables[0], len(job.prompt))
        said = next(w["first"] for w in words if w["first"])
        handed = {part: bytes.fromhex(data) for part, data in said.items()}
        first, how = int.from_bytes(handed["token"], "little"), sequence.sampling
        if self._cold:
            self._begin_draft(job)
        of_tokens: dict[str, Any] = {"tokens": [], "logprobs": []}
        if not job.moved:
            sequence.append([first])
            if how.logprobs is not None:
                sequence.logprobs = [logprobs.from_parts(handed, first, how.logprobs)]
            of_tokens = {"tokens": [first], "logprobs": sequence.logprobs}
        job.moved, sequence.hidden = False, self._hidden(handed.get(HIDDEN))
        fields = [{k: w[k] for k in ("seconds", "bytes", "checksums")} for w in words]
        self.tell("arrived", id=job.id, ranks=fields, cached=job.cached, found=job.found, **of_tokens)
        self._of[sequence] = job
        self._admission.run(sequence)

    def _hidden(self, handed: bytes | None) -> Tensor | None:
        """Hidden states for the head's next row, as prefill handed them over, or zeros for a cold start."""
        if not hidden_of(self.options.configs):
            return None
        data = handed or bytes(hidden_type(self.options.configs)[1])
        return hidden_from(data, self.options.configs, self.device)

    def _begin_draft(self, job: Job) -> None:
        """Give the draft rows of a prompt of which prefill had none: zeros, or what it computes from the tokens."""
        assert self.draft is not None
        table, step = job.sequence.tables[1], self.options.chunk
        prompt = job.sequence.text(0, job.sequence.due)
        if self.options.cold_draft == "zero":
            self.draft.clear(table[self.draft.shard.pages(job.cached) :])
            return
        for at in range(job.cached, len(prompt), step):
            self.draft.run([Chunk(prompt[at : at + step], at, table, unread=True)])

    def on_pages_free(self, rank: int, word: dict[str, Any]) -> None:
        """Nothing can write the pages of a request that is lost or dropped on one rank any more."""
        job = self._fetching[word["id"]]
        job.pages_free.add(rank)
        if len(job.verdicts) == self.ranks:
            self._free_lost(job)

    def _free_lost(self, job: Job) -> None:
        if len(job.pages_free) == self.ranks:
            self._received(job)
            self._leave(job.sequence, 0)
            self._admission.forget(job.sequence)
            self.tell("dropped", id=job.id, available=self._available)

    def _received(self, job: Job) -> None:
        """Forget a request's fetches, of which no more events come."""
        del self._fetching[job.id]
        for fetch in job.fetches.values():
            del self._ids[fetch]

    def _decode(self) -> bool:
        """Compute one step of all running requests together; returns whether one of them is over or gave way."""
        before = len(self._admission.running)
        if self.kept is None:  # else they have all of their pages
            self._admission.grow(self._give_way)
        running = [sequence for sequence in self._admission.running if sequence not in self._again]
        for sequence, tokens in zip(running, self._decoder.step(running) if running else [], strict=True):
            if tokens:
                told = sequence.logprobs[-len(tokens) :]
                self.tell("tokens", id=self._of[sequence].id, tokens=tokens, logprobs=told)
            if sequence.finished:
                self._finish(sequence)
        return len(self._admission.running) < before

    def _finish(self, sequence: TokenSequence) -> None:
        """Tell the router that a request is over, and take back its pages."""
        self._free(sequence)
        job, stats = self._forget(sequence), sequence.stats
        self.tell(
            "finished",
            id=job.id,
            tokens=sequence.generated,
            steps=stats.steps,
            decoded=stats.tokens,
            accepted=stats.accepted,
            proposed=stats.proposed,
            gave_way=job.gave_way,
            available=self._available,
        )


def _run(options: EngineOptions, world: World) -> int:
    return DecodeProcess(options.of(world.replica), world).serve("decode")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse("decode", argv)
        options.check("decode")
        for address, why in unknown_hosts(options.seeds).items():
            print(f"warning: the host of {address} is not known here, yet: {why}", file=sys.stderr)
        return launch(_run, options, options.processes, options.folder, options.layout.dp, options.gpus)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
