"""`python -m tests.simulation SEEDS [--trace] [--seconds S] [--jobs N]`: plays the stories of seeds, such as 17 or 0..999.

A violation prints its seed, the commit and its shortest story, and the status is 1. --trace prints all that happens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs

from tests.simulation.reached import KINDS
from tests.simulation.running import play
from tests.simulation.shrinking import shrink
from tests.simulation.story import Story, of_seed, read, write


@attrs.define
class Tally:
    """The figures of stories that were played."""

    stories: int = 0
    violations: int = 0
    simulated: float = 0.0
    """Seconds."""
    cpu: float = 0.0
    """Seconds."""
    events: int = 0
    reached: Counter[str] = attrs.Factory(Counter)

    def add(self, other: Tally) -> None:
        for field in attrs.fields(Tally):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def commit() -> str:
    """The commit of this checkout, for display."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def report(story: Story) -> None:
    """Print the shortest story with the violation of this one, and what happens in it."""
    found = play(story).violation
    assert found is not None
    print(f"seed {story.seed} at commit {commit()}: {found}", flush=True)
    short = shrink(story, found.kind)
    result = play(short)
    print("\n".join((f"the shortest story, of {len(short)} steps:", *short.lines(), write(short), "how it ends:")))
    print("\n".join(result.lines[-40:]))
    print(f"replay: make simulate SEEDS={story.seed} ARGS=--trace", flush=True)


def play_all(stories: Iterable[Story], seconds: float | None, trace: bool = False) -> Tally:
    """Play stories, for so many seconds of CPU time at most, and report violations."""
    tally, began = Tally(), time.process_time()
    for story in stories:
        if seconds is not None and time.process_time() - began > seconds:
            break
        result = play(story, trace)
        if trace:
            print("\n".join((*story.lines(), *result.lines, f"digest {result.digest}")))
        wrong = result.violation is not None
        tally.add(Tally(1, wrong, result.seconds, 0.0, result.events, result.reached))
        if wrong:
            report(story)
    tally.cpu = time.process_time() - began
    return tally


def play_seeds(seeds: range, seconds: float | None) -> Tally:
    """Play the stories of seeds, as a job does."""
    return play_all(map(of_seed, seeds), seconds)


def summary(tally: Tally) -> str:
    """All figures, and the kinds of states that were never reached."""
    cpu, violations, simulated = max(tally.cpu, 1e-9), tally.violations, tally.simulated
    lines = [
        f"{tally.stories:,} stories, {violations} with a violation; "
        f"{simulated:,.0f} s simulated in {cpu:,.0f} s of CPU: {simulated / cpu:,.0f} to 1,",
        f"{tally.stories / cpu:.1f} stories a second of CPU, {tally.events:,} events",
        *(f"{count:9,} {name}" for name, count in sorted(tally.reached.items())),
    ]
    never = sorted(KINDS - tally.reached.keys())
    return "\n".join((*lines, *([f"never reached: {', '.join(never)}"] if never else ())))


def main() -> int:
    """Play seeds; the number of violations decides the status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="17 or 0..999, or the file of a story")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds of CPU time, in each job")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.seeds.endswith(".json"):
        with open(options.seeds) as file:
            tally = play_all([read(file.read())], None, options.trace)
    else:
        first, _, last = options.seeds.partition("..")
        seeds = range(int(first), int(last or first) + 1)
        if options.jobs == 1:
            tally = play_all(map(of_seed, seeds), options.seconds, options.trace)
        else:
            tally, each = Tally(), [seeds[job :: options.jobs] for job in range(options.jobs)]
            with ProcessPoolExecutor(options.jobs) as jobs:
                for part in jobs.map(play_seeds, each, [options.seconds] * options.jobs):
                    tally.add(part)
    print(summary(tally))
    if options.json:
        figures: dict[str, Any] = attrs.asdict(tally)
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1, sort_keys=True)
    return int(tally.violations > 0)


if __name__ == "__main__":
    sys.exit(main())
