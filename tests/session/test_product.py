"""The full product of the tables: every message in every state that a side can be in, from a peer that is known and wrong.

What the tables call illegal moves nothing and, where it is a request, is answered; nothing raises; and after each a
correct peer completes a transfer. States that a side passes through within one frame cannot be hit; the pure tables are
tried in `test_session`.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.session.table import TRANSFER, SessionState, TransferState, next_session, next_transfer
from kvproto.session.transfers import SinkTransfers
from kvproto.transport.inline.transport import DataPiece
from kvproto.wire import decode, encode, enums, messages, tables
from kvproto.wire.enums import ErrorCode, Feature
from tests.session import test_inline, test_staged
from tests.session.driver import EpochWorld, World, geometry, grants, ticket
from tests.session.test_inline import Inline, Whole
from tests.session.test_pull import PullWorld
from tests.session.test_staged import Bytes, ChunkPiece, Staged
from tests.wire.frames import MESSAGES
from tools.specgen.registry import load

CONTENT = b"c" * 32
SENDERS = {name: row["sender"] for name, row in load()["message"].items()}
DELIVERY = {name: row["delivery"] for name, row in load()["message"].items()}
OF_TRANSFERS = {name for _, name in TRANSFER} - {"Error"}
BITS = {"u8", "u16", "u32", "u64"}
NOT_PLAIN = {"Grants": {"first": 0, "count": 0}, "Credit": {"total": 9, "kind": enums.CreditKind.INLINE}}
"""Fields that rules of their message or struct relate."""


def plain(row: tables.Field) -> Any:
    """A value that the field may have."""
    _, _, type_, _, low, _, length = row
    if type_ in BITS:
        return max(low or 0, 1)
    if type_.startswith("array<"):
        return np.array([0] * (low or 0), np.uint64)
    if type_.startswith("list<"):
        return tuple(plain((0, "", type_[5:-1], True, None, None, None)) for _ in range(low or 0))
    if type_.startswith("struct:"):
        return made(type_[7:], **NOT_PLAIN.get(type_[7:], {}))
    if type_.startswith("enum:"):
        return next(iter(getattr(enums, type_[5:])))
    return b"\0" * (length or low or 0) if type_ == "bytes" else "x" if type_ == "str" else False


def made(name: str, **fields: Any) -> Any:
    """A message or struct with its required fields alone."""
    rows = [row for row in tables.FIELDS[name] if row[3] and row[1] not in fields]
    known = {row[1] for row in tables.FIELDS[name]}
    return getattr(messages, name)(
        **{row[1]: plain(row) for row in rows}, **{k: v for k, v in fields.items() if k in known}
    )


class Slots(Staged):
    """A world in which bytes come through slots, which are emptied at once."""

    def transfer(self, name: str, made: Any, content: bytes, tokens: int = 6) -> int:
        unpackers = {0: lambda begins: Bytes(bytearray(test_staged.LENGTH), self.events_)}
        asked = grants(self.pools[name], tokens)
        return self.sinks[name].transfer(bytes(made.key), content, asked, self.now, unpackers)

    def serve(self, address: str = "s0") -> None:
        length, size = test_staged.LENGTH, test_staged.SLOT
        for event in self.events(address, "TransferRequested"):
            for slot, at in enumerate(range(0, length, size)):
                if self.sources[address].active(event):
                    piece = ChunkPiece(slot, at, min(size, length - at), at + size >= length)
                    self.sources[address].stream(event, piece, ())
        self.run()
        super().serve(address)
        self.happen()


class Datas(Inline):
    """A world in which bytes come as Data, as credit allows."""

    def transfer(self, name: str, made: Any, content: bytes, tokens: int = 6) -> int:
        unpackers = {0: lambda begins: Whole(bytearray(test_inline.LENGTH))}
        asked = grants(self.pools[name], tokens)
        return self.sinks[name].transfer(bytes(made.key), content, asked, self.now, unpackers)

    def serve(self, address: str = "s0") -> None:
        length, size = test_inline.LENGTH, test_inline.SIZE
        for event in self.events(address, "TransferRequested"):
            for at in range(0, length, size):
                if self.sources[address].active(event):
                    data = bytearray(test_inline.STREAM[at : at + size])
                    self.sources[address].stream(event, DataPiece(at, data, at + size >= length), ())
                    self.run()
        super().serve(address)


class Intents(World):
    """A world in which sinks name their items after their Transfer: at once, but for those that wait."""

    features = (Feature.VERIFY, Feature.INTENT, Feature.SPANS)
    waits = False

    def transfer(self, name: str, made: Any, content: bytes, tokens: int = 6) -> int:
        sink, pages = self.sinks[name], grants(self.pools[name], tokens)
        bare = {g: attrs.evolve(grant, items=None) for g, grant in pages.items()}
        number = sink.transfer(bytes(made.key), content, bare, self.now)
        self.run()
        if not self.waits:
            sink.grant(number, pages, self.now)
        return number


WAYS: dict[str, Callable[[], World]] = {
    "PUSH": lambda: World(geometry(1)),
    "PULL": lambda: PullWorld(geometry(1)),
    "STAGED": lambda: Slots(sinks=0),
    "INLINE": lambda: Datas(sinks=0),
    "INTENT": lambda: Intents(geometry(1)),
    "EPOCHS": lambda: EpochWorld(geometry(1)),
}
"""How bytes move, and a world in which they do."""


class Wrong:
    """One world in which a peer says whatever it likes to one side, and correct peers go on beside it."""

    def __init__(self, way: str) -> None:
        self.world = WAYS[way]()
        self.heard: dict[str, Any] = {}
        self.deaf: set[str] = set()
        """Messages of the wrong pair that do not arrive."""
        self.requests, self.names = count(1 << 40), count()
        self.world.keep = self.keep
        self.maps = True
        accept = self.world.accept
        self.world.accept = lambda address, session: accept(address, session) if self.maps else None  # type: ignore[method-assign]
        self.world.sink("good", geometry(1), engine="good")
        self.world.run()

    def keep(self, to: str, frame: bytes) -> int:
        message = decode(frame)
        self.heard[type(message).__name__] = message
        return type(message).__name__ not in self.deaf

    def pair(self, *deaf: str, maps: bool = True) -> str:
        """A new sink and its session, of which some messages do not arrive."""
        name = f"bad{next(self.names)}"
        self.deaf, self.maps = set(deaf), maps
        self.world.sink(name, geometry(1), engine=name)
        self.world.run()
        self.deaf, self.maps = set(), True
        return name

    def sessions(self, name: str) -> tuple[Any, Any]:
        """Both ends of a pair; None: the source has none."""
        sink = next(iter(self.world.sinks[name].sessions.values()))
        source = self.world.sources["s0"].sessions
        return next((s for s in source.values() if s.peer.engine == name), None), sink

    def say(self, name: str, to_source: bool, message: Any) -> list[Any]:
        """Give a side a message of the wrong peer; its answers."""
        endpoint: Any = self.world.sources["s0"] if to_source else self.world.sinks[name]
        endpoint.to_send(self.world.now)
        endpoint.receive(name if to_source else "s0", encode(message), self.world.now)
        to = name if to_source else "s0"
        return [decode(frame) for conn, frame in endpoint.to_send(self.world.now) if conn == to]

    def message(self, kind: str, session: int, **ids: int) -> Any:
        """One of a kind: as a correct pair says it where it has, and with other ids."""
        ids = {"session": session, "request": next(self.requests), "sequence": 1, **ids}
        real = self.heard.get(kind)
        if real is None or kind == "Hello":
            return (
                made(kind, **ids, **NOT_PLAIN.get(kind, {}))
                if kind != "Hello" or real is None
                else attrs.evolve(real, request=ids["request"])
            )
        return attrs.evolve(
            real, **{k: v for k, v in ids.items() if hasattr(real, k) and (k != "session" or real.session is not None)}
        )

    def serves(self) -> None:
        """A correct peer completes a transfer."""
        world, fresh = self.world, ticket(300.0)
        for each in world.told.values():
            each.clear()
        world.sources["s0"].prefill(fresh, CONTENT, world.now)
        world.fetch("good", fresh, CONTENT)
        world.serve("s0")
        if isinstance(world, PullWorld):
            world.read("good")
        assert len(world.events("good", "Arrived")) == 1


SESSION_STATES: dict[tuple[str, SessionState], Callable[[Wrong], str]] = {
    ("source", SessionState.OPEN): lambda w: w.pair("Describe"),
    ("source", SessionState.DESCRIBED): lambda w: w.pair("Register"),
    ("source", SessionState.REGISTERING): lambda w: w.pair(maps=False),
    ("source", SessionState.READY): lambda w: w.pair(),
    ("source", SessionState.CLOSED): lambda w: ended(w, w.pair()),
    ("sink", SessionState.GREETED): lambda w: w.pair("Hello"),
    ("sink", SessionState.DESCRIBING): lambda w: w.pair("Describe"),
    ("sink", SessionState.REGISTERING): lambda w: w.pair("Register"),
    ("sink", SessionState.READY): lambda w: w.pair(),
    ("sink", SessionState.CLOSED): lambda w: ended(w, w.pair()),
}


def ended(wrong: Wrong, name: str) -> str:
    wrong.world.sinks[name].goodbye("over")
    wrong.world.run()
    return name


def legal(walk: Any, state: Any, kind: str, features: Any, receiver: str) -> bool:
    try:
        walk(state, kind, features)
    except RemoteError:
        return False
    return SENDERS[kind] != receiver


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("receiver", "state"), SESSION_STATES)
def test_every_message_in_every_state_of_a_session(receiver: str, state: SessionState, way: str) -> None:
    """KVP-SES-STATE, KVP-ERR-ALONE, KVP-ERR-ANSWER."""
    wrong, name = Wrong(way), ""
    for kind in MESSAGES:
        if not name:
            name = SESSION_STATES[receiver, state](wrong)
        source, sink = wrong.sessions(name)
        session = source if receiver == "source" else sink
        number = sink.session or 77
        if session is not None:
            assert session.state == state
        answers = wrong.say(name, receiver == "source", wrong.message(kind, number))
        after = session.state if session is not None else state
        if not legal(next_session, state, kind, sink.features, receiver):
            assert after == state, f"{kind} moved it to {after}"
            if DELIVERY[kind] == "request" and receiver == "source" and kind != "Hello":
                assert answers, f"{kind} was not answered"
        wrong.serves()
        if after != state or state in (SessionState.CLOSED, SessionState.GREETED):
            name = ""


# transfers


def ask(wrong: Wrong, name: str, finished: bool = False) -> tuple[Any, int, int]:
    """A request that the wrong peer's sink asks for: its ticket, its number at the sink, and its sequence."""
    world, fresh = wrong.world, ticket(300.0)
    world.sources["s0"].expect(fresh, CONTENT, world.now)
    if finished:
        world.sources["s0"].finish(bytes(fresh.key))
    number = world.fetch(name, fresh, CONTENT)
    return fresh, number, wrong.sessions(name)[1].part(SinkTransfers)._sequence


