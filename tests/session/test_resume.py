"""Connections that break, sources that were stopped, and sinks that come again: nothing is lost, repeated or kept for ever."""

from itertools import count
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.session import source_endpoint
from kvproto.session.limits import MAX_ENGINE_SESSIONS, MAX_SESSIONS, MAX_TRANSFERS, PATIENCE, PING_SILENCE, RESEND
from kvproto.session.table import SessionState
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Outcome, Proof, Role
from tests.session.driver import geometry, ticket
from tests.session.test_delivery import CONTENT, Heard
from tests.steps import least_steps


class Reconnected(Heard):
    """The sink's frames come by a connection whose name tells how often it has broken."""

    broken = 0

    def run(self) -> None:
        source = self.sources["s0"]
        receive, to_send = source.receive, source.to_send
        conn = f"d0{'+' * self.broken}"
        source.receive = lambda _, frame, now: receive(conn, frame, now)  # type: ignore[method-assign]
        source.to_send = lambda now: [("d0", f) for to, f in to_send(now) if to == conn]  # type: ignore[method-assign]
        try:
            super().run()
        finally:
            source.receive, source.to_send = receive, to_send  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", [m.Transfer, m.Done, m.DoneAck, m.Abort, m.Drained, None])
def test_a_session_goes_on_over_a_new_connection(lost: type | None) -> None:
    """KVP-SES-RESUME, KVP-SES-UNKNOWN: whatever was lost with the old connection, each transfer arrives once."""
    world = Reconnected()
    before = world.sinks["d0"].sessions["s0"].session
    world.keep = lambda to, frame: world.hear(to, frame) and not (lost and isinstance(decode(frame), lost))
    world.asked()
    aborted = world.fetch("d0", ticket(), CONTENT)
    world.serve()
    world.abort("d0", aborted)
    world.broken, world.keep = 1, world.hear
    for _ in range(4):
        world.pass_time(RESEND)
        world.serve()
    world.pass_time(PING_SILENCE)
    assert [len(world.events("d0", kind)) for kind in ("Arrived", "Lost", "Disconnected")] == [1, 1, 0]
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN
    (session,) = world.sources["s0"].sessions.values()
    assert (session.session, session.conn, session.state) == (before, "d0+", SessionState.READY)
    assert {h.resume for h in world.of(m.Hello)} == {None, before}
    world.serves()


def test_requests_that_were_lost_are_sent_again_in_order_when_the_session_is_resumed() -> None:
    """KVP-SES-RESEND: at once, so that nothing that is asked later overtakes them."""
    world = Reconnected()
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Transfer)
    world.fetch("d0", ticket(), CONTENT)
    world.fetch("d0", ticket(), CONTENT)
    world.run()
    world.broken, world.keep = 1, world.hear
    before = len(world.of(m.Transfer))
    world.sinks["d0"].returned("s0", world.now)
    world.run()
    assert [transfer.sequence for transfer in world.of(m.Transfer)[before:]] == [1, 2]


def test_only_the_run_that_opened_a_session_resumes_it() -> None:
    """KVP-SES-RESUME: another rank, engine, run or role gets another session or none; the old one is not touched."""
    world = Heard()
    (number,) = world.sources["s0"].sessions
    (hello,) = world.of(m.Hello)
    other = {"engine": "e"}, {"rank": 1}, {"replica": 3}, {"role": Role.SOURCE}, {"offered": ()}
    for request, change in enumerate(other, 500):
        made = attrs.evolve(hello, **{"needed": (), **change}, request=request, resume=number)
        (answer,) = world.say(made, f"thief{request}")
        assert isinstance(answer, m.Refused) or answer.session != number
        assert world.sources["s0"].sessions[number].conn == "d0"
    world.serves()


def test_a_source_that_has_forgotten_a_session_ends_it() -> None:
    """KVP-SES-RESUMED."""
    world = Heard()
    world.sources["s0"].sessions.clear()
    world.pass_time(PING_SILENCE)
    (_, other) = world.of(m.Welcome)
    assert [g.session for g in world.of(m.Goodbye, "s0")] == [other.session]
    assert "forgotten" in world.events("d0", "Disconnected")[0].reason


