"""Memory that is registered again and asked back while transfers are under way (registration.md, Epochs)."""

from itertools import count
from typing import Any

import attrs
import pytest

from kvproto.errors import RemoteError
from kvproto.session import Exposed
from kvproto.session.limits import MAX_EPOCHS, PATIENCE, RESEND
from kvproto.session.registering import Holder, Owner
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, Transport
from tests.pools import allocate, memory
from tests.session.driver import EpochWorld, UnmapAsked, World, geometry, ticket, without_draft
from tests.session.test_inline import Inline
from tests.session.test_pull import PullWorld, asked
from tests.session.test_staged import LENGTH, SLOTS, Staged

CONTENT = b"c" * 32
MOVED = RemoteError(ErrorCode.POOL_MOVED, "", "asleep", "", "")


class Epochs(EpochWorld):
    """Keeps what was said; a source may leave memory mapped that is asked back."""

    def __init__(self, tp: int = 1, unmaps: bool = True) -> None:
        super().__init__(geometry(tp))
        self.said: list[Any] = []
        self.keep, self.unmaps = self.pass_on, unmaps
        self.ready(1)
        self.first: Exposed = self.sink_.exposed  # type: ignore[assignment]

    @property
    def sink_(self) -> Any:
        return self.sinks["d0"]

    def pass_on(self, to: str, frame: bytes) -> int:
        self.said.append(decode(frame))
        return 1

    def unmap(self, address: str, event: UnmapAsked) -> None:
        if self.unmaps:
            super().unmap(address, event)

    def of(self, kind: type) -> list[Any]:
        return [x for x in self.said if type(x) is kind]

    def expose(self) -> Exposed:
        """Another pool, which every source rank has mapped."""
        made = self.another("d0")
        self.sink_.expose(made, self.now)
        self.run()
        assert self.sink_.ready
        return made

    def ask(self, finished: bool = True) -> int:
        made = ticket(300.0)
        for source in self.sources.values():
            source.expect(made, CONTENT, self.now)
            if finished:
                source.finish(bytes(made.key))
        return self.fetch("d0", made, CONTENT)

    def give_back(self, exposed: Exposed, at_once: bool = False) -> None:
        self.sink_.give_back(exposed, at_once, self.now)
        self.run()

    def say(self, message: Any) -> list[Any]:
        """What the source answers to a frame of the sink."""
        source = self.sources["s0"]
        source.receive("d0", encode(message), self.now)
        return [decode(frame) for _, frame in source.to_send(self.now)]

    def fields(self, request: int, **more: Any) -> dict[str, Any]:
        (session,) = self.sources["s0"].sessions
        return {"session": session, "request": request, **more}

    def serves(self) -> None:
        """A transfer goes through."""
        before = len(self.events("d0", "Arrived"))
        self.ask()
        for address in self.sources:
            self.serve(address)
        assert len(self.events("d0", "Arrived")) == before + 1


def test_transfers_under_way_end_in_the_memory_that_they_name() -> None:
    """KVP-EPO-RISE: epoch 2 is registered while a transfer of epoch 1 is being copied; both arrive."""
    world = Epochs(2)
    world.ask()
    (first, second) = (world.events(address, "TransferRequested")[0] for address in world.sources)
    for address, event in zip(world.sources, (first, second), strict=True):
        world.sources[address].copying(event)
    world.expose()
    world.ask()
    assert [x.epoch for x in world.of(m.Register)] == [1, 1, 2, 2]
    assert [x.epoch for x in world.of(m.Transfer)] == [1, 1, 2, 2]
    for address in world.sources:
        world.serve(address)
    assert len(world.events("d0", "Arrived")) == 2


def test_an_epoch_is_given_back_once_it_is_unmapped() -> None:
    """KVP-EPO-FREE, KVP-EPO-UNMAP: neither the copy's end alone, nor Unregister alone, frees it."""
    world = Epochs(unmaps=False)
    world.ask()
    (event,) = world.events("s0", "TransferRequested")
    world.sources["s0"].copying(event)
    world.expose()
    world.give_back(world.first)
    assert not world.events("s0", "UnmapAsked")
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1
    (asked,) = world.events("s0", "UnmapAsked")
    assert not world.of(m.Unregistered)
    assert world.sink_.holders(world.first) == ["p rank 0"]
    world.serves()
    assert world.events("s0", "UnmapAsked") == [asked]  # once, however long it takes
    world.unmaps = True
    world.unmap("s0", asked)
    world.run()
    assert [(x.epoch, x.proof) for x in world.of(m.Unregistered)] == [(1, Proof.PROVEN)]
    assert world.sink_.holders(world.first) == []
    world.serves()


