"""`python -m tests.simulation SEEDS [--trace] [--seconds S]`: plays the stories of seeds, such as 17 or 0..999.

A violation prints its seed, the commit and its shortest story, and the status is 1. --trace prints all that happens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter

from tests.simulation.running import play
from tests.simulation.shrinking import shrink
from tests.simulation.story import Story, of_seed, read, write


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


def main() -> int:
    """Play seeds; the number of violations decides the status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="17 or 0..999, or the file of a story")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds of CPU time")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.seeds.endswith(".json"):
        with open(options.seeds) as file:
            stories = iter([read(file.read())])
    else:
        first, _, last = options.seeds.partition("..")
        stories = map(of_seed, range(int(first), int(last or first) + 1))
    reached, began, seconds, events, runs, wrong = Counter[str](), time.process_time(), 0.0, 0, 0, 0
    for story in stories:
        if options.seconds is not None and time.process_time() - began > options.seconds:
            break
        result = play(story, options.trace)
        if options.trace:
            print("\n".join((*story.lines(), *result.lines, f"digest {result.digest}")))
        reached, seconds, events, runs = (
            reached + result.reached,
            seconds + result.seconds,
            events + result.events,
            runs + 1,
        )
        if result.violation is not None:
            wrong += 1
            report(story)
    cpu = time.process_time() - began
    print(
        f"{runs} stories, {wrong} with a violation; {seconds:,.0f} s simulated in {cpu:.0f} s of CPU: {seconds / cpu:,.0f} to 1,"
    )
    print(f"{60 * runs / cpu:,.0f} stories a minute, {events:,} events")
    for name, count in sorted(reached.items()):
        print(f"{count:9,} {name}")
    if options.json:
        figures = {
            "stories": runs,
            "violations": wrong,
            "simulated": seconds,
            "cpu": cpu,
            "events": events,
            "reached": reached,
        }
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1, sort_keys=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
