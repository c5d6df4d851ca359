"""`python -m tests.simulation.planting [PART OF A NAME] [--seeds 0..999] [--keep | --replay]`: plants faults, one at a time.

Each is a change of kvproto's text that a process of its own imports. The story of the first seed that catches it is
shrunk; --keep writes it to `stories`, and --replay plays those, each with its fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs

from tools.prove.changing import change, module_of
from tools.specgen.registry import ROOT

HERE = Path(__file__).parent
STORIES = HERE / "stories"


@attrs.frozen
class Planted:
    """A fault: in `file`, `new` stands in place of `old`."""

    name: str
    origin: str
    file: str
    old: str
    new: str
    within: str = ""
    """The field of Setup without which a story cannot show it."""

    @property
    def changes(self) -> dict[str, str]:
        """The module that is otherwise."""
        return {module_of(self.file): (ROOT / self.file).read_text().replace(self.old, self.new)}

    @property
    def story(self) -> Path:
        """The file of its shortest story."""
        return STORIES / f"{self.name.replace(' ', '-').replace(chr(39), '')}.json"


def load() -> list[Planted]:
    """All planted faults; raises ValueError if one is not at its place any more."""
    rows = tomllib.loads((HERE / "planted.toml").read_text())["fault"]
    faults = [Planted(row["name"], row["from"], row["file"], row["old"], row["new"], row.get("in", "")) for row in rows]
    for fault in faults:
        if (times := (ROOT / fault.file).read_text().count(fault.old)) != 1:
            raise ValueError(f"planted.toml: {fault.name!r} replaces text that {fault.file} has {times} times")
    return faults


def find(fault: Planted, first: int, last: int) -> dict[str, object]:
    """In a process that has imported nothing of kvproto: the first seed that catches a fault, and its shortest story."""
    change(fault.changes)
    from tests.simulation.running import play
    from tests.simulation.shrinking import shrink
    from tests.simulation.story import of_seed, write

    for seed in range(first, last + 1):
        story = of_seed(seed)
        if fault.within and not getattr(story.setup, fault.within):
            continue
        found = play(story).violation
        if found is not None:
            short = shrink(story, found.kind, most=100)
            return {
                "seed": seed,
                "kind": found.kind,
                "length": len(short),
                "story": write(short),
                "lines": short.lines(),
            }
    return {}


def replay(fault: Planted) -> str:
    """In a process that has imported nothing of kvproto: the kind of violation that the story of a fault shows."""
    change(fault.changes)
    from tests.simulation.running import play
    from tests.simulation.story import read

    found = play(read(fault.story.read_text())).violation
    return "" if found is None else found.kind


def _replay_all(faults: list[Planted]) -> int:
    """Plant each fault in a fork, and play its story; returns how many are not caught."""
    missed = 0
    for fault in faults:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os._exit(0 if replay(fault) else 3)
            os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            print(f"{fault.name}: its story shows nothing (status {status})", flush=True)
        missed += bool(status)
    print(f"{len(faults) - missed} of {len(faults)} faults are shown by their stories")
    return missed


def main() -> None:
    """Plant faults, and print who is caught."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--seeds" in sys.argv:
        arguments.remove(text := sys.argv[sys.argv.index("--seeds") + 1])
    else:
        text = "0..999"
    first, _, last = text.partition("..")
    part = arguments[0] if arguments else ""
    chosen = [fault for fault in load() if part in fault.name]
    if "--replay" in sys.argv:
        sys.exit(_replay_all([fault for fault in chosen if fault.story.exists()]))
    if "--one" in sys.argv:
        print(json.dumps(find(next(f for f in chosen if f.name == part), int(first), int(last))))
        return
    caught = 0
    for fault in chosen:
        command = [sys.executable, "-m", "tests.simulation.planting", fault.name, "--one", "--seeds", text]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{fault.name}: {ended.stderr[-2000:]}")
        result = json.loads(ended.stdout.splitlines()[-1])
        caught += bool(result)
        how = f"seed {result['seed']}, {result['kind']}, {result['length']} steps" if result else "not caught"
        print(f"{fault.name}: {how}", flush=True)
        if result and "--keep" in sys.argv:
            STORIES.mkdir(exist_ok=True)
            fault.story.write_text(result["story"] + "\n")
    print(f"{caught} of {len(chosen)} are caught")


if __name__ == "__main__":
    main()
