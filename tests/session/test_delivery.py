"""Requests and their answers: resends, repeats, limits, refusals, silence; each test names the clauses that it holds."""

from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError, RemoteError
from kvproto.events import Suspected
from kvproto.session.limits import MAX_TRANSFERS, PATIENCE, PING_SILENCE, RESEND, TICKET_WAIT
from kvproto.session.table import SessionState
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof, RequestState, Role
from tests.errors import raises
from tests.session.driver import Hearing, World, geometry, grants, ticket

CONTENT = b"c" * 32


class Heard(Hearing):
    def __init__(self, tp: int = 1, sinks: int = 1) -> None:
        super().__init__(geometry(tp))
        for rank in range(sinks):
            self.sink(f"d{rank}", geometry(sinks), rank)
        self.run()

    def say(self, message: Any, name: str = "d0") -> list[Any]:
        """Give the source a message of a sink; its answers."""
        source = self.sources["s0"]
        source.receive(name, message if isinstance(message, bytes) else encode(message), self.now)
        return [decode(frame) for conn, frame in source.to_send(self.now) if conn == name]

    def asked(self, name: str = "d0", finished: bool = True, tokens: int | None = None) -> Any:
        """A request that is asked for; its ticket."""
        made = ticket(300.0)
        for source in self.sources.values():
            source.expect(made, CONTENT, self.now, tokens)
            if finished:
                source.finish(bytes(made.key))
        self.fetch(name, made, CONTENT)
        return made

    def serves(self, name: str = "d0") -> None:
        before = len(self.events(name, "Arrived"))
        for each in self.told.values():
            each[:] = [e for e in each if type(e).__name__ != "TransferRequested"]
        self.asked(name)
        for address in self.sources:
            self.serve(address)
        assert len(self.events(name, "Arrived")) == before + 1


# requests and repeats


def test_a_done_that_could_not_be_read_leaves_nobody_waiting() -> None:
    """KVP-TRN-LONG, KVP-TRN-REFUSED: the sink cannot tell whose it was, and the source takes the Error for its answer."""
    world = Heard()
    world.asked()
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Done)
    world.serve()
    (done,) = world.of(m.Done)
    code = ErrorCode.TRUNCATED
    world.say(
        m.Error(session=done.session, request=done.request, about=m.Done.TYPE, code=code, path="", mine="", yours="")
    )
    world.pass_time(PATIENCE)
    assert world.lost() == [(ErrorCode.STALE_TRANSFER, Proof.PROVEN)]
    world.keep = world.hear
    world.serves()


def test_the_acknowledgement_of_an_answer_ends_no_request_of_the_same_number() -> None:
    """KVP-SES-RESEND, KVP-SES-ECHO: a Transfer that comes twice, late, while a Done with its number is on its way."""
    world = Heard()
    world.serves()
    (transfer,) = world.of(m.Transfer)
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Done)
    while (numbers := [each.request for each in world.of(m.Done)]).count(transfer.request) == 0:
        world.asked()
        for event in world.events("s0", "TransferRequested"):
            if world.sources["s0"].active(event):
                world.done("s0", event)
        world.run()
    (failed,) = world.say(transfer)
    assert (failed.code, failed.request) == (ErrorCode.STALE_TRANSFER, transfer.request)
    world.sinks["d0"].receive("s0", encode(failed), world.now)
    world.keep = world.hear
    world.run()
    world.pass_time(RESEND)
    assert len(world.events("d0", "Arrived")) == len(set(numbers))


def test_more_transfers_than_any_memory_of_replies_survive_a_pause_of_the_source() -> None:
    """KVP-SES-REPLY, KVP-SES-RESEND: 200 Transfers come twice after their Accepted was lost."""
    world = Heard()
    source, made = world.sources["s0"], [ticket(300.0) for _ in range(200)]
    for each in made:
        source.expect(each, CONTENT, world.now)
    world.keep = lambda to, frame: not (to == "d0" and isinstance(decode(frame), m.Accepted))
    for each in made:
        world.transfer("d0", each, CONTENT)
    world.run()
    world.keep = world.hear
    for each in made:
        source.finish(bytes(each.key))
    world.pass_time(RESEND)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 200
    assert not world.events("d0", "Lost")


def test_a_repeated_transfer_is_answered_by_the_present_state() -> None:
    """KVP-SES-REPLY, KVP-SES-ECHO: what was PENDING is READY once the prompt is finished."""
    world, made = Heard(), ticket()
    source = world.sources["s0"]
    world.fetch("d0", made, CONTENT)
    (transfer,) = world.of(m.Transfer)
    states = []
    for change in (lambda: None, lambda: source.expect(made, CONTENT, 0.0), lambda: source.finish(bytes(made.key))):
        change()
        (answer,) = [x for x in world.say(transfer) if isinstance(x, m.Accepted)]
        assert answer.request == transfer.request
        states.append(answer.state)
    assert states == [RequestState.PENDING, RequestState.RUNNING, RequestState.READY]


def test_requests_carry_the_session_and_ids_of_their_own() -> None:
    """KVP-SES-ID, KVP-SES-REQUEST-ID, KVP-TRN-SEQUENCE, KVP-TRN-ALL."""
    world = Heard(tp=2)
    for _ in range(3):
        world.asked()
    for address, source in world.sources.items():
        (number,) = source.sessions
        requests = [x for x in world.of(object, address) if not isinstance(x, m.Hello)]
        assert {x.session for x in requests} == {number}
        ids = [x.request for x in requests if hasattr(x, "request")]
        assert len(ids) == len(set(ids))
        transfers = world.of(m.Transfer, address)
        assert [t.sequence for t in transfers] == [1, 2, 3]
        assert all(t.writers.tolist() == [0, 1] for t in transfers)


def test_session_ids_are_not_minted_twice() -> None:
    """KVP-SES-GUESS: a Hello that asks to resume what is not there gets another session."""
    world = Heard()
    (number,) = world.sources["s0"].sessions
    (hello,) = world.of(m.Hello)
    (again,) = [x for x in world.say(hello) if isinstance(x, m.Welcome)]
    assert again.session == number  # the same Hello, once more
    (other,) = [x for x in world.say(attrs.evolve(hello, request=77, resume=9), "again") if isinstance(x, m.Welcome)]
    assert other.session != number


# refusals


def test_a_message_out_of_state_or_of_a_feature_not_chosen_is_refused() -> None:
    """KVP-SES-STATE, KVP-NEG-UNUSED, KVP-ERR-ALONE: draft messages stand behind their features."""
    world = Heard()
    (number,) = world.sources["s0"].sessions
    describe = world.of(m.Describe)[0]
    progress = m.Progress(session=number, sequence=1, state=RequestState.READY)
    unregister = m.Unregister(session=number, request=90, epoch=1)
    for message in (attrs.evolve(describe, request=91), unregister):
        (answer,) = world.say(message)
        assert (answer.code, answer.request) == (ErrorCode.UNEXPECTED_MESSAGE, message.request)
    world.sinks["d0"].receive("s0", encode(progress), world.now)
    assert world.told["d0"][-1].error.code == ErrorCode.UNEXPECTED_MESSAGE
    world.serves()


def test_a_request_that_cannot_be_read_is_answered_with_its_id() -> None:
    """KVP-ERR-ANSWER, KVP-ERR-REPORT."""
    world = Heard()
    frame = bytearray(encode(m.Abort(session=5, request=4711, sequence=1, reason="x")))
    frame[-1] = 0xFF  # no UTF-8
    (answer,) = world.say(bytes(frame))
    assert isinstance(answer, m.Error)
    assert (answer.code, answer.request, answer.about) == (ErrorCode.BAD_TEXT, 4711, m.Abort.TYPE)
    assert (answer.path, bool(answer.mine or answer.yours)) == ("reason", True)


@pytest.mark.parametrize("message", [
    m.DoneAck(session=1, request=1, sequence=1),
    m.Pong(session=1, request=1),
    m.Progress(session=1, sequence=1, state=RequestState.READY),
    m.Error(code=ErrorCode.BUSY, path="", mine="", yours=""),
])  # fmt: skip
def test_replies_notices_and_errors_that_cannot_be_read_are_not_answered(message: Any) -> None:
    """KVP-ERR-SILENT."""
    world = Heard()
    frame = encode(message)
    cut = frame[:12] + (len(frame) - 17).to_bytes(4, "little") + frame[16:-1]
    assert world.say(cut) == []
    world.sinks["d0"].receive("s0", cut, 0.0)
    assert world.sinks["d0"].to_send(0.0) == []


def test_an_unknown_error_code_is_internal() -> None:
    """KVP-ERR-UNKNOWN."""
    world = Heard()
    world.asked(finished=False)
    (transfer,) = world.of(m.Transfer)
    ids = {name: getattr(transfer, name) for name in ("session", "request", "sequence")}
    world.hears("d0", m.Failed(**ids, code=0xABCD, path="", mine="", yours=""))
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.INTERNAL


def test_a_source_greets_no_source() -> None:
    """KVP-NEG-ROLE."""
    world = Heard()
    (answer,) = world.say(attrs.evolve(world.of(m.Hello)[0], role=Role.SOURCE, request=50), "new")
    assert isinstance(answer, m.Refused)
    assert (answer.code, answer.path, answer.request) == (ErrorCode.WRONG_PEER, "role", 50)


# how a sink refuses

BAD_DONE: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "another writer": ({"writer": 7}, ErrorCode.WRONG_PEER, "writer"),  # KVP-TRN-WRITER
    "other groups": ({"groups": np.array([0], np.uint32)}, ErrorCode.WRONG_PEER, "groups"),
    "no hand-off": ({"handoff": ()}, ErrorCode.WRONG_PEER, "handoff"),  # KVP-HND-GROUPS
    "hand-off of an unknown group": ({"handoff": (m.HandOff(group=9, data=b"toke"),)}, ErrorCode.WRONG_PEER, "handoff"),
    "hand-off of a page group": ({"handoff": (m.HandOff(group=0, data=b"toke"),)}, ErrorCode.WRONG_PEER, "handoff"),
    "short hand-off": ({"handoff": (m.HandOff(group=2, data=b"t"),)}, ErrorCode.OUT_OF_RANGE, "handoff[0].data"),
    "no checksums": ({"checksums": None}, ErrorCode.VERIFY_FAILED, "checksums"),  # KVP-VERIFY-SOURCE, KVP-VERIFY-SINK
    "checksums of others": ({"checksums": (m.Checksum(group=2, value=1),)}, ErrorCode.WRONG_PEER, "checksums"),
}


@pytest.mark.parametrize("case", BAD_DONE)
def test_a_bad_done_is_answered_by_error_and_costs_its_transfer_alone(case: str) -> None:
    """KVP-TRN-REFUSE, KVP-TRN-REFUSED, KVP-TRN-WRITER, KVP-HND-GROUPS, KVP-HND-BYTES, KVP-TRN-SET."""
    changes, code, path = BAD_DONE[case]
    world = Heard()
    world.asked()
    source, honest = world.sources["s0"], world.sources["s0"].to_send

    def lie(now: float) -> list[Any]:
        out = []
        for conn, frame in honest(now):
            message = decode(frame)
            out.append((conn, encode(attrs.evolve(message, **changes)) if isinstance(message, m.Done) else frame))
        return out

    source.to_send = lie  # type: ignore[method-assign]
    world.serve()
    (done,) = world.of(m.Done)
    assert [(e.code, e.path, e.request) for e in world.of(m.Error, "s0")] == [(code, path, done.request)]
    assert not world.of(m.DoneAck)
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.proof) == (code, Proof.PROVEN)
    assert not world.events("d0", "Arrived")
    world.pass_time(3 * RESEND)
    assert len(world.of(m.Done)) == 1  # nothing is sent again
    (over,) = world.events("s0", "Released")
    assert over.lost[0].code == code
    source.to_send = honest  # type: ignore[method-assign]
    world.serves()


# limits


def test_a_sink_keeps_within_the_limits_of_its_source() -> None:
    """KVP-TRN-BUSY at the sending side, and KVP-FRAME-W-LENGTH: nothing is sent beyond max_transfers or max_body."""
    world = Heard()
    (session,) = world.sinks["d0"].sessions.values()
    for limits, code in (({"max_transfers": 2}, ErrorCode.BUSY), ({"max_body": 60}, ErrorCode.TOO_LARGE)):
        before = session.limits
        session.limits = attrs.evolve(before, **limits)
        for _ in range(limits.get("max_transfers", 0)):
            world.asked(finished=False)
        with raises(LocalError, code=code):
            world.asked(finished=False)
        session.limits = before
    assert len(world.of(m.Transfer)) == 2


