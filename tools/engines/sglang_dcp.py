"""SGLang whose ranks deal the tokens of each request (DCP): `ENGINE/python -m tools.engines.sglang_dcp FOLDER [PAIR ...]`.

As sglang_pd.py. SGLang deals tokens in its attention of Triton, whose kernels Triton's own interpreter runs here, one
element after another: prompts are few and short, as a step takes a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
"""Before anything imports Triton, whose own functions are interpreted too."""

DEALT = {"dcp_size": 2, "attention_backend": "triton"}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "TP 2, page 64 in chunks, to TP 2 with DCP 2, page 16": (
        "one head",
        {"tp_size": 2, "page_size": 64, "chunked_prefill_size": 64},
        {"tp_size": 2, "page_size": 16, **DEALT},
    ),
    "TP 2 with DCP 2, page 16, to TP 1, page 32": (
        "one head",
        {"tp_size": 2, "page_size": 16, **DEALT},
        {"page_size": 32},
    ),
}
"""A model, whose KV heads are no more than the groups of ranks that deal tokens, and settings of prefill and of decode."""


def cases(alone: Any, one: Any, two: Any) -> Iterator[tuple[str, list[str]]]:
    """Titles, and what differs."""
    from tools.engines.sglang_engine import prompts
    from tools.engines.sglang_pd import one_bit, over

    found = []
    for prompt in prompts(3, 20, 150, 4):
        tokens, said, _ = over(one, two, prompt)
        wanted = alone.run(prompt)[0]
        if tokens != wanted:
            found.append(f"prompt of {len(prompt)}: {tokens}, not {wanted}: {said['finish_reason']}")
    yield "the tokens of the model alone", found
    yield "other tokens where one bit is flipped", list(one_bit(alone, one, two))
    yield "nothing is left", [f"{each.name}: {each.free()}" for each in (one, two) if not each.idle()]


def tried(models: Path, pair: str, folder: str) -> int:
    """The number of cases that differ."""
    from tools.engines import sglang_engine as sg

    model, prefill, decode = PAIRS[pair]
    shared, number = sg.settings_of(models, model), list(PAIRS).index(pair)
    one = sg.Engine.prefill(f"p{number}", folder, **shared | prefill)
    two = sg.Engine.decode(f"d{number}", folder, [f"p{number}:1"], **shared | decode)
    try:
        for engine in (one, two):
            engine.ready()
        alone = sg.Alone(shared["model_path"])
        return sum(sg.told(f"{pair}: {title}", found) for title, found in cases(alone, one, two))
    finally:
        one.kill()
        two.kill()


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    from tools.engines.sglang_engine import run

    return run(Path(argv[0]), argv[1:] or PAIRS, tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
