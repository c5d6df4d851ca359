"""Replays traces of the models (spec/v1/lifecycle/traces.json): each step is done to real endpoints, whose frames wait in lists.

A step of a trace is some lines: what happens, the rows that are walked by it, and where both sides are then (`now`).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import attrs

from kvproto.errors import RemoteError
from kvproto.session import Exposed, limits
from kvproto.session.limits import PING_SILENCE
from kvproto.session.records import SinkTransfer
from kvproto.session.sink import SinkSession
from kvproto.session.table import SessionState, TransferState
from kvproto.transport.inline.transport import DataPiece
from kvproto.transport.staging.staged import ChunkPiece
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Proof, Tier, Transport
from tests.session import driver
from tests.session.test_catalogue import Watching
from tests.session.test_inline import Inline, Whole
from tests.session.test_intent import SpansWorld
from tests.session.test_pull import PullWorld
from tests.session.test_staged import Bytes, Staged

CONTENT = b"c" * 32
FAULT = RemoteError(ErrorCode.INTERNAL, "", "", "")
TO_SOURCE, TO_SINK = 0, 1
LENGTH = 25


def steps_of(lines: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Of each step, what happens and where both sides are then."""
    happens: list[str] = []
    for now, group in groupby((line for line in lines if not line.startswith("row ")), lambda s: s.startswith("now ")):
        if now:
            yield happens, list(group)
        else:
            happens = list(group)


class Replay:
    """One source and one sink whose frames wait until the trace says what becomes of them."""

    def __init__(self, world: driver.World) -> None:
        self.world, self.source = world, world.sources["s0"]
        self.queues: tuple[list[bytes], list[bytes]] = ([], [])
        self.sent: dict[tuple[int, str, int], bytes] = {}
        """The last frame of each kind and sequence, by direction."""
        self.conn = "d0"
        self.clocks = [world.now, world.now]

    @property
    def sink(self) -> Any:
        return self.world.sinks["d0"]

    def replay(self, lines: Sequence[str]) -> None:
        """Do all steps; raises AssertionError where a side is elsewhere than the model."""
        for happens, now in steps_of(lines):
            names = [line.split()[0] for line in happens]
            for name, line in sorted(zip(names, happens, strict=True), key=lambda pair: pair[0] not in self.first):
                getattr(self, name)(*line.split()[1:])
                self.collect()
            for line in now:
                _, part, *states = line.split()
                assert [f"{type(s).__name__[:-5].lower()}_{s.value}" for s in self.states(int(part))] == states, happens

    first: tuple[str, ...] = ()
    """Lines of a step that tell what an engine has decided before."""

    def states(self, part: int) -> tuple[Any, Any]:
        """Where the sink and the source are."""
        raise NotImplementedError

    def collect(self) -> None:
        """Take what both have to say."""
        if "d0" in self.world.sinks:
            for _, frame in self.sink.to_send(self.clocks[TO_SINK]):
                self.queue(TO_SOURCE, frame)
        self.world.told["s0"] += self.source.take_events()
        for conn, frame in self.source.to_send(self.clocks[TO_SOURCE]):
            if conn == self.conn:
                self.queue(TO_SINK, frame)

    def queue(self, to: int, frame: bytes) -> None:
        message = decode(frame)
        self.sent[to, type(message).__name__, getattr(message, "sequence", 0)] = frame
        self.queues[to].append(frame)

    def deliver(self, to: str, _: str, kind: str, *ids: str) -> None:
        frame = self.queues[int(to)].pop(0)
        assert type(decode(frame)).__name__ == kind
        if int(to) == TO_SOURCE:
            self.source.receive(self.conn, frame, self.clocks[TO_SOURCE])
        else:
            self.sink.receive("s0", frame, self.clocks[TO_SINK])

    def lose(self, to: str, _: str, kind: str, *ids: str) -> None:
        assert type(decode(self.queues[int(to)].pop(0))).__name__ == kind

    def repeat(self, to: str, *_: str) -> None:
        self.queues[int(to)].append(self.queues[int(to)][0])

    def overtake(self, to: str, *_: str) -> None:
        self.queues[int(to)].append(self.queues[int(to)].pop(0))

    def resend(self, to: str, _: str, kind: str, first: str, *ids: str) -> None:
        """A request goes out again as it was, under its id (KVP-SES-RESEND)."""
        self.queues[int(to)].append(self.sent[int(to), kind, self.sequence(first)])

    def sequence(self, first: str) -> int:
        return int(first) + 1