@pytest.mark.parametrize("unmaps", [False, True])
def test_a_transfer_of_an_epoch_that_is_asked_back_is_refused(unmaps: bool) -> None:
    """KVP-TRN-AGREE, before it is unmapped and after."""
    world = Epochs(unmaps=unmaps)
    world.expose()
    world.give_back(world.first)

    def twist(to: str, frame: bytes) -> int:
        message = decode(frame)
        if isinstance(message, m.Transfer):
            world.keep = world.pass_on
            world.sources["s0"].receive("d0", encode(attrs.evolve(message, epoch=1)), world.now)
            return 0
        return world.pass_on(to, frame)

    world.keep = twist
    world.ask()
    (lost,) = world.events("d0", "Lost")
    assert (lost.error.code, lost.error.path, lost.error.mine) == (ErrorCode.BAD_GRANT, "epoch", "2")
    world.serves()


def test_what_is_asked_back_at_once_ends() -> None:
    """KVP-EPO-MOVED: what waits for its prefill fails; what is being copied is stopped by its sink, or ends."""
    world = Epochs()
    waiting = world.ask(finished=False)
    world.expose()
    world.give_back(world.first, at_once=True)
    assert [x.at_once for x in world.of(m.Unregister)] == [True]
    (lost,) = world.events("d0", "Lost")
    assert (lost.transfer, lost.error.code, lost.proof) == (waiting, ErrorCode.POOL_MOVED, Proof.PROVEN)
    assert world.sink_.holders(world.first) == []
    world.serves()


def test_a_sink_without_memory_is_not_ready_until_it_registers_again() -> None:
    world = Epochs(2)
    world.give_back(world.first, at_once=True)
    assert not world.sink_.ready
    assert world.sink_.streamed() == {}
    assert {s.state.value for s in world.sink_.sessions.values()} == {"ready"}
    world.pass_time(2 * PATIENCE)
    world.expose()
    world.serves()


def test_an_epoch_whose_copy_ended_without_proof_is_kept_until_its_writer_is_dead() -> None:
    """KVP-EPO-FREE."""
    world = Epochs()
    number = world.ask()
    (event,) = world.events("s0", "TransferRequested")
    world.sources["s0"].copying(event)
    world.give_back(world.first, at_once=True)
    world.sink_.abort(number, MOVED, world.now)
    world.sources["s0"].failed(event, MOVED, world.now, Proof.UNPROVABLE)
    world.run()
    assert [x.proof for x in world.of(m.Unregistered)] == [Proof.UNPROVABLE]
    assert world.sink_.holders(world.first) == ["p rank 0", "transfers that are not over"][:1]
    world.expose()
    world.serves()
    assert [lost.proof for lost in world.events("d0", "Lost")] == [Proof.UNPROVABLE]
    world.sink_.died(world.sink_.sessions["s0"], world.now)
    assert world.sink_.holders(world.first) == []
    world.run()
    assert [proven.transfer for proven in world.events("d0", "Proven")] == [number]


def test_memory_of_a_session_that_is_over_is_free_once_every_transfer_of_it_is_proven() -> None:
    """KVP-EPO-FREE: a source that is stopped holds what it may still write, and answers when it runs again."""
    world = Epochs()
    world.ask()
    (event,) = world.events("s0", "TransferRequested")
    world.sources["s0"].copying(event)
    world.keep = lambda to, frame: 0
    world.sink_.give_back(world.first, True, world.now)
    world.pass_time(PATIENCE)
    assert not world.sink_.sessions["s0"].open
    assert world.sink_.holders(world.first) == ["p rank 0"]
    world.keep = world.pass_on
    world.sources["s0"].failed(event, MOVED, world.now)
    world.pass_time(PATIENCE / 2)
    assert world.events("d0", "Proven")
    assert world.sink_.holders(world.first) == []


