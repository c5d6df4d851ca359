"""Who has which cached pages: a list in pieces, numbered changes, and what a watcher does when it has missed some."""

import hashlib
from random import Random
from typing import Any

import pytest

from kvproto.errors import RemoteError, WireError
from kvproto.events import Refused
from kvproto.session import Party
from kvproto.session.catalogue import Catalogue, Listed, SinkCatalogue
from kvproto.session.limits import MAX_TOLD, PING_SILENCE, RESEND
from kvproto.session.table import SessionState, next_session
from kvproto.session.watching import MOST_RANKS, WatchEndpoint
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Feature, KeyForm, Tier
from kvproto.wire.messages import Describe, Error, Goodbye, Kept, KeptPage, Register, Watch, Watched, Welcome
from tests.cases import sampled
from tests.session.driver import World, geometry
from tests.session.test_delivery import Heard
from tests.session.test_resume import Reconnected

SPACE = b"s" * 32


def ids(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest() for i in range(first, first + count)]


class Watching(Reconnected):
    """A source replica with catalogues, and watchers."""

    def __init__(self, tp: int = 1, watchers: int = 1, catalogues: bool = True) -> None:
        self.watchers: list[WatchEndpoint] = []
        super().__init__(tp, sinks=0)
        self.watchers = [WatchEndpoint(Party("router", 0, i, 1), "s0") for i in range(watchers)]
        for source in self.sources.values() if catalogues else ():
            source.keep_catalogue(Catalogue(SPACE, 16, KeyForm.AHEAD))
        for i, watcher in enumerate(self.watchers):
            self.sinks[f"d{i}"], self.told[f"d{i}"] = watcher, []  # type: ignore[assignment]

    def run(self) -> None:
        Reconnected.run(self) if len(self.sinks) == 1 and len(self.sources) == 1 else World.run(self)
        for i, watcher in enumerate(self.watchers):
            self.told[f"d{i}"] += watcher.take_events()

    def dial(self) -> None:
        for watcher in self.watchers:
            watcher.dial(self.now)
        self.run()

    def kept(self, *pages: bytes, tier: Tier | None = Tier.DEVICE, address: str = "s0") -> None:
        self.sources[address].kept(dict.fromkeys(pages, tier))
        self.run()

    def has(self, rank: int = 0, watcher: int = 0) -> dict[bytes, int]:
        known = self.watchers[watcher].known()
        assert known is not None
        return known[rank].pages

    def is_right(self) -> bool:
        known, catalogue = self.watchers[0].known(), self.sources["s0"].catalogue
        assert catalogue is not None
        told = {bytes(page.id): page.tier for bucket in [catalogue] for page in all_of(bucket)}
        return known is not None and known[0].pages == told


def all_of(catalogue: Catalogue) -> list[KeptPage]:
    found, more, last = [], True, None
    while more:
        pages, more = catalogue.after(last)
        found += pages
        last = pages[-1].id if pages else None
    return found


@pytest.mark.parametrize("count", [0, 1, MAX_TOLD, MAX_TOLD + 1, 3 * MAX_TOLD + 5])
def test_the_list_comes_in_pieces(count: int) -> None:
    """KVP-CAT-LIST: ascending, all of it, and no piece is longer than it may be."""
    world = Watching()
    world.kept(*ids(count))
    world.dial()
    pieces = world.of(Watched)
    told = [page.id for piece in pieces for page in piece.pages]
    assert told == sorted(ids(count))
    assert [len(piece.pages) for piece in pieces[:-1]] == [MAX_TOLD] * (len(pieces) - 1)
    assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert world.has() == dict.fromkeys(told, Tier.DEVICE)
    assert (pieces[0].namespace, pieces[0].page, pieces[0].form) == (SPACE, 16, KeyForm.AHEAD)