class Transfers(Replay):
    """Transfers of a pair that is ready."""

    first = ("refuse",)

    def __init__(self, world: driver.World) -> None:
        super().__init__(world if world.sinks else world.ready(1))
        self.keys: dict[int, bytes] = {}
        self.numbers: dict[int, SinkTransfer] = {}

    def states(self, part: int) -> tuple[Any, Any]:
        (sink,), (source,) = self.sink.sessions.values(), self.source.sessions.values()
        return self.state(sink, part + 1), self.state(source, part + 1)

    @staticmethod
    def state(session: Any, sequence: int) -> TransferState:
        attempt = session.attempts.get(sequence)
        if attempt is None:
            return TransferState.ENDED if sequence <= session.low_water else TransferState.NEW
        return TransferState(attempt.state)

    def ask(self, request: str, _: str) -> None:
        made = driver.ticket(300.0)
        self.keys[int(request)] = bytes(made.key)
        self.source.expect(made, CONTENT, self.clocks[TO_SOURCE])
        self.numbers[int(request)] = self.world.transfer("d0", made, CONTENT)

    def abort(self, request: str) -> None:
        self.sink.abort(self.numbers[int(request)], FAULT, self.clocks[TO_SINK])

    def refuse(self, _: str, request: str) -> None:
        self.source.refuse(self.keys[int(request)], FAULT, self.clocks[TO_SOURCE])

    def event(self, request: int) -> Any:
        """The engine of the source has the request finished."""
        self.source.finish(self.keys[request])
        self.collect()
        return next(e for e in self.world.events("s0", "TransferRequested") if e.transfer.sequence == request + 1)

    def copy(self, _: str, request: str) -> None:
        self.source.copying(self.event(int(request)))

    def copied(self, _: str, request: str) -> None:
        self.world.now = self.clocks[TO_SOURCE]
        self.world.done("s0", self.event(int(request)))

    def fails(self, _: str, request: str, landed: str) -> None:
        proof = Proof.PROVEN if landed == "1" else Proof.UNPROVABLE
        self.source.failed(self.event(int(request)), FAULT, self.clocks[TO_SOURCE], proof)

    def lie(self, _: str, request: str) -> None:
        """Done names another writer."""
        self.copied(_, request)
        self.collect()
        self.tell_wrong()

    def tell_wrong(self) -> None:
        """The last frame to the sink was of another writer."""
        self.queue(TO_SINK, encode(attrs.evolve(decode(self.queues[TO_SINK].pop()), writer=99)))

    def land(self, *_: str) -> None:
        """A write lands, which no session hears of."""

    use = land

    def arrived(self, request: str) -> None:
        assert self.outcome(request) == "Arrived"

    def free(self, request: str) -> None:
        assert self.outcome(request) in ("PROVEN", "Proven")

    def quarantined(self, request: str) -> None:
        assert self.outcome(request) == "UNPROVABLE"

    def outcome(self, request: str) -> str:
        """What the engine of the sink was told last of a request."""
        told = [e for e in self.world.told["d0"] if getattr(e, "transfer", None) == self.numbers[int(request)]]
        return told[-1].proof.name if isinstance(told[-1], driver.Lost) else type(told[-1]).__name__


class Streams(Transfers):
    """Transfers whose bytes are packed."""

    def ask(self, request: str, _: str) -> None:
        made, staged = driver.ticket(300.0), isinstance(self.world, Staged)
        self.keys[int(request)] = bytes(made.key)
        self.source.expect(made, CONTENT, self.clocks[TO_SOURCE])
        unpacker = (lambda begins: Bytes(bytearray(LENGTH), [])) if staged else lambda begins: Whole(bytearray(LENGTH))
        asked = driver.grants(self.world.pools["d0"], 6)
        number = self.sink.transfer(bytes(made.key), CONTENT, asked, self.clocks[TO_SINK], {0: unpacker})
        self.numbers[int(request)] = number

    def piece(self, _: str, request: str) -> None:
        piece = ChunkPiece(0, 0, 7, False) if isinstance(self.world, Staged) else DataPiece(0, bytearray(7), False)
        self.source.stream(self.event(int(request)), piece, ())


