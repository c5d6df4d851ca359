"""Cases that vLLM itself cannot run on the CPU, by its own error: `ENGINE/python -m tools.engines.vllm_cannot FOLDER`.

Only its last pipeline stage has what proposes tokens, and every stage asks for it: in code that its CPU and its GPU have
in common, its first model runner. The connector states drafts on the last stage, as they are on a GPU; docs/vllm-reference.md says so.
Mamba 1, Kimi's delta attention and sparse attention need kernels of GPUs: their caches are tried without the engine.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tools.engines.cannot import Cases, run
from tools.engines.vllm_pd import DRAFT, MLA, MTP, N_GRAMS, WARM

_SELECTIVE = {"model": "selective", "enable_prefix_caching": False}
_DUMMY = {"load_format": "dummy", "dtype": "bfloat16"}
_STAGES = {"pipeline_parallel_size": 2, **WARM}
_SAYS = "'CPUModelRunner' object has no attribute 'drafter'"
CASES: Cases = {
    "pipeline stages with MTP": ({**MLA, "model": "mtp", **MTP, **_STAGES}, _SAYS),
    "pipeline stages with a draft model": ({"model": "llama", **DRAFT, **_STAGES}, _SAYS),
    "pipeline stages with n-grams": ({"model": "llama", **N_GRAMS, **_STAGES}, _SAYS),
    "Mamba 1": (_SELECTIVE, "'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"),
    "Kimi's delta attention": (
        {"model": "kimi", "enable_prefix_caching": False, **_DUMMY},
        "No module named 'cutlass'",
    ),
    "MLA with an index": ({"model": "sparse", **_DUMMY}, "Sparse Attention is not supported on CPU."),
}


def _answer(settings: dict[str, Any]) -> object:
    """Tokens of one engine, without the connector."""
    from vllm import LLM, SamplingParams

    from tools.engines.vllm_child import SETTINGS

    engine = LLM(**SETTINGS | settings)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    made = [out.outputs[0].token_ids for out in engine.generate([{"prompt_token_ids": list(range(3, 90))}], sampling)]
    print("it answered", made, flush=True)
    os._exit(0)  # stages do not always end


if __name__ == "__main__":
    sys.exit(run("vllm on the CPU", CASES, _answer, sys.argv[1:]))