def test_changes_are_numbered_alike_for_all() -> None:
    """KVP-CAT-NUMBER: whoever came later goes on with the same numbers; nobody hears of them who has not asked."""
    world = Watching(watchers=2)
    world.kept(*ids(2))
    world.watchers[0].dial(world.now)
    world.run()
    world.kept(*ids(1), tier=Tier.HOST)
    world.watchers[1].dial(world.now)
    world.run()
    world.kept(*ids(1), tier=None)
    world.kept(*ids(MAX_TOLD + 1, 10))
    assert [each.number for each in world.of(Kept, "d0")] == [2, 3, 4, 5]
    assert [each.number for each in world.of(Kept, "d1")] == [3, 4, 5]
    assert world.has(watcher=0) == world.has(watcher=1) == dict.fromkeys(ids(1, 1) + ids(MAX_TOLD + 1, 10), 1)


def test_what_is_known_is_not_told_again() -> None:
    """KVP-CAT-ONCE"""
    world = Watching()
    world.dial()
    world.kept(*ids(2))
    world.kept(*ids(3))
    world.kept(*ids(1, 7), tier=None)
    assert [[page.id for page in kept.pages] for kept in world.of(Kept)] == [sorted(ids(2)), ids(1, 2)]


def test_a_gap_in_the_numbers_asks_from_the_beginning() -> None:
    """KVP-CAT-GAP: a Kept is lost; the next one shows it."""
    world = Watching()
    world.kept(*ids(2 * MAX_TOLD))
    world.dial()
    asked = len(world.of(Watch))
    world.keep = lambda to, frame: world.hear(to, frame) and not isinstance(decode(frame), Kept)
    world.kept(*ids(5), tier=None)
    assert not world.is_right()
    world.keep = world.hear
    world.kept(*ids(1, 9), tier=Tier.HOST)
    assert world.of(Watch)[asked].after is None
    assert world.is_right()


def test_a_gap_between_two_pieces_asks_from_the_beginning() -> None:
    """KVP-CAT-GAP: what changed in the first piece was lost before the second came."""
    world = Watching()
    world.kept(*ids(2 * MAX_TOLD))
    first = all_of(world.sources["s0"].catalogue)[0].id  # type: ignore[arg-type]

    def lose(to: str, frame: bytes) -> int:
        message = decode(frame)
        if isinstance(message, Watch) and message.after is not None and len(world.of(Kept)) == 0:
            world.sources["s0"].kept({first: None})
        world.hear(to, frame)
        return not isinstance(message, Kept)

    world.keep = lose
    world.dial()
    assert len(world.of(Kept)) == 1
    assert first not in world.has()
    assert world.is_right()


def test_a_session_that_goes_on_elsewhere_asks_from_the_beginning() -> None:
    """KVP-CAT-GAP: no Kept has come since, so that no number tells what was lost with the connection."""
    world = Watching()
    world.dial()
    world.keep = lambda to, frame: 0
    world.kept(*ids(3))
    world.keep = world.hear
    world.broken += 1
    world.pass_time(PING_SILENCE)
    world.pass_time(RESEND)
    assert [*world.has()] == sorted(ids(3))
    assert len(world.watchers[0].sessions) == 1, "the session was resumed"


def test_a_piece_that_was_asked_for_before_is_not_asked_for_again_elsewhere() -> None:
    """KVP-CAT-GAP: the Watch that was lost with the connection is not sent again before the one without `after`."""
    world, said = Watching(), list[Any]()
    world.kept(*ids(2 * MAX_TOLD))

    def lose(to: str, frame: bytes) -> int:
        said.append(decode(frame))
        world.hear(to, frame)
        return not (isinstance(said[-1], Watch) and said[-1].after is not None and world.broken == 0)

    world.keep = lose
    world.dial()
    world.broken += 1
    world.pass_time(PING_SILENCE)
    world.pass_time(RESEND)
    resumed = max(n for n, each in enumerate(said) if isinstance(each, Welcome))
    assert next(each for each in said[resumed:] if isinstance(each, Watch)).after is None
    assert len(world.watchers[0].sessions) == 1, "the session was resumed"
    assert world.is_right()


