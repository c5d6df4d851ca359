"""`python -m tools.equality [--seconds N] [--seed N] [--worlds SHARE] [-- COMMAND]...`: testees beside kvproto.

Each command is a testee (spec/v1/testee.md), and kvproto's own is always one; without a command, libkvproto and the
crate in Rust are the others, if there are compilers. All are asked the same: plans of worlds that an adversary makes
up, the copies and checksums of some, and frames with faults. They have to accept the same with equal digests, and
refuse the same with equal code and path. The first difference is made small, printed as a question with all answers, and ends the run with
status 1. What a testee does not know (`unsupported`), or may decline (LAYOUT_UNSUPPORTED), is not compared.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from kvproto_conformance.testee import Broken, Testee
from tools import c_programs
from tools.conformance import rust_testee
from tools.equality.frames import bases, frame
from tools.equality.shrink import shrunk
from tools.equality.windows import lowering
from tools.equality.worlds import world
from tools.specgen.registry import ROOT

Json = dict[str, Any]
KVPROTO = [sys.executable, str(ROOT / "conformance/testees/python_kvproto.py")]
_BATCH = 64
_PATIENCE = 120.0


def own() -> list[list[str]]:
    """The commands of the testees on libkvproto and on the crate in Rust, compiled into build/equality."""
    folder = ROOT / "build/equality"
    folder.mkdir(parents=True, exist_ok=True)
    commands = list[list[str]]()
    compiler = c_programs.command("testee", folder / "testee")
    if shutil.which(compiler[0]):
        subprocess.run(compiler, check=True)
        commands.append([str(folder / "testee")])
    if shutil.which("rustc"):
        rust_testee(ROOT / "conformance/testees/rust", folder / "rust", "-O")
        commands.append([str(folder / "rust")])
    return commands


class Implementations:
    """Some implementations, asked side by side."""

    def __init__(self, commands: Sequence[list[str]]) -> None:
        self.names = [Path(command[-1]).name for command in commands]
        self._all = [Testee(command, _PATIENCE, float("inf")) for command in commands]
        for testee in self._all:
            if isinstance(greeting := testee.greet({"op": "hello"}), Broken):
                raise SystemExit(f"{testee.command}: {greeting.why}")
        self._threads = ThreadPoolExecutor(len(commands))

    def answers(self, questions: Sequence[Json]) -> list[list[Json]]:
        """Of each question what each of them says, without words."""

        def asked(testee: Testee) -> list[Json]:
            return [_said(testee.ask(question)) for question in questions]

        return [list(of) for of in zip(*self._threads.map(asked, self._all), strict=True)]

    def close(self) -> None:
        """End all of them."""
        for testee in self._all:
            testee.stop()
            testee.close()
        self._threads.shutdown()


def _said(answer: Json | Broken) -> Json:
    if isinstance(answer, Broken):
        return {"broken": answer.why}
    return {key: value for key, value in answer.items() if key != "text"}


def equal(answers: Sequence[Json]) -> bool:
    """Whether all testees that answer say the same."""
    compared = [a for a in answers if not a.get("unsupported") and a.get("error") != "LAYOUT_UNSUPPORTED"]
    return all(answer == compared[0] for answer in compared[1:])


def differ(answers: Sequence[Json], before: Sequence[Json]) -> bool:
    """Whether they differ, and none of them breaks that did not before."""
    return not equal(answers) and all(("broken" in a) == ("broken" in b) for a, b in zip(answers, before, strict=True))


def questions(seed: int, share: float) -> Iterator[Json]:
    """Without end: worlds in a share of them, a fourth of these with memory and windows, and frames."""
    rng, some = random.Random(seed), bases()
    while True:
        if rng.random() >= share:
            yield frame(rng, some)
        elif rng.random() >= 0.25:
            yield world(rng)
        elif question := lowering(rng, world(rng, right=True)):
            yield question


def run(
    testees: Implementations, seed: int, share: float, seconds: float
) -> tuple[Counter[str], tuple[Json, list[Json]] | None]:
    """The number of questions by how they ended, and the first difference, made small, with all answers to it."""
    counts, made, end = Counter[str](), questions(seed, share), time.monotonic() + seconds
    while time.monotonic() < end:
        batch = [next(made) for _ in range(_BATCH)]
        for question, answers in zip(batch, testees.answers(batch), strict=True):
            counts[f"{question['op']}: {answers[0].get('error', 'accepted')}"] += 1
            if not equal(answers):
                return counts, smallest(testees, question, answers)
    return counts, None


def smallest(testees: Implementations, question: Json, answers: Sequence[Json]) -> tuple[Json, list[Json]]:
    """A smaller question of which these differ too, and their answers to it."""
    small = shrunk(question, lambda one: differ(testees.answers([one])[0], answers))
    return small, testees.answers([small])[0]


def main() -> int:
    """Ask until the time is over or something differs."""
    words = sys.argv[1:]
    parts = [list(group) for dashes, group in groupby(words, lambda word: word == "--") if not dashes]
    arguments = parts.pop(0) if words[:1] != ["--"] and parts else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument(
        "--worlds",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of all questions; the others are frames (%(default)s)",
    )
    args = parser.parse_args(arguments)
    print(f"seed {args.seed}", flush=True)
    testees = Implementations([KVPROTO, *(parts or own())])
    try:
        counts, difference = run(testees, args.seed, args.worlds, args.seconds)
    finally:
        testees.close()
    for what, times in sorted(counts.items()):
        print(f"{times:9,}  {what}")
    asked = Counter[str]()
    for what, times in counts.items():
        asked[what.partition(":")[0]] += times
    print(
        f"{', '.join(f'{times:,} {op}' for op, times in sorted(asked.items()))}, {len(testees.names)} implementations"
    )
    if difference is None:
        print("equal")
        return 0
    print(json.dumps(difference[0]))
    for name, answer in zip(testees.names, difference[1], strict=True):
        print(f"  {name}: {json.dumps(answer)[:2000]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
