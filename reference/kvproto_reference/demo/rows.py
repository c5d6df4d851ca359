"""The rows of images on their way into prefill: each rank that embeds tokens fetches all of them from an encoder."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from kvproto import Fetch, Parallel, Prompt, Seed, Sink, Ticket
from kvproto.errors import KvprotoError
from kvproto.events import Arrived, Event, Lost, PagesFree, Refused

from ..engine.images import AXIS, ROWS, RowPool
from ..engine.lockstep import Said
from ..engine.world import World
from ..errors import code_of
from ..models.encoder import EncoderConfig
from . import encode
from .lines import PASSING, Lines
from .options import EngineOptions, rank_address

PAGES = 64


@attrs.define(eq=False)
class _Job:
    """The images of one prompt."""

    id: str
    ticket: Ticket
    prompt: Prompt
    pages: list[int] = attrs.Factory(list)
    fetches: dict[int, Fetch] = attrs.Factory(dict)
    ended: dict[int, dict[str, Any]] = attrs.Factory(dict)
    """The word "rows" of each rank."""
    free: set[int] = attrs.Factory(set)
    """Ranks on which nothing can write the pages any more."""


class ImageRows:
    """Fetches rows of images on one rank of prefill, and knows of all ranks what has arrived."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        target, self._ranks = options.configs[0], options.layout.stage
        config, rank = EncoderConfig(width=target.hidden), min(world.rank, self._ranks - 1)
        self.pool = RowPool(config, target, Parallel(tp=self._ranks), rank, PAGES, options.replica)
        seeds = {(encode.NAME, 0): Seed(rank_address(encode.address(options.folder), 0, 0))}
        how = attrs.evolve(options.kvproto(), spread="even", keys=None, feed=None)
        self.sinks: Mapping[int, Sink] = (
            {world.rank: Sink(options.name, self.pool.pool, seeds, how)} if world.rank < self._ranks else {}
        )
        """Of this process; empty on pipeline stages that embed no tokens."""
        self.lines = Lines(self.sinks, seeds)
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._answering: dict[int, bool] = {}

    @property
    def ready(self) -> bool:
        """Whether the encoder answers every rank."""
        return sum(self._answering.values()) == self._ranks

    def answers(self, rank: int, replicas: list[int]) -> None:
        """The encoder answers a rank, or does not any more."""
        self._answering[rank] = bool(replicas)

    def hear(self) -> Said:
        """Words for what has happened at the sinks of this process."""
        return [{**w, "rank": rank} for rank, sink in self.sinks.items() for e in sink.events() for w in self._words(e)]

    def _words(self, event: Event) -> Said:
        ids = {fetch: job.id for job in self._jobs.values() for fetch in job.fetches.values()}
        match event:
            case Arrived(fetch):
                return [{"op": "rows", "id": ids[fetch], "free": True}]
            case Lost(fetch):
                said = {"error": str(event.error), "code": event.error.code.name, "free": event.pages_free}
                return [{"op": "rows", "id": ids[fetch], **said}]
            case PagesFree(fetch):
                return [{"op": "rows_free", "id": ids[fetch]}]
            case Refused() if event.error.code.name not in PASSING and not self.lines.known:
                names = ("prefill", event.peer) if event.by_us else (event.peer, "prefill")
                return [{"op": "misfit", "error": f"{names[0]} refused {names[1]}: {event.error.between(*names)}"}]
        return []

    def add(self, id: str, ticket: Ticket, prompt: Prompt) -> None:
        """Fetch the rows of a prompt as soon as there are pages; raises EngineError if there never will be enough."""
        self.pool.check(prompt)
        self._jobs[id] = _Job(id, ticket, prompt)
        self._waiting.append(self._jobs[id])

    def pending(self, id: str) -> bool:
        """Whether rows of a prompt have not arrived yet, or are lost."""
        return id in self._jobs

    def begin(self) -> Said:
        """Begin with fetches for which there are pages; returns words for fetches that ended at once."""
        said: Said = []
        while self._waiting and (pages := self.pool.take(self._waiting[0].prompt)) is not None:
            job = self._waiting.popleft()
            job.pages = pages
            for rank, sink in self.sinks.items():
                try:
                    job.fetches[rank] = sink.fetch(job.ticket, job.prompt, {ROWS: pages})
                except KvprotoError as error:
                    told = {"error": str(error), "code": code_of(error), "free": True}
                    said.append({"op": "rows", "rank": rank, "id": job.id, **told})
        return said

    def drop(self, id: str) -> None:
        """Give up the rows of a prompt."""
        if (job := self._jobs.get(id)) is None:
            return
        if job in self._waiting:
            self._waiting.remove(job)
            del self._jobs[id]
        for fetch in job.fetches.values():
            fetch.abort("the request was given up")

    def arrived(self, rank: int, word: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any] | None] | None:
        """Take a rank's word: once all have spoken, what came, and the word of a rank that has lost it."""
        job = self._jobs[word["id"]]
        job.ended[rank] = word
        if word["free"]:
            job.free.add(rank)
        if "error" in word:
            self.drop(job.id)
        if len(job.ended) < self._ranks:
            return None
        rows = self.pool.read(job.pages, job.prompt.axes[AXIS]) if self.sinks else None
        lost = next((w for w in job.ended.values() if "error" in w), None)
        self._free(job)
        return rows, lost

    def freed(self, rank: int, word: dict[str, Any]) -> None:
        """Nothing can write the rows of a lost fetch any more on a rank."""
        job = self._jobs[word["id"]]
        job.free.add(rank)
        if len(job.ended) == self._ranks:
            self._free(job)

    def _free(self, job: _Job) -> None:
        if len(job.free) == self._ranks:
            del self._jobs[job.id]
            self.pool.pages.free(job.pages)

    def close(self, reason: str) -> None:
        """Close the sinks of this process."""
        for sink in self.sinks.values():
            sink.close(reason)