def test_a_connection_that_comes_back_is_asked_about_at_once() -> None:
    """KVP-SES-BACK: a source that was started again is noticed without a silence, and one that was not costs nothing."""
    world = Heard()
    (sink,) = world.sinks.values()
    sink.returned("s0", world.now)
    world.run()
    assert (len(world.of(m.Ping)), len(world.of(m.Pong))) == (1, 1)
    world.serves()
    world.sources["s0"].sessions.clear()
    for _ in range(2):
        sink.returned("s0", world.now)
    world.run()
    assert len(world.of(m.Ping)) == 2
    assert "forgotten" in world.events("d0", "Disconnected")[0].reason
    sink.returned("s0", world.now)
    world.run()
    assert len(world.of(m.Ping)) == 2


def test_a_frame_of_another_session_changes_nothing() -> None:
    """KVP-SES-OTHER: what is said in a session that is not the sink's ends neither its session nor a transfer."""
    world = Heard()
    world.asked(finished=False)
    (hello,), (transfer,) = world.of(m.Hello), world.of(m.Transfer)
    (other,) = world.say(hello, "d0+")
    done = m.Done(
        session=other.session, request=7, sequence=transfer.sequence, writer=0,
        groups=np.array([0, 1, 2], np.uint32), bytes=0, outcome=Outcome.CONTINUE, handoff=(), checksums=(),
    )  # fmt: skip
    for message in (m.Goodbye(session=other.session, reason=""), m.Ping(session=other.session, request=8), done):
        sink = world.sinks["d0"]
        sink.receive("s0", encode(message), world.now)
        ((_, frame),) = sink.to_send(world.now)
        answer = decode(frame)
        assert (type(answer), answer.code, answer.session) == (m.Error, ErrorCode.UNKNOWN_SESSION, other.session)
    world.sources["s0"].finish(bytes(transfer.ticket))
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    world.serves()


def test_of_two_sessions_of_one_hello_the_one_that_nobody_has_ends() -> None:
    """KVP-SES-OTHER, KVP-SES-PING: the Hello came again by the connection that the sink has now."""
    world = Reconnected()
    (hello,) = world.of(m.Hello)
    (number,) = world.sources["s0"].sessions
    assert isinstance(world.say(hello, "d0+")[0], m.Welcome)
    world.broken = 1
    for _ in range(3):
        world.pass_time(PING_SILENCE)
    assert list(world.sources["s0"].sessions) == [number]
    assert not world.events("d0", "Disconnected")
    world.serves()


@pytest.mark.parametrize("said", [m.Ping, m.Goodbye])
def test_a_sink_whose_welcome_was_lost_waits_for_it(said: type) -> None:
    """KVP-SES-OTHER: Ping and Goodbye of a session that it does not know yet."""
    world = Heard()
    world.keep = lambda to, frame: world.hear(to, frame) and not (to == "late" and isinstance(decode(frame), m.Welcome))
    world.join("late", geometry(1), engine="late")
    number = world.of(m.Welcome, "late")[0].session
    world.keep = world.hear
    if said is m.Ping:  # the source alone has a clock
        world.now += PING_SILENCE
        world.sources["s0"].on_time(world.now)
    else:
        world.sources["s0"].sessions[number].goodbye("over")
    world.run()
    assert len(world.of(said, "late")) == 1
    assert not world.of(m.Error)
    world.pass_time(RESEND)
    world.serves("late")


def test_a_hello_that_was_late_takes_nothing_back() -> None:
    """KVP-SES-HELLO, KVP-SES-LATE: it resumed the session before, and comes again after the one that did so since."""
    world = Reconnected()
    for broken in (1, 2):
        world.broken = broken
        world.pass_time(PING_SILENCE)
    first, second = [hello for hello in world.of(m.Hello) if hello.resume]
    assert first.request < second.request
    (session,) = world.sources["s0"].sessions.values()
    begun = []
    session.reconnected = lambda: begun.append(1)  # type: ignore[method-assign]
    assert world.say(first, "d0+") == []
    assert (session.conn, session.greeting, begun) == ("d0++", second.request, [])
    assert isinstance(world.say(second, "d0++")[0], m.Welcome)
    assert not begun
    world.serves()


def test_a_drained_source_resumes_what_it_has() -> None:
    """KVP-SES-DRAINING: it refuses new sessions alone."""
    world = Reconnected()
    world.asked(finished=False)
    world.sources["s0"].draining = True
    world.broken = 1
    world.pass_time(PING_SILENCE)
    assert world.sinks["d0"].ready
    assert not world.of(m.Refused)


def test_an_error_about_a_message_of_the_other_direction_ends_nothing() -> None:
    """KVP-ERR-ALONE: both sides count their request ids for themselves."""
    world = Heard()
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Transfer)
    world.asked()
    (transfer,) = world.of(m.Transfer)
    error = m.Error(
        session=transfer.session, request=transfer.request, about=m.DoneAck.TYPE, code=ErrorCode.BAD_GRANT, path="",
        mine="", yours="",
    )  # fmt: skip
    deliver(world, error)
    world.keep = world.hear
    world.pass_time(RESEND)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


def deliver(world: Heard, message: Any) -> None:
    world.hears("d0", message)


# silence that ends


@pytest.mark.parametrize("finished", [False, True])
def test_a_source_that_was_stopped_for_longer_than_anybody_is_patient_gives_the_pages_back(finished: bool) -> None:
    """KVP-END-LATE, KVP-END-REUSE: by its late Done, or by Drained when it is asked again."""
    world = Heard()
    made = world.asked(finished=False)
    world.keep = lambda to, frame: 0
    for _ in range(40):  # the sink alone has a clock: the source is stopped
        world.now += 1.0
        world.sinks["d0"].on_time(world.now)
        world.run()
    assert world.events("d0", "Lost")[0].proof == Proof.UNPROVABLE
    assert not world.events("d0", "Proven")
    world.keep = world.hear if not finished else lambda to, f: world.hear(to, f) and not isinstance(decode(f), m.Abort)
    if finished:
        world.sources["s0"].finish(bytes(made.key))
        world.serve()
    for _ in range(int(PING_SILENCE)):
        world.now += 1.0
        world.sinks["d0"].on_time(world.now)
        world.run()
    assert len(world.events("d0", "Proven")) == 1
    assert bool(world.of(m.Drained)) != finished
    assert world.sinks["d0"].timers.next() is None  # nothing more is asked


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_source_that_gave_a_session_up_says_how_its_writes_ended(forgotten: bool) -> None:
    """KVP-END-AFTER, KVP-SES-UNKNOWN: the sink was busy for longer than the source is patient."""
    world = Heard()
    made = world.asked(finished=forgotten)
    (transfer,) = world.of(m.Transfer)
    for event in world.events("s0", "TransferRequested"):
        world.sources["s0"].failed(event, RemoteError(ErrorCode.INTERNAL, "", "", ""), world.now)
    world.keep = lambda to, frame: 0
    for _ in range(60):
        world.now += 1.0
        world.sources["s0"].on_time(world.now)
        world.run()
    assert bool(world.sources["s0"].sessions) != forgotten
    (answer,) = world.say(m.Abort(session=transfer.session, request=70, sequence=1, reason=""))
    assert (type(answer), answer.proof, answer.request) == (m.Drained, Proof.PROVEN, 70)
    (answer,) = world.say(attrs.evolve(transfer, request=71, sequence=2, ticket=ticket().key))
    assert answer.code in (ErrorCode.UNKNOWN_SESSION, ErrorCode.UNEXPECTED_MESSAGE)
    assert made


