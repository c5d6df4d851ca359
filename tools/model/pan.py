"""One search by spin: from a model and its bounds to what was searched and the steps to what broke."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tools.specgen.registry import SPEC

MODELS = SPEC / "lifecycle"
_DEPTH, _MEMORY_MB, _SECONDS = 200_000, 1500, 280
_SEARCHED = re.compile(r"^ *(\d+) states, stored", re.M)
_MEMORY = re.compile(r"^ *([\d.]+)\s+total actual memory usage", re.M)
_STEP = re.compile(r" *[a-z_]+( [\w:,-]+)*$")
_NO_STEP = "what spin itself checks"
_SOUGHT = "47110815"
_READ = """#include <stdlib.h>
static int sought(void) { static int row = -2; if (row == -2) row = atoi(getenv("ROW")); return row; }
"""
_UNFINISHED = ("max search depth too small", "Search not completed", "pan: out of memory", "pan: reached -DMEMLIM")


class ModelError(Exception):
    """Spin or the compiler refused a model, or a search did not finish."""


class MissingTool(ModelError):
    """Spin is not installed."""


@attrs.frozen
class Outcome:
    """The result of a search: states, megabytes, and the steps to what broke (none if nothing did)."""

    states: int
    megabytes: float
    steps: tuple[str, ...] = ()

    @property
    def broken(self) -> str | None:
        """The property that broke."""
        found = [step.split()[1] for step in self.steps if step.startswith("broken ")]
        return found[0] if found else _NO_STEP if self.steps else None


class Program:
    """A model with bounds, compiled to a search of all its states; with `shortest`, breadth first."""

    def __init__(
        self, model: str, define: Mapping[str, int], without: Sequence[str] = (), shortest: bool = False,
        rows: bool = False,
    ) -> None:  # fmt: skip
        """`rows`: to be searched for rows of the table."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvproto-model-")
        self.path, self._model = Path(self._folder.name), str(MODELS / f"{model}.pml")
        names = {**define, **{f"WITHOUT_{guard}": 1 for guard in without}}
        self._defines = [f"-D{name}={value}" for name, value in names.items()]
        self._run(["spin", *self._defines, "-a", self._model])
        if rows:
            self._seek()
        order = ["-DBFS"] if shortest else []
        limits = ["-DSAFETY", "-DVECTORSZ=2048", f"-DMEMLIM={_MEMORY_MB}", *order]
        level = "-O0" if shortest and not rows else "-O1"  # a fault is found before -O1 would pay off
        self._run(["gcc", level, "-w", *limits, "-o", "pan", "pan.c"])

    def _seek(self) -> None:
        """Have the search read the number of the row that is sought when it starts."""
        for path in self.path.glob("pan.*"):
            path.write_text(path.read_text().replace(_SOUGHT, "sought()"))
        head = self.path / "pan.h"
        head.write_text(_READ + head.read_text())

    def search(self, row: int = -1) -> Outcome:
        """All states; or, in a model compiled with TRACES, until a row of the table is walked."""
        trail = next(self.path.glob("*.trail"), None)
        if trail is not None:
            trail.unlink()
        text = self._run(["./pan", f"-m{_DEPTH}", "-n"], row)
        states, memory = _SEARCHED.search(text), _MEMORY.search(text)
        unfinished = [words for words in _UNFINISHED if words in text]
        if states is None or memory is None or (unfinished and "errors: 0" in text):
            raise ModelError(f"the search was not completed: {' '.join(unfinished)}\n{text}")
        steps = () if "errors: 0" in text else self._steps()
        return Outcome(int(states[1]), float(memory[1]), steps)

    def _steps(self) -> tuple[str, ...]:
        """The steps that led to what broke, as the simulator prints them."""
        trail = str(next(self.path.glob("*.trail")))
        command = ["spin", *self._defines, "-t", "-T", "-B", "-k", trail, self._model]
        lines = self._run(command, codes=(0, 1)).splitlines()
        return tuple(line.strip() for line in lines if _STEP.match(line) and " trail " not in line) or (_NO_STEP,)

    def _run(self, command: Sequence[str], row: int = -1, codes: Sequence[int] = (0,)) -> str:
        env = {**os.environ, "ROW": str(row)}
        try:
            done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=_SECONDS)
        except FileNotFoundError:
            advice = "on Debian and Ubuntu: apt-get install spin gcc"
            missing = f"`{command[0]}` is not installed, and models are not checked without it; {advice}"
            raise MissingTool(missing) from None
        except subprocess.TimeoutExpired:
            raise ModelError(f"{' '.join(command)}: not over after {_SECONDS} s") from None
        if done.returncode not in codes:
            raise ModelError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout
