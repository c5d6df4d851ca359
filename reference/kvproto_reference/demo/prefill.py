"""`kvproto-prefill`: computes the caches of target and draft for each prompt and hands both over."""

import sys
from collections import deque
from typing import Any

import attrs
import torch

from kvproto import Request, Source, read_ticket
from kvproto.errors import DeviceFault, KvprotoError
from kvproto.events import Event, Expired, Freed, Refused, Sent, Undelivered
from kvproto_discovery import Registration

from ..cache.windows import first_row
from ..engine import logprobs
from ..engine.description import FIRST, HIDDEN, hidden_bytes, windows_of
from ..engine.images import expected
from ..engine.launch import launch
from ..engine.lockstep import Said
from ..engine.prefill import Prefiller
from ..engine.sequence import IMAGE, TokenSequence
from ..engine.world import World
from ..errors import EngineError, code_of
from .options import EngineOptions, parse, rank_address
from .rank import EngineProcess
from .rows import ImageRows


@attrs.define(eq=False)
class Job:
    """One prompt inside the engine."""

    id: str
    requests: dict[int, Request]
    """kvproto's request of each rank in this process."""
    sequence: TokenSequence
    needed: set[int]
    """Ranks that have to report the request over before its pages are free: all, until one says which have a route."""
    over: set[int] = attrs.Factory(set)
    """Ranks that have reported the request over: kvproto reads its pages no more."""
    found: dict[str, int] = attrs.Factory(dict)
    """Tokens that were found instead of computed, by place, with --host-pages."""
    events: list[torch.cuda.Event] = attrs.Factory(list)
    """One event after each layer, on a GPU; they live as long as a copy may wait for them."""


class PrefillProcess(EngineProcess):
    """One process of a prefill engine."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        super().__init__(options, world)
        outside = None if options.advertise is None else self._places(options.advertise, options.replica)
        own = options.advertise is not None and "{replica}" in options.advertise
        listen = self._places(options.address, 0 if own and options.address.startswith("tcp") else options.replica)
        self.sources = {
            rank: Source(options.name, pool, listen, options.kvproto(), advertise=outside)
            for rank, pool in self.pools.items()
        }
        self.doors = {rank: (source,) for rank, source in self.sources.items()}
        if options.register is not None:
            for source in self.sources.values():
                self.listed.append(Registration(options.register, source, self.options.layout.dp))
        if self.kept is not None:
            for rank, tiers in self.kept.tiers.items():
                self.sources[rank].tell(tiers)
        self.rows = ImageRows(options, world) if options.images else None
        self._greeted = False
        self._prefiller = Prefiller(self.target, self.draft, options.chunk, self._on_layer)
        self._queue: deque[Job] = deque()
        """Prompts that wait for pages."""
        self._jobs: dict[str, Job] = {}
        self._ids: dict[Request, str] = {}
        self._of: dict[TokenSequence, Job] = {}

    def _places(self, address: str, replica: int) -> dict[int, str]:
        return {rank: rank_address(address, replica, rank) for rank in range(self.ranks)}

    @property
    def busy(self) -> bool:
        """Whether a prompt is being computed."""
        return self._prefiller.busy

    @property
    def held(self) -> bool:
        """Whether a sink may still need a request."""
        return bool(self._jobs)

    def words(self, rank: int, event: Event) -> Said:
        """Words for copies, and for requests that are over."""
        match event:
            case Sent(request) if request in self._ids:
                return [{"op": "sent", "id": self._ids[request], "sink": event.sink, "seconds": event.seconds,
                         "left": event.left, "bytes": dict(event.bytes)}]  # fmt: skip
            case Freed(request) | Undelivered(request) if request in self._ids:
                return [{"op": "over", "id": self._ids[request], "needed": list(event.routed), "expired": False}]
            case Expired(request) if request in self._ids:
                needed = list(range(self.ranks))
                return [{"op": "over", "id": self._ids[request], "needed": needed, "expired": True}]
            case Refused():
                name = f"{self.options.name} rank {rank}"
                self.warn(rank, f"refused {event.peer}: {event.error.between(name, event.peer)}")
        return super().words(rank, event)

    def on_hello(self, rank: int, word: dict[str, Any]) -> None:
        """The router greets: say when this engine is ready."""
        self._greeted = True
        self._tell_ready()

    def _tell_ready(self) -> None:
        """Tell the router, once an encoder answers where there is to be one."""
        if self._greeted and not self.draining and (self.rows is None or self.rows.ready):
            self.tell("ready")

    def on_sources(self, rank: int, word: dict[str, Any]) -> None:
        """The encoder answers a rank, or does not any more."""
        assert self.rows is not None
        self.rows.answers(rank, word["replicas"])
        self._tell_ready()

    def on_misfit(self, rank: int, word: dict[str, Any]) -> None:
        """The encoder is not the one that this model was made with: end."""
        self.tell("fatal", error=word["error"])
        if 0 in self.pools:
            print(f"error: {word['error']}", file=sys.stderr, flush=True)
        self.status = 1

    def on_rows(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has the rows of a prompt's images, or has lost them; once all have, it can be computed."""
        assert self.rows is not None
        if (ended := self.rows.arrived(rank, word)) is None or (job := self._jobs.get(word["id"])) is None:
            return
        job.sequence.seen, lost = ended
        if lost is not None:
            said = f"rows for its {job.sequence.prompt.count(IMAGE)} IMAGE tokens"
            self.tell("refused", id=job.id, error=f"{said}: {lost['error']}", code=lost["code"])
            for request in job.requests.values():
                request.fail(lost["error"])

    def on_rows_free(self, rank: int, word: dict[str, Any]) -> None:
        """The pages of lost rows are free on a rank."""
        assert self.rows is not None
        self.rows.freed(rank, word)

    def on_prefill(self, rank: int, word: dict[str, Any]) -> None:
        """Take a request of the router, or tell it why not."""
        requests: dict[int, Request] = {}
        try:
            sequence, ticket = self.sequence(word), read_ticket(word["ticket"])
            prompt = sequence.asked
            requests |= {r: source.request(ticket, prompt) for r, source in self.sources.items()}
            self.check_room(len(prompt))
            if sequence.images:
                if self.rows is None:
                    raise EngineError("this prefill has no encoder for images: start it with --images")
                self.rows.add(word["id"], read_ticket(word["rows"]), expected(sequence))
        except (KvprotoError, EngineError) as error:
            for request in requests.values():
                request.fail(str(error))
            self.tell("refused", id=word["id"], error=str(error), code=code_of(error))
            return
        job = self._jobs[word["id"]] = Job(word["id"], requests, sequence, set(range(self.ranks)))
        self._ids |= dict.fromkeys(requests.values(), job.id)
        self._of[sequence] = job
        self._queue.append(job)
        if self.kept is not None:  # the last token is computed in any case, since its logits are wanted
            self.kept.begin(job.id, sequence, len(sequence.prompt) - 1)

    def on_drop(self, rank: int, word: dict[str, Any]) -> None:
        """The router has given the request up here: fail it."""
        if self.rows is not None:
            self.rows.drop(word["id"])
        if (job := self._jobs.get(word["id"])) is not None:
            for request in job.requests.values():
                request.fail("dropped by the router")

    def advance(self) -> None:
        """Admit the prompts there are pages for, and compute one step of those under way."""
        if self.rows is not None:
            self.said += self.rows.begin()
        while self._queue and (done := self._take_pages(self._queue[0])) is not None:
            self._prefiller.add(self._queue.popleft().sequence, done)
        for sequence in self._prefiller.step():
            sequence.seen = None
            job, handed = self._of[sequence], {"token": sequence.generated[0].to_bytes(4, "little")}
            if sequence.hidden is not None and not self.options.cold_draft:
                handed[HIDDEN] = hidden_bytes(sequence.hidden)
            if (most := self.options.max_logprobs) is not None:
                handed |= logprobs.to_parts(sequence.logprobs[0] if sequence.logprobs else [], most)
            for request in job.requests.values():
                request.finish(
                    self.tables(sequence),
                    since=self._since(len(sequence.prompt)),
                    handoff={FIRST: handed},
                    finished=sequence.stopped,
                    after=self._event(job),
                )
            self.tell("prefilled", id=job.id, found=job.found)

    def _take_pages(self, job: Job) -> int | None:
        """Give a prompt pages in each pool; returns how many of its tokens they hold, None while too few are free."""
        sequence = job.sequence
        if self.rows is not None and self.rows.pending(job.id):
            return None
        if self.kept is not None:
            if (taken := self.kept.allocate(job.id, len(sequence.prompt))) is None:
                return None
            done, job.found = taken
            self.target.arrived(sequence.tables[0], done)
            return done
        need = self.need(len(sequence.prompt))
        if any(pages.available < n for pages, n in zip(self.pages.values(), need, strict=True)):
            return None
        sequence.tables = [pages.allocate(n) for pages, n in zip(self.pages.values(), need, strict=True)]
        return 0

    def _on_layer(self, sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
        """Tell kvproto that a layer's rows are there, so that they are sent while the next layer computes."""
        job = self._of[sequence]
        for request in job.requests.values():
            request.computed(
                self.tables(sequence),
                stop,
                layers=(layer, layer + 1),
                model=model,
                after=self._event(job),
                since=self._since(stop),
            )

    def _since(self, stop: int) -> dict[str, int]:
        """The first token whose rows are held after `stop` tokens, of layers with a sliding window."""
        windows = windows_of(self.options.configs) if self.kept is None else {}
        return {name: first_row(reach, stop) for name, reach in windows.items()}

    def _event(self, job: Job) -> int | None:
        """The handle of a CUDA event after all work launched so far; None on the host, where nothing is pending."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        job.events.append(event)
        return int(event.cuda_event)

    def on_sent(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has copied its share to one rank of decode."""
        self.tell("sent", source=rank, **{k: v for k, v in word.items() if k not in ("op", "rank")})

    def on_over(self, rank: int, word: dict[str, Any]) -> None:
        """No sink needs a rank's pages any more; ranks without a route hear nothing and are not waited for."""
        job = self._jobs.get(word["id"])
        if job is None:
            return
        job.over.add(rank)
        job.needed &= set(word["needed"]) or job.needed
        if not job.over >= job.needed:
            return
        del self._jobs[job.id], self._of[job.sequence]
        for request in job.requests.values():
            del self._ids[request]
        if job in self._queue:
            self._queue.remove(job)
        rows = self._prefiller.drop(job.sequence)
        self.rest()
        if self.kept is not None:
            self.kept.drop(job.id)
            self.kept.free(job.sequence, rows)
        else:
            for pages, table in zip(self.pages.values(), job.sequence.tables, strict=False):  # none while it waits
                pages.free(table)
        if word["expired"]:
            says = "nobody fetched the request before its deadline"
            self.tell("refused", id=job.id, error=says, code="DEADLINE")
        self.tell("freed", id=job.id, available=self._available)

    @property
    def _available(self) -> list[int]:
        """Free pages of each model's pool."""
        return self.kept.available if self.kept is not None else [pages.available for pages in self.pages.values()]


def _run(options: EngineOptions, world: World) -> int:
    return PrefillProcess(options.of(world.replica), world).serve("prefill")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse("prefill", argv)
        options.check("prefill")
        return launch(_run, options, options.processes, options.folder, options.layout.dp, options.gpus)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
