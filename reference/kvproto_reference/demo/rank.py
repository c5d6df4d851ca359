"""One tensor-parallel rank of an engine: models, pools and pages, and the loop that keeps all ranks in one state."""

import sys
from typing import Any

import torch

from kvproto import Sink, Source
from kvproto.events import Event, ProtocolError

from .. import checkpoint
from ..engine.description import DRAFT, TARGET, geometry, hand_over
from ..engine.lockstep import Lockstep, Said
from ..engine.memory import device_of
from ..engine.pages import PageAllocator, pages_for
from ..engine.pool import KVPool
from ..engine.runner import ModelRunner
from ..engine.sequence import Sequence
from ..errors import EngineError
from ..models import TensorParallel
from .control import Control
from .options import EngineOptions

IDLE = 0.005
"""Seconds that rank 0 waits for the router when there is nothing to compute."""


class EngineRank:
    """What prefill and decode have in common.

    A word is a JSON object with an "op"; each word that the router or a rank says is heard by all ranks, in one order,
    and handled by the method `on_OP(rank, word)`.
    """

    door: Source | Sink
    """The rank's side of kvproto; subclasses open it."""

    def __init__(self, options: EngineOptions, tp: TensorParallel) -> None:
        self.options, self.tp = options, tp
        configs, tokenizer = options.configs, options.tokenizer
        self.eos = tokenizer.eos
        self.device = device_of(options.device(tp.rank))
        caches = {
            name: KVPool.allocate(config, options.pages, options.page_size, tp, self.device, options.memory)
            for name, config in zip((TARGET, DRAFT), configs, strict=True)
        }
        stated = geometry(options.target, options.draft, configs, tokenizer.identity, tp.size, options.page_size)
        self.pool = hand_over(stated, caches, tp.rank)
        self.target, self.draft = (
            ModelRunner(
                checkpoint.load(folder, tp, dtype=cache.config.dtype, device=self.device), cache, options.page_size
            )
            for folder, cache in zip((options.target, options.draft), caches.values(), strict=True)
        )
        self.pages = {name: PageAllocator(options.pages, options.seed + i) for i, name in enumerate(caches)}
        self.status: int | None = None
        """Exit status, once this rank is to end."""
        self.said: Said = []
        """What this rank has to tell the others beside events of kvproto."""
        self._lockstep = Lockstep(tp.size, tp.group)
        self._control: Control | None = None

    # the loop

    def serve(self, role: str) -> int:
        """Until told to stop, or until nothing can be served any more; the exit status."""
        self._control = Control(self.options.folder, role) if self.tp.rank == 0 else None
        with self.door:
            while self.status is None:
                for rank, said in enumerate(self._lockstep.exchange(self._hear())):
                    for word in said:
                        getattr(self, "on_" + word["op"])(rank, word)
                self.advance()
            self.door.close("stopped" if self.status == 0 else "ended by an error")
        if self._control is not None:
            self._control.close()
        return self.status

    def _hear(self) -> Said:
        """What has happened at this rank, and what the router said to rank 0."""
        if self._control is not None:
            self._control.wait(0 if self.busy else IDLE)
        said, self.said = self.said, []
        said += [word for event in self.door.events() for word in self.words(event)]
        return said + (self._control.receive() if self._control is not None else [])

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        raise NotImplementedError

    def advance(self) -> None:
        """Compute one step of something, if there is anything."""
        raise NotImplementedError

    def words(self, event: Event) -> Said:
        """What the other ranks have to know of an event of kvproto."""
        if isinstance(event, ProtocolError):
            self.warn(f"from {event.peer}: {event.error}")
        return []

    # to people and to the router

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.options.name} rank {self.tp.rank}"

    def warn(self, sentence: str) -> None:
        """Say something on stderr."""
        print(f"{self.name} {sentence}", file=sys.stderr, flush=True)

    def tell(self, op: str, **fields: Any) -> None:
        """Tell the router; rank 0 speaks for all."""
        if self._control is not None:
            self._control.send(op, **fields)

    # pages

    def check_room(self, tokens: int) -> None:
        """Raise EngineError for a request that the pools can never hold."""
        need, room = pages_for(tokens, self.options.page_size), self.options.pages
        if need > room:
            raise EngineError(f"{tokens} tokens need {need} pages, the pools have {room}")

    def take_pages(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence pages for `tokens` tokens in both pools; False, taking none, while too few are free."""
        need = pages_for(tokens, self.options.page_size)
        if any(pages.available < need for pages in self.pages.values()):
            return False
        sequence.target_pages, sequence.draft_pages = (pages.allocate(need) for pages in self.pages.values())
        return True

    def free_pages(self, sequence: Sequence) -> None:
        """Take a sequence's pages back, once all device work that used them has completed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, table in self.tables(sequence).items():
            self.pages[name].free(table)

    @staticmethod
    def tables(sequence: Sequence) -> dict[str, list[int]]:
        """A sequence's page tables by group name."""
        return {TARGET: sequence.target_pages, DRAFT: sequence.draft_pages}

    @property
    def available(self) -> list[int]:
        """Free pages of each pool."""
        return [pages.available for pages in self.pages.values()]
