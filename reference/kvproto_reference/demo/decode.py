"""`kvproto-decode`: fetches the caches of target and draft by ticket, and decodes speculatively."""

import functools
import sys
from collections import deque
from typing import Any

import attrs
import torch

from kvproto.copying.grants import items_needed
from kvproto.errors import DeviceFault, KvprotoError
from kvproto.net import Dialer
from kvproto.net.sockets import wait
from kvproto.node import SinkNode
from kvproto.node.sink import Received
from kvproto.session import Party
from kvproto.session.events import Lost, ProtocolError, Proven, Ready, SessionClosed, SessionRefused
from kvproto.wire import from_json
from kvproto.wire.enums import Outcome, Proof
from kvproto.wire.messages import Ticket

from .. import checkpoint
from ..engine.description import DRAFT, FIRST, TARGET, adopt, device_of, geometry
from ..engine.launch import launch
from ..engine.lockstep import Lockstep, Said
from ..engine.pages import PageAllocator, pages_for
from ..engine.runner import ModelRunner
from ..engine.sampling import SamplingParams
from ..engine.sequence import Sequence, rows_needed
from ..engine.speculative import SpeculativeDecoder
from ..errors import EngineError
from ..models import TensorParallel
from .content import content_digest
from .control import Control
from .options import EngineOptions, incarnation, parse, rank_address
from .prefill import IDLE


@attrs.define
class Job:
    """One request inside the engine."""

    id: str
    ticket: Ticket
    sequence: Sequence
    transfer: int | None = None
    verdicts: dict[int, dict[str, Any]] = attrs.Factory(dict)
    """What each rank said of its arrival."""