@pytest.mark.parametrize("seed", sampled(range(30), every=3))
def test_whatever_is_lost_the_list_is_right_in_the_end(seed: int) -> None:
    """KVP-CAT-GAP, KVP-CAT-LIST: frames are lost, repeated, and connections break, while pages come and go."""
    dice, world = Random(seed), Watching()
    some = ids(3000)
    world.kept(*dice.sample(some, 2500))
    world.keep = lambda to, frame: dice.choice([0, 1, 1, 1, 2])
    world.dial()
    for _ in range(40):
        world.broken += dice.random() < 0.1
        world.sources["s0"].kept(
            {dice.choice(some): dice.choice([None, Tier.DEVICE, Tier.HOST]) for _ in range(dice.randrange(50))}
        )
        world.pass_time(dice.choice([0.0, 0.1, RESEND]))
    world.keep = lambda to, frame: 1
    for _ in range(8):
        world.pass_time(PING_SILENCE)
    world.kept(some[0], tier=None)
    world.kept(some[0])
    assert world.is_right()


def test_a_watcher_greets_every_rank_and_describes_nothing() -> None:
    world = Watching(tp=2)
    world.kept(*ids(1), address="s0")
    world.kept(*ids(1, 1), address="s1")
    world.dial()
    assert (world.has(0), world.has(1)) == ({ids(1)[0]: 1}, {ids(1, 1)[0]: 1})
    assert (world.of(Describe), world.of(Register)) == ([], [])
    assert [isinstance(event, Listed) for event in world.told["d0"]] == [True, True]


def test_a_source_without_a_catalogue_refuses_and_is_asked_again() -> None:
    world = Watching(catalogues=False)
    world.dial()
    (told,) = [event for event in world.told["d0"] if isinstance(event, Refused)]
    assert told.error.code == ErrorCode.FEATURE_MISSING
    assert world.watchers[0].known() is None
    world.sources["s0"].keep_catalogue(Catalogue(SPACE, 16, KeyForm.OWN))
    world.kept(*ids(1))
    world.pass_time(PING_SILENCE)
    assert world.has() == {ids(1)[0]: Tier.DEVICE}


def test_a_sink_that_has_not_chosen_it_is_refused_a_list() -> None:
    world = Heard()
    world.sources["s0"].keep_catalogue(Catalogue(SPACE, 16, KeyForm.OWN))
    number = world.sinks["d0"].sessions["s0"].session
    (answer,) = world.say(Watch(session=number, request=99))
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.UNEXPECTED_MESSAGE


@pytest.mark.parametrize("name", ["Watch", "Watched", "Kept"])
def test_what_watchers_say_needs_the_feature(name: str) -> None:
    """KVP-SES-STATE."""
    assert next_session(SessionState.OPEN, name, {Feature.CATALOGUE}) is SessionState.OPEN
    with pytest.raises(RemoteError, match="without CATALOGUE"):
        next_session(SessionState.OPEN, name, ())


def test_a_source_that_comes_again_is_watched_again() -> None:
    """KVP-CAT-OVER"""
    world = Watching()
    world.kept(*ids(2))
    world.dial()
    world.sources["s0"].goodbye("it is started anew")
    world.run()
    assert world.watchers[0].known() is None
    world.sources["s0"].draining = False
    world.pass_time(PING_SILENCE)
    assert len(world.has()) == 2


@pytest.mark.parametrize("pages", [(), (KeptPage(id=bytes(32), tier=Tier.DEVICE),)])
def test_a_list_that_never_ends_ends_the_session(pages: tuple[KeptPage, ...]) -> None:
    """KVP-CAT-PIECE: it says more, and does not go on."""
    world = Watching()
    world.kept(*ids(MAX_TOLD + 1))

    def lie(to: str, frame: bytes) -> int:
        message = decode(frame)
        if isinstance(message, Watched) and message.request > 2:
            said = Watched(
                session=message.session, request=message.request, number=message.number, namespace=SPACE, page=16,
                form=KeyForm.OWN, pages=pages, more=True,
            )  # fmt: skip
            world.sinks[to].receive("s0", encode(said), world.now)
            return 0
        return world.hear(to, frame)

    world.keep = lie
    world.dial()
    assert len(world.of(Goodbye)) == 1
    assert world.watchers[0].known() is None


