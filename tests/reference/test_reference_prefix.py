"""What the prefix cache keeps, gives and frees, against a plain account of every page."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Cache, Parallel, lay_out
from kvproto_reference.cache import PageAllocator, Shard
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.sequence import TokenSequence


def shards(dcp: int, interleave: int, page: int, deal: str = "cyclic") -> tuple[Shard, Shard]:
    """A dealt target and a replicated draft."""
    caches = [Cache.mla(n, 1, latent=8, rope=8, page=page, model=m) for m, n in enumerate(("target", "draft"))]
    groups = lay_out(caches, Parallel(tp=dcp, dcp=dcp, interleave=interleave, deal=deal)).groups
    return Shard(groups[0], 0), Shard(groups[1], 0)


def request(prompt: list[int]) -> TokenSequence:
    return TokenSequence(prompt=prompt, max_new=3)


def finish(sequence: TokenSequence) -> None:
    sequence.append([99, 98, 97])


def test_nothing_is_evicted_for_a_sequence_that_cannot_begin_yet() -> None:
    """A pool of which nothing is kept, as that of sliding windows, has too few pages for it."""
    both = shards(1, 1, 4)
    cache = PrefixCache([PageAllocator(n, 1) for n in (4, 4, 2)], both, hybrid=True)
    left, running, waiting = (request([kind] * 8) for kind in (1, 2, 3))
    assert cache.allocate(left, (2, 2, 2)) == 0
    cache.free(left, 8)
    assert cache.allocate(running, (2, 2, 2)) == 0
    assert cache.allocate(waiting, (2, 2, 2)) is None
    assert cache.available == [2, 2, 0]
    cache.free(running, 0)
    assert cache.allocate(request([1] * 9), (3, 3, 2)) == 8


Steps = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(1, 1, 4), (2, 2, 4), (2, 1, 2), (3, 3, 3), (2, 2, 4, "zigzag")]), Steps, st.booleans())
def test_no_page_is_lost_or_given_twice(deal: Any, steps: list[tuple[int, int, bool, int]], hybrid: bool) -> None:
    """Of a hybrid, the page in which the state of a prompt arrives is the sequence's own too."""
    target, draft = shards(*deal)
    pages = PageAllocator(14, 1), PageAllocator(30, 2)
    cache, running, written = PrefixCache(pages, (target, draft), hybrid=hybrid), [], {}
    for length, kind, lost, which in steps:
        prompt = ([kind] * length + [7] * length)[: length + 2]
        sequence = request(prompt)
        need = target.pages(len(prompt) + 2), draft.pages(len(prompt) + 2)
        cached = cache.allocate(sequence, need)
        if cached is not None:
            assert cached % cache.unit == 0
            assert cached <= len(prompt) - hybrid
            assert [*map(len, sequence.tables)] == list(need)
            for model in (0, 1):  # what it holds already was written by the same tokens
                for i, page in enumerate(
                    sequence.tables[model][: cached // cache.unit * (need[model] and cache._each[model])]
                ):
                    assert written[model, page] == (i, tuple(prompt[: (i // cache._each[model] + 1) * cache.unit]))
            running.append((sequence, cached))
        if running and (lost or cached is None):
            one, had = running.pop(which % len(running))
            if not lost:
                finish(one)
                for model in (0, 1):
                    tokens = one.prompt + one.generated
                    for i, page in enumerate(one.tables[model]):
                        if i >= had // cache.unit * cache._each[model]:
                            written[model, page] = i, tuple(tokens[: (i // cache._each[model] + 1) * cache.unit])
            cache.free(one, one.valid if not lost else 0)
        held = [{p for s, _ in running for p in s.tables[model]} for model in (0, 1)]
        fresh = [[p for s, had in running for p in s.tables[m][had // cache.unit * cache._each[m] :]] for m in (0, 1)]
        assert all(len(set(some)) == len(some) for some in fresh)
        assert cache.available == [pages[m]._pages - len(held[m]) for m in (0, 1)]
    for one, _ in running:
        cache.free(one, 0)
    assert cache.available == [14, 30]
    big = request([5] * 3)
    assert cache.allocate(big, (14, 30)) == 0  # everything can be had again


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)), max_size=20))
def test_what_runs_is_found_while_it_runs(steps: list[tuple[int, int, int]]) -> None:
    """Others read the rows of a sequence that goes on; none of its pages are given to anybody else."""
    both = shards(1, 1, 4)
    cache, running = PrefixCache([PageAllocator(40, 1), PageAllocator(40, 2)], both), list[TokenSequence]()
    for kind, units, which in steps:
        one = request([kind] * 4 * units + [9])
        if cache.allocate(one, (units + 1, units + 1)) is None:
            cache.free(running.pop(which % len(running)), 0)
            continue
        running.append(one)
        finish(one)
        cache.keep(one, one.valid)
        again = request([*one.prompt, *one.generated])
        found = cache.allocate(again, (0, 0))
        assert found == one.valid // 4 * 4
        for model in (0, 1):
            assert found is not None
            same = again.tables[model] == one.tables[model][: found // 4]
            assert same or sum(s.prompt == one.prompt for s in running) > 1  # another has left the same rows first
        cache.free(again, found)
        assert all(len({*t}) == len(t) for s in running for t in s.tables)
    for one in running:
        cache.free(one, one.valid)
    assert cache.available == [40, 40]


def test_runs_that_go_on_in_the_next_page_keep_nothing() -> None:
    target, draft = shards(2, 3, 4)
    pages = PageAllocator(8), PageAllocator(8)
    cache = PrefixCache(pages, (target, draft))
    for _ in range(2):
        one = request(list(range(12)))
        assert cache.allocate(one, (2, 3)) == 0
        finish(one)
        cache.free(one, one.valid)
    assert cache.available == [pages[0].available, pages[1].available] == [8, 8]
