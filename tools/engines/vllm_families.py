"""Models of more families hand prompts over between two vLLMs: `ENGINE/python -m tools.engines.vllm_families FOLDER [WORD ...]`.

Tiny ones of random weights, as in vllm_pd.py; only these cases are run with each: tokens, a bit, and that blocks are free.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.engines import vllm_cases as cases
from tools.engines.vllm_pd import ALONE, IN_TORCH, Pair, run

_PLAIN: list[cases.Case] = [cases.same_tokens, cases.one_bit, cases.left_idle]
_STATES: list[cases.Case] = [cases.same_tokens, cases.one_bit, cases.one_state_bit, cases.left_idle]


def _pair(title: str, model: str, what: list[cases.Case], blocks: tuple[int, int] = (32, 64), **more: Any) -> Pair:
    """Two engines of a model whose blocks differ, one of which computes in chunks of 96 tokens, if it may."""
    own: dict[str, Any] = {"model": model, "kv_cache_memory_bytes": 16 << 20, **IN_TORCH, **ALONE, **more}
    one, two = ({**own, "block_size": block} for block in blocks)
    return Pair(title, {"max_num_batched_tokens": 96, **one}, two, what)


PAIRS = [
    _pair("Gemma 4, windows of 2 heads beside global layers of 1 head twice as wide", "gemma4", _PLAIN),
    _pair("Gemma 3n, whose last layers read the caches of others", "gemma3n", _PLAIN),
    _pair("gpt-oss, windows and sinks", "gpt-oss", _PLAIN),
    _pair(
        "Llama with EAGLE-3, a draft of 4 KV heads where the target has 2",
        "llama",
        _PLAIN,
        speculative_config={"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3},
    ),
    _pair("HRM, a cache for each pass", "hrm", _PLAIN, kv_cache_memory_bytes=96 << 20, max_num_batched_tokens=512),
    _pair("Nemotron-H, Mamba 2 beside attention", "nemotron", _STATES, (64, 128)),
    _pair("Falcon-H1, Mamba 2 and attention in each layer", "falcon", _STATES, (64, 128)),
]


if __name__ == "__main__":
    sys.exit(run(PAIRS, *sys.argv[1:]))
