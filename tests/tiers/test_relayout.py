"""Pages of one size, deal and page length that a rank of another finds: each byte is held against its place in the prompt."""

import hashlib
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import lcm
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Cache as Group
from kvproto import Parallel, lay_out
from kvproto.copying.program import RankLayout
from kvproto.planning.geometry import Geometry, decode_geometry, encode_geometry
from kvproto.rank.pool import columns_without_gaps
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import PageCache
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout, page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader, geometry_key
from kvproto.tiers.storage_io import StorageIO
from kvproto.tiers.store import LONGEST
from kvproto.transport.memory import allocate
from kvproto.transport.shm.transport import HostPager
from tests.tiers.schedules import Memory

TOKENS = np.arange(200, 200 + 97)


def engine(
    tp: int = 1, dcp: int = 1, pp: int = 1, interleave: int = 1, mla: bool = False, cp: int = 1, heads: int = 4
) -> Geometry:
    target = (
        Group.mla("target", 4, latent=6, rope=2, page=4)
        if mla
        else Group.gqa("target", 4, kv_heads=heads, head_dim=3, page=4)
    )
    draft = Group.gqa("draft", 1, kv_heads=2, head_dim=2, page=4, model=1)
    dealt = dcp > 1 or cp > 1
    groups = [target.sharded() if dealt else target, draft]
    return lay_out(groups, Parallel(tp=tp, dcp=dcp, pp=pp, cp=cp, interleave=interleave))


@lru_cache(maxsize=1 << 15)
def content(model: int, layer: int, part: int, token: int, lo: int, hi: int) -> bytes:
    """Bytes [lo, hi) of the lanes of a part, at one token."""
    places = (((((model * 7 + layer) * 5 + part) * 211 + token) * 1009 + at) * 2654435761 for at in range(lo, hi))
    return bytes(place >> 20 & 255 for place in places)


def right(geometry: Geometry, rank: int, layout: PageLayout, i: int) -> dict[int, bytes]:
    """The bytes of page i, a byte at a time: what a byte is depends on its global coordinate alone."""
    (own,) = (r for r in geometry.ranks if r.rank == rank)
    made = {}
    for part in layout.components:
        (share,) = (s for s in own.owns if s.group == part.group)
        (group,) = (g for g in geometry.groups if g.id == part.group)
        out = bytearray()
        for layer in share.layers.tolist():
            for p, spec in enumerate(group.parts):
                for token in range(i * layout.page, (i + 1) * layout.page):
                    if group.cp_size > 1 and token // (group.interleave or 1) % group.cp_size != share.cp_rank:
                        continue
                    for span in (span for span in share.lanes if span.part == p):
                        lo, hi = span.lo * spec.lane_bytes, span.hi * spec.lane_bytes
                        out += content(group.model, layer, p, token, lo, hi)
        assert len(out) == part.length
        made[part.group] = bytes(out)
    return made


def chain(page: int, tokens: Sequence[int] | np.ndarray = TOKENS) -> Chain:
    made = Chain(bytes(32), page)
    made.extend(tokens)
    return made


def draft_of(geometry: Geometry) -> list[int]:
    return [group.id for group in geometry.groups if group.model]


def written(store: Memory | FileStore, geometry: Geometry, page: int, pages: int) -> list[PageLayout]:
    """What an engine's ranks leave in a store."""
    layouts = []
    for rank in [r.rank for r in geometry.ranks]:
        layout = page_layout(geometry, rank, page, draft_of(geometry))
        RelayoutReader(store, geometry, rank, layout).publish_geometry()
        page_store = PageStore(store, layout)
        for i in range(min(pages, len(chain(page).ids(layout.form)))):
            assert page_store.write(chain(page), i, right(geometry, rank, layout, i))
        layouts.append(layout)
    return layouts