def test_a_tier_of_a_later_version_is_kept_as_it_is() -> None:
    world = Watching()
    world.dial()
    session = world.watchers[0].sessions["s0"]
    said = Kept(session=session.session, number=1, pages=(KeptPage(id=bytes(32), tier=9),))
    world.watchers[0].receive("s0", encode(said), world.now)
    assert world.has() == {bytes(32): 9}
    assert (session.state, session.part(SinkCatalogue).whole) == (SessionState.OPEN, True)


def test_a_source_with_two_ranks_keeps_two_catalogues() -> None:
    """KVP-CAT-NUMBER: numbers are each rank's own."""
    world = Watching(tp=2)
    world.dial()
    world.kept(*ids(1), address="s1")
    world.kept(*ids(1), address="s0")
    assert [kept.number for kept in world.of(Kept)] == [1, 1]
    assert geometry(2).ranks[1].rank == 1


def test_ids_that_do_not_ascend_are_refused_in_words_that_people_can_read() -> None:
    """KVP-RULE-BREAK: ids are no text."""
    above, below = KeptPage(id=b"\xff" * 32), KeptPage(id=b"\x80" * 32)
    with pytest.raises(WireError, match="80" * 32) as caught:
        encode(Kept(session=1, number=1, pages=(above, below)))
    assert (caught.value.code, caught.value.path) == (ErrorCode.NOT_ASCENDING, "pages[1].id")


def test_what_another_session_is_told_is_not_taken_for_ours() -> None:
    """KVP-SES-OTHER: a watcher answers it with UNKNOWN_SESSION, and keeps what it knows."""
    world = Watching()
    world.kept(*ids(3))
    world.dial()
    (session,) = world.watchers[0].sessions.values()
    foreign = KeptPage(id=ids(1, 9)[0], tier=Tier.HOST)
    kept = Kept(session=session.session + 1, number=world.of(Watched)[-1].number + 1, pages=(foreign,))
    for other in (kept, Goodbye(session=session.session + 1, reason="")):
        world.watchers[0].receive("s0", encode(other), world.now)
        assert world.has() == dict.fromkeys(ids(3), Tier.DEVICE)
        assert session.open
    world.run()
    world.kept(*ids(1, 5))
    assert world.has() == dict.fromkeys([*ids(3), *ids(1, 5)], Tier.DEVICE)


def test_a_source_that_names_too_many_ranks_is_not_dialled() -> None:
    """Each would cost the watcher a connection."""
    world = Watching()
    world.sources["s0"].restate(geometry(1), {rank: f"s{rank}" for rank in range(MOST_RANKS + 1)}, world.now)
    world.dial()
    (watcher,) = world.watchers
    assert watcher.known() is None
    assert watcher.refused is not None
    assert (watcher.refused.code, watcher.refused.path) == (ErrorCode.TOO_LARGE, "endpoints")
    assert len(watcher.sessions) <= 1


def test_all_ranks_of_a_source_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source says how many ranks it has, and each could list pages without end."""
    monkeypatch.setattr("kvproto.session.limits.MAX_CATALOGUE", 5)
    world = Watching(tp=2)
    for address in ("s0", "s1"):
        world.kept(*ids(4), address=address)
    world.dial()
    assert len(world.has(0)) + len(world.has(1)) == 5
    gone = [*world.has(0)]
    world.kept(*gone, tier=None, address="s0")
    world.kept(*ids(4, 10), address="s0")
    assert len(world.has(0)) + len(world.has(1)) == 5


def test_ranks_that_name_pages_differently_are_no_engine() -> None:
    """A router would hash a prompt once for each."""
    world = Watching(tp=2)
    world.sources["s1"].keep_catalogue(Catalogue(b"t" * 32, 16, KeyForm.AHEAD))
    world.dial()
    (watcher,) = world.watchers
    assert watcher.known() is None
    assert watcher.refused is not None
    assert (watcher.refused.code, watcher.refused.path) == (ErrorCode.FIELD_CONFLICT, "namespace")
