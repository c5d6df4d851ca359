"""Descriptions that change while a session goes on: both sides plan anew, and what is under way ends by the old plan."""

from typing import Any

import attrs
import pytest

from kvproto.planning.geometry import Geometry, facts, mla, owns
from kvproto.session import Party
from kvproto.session.limits import PATIENCE
from kvproto.session.table import SessionState
from kvproto.wire import decode, encode
from kvproto.wire.enums import DType, ErrorCode, Proof
from kvproto.wire.messages import Describe, Description, Error, Failed, Refused, Register, Transfer
from tests.session.driver import DrivenSource, World, geometry, ticket, without_draft
from tests.session.test_epochs import CONTENT, Epochs


def redescribed(world: Epochs, made: Geometry) -> None:
    """The sink has another pool, of other caches."""
    exposed = world.another("d0", made)
    world.sink_.expose(exposed, world.now, made)
    world.run()


def test_a_sink_whose_caches_change_plans_anew_and_the_session_goes_on() -> None:
    """KVP-DSC-AGAIN, KVP-DSC-VERSION: what is under way ends by the plan that it was asked by."""
    world = Epochs(2)
    (before,) = {s.session for s in world.sources["s0"].sessions.values()}
    world.ask()
    redescribed(world, without_draft())
    assert world.sink_.ready
    world.ask()
    groups = {version: {g.group for m in world.of(Transfer) if m.sink_version == version for g in m.grants}
              for version in (1, 2)}  # fmt: skip
    assert groups == {1: {0, 1, 2}, 2: {0, 2}}
    assert [m.version for m in world.of(Describe)] == [1, 1, 2, 2]
    for address in world.sources:
        world.serve(address)
    assert len(world.events("d0", "Arrived")) == 2
    assert [*world.sources["s0"].sessions] == [before]


def restated(world: Epochs, made: Geometry, *addresses: str) -> None:
    """Source ranks have other caches."""
    for address in addresses or world.sources:
        world.sources[address].restate(made, {r.rank: f"s{r.rank}" for r in made.ranks}, world.now)
    world.run()


def anew(world: Epochs) -> None:
    """What a link does once it hears of another plan: the pool is registered by it."""
    old = world.sink_.exposed
    world.sink_.expose(attrs.evolve(old, epoch=old.epoch + 1), world.now)
    world.sink_.give_back(old, False, world.now)
    world.run()


def test_a_source_whose_caches_change_says_so() -> None:
    """KVP-DSC-AGAIN: the sink asks nothing by the old plan, and registers by the new one."""
    world = Epochs(2)
    world.sink_.expose(world.another("d0", without_draft()), world.now, without_draft())
    world.run()
    restated(world, without_draft(2), "s0")
    assert not world.sink_.ready
    restated(world, without_draft(2), "s1")
    anew(world)
    assert world.sink_.ready
    world.serves()
    assert {m.source_version for m in world.of(Transfer)} == {2}


def test_both_change_at_once() -> None:
    """KVP-DSC-AGAIN."""
    world = Epochs()
    made = without_draft()
    world.sink_.expose(world.another("d0", made), world.now, made)
    world.sources["s0"].restate(made, {0: "s0"}, world.now)
    world.run()
    anew(world)
    assert world.sink_.refused is None
    world.serves()


def test_a_register_that_a_change_has_overtaken_is_refused_and_another_follows() -> None:
    """KVP-REG-DIGESTS, KVP-EPO-FREE: nobody holds what was never mapped."""
    world = Epochs()
    redescribed(world, without_draft())
    pool = world.another("d0")

    def overtaken(to: str, frame: bytes) -> int:
        if isinstance(decode(frame), Register):
            world.keep = world.pass_on
            world.sources["s0"].restate(without_draft(), {0: "s0"}, world.now)
        return world.pass_on(to, frame)

    world.keep = overtaken
    world.sink_.expose(pool, world.now)
    world.run()
    assert [m.code for m in world.of(Refused)] == [ErrorCode.DESCRIPTION_MISMATCH]
    anew(world)
    world.serves()
    assert world.sink_.holders(pool) == []


def test_a_transfer_that_waits_for_its_prompt_ends_with_the_plan_and_its_ticket_is_as_new() -> None:
    """KVP-TRN-CHANGED, KVP-TKT-CHANGED: also where one rank alone has changed yet, and the other is told to abort."""
    world, made = Epochs(2), ticket(300.0)
    redescribed(world, without_draft())
    world.fetch("d0", made, CONTENT)
    for address in world.sources:
        restated(world, without_draft(2), address)
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path) == (ErrorCode.DESCRIPTION_MISMATCH, "source_version")
    assert lost.proof == Proof.PROVEN
    anew(world)
    world.prefill(made, CONTENT)
    world.fetch("d0", made, CONTENT)
    for address in world.sources:
        world.serve(address)
    assert len(world.events("d0", "Arrived")) == 1
    assert all(not session.tickets for source in world.sources.values() for session in source.sessions.values())


