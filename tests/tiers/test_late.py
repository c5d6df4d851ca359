"""Copies that take their time, as those of a GPU do: nothing is used, given away or shown before they are over."""

import random

import attrs
import pytest

from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.tiers.page_cache import PageLease, WritePolicy
from kvproto.transport.base import Paging, Regions
from kvproto.transport.shm.memory import SharedMemory, buffers
from tests.tiers.engine import PAGE, Engine, Failing

A = tuple(range(9))
PROMPTS = [(*A[:n], *range(50, 50 + more)) for n in (5, 9) for more in (0, 4, 8)]
"""Some begin alike."""


@attrs.define(eq=False)
class Late(Paging):
    """Reads and writes at the end, or when the engine's stream has to wait for it."""

    program: CopyProgram
    sides: tuple[dict[int, memoryview], dict[int, memoryview]]
    done: bool = False

    def hold(self, layer: int | None = None) -> None:
        self.wait()

    def wait(self) -> None:
        if not self.done:
            execute(self.program, *self.sides)
            self.done = True


class LatePager(Failing):
    def __init__(self) -> None:
        self.under_way: list[Late] = []

    def copy(self, program: CopyProgram, sources: Regions, sinks: Regions) -> Paging:
        made = Late(
            program,
            (buffers(sources, wanted="", kinds=(SharedMemory,)), buffers(sinks, wanted="", kinds=(SharedMemory,))),
        )
        self.under_way.append(made)
        return made

    def finish(self, some: int) -> None:
        """So many, the first first, as a stream has it."""
        while self.under_way and some:
            self.under_way.pop(0).wait()
            some -= 1


def engine(pages: int, slots: int, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> tuple[Engine, LatePager]:
    made = Engine(pages, slots, policy=policy, pager=LatePager)
    assert isinstance(made.pager, LatePager)
    return made, made.pager


def test_what_is_on_its_way_is_found_when_it_has_come() -> None:
    made, pager = engine(8, 8)
    made.turn(*A, after=True)
    assert len(made.cache.host.ids()) == 0
    pager.finish(1)
    made.cache.step()
    assert len(made.cache.host.ids()) == 2
    made.forget()
    lease = made.cache.open(made.chain(*A), 3)
    assert lease is not None
    slots = lease.slots
    made.cache.step()
    assert (lease.pages, lease.ready, lease.found) == (2, False, {"device": 0, "host": 2})
    other = made.cache.open(made.chain(*A), 3)
    assert other is not None
    assert other.found == {"device": 0, "host": 0}, "it is not there yet"
    lease.wait(0)
    made.check_bytes(made.chain(*A), lease)
    made.cache.step()
    assert lease.ready
    assert lease.slots == slots
    lease.leave(9)
    other.leave()
    pager.finish(9)
    made.cache.drain()
    assert list(made.free()) == [8, 8]


def test_a_request_that_goes_while_its_pages_come_leaves_their_slots_to_the_copy() -> None:
    made, pager = engine(4, 4)
    made.turn(*A, after=True)
    pager.finish(1)
    made.cache.settle()
    made.forget()
    lease = made.cache.open(made.chain(*A), 2)
    assert lease is not None
    made.cache.step()
    lease.leave()
    assert made.cache.device.slots.free == 2
    pager.finish(1)
    made.cache.settle()
    assert list(made.free()) == [4, 4]


def test_two_requests_that_bring_one_page_keep_the_slots_that_they_were_given() -> None:
    made, pager = engine(8, 8)
    made.turn(*A)
    made.cache.drain()
    made.forget()
    pair = [made.cache.open(made.chain(*A), 3) for _ in range(2)]
    made.cache.step()
    before = [lease.slots for lease in pair if lease]
    pager.finish(9)
    made.cache.settle()
    assert [lease.slots for lease in pair if lease] == before
    assert len({slot for slots in before for slot in slots}) == 6
    for lease in pair:
        assert lease is not None
        lease.leave(9)
    made.cache.drain()
    assert len(made.cache.device.ids()) == 2
    assert list(made.free()) == [8, 8]


def test_whoever_gets_the_slots_of_a_page_waits_until_it_is_on_the_host() -> None:
    made, pager = engine(4, 8, WritePolicy.WRITE_BACK)
    made.turn(*A)
    made.turn(*range(20, 33), step=False)
    pager.finish(9)
    made.cache.drain()
    made.forget()
    lease = made.cache.open(made.chain(*A), 2)
    assert lease is not None
    made.cache.step()
    lease.wait()
    made.check_bytes(made.chain(*A), lease)
    assert lease.pages == 2


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("seed", range(8))
def test_whenever_copies_end_every_page_is_right_and_every_slot_comes_back(seed: int, policy: WritePolicy) -> None:
    rng = random.Random(f"{seed} {policy}")
    made, pager = engine(9, rng.choice((4, 9, 40)), policy)
    held: list[tuple[tuple[int, ...], PageLease]] = []
    hits = 0
    for _ in range(150):
        doing = rng.random()
        if doing < 0.35 and len(held) < 3:
            tokens = PROMPTS[rng.randrange(len(PROMPTS))]
            lease = made.cache.open(made.chain(*tokens), -(-len(tokens) // PAGE))
            if lease is not None:
                held.append((tokens, lease))
        elif doing < 0.6 and held:
            tokens, lease = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                lease.leave()
                continue
            if not lease.ready and not lease.pages:
                made.cache.step()
            lease.wait()
            chain, slots = made.chain(*tokens), lease.slots
            made.check_bytes(chain, lease)
            hits += lease.pages
            made.compute(chain, lease, lease.pages)
            assert lease.slots == slots
            lease.leave(len(tokens) - 1)
        elif doing < 0.8:
            made.cache.step()
        else:
            pager.finish(rng.randrange(3))
    for _, lease in held:
        lease.leave()
    made.cache.drain()
    assert hits
    assert list(made.free()) == [made.cache.device.slots.count, made.cache.host.slots.count]