def read(store: Memory | FileStore, geometry: Geometry, page: int, first: int = 0) -> list[int]:
    """How many pages from `first` on each rank of an engine finds; all of them are right."""
    found = []
    for rank in [r.rank for r in geometry.ranks]:
        layout = page_layout(geometry, rank, page, draft_of(geometry))
        came = RelayoutReader(store, geometry, rank, layout).read(chain(page), first)
        for i, data in enumerate(came, first):
            assert data == right(geometry, rank, layout, i)
        found.append(len(came))
    return found


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (engine(tp=2), engine(tp=4)),
        (engine(tp=4), engine(tp=2)),
        (engine(tp=2), engine(tp=2, pp=2)),
        (engine(tp=2, mla=True), engine(tp=2, dcp=2, mla=True)),
        (engine(tp=2, dcp=2, interleave=2, mla=True), engine(mla=True)),
        (engine(cp=2, interleave=4), engine(tp=4)),
        (engine(tp=4, dcp=2, heads=2), engine(tp=2, heads=2)),
        (engine(heads=2), engine(tp=4, dcp=2, interleave=4, heads=2)),
    ],
    ids=[
        "TP 2 to 4",
        "TP 4 to 2",
        "stages",
        "DCP 2",
        "from DCP 2",
        "from CP 2",
        "from GQA under DCP 2",
        "GQA under DCP 2",
    ],
)
@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (8, 16), (16, 8), (8, 24)])
def test_a_rank_of_another_size_finds_the_pages(writer: Geometry, reader: Geometry, theirs: int, ours: int) -> None:
    """KVP-TIER-SIZE: all pages of 97 tokens but the last token's."""
    store = Memory()
    written(store, writer, theirs, 100)
    whole = 96 // theirs * theirs // ours
    assert read(store, reader, ours) == [whole] * len(reader.ranks)
    assert read(store, reader, ours, 2) == [whole - 2] * len(reader.ranks)