def asked(wrong: Wrong, name: str) -> int:
    wrong.deaf = {"Accepted"}
    return ask(wrong, name)[2]


def accepted(wrong: Wrong, name: str) -> int:
    if isinstance(wrong.world, Intents):
        wrong.world.waits = True
    sequence = ask(wrong, name)[2]
    if isinstance(wrong.world, Intents):
        wrong.world.waits = False
    return sequence


def served(wrong: Wrong, name: str, *deaf: str) -> int:
    _, _, sequence = ask(wrong, name, finished=True)
    wrong.deaf = set(deaf)
    wrong.world.serve("s0")
    return sequence


def over(wrong: Wrong, name: str) -> int:
    sequence = served(wrong, name)
    if isinstance(wrong.world, PullWorld):
        wrong.world.read(name)
    return sequence


def failed(wrong: Wrong, name: str) -> int:
    fresh, _, sequence = ask(wrong, name)
    wrong.deaf = {"DoneAck", "Abort"}
    wrong.world.sources["s0"].refuse(bytes(fresh.key), RemoteError(ErrorCode.INTERNAL, "", "", ""), wrong.world.now)
    wrong.world.run()
    return sequence


def aborting(wrong: Wrong, name: str) -> int:
    """The copy goes on, so that Drained waits."""
    world = wrong.world
    _, number, sequence = ask(wrong, name, finished=True)
    event = next(e for e in reversed(world.events("s0", "TransferRequested")) if e.transfer.sequence == sequence)
    world.sources["s0"].copying(event)
    world.abort(name, number)
    return sequence


