"""Items that are named later: Progress and Grant, frame by frame (features INTENT and SPANS)."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.session.limits import RESEND
from kvproto.session.records import SinkTransfer
from kvproto.session.table import TransferState
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof, RequestState
from tests.session.driver import Hearing, TransferRequested, World, geometry, grants, ticket
from tests.session.test_inline import Inline, Whole
from tests.session.test_pull import PullWorld

CONTENT = b"c" * 32
TOKENS = 6
ABORTED = RemoteError(ErrorCode.ABORTED, "", "", "")


class IntentWorld(Hearing):
    """One in which transfers name their items when they are of use; frames of some kinds are lost, or come twice."""

    features = (Feature.VERIFY, Feature.INTENT)

    def __init__(self, source_tp: int = 1) -> None:
        super().__init__(geometry(source_tp))
        self.times: dict[type, int] = {}
        self.ready()

    def hear(self, to: str, frame: bytes) -> int:
        times = self.times.get(type(decode(frame)), 1)
        return times and times * super().hear(to, frame)

    @property
    def pages(self) -> dict[int, m.Grants]:
        """All that a request needs."""
        return grants(self.pools["d0"], TOKENS)

    def ask(self, finished: bool = True, deadline: float = 60.0) -> tuple[SinkTransfer, bytes]:
        """An intent: its number, and the key of its ticket."""
        made = ticket(deadline)
        for source in self.sources.values():
            source.expect(made, CONTENT, self.now, TOKENS)
        number = self.intend(made)
        if finished:
            self.finish(bytes(made.key))
        return number, bytes(made.key)

    def intend(self, made: m.Ticket) -> SinkTransfer:
        """A transfer that names no items yet."""
        bare = {g: attrs.evolve(grant, items=None) for g, grant in self.pages.items()}
        number = self.sinks["d0"].transfer(bytes(made.key), CONTENT, bare, self.now)
        self.run()
        return number

    def finish(self, key: bytes) -> None:
        for source in self.sources.values():
            source.finish(key)
        self.run()

    def grant(self, number: SinkTransfer, tokens: int = TOKENS) -> None:
        self.sinks["d0"].grant(number, self.up_to(tokens), self.now)
        self.run()

    def up_to(self, tokens: int) -> dict[int, m.Grants]:
        """What is granted for so many tokens."""
        cut = grants(self.pools["d0"], tokens)
        return {g: attrs.evolve(grant, count=cut[g].count, items=cut[g].items) for g, grant in self.pages.items()}

    def say(self, message: Any, to_source: bool = True) -> list[Any]:
        """Give a side a message of a peer that says what it likes; its answers."""
        endpoint: Any = self.sources["s0"] if to_source else self.sinks["d0"]
        endpoint.to_send(self.now)
        endpoint.receive("d0" if to_source else "s0", encode(message), self.now)
        return [decode(frame) for _, frame in endpoint.to_send(self.now)]

    def serves(self) -> None:
        """The next good one works."""
        self.times.clear()
        before = len(self.events("d0", "Arrived"))
        self.grant(self.ask()[0])
        for address in self.sources:
            self.serve(address)
        assert len(self.events("d0", "Arrived")) == before + 1


class SpansWorld(IntentWorld):
    features = (Feature.VERIFY, Feature.INTENT, Feature.SPANS)


def useful(world: World) -> list[int | None]:
    return [event.tokens for event in world.events("d0", "Useful")]


def items_of(some: Iterable[m.Grants]) -> list[list[int]]:
    return [[] if grant.items is None else grant.items.tolist() for grant in some]


def test_nothing_is_asked_of_the_sink_before_prefill_is_over() -> None:
    """KVP-INT-ITEMS, KVP-INT-WRITE."""
    world = IntentWorld()
    number, key = world.ask(finished=False)
    assert (useful(world), world.of(m.Accepted)[-1].state) == ([], RequestState.RUNNING)
    world.finish(key)
    assert (useful(world), [p.state for p in world.of(m.Progress)]) == ([None], [RequestState.READY])
    assert not world.events("s0", "TransferRequested")
    world.grant(number)
    (asked,) = world.events("s0", "TransferRequested")
    assert asked.whole
    assert items_of(asked.transfer.grants) == items_of(world.pages.values())
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    assert len(world.events("s0", "Released")) == 1


def test_done_ends_a_grant_whose_answer_was_lost() -> None:
    """It is not sent again, and the session is not given up for it."""
    world = IntentWorld()
    number, _ = world.ask()
    world.times[m.Accepted] = 0
    world.grant(number)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    world.pass_time(RESEND)
    assert len(world.of(m.Grant)) == 1
    world.serves()


def test_nothing_is_said_of_what_is_of_use_once_all_is_granted() -> None:
    """KVP-INT-ITEMS: there is nothing left to grant."""
    world = SpansWorld()
    number, _ = world.ask(finished=False)
    told = useful(world)
    world.grant(number)
    assert not any(not part.whole for part in number.parts.values())
    assert useful(world) == told


def test_a_transfer_after_prefill_hears_so_in_accepted() -> None:
    world, made = IntentWorld(), ticket()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.times[m.Progress] = 0
    number = world.intend(made)
    assert useful(world) == [None]
    world.grant(number)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


def test_all_source_ranks_have_to_be_ready() -> None:
    world, made = IntentWorld(2), ticket()
    for source in world.sources.values():
        source.expect(made, CONTENT, 0.0)
    number = world.intend(made)
    world.sources["s1"].finish(bytes(made.key))
    world.run()
    assert not useful(world)
    world.sources["s0"].finish(bytes(made.key))
    world.run()
    assert useful(world) == [None]
    world.grant(number)
    world.serve("s0")
    world.serve("s1")
    assert len(world.events("d0", "Arrived")) == 1


def test_progress_that_is_lost_comes_again() -> None:
    """KVP-INT-AGAIN."""
    world = IntentWorld()
    world.times[m.Progress] = 0
    number, _ = world.ask()
    world.pass_time(10 * RESEND)
    assert not useful(world)
    world.times.clear()
    world.pass_time(RESEND)
    assert useful(world) == [None]
    world.grant(number)
    world.heard.clear()
    world.pass_time(3 * RESEND)
    assert not world.of(m.Progress)


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("kind", [m.Progress, m.Grant, m.Accepted, m.Done, m.DoneAck])
def test_frames_that_are_lost_or_doubled_change_nothing(kind: type, times: int) -> None:
    """KVP-SES-REPLY, KVP-SES-RESEND, KVP-INT-AGAIN."""
    world = IntentWorld()
    world.times[kind] = times
    number, _ = world.ask()
    world.pass_time(RESEND)
    world.grant(number)
    world.pass_time(RESEND)
    world.serve()
    world.times.clear()
    for _ in range(3):
        world.pass_time(RESEND)
        world.grant(number)
        world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    assert not world.events("d0", "Lost") + world.events("s0", "ProtocolError") + world.events("d0", "ProtocolError")


def test_items_named_before_their_time_go_when_they_may() -> None:
    world = IntentWorld()
    number, key = world.ask(finished=False)
    world.grant(number)
    assert not world.of(m.Grant)
    world.finish(key)
    assert len(world.of(m.Grant)) == 1
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


# what a Grant may be wrong in, and its order of checks


def granted(world: IntentWorld, number: int = 1, **changes: Any) -> m.Grant:
    """A Grant of the last Transfer, with the changes."""
    transfer = world.of(m.Transfer)[-1]
    fields = {"session": transfer.session, "request": 700 + number, "sequence": transfer.sequence}
    every = tuple(world.pages[g.group] for g in transfer.grants)
    return m.Grant(**{**fields, "grants": every, **changes})


def one(world: IntentWorld, at: int, **changes: Any) -> dict[str, Any]:
    """All grants of the last Transfer, one of them changed."""
    every = [world.pages[g.group] for g in world.of(m.Transfer)[-1].grants]
    every[at] = attrs.evolve(every[at], **changes)
    return {"grants": tuple(every)}


def ids(*items: int) -> Any:
    return np.array(items, np.uint32)


WRONG: dict[str, tuple[Callable[[IntentWorld], dict[str, Any]], ErrorCode, str]] = {
    "a sequence that is over": (lambda w: {"sequence": 1}, ErrorCode.STALE_TRANSFER, "sequence"),
    "one that never was": (lambda w: {"sequence": 99}, ErrorCode.STALE_TRANSFER, "sequence"),
    "groups": (lambda w: {"grants": granted(w).grants[:1]}, ErrorCode.BAD_GRANT, "grants"),
    "begin": (lambda w: one(w, 0, first=1, count=5), ErrorCode.BAD_GRANT, "grants[0]"),
    "a shorter window": (lambda w: one(w, 1, count=5), ErrorCode.BAD_GRANT, "grants[1]"),
    "a longer window": (lambda w: one(w, 1, count=7, valid=7), ErrorCode.BAD_GRANT, "grants[1]"),
    "late": (lambda w: one(w, 1, late=True), ErrorCode.BAD_GRANT, "grants[1]"),
    "state": (lambda w: one(w, 1, state_after=3), ErrorCode.BAD_GRANT, "grants[1]"),
    "too few items": (lambda w: one(w, 0, items=ids(0)), ErrorCode.BAD_GRANT, "grants[0].items"),
    "too many items": (lambda w: one(w, 0, items=ids(0, 1, 2)), ErrorCode.BAD_GRANT, "grants[0].items"),
    "no items": (lambda w: one(w, 0, items=None), ErrorCode.BAD_GRANT, "grants[0].items"),
    "beyond the pool": (lambda w: one(w, 1, items=ids(0, 10**6)), ErrorCode.OUT_OF_REGION, "grants[1].items"),
    "twice": (lambda w: one(w, 1, items=ids(3, 3)), ErrorCode.ITEM_ALIAS, "grants[1].items"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_grant_has_its_code_and_the_next_transfer_works(wrong: str) -> None:
    """KVP-INT-CHECKS, KVP-INT-WINDOW, KVP-GRANT-COUNT, KVP-GRANT-POOL, KVP-GRANT-ALIAS."""
    world = IntentWorld()
    world.serves()
    number, _ = world.ask()
    changes, code, path = WRONG[wrong]
    (failed, *_) = world.say(granted(world, **changes(world)))
    assert (type(failed), failed.code, failed.path, failed.request) == (m.Failed, code, path, 701)
    assert not [e for e in world.events("s0", "TransferRequested") if world.sources["s0"].active(e)]
    world.sinks["d0"].abort(number, ABORTED, world.now)
    world.run()
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN
    world.serves()


def test_the_order_of_the_checks_of_a_grant() -> None:
    """KVP-INT-CHECKS: each is wrong in all that comes after, and ends its transfer, if there is one."""
    rows: tuple[tuple[dict[str, Any], bool, ErrorCode], ...] = (
        ({"sequence": 99}, False, ErrorCode.STALE_TRANSFER),
        ({}, False, ErrorCode.UNEXPECTED_MESSAGE),
        ({}, True, ErrorCode.BAD_GRANT),
        ({"late": None}, True, ErrorCode.OUT_OF_REGION),
        ({"late": None, "items": (3, 3)}, True, ErrorCode.ITEM_ALIAS),
    )
    world = IntentWorld()
    for changes, finished, code in rows:
        world.ask(finished=finished)
        given = {"late": True, "items": (10**6, 10**6), **changes}
        fields = one(world, 1, late=given["late"], items=ids(*given["items"]))
        (failed, *_) = world.say(granted(world, **fields, **{k: v for k, v in given.items() if k == "sequence"}))
        assert (type(failed), failed.code) == (m.Failed, code)
    world.serves()


def test_a_grant_before_prefill_is_over_ends_its_transfer() -> None:
    """KVP-INT-CHECKS."""
    world = IntentWorld()
    world.ask(finished=False)
    (failed,) = world.say(granted(world))
    assert (failed.code, failed.path) == (ErrorCode.UNEXPECTED_MESSAGE, "")
    assert world.say(granted(world))[0].code == ErrorCode.UNEXPECTED_MESSAGE  # again, and from the state
    world.serves()


def test_a_second_grant_with_other_items_is_refused_and_the_first_repeated_is_not() -> None:
    """KVP-INT-CHECKS, KVP-SES-REPLY."""
    world = IntentWorld()
    number, _ = world.ask()
    world.grant(number)
    (first,) = world.of(m.Grant)
    assert [type(answer) for answer in world.say(first)] == [m.Accepted]
    (failed,) = world.say(attrs.evolve(granted(world, **one(world, 1, items=ids(4, 5))), request=first.request + 1))
    assert (type(failed), failed.code) == (m.Failed, ErrorCode.UNEXPECTED_MESSAGE)
    assert not [e for e in world.events("s0", "TransferRequested") if world.sources["s0"].active(e)]
    world.serves()


def test_a_grant_after_abort_is_refused() -> None:
    """KVP-INT-CHECKS."""
    world = IntentWorld()
    number, _ = world.ask()
    (session,) = world.sources["s0"].sessions.values()
    (attempt,) = session.attempts.values()
    attempt.copying = True  # so that Drained waits, and the record stays
    world.sinks["d0"].abort(number, ABORTED, world.now)
    world.run()
    (failed,) = world.say(granted(world))
    assert (type(failed), failed.code) == (m.Failed, ErrorCode.ABORTED)
    assert attempt.state == TransferState.ABORTING


def test_a_grant_that_crosses_failed_is_answered_by_the_same_error() -> None:
    """KVP-INT-CHECKS, KVP-END-FAILED."""
    world = IntentWorld()
    _, key = world.ask(finished=False)
    error = RemoteError(ErrorCode.INTERNAL, "", "", "")
    world.sources["s0"].refuse(key, error, world.now)
    (failed, *_) = [f for f in world.say(granted(world)) if f.request == 701]
    assert (type(failed), failed.code) == (m.Failed, ErrorCode.INTERNAL)
    world.run()
    world.serves()


@pytest.mark.parametrize("feature", [(), (Feature.INTENT,)])
def test_items_that_are_left_out_need_the_feature_and_all_of_them(feature: tuple[Feature, ...]) -> None:
    """KVP-INT-ITEMS; a Grant without INTENT is UNEXPECTED_MESSAGE."""
    world = type("Plain", (IntentWorld,), {"features": feature})()
    made, pages = ticket(), world.pages
    asked = {g: attrs.evolve(grant, items=grant.items if feature and g else None) for g, grant in pages.items()}
    world.sources["s0"].expect(made, CONTENT, 0.0)
    world.sinks["d0"].transfer(bytes(made.key), CONTENT, asked, 0.0)
    world.run()
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path) == (ErrorCode.BAD_GRANT, "grants[0].items")
    if not feature:
        assert [a.code for a in world.say(granted(world))] == [ErrorCode.UNEXPECTED_MESSAGE]


# ends


POINTS: dict[str, Callable[[IntentWorld, int, bytes], None]] = {
    "at once": lambda w, number, key: None,
    "ready": lambda w, number, key: w.finish(key),
    "granted": lambda w, number, key: (w.finish(key), w.grant(number))[0],
    "copying": lambda w, number, key: (
        w.finish(key), w.grant(number), w.sources["s0"].copying(w.events("s0", "TransferRequested")[0])
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_at_each_point_is_proven(point: str) -> None:
    """KVP-END-PROVEN, KVP-END-REUSE; Drained waits for the copy, and for nothing else."""
    world = IntentWorld()
    number, key = world.ask(finished=False)
    POINTS[point](world, number, key)
    world.sinks["d0"].abort(number, ABORTED, world.now)
    world.run()
    assert bool(world.of(m.Drained)) == (point != "copying")
    for event in world.events("s0", "TransferRequested"):
        world.sources["s0"].failed(event, ABORTED, world.now)
    world.run()
    assert [e.proof for e in world.events("d0", "Lost")] == [Proof.PROVEN]
    world.finish(key)
    world.grant(number)
    assert not [e for e in world.events("s0", "TransferRequested") if world.sources["s0"].active(e)]
    assert len(world.events("s0", "Released")) == 1
    world.serves()


def test_an_abort_between_two_copies_is_noticed() -> None:
    """KVP-END-PROVEN: who copies is told to look, though no copy is under way."""
    world = SpansWorld()
    number, key = world.ask(finished=False)
    (asked,) = world.sources["s0"].asking(key)
    world.sources["s0"].copying(asked)
    world.told["s0"].clear()
    world.sinks["d0"].abort(number, ABORTED, world.now)
    world.run()
    assert [event.key for event in world.events("s0", "Changed")]


def test_an_intent_that_is_never_granted_ends_at_its_deadline() -> None:
    """KVP-TKT-DEADLINE."""
    world = IntentWorld()
    world.ask(deadline=5)
    world.pass_time(5.0)
    assert world.lost() == [(ErrorCode.DEADLINE, Proof.PROVEN)]
    assert len(world.events("s0", "Expired")) == 1
    world.serves()


def test_done_before_everything_is_granted_is_refused() -> None:
    """KVP-INT-DONE, KVP-SPN-WHOLE."""
    world = SpansWorld()
    number, _ = world.ask(finished=False)
    world.grant(number, 4)
    transfer, (session,) = world.of(m.Transfer)[-1], world.sinks["d0"].sessions.values()
    done = m.Done(
        session=transfer.session, request=900, sequence=transfer.sequence, writer=0,
        groups=np.array([0, 1, 2], np.uint32), bytes=1, outcome=Outcome.CONTINUE, handoff=(), checksums=(),
    )  # fmt: skip
    answers = world.say(done, to_source=False)
    assert [type(a) for a in answers] == [m.Error, m.Abort]
    assert (answers[0].code, answers[0].path) == (ErrorCode.UNEXPECTED_MESSAGE, "sequence")
    assert session.attempts[1].done is None


def test_data_before_everything_is_granted_is_refused() -> None:
    """KVP-INT-DONE; where bytes are packed, nothing is expected before."""
    world = type("Intents", (Inline,), {"features": (*Inline.features, Feature.INTENT, Feature.SPANS)})()
    made, pages = ticket(), grants(world.pools["d0"], TOKENS)
    world.sources["s0"].expect(made, CONTENT, 0.0)
    bare = {g: attrs.evolve(grant, items=None) for g, grant in pages.items()}
    number = world.sinks["d0"].transfer(bytes(made.key), CONTENT, bare, 0.0)
    world.run()
    part = {g: attrs.evolve(grant, count=0, items=ids()) for g, grant in pages.items()}
    world.sinks["d0"].grant(number, part, 0.0, {0: lambda begins: Whole(bytearray(25))})
    world.run()
    assert not world.of(m.Grant)  # a part is of no use here
    (transfer,) = world.of(m.Transfer)
    data = m.Data(session=transfer.session, sequence=1, offset=0, data=b"12345678", last=False)
    world.hears("d0", data)
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path) == (ErrorCode.UNEXPECTED_MESSAGE, "sequence")


def test_packed_bytes_come_after_the_grant() -> None:
    world = type("Intents", (Inline,), {"features": (*Inline.features, Feature.INTENT)})()
    made, pages, found = ticket(), grants(world.pools["d0"], TOKENS), bytearray(25)
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    bare = {g: attrs.evolve(grant, items=None) for g, grant in pages.items()}
    number = world.sinks["d0"].transfer(bytes(made.key), CONTENT, bare, 0.0)
    world.run()
    world.sinks["d0"].grant(number, pages, 0.0, {0: lambda begins: Whole(found)})
    world.run()
    world.data(0, b"x" * 16)
    world.data(16, b"y" * 9, last=True)
    world.serve()
    assert (bytes(found), len(world.events("d0", "Arrived"))) == (b"x" * 16 + b"y" * 9, 1)


# pull


class PullIntent(PullWorld):
    features = (*PullWorld.features, Feature.INTENT, Feature.SPANS)


def test_where_the_sink_pulls_it_needs_no_grant() -> None:
    """KVP-INT-PULL, KVP-INT-ITEMS: the offer comes as ever; a Grant is UNEXPECTED_MESSAGE."""
    world, made = PullIntent(geometry(1)).ready(), ticket()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    bare = {g: attrs.evolve(grant, items=None) for g, grant in grants(world.pools["d0"], TOKENS).items()}
    world.sinks["d0"].transfer(bytes(made.key), CONTENT, bare, 0.0)
    world.run()
    transfer = world.of(m.Transfer)[-1]
    fields = {"session": transfer.session, "request": 701, "sequence": transfer.sequence}
    world.sources["s0"].receive("d0", encode(m.Grant(**fields, grants=transfer.grants)), 0.0)
    answers = [decode(frame) for _, frame in world.sources["s0"].to_send(0.0)]
    assert [(type(a), a.code) for a in answers] == [(m.Error, ErrorCode.UNEXPECTED_MESSAGE)]
    world.serve()
    world.read("d0")
    assert len(world.events("d0", "Arrived")) == 1


# spans


def asking(world: World, key: bytes) -> TransferRequested:
    (asked,) = world.sources["s0"].asking(key)
    return asked


def test_windows_grow_and_items_are_appended() -> None:
    """KVP-SPN-APPEND, KVP-SPN-TURN, KVP-SPN-ID."""
    world = SpansWorld()
    number, key = world.ask(finished=False)
    for tokens in (3, 4, 5, 6):
        world.grant(number, tokens)
        asked = asking(world, key)
        assert [g.count for g in asked.transfer.grants] == [tokens, tokens, 0]
        assert items_of(asked.transfer.grants) == items_of(world.up_to(tokens).values())
        assert asked.whole == (tokens == TOKENS)
    said = world.of(m.Grant)
    assert [[len(items) for items in items_of(grant.grants)] for grant in said] == [
        [1, 1, 0],
        [0, 0, 0],
        [1, 1, 0],
        [0, 0, 0],
    ]
    assert [g.request for g in said] == sorted({g.request for g in said})
    world.finish(key)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


def test_one_grant_at_a_time() -> None:
    """KVP-SPN-TURN: what is named meanwhile goes in the next."""
    world = SpansWorld()
    number, key = world.ask(finished=False)
    world.times[m.Accepted] = 0
    for tokens in (2, 4, 6):
        world.grant(number, tokens)
    assert [g.grants[0].count for g in world.of(m.Grant)] == [2]
    world.times.clear()
    world.pass_time(RESEND)
    assert [g.grants[0].count for g in world.of(m.Grant)] == [2, 2, 6]
    assert asking(world, key).whole


def test_progress_says_up_to_where_items_are_of_use() -> None:
    """KVP-INT-AGAIN."""
    world = SpansWorld()
    number, key = world.ask(finished=False)
    source, asked = world.sources["s0"], asking(world, key)
    for tokens in (2, 2, 4):
        source.progress(asked, tokens, world.now)
        world.run()
    assert [p.tokens for p in world.of(m.Progress)] == [2, 4]
    world.grant(number, 4)
    world.heard.clear()
    world.pass_time(2 * RESEND)
    assert not world.of(m.Progress)
    world.finish(key)
    assert useful(world) == [2, 4, None]


@pytest.mark.parametrize(
    ("first", "then"), [(4, {"count": 3, "items": ids()}), (4, {"count": 7, "valid": 7, "items": ids(5)})]
)
def test_windows_that_shrink_or_end_too_late_are_refused(first: int, then: dict[str, Any]) -> None:
    """KVP-SPN-GROW."""
    world = SpansWorld()
    number, _ = world.ask(finished=False)
    world.grant(number, first)
    (failed,) = world.say(granted(world, **one(world, 0, **then)))
    assert (type(failed), failed.code, failed.path) == (m.Failed, ErrorCode.BAD_GRANT, "grants[0]")
    world.serves()


@pytest.mark.parametrize(
    ("items", "code"), [(ids(0), ErrorCode.ITEM_ALIAS), (ids(), ErrorCode.BAD_GRANT), (ids(2, 3), ErrorCode.BAD_GRANT)]
)
def test_items_are_counted_from_the_grant_before(items: Any, code: ErrorCode) -> None:
    """KVP-SPN-APPEND, KVP-GRANT-ALIAS: an item that was granted before is one twice."""
    world = SpansWorld()
    number, _ = world.ask(finished=False)
    world.grant(number, 4)
    every = tuple(attrs.evolve(g, items=ids(1) if g.items.size else ids()) for g in granted(world).grants)
    wrong = (attrs.evolve(every[0], items=items), *every[1:])
    (failed,) = world.say(granted(world, grants=wrong))
    assert (type(failed), failed.code, failed.path) == (m.Failed, code, "grants[0].items")
    world.serves()


def test_a_refused_transfer_does_not_silence_a_done() -> None:
    """KVP-SES-RESEND: DoneAck of a refused Transfer names a request of the sink, which may be a number of the source's."""
    world = IntentWorld()
    number, _ = world.ask()
    world.grant(number)
    world.times[m.Done] = 0
    world.serve()
    (session,) = world.sources["s0"].sessions.values()
    (pending,) = session._pending
    transfer = world.of(m.Transfer)[-1]
    wrong = attrs.evolve(transfer, request=pending, sequence=2, epoch=9)
    (failed,) = world.say(wrong)
    world.say(m.DoneAck(session=transfer.session, request=failed.request, sequence=2))
    world.times.clear()
    world.pass_time(RESEND)
    assert len(world.events("d0", "Arrived")) == 1
