"""`kvproto-engine`: prefills or decodes, as its role says, and hands to other engines what it has computed.

Each engine is a Source and a Sink over one pool. Beside a prompt's cache it hands over rows that earlier requests left
(`lend` and, at the other engine, `copy`), and a request that it decodes (`move`), which the other one decodes on.
"""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from kvproto import KvprotoError, Prompt, Request, Sink, Source, Ticket, read_ticket
from kvproto.errors import DeviceFault
from kvproto.events import Connected, Event, Expired, Freed, ProtocolError, Refused, Undelivered

from ..cache.windows import first_row
from ..demo.decode import DecodeProcess, rows_of
from ..demo.decode import Job as Decoded
from ..demo.options import EngineOptions, parse, rank_address
from ..engine import logprobs
from ..engine.description import DRAFT, FIRST, HIDDEN, TARGET, hidden_bytes, hidden_type, windows_of
from ..engine.launch import launch
from ..engine.lockstep import Said
from ..engine.prefill import Prefiller
from ..engine.sequence import TokenSequence
from ..engine.world import World
from ..errors import EngineError, code_of


@attrs.define(eq=False)
class Lent:
    """A request whose rows other engines may read."""

    id: str
    requests: dict[int, Request]
    """kvproto's request of each rank in this process."""
    sequence: TokenSequence
    needed: set[int]
    """Ranks that have to report it over: all, until one says which have a route."""
    rows: int = 0
    """Rows that stay for others when it is over; of a prompt, the rows that were found."""
    job: Decoded | None = None
    """The record with which a moved request is decoded on if no one takes it."""
    over: set[int] = attrs.Factory(set)
    delivered: bool = True
    """Whether no rank has said that its sinks may not have it."""
    stays: bool = False
    """Whether a moved request is to be decoded on here."""
    dropped: bool = False
    """Whether nobody wants it any more."""
    events: list[torch.cuda.Event] = attrs.Factory(list)
    """One event after each layer, on a GPU; they live as long as a copy may wait for them."""


