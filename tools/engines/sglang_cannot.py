"""What an SGLang on the CPU cannot run, by the kernel that it asks for and lacks: `ENGINE/python -m tools.engines.sglang_cannot FOLDER`.

The back end refuses what these would bring, and docs/sglang.md says that none was tried. Each engine is started without
the back end, asked for tokens, and has to end with the error that stands here: a release that can do it shows as a
difference, and then the back end has something to state.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.engines.sglang_engine import told
from tools.engines.vllm_models import make

__all__ = ["main"]

_PATIENCE = 150.0
"""Seconds in which an engine ends, or has answered."""
_DRAFT = {
    "speculative_algorithm": "EAGLE", "speculative_draft_model_path": "eagle", "speculative_num_steps": 2,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "drafts by EAGLE": (
        {"model_path": "llama", **_DRAFT},
        "copy_all_layer_kv_cache_cpu is not on this machine",
    ),
    "states of Mamba 2": (
        {"model_path": "states", "disable_radix_cache": True},
        "no attribute 'fused_sigmoid_gating_delta_rule_update_cpu'",
    ),
}
"""By what is tried: settings of an engine, and what its own error says."""
_ANSWERED = "it answered"
_MODELS = ("model_path", "speculative_draft_model_path")


def main(argv: list[str]) -> int:
    """Print each case and whether it went as it says here; the exit status."""
    wrong, begun = 0, time.monotonic()
    for what, (settings, says) in CASES.items():
        found = _ended(Path(argv[0]), settings)
        lines = [line.strip() for line in found.splitlines() if "Error" in line]
        differs = [] if says in found else [f"not {says!r}, but:", *lines[-3:], *found.splitlines()[-1:]]
        wrong += told(f"sglang on the CPU does not run {what}: {says}", differs)
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def _ended(models: Path, settings: dict[str, Any]) -> str:
    """All that an engine of these settings said until it ended, or answered."""
    given = {name: str(make(models, value)) if name in _MODELS else value for name, value in settings.items()}
    command = [sys.executable, "-m", "tools.engines.sglang_cannot", "--answer", json.dumps(given)]
    engine = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        return engine.communicate(timeout=_PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(engine.pid, signal.SIGKILL)
        return engine.communicate()[0]


def _answer(settings: dict[str, Any]) -> None:
    """One engine, and a prompt."""
    import multiprocessing

    import sglang

    from tools.engines.sglang_child import SETTINGS

    multiprocessing.set_start_method("spawn", force=True)
    engine = sglang.Engine(**SETTINGS | {"log_level": "error"} | settings)
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    made = engine.generate(input_ids=list(range(3, 90)), sampling_params=sampling)["output_ids"]
    print(_ANSWERED, made, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "--answer":
        _answer(json.loads(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
