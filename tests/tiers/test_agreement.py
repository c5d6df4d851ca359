"""Ranks that find other pages, and have other room, go on with the same lengths of the same prompts (KVP-TIER-LENGTH)."""

import random
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest

from kvproto.errors import LocalError
from kvproto.tiers.page_cache import Agreement
from kvproto.wire.enums import ErrorCode
from tests.tiers.engine import PAGE, Engine, Failing
from tests.tiers.test_late import LatePager

PROMPTS = [tuple(range(n)) for n in (5, 9, 13)] + [(*range(4), *range(70, 70 + n)) for n in (1, 5, 9)]


def joined(asked: list[Agreement]) -> list[Agreement]:
    """The all-reduce."""
    least = reduce(np.minimum, [each.vector for each in asked])
    for each in asked:
        each.vector[:] = least
    return asked


def could(engine: Engine, tokens: tuple[int, ...], room: int) -> set[int]:
    """By trial: with which lengths a rank could go on."""
    chain, found = engine.chain(*tokens), {0}
    for index in (engine.cache.device, engine.cache.host):
        for n in range(1, room + 1):
            with index.find(chain, n) as hit:
                found |= {len(hit.pages)}
    return found


@pytest.mark.parametrize("reach", [0, PAGE])
@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_decide_the_same_and_can_do_it(seed: int, reach: int) -> None:
    rng = random.Random(f"{seed} {reach}")
    ranks = [
        Engine(rng.choice((5, 7, 12)), rng.choice((2, 6, 20)), reach=reach, pager=rng.choice((Failing, LatePager)))
        for _ in range(rng.choice((1, 2, 3)))
    ]
    used = 0
    for _ in range(25):
        for rank in ranks:  # each for itself, as what they have forgotten differs
            if rng.random() < 0.4:
                rank.cache.device.evict(rng.randrange(6))
            if rng.random() < 0.2:
                rank.cache.host.evict(rng.randrange(4))
            if rng.random() < 0.5:
                rank.cache.drain()
        prompts = [PROMPTS[rng.randrange(len(PROMPTS))] for _ in range(rng.choice((1, 2, 3)))]
        rooms = [-(-len(tokens) // PAGE) for tokens in prompts]
        able = [set.intersection(*(could(r, t, n) for r in ranks)) for t, n in zip(prompts, rooms, strict=True)]
        asked = joined(
            [
                r.cache.agreement([(r.chain(*t), n) for t, n in zip(prompts, rooms, strict=True)], lengths=16)
                for r in ranks
            ]
        )
        leases = [each.open() for each in asked]
        assert len({tuple(lease is None for lease in some) for some in leases}) == 1
        for rank, some in zip(ranks, leases, strict=True):
            rank.cache.step()
            lengths = []
            for tokens, lease in zip(prompts, some, strict=True):
                if lease is None:
                    lengths.append(None)
                    continue
                lease.wait()
                chain = rank.chain(*tokens)
                rank.check_bytes(chain, lease)
                lengths.append(lease.pages)
            right = [max(n) if lease else None for n, lease in zip(able, some, strict=True)]
            assert lengths == right
            used += sum(n or 0 for n in lengths)
            for tokens, lease in zip(prompts, some, strict=True):
                if lease is not None:
                    rank.compute(rank.chain(*tokens), lease, lease.pages)
                    lease.leave(len(tokens) - 1)
    assert used
    for rank in ranks:
        rank.cache.drain()
        assert list(rank.free()) == [rank.cache.device.slots.count, rank.cache.host.slots.count]


def test_prompts_that_do_not_fit_on_one_rank_are_opened_on_none() -> None:
    large, small = Engine(9, 4), Engine(4, 4)
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    asked = joined(
        [r.cache.agreement([(r.chain(*t), n) for t, n in zip(prompts, (3, 4, 1), strict=True)]) for r in (large, small)]
    )
    for each in asked:
        assert [lease is not None for lease in each.open()] == [True, False, True]


@pytest.mark.parametrize("other", ["another prompt", "more room", "another order", "one less"])
def test_ranks_that_were_asked_for_other_things_all_say_so(other: str) -> None:
    a, b = Engine(8, 8), Engine(8, 8)
    a.turn(*PROMPTS[1])

    def prompts(engine: Engine) -> list[tuple[object, int]]:
        return [(engine.chain(*PROMPTS[1]), 3), (engine.chain(*PROMPTS[2]), 4)]

    differs = prompts(b)
    match other:
        case "another prompt":
            differs[1] = b.chain(*PROMPTS[4]), 4
        case "more room":
            differs[1] = differs[1][0], 5
        case "another order":
            differs.reverse()
        case _:
            differs.pop()
    for asked in joined([a.cache.agreement(prompts(a)), b.cache.agreement(differs)]):  # type: ignore[arg-type]
        with pytest.raises(LocalError) as caught:
            asked.open()
        assert caught.value.code == ErrorCode.CONTENT_MISMATCH
    for engine in (a, b):
        engine.cache.drain()
        assert list(engine.free()) == [8, 8]


def test_lengths_for_which_the_vector_has_no_room_are_computed() -> None:
    engine = Engine(12, 9)
    engine.turn(*PROMPTS[2])
    asked = engine.cache.agreement([(engine.chain(*PROMPTS[2]), 4), (engine.chain(*PROMPTS[2]), 4)], lengths=5)
    leases = asked.open()
    assert [lease.pages for lease in leases if lease] == [3, 2]


def test_a_digest_that_is_the_least_in_every_number_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIN alone would leave the rank that has it in the belief that all have it."""
    engine, made = Engine(8, 8), []
    for byte in (8, 16):
        digest = SimpleNamespace(digest=lambda byte=byte: bytes([byte]) * 32)
        monkeypatch.setattr("kvproto.tiers.page_cache.hashlib", SimpleNamespace(sha256=lambda data, d=digest: d))
        made.append(engine.cache.agreement([(engine.chain(*PROMPTS[0]), 2)]))
    for asked in joined(made):
        with pytest.raises(LocalError, match="those of all ranks"):
            asked.open()
