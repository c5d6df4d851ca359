"""The demo of conversations over tiers, run small; and what it says of a draft that is not loaded back."""

import json
from pathlib import Path

import attrs
import pytest
import torch

from kvproto.copying.program import CopyProgram, Operations
from kvproto.transport.base import Paging, Regions
from kvproto.transport.shm.transport import HostPager
from kvproto_reference.demo import tiers
from kvproto_reference.demo.__main__ import main
from kvproto_reference.demo.options import checkpoint_folder, draft_folder
from kvproto_reference.engine.tiered_engine import TieredEngine
from kvproto_reference.errors import OutOfPages
from tests.processes import Command, imported

imported("kvproto_reference.demo.__main__")

FOLDERS = checkpoint_folder("target", "mla"), checkpoint_folder("draft", "gqa")
HYBRID = checkpoint_folder("target", "hybrid")
SMALL = {"page_size": 4, "max_new": 5, "chunk": 64, "k": 4}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "folders",
    [FOLDERS, (FOLDERS[0], draft_folder("eagle", 4, "mla")), (HYBRID, FOLDERS[1])],
    ids=["gqa", "eagle", "hybrid"],
)
def test_turns_find_their_pages_wherever_they_went(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row of an EAGLE-3 head's page is of the next token too (KVP-TIER-AHEAD); a hybrid's page has a state."""
    assert tiers.run(folders, *SMALL.values(), None) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdicts"] == {"tokens": True, "acceptance": True, "tiers": True}
    for name in ("device", "host", "storage"):
        assert any(turn[name] for turn in said["turns"])
    for turn in said["turns"]:
        assert turn["acceptance"] == turn["never_evicted_acceptance"]
        if turn["turn"] > 1:
            assert turn["device"] + turn["host"] + turn["storage"] >= turn["prompt_tokens"] - 5 * SMALL["page_size"]


def test_a_draft_that_is_not_loaded_back_costs_acceptance_and_no_token() -> None:
    """The fault of the field: nothing crashes, and every token is right."""

    class WithoutDraft(HostPager):
        def copy(self, program: CopyProgram, sources: Regions, sinks: Regions) -> Paging:
            target = attrs.evolve(program, operations=Operations(program.ops[program.ops["model"] == 0]))
            return super().copy(target, sources, sinks)

    def use(engine: TieredEngine) -> None:
        engine.tiers.copies.pager = WithoutDraft()

    turns, _ = tiers.play(FOLDERS, **SMALL, use=use)
    assert tiers.verdict(turns) == {"tokens": True, "acceptance": False, "tiers": True}
    kept, never = (sum(getattr(turn, name).stats.steps for turn in turns) for name in ("kept", "never"))
    assert kept > never


def test_a_prompt_that_no_device_could_hold_is_refused_and_the_next_is_answered() -> None:
    engine = TieredEngine(*FOLDERS, pages=4, host=4, page_size=8)
    with pytest.raises(OutOfPages):
        engine.answer(range(40), 2)
    assert len(engine.answer(range(20), 2).tokens) == 2
    engine.close()
    assert engine.tiers.device.slots.free + engine.tiers.device.slots.idle == 4


@pytest.mark.parametrize("place", ["", "packs:"])
def test_an_engine_finds_the_conversation_of_another_with_other_pages(tmp_path: Path, place: str) -> None:
    """One prefills and answers, the other goes on from its pages of another length, whose tokens are those of one engine."""
    first, second, alone = (
        TieredEngine(*FOLDERS, pages=32, host=32, page_size=size, storage=storage)
        for size, storage in ((4, f"{place}{tmp_path}"), (8, f"{place}{tmp_path}"), (8, None))
    )
    prompt = [*range(60)]
    answer = first.answer(prompt, 8)
    first.tiers.drain()
    prompt += [*answer.tokens, 7, 8, 9]
    goes_on, right = second.answer(prompt, 8), alone.answer(prompt, 8)
    assert goes_on.storage >= 56
    assert (goes_on.tokens, goes_on.stats) == (right.tokens, right.stats)
    for engine in (first, second, alone):
        engine.close()


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        ["--prefill-tp", "2", "--decode-tp", "2", "--dcp", "2"],
        ["--target", "hybrid", "--prefill-tp", "2", "--decode-tp", "2", "--dcp", "2"],
    ],
    ids=["one rank", "ranks", "hybrid"],
)
def test_two_engines_find_what_they_and_each_other_have_kept(sizes: list[str]) -> None:
    """Ranks agree on what all have; no token and no acceptance is other than where nothing is evicted."""
    ended = Command(main, ["--tiers", "--json", "--page-size", "4", "--max-new", "5", *sizes]).wait()
    assert ended.status == 0, ended.said
    said = json.loads(ended.out)
    assert said["verdicts"].get("served_generated", bool(sizes))  # of 8 tokens a page none is of what decode generated
    served = said["served"]
    assert len(served) == 2 * tiers.CONVERSATIONS * tiers.TURNS
    for place in ("host", "storage"):
        assert any(turn["found"].get("prefill", {}).get(place) and turn["handed_over"] for turn in served)
        assert any(turn["found"].get("decode", {}).get(place) for turn in served) or sizes
    assert said["verdicts"]["served_told"]
    for turn in served:
        assert turn["same_tokens"]
        assert turn["told"] <= sum(turn["found"]["prefill"].values())
        for found in turn["found"].values():
            assert sum(found.values()) % 4 == 0