def test_one_register_at_a_time() -> None:
    """KVP-EPO-ONE: a pool that is replaced before it is mapped waits for its turn, and the last one is used."""
    world = Epochs()
    pools = [world.another("d0") for _ in range(3)]
    for each in pools:
        world.sink_.expose(each, world.now)
    world.run()
    assert [x.epoch for x in world.of(m.Register)] == [1, pools[0].epoch, pools[2].epoch]
    world.serves()
    assert world.of(m.Transfer)[-1].epoch == pools[2].epoch
    for each in (world.first, pools[0]):
        world.give_back(each)
        assert world.sink_.holders(each) == []


def test_a_register_that_is_asked_back_before_it_is_answered() -> None:
    """KVP-EPO-ONE, KVP-EPO-FREE: it is mapped first, and then given back."""
    world = Epochs()
    pool = world.another("d0")
    world.sink_.expose(pool, world.now)
    world.sink_.give_back(pool, True, world.now)
    assert world.sink_.holders(pool) == ["p rank 0"]
    world.run()
    assert world.sink_.holders(pool) == []
    world.expose()
    world.serves()


# bad input


def another_register(world: Epochs, **changes: Any) -> Any:
    return attrs.evolve(world.of(m.Register)[-1], **{**world.fields(90), **changes})


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_does_not_rise(epoch: int) -> None:
    """KVP-EPO-ORDER; a Register that comes again is answered again."""
    world = Epochs()
    world.expose()
    (refused,) = world.say(another_register(world, epoch=epoch))
    assert (type(refused), refused.code, refused.path) == (m.Refused, ErrorCode.OUT_OF_RANGE, "epoch")
    assert [type(x) for x in world.say(world.of(m.Register)[-1])] == [m.Registered]
    world.serves()


def test_more_epochs_than_the_limit() -> None:
    """KVP-EPO-LIMIT; one that is given back makes room."""
    world = Epochs()
    for _ in range(MAX_EPOCHS - 1):
        world.expose()
    (refused,) = world.say(another_register(world, epoch=99))
    assert (refused.code, refused.path) == (ErrorCode.BUSY, "epoch")
    world.serves()
    world.give_back(world.first)
    world.expose()
    world.serves()


def test_a_register_while_another_is_being_mapped() -> None:
    """KVP-EPO-LIMIT."""
    world = Epochs()
    accept = world.accept
    world.accept = lambda address, session: None  # type: ignore[method-assign]
    world.sink_.expose(world.another("d0"), world.now)
    world.run()
    (refused,) = world.say(another_register(world, epoch=99))
    assert (refused.code, refused.path) == (ErrorCode.BUSY, "epoch")
    (session,) = world.sources["s0"].sessions
    accept("s0", session)
    world.run()
    world.serves()


def test_unregister_of_what_is_not_held() -> None:
    """KVP-EPO-UNKNOWN: an epoch that never was, one that is asked back, one that is gone; the same request is answered."""
    world = Epochs(unmaps=False)
    world.expose()
    (refused,) = world.say(m.Unregister(**world.fields(91), epoch=77))
    assert (type(refused), refused.code, refused.path) == (m.Refused, ErrorCode.OUT_OF_RANGE, "epoch")
    world.give_back(world.first)
    (unregister,) = world.of(m.Unregister)
    assert world.say(unregister) == []
    (refused,) = world.say(attrs.evolve(unregister, request=92))
    assert refused.code == ErrorCode.OUT_OF_RANGE
    (asked,) = world.events("s0", "UnmapAsked")
    world.unmaps = True
    world.unmap("s0", asked)
    world.run()
    assert [type(x) for x in world.say(unregister)] == [m.Unregistered]
    (refused,) = world.say(attrs.evolve(unregister, request=93))
    assert refused.code == ErrorCode.OUT_OF_RANGE
    world.serves()


