"""The scenarios of the conformance suite with an engine's own pools: what the adapters of both engines share.

`tools.engines.sglang_suite` and the like are run in the engines' environment. Without an argument the suite starts the
same module again as the adapter, in each role; sessions are kvproto's, pools and who writes and reads them the engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "conformance"), str(ROOT / "conformance/testees")]


def slots(table: list[int], rows: Any, page: int) -> torch.Tensor:
    """The slots of these tokens in an engine's page table, with pages of this many tokens."""
    return torch.from_numpy(np.array(table)[rows // page] * page + rows % page)


def main(argv: list[str], module: str, release: str, cache: Callable[..., Any]) -> int:
    """Serve as the adapter, or run L3 of the world of grouped queries in both roles; the exit status."""
    from live_either import Either
    from toy_engine import serve

    from kvproto_conformance.live import list_scenarios, run
    from kvproto_conformance.live.running import lacks

    if argv == ["serve"]:
        serve(Either(cache))
        return 0
    wrong = 0
    for role in ("source", "sink"):
        every = [each for each in list_scenarios(role, "L3") if each.world == "gqa"]
        chosen = [each for each in every if not lacks(each)]
        for reason in sorted({lacks(each) for each in every} - {""}):  # in the engines' environment
            left = [each.id for each in every if lacks(each) == reason]
            print(f"NOT RUN {release}, as a {role}: {', '.join(left)}, which want {reason}")
        chosen.sort(key=lambda each: (each.transport, "CURVE" in each.extensions, each.spoils))  # engines start slowly
        results = list(run([sys.executable, "-m", module, "serve"], chosen))
        must = {each.id for each in chosen if each.must}
        bad = [each for each in results if each.status != "pass" and each.id in must]
        said = (
            f"{len(chosen) - len(bad)} of {len(chosen)} scenarios, {sum(len(each.checks) for each in results)} checks"
        )
        print(f"{'DIFFERS' if bad else 'same   '} {release}, its pools in the conformance suite as a {role}: {said}")
        for each in bad:
            print(f"        {each.id} {each.status} {each.clause} {each.text[:300]}", flush=True)
        wrong += len(bad)
    return 1 if wrong else 0
