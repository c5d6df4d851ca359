"""Cases that an engine itself cannot run, by its own error: each an engine in a process of its own, asked for tokens.

An adapter refuses what these would bring. A release that can do it shows as a difference, and then the adapter has
something to state.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.engines.vllm_models import make

_PATIENCE = 600.0
"""Within how many seconds an engine ends, or answers."""
_ANSWER = "--answer"
_MODELS = ("model", "model_path", "speculative_draft_model_path")
"""Settings that name a model."""

Cases = Mapping[str, tuple[dict[str, Any], str]]
"""By what is tried: an engine's settings, and its own error."""


def run(title: str, cases: Cases, answer: Callable[[dict[str, Any]], object], argv: list[str]) -> int:
    """Print each case and whether it went as it says here; the exit status. `argv[0]` is the folder of models.

    The calling module is run again for each engine; `answer` opens the engine and asks it for tokens.
    """
    if argv[0] == _ANSWER:
        print("it answered", answer(json.loads(argv[1])), flush=True)
        return 0
    wrong, begun = 0, time.monotonic()
    module = sys.modules["__main__"].__spec__
    assert module is not None
    for what, (settings, says) in cases.items():
        found = _ended(module.name, _filled(Path(argv[0]), settings), says)
        differs = says not in found
        wrong += differs
        print(f"{'DIFFERS' if differs else 'same   '} {title} does not run {what}: {says}", flush=True)
        if differs:
            lines = [line.strip() for line in found.splitlines() if "Error" in line]
            print(*lines[-3:], *found.splitlines()[-1:], sep="\n        ", flush=True)
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def _filled(models: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Settings with the folder of a model in place of its name."""
    return {
        name: str(make(models, value))
        if name in _MODELS
        else _filled(models, value)
        if isinstance(value, dict)
        else value
        for name, value in given.items()
    }


def _ended(module: str, settings: dict[str, Any], says: str) -> str:
    """Text that an engine with these settings printed until it said this, ended or answered."""
    command = [sys.executable, "-m", module, _ANSWER, json.dumps(settings)]
    engine = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    assert engine.stdout is not None
    late = threading.Timer(_PATIENCE, os.killpg, (engine.pid, signal.SIGKILL))  # an engine that has failed may not end
    late.start()
    found = ""
    for line in engine.stdout:
        found += line
        if says in line:
            break
    late.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    return found