def test_a_sink_that_was_busy_while_done_waited_loses_no_page() -> None:
    """KVP-SES-LOST, KVP-END-LATE: the source has given the session up; what is asked next is lost with proof."""
    world = Heard()
    world.asked()
    (first,) = world.sinks["d0"].transfers
    world.keep = lambda to, frame: 0
    world.serve()
    while world.sources["s0"].sessions:  # the source alone has a clock: the sink is busy
        world.now += 1.0
        world.sources["s0"].on_time(world.now)
        world.run()
    assert world.now <= PATIENCE + 2 * PING_SILENCE
    world.keep = world.hear
    second = world.transfer("d0", ticket(), CONTENT)
    for _ in range(3):
        world.pass_time(PING_SILENCE)
    lost = {e.transfer for e in world.events("d0", "Lost")}
    proven = {e.transfer for e in world.events("d0", "Lost") if e.proof == Proof.PROVEN}
    assert lost == {first, second}
    assert proven | {e.transfer for e in world.events("d0", "Proven")} == lost
    world.join("again", geometry(1))
    world.serves("again")


@pytest.mark.parametrize("forgotten", [False, True])
def test_late_aborts_by_another_connection_are_answered(forgotten: bool) -> None:
    """KVP-END-AFTER, KVP-END-LATE: both have given the session up, and the connection that it was opened by is gone."""
    world = Reconnected()
    world.asked(finished=forgotten)
    world.keep = lambda to, frame: 0
    for event in world.events("s0", "TransferRequested"):
        world.sources["s0"].failed(event, RemoteError(ErrorCode.INTERNAL, "", "", ""), world.now)
    for _ in range(60):
        world.pass_time(1.0)
    assert world.events("d0", "Lost")[0].proof == Proof.UNPROVABLE
    assert bool(world.sources["s0"].sessions) != forgotten
    world.keep = world.hear
    world.broken = 1
    for _ in range(2):
        world.pass_time(PING_SILENCE)
    assert len(world.events("d0", "Proven")) == 1


# bounds


def test_hellos_without_more_cost_nobody_a_session() -> None:
    """KVP-SES-BARE: the oldest that has not described itself makes room, and those that are served stay."""
    world = Heard()
    (hello,) = world.of(m.Hello)
    for n in range(MAX_SESSIONS + 50):
        (answer,) = world.say(attrs.evolve(hello, engine=f"e{n}", request=n + 1), f"c{n}")
        assert isinstance(answer, m.Welcome)
    assert len(world.sources["s0"].sessions) == MAX_SESSIONS
    world.serves()
    world.join("good", geometry(1), engine="good")
    world.serves("good")


def test_an_earlier_run_is_served_when_the_later_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-SUPERSEDE: its clock was ahead, or it was another pod of one name; nothing is remembered of it."""
    monkeypatch.setattr(source_endpoint, "_MAX_REMEMBERED", 3)
    world = Heard()
    (hello,), source = world.of(m.Hello), world.sources["s0"]

    def greet(n: int, incarnation: int) -> m.Welcome | m.Refused:
        said = attrs.evolve(hello, engine=f"e{n}", request=next(numbers), incarnation=incarnation)
        (answer,) = world.say(said, f"c{n}-{incarnation}")
        assert isinstance(answer, m.Welcome | m.Refused)
        return answer

    numbers = iter(range(1, 100))
    for n in range(9):
        assert isinstance(greet(n, 2), m.Welcome)
        later = greet(n, 1 << 63)
        assert isinstance(later, m.Welcome)
        refused = greet(n, 3)
        assert isinstance(refused, m.Refused)
        assert (refused.code, refused.mine, refused.yours) == (ErrorCode.SUPERSEDED, str(1 << 63), "3")
        world.say(m.Goodbye(session=later.session, reason="over"), f"c{n}-{1 << 63}")
        assert isinstance(greet(n, 3), m.Welcome)
        assert isinstance(greet(n, 1), m.Refused)
    assert len(source._superseded) == 3
    world.serves()


def test_one_engine_does_not_take_the_sessions_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-ENGINE: its own that are only greeted make room, then it is BUSY, and others are served."""
    assert MAX_ENGINE_SESSIONS < MAX_SESSIONS
    monkeypatch.setattr(source_endpoint, "MAX_ENGINE_SESSIONS", 3)
    world = Heard()
    (hello,) = world.of(m.Hello)
    for n in range(5):
        (answer,) = world.say(attrs.evolve(hello, engine="crowd", replica=n, request=n + 1), f"c{n}")
        assert isinstance(answer, m.Welcome)
    assert len(world.sources["s0"].sessions) == 4
    for n in range(3):
        world.join(f"crowd{n}", attrs.evolve(geometry(1), replica=n), engine="crowd")
    (answer,) = world.say(attrs.evolve(hello, engine="crowd", replica=9, request=9), "c9")
    assert isinstance(answer, m.Refused)
    assert answer.code == ErrorCode.BUSY
    (known,) = world.sinks["crowd0"].sessions.values()
    (own,) = [h for h in world.of(m.Hello) if (h.engine, h.replica) == ("crowd", 0)]
    (answer,) = world.say(attrs.evolve(own, request=10, resume=known.session), "crowd0+")
    assert answer.session == known.session  # it is none more
    world.serves()
    world.join("good", geometry(1), engine="good")
    world.serves("good")