class Intents(Transfers):
    """Transfers whose items are granted piece by piece; a request has two pieces of PIECE tokens."""

    PIECE = 3

    def __init__(self) -> None:
        super().__init__(SpansWorld())
        self.flying: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.said: dict[int, int] = {}

    def ask(self, request: str, _: str) -> None:
        made, pages = driver.ticket(300.0), driver.grants(self.world.pools["d0"], 2 * self.PIECE)
        self.keys[int(request)] = bytes(made.key)
        self.source.expect(made, CONTENT, self.clocks[TO_SOURCE])
        bare = {g: attrs.evolve(grant, items=None) for g, grant in pages.items()}
        self.numbers[int(request)] = self.sink.transfer(bytes(made.key), CONTENT, bare, self.clocks[TO_SINK])

    def compute(self, request: str) -> None:
        self.computed[int(request)] = self.computed.get(int(request), 0) + 1

    def progress(self, request: str, pieces: str) -> None:
        """The source says so, or says it again."""
        if self.said.get(int(request)) == int(pieces):
            self.resend("1", "0", "Progress", request)
        elif int(pieces) == 2:
            self.source.finish(self.keys[int(request)])
        else:
            self.source.progress(self.event(int(request)), self.PIECE, self.clocks[TO_SOURCE])
        self.said[int(request)] = int(pieces)

    def grant(self, request: str, pieces: str) -> None:
        named = self.world.up_to(int(pieces) * self.PIECE)  # type: ignore[attr-defined]
        self.sink.grant(self.numbers[int(request)], named, self.clocks[TO_SINK])

    def event(self, request: int) -> Any:
        """Whoever asks while prefill runs, or when it is over and everything is granted."""
        if self.computed[request] == 2:
            self.source.finish(self.keys[request])
            self.collect()
        waiting = [*self.source.asking(self.keys[request]), *self.world.events("s0", "TransferRequested")]
        return next(e for e in waiting if e.transfer.sequence == request + 1)

    def copy(self, _: str, request: str) -> None:
        self.flying[int(request)] = self.flying.get(int(request), 0) + 1
        super().copy(_, request)

    def land(self, *where: str) -> None:
        self.flying[int(where[1])] -= 1

    def deliver(self, to: str, _: str, kind: str, *ids: str) -> None:
        """An Abort that no copy under way keeps is answered at once."""
        super().deliver(to, _, kind, *ids)
        if kind == "Abort" and self.flying.get(int(ids[0])) == 0:
            self.stopped(ids[0])

    def stopped(self, request: str) -> None:
        self.source.failed(self.event(int(request)), FAULT, self.clocks[TO_SOURCE])


class Leases(Transfers):
    """Transfers that the sink reads; a tick is a quarter of a lease, and nothing is due to be sent again."""

    TICK = 0.1

    def __init__(self) -> None:
        world = PullWorld(driver.geometry(1))
        super().__init__(world)
        self.renewals: list[bytes] = []

    def queue(self, to: int, frame: bytes) -> None:
        """A Renew goes out when the trace says so."""
        super().queue(to, frame)
        if type(decode(frame)).__name__ == "Renew":
            self.renewals.append(self.queues[to].pop())

    def offer(self) -> None:
        self.world.now = self.clocks[TO_SOURCE]
        self.world.offer("s0", self.event(0), lease=4 * self.TICK)  # type: ignore[attr-defined]

    def lie(self, *_: str) -> None:
        self.offer()
        self.collect()
        self.tell_wrong()

    def read(self) -> None:
        assert self.sink.may_read(self.world.events("d0", "Offered")[-1].attempt, self.clocks[TO_SINK])

    def read_over(self) -> None:
        self.sink.read(self.world.events("d0", "Offered")[-1].attempt, 1, self.clocks[TO_SINK])

    def renew(self) -> None:
        self.queues[TO_SOURCE].append(self.renewals.pop(0))

    def tick(self) -> None:
        self.clocks[TO_SINK] += self.TICK
        self.sink.on_time(self.clocks[TO_SINK])
        self.slow_tick()

    def slow_tick(self) -> None:
        self.clocks[TO_SOURCE] += self.TICK
        self.source.on_time(self.clocks[TO_SOURCE])

    def change(self) -> None:
        """The engine of the source uses its items for something else."""


class Epochs(Transfers):
    """Memory that is registered again and asked back; what the source maps and unmaps takes no time."""

    def __init__(self) -> None:
        super().__init__(driver.EpochWorld(driver.geometry(1)))
        self.exposed: dict[str, Exposed] = {}

    def states(self, part: int) -> tuple[Any, Any]:
        (sink,), (source,) = self.sink.sessions.values(), self.source.sessions.values()
        return sink.state, source.state

    def collect(self) -> None:
        super().collect()
        for event in self.world.told["s0"]:
            if isinstance(event, driver.RegisterAsked):
                self.world.accept("s0", event.session)
            elif isinstance(event, driver.UnmapAsked):
                self.world.unmap("s0", event)
        self.world.told["s0"] = [
            e for e in self.world.told["s0"] if not isinstance(e, driver.RegisterAsked | driver.UnmapAsked)
        ]
        super().collect()

    def register(self, epoch: str) -> None:
        self.exposed[epoch] = self.world.another("d0")
        self.sink.expose(self.exposed[epoch], self.clocks[TO_SINK])

    def change(self) -> None:
        """The caches of the sink are others; what is exposed stays, and so do the epochs of before."""
        self.sink.expose(self.sink.exposed, self.clocks[TO_SINK], driver.without_draft())

    def unregister(self, epoch: str, at_once: str) -> None:
        self.sink.give_back(self.exposed[epoch], at_once == "1", self.clocks[TO_SINK])