def new(wrong: Wrong, name: str) -> int:
    source, sink = wrong.sessions(name)
    return int(max(sink.part(SinkTransfers)._sequence, source.low_water, *source.attempts, 0) + 1)


PUSHED = ("PUSH", "STAGED", "INLINE", "INTENT")
"""Ways that end by Done."""
TRANSFER_STATES: dict[tuple[str, TransferState, str], Callable[[Wrong, str], int]] = {
    **{(side, TransferState.NEW, way): new for side in ("source", "sink") for way in WAYS},
    **{(side, TransferState.ACCEPTED, way): accepted for side in ("source", "sink") for way in WAYS},
    **{(side, TransferState.ABORTING, way): aborting for side in ("source", "sink") for way in WAYS},
    **{(side, TransferState.ENDED, way): over for side in ("source", "sink") for way in WAYS},
    **{(side, TransferState.OFFERED, "PULL"): served for side in ("source", "sink")},
    **{("sink", TransferState.ASKED, way): asked for way in WAYS},
    **{("source", TransferState.FAILED, way): failed for way in WAYS},
    **{("source", TransferState.DONE, way): lambda wrong, name: served(wrong, name, "DoneAck") for way in PUSHED},
}


def state_of(session: Any, sequence: int) -> TransferState:
    attempt = session.attempts.get(sequence)
    if attempt is not None:
        return TransferState(attempt.state)
    return TransferState.ENDED if sequence <= session.low_water else TransferState.NEW