@pytest.mark.parametrize("most", [0, 60, 300])
def test_a_source_keeps_within_the_limits_of_its_sink(most: int) -> None:
    """KVP-FRAME-W-LENGTH: nothing is sent that the sink does not take; the session ends instead."""
    world, bodies = Heard(), list[int]()
    (hello,) = world.of(m.Hello)
    world.say(attrs.evolve(hello, engine="e", request=50, limits=m.Limits(max_body=most, max_transfers=1)), "small")
    for session in list(world.sources["s0"].sessions.values()):
        if session.peer.engine == "e":
            describe = attrs.evolve(world.of(m.Describe)[0], session=session.session, request=51)
            bodies += [len(encode(x)) - 16 for x in world.say(describe, "small")]
            assert session.open == (max(bodies, default=0) > 0)
    assert max(bodies, default=0) <= most
    world.serves()


def test_a_request_under_way_does_not_show_its_ticket() -> None:
    """KVP-SECRET-LOG."""
    world = Heard()
    made = world.asked(finished=False)
    (session,) = world.sinks["d0"].sessions.values()
    world.transfer("d0", made, CONTENT)
    shown = repr(list(session._pending.values()))
    assert "Transfer" in shown
    assert repr(bytes(made.key))[2:-1] not in shown


def test_a_transfer_beyond_the_window_is_busy_and_its_abort_is_remembered() -> None:
    """KVP-TRN-BUSY, KVP-END-UNSEEN, KVP-END-PROVEN: what was called PROVEN is never accepted later."""
    world = Heard()
    world.asked()
    (transfer,) = world.of(m.Transfer)
    far = attrs.evolve(transfer, request=900, sequence=MAX_TRANSFERS + 1)
    (busy,) = world.say(far)
    assert (type(busy), busy.code) == (m.Failed, ErrorCode.BUSY)
    abort = m.Abort(session=far.session, request=901, sequence=far.sequence, reason="")
    (drained,) = world.say(abort)
    assert (type(drained), drained.proof) == (m.Drained, Proof.PROVEN)
    world.serve()  # the window moves
    (answer,) = world.say(far)
    assert (type(answer), answer.code) == (m.Failed, ErrorCode.ABORTED)


def test_an_abort_that_cannot_be_recorded_is_not_proven() -> None:
    """KVP-END-UNSEEN, KVP-END-PROVEN: it is answered by Drained all the same, and its transfer may still come."""
    world = Heard()
    (number,) = world.sources["s0"].sessions
    aborts = [m.Abort(session=number, request=900 + n, sequence=2 + n, reason="") for n in range(2 * MAX_TRANSFERS + 1)]
    answers = [answer for abort in aborts for answer in world.say(abort)]
    assert [answer.proof for answer in answers] == [Proof.PROVEN] * 2 * MAX_TRANSFERS + [Proof.UNPROVABLE]


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_done_ack_that_is_not_due_is_refused(sequence: int) -> None:
    """KVP-SES-STATE, KVP-ERR-ALONE: before Done, and of a transfer that never was."""
    world = Heard()
    world.asked(finished=False)
    (transfer,) = world.of(m.Transfer)
    (answer,) = world.say(m.DoneAck(session=transfer.session, request=900, sequence=sequence))
    assert (type(answer), answer.code, answer.path) == (m.Error, ErrorCode.UNEXPECTED_MESSAGE, "sequence")
    world.sources["s0"].finish(bytes(transfer.ticket))
    world.serve()
    assert world.events("d0", "Arrived")


def test_an_abort_ends_the_resends_of_its_transfer() -> None:
    """KVP-END-UNSEEN: a Transfer that was aborted is not asked again."""
    world = Heard()
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), m.Transfer | m.Abort)
    number = world.fetch("d0", ticket(), CONTENT)
    world.sinks["d0"].abort(number, RemoteError(ErrorCode.ABORTED, "", "", ""), world.now)
    world.pass_time(RESEND)
    world.pass_time(RESEND)
    assert (len(world.of(m.Transfer)), len(world.of(m.Abort)) > 1) == (1, True)


# silence, and going away


def test_silence_is_asked_about_and_proves_nothing() -> None:
    """KVP-SES-PING, KVP-SES-PONG, KVP-SES-LOST."""
    world = Heard()
    for endpoint in (world.sinks["d0"], world.sources["s0"]):
        assert endpoint.timers.next() == PING_SILENCE
    world.pass_time(PING_SILENCE)
    assert len(world.of(m.Ping)) == len(world.of(m.Pong)) == 2
    assert world.sinks["d0"].ready
    world.asked(finished=False)
    world.keep = lambda to, frame: 0  # from now on nobody hears anything
    for _ in range(60):
        world.pass_time(1.0)
    assert world.lost() == [(ErrorCode.PEER_LOST, Proof.UNPROVABLE)]
    world.heard.clear()
    world.pass_time(2 * PING_SILENCE)
    assert not world.of(m.Ping)  # the sink asks on for proof alone (KVP-END-LATE)


