"""Pages that a process keeps for several ranks, as a JAX engine does."""

from pathlib import Path

import numpy as np
import pytest

from kvproto import Pool
from kvproto_reference import checkpoint
from kvproto_reference.engine.description import DRAFT, TARGET, Layout, geometry, shards
from kvproto_reference.engine.kept_pages import KeptPages, names_of
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.world import World

FOLDER = checkpoint.CHECKPOINTS / "target-gqa"
PAGE, PAGES, PROMPT = 4, 4, 13


def kept_by(
    storage: Path, pages: int = PAGES, head: Path | None = None, ahead: int = 0
) -> tuple[KeptPages, dict[int, Pool]]:
    folders = [FOLDER] if head is None else [FOLDER, head]
    configs = [checkpoint.load_config(folder) for folder in folders]
    said = geometry(folders, configs, "bytes", Layout(tp=2), PAGE)
    pools = {rank: Pool.allocate(said, pages, rank=rank) for rank in range(2)}
    own = [shards(said, 0)[name] for name in (TARGET, DRAFT)[: len(folders)]]
    return KeptPages(pools, names_of(folders, configs), own, World(), 8, str(storage), ahead), pools


def settle(kept: KeptPages) -> list[dict[str, object]]:
    """What it says until all is stored or read."""
    said = []
    while not said:
        said = kept.turn()
    return said


def serve(kept: KeptPages, sequence: TokenSequence) -> dict[str, int]:
    """Give a request its pages; returns where they were found."""
    kept.begin("one", sequence, len(sequence.prompt) - 1)
    words = settle(kept)
    assert [word["op"] for word in words] == ["fetched"], "one word of a process, whatever ranks it has"
    kept.fetched("one", 0)
    taken = kept.allocate("one", len(sequence.prompt))
    assert taken is not None
    assert sum(taken[1].values()) == taken[0]
    return taken[1]


@pytest.mark.parametrize("lost", [False, True], ids=["all", "one rank's page is not as it was written"])
def test_ranks_of_a_process_find_what_all_of_them_stored(tmp_path: Path, lost: bool) -> None:
    kept, pools = kept_by(tmp_path)
    sequence = TokenSequence(prompt=[*range(PROMPT)], max_new=1)
    assert serve(kept, sequence) == {"device": 0, "host": 0, "storage": 0}
    for rank, pool in pools.items():
        for page in sequence.tables[0]:
            pool.array(TARGET, 0, "k")[page] = 1 + 16 * rank + page
    kept.free(sequence, PROMPT)
    assert {word["rank"] for word in settle(kept)} == {0, 1}
    assert kept.available == [PAGES]
    kept.close(True)
    if lost:
        some = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        some.write_bytes(bytes(some.stat().st_size))

    again, others = kept_by(tmp_path)
    found = TokenSequence(prompt=[*range(PROMPT)], max_new=1)
    where = serve(again, found)
    assert where["storage"] in ((0, 4, 8) if lost else (12,))
    for rank, pool in others.items():
        for old, new in zip(sequence.tables[0][: where["storage"] // PAGE], found.tables[0], strict=False):
            assert (pool.array(TARGET, 0, "k")[new] == 1 + 16 * rank + old).all()
    again.free(found, 0)
    again.close(False)


def test_no_rank_has_pages_of_a_request_for_which_one_has_too_few(tmp_path: Path) -> None:
    kept, _ = kept_by(tmp_path)
    one, other = (TokenSequence(prompt=[*np.arange(10) + 20 * n], max_new=1) for n in range(2))
    serve(kept, one)
    kept.begin("two", other, 9)
    settle(kept)
    kept.fetched("two", 0)
    assert kept.allocate("two", 10) is None
    kept.free(one, 0)
    settle(kept)
    assert kept.allocate("two", 10) is not None
    kept.drop("two")
    kept.free(other, 0)
    kept.close(False)


@pytest.mark.parametrize(
    ("ahead", "found"), [(1, PAGE), (0, 2 * PAGE)], ids=["a head", "a draft that looks at no later token"]
)
def test_rows_of_a_head_are_found_for_the_same_next_token_alone(tmp_path: Path, ahead: int, found: int) -> None:
    """A head's row of a token is computed with the next one, so the last page before two prompts part is not shared."""
    kept, _ = kept_by(tmp_path, 2 * PAGES, checkpoint.CHECKPOINTS / "eagle-gqa", ahead)
    one = TokenSequence(prompt=[*range(PROMPT)], max_new=2)
    serve(kept, one)
    one.append([PROMPT])
    kept.free(one, PROMPT)
    settle(kept)
    other = TokenSequence(prompt=[*range(2 * PAGE), 99, *range(4)], max_new=1)
    assert sum(serve(kept, other).values()) == found
    kept.free(other, 0)
    kept.close(False)
