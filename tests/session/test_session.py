"""The lifecycle, frame by frame, without sockets or clocks."""

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import LocalError, RemoteError
from kvproto.planning.geometry import Geometry, Rank, owns
from kvproto.session import limits
from kvproto.session.descriptions import Stated
from kvproto.session.table import SESSION, TRANSFER, SessionState, TransferState, next_session, next_transfer
from kvproto.wire import decode, encode
from kvproto.wire.enums import DType, ErrorCode, Feature, Proof
from kvproto.wire.messages import Abort, Describe, DoneAck, Drained, Error, Failed, Handle, Region, Register, Transfer
from tests.session.driver import World, geometry, ticket
from tests.session.test_pull import PullWorld
from tests.steps import least_steps

CONTENT = b"c" * 32


def ready(source_tp: int = 2, sink_tp: int = 1) -> World:
    return World(geometry(source_tp)).ready(sink_tp)


def test_registration_reaches_every_routed_rank() -> None:
    world = ready(2, 1)
    assert len(world.events("d0", "Ready")) == 1
    plan = world.sinks["d0"].plan
    assert plan is not None
    assert plan.required(0) == (0, 1)
    assert plan == next(iter(world.sources["s1"].sessions.values())).described.plan


@pytest.mark.parametrize("expect_first", [True, False])
@pytest.mark.parametrize("finish_first", [True, False])
def test_transfer_before_during_or_after_prefill(expect_first: bool, finish_first: bool) -> None:
    world, made = ready(1, 2), ticket()
    source = world.sources["s0"]
    steps = [
        lambda: source.expect(made, CONTENT, world.now),
        lambda: [world.transfer(d, made, CONTENT) for d in world.sinks],
    ]
    for step in steps if expect_first else reversed(steps):
        step()
        if finish_first:
            source.finish(bytes(made.key))
        world.run()
    source.finish(bytes(made.key))
    world.serve()
    assert [len(world.events(d, "Arrived")) for d in world.sinks] == [1, 1]
    assert len(world.events("s0", "Released")) == 1


def test_release_waits_for_every_sink_rank() -> None:
    """KVP-TRN-HOLD."""
    world, made = ready(1, 2), ticket()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.serve()
    assert not world.events("s0", "Released")
    world.fetch("d1", made, CONTENT)
    world.serve()
    (event,) = world.events("s0", "Released")
    assert event.routed == (0,)


def test_other_prompt_is_refused_before_a_byte_moves() -> None:
    """KVP-TKT-CONTENT."""
    world, made = ready(1), ticket()
    world.sources["s0"].expect(made, b"x" * 32, 0.0)
    world.fetch("d0", made, CONTENT)
    (event,) = world.events("d0", "Lost")
    assert event.error.code == ErrorCode.CONTENT_MISMATCH
    assert not world.events("s0", "TransferRequested")
    assert event.error.mine == "a prompt, digest 787878787878"
    assert event.error.yours == f"one fetched up to token 6, digest {CONTENT.hex()[:12]}"
    (told,) = world.events("s0", "Declined")
    assert (told.request, told.peer, told.error.code) == (bytes(made.key), "d rank 0", ErrorCode.CONTENT_MISMATCH)


def test_a_transfer_with_another_prompt_has_not_used_the_ticket() -> None:
    """KVP-TRN-CHECKS: a sink that has the right prompt is served."""
    world, made = ready(1), ticket()
    world.join("other", geometry(1), engine="e")
    world.sources["s0"].expect(made, b"x" * 32, 0.0)
    world.fetch("d0", made, CONTENT)
    world.transfer("other", made, b"x" * 32)
    world.sources["s0"].finish(bytes(made.key))
    world.serve()
    assert len(world.events("other", "Arrived")) == 1