def test_a_ping_that_cannot_be_read_is_heard_all_the_same() -> None:
    """KVP-ERR-ANSWER: who answers by Error is alive, and the session goes on."""
    world = Heard()

    def damaged(to: str, frame: bytes) -> int:
        world.hear(to, frame)
        if isinstance(decode(frame), m.Ping):
            ends: dict[str, Any] = {**world.sinks, **world.sources}
            ends[to].receive("d0" if to == "s0" else "s0", frame[:-1], world.now)
        return not isinstance(decode(frame), m.Ping)

    world.keep = damaged
    for _ in range(3):
        world.pass_time(PING_SILENCE)
    assert len(world.of(m.Ping)) == len(world.of(m.Error)) == 6
    assert not world.of(m.Pong)
    assert not world.events("d0", "Refused")
    world.serves()


def test_a_suspect_source_is_asked_for_nothing_new_and_recovers() -> None:
    """KVP-SES-SUSPECT: nothing is released or lost, and its first frame ends the suspicion."""
    world = Heard()
    made = world.asked(finished=False)
    world.keep = lambda to, frame: 0
    world.pass_time(PING_SILENCE)
    world.asked(finished=False)  # one Ping has not been answered yet
    world.pass_time(PING_SILENCE)
    assert [world.told[name].count(Suspected(peer)) for name, peer in (("d0", "p rank 0"), ("s0", "d rank 0"))] == [
        1,
        1,
    ]
    with raises(LocalError, code=ErrorCode.BUSY):
        world.asked(finished=False)
    assert not world.events("d0", "Lost")
    assert not world.events("s0", "Released")
    world.keep = world.hear
    world.pass_time(RESEND)
    assert [len(world.events(name, "Recovered")) for name in ("d0", "s0")] == [1, 1]
    world.sources["s0"].finish(bytes(made.key))
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    world.serves()


def test_ping_is_answered_in_every_state_with_a_session() -> None:
    """KVP-SES-PONG: also before the Descriptions are known."""
    world = World(geometry(1))
    sink, source = world.sink("d0", geometry(1)), world.sources["s0"]
    ((_, hello),) = sink.to_send(0.0)
    source.receive("d0", hello, 0.0)
    (number,) = source.sessions
    source.to_send(0.0)
    source.receive("d0", encode(m.Ping(session=number, request=5)), 0.0)
    ((_, frame),) = source.to_send(0.0)
    assert decode(frame) == m.Pong(session=number, request=5)
    assert source.sessions[number].state == SessionState.OPEN


def test_a_late_drained_is_proof() -> None:
    """KVP-END-REUSE: the pages of a transfer that was lost to silence are free when the source speaks again."""
    world = Heard()
    world.asked(finished=False)
    (transfer,) = world.of(m.Transfer)
    world.keep = lambda to, frame: 0
    for _ in range(60):
        world.pass_time(1.0)
    assert world.events("d0", "Lost")[0].proof == Proof.UNPROVABLE
    late = m.Drained(session=transfer.session, request=9, sequence=1, proof=Proof.PROVEN)
    world.hears("d0", late)
    assert len(world.events("d0", "Proven")) == 1


def test_a_source_that_does_not_know_the_session_ends_what_waits() -> None:
    """KVP-SES-UNKNOWN, KVP-SES-LOST: the transfers are lost at once, and nothing of them is proven."""
    world = Heard()
    source = world.sources["s0"]
    source.sessions.clear()
    world.fetch("d0", ticket(), CONTENT)
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.proof) == (ErrorCode.PEER_LOST, Proof.UNPROVABLE)
    assert "got p rank 0 at s0, which is gone (compute the prompt again, under a new ticket)" in str(lost.error)


