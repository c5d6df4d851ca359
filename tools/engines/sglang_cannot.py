"""Cases that an SGLang on the CPU cannot run, by the kernel that it lacks: `ENGINE/python -m tools.engines.sglang_cannot FOLDER`.

That of EAGLE was never run by an engine; states are, with kernels in plain torch (sglang_states.py).
"""

from __future__ import annotations

import sys
from typing import Any

from tools.engines.cannot import Cases, run

_DRAFT = {
    "speculative_algorithm": "EAGLE", "speculative_draft_model_path": "eagle", "speculative_num_steps": 2,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
}  # fmt: skip
CASES: Cases = {
    "drafts by EAGLE": (
        {"model_path": "llama", **_DRAFT},
        "copy_all_layer_kv_cache_cpu is not on this machine",
    ),
    "states of Mamba 2": (
        {"model_path": "states", "disable_radix_cache": True},
        "no attribute 'fused_sigmoid_gating_delta_rule_update_cpu'",
    ),
}


def _answer(settings: dict[str, Any]) -> object:
    """Tokens of one engine, without the back end."""
    import multiprocessing

    import sglang

    from tools.engines import sglang_engine  # noqa: F401  what an engine on the CPU finds in its environment
    from tools.engines.sglang_child import SETTINGS

    multiprocessing.set_start_method("spawn", force=True)
    engine = sglang.Engine(**SETTINGS | {"log_level": "error"} | settings)
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    made: object = engine.generate(input_ids=list(range(3, 90)), sampling_params=sampling)["output_ids"]
    engine.shutdown()
    return made


if __name__ == "__main__":
    sys.exit(run("sglang on the CPU", CASES, _answer, sys.argv[1:]))