@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (8, 16), (16, 8), (8, 24)])
@pytest.mark.parametrize("since", [0, 1, 3, 5, 6])
def test_windows_that_a_writer_lacks_at_first_come_from_where_it_has_them(theirs: int, ours: int, since: int) -> None:
    """Its draft attends to 20 tokens and is kept from page `since` on; all pages of the target come."""
    store, writer, reader = Memory(), engine(tp=2), engine(tp=4)
    draft = draft_of(writer)
    for rank in range(2):
        layout = page_layout(writer, rank, theirs, draft, dict.fromkeys(draft, 20))
        RelayoutReader(store, writer, rank, layout).publish_geometry()
        for i in range(96 // theirs):
            data = right(writer, rank, layout, i)
            held = {group: each for group, each in data.items() if i >= since or group not in draft}
            assert PageStore(store, layout).write(chain(theirs), i, held)
    whole = 96 // theirs * theirs // ours
    both = lcm(theirs, ours)
    begins = -(-since * theirs // both) * both // ours
    for rank in range(4):
        layout = page_layout(reader, rank, ours, draft, dict.fromkeys(draft, 20))
        came = RelayoutReader(store, reader, rank, layout).read(chain(ours), 0)
        assert len(came) == whole
        for i, data in enumerate(came):
            expected = right(reader, rank, layout, i)
            assert data == {group: each for group, each in expected.items() if i >= begins or group not in draft}


def sizes(mla: bool) -> st.SearchStrategy[Geometry]:
    """Engines of one model; two KV heads are dealt by DCP among the ranks that share one, a latent among any."""
    return st.builds(
        lambda tp, pp, deal, interleave: engine(
            tp=tp, pp=pp, dcp=2 if deal == "dcp" and tp > (1 if mla else 2) else 1, cp=2 if deal == "cp" else 1,
            interleave=interleave, mla=mla, heads=2,
        ),
        st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["", "dcp", "cp"]),
        st.sampled_from([1, 2, 4]),
    )  # fmt: skip


pairs = st.booleans().flatmap(lambda mla: st.tuples(sizes(mla), sizes(mla)))


@settings(max_examples=40, deadline=None)
@given(pairs, st.sampled_from([8, 16, 24]), st.sampled_from([8, 16, 32]), st.integers(0, 12), st.integers(0, 4))
def test_whatever_the_sizes_are(
    pair: tuple[Geometry, Geometry], theirs: int, ours: int, pages: int, first: int
) -> None:
    (writer, reader), store = pair, Memory()
    layouts = written(store, writer, theirs, pages)
    there = min(pages, 96 // theirs) * theirs // ours
    for rank, count in enumerate(read(store, reader, ours, first)):
        same = page_layout(reader, rank, ours, draft_of(reader)).geometry in {layout.geometry for layout in layouts}
        assert same or count == max(there - first, 0)


@pytest.mark.parametrize("page", ["0", "-8", "1", "4294967296", "9" * 30, "8.8", "x", ""])
def test_a_record_of_pages_that_nobody_can_have_is_left_alone(page: str) -> None:
    store, writer, reader = Memory(), engine(tp=2), engine(tp=4)
    written(store, writer, 8, 100)
    for key in [key for key in store.data if key.startswith("g/")]:
        store.put(f"{key.partition('.')[0]}.{page}", store.data[key])
    assert read(store, reader, 8) == [12] * 4


@pytest.mark.parametrize("wrong", ["two ranks", "another number", "a replica"])
def test_a_record_of_anything_but_one_rank_is_left_alone(wrong: str) -> None:
    """Pages of ranks that no record describes, or that several ranks of one record would claim."""
    store, writer, reader = Memory(), engine(), engine(tp=2)
    (layout,) = written(store, writer, 8, 100)
    key = geometry_key(layout.geometry, 8)
    one = decode_geometry(store.data.pop(key))
    (rank,) = one.ranks
    other = {
        "two ranks": attrs.evolve(one, ranks=(rank, attrs.evolve(rank, rank=1))),
        "another number": attrs.evolve(one, ranks=(attrs.evolve(rank, rank=1),)),
        "a replica": attrs.evolve(one, replica=1),
    }[wrong]
    data = encode_geometry(other)
    digest = hashlib.sha256(data).digest()
    store.put(geometry_key(digest, 8), data)
    page_store = PageStore(store, attrs.evolve(layout, geometry=digest))
    for i in range(12):
        assert page_store.write(chain(8), i, right(writer, 0, layout, i))
    assert read(store, reader, 8) == [0, 0]


def test_what_a_rank_lacks_or_has_damaged_shortens_the_hit(tmp_path: Path) -> None:
    store, writer, reader = FileStore(tmp_path), engine(tp=2), engine(tp=4)
    layouts = written(store, writer, 8, 5)
    for path in (tmp_path / "m").rglob(f"{chain(8).ahead[3].hex()}.{layouts[1].geometry.hex()}"):
        path.unlink()
    assert read(store, reader, 8) == [5, 5, 3, 3]
    for path in (tmp_path / "o").rglob(f"{chain(8).ahead[1].hex()}.{layouts[0].geometry.hex()}.*"):
        path.write_bytes(bytes(len(path.read_bytes())))
    assert read(store, reader, 8) == [0, 0, 3, 3]


def test_a_record_that_is_not_what_its_name_says_is_no_record() -> None:
    """KVP-TIER-RECORD."""
    store, writer = Memory(), engine(tp=2)
    layouts = written(store, writer, 8, 5)
    for layout in layouts:
        key = geometry_key(layout.geometry, 8)
        store.put(key, store.data[key][:-1])
    store.put("g/nothing", b"1")
    assert read(store, engine(tp=4), 8) == [0] * 4


def test_what_is_too_long_is_not_read() -> None:
    """A record, and an object: whoever reads pages of other layouts knows how long they may be."""

    class Watched(Memory):
        def get(self, key: str) -> bytes | None:
            data = super().get(key)
            assert data is None or len(data) <= LONGEST
            return data

    store = Watched()
    layouts = written(store, engine(tp=2), 8, 5)
    store.put(geometry_key(bytes(32), 8), bytes(LONGEST + 1))
    assert sum(read(store, engine(tp=4), 8)) > 0
    for key in [key for key in store.keys("o") if layouts[0].geometry.hex() in key]:
        store.put(key, bytes(LONGEST + 1))
    assert read(store, engine(tp=4), 8)[:2] == [0, 0]


def test_another_namespace_is_another_prompt() -> None:
    """KVP-TIER-NAMESPACE."""
    store, geometry = Memory(), engine(tp=2)
    written(store, geometry, 8, 5)
    one = engine(tp=4)
    other = Chain(b"\1" * 32, 8)
    other.extend(TOKENS)
    assert RelayoutReader(store, one, 0, page_layout(one, 0, 8, draft_of(one))).read(other, 0) == []


def test_a_cache_takes_what_it_lacks_from_others(tmp_path: Path) -> None:
    """The first pages in its own geometry, the others from ranks of another; then they are in its pool."""
    store, reader = FileStore(tmp_path), engine(tp=4)
    written(store, engine(tp=2), 8, 5)
    layout = page_layout(reader, 1, 8, draft_of(reader))
    page_store = PageStore(store, layout)
    for i in range(2):
        assert page_store.write(chain(8), i, right(reader, 1, layout, i))
    columns, length = columns_without_gaps(reader, 1, {group.id: 32 for group in reader.groups}, heads_first=True)
    for threads in (1, 4):
        copies = HostCopies(layout, RankLayout(reader, 1, columns), {0: allocate(length)}, 8, HostPager())
        page_store.others = RelayoutReader(store, reader, 1, layout)
        cache = PageCache(copies, StorageIO(page_store, threads=threads))
        fetch = cache.fetch(chain(8), float("inf"))
        while not fetch.over(0.0):
            continue
        assert fetch.take() == 5
        for i, id in enumerate(chain(8).ahead[:5]):
            slot = cache.host.slot(id)
            assert slot is not None
            assert {group: bytes(view) for group, view in copies.page(slot).items()} == right(reader, 1, layout, i)
        cache.close()


def test_two_engines_of_other_sizes_write_and_evict_at_once_over_one_folder(tmp_path: Path) -> None:
    """Each has room for some of the prompts; all that a reader of either finds meanwhile is right, and some is found."""
    sizes_, steps, begin = [(engine(), 8), (engine(tp=2), 16)], 60, threading.Barrier(2)

    def of(who: int, layout: PageLayout, geometry: Geometry, rank: int, i: int) -> dict[int, bytes]:
        """Bytes of a prompt's page, other ones for each prompt."""
        table = bytes(byte ^ who for byte in range(256))
        return {group: data.translate(table) for group, data in right(geometry, rank, layout, i).items()}

    def run(number: int) -> tuple[int, int, int]:
        (geometry, page), rng = sizes_[number], random.Random(number)
        layouts = [page_layout(geometry, r.rank, page, draft_of(geometry)) for r in geometry.ranks]
        most = 3 * 96 // page * sum(part.length for part in layouts[0].components)  # three prompts of eight
        ranks = [
            (
                rank,
                layout,
                PageStore(FileStore(tmp_path), layout, most // 2, most),
                RelayoutReader(FileStore(tmp_path), geometry, rank, layout),
            )
            for rank, layout in enumerate(layouts)
        ]
        for *_, others in ranks:
            others.publish_geometry()
        begin.wait()
        own = theirs = 0
        for _ in range(steps):
            who, pages = rng.randrange(8), rng.randrange(1, 96 // page + 1)
            for rank, layout, page_store, _ in ranks:
                for i in range(pages):
                    page_store.write(chain(page, TOKENS + 1000 * who), i, of(who, layout, geometry, rank, i))
            who = rng.randrange(8)
            for rank, layout, page_store, others in ranks:
                asked = chain(page, TOKENS + 1000 * who)
                for i in range(96 // page):
                    if (data := page_store.read(asked, i)) is not None:
                        assert data == of(who, layout, geometry, rank, i)
                        own += 1
                for i, data in enumerate(others.read(asked, 0)):
                    assert data == of(who, layout, geometry, rank, i)
                    theirs += 1
        return own, theirs, sum(page_store.counts["evicted"] for *_, page_store, _ in ranks)

    with ThreadPoolExecutor(2) as pool:
        for own, theirs, evicted in pool.map(run, range(2)):
            assert own > 0
            assert theirs > 0
            assert evicted > 0