def test_an_unregister_that_cannot_be_read_is_followed_by_another() -> None:
    """KVP-EPO-FREE: an Error has changed nothing at the holder, and the memory is free once it says so."""
    world = Epochs()
    world.expose()
    damaged = count()
    world.keep = lambda to, frame: (
        world.pass_on(to, frame) and (type(decode(frame)) is not m.Unregister or next(damaged) > 0)
    )
    (source,) = world.sources.values()
    world.give_back(world.first)
    source.receive("d0", encode(world.of(m.Unregister)[0])[:-1], world.now)
    world.run()
    assert world.sink_.holders(world.first) == ["p rank 0"]
    world.pass_time(RESEND)
    assert world.sink_.holders(world.first) == []
    assert len({x.request for x in world.of(m.Unregister)}) == 2
    assert world.sink_.sessions["s0"].open


def test_what_a_peer_refuses_to_give_back_is_held_while_there_is_a_session() -> None:
    """KVP-EPO-FREE: once it is over, its transfers alone count, and all of them are proven."""
    world = Epochs()
    world.expose()
    (source,) = world.sources.values()
    (session,) = source.sessions.values()
    session.part(Holder).epochs.pop(1)
    world.give_back(world.first)
    for _ in range(3):
        world.pass_time(RESEND)
    assert world.sink_.holders(world.first) == ["p rank 0"]
    assert len(world.of(m.Unregister)) == 1
    world.sink_.goodbye("over")
    assert world.sink_.holders(world.first) == []


def test_a_session_without_routes_goes_on_with_another_pool_and_not_with_other_caches() -> None:
    """KVP-DSC-AGAIN: the seed writes nothing to this rank, so nothing was registered with it, and it plans no more."""
    world = EpochWorld(geometry(2)).ready(2)
    sink = world.sinks["d1"]
    assert {address: s.state.value for address, s in sink.sessions.items()} == {"s0": "described", "s1": "ready"}
    assert sink.adaptable(sink.geometry)
    assert not sink.adaptable(without_draft(2))


def test_without_the_feature() -> None:
    """KVP-SES-STATE: a second Register and Unregister are unexpected; what a peer cannot give back is held."""
    world = World(geometry(1)).ready(1)
    sink, source = world.sinks["d0"], world.sources["s0"]
    assert not sink.adaptable(sink.geometry)
    said: list[Any] = []
    world.keep = lambda to, frame: said.append(decode(frame)) or 1  # type: ignore[func-returns-value]
    (session,) = source.sessions
    for message in (
        m.Unregister(session=session, request=90, epoch=1),
        m.Register(
            session=session, request=91, source=bytes(32), sink=bytes(32), epoch=2, access=1, regions=(), columns=(),
            routes=(), plan=bytes(32),
        ),
    ):  # fmt: skip
        source.receive("d0", encode(message), world.now)
    world.run()
    assert [(type(x), x.code) for x in said] == [
        (m.Error, ErrorCode.UNEXPECTED_MESSAGE), (m.Refused, ErrorCode.UNEXPECTED_MESSAGE)
    ]  # fmt: skip
    assert said[1].path == "epoch"
    assert not world.events("s0", "Refused")  # it goes on
    exposed = sink.exposed
    assert exposed is not None
    sink.give_back(exposed, True, world.now)
    assert sink.holders(exposed) == ["p rank 0"]
    sink.goodbye("over")
    assert sink.holders(exposed) == []


@pytest.mark.parametrize("change", [{"epoch": 7}, {"request": 7}])
def test_a_registered_of_another_epoch_ends_the_session_and_one_of_another_request_does_nothing(change: Any) -> None:
    """KVP-ERR-ALONE."""
    world = Epochs()
    world.sink_.expose(world.another("d0"), world.now)

    def twist(to: str, frame: bytes) -> int:
        message = decode(frame)
        if isinstance(message, m.Registered):
            world.keep = world.pass_on
            world.sink_.receive("s0", encode(attrs.evolve(message, **change)), world.now)
            return 0
        return 1

    world.keep = twist
    world.run()
    assert world.sink_.sessions["s0"].open == ("request" in change)
    if "request" in change:
        world.pass_time(3.0)
        world.serves()


# streams and pull


class StagedEpochs(Staged):
    features = (Feature.VERIFY, Feature.STAGED, Feature.EPOCHS)
    another = EpochWorld.another


class InlineEpochs(Inline):
    features = (Feature.VERIFY, Feature.INLINE, Feature.EPOCHS)
    another = EpochWorld.another


