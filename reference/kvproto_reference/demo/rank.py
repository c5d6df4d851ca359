"""One process of an engine: its ranks' models, pools and pages, and the loop that keeps all ranks in one state."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvproto import Pool, Sink, Source
from kvproto.events import Event, PoolFree, ProtocolError
from kvproto.probes import Probes
from kvproto_discovery import FoundSources, Registration

from ..adapters import chosen
from ..cache import PageAllocator
from ..cache.memory import device_of
from ..cache.windows import needed
from ..engine.build import Hosted, torch_hosted
from ..engine.description import DRAFT, TARGET, WINDOW, geometry, page_tables, windows_of
from ..engine.kept_pages import KeptPages, names_of
from ..engine.lockstep import Lockstep, Said
from ..engine.sampling import SamplingParams
from ..engine.sequence import TokenSequence
from ..engine.world import World
from ..errors import EngineError
from .control import Control
from .options import EngineOptions
from .rows import ImageRows


class EngineProcess:
    """The common half of the processes of prefill and decode.

    A word is a JSON object with an "op". All processes of a replica hear each word of the router or of a rank, in the
    same order, and handle it in the method `on_OP(rank, word)`; words with "all" are heard by every replica of the
    engine. Replicas that share experts take their turns together, each with requests, pools and pages of its own.
    """

    doors: Mapping[int, Sequence[Source | Sink]]
    """kvproto's Source, Sink or both of each hosted rank; subclasses open them."""

    def __init__(self, options: EngineOptions, world: World) -> None:
        self.options, self.ranks, self._world = options, options.layout.ranks, world
        configs, tokenizer, layout = options.configs, options.tokenizer, options.layout
        self.tokenizer = tokenizer
        self.device = device_of(options.device(world.place) if options.framework == "torch" else None)
        """The device on which torch leaves work pending: the host for JAX, whose steps are over when they return."""
        folders = options.folders
        self.geometry = geometry(
            folders,
            configs,
            tokenizer.identity,
            layout,
            options.page_size,
            options.replica,
            options.cold_draft is not None,
            options.max_logprobs,
            options.adapters,
        )
        self._part: Callable[[bool], None] = lambda well: None
        """Leaves the other processes, as they do too if all is well."""
        hosted = self._host(options, world)
        self.pools: Mapping[int, Pool] = hosted.pools
        self.target, self.draft, self._elsewhere = hosted.target, hosted.draft, hosted.elsewhere
        self.shards = hosted.shards
        """The tokens of a sequence that each model's pool stores."""
        names = (TARGET, DRAFT)[: len(folders)]
        self.pages = {name: PageAllocator(options.pages, options.seed + i) for i, name in enumerate(names)}
        self._vocab = configs[0].vocab
        self._window = needed(configs[0], options.page_size, max(options.chunk, options.speculate + 1))
        """Pages in which the sliding windows of a request move; 0 without such."""
        if self._window:
            self.pages[WINDOW] = PageAllocator(options.window_pages or options.pages, options.seed)
        self.status: int | None = None
        """The exit status, as soon as this replica is to end."""
        self._ended: dict[int, int] = {}
        """Replicas that are to end, if there are several."""
        self.said: Said = []
        """Words to the other processes that do not come from kvproto's events."""
        self.draining = False
        """Whether the engine takes nothing new and ends when it has finished what it has."""
        self._slept: set[int] | None = None
        """While asleep, the ranks whose memory no peer touches any more; None: awake."""
        self._drained: set[int] = set()
        """Ranks from which no peer needs anything any more."""
        self._drain_until: float | None = None
        self.kept: KeptPages | None = None
        """Finds pages that were computed before, with --host-pages."""
        if options.host_pages:
            computed_by = names_of(folders, configs)
            host, storage, ahead = options.host_pages, options.storage, self.draft.ahead if self.draft else 0
            self.kept = KeptPages(
                self.pools,
                computed_by,
                self.shards,
                world,
                host,
                storage,
                ahead,
                windows_of(configs),
                self.target.states,
            )
            self._elsewhere = None  # the pool stays where it is
        self.listed: list[FoundSources | Registration] = []
        """The rows of this engine's ranks in a directory, or what it finds in one."""
        self.rows: ImageRows | None = None
        """The fetches of rows of images, on a prefill with an encoder."""
        self._lockstep = Lockstep(world)
        self._control: Control | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Becomes readable when a signal was handled."""

    def _host(self, options: EngineOptions, world: World) -> Hosted:
        if options.framework != "torch":
            from ..jax_engine import apart  # imports JAX, which torch engines do without
            from ..jax_engine.build import jax_hosted

            gpus = options.devices[: self.ranks]
            sizes = options.pages, gpus, options.window_pages, options.dtype
            if world.size > 1:
                apart.meet(world, options.device(world.rank))
                self._part = apart.part
            return jax_hosted(options.folders, self.geometry, options.layout, *sizes, world if world.size > 1 else None)
        return torch_hosted(
            options.folders,
            options.configs,
            self.geometry,
            options.layout,
            world,
            options.pages,
            self.device,
            options.memory,
            options.back_end,
            options.captured,
            options.window_pages,
            options.adapters,
        )

    # the loop

    def serve(self, role: str) -> int:
        """Serve until stopped, drained or unable to go on; returns the exit status."""
        if 0 in self.pools:
            self._control = Control(self.options.folder, f"{role}-{self.options.replica}")
        doors = [door for own in self.doors.values() for door in own]
        probes = Probes(self.options.probes, *doors) if self.options.probes and 0 in self.pools else None
        signal.signal(signal.SIGTERM, self._terminated)
        signal.signal(signal.SIGUSR1, self._put_to_sleep)
        gc.freeze()  # or steps of many requests would have the collector look through all of torch, for 0.1 s
        try:
            while not self._over:
                self.on_time()
                if self._rest():
                    self._turn()
        finally:
            if probes is not None:
                probes.close()
            for listed in self.listed:
                listed.close()
            for door in doors:
                door.close("stopped" if self.status == 0 else "ended by an error")
            if self.rows is not None:
                self.rows.close("stopped" if self.status == 0 else "ended by an error")
            if self.kept is not None:
                self.kept.close(self.status == 0)
            self._part(self.status == 0)
        if self._control is not None:
            self._control.close()
        self.rest()
        for runner in (self.target, self.draft):
            if runner is not None:
                runner.close()
        return max(self._ended.values(), default=self.status or 0)

    def _turn(self) -> None:
        """Handle what all ranks have to say, and compute a step; replicas end when all are to, or one by an error."""
        for place, said in enumerate(self._lockstep.exchange(self._hear())):
            for word in said:
                if place // self._world.size == self._world.replica or "all" in word:
                    getattr(self, "on_" + word["op"])(word.get("rank", 0), word)
        if self.status is None:
            self.advance()
        self.target.idle()
        if self.status is None and self.draining and len(self._drained) == self.ranks and not self.held:
            self.status = 0
        if self.status is not None and self._world.replica not in self._ended:
            self.said.append({"op": "ended", "all": True, "replica": self._world.replica, "status": self.status})

    @property
    def _over(self) -> bool:
        """Whether to stop serving: once all replicas are to end, as they need each other, or one by an error."""
        if self._world.replicas == 1:
            return self.status is not None
        return any(self._ended.values()) or len(self._ended) == self._world.replicas

    def on_ended(self, rank: int, word: dict[str, Any]) -> None:
        """A replica of this engine is to end."""
        self._ended[word["replica"]] = word["status"]

    def _rest(self) -> bool:
        """Wait until the ranks have something to tell each other or a timer is due; returns whether they have."""
        busy = self.busy and self.status is None
        if busy and self._world.replicas == 1:  # as all ranks know
            return True
        doors = (door for own in self.doors.values() for door in own)
        fds, say = [self._bell, *(door.fileno() for door in doors)], busy or bool(self.said)
        if self.rows is not None:
            fds += [sink.fileno() for sink in self.rows.sinks.values()]
        if self._control is not None:
            fds.append(self._control.fileno())
            say = say or self._control.pending
        timer = self.next_timer()
        return self._lockstep.wait(fds, None if timer is None else max(timer - time.monotonic(), 0.0), say)

    def _hear(self) -> Said:
        """Words for what happened at these ranks, and those of the router to rank 0."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        said, self.said = self.said, []
        for rank, own in self.doors.items():
            heard = ((door, event) for door in own for event in door.events())
            said += [{**word, "rank": rank} for door, event in heard for word in self.heard(door, rank, event)]
        said += self.rows.hear() if self.rows is not None else []
        return said + (self._control.receive() if self._control is not None else [])

    def on_time(self) -> None:
        """Do what is due by the clock."""
        if self.kept is not None:
            self.said += self.kept.turn()
        if self.rows is not None:
            self.said += self.rows.lines.turn()
        if not self.draining:
            return
        drained = {rank for rank, own in self.doors.items() if all(door.drained for door in own)}
        self.said += [{"op": "drained", "rank": rank} for rank in drained - self._drained]
        if self._drain_until is not None and time.monotonic() >= self._drain_until and 0 in self.pools:
            self._drain_until = None
            self.said.append({"op": "overtime"})

    def next_timer(self) -> float | None:
        """The time at which `on_time` has something to do, by time.monotonic; None: nothing is planned."""
        timers = [self._drain_until]
        timers += [self.kept.next_timer()] if self.kept is not None else []
        timers += [self.rows.lines.next_timer()] if self.rows is not None else []
        return min((at for at in timers if at is not None), default=None)

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether a request is not over."""
        raise NotImplementedError

    def advance(self) -> None:
        """Compute one step of something, if there is anything."""
        raise NotImplementedError

    def heard(self, door: Source | Sink, rank: int, event: Event) -> Said:
        """Words for an event of one of a rank's doors."""
        return self.words(rank, event)

    def words(self, rank: int, event: Event) -> Said:
        """Words with what the other ranks have to know of an event of kvproto."""
        if isinstance(event, PoolFree):
            return [{"op": "slept"}]
        # an unknown session belongs to an earlier run, whose sinks are told that it has ended
        if isinstance(event, ProtocolError) and event.error.code.name != "UNKNOWN_SESSION":
            self.warn(rank, f"from {event.peer}: {event.error}")
        return []

    # sleep

    def _put_to_sleep(self, *_: object) -> None:
        """Handle SIGUSR1: sleep, and wake with other memory."""
        self.said.append({"op": "sleep"})
        os.eventfd_write(self._bell, 1)

    def on_sleep(self, rank: int, word: dict[str, Any]) -> None:
        """Take the pools back from all peers, to wake with other memory once they are free."""
        if self._slept is None and self._elsewhere is not None:
            self._slept = set()
            for (door,) in self.doors.values():
                door.sleep("the engine sleeps")

    def on_slept(self, rank: int, word: dict[str, Any]) -> None:
        """No peer touches a rank's pool any more; when that holds for all ranks, allocate new pools and wake."""
        assert self._slept is not None
        self._slept.add(rank)
        if len(self._slept) == self.ranks and self._elsewhere is not None:
            self.rest()
            self.forget_rows()
            self.pools = self._elsewhere()
            for each, (door,) in self.doors.items():
                door.wake(self.pools[each])
            self._slept = None
            self.tell("woke")

    def forget_rows(self) -> None:
        """Forget what the old pools held; subclasses with prefixes have some."""

    # the end

    def _terminated(self, *_: object) -> None:
        """Handle SIGTERM: drain; a second one ends this process at once."""
        if self.draining or not self.options.drain_for:
            sys.exit(143)
        self.said.append({"op": "drain", "all": True})
        os.eventfd_write(self._bell, 1)

    def on_drain(self, rank: int, word: dict[str, Any]) -> None:
        """Take nothing new, finish what is under way, then end."""
        if self.draining:
            return
        self.draining, self._drain_until = True, time.monotonic() + self.options.drain_for
        for own in self.doors.values():
            for door in own:
                door.drain()
        self.tell("draining")

    def on_drained(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has nothing under way any more."""
        self._drained.add(rank)

    def on_overtime(self, rank: int, word: dict[str, Any]) -> None:
        """Draining took too long: end, and lose what is still under way."""
        if 0 in self.pools:
            print(f"error: not drained after {self.options.drain_for:g} s: the rest is lost", file=sys.stderr)
        self.status = 1

    def on_stop(self, rank: int, word: dict[str, Any]) -> None:
        """The router stops the engine."""
        self.tell("stopped")
        self.status = 0

    # to people and to the router

    def warn(self, rank: int, sentence: str) -> None:
        """Print a sentence about a rank to stderr."""
        replica = f" replica {self.options.replica}" if self.options.replica else ""  # as kvproto names its peers
        print(f"{self.options.name}{replica} rank {rank} {sentence}", file=sys.stderr, flush=True)

    def tell(self, op: str, **fields: Any) -> None:
        """Tell the router, if this is the process of rank 0, which speaks for all."""
        if self._control is not None:
            self._control.send(op, **fields)

    # pages

    def on_fetched(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has read what it can of a prompt from storage."""
        assert self.kept is not None
        self.kept.fetched(word["id"], rank)

    def on_settled(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has copied and stored the pages that finished requests left."""
        self.tell("settled", rank=rank, left=word["left"], pages=word["pages"])

    def sequence(self, word: dict[str, Any]) -> TokenSequence:
        """The request that a word of the router asks for, maybe with tokens that another engine has generated.

        Raises EngineError for tokens or sampling out of range, and LocalError for an adapter that is not here.
        """
        sampling, most = SamplingParams.of(word.get("sampling", {})), self.options.max_logprobs
        if sampling.logprobs is not None and (most is None or sampling.logprobs > most):
            has = "no log probabilities" if most is None else f"those of {most} tokens at most"
            raise EngineError(
                f"the request asks for logprobs {sampling.logprobs}, the engine has {has}: --max-logprobs"
            )
        tokens, generated = [*word["prompt"], *word.get("generated", ())], word.get("generated", [])
        if not word["prompt"] or not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise EngineError(f"a prompt has at least one token, each from 0 to {self._vocab - 1}")
        if len(generated) >= word["max_new"]:
            raise EngineError(f"{len(generated)} tokens of {word['max_new']} are generated: nothing is left to decode")
        images = [bytes.fromhex(digest) for digest in word.get("images", ())]
        if images and self.kept is not None:
            raise EngineError("pages on the host are found by tokens, not by images: leave --host-pages out")
        return TokenSequence(
            prompt=word["prompt"],
            max_new=word["max_new"],
            generated=list(generated),
            sampling=sampling,
            tokenizer=self.tokenizer,
            adapter=chosen(self.options.adapters, word.get("adapter", "")),
            images=images,
            cache_salt=word.get("cache_salt", ""),
        )

    def need(self, tokens: int) -> tuple[int, ...]:
        """Pages that `tokens` tokens take on every rank, in each pool."""
        windows = (self._window if tokens else 0,) if self._window else ()
        return (*(shard.pages(tokens) for shard in self.shards), *windows)

    def check_room(self, tokens: int) -> None:
        """Raise EngineError for a request that the pools can never hold."""
        if self.kept is not None:
            self.kept.check_room(tokens)
        need, room = max(shard.pages(tokens) for shard in self.shards), self.options.pages
        if need > room:
            raise EngineError(
                f"{tokens} tokens need {need} pages, the pools have {room}: raise --pages, or ask for less"
            )

    def rest(self) -> None:
        """Wait until all device work has completed, so that nothing uses pages any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tables(self, sequence: TokenSequence) -> dict[str, Sequence[int]]:
        """A sequence's page tables by group name, for the rows that its next step needs."""
        tables = dict(zip(self.pages, sequence.tables, strict=True))
        return page_tables(self.geometry, tables, sequence.due, self.shards[0].span)