def test_a_transfer_of_a_plan_that_is_over_is_refused() -> None:
    """KVP-TRN-CHANGED."""
    world = Epochs()
    old = world.sink_.sessions["s0"]
    world.ask(finished=False)
    (transfer,) = world.of(Transfer)
    restated(world, without_draft())
    (failed,) = world.say(attrs.evolve(transfer, **world.fields(90, sequence=2, ticket=bytes(16))))[-1:]
    assert (type(failed), failed.code, failed.path) == (Failed, ErrorCode.DESCRIPTION_MISMATCH, "source_version")
    assert old.open


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_that_does_not_rise(version: int) -> None:
    """KVP-DSC-RISE; the plan stays, and the next good one is taken."""
    world = Epochs()
    redescribed(world, without_draft())
    *_, describe = world.of(Describe)
    (refused,) = world.say(attrs.evolve(describe, **world.fields(90), version=version))
    assert (type(refused), refused.code, refused.path) == (Refused, ErrorCode.OUT_OF_RANGE, "version")
    world.serves()
    redescribed(world, geometry(1))
    world.serves()


def test_caches_that_do_not_fit_any_more_end_the_session() -> None:
    """KVP-DSC-PLAN."""
    world = Epochs()
    other = geometry(1, groups=(mla(0, "target", 0, 48, 4, DType.F32), *geometry(1).groups[1:]))
    redescribed(world, other)
    assert world.sink_.refused is not None
    assert world.sink_.refused.code == ErrorCode.LANE_MISMATCH
    assert not world.sink_.ready


def test_without_epochs_the_session_ends() -> None:
    """KVP-DSC-AGAIN, KVP-SES-STATE."""
    world = World(geometry(1)).ready(1)
    sink, source = world.sinks["d0"], world.sources["s0"]
    assert not sink.adaptable(without_draft())
    (session,) = source.sessions
    describe = Describe(session=session, request=90, version=2, geometry=b"", digest=bytes(32))
    source.receive("d0", encode(describe), world.now)
    assert source.sessions[session].state == SessionState.READY
    source.restate(without_draft(), {0: "s0"}, world.now)
    world.run()
    assert not sink.sessions["s0"].open


def test_plans_that_are_made_later() -> None:
    """KVP-DSC-AGAIN: a Description that changes again while the plan of the first is made counts alone."""
    world = Epochs()
    later: list[Any] = []
    world.sources["s0"].plans.defer = lambda work, then: later.append(lambda: then(work()))
    redescribed(world, without_draft())
    assert not world.sink_.ready
    world.sources["s0"].restate(without_draft(), {0: "s0"}, world.now)
    world.run()
    while later:
        later.pop(0)()
        world.run()
    anew(world)
    while later:
        later.pop(0)()
        world.run()
    assert world.sink_.ready
    world.serves()
    assert not world.of(Error)
    assert {type(m) for m in world.said} >= {Describe, Description, Register}
    assert not [m for m in world.said if isinstance(m, Refused) and m.code != ErrorCode.DESCRIPTION_MISMATCH]


def test_a_plan_that_is_done_after_that_of_a_later_description_counts_no_more() -> None:
    """KVP-DSC-LAST: caches change and change back, and the plan of what is again is there at once."""
    world = Epochs()
    redescribed(world, without_draft())
    later: list[Any] = []
    world.sink_.plans.defer = lambda work, then: later.append(lambda: then(work()))
    at_first = world.sources["s0"].geometry
    world.sources["s0"].restate(without_draft(), {0: "s0"}, world.now)
    world.run()
    world.sources["s0"].restate(at_first, {0: "s0"}, world.now)
    world.run()
    while later:
        later.pop(0)()
        world.run()
    assert world.sink_.source == at_first
    assert not world.sink_.ready  # the source takes no transfer of what it has mapped by the first of the three
    anew(world)
    assert world.sink_.ready
    world.serves()
    assert not world.of(Error)


def test_a_refusal_is_for_those_who_lie() -> None:
    """KVP-DSC-DIGEST, in a session that goes on."""
    world = Epochs()
    (describe,) = world.of(Describe)
    (refused,) = world.say(attrs.evolve(describe, **world.fields(90), version=2, digest=bytes(32)))
    assert refused.code == ErrorCode.BAD_DIGEST
    world.serves()


def test_a_register_that_comes_while_its_plan_is_made_waits_for_it() -> None:
    """KVP-REG-DIGESTS: it names the Description that the source is about to know."""
    world = Epochs()
    later: list[Any] = []
    world.sources["s0"].plans.defer = lambda work, then: later.append(lambda: then(work()))
    world.sources["s0"].restate(without_draft(), {0: "s0"}, world.now)
    world.sink_.expose(world.another("d0", without_draft()), world.now, without_draft())
    world.run()
    anew(world)
    while later:
        later.pop(0)()
        world.run()
    assert world.sink_.ready
    assert not world.events("s0", "Refused")
    world.serves()