def test_each_epoch_has_its_own_slots() -> None:
    """KVP-EPO-CREDIT: the same slots are granted again, of another epoch."""
    world = StagedEpochs()
    first = world.sinks["d0"].exposed
    assert first is not None
    assert [credit.epoch for credit in world.of(m.Credit)] == [None]
    before = world.ask()
    world.chunk(0, 0, 7)
    old = world.events("s0", "TransferRequested")[-1]
    world.sinks["d0"].expose(world.another("d0"), world.now)
    world.run()
    granted = [(credit.epoch, credit.slots.tolist()) for credit in world.of(m.Credit)]
    assert granted == [(None, [*range(SLOTS)]), (2, [*range(SLOTS)])]
    after = world.ask()
    world.stream()
    world.done("s0", world.events("s0", "TransferRequested")[-1])
    world.run()
    world.happen()
    assert [e.transfer for e in world.events("d0", "Arrived")] == [after]
    world.told["s0"].append(old)
    for k in range(7, LENGTH, 7):
        world.chunk(k // 7, k, min(7, LENGTH - k), k + 7 >= LENGTH)
    world.done("s0", old)
    world.run()
    world.happen()
    assert [e.transfer for e in world.events("d0", "Arrived")] == [after, before]
    world.sinks["d0"].give_back(first, False, world.now)
    world.run()
    assert world.sinks["d0"].holders(first) == []


def test_each_epoch_counts_its_own_data() -> None:
    """KVP-EPO-CREDIT, KVP-INL-COUNT."""
    world = InlineEpochs()
    world.sinks["d0"].expose(world.another("d0"), world.now)
    world.run()
    credits = [(x.epoch, x.total) for x in _said(world) if isinstance(x, m.Credit)]
    assert [epoch for epoch, _ in credits] == [None, 2]
    assert credits[0][1] == credits[1][1]


def _said(world: Any) -> list[Any]:
    return [x for _, x in world.heard]


@pytest.mark.parametrize("first", ["the answer to Abort", "Unregistered"])
def test_memory_that_is_unmapped_proves_what_went_into_it(first: str) -> None:
    """KVP-EPO-PROOF: an Abort could not be read, so nothing is known of its attempt but that its epoch is given back."""
    world = Epochs()
    number = world.ask(finished=False)
    answers: list[bytes] = []

    def damaged(to: str, frame: bytes) -> int:
        message = decode(frame)
        if not isinstance(message, m.Abort) or world.of(m.Abort):
            return world.pass_on(to, frame)
        world.said.append(message)
        made = m.Error(
            session=message.session, request=message.request, code=ErrorCode.BAD_LENGTH, about=m.Abort.TYPE,
            path="", mine="", yours="", advice="",
        )  # fmt: skip
        answers.append(encode(made))
        return 0

    world.keep = damaged
    world.sink_.abort(number, MOVED, world.now)
    world.run()
    if first == "Unregistered":
        world.give_back(world.first, at_once=True)
        assert world.sink_.holders(world.first) == ["transfers that are not over"]
    world.sink_.receive("s0", answers[0], world.now)
    world.run()
    if first != "Unregistered":
        assert [lost.proof for lost in world.events("d0", "Lost")] == [Proof.UNPROVABLE]
        assert not world.events("d0", "Proven")
        world.give_back(world.first, at_once=True)
    world.run()
    assert [x.proof for x in world.of(m.Unregistered)] == [Proof.PROVEN]
    assert not world.sink_.holders(world.first)
    (lost,) = world.events("d0", "Lost")
    assert lost.proof == Proof.PROVEN or [proven.transfer for proven in world.events("d0", "Proven")] == [number]


class PullEpochs(PullWorld):
    features = (Feature.VERIFY, Feature.PULL, Feature.EPOCHS)
    another = EpochWorld.another

    def accept(self, address: str, session: int) -> None:
        made = self.sources[address].sessions[session]
        if made.part(Owner).newest is None:
            super().accept(address, session)
        else:
            made.accept_register(Transport.SHM)


def test_both_sides_of_pull_register_again() -> None:
    """KVP-EPO-RISE, KVP-EPO-UNMAP: an offer names the source's epoch, and is read before that is given back."""
    world = PullEpochs(geometry(1)).ready(1)
    asked(world)
    world.serve()
    (session,) = world.sources["s0"].sessions.values()
    old = world.kept["s0"]
    new = allocate(geometry(1), 0, {0: 8, 1: 8, 2: 8})
    session.owner.register(2, new, (memory(new).region,), tuple(new.layout.columns.values()), world.now)
    world.sinks["d0"].expose(world.another("d0"), world.now)
    world.run()
    world.kept["s0"] = new
    owner = session.part(Owner)
    owner.unregister(owner.epochs[1], False, world.now)
    world.run()
    assert 1 in owner.epochs
    world.read("d0")
    assert 1 not in owner.epochs
    assert old is not new
    world.told["d0"].clear()
    asked(world)
    world.serve()
    world.read("d0")
    assert len(world.events("d0", "Arrived")) == 1


def test_an_epoch_of_a_source_that_is_asked_back_at_once_is_read_no_more() -> None:
    """KVP-EPO-MOVED."""
    world = PullEpochs(geometry(1)).ready(1)
    asked(world)
    world.serve()
    (session,) = world.sources["s0"].sessions.values()
    owner = session.part(Owner)
    owner.unregister(owner.epochs[1], True, world.now)
    world.run()
    assert world.lost() == [(ErrorCode.POOL_MOVED, Proof.PROVEN)]
    assert owner.epochs == {}
    assert not world.sinks["d0"].ready
    pool = world.kept["s0"]
    session.owner.register(2, pool, (memory(pool).region,), tuple(pool.layout.columns.values()), world.now)
    world.run()
    assert world.sinks["d0"].ready


def early(world: PullEpochs) -> None:
    """Register of an epoch, and an Offer of items in it, come before anything is mapped."""
    asked(world)
    (session,) = world.sources["s0"].sessions.values()
    new = allocate(geometry(1), 0, {0: 8, 1: 8, 2: 8})
    session.owner.register(2, new, (memory(new).region,), tuple(new.layout.columns.values()), world.now)
    world.kept["s0"] = new
    (serve,) = world.events("s0", "TransferRequested")
    world.offer("s0", serve)
    World.run(world)
    assert [x.epoch for x in world.of(m.Offer)] == [2]
    assert not world.events("d0", "Offered")
    assert not world.of(m.Error)


def test_an_offer_from_memory_that_is_being_mapped() -> None:
    """KVP-PUL-EARLY: it is neither refused nor read, and is heard once it is mapped, without coming again."""
    world = PullEpochs(geometry(1)).ready(1)
    early(world)
    world.run()
    assert [x.epoch for x in world.of(m.Offer)] == [2]
    world.read("d0")
    assert len(world.events("d0", "Arrived")) == 1


def test_a_wrong_offer_from_memory_that_is_being_mapped() -> None:
    """It is refused once it is mapped, as if it came then (KVP-PUL-EARLY)."""
    world = PullEpochs(geometry(1)).ready(1)

    def another_writer(to: str, frame: bytes) -> int:
        message = decode(frame)
        if not isinstance(message, m.Offer):
            return world.hear(to, frame)
        wrong = encode(attrs.evolve(message, writer=7))
        world.hear(to, wrong)
        world.sinks[to].receive("s0", wrong, world.now)
        return 0

    world.keep = another_writer
    early(world)
    world.run()
    assert [error.code for error in world.of(m.Error)] == [ErrorCode.WRONG_PEER]
    assert [code for code, _ in world.lost()] == [ErrorCode.WRONG_PEER]


def test_a_copy_of_this_side_that_may_go_on_holds_its_pool() -> None:
    """KVP-EPO-FREE: nobody's death proves it, and the session that it read by may be over."""
    world = PullEpochs(geometry(1)).ready(1)
    sink = world.sinks["d0"]
    pool = sink.exposed
    assert pool is not None
    asked(world)
    world.serve()
    (offered,) = world.events("d0", "Offered")
    assert sink.may_read(offered.attempt, world.now)
    sink.unread(offered.attempt, MOVED, world.now, Proof.UNPROVABLE)
    world.run()
    assert [lost.proof for lost in world.events("d0", "Lost")] == [Proof.UNPROVABLE]
    sink.goodbye("over")
    assert sink.holders(pool) == ["transfers that are not over"]