def test_a_greater_incarnation_replaces_a_smaller_one() -> None:
    """KVP-SES-SUPERSEDE, KVP-SES-REPLACED, KVP-SES-INCARNATION, KVP-END-INCARNATION."""
    world = Heard()
    made = world.asked(finished=False)
    (hello,) = world.of(m.Hello)
    (transfer,) = world.of(m.Transfer)
    newer = attrs.evolve(hello, incarnation=hello.incarnation + 10, request=1)
    assert isinstance(world.say(newer, "new")[0], m.Welcome)
    (error,) = world.say(m.Abort(session=transfer.session, request=70, sequence=1, reason=""))
    assert (type(error), error.code) == (m.Error, ErrorCode.SUPERSEDED)  # and no Drained: nothing is proven
    older = attrs.evolve(hello, incarnation=hello.incarnation + 9, request=2)
    (refused,) = world.say(older, "old")
    assert (type(refused), refused.code) == (m.Refused, ErrorCode.SUPERSEDED)
    assert (refused.mine, refused.yours) == (str(newer.incarnation), str(older.incarnation))
    world.sources["s0"].finish(bytes(made.key))
    assert not [e for e in world.sources["s0"].take_events() if type(e).__name__ == "TransferRequested"]


@pytest.mark.parametrize("goodbye", [False, True])
def test_an_engine_that_goes_away_takes_nothing_new(goodbye: bool) -> None:
    """KVP-SES-DRAINING."""
    world = Heard()
    made = world.asked()
    (hello,), (transfer,) = world.of(m.Hello), world.of(m.Transfer)
    source = world.sources["s0"]
    source.draining = True
    if goodbye:
        source.goodbye("over")
    assert decode_all(source)[:1] == (["Goodbye"] if goodbye else [])
    (refused,) = world.say(attrs.evolve(hello, request=5), "new")
    (failed,) = world.say(attrs.evolve(transfer, request=60, sequence=2, ticket=ticket().key))
    assert [(type(x), x.code) for x in (refused, failed)] == [
        (m.Refused, ErrorCode.DRAINING), (m.Failed, ErrorCode.DRAINING),
    ]  # fmt: skip
    if not goodbye:
        world.serve()
        assert len(world.events("d0", "Arrived")) == 1
    assert made


def test_a_source_that_drains_serves_all_ranks_of_a_sink_of_which_one_has_asked() -> None:
    """KVP-SES-DRAINING, KVP-TRN-CHECKS."""
    world = Heard(sinks=2)
    made = world.asked("d0")
    world.sources["s0"].draining = True
    world.fetch("d1", made, CONTENT)
    world.serve()
    assert [len(world.events(name, "Arrived")) for name in ("d0", "d1")] == [1, 1]


def decode_all(endpoint: Any) -> list[str]:
    return [type(decode(frame)).__name__ for _, frame in endpoint.to_send(0.0)]


# tickets, tokens and attempts


def test_a_ticket_belongs_to_one_sequence() -> None:
    """KVP-TKT-USED, KVP-TKT-MEMORY: while it runs, and until its deadline when it is over."""
    world = Heard()
    made = world.asked()
    world.fetch("d0", made, CONTENT)
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.TICKET_USED
    world.serve()
    assert len(world.events("s0", "Released")) == 1
    world.fetch("d0", made, CONTENT)
    error = world.events("d0", "Lost")[1].error
    assert (error.code, error.path) == (ErrorCode.TICKET_USED, "ticket")
    world.serves()


def test_a_ticket_without_its_prompt_says_so() -> None:
    """KVP-TKT-EARLY: Accepted PENDING, then Failed that tells that the prompt never came."""
    world = Heard()
    world.fetch("d0", ticket(), CONTENT)
    assert [a.state for a in world.of(m.Accepted)] == [RequestState.PENDING]
    world.pass_time(TICKET_WAIT - 1)
    assert world.sources["s0"].timers.next() == TICKET_WAIT
    world.pass_time(10.0)
    (failed,) = world.of(m.Failed)
    assert failed.code == ErrorCode.UNKNOWN_TICKET
    assert "never came to this source" in failed.advice