@pytest.mark.parametrize(("receiver", "state", "way"), TRANSFER_STATES)
def test_every_message_in_every_state_of_a_transfer(receiver: str, state: TransferState, way: str) -> None:
    """KVP-SES-STATE, KVP-ERR-ALONE, KVP-TRN-STALE."""
    wrong, name = Wrong(way), ""
    for kind in sorted(OF_TRANSFERS):
        name = name or wrong.pair()
        sequence = TRANSFER_STATES[receiver, state, way](wrong, name)
        wrong.deaf = set()
        source, sink = wrong.sessions(name)
        session = source if receiver == "source" else sink
        assert state_of(session, sequence) == state
        message = wrong.message(kind, sink.session, sequence=sequence)
        wrong.say(name, receiver == "source", message)
        walked = [state] if state != TransferState.ASKED else [state, TransferState.ACCEPTED]  # answers may overtake
        if not any(legal(next_transfer, s, kind, sink.features, receiver) for s in walked):
            assert state_of(session, sequence) in stays(receiver, state), kind
        wrong.serves()
        if sink.state != SessionState.READY:
            name = ""


def stays(receiver: str, state: TransferState) -> set[TransferState]:
    """Where a transfer may be after a message that the tables have no row for."""
    if receiver == "sink":  # who says nonsense about a transfer loses it
        return {state, TransferState.ABORTING}
    return {state}


def test_the_product_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """How many cases the tables come to, and which states no frame can hit."""
    sessions = len(WAYS) * len(SESSION_STATES) * len(MESSAGES)
    transfers = len(TRANSFER_STATES) * len(OF_TRANSFERS)
    with capsys.disabled():
        print(f" {sessions} messages in states of sessions, {transfers} in states of transfers", end="")
    passed = {("source", s) for s in ("idle", "greeted", "describing")} | {
        ("sink", s) for s in ("idle", "open", "described")
    }
    assert {(side, str(s.value)) for side in ("source", "sink") for s in SessionState} - passed == {
        (side, str(s.value)) for side, s in SESSION_STATES
    }
    hit = {(side, s) for side, s, _ in TRANSFER_STATES}
    assert {(side, s) for side in ("source", "sink") for s in TransferState} - hit == {
        ("source", TransferState.ASKED), ("sink", TransferState.DONE), ("sink", TransferState.FAILED),
    }  # fmt: skip


# lies about what is not a matter of state


