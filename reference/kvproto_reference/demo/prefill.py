"""`kvproto-prefill`: reads prompts, fills the caches of target and draft, hands both over."""

import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import torch

from kvproto.errors import DeviceFault, KvprotoError, LocalError
from kvproto.net import Listener
from kvproto.net.sockets import wait
from kvproto.node import Computed, Finished, SourceNode
from kvproto.node.source import Sent
from kvproto.planning.geometry import validate
from kvproto.session import Party
from kvproto.session.events import Expired, ProtocolError, Released, SessionRefused
from kvproto.wire import from_json
from kvproto.wire.enums import ErrorCode, Outcome
from kvproto.wire.messages import Ticket

from .. import checkpoint
from ..engine.description import DRAFT, FIRST, TARGET, adopt, device_of, geometry
from ..engine.launch import launch
from ..engine.lockstep import Lockstep, Said
from ..engine.pages import PageAllocator, pages_for
from ..engine.prefill import PrefillStep, prefill_steps
from ..engine.runner import ModelRunner
from ..engine.sampling import SamplingParams
from ..engine.sequence import Sequence
from ..errors import EngineError
from ..models import TensorParallel
from .content import content_digest
from .control import Control
from .options import EngineOptions, incarnation, parse, rank_address

IDLE = 0.005
"""Seconds that rank 0 waits for news when there is nothing to compute."""


@attrs.define
class Job:
    """One prompt inside the engine."""

    ticket: Ticket
    sequence: Sequence
    steps: Iterator[PrefillStep] | None = None
    released: set[int] = attrs.Factory(set)
    events: list[torch.cuda.Event] = attrs.Factory(list)
    """After each layer, on a GPU; kept while a copy may wait for them."""


