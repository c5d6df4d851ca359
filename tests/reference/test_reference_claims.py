"""Requests that claim their pages piece by piece all end, in whatever order their pieces come."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto_reference.cache import PageAllocator
from kvproto_reference.engine.claims import Claim, claimed
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.sequence import TokenSequence
from tests.reference.test_reference_prefix import shards


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 999))
def test_requests_that_claim_piece_by_piece_all_end(wholes: list[int], seed: int) -> None:
    pools, dice = (PageAllocator(10, 1), PageAllocator(10, 2)), random.Random(seed)
    cache, waiting = PrefixCache(pools, shards(1, 1, 4)), []
    for n in wholes:
        sequence = TokenSequence(prompt=[n], max_new=1)
        assert cache.allocate(sequence, (0, 0)) == 0
        waiting.append(Claim(sequence, (n, n)))
    stuck = 0
    while waiting:
        stuck += 1
        for claim in dice.sample(waiting, len(waiting)):
            pages = min(claim.whole[0], claim.held[0] + dice.randint(1, 4))
            if claimed(claim, (pages, pages), waiting, (0, 0), cache):
                stuck = 0
            if claim.held == claim.whole:  # it has arrived, and ends
                cache.free(claim.sequence, 0)
                waiting.remove(claim)
        assert stuck < 2
    assert cache.available == [10, 10]


def test_without_that_rule_they_would_wait_for_each_other() -> None:
    pools = PageAllocator(10, 1), PageAllocator(10, 2)
    cache = PrefixCache(pools, shards(1, 1, 4))
    first, second = (Claim(TokenSequence(prompt=[n], max_new=1), (8, 8)) for n in (1, 2))
    for claim in (first, second):
        cache.allocate(claim.sequence, (0, 0))
    assert claimed(first, (5, 5), [first, second], (0, 0), cache)
    assert not claimed(second, (5, 5), [first, second], (0, 0), cache)  # nobody could end
    assert claimed(second, (2, 2), [first, second], (0, 0), cache)
    assert claimed(first, (8, 8), [first, second], (0, 0), cache)