def test_a_finished_request_that_nobody_fetches_ends_at_its_deadline() -> None:
    """KVP-TKT-DEADLINE, KVP-TRN-HOLD: its items are held until then."""
    world, made = Heard(), ticket(20.0)
    world.sources["s0"].expect(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.pass_time(19.0)
    assert not world.events("s0", "Expired")
    world.pass_time(1.0)
    assert len(world.events("s0", "Expired")) == 1
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.DEADLINE


@pytest.mark.parametrize("prompt_first", [True, False])
@pytest.mark.parametrize("tokens", [5, 6])
def test_tokens_beyond_the_prompt_are_refused_as_soon_as_both_are_known(prompt_first: bool, tokens: int) -> None:
    """KVP-GRANT-PROMPT: the sink asks for 6 tokens."""
    world, made = Heard(), ticket()
    source = world.sources["s0"]
    steps = [lambda: source.expect(made, CONTENT, 0.0, tokens), lambda: world.transfer("d0", made, CONTENT, tokens=6)]
    for step in steps if prompt_first else reversed(steps):
        step()
        world.run()
    lost = world.events("d0", "Lost")
    assert [(e.error.code, e.error.path) for e in lost] == (
        [] if tokens == 6 else [(ErrorCode.BAD_GRANT, "grants[0].valid")]
    )


def test_a_sequence_is_used_once() -> None:
    """KVP-TRN-STALE: while it is under way and once it is done, though sequence 1 keeps its record alive."""
    world = Heard()
    world.asked(finished=False)
    world.serves()
    (source,), transfers = world.sources["s0"].sessions.values(), world.of(m.Transfer)
    assert source.low_water == 0
    for request, transfer in enumerate(transfers, 80):
        (stale,) = world.say(attrs.evolve(transfer, request=request))
        assert (type(stale), stale.code) == (m.Failed, ErrorCode.STALE_TRANSFER)
    (drained,) = world.say(m.Abort(session=transfer.session, request=90, reason="", sequence=transfer.sequence))
    assert drained.proof == Proof.PROVEN
    world.serves()


@pytest.mark.parametrize(("over", "code"), [(False, ErrorCode.ABORTED), (True, ErrorCode.STALE_TRANSFER)])
def test_an_unseen_transfer_that_was_aborted_is_refused_whenever_it_comes(over: bool, code: ErrorCode) -> None:
    """KVP-END-UNSEEN, KVP-TRN-STALE: 2 is aborted before it comes; 1 keeps the record alive until it is over too."""
    world = Heard()
    world.asked(finished=over)
    (transfer,) = world.of(m.Transfer)
    head = {"session": transfer.session, "sequence": 2}
    (drained,) = world.say(m.Abort(request=70, reason="", **head))
    assert drained.proof == Proof.PROVEN
    if over:
        world.serve()
        assert world.sources["s0"].sessions[transfer.session].low_water == 2
    (failed,) = world.say(attrs.evolve(transfer, request=71, sequence=2))
    assert (type(failed), failed.code) == (m.Failed, code)


def test_drained_waits_for_the_copy() -> None:
    """KVP-END-PROVEN, KVP-TRN-ORDER."""
    world = Heard()
    world.asked()
    (asked,) = world.events("s0", "TransferRequested")
    source = world.sources["s0"]
    source.copying(asked)
    (transfer,) = world.sinks["d0"].transfers
    world.abort("d0", transfer)
    assert (len(world.of(m.Abort)), world.of(m.Drained)) == (1, [])
    source.failed(asked, RemoteError(ErrorCode.ABORTED, "", "", ""), 0.0)
    world.run()
    assert [d.proof for d in world.of(m.Drained)] == [Proof.PROVEN]
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN


def test_the_failure_of_one_rank_aborts_the_others() -> None:
    """KVP-END-FAILED, KVP-TRN-SET: one Done of two is not enough, and no Transfer is sent again."""
    world = Heard(tp=2)
    world.asked()
    world.serve("s1")
    assert not world.events("d0", "Arrived")
    (asked,) = world.events("s0", "TransferRequested")
    world.sources["s0"].failed(asked, RemoteError(ErrorCode.INTERNAL, "", "", ""), 0.0)
    world.run()
    assert len(world.of(m.Abort, "s0")) == 1
    assert not world.of(m.Abort, "s1")  # its Done is here
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.INTERNAL
    world.pass_time(RESEND)
    assert len(world.of(m.Transfer)) == 2


# the order of checks of a Transfer, last first: each row mends the one before it

ORDER: tuple[tuple[dict[str, Any], ErrorCode, str], ...] = (
    ({"sequence": 1}, ErrorCode.STALE_TRANSFER, "sequence"),
    ({"sequence": MAX_TRANSFERS + 2}, ErrorCode.BUSY, "sequence"),
    ({"sequence": 2, "source_version": 9}, ErrorCode.DESCRIPTION_MISMATCH, "source_version"),
    ({"sequence": 3, "source_version": 1, "sink_version": 9}, ErrorCode.BAD_GRANT, "sink_version"),
    ({"sequence": 4, "sink_version": 1, "epoch": 9}, ErrorCode.BAD_GRANT, "epoch"),
    ({"sequence": 5, "epoch": 1, "writers": np.array([9], np.uint32)}, ErrorCode.BAD_GRANT, "writers"),
    ({"sequence": 6, "writers": np.array([0], np.uint32), "grants": 1}, ErrorCode.BAD_GRANT, "grants"),
    ({"sequence": 7, "grants": 3, "content": b"x" * 32}, ErrorCode.CONTENT_MISMATCH, "content"),
    ({"sequence": 8, "content": CONTENT}, ErrorCode.TICKET_USED, "ticket"),
)


def test_the_order_of_the_checks_of_a_transfer() -> None:
    """KVP-TRN-CHECKS, KVP-TRN-AGREE, KVP-TKT-CONTENT: every Transfer is wrong in all that the later rows mend."""
    world = Heard()
    world.asked(finished=False)
    (good,) = world.of(m.Transfer)
    every = tuple(grants(world.pools["d0"], 6).values())
    wrong = {"source_version": 9, "sink_version": 9, "epoch": 9, "content": b"x" * 32}
    message = attrs.evolve(good, writers=np.array([9], np.uint32), grants=every[:1], **wrong)
    for i, (changes, code, path) in enumerate(ORDER):
        given = {**changes, "request": 500 + i}
        if "grants" in given:
            given["grants"] = every[: given["grants"]]
        message = attrs.evolve(message, **given)
        (failed,) = world.say(message)
        assert (type(failed), failed.code, failed.path) == (m.Failed, code, path), changes


def test_a_window_that_was_not_asked_for_as_late_begins_where_it_was_asked_for() -> None:
    """KVP-GRANT-BEGINS, KVP-TRN-REFUSE; the next request is served."""
    world = Heard()
    world.asked()
    world.done("s0", world.events("s0", "TransferRequested")[0], begins=(m.Begin(group=0, first=4),))
    world.run()
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path) == (ErrorCode.BAD_GRANT, "begins[0].group")
    assert [(x.code, x.about) for x in world.of(m.Error, "s0")] == [(ErrorCode.BAD_GRANT, m.Done.TYPE)]
    world.serves()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_source_that_gives_up_pages_refuses_who_asks_for_them(late: bool, waits: bool) -> None:
    """KVP-GRANT-HELD, KVP-TRN-CHECKS: those that wait, and those that come later."""
    world, made = Heard(), ticket()
    source, asked = world.sources["s0"], grants(world.pools["d0"], 6)
    asked = {g: attrs.evolve(grant, late=late or None) for g, grant in asked.items()}
    source.expect(made, CONTENT, 0.0, 6)
    steps = [
        lambda: world.sinks["d0"].transfer(bytes(made.key), CONTENT, asked, 0.0),
        lambda: source.hold(bytes(made.key), {1: 4}, 0.0),
    ]
    for step in steps if waits else reversed(steps):
        step()
        world.run()
    lost = [(e.error.code, e.error.path, e.proof) for e in world.events("d0", "Lost")]
    assert lost == [(ErrorCode.NOT_HELD, "grants[1].first", Proof.PROVEN)] * (not late)


