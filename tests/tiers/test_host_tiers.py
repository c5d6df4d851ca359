"""Tiers behind a pool whose pages the engine itself gives to requests: through the host, and by storage alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvproto import Cache, LocalError, Pool, lay_out
from kvproto.tiers import Chain, HostTiers, StoredPages
from kvproto.wire.enums import KeyForm

NAMES = {"weights.target": "test 1", "rope.target": "none", "dtype.target": "float32"}
TOKENS = list(range(100, 119))
PAGE, PAGES = 4, 16


def pool(page: int = PAGE, draft: bool = True) -> Pool:
    groups = [Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=page)]
    if draft:
        groups.append(Cache.gqa("draft", 1, kv_heads=1, head_dim=2, page=page, model=1))
    return Pool.allocate(lay_out(groups), PAGES * PAGE // page)


def arrays(of: Pool) -> list[np.ndarray]:
    """K and V of every layer, [page, ...] of bytes."""
    return [of.array(g.name, n, part) for g in of.geometry.groups for n in range(2 - g.model) for part in ("k", "v")]


def write(of: Pool, slots: Sequence[int], first: int = 0, page: int = PAGE) -> None:
    """Rows that differ by layer, part and token, of a prompt from page `first` on."""
    for n, array in enumerate(arrays(of)):
        for i, slot in enumerate(slots):
            tokens = (first + i) * page + np.arange(page)
            array[slot] = (tokens * 7 + n * 31)[:, None, None] % 251


def read(of: Pool, slots: Sequence[int]) -> bytes:
    """The rows of slots, one token after another."""
    return b"".join(array[list(slots)].tobytes() for array in arrays(of))


def host_tiers(of: Pool, storage: Path | None = None, **names: str) -> HostTiers:
    return HostTiers(of, NAMES | names, page=PAGE, host_bytes=1 << 16, storage=storage)


def loaded(tiers: HostTiers, chain: Chain, first: int, slots: Sequence[int]) -> bool:
    """Load pages that are on the host; whether they arrived."""
    told: list[bool] = []
    hit = tiers.find(chain)
    tiers.load(hit, first, slots, told.append)
    tiers.settle()
    hit.close()
    return told == [True]


def fetched(tiers: HostTiers, chain: Chain) -> int:
    fetch = tiers.fetch(chain, float("inf"))
    while not fetch.over(0.0):
        continue
    return fetch.take()


def test_what_slots_hold_is_saved_and_loaded_into_others() -> None:
    of = pool()
    tiers, chain = host_tiers(of), host_tiers(of).chain(TOKENS)
    write(of, [9, 3, 7, 1])
    tiers.save(chain, [9, 3, 7, 1])
    assert len(tiers.host.ids()) == 0
    tiers.step()
    assert len(tiers.host.ids()) == 4
    assert loaded(tiers, chain, 1, [4, 5, 6])
    assert read(of, [4, 5, 6]) == read(of, [3, 7, 1])


def test_pages_that_the_host_has_are_not_copied_again() -> None:
    of = pool()
    tiers = host_tiers(of)
    chain = tiers.chain(TOKENS)
    for slots in ([0, 1], [0, 1], [0, 1, 2]):
        tiers.save(chain, slots)
        tiers.step()
    assert tiers.moved["to_host", 0] == 3 * tiers.copies.layout.lengths[0]


def test_another_process_finds_target_and_draft_in_storage(tmp_path: Path) -> None:
    one, two = pool(), pool()
    write(one, [2, 4, 6])
    first = host_tiers(one, tmp_path)
    first.save(first.chain(TOKENS), [2, 4, 6])
    first.drain()
    first.close()
    second = host_tiers(two, tmp_path)
    chain = second.chain(TOKENS)
    assert fetched(second, chain) == 3
    assert loaded(second, chain, 0, [8, 9, 10])
    assert read(two, [8, 9, 10]) == read(one, [2, 4, 6])
    assert (second.counts["host"], second.counts["fetched"]) == (3, 3)


@pytest.mark.parametrize("other", [{"weights.target": "test 2"}, {"salt": "another tenant"}])
def test_pages_of_other_names_are_not_found(tmp_path: Path, other: dict[str, str]) -> None:
    of = pool()
    first = host_tiers(of, tmp_path)
    first.save(first.chain(TOKENS), [0, 1])
    first.drain()
    assert fetched(first, first.chain(TOKENS)) == 0  # the host has them
    stranger = host_tiers(pool(), tmp_path, **other)
    assert fetched(stranger, stranger.chain(TOKENS)) == 0


def test_a_salt_of_a_request_is_a_name_like_others() -> None:
    of = pool()
    assert host_tiers(of).chain(TOKENS, salt="a").own == host_tiers(of, salt="a").chain(TOKENS).own


def test_metrics_are_those_of_the_host() -> None:
    tiers = host_tiers(pool())
    tiers.save(tiers.chain(TOKENS), [0, 1])
    tiers.step()
    slots = {s["labels"]["tier"] for s in tiers.metrics("e") if s["name"] == "kvproto_tier_slots"}
    assert slots == {"host"}


def stored(of: Pool, storage: Path, page: int = PAGE, ahead: Sequence[str] = (), **names: str) -> StoredPages:
    return StoredPages(of, NAMES | names, page=page, storage=storage, ahead=ahead)


def test_storage_alone_puts_counts_and_gets(tmp_path: Path) -> None:
    one, two = pool(), pool()
    write(one, [5, 1, 3])
    first, second = stored(one, tmp_path), stored(two, tmp_path)
    chain = first.chain(TOKENS)
    assert first.put(chain, 0, [5, 1, 3]) == [True] * 3
    assert second.count(chain, 0, 4) == 3
    assert second.count(chain, 1, 2) == 1
    assert second.get(chain, 0, [7, 8, 9, 10]) == 3
    assert read(two, [7, 8, 9]) == read(one, [5, 1, 3])


def test_more_pages_than_are_copied_at_once(tmp_path: Path) -> None:
    geometry = lay_out([Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=1)])
    one, two = Pool.allocate(geometry, 80), Pool.allocate(geometry, 80)
    one.array("kv", 0, "k")[:] = np.arange(80, dtype=np.uint8)[:, None, None, None]
    first, second = stored(one, tmp_path, page=1), stored(two, tmp_path, page=1)
    chain = first.chain(range(80))
    assert sum(first.put(chain, 0, range(80))) == 80
    assert second.get(chain, 0, range(80)) == 80
    assert np.array_equal(one.array("kv", 0, "k"), two.array("kv", 0, "k"))


def test_pages_of_another_length_are_counted_and_got(tmp_path: Path) -> None:
    one, two = pool(), pool(page=2 * PAGE)
    write(one, range(4))
    first = stored(one, tmp_path)
    first.put(first.chain(TOKENS), 0, range(4))
    second = stored(two, tmp_path, page=2 * PAGE)
    chain = second.chain(TOKENS)
    assert second.count(chain, 0, 2) == 2
    assert second.get(chain, 0, [3, 1]) == 2
    wanted = pool(page=2 * PAGE)
    write(wanted, [3, 1], page=2 * PAGE)
    assert read(two, [3, 1]) == read(wanted, [3, 1])


def test_a_page_without_the_draft_is_none_for_an_engine_with_one(tmp_path: Path) -> None:
    one = pool(draft=False)
    first = stored(one, tmp_path)
    first.put(first.chain(TOKENS), 0, [0, 1])
    second = stored(pool(), tmp_path)
    assert second.count(second.chain(TOKENS), 0, 4) == 0


def test_a_flipped_bit_in_storage_is_not_served(tmp_path: Path) -> None:
    of = pool()
    pages = stored(of, tmp_path)
    chain = pages.chain(TOKENS)
    pages.put(chain, 0, [0, 1, 2])
    (wrong,) = (tmp_path / "o").rglob(f"{chain.own[1].hex()}.*.0.*")
    data = bytearray(wrong.read_bytes())
    data[5] ^= 1
    wrong.write_bytes(data)
    assert pages.get(chain, 0, [4, 5, 6]) == 1
    assert pages.count(chain, 0, 3) == 1  # and it is deleted
    assert pages.page_store.counts["damaged"] == 1


def test_pages_that_look_ahead_are_found_for_the_same_next_token_alone(tmp_path: Path) -> None:
    pages = stored(pool(), tmp_path, ahead=["draft"])
    assert pages.layout.form is KeyForm.AHEAD
    pages.put(pages.chain(TOKENS), 0, [0, 1])
    assert pages.count(pages.chain(TOKENS[:9]), 0, 2) == 2
    assert pages.count(pages.chain([*TOKENS[:8], 7]), 0, 2) == 1


def test_only_pages_that_have_ids_are_counted(tmp_path: Path) -> None:
    pages = stored(pool(), tmp_path)
    with pytest.raises(LocalError, match="last"):
        pages.count(pages.chain(TOKENS), 0, 5)