def test_ticket_is_bound_to_its_first_sink() -> None:
    """KVP-TKT-BIND."""
    world, made = ready(1), ticket()
    world.join("other", geometry(1), engine="e")
    world.sources["s0"].expect(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.fetch("other", made, CONTENT)
    (event,) = world.events("other", "Lost")
    assert event.error.code == ErrorCode.TICKET_BOUND
    assert not world.events("d0", "Lost")


def test_unknown_ticket_ends_at_its_time() -> None:
    world = ready(1)
    world.fetch("d0", ticket(), CONTENT)
    world.pass_time(11.0)
    (event,) = world.events("d0", "Lost")
    assert (event.error.code, event.proof) == (ErrorCode.UNKNOWN_TICKET, Proof.PROVEN)
    assert "expected a prompt with this ticket within 10 s of the first Transfer, from this side" in str(event.error)
    assert not world.events("s0", "Expired")  # the engine never had it


def test_a_prompt_that_comes_after_its_sink_was_refused_may_still_be_fetched() -> None:
    """KVP-TKT-EARLY: UNKNOWN_TICKET uses no ticket."""
    world, made = ready(1), ticket()
    world.fetch("d0", made, CONTENT)
    world.pass_time(13.0)
    assert [event.error.code for event in world.events("d0", "Lost")] == [ErrorCode.UNKNOWN_TICKET]
    world.sources["s0"].prefill(made, CONTENT, world.now)
    world.run()
    assert not world.events("s0", "Declined")
    number = world.fetch("d0", made, CONTENT)
    world.serve()
    assert [event.transfer for event in world.events("d0", "Arrived")] == [number]


def test_unfetched_prefill_expires() -> None:
    world, made = ready(1), ticket(deadline=5)
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.pass_time(5.0)
    assert len(world.events("s0", "Expired")) == 1
    world.fetch("d0", made, CONTENT)
    world.pass_time(11.0)
    assert world.events("d0", "Lost")[0].error.code == ErrorCode.UNKNOWN_TICKET


def test_refused_prompt_reaches_the_sink_before_and_after() -> None:
    """KVP-TRN-ROOM: whoever waits, or comes later, hears of it."""
    world, made = ready(1), ticket()
    error = LocalError(ErrorCode.PROMPT_TOO_LONG, "prompt", "8 pages", "9 pages")
    world.sources["s0"].expect(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.sources["s0"].refuse(bytes(made.key), error, 0.0)
    world.run()
    world.fetch("d0", made, CONTENT)
    assert [e.error.code for e in world.events("d0", "Lost")] == [ErrorCode.PROMPT_TOO_LONG] * 2


def test_abort_is_drained_and_proven() -> None:
    """KVP-END-PROVEN, KVP-END-REUSE."""
    world, made = ready(2), ticket()
    for source in world.sources.values():
        source.expect(made, CONTENT, 0.0)
    number = world.fetch("d0", made, CONTENT)
    world.abort("d0", number)
    assert world.lost() == [(ErrorCode.ABORTED, Proof.PROVEN)]
    for source in world.sources.values():
        source.finish(bytes(made.key))
    world.run()
    assert not [e for a in world.sources for e in world.events(a, "TransferRequested") if world.sources[a].active(e)]


MISFITS = {
    "dtype": (
        geometry(1, dtype=DType.BF16),
        ErrorCode.DTYPE_MISMATCH,
        "groups[target].parts[latent].dtype",
        "F32",
        "BF16",
    ),
    "weights": (geometry(1, weights="b"), ErrorCode.IDENTITY_MISMATCH, "facts[weights]", "a", "b"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit_is_refused_by_name_and_the_next_peer_is_served(misfit: str) -> None:
    sink, code, path, mine, yours = MISFITS[misfit]
    world = World(geometry(2))
    world.join("bad", sink)
    for name, by_us in (("bad", False), ("s0", True)):
        (event,) = world.events(name, "Refused")
        error = event.error
        assert (error.code, error.path, error.mine, error.yours, event.by_us) == (code, path, mine, yours, by_us)
    assert not world.sinks["bad"].ready
    world.join("good", geometry(1))
    assert world.sinks["good"].ready


def swap(cls: type, **changes: object) -> World:
    """A world in which the sink's messages of one class are changed on their way."""
    world = World(geometry(1))
    sink = world.sink("d0", geometry(1))

    def to_send(now: float) -> list[tuple[object, bytes]]:
        out = []
        for address, frame in original(now):
            message = decode(frame)
            out.append((address, encode(attrs.evolve(message, **changes)) if isinstance(message, cls) else frame))
        return out

    original, sink.to_send = sink.to_send, to_send  # type: ignore[method-assign, assignment]
    world.run()
    return world


MANY = [
    Region(id=i, base=0, length=1, kind=0, boot=bytes(16), handles=(Handle(transport=2, data=b""),))
    for i in range(limits.MAX_REGIONS + 1)
]
"""One more than a Register may list (KVP-REG-MANY)."""
LIES = {
    "digest": (Describe, {"digest": bytes(32)}, ErrorCode.BAD_DIGEST, "digest"),
    "geometry": (Describe, {"geometry": b"\x80", "digest": __import__("hashlib").sha256(b"\x80").digest()}, ErrorCode.MISSING_FIELD, "geometry.replica"),
    "source": (Register, {"source": bytes(32)}, ErrorCode.DESCRIPTION_MISMATCH, "source"),
    "routes": (Register, {"routes": ()}, ErrorCode.ROUTE_MISMATCH, "routes[0]"),
    "plan": (Register, {"plan": bytes(32)}, ErrorCode.ROUTE_MISMATCH, "plan"),
    "columns": (Register, {"columns": ()}, ErrorCode.BAD_COLUMNS, "columns"),
    "regions": (Register, {"regions": ()}, ErrorCode.BAD_COLUMNS, "columns[0].region[0]"),
    "too many regions": (Register, {"regions": MANY}, ErrorCode.TOO_LARGE, "regions"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_registration_that_lies_is_refused(lie: str) -> None:
    cls, changes, code, path = LIES[lie]
    world = swap(cls, **changes)
    (event,) = world.events("d0", "Refused")
    assert (event.error.code, event.error.path) == (code, path)
    world.join("good", geometry(1))
    assert world.sinks["good"].ready


GRANTS = {
    "token count": ({"count": 7, "valid": 7}, ErrorCode.BAD_GRANT),
    "too few items": ({"items": np.array([0])}, ErrorCode.BAD_GRANT),
    "item outside": ({"items": np.array([0, 8])}, ErrorCode.OUT_OF_REGION),
    "item twice": ({"items": np.array([3, 3])}, ErrorCode.ITEM_ALIAS),
}


@pytest.mark.parametrize("grant", GRANTS)
def test_grant_that_lies_is_failed_and_the_next_is_served(grant: str) -> None:
    changes, code = GRANTS[grant]
    world, made = ready(1), ticket()
    source = world.sources["s0"]
    source.prefill(made, CONTENT, 0.0)
    from tests.session.driver import grants

    given_grants = grants(world.pools["d0"], 6 if grant != "token count" else 9)
    given_grants[0] = attrs.evolve(given_grants[0], **({"count": 4, "valid": 4} if grant == "token count" else changes))
    world.sinks["d0"].transfer(bytes(made.key), CONTENT, given_grants, 0.0)
    world.run()
    (event,) = world.events("d0", "Lost")
    assert event.error.code == code
    world.fetch("d0", made, CONTENT)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


@pytest.mark.parametrize("conn", ["d0", "thief"], ids=["unknown", "of another connection"])
def test_a_session_that_is_not_of_this_connection_cannot_be_used(conn: str) -> None:
    """KVP-SES-UNKNOWN."""
    source = ready(1).sources["s0"]
    number = 7 if conn == "d0" else next(iter(source.sessions))
    source.receive(conn, encode(Abort(session=number, request=1, sequence=1, reason="")), 0.0)
    ((to, frame),) = source.to_send(0.0)
    answer = decode(frame)
    assert isinstance(answer, Error)
    assert (to, answer.code) == (conn, ErrorCode.UNKNOWN_SESSION)


def test_drained_covers_what_was_never_seen_and_refuses_it_later() -> None:
    world, made = ready(1), ticket()
    source = world.sources["s0"]
    source.expect(made, CONTENT, 0.0)
    lost: list[bytes] = []

    def first_transfer_is_late(to: str, frame: bytes) -> int:
        late = isinstance(decode(frame), Transfer) and not lost
        if late:
            lost.append(frame)
        return not late

    world.keep = first_transfer_is_late
    number = world.fetch("d0", made, CONTENT)
    world.abort("d0", number)
    assert world.events("d0", "Lost")[0].proof == Proof.PROVEN
    source.receive("d0", lost[0], 0.0)
    answers = [decode(frame) for _, frame in source.to_send(0.0)]
    assert [(type(a), a.code) for a in answers if isinstance(a, Failed)] == [(Failed, ErrorCode.STALE_TRANSFER)]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.floats(0.0, 0.6))
@pytest.mark.parametrize("made", [World, PullWorld])
def test_lost_and_doubled_frames_change_nothing(made: type[World], random: Any, rate: float) -> None:
    """Every frame may be lost or come twice; resends under the same id bring the same end."""
    world, request = made(geometry(2)), ticket(deadline=300)
    lossy = lambda to, frame: 0 if (x := random.random()) < rate else 2 if x > 0.9 else 1  # noqa: E731
    world.keep = lossy
    world.sink("d0", geometry(1))
    world.prefill(request, CONTENT)
    asked = False
    for step in range(120):
        world.keep = lossy if step < 12 else lambda to, frame: 1
        world.go_on()
        if world.sinks["d0"].ready and not world.sinks["d0"].suspect and not asked:
            asked = True
            world.transfer("d0", request, CONTENT)
        if world.events("d0", "Arrived"):
            break
        world.pass_time(1.0)
    assert len(world.events("d0", "Arrived")) == 1
    world.keep = lambda to, frame: 1
    for _ in range(4):
        world.pass_time(2.5)
    assert [len(world.events(a, "Released")) for a in world.sources] == [1, 1]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80))
def test_noise_gets_a_typed_answer_and_costs_nobody_anything(noise: bytes) -> None:
    """KVP-ERR-ANSWER, KVP-ERR-ALONE."""
    world = ready(1)
    world.sources["s0"].receive("noise", noise, 0.0)
    ((conn, frame),) = world.sources["s0"].to_send(0.0)
    assert conn == "noise"
    assert isinstance(decode(frame), Error)
    world.sinks["d0"].receive("s0", noise, 0.0)
    made = ticket()
    world.sources["s0"].prefill(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


def test_an_error_is_never_answered() -> None:
    """KVP-ERR-SILENT."""
    world = ready(1)
    world.sources["s0"].receive("d0", encode(Error(code=ErrorCode.BUSY, path="", mine="", yours="")), 0.0)
    assert world.sources["s0"].to_send(0.0) == []


def test_replies_nobody_asked_for_are_harmless() -> None:
    world = ready(1)
    (number,) = world.sources["s0"].sessions
    for message in (
        DoneAck(session=number, request=99, sequence=9),
        Drained(session=number, request=99, sequence=9, proof=Proof.PROVEN),
    ):
        world.sources["s0"].receive("d0", encode(message), 0.0)
        world.sinks["d0"].receive("s0", encode(message), 0.0)
    assert world.sinks["d0"].ready


def test_goodbye_closes_both_ends() -> None:
    world = ready(1)
    world.sinks["d0"].goodbye("over")
    world.run()
    assert not world.sources["s0"].sessions
    assert world.events("s0", "Disconnected")[0].reason == "over"


def test_silent_source_is_given_up() -> None:
    world = World(geometry(1))
    world.keep = lambda to, frame: False
    world.join("d0", geometry(1))
    world.pass_time(31.0)
    assert world.sinks["d0"].refused is not None
    said = "PEER_LOST: expected a session with s0, got no answer to Hello in 30 s"
    assert str(world.sinks["d0"].refused).startswith(said)


def test_every_pair_outside_the_tables_is_illegal() -> None:
    """KVP-SES-STATE."""
    messages = {m for _, m in (*SESSION, *TRANSFER)}
    for state in SessionState:
        for name in messages:
            if (state, name) not in SESSION:
                with pytest.raises(RemoteError):
                    next_session(state, name, Feature)
    for step in TransferState:
        for name in messages:
            if (step, name) not in TRANSFER:
                with pytest.raises(RemoteError):
                    next_transfer(step, name, Feature)


@pytest.mark.parametrize("made", [World, PullWorld])
def test_nothing_is_kept_of_what_is_over(made: type[World]) -> None:
    world = made(geometry(1)).ready(2)
    source = world.sources["s0"]
    for _ in range(100):
        for told in world.told.values():
            told.clear()
        request = ticket()
        source.prefill(request, CONTENT, world.now)
        for name in world.sinks:
            world.transfer(name, request, CONTENT)
        world.go_on()
    assert not list(source.tickets)
    for session in source.sessions.values():
        assert (session.attempts, session._pending, session.low_water) == ({}, {}, 100)
    for sink in world.sinks.values():
        assert not sink.transfers
        for peer in sink.sessions.values():
            assert [peer.attempts, peer._pending] == [{}] * 2


def test_a_frame_costs_the_same_beside_sessions_that_are_over_and_awaited() -> None:
    """Each of their sinks has asked for a request that nobody finishes; they are forgotten with its deadline."""
    world = ready(1, 1)
    source = world.sources["s0"]

    def one() -> None:
        made = ticket()
        source.prefill(made, CONTENT, world.now)
        world.fetch("d0", made, CONTENT)
        world.serve()
        world.told["s0"].clear()

    alone = least_steps(one, 5)
    for n in range(150):
        made = ticket(20.0)
        sink = world.join("other", geometry(1), engine=f"other {n}")
        source.expect(made, CONTENT, world.now)
        world.fetch("other", made, CONTENT)
        sink.goodbye("over")
        world.run()
    assert len(source.sessions) == 151
    assert least_steps(one, 5) < 1.5 * alone
    world.pass_time(21.0)
    assert len(source.sessions) == 1


def test_aborted_before_the_prompt_is_refused_or_late() -> None:
    """A transfer that waits for its prompt and is aborted must not fail a second time."""
    world, made = ready(1), ticket()
    source = world.sources["s0"]
    number = world.fetch("d0", made, CONTENT)
    world.abort("d0", number)
    source.expect(made, CONTENT, 0.0)
    source.refuse(bytes(made.key), LocalError(ErrorCode.PROMPT_TOO_LONG, "", "", ""), 0.0)
    world.pass_time(100.0)
    assert [e.error.code for e in world.events("d0", "Lost")] == [ErrorCode.ABORTED]


def test_error_with_a_code_of_the_future() -> None:
    world = World(geometry(1))
    sink = world.sink("d0", geometry(1))
    ((address, frame),) = sink.to_send(0.0)
    answer = Error(request=decode(frame).request, code=0xABCD, path="", mine="", yours="")  # type: ignore[union-attr]
    sink.receive(address, encode(answer), 0.0)
    assert sink.refused is not None
    assert sink.refused.code == ErrorCode.INTERNAL


def test_a_description_that_would_eat_memory() -> None:
    good = geometry(1)
    deal = attrs.evolve(good.groups[0], cp_size=2**32 - 1, interleave=2**32 - 1)
    hostile = attrs.evolve(good, groups=(deal, *good.groups[1:]))
    world = World(good)
    sink = world.sink("d0", good)
    sink.geometry, sink.stated = hostile, Stated.of(hostile)
    sink.sessions.clear()
    sink.dial(0.0)
    world.run()
    (event,) = world.events("d0", "Refused")
    assert event.error.code == ErrorCode.BAD_GEOMETRY


def test_a_rank_without_a_route_takes_part_in_no_transfer() -> None:
    """KVP-TRN-DUMMY: three layers are dealt over four ranks that all hold them; the fourth is not among the routed."""
    groups = geometry(1).groups[:1]
    ranks = tuple(Rank(rank=r, owns=(owns(groups[0], range(3)),)) for r in range(4))
    world, made = World(Geometry(replica=0, facts=(), groups=groups, ranks=ranks)), ticket()
    world.join("d0", Geometry(replica=0, facts=(), groups=groups, ranks=ranks[:1]))
    world.prefill(made, CONTENT)
    world.fetch("d0", made, CONTENT)
    asked = [address for address in world.sources if world.events(address, "TransferRequested")]
    for address in asked:
        world.serve(address)
    assert asked == ["s0", "s1", "s2"]
    assert len(world.events("d0", "Arrived")) == 1
    assert [e.routed for a in world.sources for e in world.events(a, "Released")] == [(0, 1, 2)] * 3


def test_nobody_is_woken_for_a_transfer_that_need_not_be_asked_about_yet() -> None:
    """KVP-TRN-LONG: a deadline that is over would be due for ever."""
    world, made = ready(1), ticket(300.0)
    world.sources["s0"].expect(made, CONTENT, 0.0)
    world.fetch("d0", made, CONTENT)
    world.pass_time(1.0)
    for each in (world.sinks["d0"], world.sources["s0"]):
        assert each.timers.next() > world.now