def of_another(wrong: Wrong, name: str) -> Iterator[Any]:
    """KVP-SES-UNKNOWN: ids of the correct peer's session."""
    (good,) = [s.session for s in wrong.world.sinks["good"].sessions.values()]
    for kind in ("Describe", "Register", "Transfer", "Abort", "DoneAck", "Goodbye", "Ping", "Pulled", "Credit"):
        yield wrong.message(kind, good), ErrorCode.UNKNOWN_SESSION


def unknown_ids(wrong: Wrong, name: str) -> Iterator[Any]:
    """KVP-TRN-STALE, KVP-TRN-BUSY: sequences that cannot be."""
    number, transfer = wrong.sessions(name)[1].session, wrong.heard["Transfer"]
    for sequence, code in ((2000, ErrorCode.BUSY), (2**64 - 1, ErrorCode.BUSY), (1, ErrorCode.STALE_TRANSFER)):
        ids = {"session": number, "request": next(wrong.requests), "sequence": sequence}
        yield attrs.evolve(transfer, **ids), code


def bad_grants(wrong: Wrong, name: str) -> Iterator[Any]:
    """KVP-TRN-AGREE, KVP-GRANT-POOL, KVP-GRANT-ALIAS, KVP-TKT-USED: items outside of the pool or twice, other epochs."""
    number, transfer = wrong.sessions(name)[1].session, wrong.heard["Transfer"]
    items = transfer.grants[0].items

    def granted(*given: int) -> dict[str, Any]:
        first = attrs.evolve(transfer.grants[0], items=np.array(given, np.uint32))
        return {"grants": (first, *transfer.grants[1:])}

    for changes, code in (
        (granted(*items[:-1], 10**6), ErrorCode.OUT_OF_REGION), (granted(*items[:-1], items[0]), ErrorCode.ITEM_ALIAS),
        (granted(*items, 7), ErrorCode.BAD_GRANT), ({"epoch": 2}, ErrorCode.BAD_GRANT),
        ({"writers": np.array([0, 1], np.uint32)}, ErrorCode.BAD_GRANT),
        ({"ticket": transfer.ticket}, ErrorCode.TICKET_USED),
    ):  # fmt: skip
        last = wrong.sessions(name)[0].attempts
        ids = {"session": number, "request": next(wrong.requests), "sequence": max(last, default=1) + 1}
        yield attrs.evolve(transfer, **{"ticket": ticket().key, **ids, **changes}), code


def lying_plan(wrong: Wrong, name: str) -> Iterator[Any]:
    """KVP-REG-ROUTES: another plan, another route, one route less."""
    number, register = wrong.sessions(name)[1].session, wrong.heard["Register"]
    for changes in (
        {"plan": b"x" * len(register.plan)}, {"routes": register.routes[1:]},
        {"routes": (attrs.evolve(register.routes[0], digest=b"x" * len(register.routes[0].digest)), *register.routes[1:])},
    ):  # fmt: skip
        yield attrs.evolve(register, session=number, request=next(wrong.requests), **changes), ErrorCode.ROUTE_MISMATCH


LIES: dict[str, tuple[Callable[[Wrong, str], Iterator[Any]], Callable[[Wrong], str]]] = {
    "another's session": (of_another, lambda w: w.pair()),
    "ids that cannot be": (unknown_ids, lambda w: with_one(w)),
    "grants": (bad_grants, lambda w: with_one(w)),
    "plan": (lying_plan, lambda w: w.pair("Register")),
}


def with_one(wrong: Wrong) -> str:
    """A pair with one transfer under way."""
    name = wrong.pair()
    accepted(wrong, name)
    return name


@pytest.mark.parametrize("lie", LIES)
def test_lies_have_their_code_and_cost_nobody_else_anything(lie: str) -> None:
    """KVP-ERR-REPORT, KVP-ERR-ALONE."""
    wrong = Wrong("PUSH")
    wrong.serves()
    says, prepare = LIES[lie]
    name = prepare(wrong)
    for message, code in says(wrong, name):
        (answer,) = wrong.say(name, True, message)
        assert (answer.code, answer.request) == (code, getattr(message, "request", None)), message
        wrong.serves()