def test_a_sink_that_has_not_described_itself_is_kept_when_a_source_changes() -> None:
    """KVP-DSC-AGAIN: there is nothing that it could be wrong about yet."""
    world = Epochs()
    world.keep = lambda to, frame: not isinstance(decode(frame), Describe)
    world.join("late", without_draft(), engine="late")
    (session,) = [s for s in world.sources["s0"].sessions.values() if s.peer.engine == "late"]
    assert session.state == SessionState.OPEN
    restated(world, without_draft())
    world.keep = lambda to, frame: True
    world.pass_time(2.0)
    assert session.open
    assert session.described.of_source.version == 2


def test_a_plan_of_what_a_side_stated_before_is_made_again() -> None:
    """KVP-DSC-LAST: plans may take a while, in which the source itself gets other caches."""
    world, held = Epochs(), []
    source = world.sources["s0"]
    source.plans.defer = lambda work, then: held.append((work, then))
    world.join("late", without_draft(), engine="late")
    restated(world, without_draft())
    while held:
        work, then = held.pop(0)
        then(work())
        world.run()
    (session,) = [s for s in source.sessions.values() if s.peer.engine == "late"]
    assert session.described.of_source == source.stated


def contradicting(other: Geometry) -> World:
    """Source rank 1 was started with another geometry than rank 0, and a sink has greeted both."""
    world = World(geometry(2))
    world.sources["s1"] = DrivenSource(Party("p", 0, 1, 9), other, {0: "s0", 1: "s1"}, world.features, lambda: 9)
    world.join("d0", geometry(1))
    return world


def longer_pages() -> Geometry:
    made = geometry(2)
    return attrs.evolve(made, groups=(attrs.evolve(made.groups[0], rows=8), *made.groups[1:]))


def other_origin() -> Geometry:
    """It differs in a fact that only warns."""
    made = geometry(2)
    return attrs.evolve(made, facts=facts({"weights": "a"}, {"origin": "here"}))


def more_heads() -> Geometry:
    """Rank 1 has the draft's other head as well."""
    made = geometry(2)
    target, _, token = made.ranks[1].owns
    return attrs.evolve(
        made, ranks=(made.ranks[0], attrs.evolve(made.ranks[1], owns=(target, owns(made.groups[1], [0]), token)))
    )


@pytest.mark.parametrize(
    ("other", "path", "values"),
    [
        (longer_pages, "groups[target].rows", ("4", "8")),
        (other_origin, "facts[origin]", ("(absent)", "here")),
        (more_heads, "ranks[1].owns[1].lanes[0].lo", ("1", "0")),
    ],
)
def test_ranks_that_state_different_descriptions(other: Any, path: str, values: tuple[str, str]) -> None:
    """KVP-DSC-RANKS: both sides hear at once which ranks differ, and where."""
    world = contradicting(other())
    (ours,), (theirs,) = world.events("d0", "Refused"), world.events("s1", "Refused")
    for event, by_us in ((ours, True), (theirs, False)):
        assert (event.by_us, event.error.code, event.error.path) == (by_us, ErrorCode.DESCRIPTION_MISMATCH, path)
        assert (event.error.mine, event.error.yours) == (f"{values[0]} at p rank 0", f"{values[1]} at p rank 1")
    assert world.sinks["d0"].refused is ours.error
    assert [event.reason for event in world.events("s1", "Disconnected")] == [str(ours.error)]


def test_ranks_that_a_change_has_not_reached_yet_are_waited_for() -> None:
    """KVP-DSC-RANKS: what a transfer waits for is known meanwhile."""
    world = Epochs(2)
    world.sink_.expose(world.another("d0", without_draft()), world.now, without_draft())
    world.run()
    restated(world, without_draft(2), "s0")
    assert world.sink_.refused is None
    assert world.sink_.hindrances(None) == ["groups[draft] is (stated) at p rank 1 and (absent) at p rank 0"]


def test_a_rank_that_does_not_answer_is_named() -> None:
    """Clause KVP-SES-LOST."""
    world = World(geometry(2))
    world.keep = lambda to, frame: to != "s1"
    sink = world.join("d0", geometry(1))
    assert sink.hindrances(None) == ["no answer to Hello from p rank 1 at s1"]
    world.pass_time(PATIENCE)
    world.pass_time(1)
    assert sink.refused is not None
    assert (sink.refused.code, sink.refused.mine) == (ErrorCode.PEER_LOST, "a session with p rank 1 at s1")


def test_a_rank_that_does_not_answer_a_transfer_is_named() -> None:
    world, made = World(geometry(2)).ready(), ticket()
    world.keep = lambda to, frame: to != "s1"
    number = world.fetch("d0", made, CONTENT)
    assert world.sinks["d0"].hindrances(number) == ["no answer to Transfer from p rank 1 at s1"]