def test_features_that_were_not_chosen_are_not_used() -> None:
    """KVP-NEG-UNUSED: without VERIFY, Done needs no checksums."""
    world = type("Plain", (World,), {"features": ()})(geometry(1)).ready()
    made = ticket()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    (asked,) = world.events("s0", "TransferRequested")
    handoff = world.handoff("s0", asked.session)
    world.sources["s0"].done(asked, 0.0, 1, Outcome.CONTINUE, handoff, None)
    world.run()
    assert len(world.events("d0", "Arrived")) == 1
    assert Feature.VERIFY not in world.sinks["d0"].features()


def test_a_transfer_is_aborted_once() -> None:
    """However often the engine says so."""
    world = Heard()
    world.asked(finished=False)
    (transfer,) = world.sinks["d0"].transfers
    for _ in range(2):
        world.sinks["d0"].abort(transfer, RemoteError(ErrorCode.ABORTED, "", "", ""), world.now)
    world.run()
    assert len(world.of(m.Abort)) == 1


def test_the_census_counts_peers_and_suspects_and_what_was_sent_again() -> None:
    world = Heard()
    (source,) = world.sources.values()
    assert source.census()[:3] == (1, 0, 0)
    world.keep = lambda to, frame: 0
    world.pass_time(PING_SILENCE)
    world.pass_time(RESEND)
    world.pass_time(PING_SILENCE)
    assert source.census()[:3] == (1, 1, 2)