class PeerProcess(DecodeProcess):
    """One process of an engine among engines that are all connected to each other."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        super().__init__(options, world)
        if self.kept is not None:
            raise EngineError("pages on the host do not move yet: leave --host-pages out")
        self.role = options.role
        listen = {rank: rank_address(options.address, options.replica, rank) for rank in range(self.ranks)}
        self.sources = {
            rank: Source(options.name, pool, listen, options.kvproto()) for rank, pool in self.pools.items()
        }
        self.doors = {rank: (sink, self.sources[rank]) for rank, sink in self.sinks.items()}
        self._elsewhere = None  # the pool stays where it is, as it serves a Source and a Sink
        self._prefiller = Prefiller(self.target, self.draft, options.chunk, self._on_layer)
        self._queue: deque[Lent] = deque()
        """Prompts that wait for pages."""
        self._lent: dict[str, Lent] = {}
        self._names: dict[Request, str] = {}
        self._prompts: dict[TokenSequence, Lent] = {}
        """Prompts that are computed for others."""

    @property
    def busy(self) -> bool:
        """Whether a request is being decoded, or a prompt computed."""
        return super().busy or self._prefiller.busy

    @property
    def held(self) -> bool:
        """Whether a request is not over, or may still be read."""
        return super().held or bool(self._lent)

    def heard(self, door: Source | Sink, rank: int, event: Event) -> Said:
        """Words for an event of a rank's Source or Sink."""
        if isinstance(door, Sink):
            return super().heard(door, rank, event)
        match event:
            case Freed(request) | Undelivered(request) if request in self._names:
                needed, delivered = list(event.routed), isinstance(event, Freed)
                return [{"op": "over", "id": self._names[request], "needed": needed, "delivered": delivered}]
            case Expired(request) if request in self._names:
                return [{"op": "over", "id": self._names[request], "needed": [], "delivered": False, "expired": True}]
            case Refused():
                self.warn(rank, f"refused {event.peer}: {event.error.between(self.options.name, event.peer)}")
            case ProtocolError():
                return super().words(rank, event)
        return []

    def words(self, rank: int, event: Event) -> Said:
        """Words of its Sink; of those that it is connected to, one that does not fit is only left out."""
        said = super().words(rank, event)
        if isinstance(event, Connected):
            return said
        return [{**word, "misfit": False} if word["op"] == "peer" else word for word in said]

    def _tell_ready(self) -> None:
        if self._asked and not self.draining and len(self._answering) == self.ranks:
            answering = set.intersection(*self._answering.values()) if self._plan else set[int]()
            self.tell("ready", sources=sorted(answering), role=self.role, **self._plan)

    def on_role(self, rank: int, word: dict[str, Any]) -> None:
        """Take requests of another kind from now on; those that are under way are finished, and all rows stay."""
        self.role = word["role"]
        if self.role == "prefill":
            for sequence in [s for s in self._admission.waiting if not s.generated]:
                self._refuse_role(self._forget(sequence).id, "decode", "failed")
        if self.role == "decode":
            for lent in [*self._queue]:
                self._end(lent, f"this engine decodes now: {lent.id} is for another")
        self._tell_ready()

    def _refuse_role(self, id: str, role: str, op: str) -> None:
        self.tell(op, id=id, error=f"this engine takes nothing to {role} now: ask another", code="BUSY")

    def on_decode(self, rank: int, word: dict[str, Any]) -> None:
        """Take a request to decode, also one that another engine has decoded so far."""
        if self.role == "prefill":
            self._refuse_role(word["id"], "decode", "failed")
            return
        try:
            self._check_half(self.sequence(word))
        except (KvprotoError, EngineError) as error:
            self.tell("failed", id=word["id"], error=str(error), code=code_of(error))
            return
        super().on_decode(rank, word)

    # halves, of an engine that does both

    def _check_half(self, sequence: TokenSequence) -> None:
        """Raise EngineError for a prompt that an engine which does both has no room for."""
        need, room = max(self._admission.step(sequence)), self.options.pages // 2
        if self.role == "both" and not sequence.generated and need > room:
            raise EngineError(
                f"{len(sequence.prompt)} tokens need {need} pages, and half of the pools of an engine that does both is"
                f" {room}: raise --pages, or have engines of one role each"
            )

    def _fits(self, held: Iterable[TokenSequence], need: Sequence[int]) -> bool:
        """Whether prompts, or requests that are fetched, have at most half of each pool with so many pages more.

        Else two engines that do both could wait for each other: each full of prompts that the other has no pages for,
        or of pages for prompts that the other has no pages to compute.
        """
        tables = [sequence.tables for sequence in held if sequence.tables]
        room = self.options.pages // 2
        return self.role != "both" or all(
            sum(len(each[pool]) for each in tables) + n <= room for pool, n in enumerate(need)
        )

    def _take(self, job: Decoded, later: bool) -> int | None:
        """Give a request its pages; one that is to be prefilled elsewhere waits while others have half of the pools."""
        new = not job.sequence.generated
        fetched = (each.sequence for each in self._fetching.values() if each.end is None and not each.moved)
        if new and not self._fits(fetched, self._admission.step(job.sequence)):
            return None
        return super()._take(job, later)

    # prompts

    def on_prefill(self, rank: int, word: dict[str, Any]) -> None:
        """Take a prompt to compute and hand over."""
        if self.role == "decode":
            self._refuse_role(word["id"], "prefill", "refused")
            return
        try:
            sequence = self.sequence(word)
            self.check_room(len(sequence.prompt))
            self._check_half(sequence)
            lent = self._lend(word["id"], read_ticket(word["ticket"]), sequence, sequence.asked)
        except (KvprotoError, EngineError) as error:
            self.tell("refused", id=word["id"], error=str(error), code=code_of(error))
            return
        self._prompts[sequence] = lent
        self._queue.append(lent)

    def _lend(self, id: str, ticket: Ticket, sequence: TokenSequence, prompt: Prompt) -> Lent:
        """Answer sinks that ask for a request; raises KvprotoError."""
        requests: dict[int, Request] = {}
        try:
            for rank, source in self.sources.items():
                requests[rank] = source.request(ticket, prompt)
        except KvprotoError as error:
            for request in requests.values():
                request.fail(error)
            raise
        lent = self._lent[id] = Lent(id, requests, sequence, set(range(self.ranks)))
        self._names |= dict.fromkeys(requests.values(), id)
        return lent

    def _end(self, lent: Lent, reason: str) -> None:
        for request in lent.requests.values():
            request.fail(reason)

    def advance(self) -> None:
        """Decode a step, and compute one of the prompts."""
        super().advance()
        while self._queue and self._take_prompt(self._queue[0]):
            self._queue.popleft()
        for sequence in self._prefiller.step():
            lent = self._prompts[sequence]
            self._finish_lent(lent, len(sequence.prompt), sequence.stopped)
            self.tell("prefilled", id=lent.id, found={"device": lent.rows})

    def _take_prompt(self, lent: Lent) -> bool:
        """Give a prompt its pages, some with rows already; the last token is computed, as its logits are wanted."""
        sequence, tokens = lent.sequence, len(lent.sequence.prompt)
        if not self._fits(self._prompts, self.need(tokens)):
            return False
        most = 0 if self._hybrid else tokens - 1  # a state is that of the last token, which decode wants
        if (found := self._prefixes.allocate(sequence, self.need(tokens), self._admission.spare, most)) is None:
            return False
        lent.rows = found
        self._prefiller.add(sequence, found)
        return True

    def _on_layer(self, sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
        """Tell kvproto that a layer's rows are there, so that they are sent while the next layer computes."""
        lent = self._prompts[sequence]
        for request in lent.requests.values():
            after, layers, since = self._event(lent), (layer, layer + 1), self._since(stop)
            request.computed(self.tables(sequence), stop, layers=layers, model=model, after=after, since=since)

    def _since(self, stop: int) -> dict[str, int]:
        """The first token whose rows are held after `stop` tokens, of layers with a sliding window."""
        return {name: first_row(reach, stop) for name, reach in windows_of(self.options.configs).items()}

    def _event(self, lent: Lent) -> int | None:
        """The handle of a CUDA event after all work launched so far; None on the host, where nothing is pending."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        lent.events.append(event)
        return int(event.cuda_event)

    def _finish_lent(self, lent: Lent, tokens: int, stopped: bool = False) -> None:
        """Hand over the first rows of a request, and what its decode goes on from."""
        tables = dict(self.tables(lent.sequence))
        for name, pages in zip((TARGET, DRAFT), self.need(tokens), strict=False):
            if name in tables:
                tables[name] = tables[name][:pages]
        handed, after, since = {FIRST: self._handed(lent.sequence)}, self._event(lent), self._since(tokens)
        for request in lent.requests.values():
            request.finish(tables, tokens=tokens, handoff=handed, finished=stopped, after=after, since=since)

    def _handed(self, sequence: TokenSequence) -> dict[str, bytes]:
        """The newest token, what a head goes on from, and log probabilities, where the engines hand these over."""
        handed = {"token": sequence.newest.to_bytes(4, "little")}
        if (size := hidden_type(self.options.configs)[1]) and not self.options.cold_draft:
            handed[HIDDEN] = bytes(size) if sequence.hidden is None else hidden_bytes(sequence.hidden)
        if (most := self.options.max_logprobs) is not None:
            handed |= logprobs.to_parts(sequence.logprobs[-1] if sequence.logprobs else [], most)
        return handed

    # pages that others copy

    def on_lend(self, rank: int, word: dict[str, Any]) -> None:
        """Hand over the rows of a text's beginning that are here, also of the request `of` that is decoded here."""
        ahead = self.draft.ahead if self.draft is not None else 0
        try:
            sequence = self.sequence({**word, "max_new": 1})
            if self._hybrid:
                raise EngineError("states and windows are of one place of a text: move the request instead")
            if "of" in word and (running := self._running(word["of"])) is not None:
                self._prefixes.keep(running, running.shared)
            tokens = self._prefixes.allocate(sequence, self.need(0)) or 0
            if not tokens:
                self._prefixes.free(sequence, 0)
                raise EngineError("no page of this text is here")
            prompt = Prompt(sequence.prompt[: tokens + ahead], sequence.adapter_name, sequence.salts)
            try:
                lent = self._lend(word["id"], read_ticket(word["ticket"]), sequence, prompt)
            except KvprotoError:
                self._prefixes.free(sequence, tokens)
                raise
        except (KvprotoError, EngineError) as error:
            self.tell("refused", id=word["id"], error=str(error), code=code_of(error))
            return
        lent.rows = tokens
        self._finish_lent(lent, tokens)
        self.tell("lent", id=lent.id, tokens=tokens, prompt=len(prompt))

    def on_copy(self, rank: int, word: dict[str, Any]) -> None:
        """Fetch rows that another engine lends, and keep them for prompts and requests that begin alike."""
        try:
            sequence, tokens = self.sequence({**word, "max_new": 1}), word["tokens"]
            job = Decoded(word["id"], read_ticket(word["ticket"]), sequence.asked, sequence, end=tokens)
            self.check_room(tokens)
            if self.draining or (cached := self._prefixes.allocate(sequence, self.need(tokens))) is None:
                raise EngineError("there are no free pages for a copy")
        except (KvprotoError, EngineError) as error:
            self.tell("failed", id=word["id"], error=str(error), code=code_of(error))
            return
        job.cached = min(cached, tokens)
        self._of[sequence] = job  # from which it is taken by `_begin`
        self._begin(job, job.cached, False)

    def arrived(self, job: Decoded, words: Any) -> None:
        """Decode a request whose rows have arrived, or keep those of a copy."""
        if job.end is None:
            super().arrived(job, words)
            return
        self._prefixes.free(job.sequence, job.end)
        moved = sum(sum(word["bytes"].values()) for word in words)
        seconds = max(word["seconds"] for word in words)
        self.tell("copied", id=job.id, tokens=job.end, cached=job.cached, bytes=moved, seconds=seconds)

    # requests that move

    def _running(self, id: str) -> TokenSequence | None:
        """The request of that name, if it is decoded here and nothing of it has to be computed again."""
        return next((s for s in self._admission.running if self._of[s].id == id and s not in self._again), None)

    def on_move(self, rank: int, word: dict[str, Any]) -> None:
        """Decode a request no more, and hand it over as it is; it is decoded on here if it stays after all."""
        sequence = self._running(word["id"])
        if sequence is None:
            self.tell("stays", id=word["id"], error="it is not being decoded here")
            return
        self._decoder.fill(sequence)
        try:
            lent = self._lend(word["id"], read_ticket(word["ticket"]), sequence, rows_of(sequence))
        except KvprotoError as error:
            self.tell("stays", id=word["id"], error=str(error))
            return
        self._admission.rest(sequence)
        lent.job, lent.rows = self._of.pop(sequence), sequence.shared
        self.tell("moving", id=lent.id, generated=len(sequence.generated), rows=sequence.due)
        self._finish_lent(lent, sequence.due)

    def on_stay(self, rank: int, word: dict[str, Any]) -> None:
        """The other engine has not taken a request: decode it on here, if it is here still."""
        if (lent := self._lent.get(word["id"])) is None:
            self.tell("gone", id=word["id"])
            return
        lent.stays = True
        self._end(lent, "the other engine has not taken it")

    def on_drop(self, rank: int, word: dict[str, Any]) -> None:
        """The router or its client has given the request up: drop it in any state."""
        super().on_drop(rank, word)
        if (lent := self._lent.get(word["id"])) is not None:
            lent.dropped = True
            self._end(lent, "dropped by the router")

    def on_over(self, rank: int, word: dict[str, Any]) -> None:
        """No sink reads a rank's pages any more; ranks without a route hear nothing and are not waited for."""
        if (lent := self._lent.get(word["id"])) is None:
            return
        lent.over.add(rank)
        lent.needed &= set(word["needed"]) or lent.needed
        lent.delivered &= word["delivered"]
        if not lent.over >= lent.needed:
            return
        del self._lent[lent.id]
        for request in lent.requests.values():
            del self._names[request]
        self.rest()
        if lent.job is not None:
            self._over_moved(lent, lent.job)
            return
        if lent.sequence in self._prompts:
            self._over_prompt(lent)
        else:
            self._prefixes.free(lent.sequence, lent.rows)
        if word.get("expired"):
            says = "nobody fetched the request before its deadline"
            self.tell("refused", id=lent.id, error=says, code="DEADLINE")
        self.tell("freed", id=lent.id, available=self._available)

    def _over_prompt(self, lent: Lent) -> None:
        """Take the pages of a prompt back, keeping those whose rows are computed."""
        sequence = lent.sequence
        del self._prompts[sequence]
        if lent in self._queue:
            self._queue.remove(lent)
            self.tell("refused", id=lent.id, error="this engine takes no prompts now: ask another", code="BUSY")
            return
        rows = self._prefiller.drop(sequence)
        self._prefixes.free(sequence, min(rows, sequence.shared) if sequence.generated else rows)

    def _over_moved(self, lent: Lent, job: Decoded) -> None:
        """Forget a request that another engine has, or decode it on."""
        taken = lent.delivered and not lent.stays and not lent.dropped
        if not taken and not lent.dropped:
            self._of[lent.sequence] = job
            self._admission.run(lent.sequence)
            self.tell("stays", id=lent.id, error="the other engine has not taken it")
            return
        self._prefixes.free(lent.sequence, lent.rows)
        self._admission.forget(lent.sequence)
        self.tell("left" if taken else "dropped", id=lent.id, available=self._available)


def _run(options: EngineOptions, world: World) -> int:
    return PeerProcess(options.of(world.replica), world).serve("engine")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse("engine", argv)
        options.check("decode")
        return launch(_run, options, options.processes, options.folder, options.layout.dp, options.gpus)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