class PrefillRank:
    """One tensor-parallel rank of a prefill engine."""

    def __init__(self, options: EngineOptions, tp: TensorParallel) -> None:
        self.options, self.tp = options, tp
        configs, tokenizer = options.configs, options.tokenizer
        self._eos = tokenizer.eos
        self._geometry = geometry(
            options.target, options.draft, configs, tokenizer.identity, tp.size, options.page_size
        )
        validate(self._geometry)
        self._device = options.device(tp.rank)
        pool = options.allocate(self._geometry, tp.rank, {TARGET: options.pages, DRAFT: options.pages})
        self.target, self.draft = (
            ModelRunner(
                checkpoint.load(folder, tp, dtype=config.dtype, device=device_of(self._device)),
                adopt(pool, config, group, tp),
                options.page_size,
            )
            for folder, config, group in zip((options.target, options.draft), configs, (TARGET, DRAFT), strict=True)
        )
        self._pages = {g: PageAllocator(options.pages, options.seed + g) for g in (TARGET, DRAFT)}
        self.control = Control(options.folder, "prefill") if tp.rank == 0 else None
        self._listener = Listener(rank_address(options.address, tp.rank), options.insecure)
        party = Party(options.name, 0, tp.rank, incarnation())
        endpoints = {r: rank_address(options.address, r) for r in range(tp.size)}
        self.node = SourceNode(
            party,
            self._geometry,
            pool,
            self._listener,
            endpoints,
            options.verify,
            options.movers(pool.memories),
            options.part,
            options.pull,
        )
        self._lockstep = Lockstep(tp.size, tp.group)
        self._queue: deque[Job] = deque()
        self._jobs: dict[bytes, Job] = {}
        self._said: Said = []
        """What this rank has to say to the others."""

    def serve(self) -> int:
        """Until told to stop."""
        while True:
            if self.control is not None:
                busy = self.node.busy or any(job.steps is not None for job in self._queue)
                wait([self._listener.socket, self.control.listener.socket], 0 if busy else IDLE)
            for rank, said in enumerate(self._lockstep.exchange(self._hear())):
                for word in said:
                    if word["op"] == "stop":
                        self.node.close("stopped")
                        if self.control is not None:
                            self.control.listener.close()
                        return 0
                    getattr(self, "on_" + word["op"])(rank, word)
            self._advance()

    def _hear(self) -> Said:
        self._poll()
        said, self._said = self._said, []
        return said + (self.control.receive() if self.control is not None else [])

    def _poll(self) -> None:
        """Let the node work; without any word to the other ranks."""
        said = self._said
        for event in self.node.poll():
            match event:
                case Sent():
                    said.append({"op": "sent", "key": event.key.hex(), "sink": event.sink, "seconds": event.seconds,
                                 "left": event.left, "bytes": {str(g): n for g, n in event.bytes.items()}})  # fmt: skip
                case Released():
                    said.append({"op": "released", "key": event.key.hex(), "routed": list(event.routed)})
                case Expired():
                    said.append({"op": "expired", "key": event.key.hex()})
                case SessionRefused():
                    mine = f"{self.options.name} rank {self.tp.rank}"
                    sentence = f"{mine} refused {event.peer}: {event.error.between(mine, event.peer)}"
                    print(sentence, file=sys.stderr, flush=True)
                case ProtocolError():
                    mine = f"{self.options.name} rank {self.tp.rank}"
                    print(f"{mine} from {event.peer}: {event.error}", file=sys.stderr, flush=True)
                case _:
                    pass

    def _tell(self, op: str, **fields: Any) -> None:
        if self.control is not None:
            self.control.send(op, **fields)

    def on_hello(self, rank: int, word: dict[str, Any]) -> None:
        """The router asks whether we are ready."""
        self._tell("ready")

    def on_prefill(self, rank: int, word: dict[str, Any]) -> None:
        """A request of the router."""
        ticket = from_json(Ticket, word["ticket"])
        key = bytes(ticket.key)
        prompt = word["prompt"]
        self.node.expect(ticket, content_digest(prompt))
        try:
            if not prompt:
                raise EngineError("the prompt is empty")
            need, room = pages_for(len(prompt), self.options.page_size), self.options.pages
            if need > room:
                raise EngineError(f"the prompt of {len(prompt)} tokens needs {need} pages, the pools have {room}")
            sampling = SamplingParams(temperature=word["temperature"], seed=word["seed"])
            sequence = Sequence(prompt=prompt, max_new=word["max_new"], sampling=sampling, eos=self._eos)
            job = Job(ticket, sequence)
        except EngineError as error:
            self.node.refuse(
                key, LocalError(ErrorCode.PROMPT_TOO_LONG, "prompt", f"room for {self.options.pages} pages", str(error))
            )
            self._tell("refused", key=key.hex(), error=str(error))
            return
        self._jobs[key] = job
        self._queue.append(job)

    def _advance(self) -> None:
        """One chunk of the first prompt; prompts wait their turn for pages."""
        if not self._queue:
            return
        job = self._queue[0]
        if job.steps is None and not self._admit(job):
            return
        assert job.steps is not None
        step = next(job.steps)
        if step.first is None:
            return
        self._queue.popleft()
        outcome = Outcome.FINISHED if step.first in self._eos else Outcome.CONTINUE
        items = {TARGET: job.sequence.target_pages, DRAFT: job.sequence.draft_pages}
        first = {(FIRST, "token"): step.first.to_bytes(4, "little")}
        finished = Finished(items, len(job.sequence.prompt), outcome, first, self._event(job))
        self.node.finish(bytes(job.ticket.key), finished)
        self._tell("prefilled", key=bytes(job.ticket.key).hex())

    def _on_layer(self, job: Job, model: int, stop: int, layer: int) -> None:
        """Hand over what is there, while the next layer computes."""
        items = {TARGET: job.sequence.target_pages, DRAFT: job.sequence.draft_pages}
        computed = Computed(items, stop, (layer, layer + 1), model, self._event(job))
        self.node.computed(bytes(job.ticket.key), computed)
        self._poll()

    def _event(self, job: Job) -> int | None:
        """Of the device, after all that was launched till now."""
        if self._device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        job.events.append(event)
        return int(event.cuda_event)

    def _admit(self, job: Job) -> bool:
        need = pages_for(len(job.sequence.prompt), self.options.page_size)
        if any(a.available < need for a in self._pages.values()):
            return False
        job.sequence.target_pages = self._pages[TARGET].allocate(need)
        job.sequence.draft_pages = self._pages[DRAFT].allocate(need)
        job.steps = prefill_steps(
            job.sequence, self.target, self.draft, self.options.chunk, partial(self._on_layer, job)
        )
        return True

    def on_sent(self, rank: int, word: dict[str, Any]) -> None:
        """A rank copied."""
        self._tell("sent", source=rank, **{k: v for k, v in word.items() if k != "op"})

    def on_released(self, rank: int, word: dict[str, Any]) -> None:
        """A rank is no longer needed by any sink."""
        job = self._jobs.get(bytes.fromhex(word["key"]))
        if job is not None:
            job.released.add(rank)
            # ranks without a route hear nothing and follow this verdict
            if job.released >= set(word["routed"]):
                self._free(job)

    def on_expired(self, rank: int, word: dict[str, Any]) -> None:
        """Nobody fetched the request."""
        job = self._jobs.get(bytes.fromhex(word["key"]))
        if job is not None:
            self._free(job)
            self._tell("refused", key=word["key"], error="nobody fetched the request before its deadline")

    def _free(self, job: Job) -> None:
        key = bytes(job.ticket.key)
        del self._jobs[key]
        if job in self._queue:
            self._queue.remove(job)
        self._pages[TARGET].free(job.sequence.target_pages)
        self._pages[DRAFT].free(job.sequence.draft_pages)
        self.node.forget(key)
        self._tell("freed", key=key.hex(), available=[a.available for a in self._pages.values()])


def _run(options: EngineOptions, tp: TensorParallel) -> int:
    return PrefillRank(options, tp).serve()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse("prefill", argv)
        return launch(_run, options, options.tp, options.folder)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
