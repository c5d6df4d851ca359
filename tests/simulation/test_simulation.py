"""The simulation itself: a share of its seeds, that a seed decides everything, and that it catches planted faults."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

from tests.simulation import planting
from tests.simulation.__main__ import Tally, play_seeds, summary
from tests.simulation.running import play
from tests.simulation.shrinking import shrink
from tests.simulation.story import Ask, Fault, Setup, Story, of_seed, read, write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 25))])
def test_nothing_that_must_never_happen_does(seed: int) -> None:
    """No wrong byte, no write into a page that is free, nothing that does not end, nothing left (docs/simulation.md)."""
    assert play(of_seed(seed)).violation is None


def test_a_seed_decides_everything_in_any_process() -> None:
    """Two processes with other orders of hashes have one trace, byte for byte."""
    traces = [_trace(str(order)) for order in (1, 2)]
    assert traces[0] == traces[1]
    assert "Arrived" in traces[0]


def _trace(order: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", "5", "--trace"]
    env = {"PYTHONHASHSEED": order, "PYTHONPATH": ":".join(sys.path)}
    text = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    return text.partition("1 stories")[0]


def test_every_kind_of_fault_and_end_is_reached() -> None:
    """A world that is too kind tests nothing."""
    reached = sum((play(of_seed(seed)).reached for seed in range(28, 48)), start=play(of_seed(27)).reached)
    assert {"Arrived", "Freed", "Expired", "Lost ABORTED", "quarantine", "pool given back"} <= reached.keys()
    assert sum(name.startswith("fault: ") for name in reached) >= 10


def test_jobs_together_count_what_one_counts() -> None:
    whole, parts = play_seeds(range(45, 47), None), Tally()
    for job in range(2):
        parts.add(play_seeds(range(45, 47)[job::2], None))
    parts.cpu = whole.cpu
    assert parts == whole


def test_a_summary_names_what_was_never_reached() -> None:
    tally = Tally(stories=1, reached=Counter({"page from storage": 3}))
    (never,) = [line for line in summary(tally).splitlines() if line.startswith("never reached: ")]
    assert "fault: storage lies" in never
    assert "page from storage" not in never


def test_a_story_is_the_same_after_it_was_written() -> None:
    story = of_seed(3)
    assert read(write(story)) == story


def test_a_story_is_shrunk_to_what_matters() -> None:
    """Of a long story that fails for one request alone, that request is left."""
    story = attrs.evolve(of_seed(0), asks=[Ask(n, n * 0.1, 8) for n in range(1, 9)], faults=[Fault(1.0, "stop")])
    short = shrink(story, "", fails=lambda other: any(ask.id == 5 for ask in other.asks))
    assert short == Story(0, Setup(1, 1, (4, 4)), [Ask(5, 0.5, 1, compute=0.0)], [])


@pytest.mark.parametrize("path", sorted(planting.STORIES.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(path: Path) -> None:
    """Each story ends well, unless its fault is planted."""
    assert play(read(path.read_text())).violation is None


def test_stories_show_the_faults_that_are_planted() -> None:
    """A fault that was caught is caught by its shortest story; `make simulate-faults` tries all of them."""
    command = [sys.executable, "-m", "tests.simulation.planting", "pages are free", "--replay"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "1 of 1 faults are shown by their stories\n")