@pytest.mark.parametrize("deadline", [0, 1, 2**63 - 1])
def test_deadlines_of_nothing_and_of_ages(deadline: int) -> None:
    """KVP-TKT-DEADLINE: whatever a ticket's maker states, the request ends or waits, and others are served."""
    wrong, odd = Wrong("PUSH"), attrs.evolve(ticket(), deadline=deadline)
    name, source = wrong.pair(), wrong.world.sources["s0"]
    source.expect(odd, CONTENT, wrong.world.now)
    wrong.world.transfer(name, odd, CONTENT)
    wrong.world.run()
    wrong.world.pass_time(1.0)
    lost = [e.error.code for e in wrong.world.events(name, "Lost")]
    assert lost == [ErrorCode.DEADLINE] * (deadline < 1000)
    wrong.serves()


SAYS: dict[str, tuple[str, str, Callable[[Any], dict[str, Any]], ErrorCode]] = {
    "another version": ("Hello", "Welcome", lambda m: {"version": messages.Version(major=9, minor=0)}, ErrorCode.FEATURE_MISSING),
    "features that nobody offered": ("Hello", "Welcome", lambda m: {"features": (*m.features, 77)}, ErrorCode.FEATURE_MISSING),
    "another digest": ("Describe", "Description", lambda m: {"digest": bytes(32)}, ErrorCode.BAD_DIGEST),
    "a plan of its own": ("Register", "Registered", lambda m: {"plan": bytes(32)}, ErrorCode.ROUTE_MISMATCH),
    "a route less": ("Register", "Registered", lambda m: {"routes": m.routes[1:]}, ErrorCode.ROUTE_MISMATCH),
    "another route": (
        "Register", "Registered", lambda m: {"routes": (attrs.evolve(m.routes[0], digest=bytes(32)), *m.routes[1:])},
        ErrorCode.ROUTE_MISMATCH,
    ),
    "a transport that was not offered": ("Register", "Registered", lambda m: {"transport": 77}, ErrorCode.NO_TRANSPORT),
}  # fmt: skip
"""What a source lies about: the request that it answers, the answer, what is changed, and how its sink refuses it."""


@pytest.mark.parametrize("lie", SAYS)
def test_a_source_that_lies_is_refused_and_others_are_served(lie: str) -> None:
    """KVP-NEG-CHECK, KVP-REG-CHECK, KVP-ERR-ALONE."""
    asks, answer, changes, code = SAYS[lie]
    wrong = Wrong("PUSH")
    wrong.serves()
    name = wrong.pair(asks)
    _, sink = wrong.sessions(name)
    (request,) = (number for number, each in sink._pending.items() if each.kind.__name__ == asks)
    said = wrong.heard[answer]
    wrong.say(name, False, attrs.evolve(said, session=sink.session or 77, request=request, **changes(said)))
    wrong.world.run()
    assert not sink.ready
    assert [e.error.code for e in wrong.world.events(name, "Refused")] == [code]
    wrong.serves()


@pytest.mark.parametrize("way", WAYS)
def test_frames_that_are_said_again(way: str) -> None:
    """KVP-SES-REPLY, KVP-SES-UNKNOWN, KVP-SES-OTHER: all of a session, by its own connections, by another's and to another sink, while
    it is open and when it is over; nothing is told twice, and correct peers are served.
    """
    wrong, said = Wrong(way), list[tuple[str, bytes]]()
    wrong.serves()
    world = wrong.world
    world.keep = lambda to, frame: said.append((to, frame)) or wrong.keep(to, frame)  # type: ignore[func-returns-value]
    name = wrong.pair()
    over(wrong, name)
    world.keep = lambda to, frame: to in world.sinks or to in world.sources
    source, told = world.sources["s0"], len(world.told[name])
    assert len(world.events(name, "Arrived")) == 1
    for end in (False, True):
        if end:
            ended(wrong, name)
        for to, frame in said:
            for conn in (name, "good", "stranger"):
                if to == "s0":
                    source.receive(conn, frame, world.now)
                elif conn != "stranger":
                    world.sinks[conn].receive("s0", frame, world.now)
        world.run()
        assert not [e for e in world.told[name][told:] if type(e).__name__ in ("Arrived", "Lost", "Ready")]
        assert not [e for e in world.told["good"] if type(e).__name__ == "Lost"]
        wrong.serves()
        told = 0