class DecodeRank:
    """One tensor-parallel rank of a decode engine."""

    def __init__(self, options: EngineOptions, tp: TensorParallel, node: type[SinkNode] = SinkNode) -> None:
        self.options, self.tp = options, tp
        configs, tokenizer = options.configs, options.tokenizer
        self._eos = tokenizer.eos
        self._geometry = geometry(
            options.target, options.draft, configs, tokenizer.identity, tp.size, options.page_size
        )
        self._device = options.device(tp.rank)
        pool = options.allocate(self._geometry, tp.rank, {TARGET: options.pages, DRAFT: options.pages})
        target, draft = (
            ModelRunner(
                checkpoint.load(folder, tp, dtype=config.dtype, device=device_of(self._device)),
                adopt(pool, config, group, tp),
                options.page_size,
            )
            for folder, config, group in zip((options.target, options.draft), configs, (TARGET, DRAFT), strict=True)
        )
        self._decoder = SpeculativeDecoder(target, draft, options.speculate)
        self._pages = {g: PageAllocator(options.pages, options.seed + g) for g in (TARGET, DRAFT)}
        self.control = Control(options.folder, "decode") if tp.rank == 0 else None
        self._dialer = Dialer(options.insecure)
        party = Party(options.name, 0, tp.rank, incarnation())
        seed = rank_address(options.address, 0)
        self.node = node(
            party, self._geometry, pool, self._dialer, seed, options.verify, options.movers(pool.memories), options.pull
        )
        self._lockstep = Lockstep(tp.size, tp.group)
        self._ready: set[int] = set()
        self._asked = False
        self._fatal: str | None = None
        self._queue: deque[Job] = deque()
        self._fetching: dict[int, Job] = {}
        self._running: deque[Job] = deque()
        self._quarantine: dict[int, tuple[Job, set[int]]] = {}
        """By transfer: jobs that may still be written, and the ranks without proof."""

    def serve(self) -> int:
        """Until told to stop, or refused."""
        while True:
            if self.control is not None:
                busy = self._running or self.node.busy
                wait([*self._dialer.sockets, self.control.listener.socket], 0 if busy else IDLE)
            for rank, said in enumerate(self._lockstep.exchange(self._hear())):
                for word in said:
                    if word["op"] == "stop":
                        self._tell("stopped")
                        return self._end("stopped", 0)
                    getattr(self, "on_" + word["op"])(rank, word)
            if self._fatal is not None:
                self._tell("fatal", error=self._fatal)
                if self.tp.rank == 0:
                    print(f"error: {self._fatal}", file=sys.stderr, flush=True)
                return self._end("refused", 1)
            self._fetch()
            self._decode_one()

    def _end(self, reason: str, status: int) -> int:
        self.node.close(reason)
        if self.control is not None:
            self.control.listener.close()
        return status

    def _hear(self) -> Said:
        said: Said = self.control.receive() if self.control is not None else []
        for event in self.node.poll():
            match event:
                case Ready():
                    said.append({"op": "ready"})
                case Received():
                    said.append({
                        "op": "received", "transfer": event.transfer, "seconds": event.seconds,
                        "finished": event.outcome == Outcome.FINISHED,
                        "first": _first_token(event),
                        "bytes": {str(w): n for w, n in event.bytes.items()},
                        "checksums": [[w, g, f"{a:016x}", f"{b:016x}"] for (w, g), (a, b) in event.checksums.items()],
                    })  # fmt: skip
                case Lost():
                    said.append(
                        {
                            "op": "lost",
                            "transfer": event.transfer,
                            "error": str(event.error),
                            "proven": event.proof == Proof.PROVEN,
                        }
                    )
                case Proven():
                    said.append({"op": "proven", "transfer": event.transfer})
                case SessionRefused():
                    names = (self.options.name, event.peer) if event.by_us else (event.peer, self.options.name)
                    said.append(
                        {"op": "gone", "error": f"{names[0]} refused {names[1]}: {event.error.between(*names)}"}
                    )
                case SessionClosed():
                    said.append({"op": "gone", "error": f"{event.peer} closed the session: {event.reason}"})
                case ProtocolError():
                    print(
                        f"{self.options.name} rank {self.tp.rank}: {event.peer}: {event.error}",
                        file=sys.stderr,
                        flush=True,
                    )
                case _:
                    pass
        return said

    def _tell(self, op: str, **fields: Any) -> None:
        if self.control is not None:
            self.control.send(op, **fields)

    def on_hello(self, rank: int, word: dict[str, Any]) -> None:
        """The router asks whether we are ready."""
        self._asked = True
        self._greet()

    def on_ready(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has registered with all its sources."""
        self._ready.add(rank)
        self._greet()

    def _greet(self) -> None:
        plan = self.node.endpoint.plan
        if not self._asked or len(self._ready) < self.tp.size or plan is None:
            return
        flags = [{"source": r.source, "sink": r.sink, "group": r.group, "digest": r.digest.hex()} for r in plan.routes]
        required = {str(r): list(plan.required(r)) for r in range(self.tp.size)}
        names = {str(g): name for g, name in self.node.name_of_groups.items()}
        self._tell("ready", routes=flags, required=required, groups=names, plan=plan.digest.hex())

    def on_gone(self, rank: int, word: dict[str, Any]) -> None:
        """The prefill engine refused us, or left."""
        self._fatal = self._fatal or word["error"]

    def on_decode(self, rank: int, word: dict[str, Any]) -> None:
        """A request of the router."""
        ticket = from_json(Ticket, word["ticket"])
        try:
            sampling = SamplingParams(temperature=word["temperature"], seed=word["seed"])
            sequence = Sequence(prompt=word["prompt"], max_new=word["max_new"], sampling=sampling, eos=self._eos)
            rows = rows_needed(len(sequence.prompt), sequence.max_new)
            need, room = pages_for(rows, self.options.page_size), self.options.pages
            if need > room:
                raise EngineError(f"{rows} tokens need {need} pages, the pools have {room}")
        except EngineError as error:
            self._tell("failed", id=word["id"], error=str(error))
            return
        self._queue.append(Job(word["id"], ticket, sequence))

    def on_received(self, rank: int, word: dict[str, Any]) -> None:
        """Everything for one rank of a request is here."""
        self._verdict(rank, word)

    def on_lost(self, rank: int, word: dict[str, Any]) -> None:
        """A rank's transfer failed."""
        self._verdict(rank, word)

    def on_proven(self, rank: int, word: dict[str, Any]) -> None:
        """Nothing can write the pages that a lost request has on one rank any more."""
        number = word["transfer"]
        if number in self._fetching:
            self._fetching[number].verdicts[rank]["proven"] = True
            return
        job, unproven = self._quarantine[number]
        unproven.discard(rank)
        if not unproven:
            del self._quarantine[number]
            self._release(job)

    def _fetch(self) -> None:
        """Ask for the caches of waiting requests while there are pages."""
        while self._queue and len(self._ready) == self.tp.size:
            sequence = self._queue[0].sequence
            need = pages_for(rows_needed(len(sequence.prompt), sequence.max_new), self.options.page_size)
            if any(a.available < need for a in self._pages.values()):
                return
            job = self._queue.popleft()
            sequence.target_pages, sequence.draft_pages = (self._pages[g].allocate(need) for g in (TARGET, DRAFT))
            tokens = len(sequence.prompt)
            items = {}
            for group, pages in ((TARGET, sequence.target_pages), (DRAFT, sequence.draft_pages)):
                items[group] = pages[: items_needed(self.node.pool.side.group(group), 0, 0, tokens)]
            number = self.node.transfer(job.ticket, content_digest(sequence.prompt), 0, tokens, items)
            self._fetching[number] = job

    def _verdict(self, rank: int, word: dict[str, Any]) -> None:
        """A request starts when all ranks have received it, and ends when one has lost it and all have spoken."""
        job = self._fetching[word["transfer"]]
        job.verdicts[rank] = word
        if word["op"] == "lost" and rank != self.tp.rank:
            # nothing of it is wanted any more; a rank that has spoken already ignores this
            self.node.abort(word["transfer"], "lost by another rank")
        if len(job.verdicts) < self.tp.size:
            return
        del self._fetching[word["transfer"]]
        words = [job.verdicts[r] for r in sorted(job.verdicts)]
        lost = next((w for w in words if w["op"] == "lost"), None)
        if lost is not None:
            unproven = {r for r, w in job.verdicts.items() if not w.get("proven", True)}
            if unproven:
                self._quarantine[word["transfer"]] = job, unproven
            else:
                self._release(job)
            self._tell("failed", id=job.id, error=lost["error"])
            return
        first = next(w["first"] for w in words if w["first"] is not None)
        job.sequence.append([first])
        fields = [{k: w[k] for k in ("seconds", "bytes", "checksums")} for w in words]
        self._tell("arrived", id=job.id, ranks=fields, tokens=[first])
        self._running.append(job)

    def _decode_one(self) -> None:
        """One speculative step of the first running request; then it is the next one's turn."""
        if not self._running:
            return
        job = self._running.popleft()
        tokens = self._decoder.step(job.sequence)
        if tokens:
            self._tell("tokens", id=job.id, tokens=tokens)
        if not job.sequence.finished:
            self._running.append(job)
            return
        self._release(job)
        stats = job.sequence.stats
        self._tell("finished", id=job.id, tokens=job.sequence.generated, steps=stats.steps, decoded=stats.tokens,
                   accepted=stats.accepted, proposed=stats.proposed,
                   available=[a.available for a in self._pages.values()])  # fmt: skip

    def _release(self, job: Job) -> None:
        if self._device is not None:  # an item may be named again when all device work that used it has completed
            torch.cuda.synchronize(self._device)
        self._pages[TARGET].free(job.sequence.target_pages)
        self._pages[DRAFT].free(job.sequence.draft_pages)


def _first_token(event: Received) -> int | None:
    token = event.handoff.get((FIRST, "token"))
    return None if token is None else int.from_bytes(token, "little")


def _run(node: type[SinkNode], options: EngineOptions, tp: TensorParallel) -> int:
    return DecodeRank(options, tp, node).serve()


def main(argv: list[str] | None = None, node: type[SinkNode] = SinkNode) -> int:
    """Entry point; `node` is the kvproto stack of a rank."""
    try:
        options = parse("decode", argv)
        return launch(functools.partial(_run, node), options, options.tp, options.folder)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