class Opening(Replay):
    """A session from Hello on; connections are names."""

    def __init__(self, define: dict[str, int]) -> None:
        kind = PullWorld if "PULL" in define else driver.World
        super().__init__(Staged(sinks=0) if "STAGED" in define else kind(driver.geometry(1)))
        self.weights = "b" if "UNFIT" in define else "a"

    def states(self, part: int) -> tuple[Any, Any]:
        if "d0" not in self.world.sinks:
            return SessionState.IDLE, SessionState.IDLE
        (sink,) = self.sink.sessions.values()
        source = self.source.sessions.get(sink.session)
        return sink.state, source.state if source else SessionState.CLOSED if sink.session else SessionState.IDLE

    def sequence(self, first: str) -> int:
        return 0

    def dial(self) -> None:
        self.world.sink("d0", driver.geometry(1, weights=self.weights))

    def drain(self) -> None:
        self.source.draining = True

    def asked(self) -> SinkSession:
        """The session over which the sink was asked to map memory."""
        session: SinkSession = self.world.events("d0", "MemoryAsked")[-1].session
        return session

    def registered(self, name: str) -> int:
        """The session whose memory is to be mapped."""
        return int(self.world.events(name, "RegisterAsked")[-1].session)

    def map(self, at: str) -> None:
        if at == "0":
            self.world.accept("s0", self.registered("s0"))
        else:
            self.sink.accept_register(self.asked(), Transport.SHM, self.clocks[TO_SINK])

    def refuse(self, at: str) -> None:
        if at == "0":
            self.source.sessions[self.registered("s0")].holder.refuse(FAULT)
        else:
            self.sink.refuse_register(self.asked(), FAULT, self.clocks[TO_SINK])

    @staticmethod
    def minted(number: str) -> int:
        """The id of a session, which the model counts from 1, and the world from 1000."""
        return 999 + int(number)

    def goodbye(self, at: str, number: str) -> None:
        (sink,) = self.sink.sessions.values()
        (sink if at == "0" else self.source.sessions[self.minted(number)]).goodbye("over")

    def ping(self, at: str, number: str) -> None:
        """Nothing was heard for a while; what else is due then goes out when the trace says so."""
        to, endpoint = (TO_SOURCE, self.sink) if at == "0" else (TO_SINK, self.source)
        self.collect()
        waiting = list(self.queues[to])
        self.clocks[1 - to] += PING_SILENCE
        endpoint.on_time(self.clocks[1 - to])
        self.collect()
        due = [(f, decode(f)) for f in self.queues[to][len(waiting) :]]
        pings = [f for f, m in due if type(m).__name__ == "Ping" and m.session == self.minted(number)]
        self.queues[to][:] = waiting + pings

    def __getattr__(self, name: str) -> Any:
        if name == "break":  # a word of Python
            return self.broken
        raise AttributeError(name)

    def broken(self) -> None:
        """What was on its way to the sink is lost with the connection."""
        self.conn += "+"
        self.queues[TO_SINK].clear()


class Catalogues(Replay):
    """A watcher whose session is open, and whose first Watch is on its way; a piece of the list is one page."""

    def __init__(self) -> None:
        super().__init__(Watching())
        self.there: set[str] = set()
        self.sink.dial(0.0)
        for to in (TO_SOURCE, TO_SINK):
            self.collect()
            self.deliver(str(to), "0", ("Hello", "Welcome")[to])
        self.collect()

    def replay(self, lines: Sequence[str]) -> None:
        most, limits.MAX_TOLD = limits.MAX_TOLD, 1
        try:
            super().replay(lines)
        finally:
            limits.MAX_TOLD = most

    def states(self, part: int) -> tuple[Any, Any]:
        (sink,), (source,) = self.sink.sessions.values(), self.source.sessions.values()
        return sink.state, source.state

    def sequence(self, first: str) -> int:
        return 0

    def change(self, page: str) -> None:
        self.there ^= {page}
        self.source.kept({bytes((int(page),)) * 32: Tier.HOST if page in self.there else None})


def replay(trace: dict[str, Any]) -> None:
    """Do what a trace says."""
    model, define = trace["model"], trace["define"]
    made: Replay
    if model == "opening":
        made = Opening(define)
    elif model == "pull":
        made = Leases()
    elif model == "intent":
        made = Intents()
    elif model == "epochs":
        made = Epochs()
    elif model == "catalogue":
        made = Catalogues()
    elif "STAGED" in define or "INLINE" in define:
        made = Streams(Staged() if "STAGED" in define else Inline())
    else:
        made = Transfers(driver.World(driver.geometry(1)))
    made.replay(trace["steps"])
