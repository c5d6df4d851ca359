"""One process of an engine: its ranks' models, pools and pages, and the loop that keeps all ranks in one state."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from kvproto import Pool, Sink, Source
from kvproto.events import Event, ProtocolError

from ..cache import PageAllocator
from ..cache.memory import device_of
from ..engine.build import Hosted, torch_hosted
from ..engine.description import DRAFT, TARGET, geometry
from ..engine.lockstep import Lockstep, Said
from ..engine.sequence import Sequence
from ..engine.world import World
from ..errors import EngineError
from .control import Control
from .options import EngineOptions

IDLE = 0.005
"""Seconds that the process of rank 0 waits for the router when there is nothing to compute."""


class EngineProcess:
    """What prefill and decode have in common.

    A word is a JSON object with an "op"; each word that the router or a rank says is heard by all processes, in one
    order, and handled by the method `on_OP(rank, word)`.
    """

    doors: Mapping[int, Source] | Mapping[int, Sink]
    """Each hosted rank's side of kvproto; subclasses open them."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        self.options, self.ranks = options, options.layout.ranks
        configs, tokenizer, layout = options.configs, options.tokenizer, options.layout
        self.eos = tokenizer.eos
        self.device = device_of(options.device(world.rank) if options.framework == "torch" else None)
        """Where torch leaves work pending; a step in JAX is over when it returns."""
        folders = options.target, options.draft
        self.geometry = geometry(*folders, configs, tokenizer.identity, layout, options.page_size, options.replica)
        hosted = self._host(options, world)
        self.pools: Mapping[int, Pool] = hosted.pools
        self.target, self.draft = hosted.target, hosted.draft
        self.pages = {name: PageAllocator(options.pages, options.seed + i) for i, name in enumerate((TARGET, DRAFT))}
        self.status: int | None = None
        """Exit status, once the engine is to end."""
        self.said: Said = []
        """What this process has to tell the others beside events of kvproto."""
        self._lockstep = Lockstep(world.size, world.group)
        self._control: Control | None = None

    def _host(self, options: EngineOptions, world: World) -> Hosted:
        if options.framework == "jax":
            from ..jax_engine.build import jax_hosted  # imports JAX, which torch engines do without

            folders, gpus = (options.target, options.draft), options.devices[: self.ranks]
            return jax_hosted(folders, self.geometry, options.layout, options.pages, gpus)
        return torch_hosted(
            (options.target, options.draft), options.configs, self.geometry, options.layout, world, options.pages,
            self.device, options.memory, options.back_end, options.captured,
        )  # fmt: skip

    # the loop

    def serve(self, role: str) -> int:
        """Until told to stop, or until nothing can be served any more; the exit status."""
        if 0 in self.pools:
            self._control = Control(self.options.folder, f"{role}-{self.options.replica}")
        try:
            while self.status is None:
                for said in self._lockstep.exchange(self._hear()):
                    for word in said:
                        getattr(self, "on_" + word["op"])(word.get("rank", 0), word)
                self.advance()
        finally:
            for door in self.doors.values():
                door.close("stopped" if self.status == 0 else "ended by an error")
        if self._control is not None:
            self._control.close()
        return self.status

    def _hear(self) -> Said:
        """What has happened at these ranks, and what the router said to rank 0."""
        if self._control is not None:
            self._control.wait(0 if self.busy else IDLE)
        said, self.said = self.said, []
        for rank, door in self.doors.items():
            said += [{**word, "rank": rank} for event in door.events() for word in self.words(rank, event)]
        return said + (self._control.receive() if self._control is not None else [])

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        raise NotImplementedError

    def advance(self) -> None:
        """Compute one step of something, if there is anything."""
        raise NotImplementedError

    def words(self, rank: int, event: Event) -> Said:
        """What the other ranks have to know of an event of kvproto."""
        if isinstance(event, ProtocolError):
            self.warn(rank, f"from {event.peer}: {event.error}")
        return []

    # to people and to the router

    def warn(self, rank: int, sentence: str) -> None:
        """Say something on stderr."""
        print(f"{self.options.name} rank {rank} {sentence}", file=sys.stderr, flush=True)

    def tell(self, op: str, **fields: Any) -> None:
        """Tell the router; the process of rank 0 speaks for all."""
        if self._control is not None:
            self._control.send(op, **fields)

    # pages

    def need(self, tokens: int) -> tuple[int, int]:
        """Pages of the target's and of the draft's pool that so many tokens take on every rank."""
        return self.target.shard.pages(tokens), self.draft.shard.pages(tokens)

    def check_room(self, tokens: int) -> None:
        """Raise EngineError for a request that the pools can never hold."""
        need, room = max(self.need(tokens)), self.options.pages
        if need > room:
            raise EngineError(f"{tokens} tokens need {need} pages, the pools have {room}")

    def rest(self) -> None:
        """Wait until all device work has completed: what used pages is over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @staticmethod
    def tables(sequence: Sequence) -> dict[str, list[int]]:
        """A sequence's page tables by group name."""
        return {TARGET: sequence.target_pages, DRAFT: sequence.draft_pages}