def test_runs_of_one_rank_leave_one_session() -> None:
    """KVP-SES-SUPERSEDE: 50 runs one after the other, none of which says Goodbye."""
    world = Heard()
    for n in range(50):
        world.join(f"run{n}", geometry(1))
    assert len(world.sources["s0"].sessions) == 1
    world.serves("run49")


def test_one_sequence_leaves_one_record() -> None:
    """KVP-TRN-STALE, KVP-END-UNSEEN: 500 Transfers and Aborts of one ticket, and 500 Aborts of what never came."""
    world = Heard()
    world.asked(finished=False)
    (transfer,), ids = world.of(m.Transfer), iter(range(1000, 9000))
    (session,) = world.sources["s0"].sessions.values()

    def abort(sequence: int) -> None:
        (drained,) = world.say(m.Abort(session=transfer.session, request=next(ids), sequence=sequence, reason=""))
        assert drained.proof == Proof.PROVEN

    again = attrs.evolve(transfer, sequence=2, ticket=ticket().key)
    for _ in range(500):
        world.say(attrs.evolve(again, request=next(ids)))
        abort(2)
        abort(3)
    assert sorted(session.attempts) == [1, 2, 3]
    tickets = world.sources["s0"].tickets
    assert [(len(state.users), len(state.waiting)) for state in tickets] == [(1, 1), (1, 1)]


def test_a_frame_costs_the_same_beside_4096_held_transfers() -> None:
    """Of four other sinks, 1,024 each."""
    world = Heard()
    world.asked(finished=False)
    (transfer,), ids, sequences = world.of(m.Transfer), count(5000), count(2)
    again, source = attrs.evolve(transfer, ticket=ticket().key), world.sources["s0"]
    world.keep = lambda to, frame: 1

    def one() -> None:
        sequence = next(sequences)
        for frame in (
            encode(attrs.evolve(again, request=next(ids), sequence=sequence)),
            encode(m.Abort(session=transfer.session, request=next(ids), sequence=sequence, reason="")),
        ):
            source.receive("d0", frame, world.now)
            source.to_send(world.now)
        source.take_events()

    alone = least_steps(one, 10)
    for name in ("e1", "e2", "e3", "e4"):
        world.join(name, geometry(1), engine=name)
        for _ in range(MAX_TRANSFERS):
            world.transfer(name, ticket(300.0), CONTENT)
        world.run()
    assert sum(len(s.attempts) for s in source.sessions.values()) > 4 * MAX_TRANSFERS
    assert least_steps(one, 10) < 1.1 * alone


def test_session_ids_cannot_be_guessed_from_one_another() -> None:
    """KVP-SES-GUESS."""
    from kvproto.rank.checksums import session_id

    drawn = [session_id() for _ in range(64)]
    assert len({b - a for a, b in zip(drawn, drawn[1:], strict=False)}) == 63
    assert sum(n.bit_count() for n in drawn) > 64 * 24
