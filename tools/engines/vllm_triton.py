"""Engines of vLLM with kernels of Triton, on a CPU: `ENGINE/python -m tools.engines.vllm_triton FOLDER [WORD ...]`.

Triton's own interpreter runs its kernels there, one element after another, where vLLM would not run them: it looks for a
back end for CPUs, which the released Triton lacks. Prompts and answers are short, as a step takes a second.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tools.engines import vllm_cases as cases
from tools.engines.vllm_engine import WIPED, Engine, new_name, over, prompts
from tools.engines.vllm_pd import ALONE, IN_TORCH, Pair, run

_V4 = {
    "model": "v4", "dtype": "bfloat16", "block_size": 256, "kv_cache_dtype": "fp8_ds_mla", "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
_MOST = 8
_TABLES = 5
"""Block tables of a request to DeepSeek V4: rows and indexes, two of windows, and inputs of each compressor."""


def few_tokens(one: Engine, two: Engine) -> Iterator[str]:
    """Prompts that end within rows of 4 and of 128 tokens, and where both end, each way: the tokens of one engine."""
    for prefill, decode, sizes in ((one, two, (129, 202)), (two, one, (257,))):
        for tokens in sizes:
            (prompt,), name = prompts(1, tokens, tokens + 1, tokens), new_name()
            alone, found = prefill.run(new_name(), prompt, _MOST)[0], over(prefill, decode, prompt, _MOST, name)[0]
            if found != alone or name not in decode.fetched:
                yield f"{prefill.name} to {decode.name}, {tokens} tokens: {found}, not {alone}, or not fetched"


def each_table(one: Engine, two: Engine) -> Iterator[str]:
    """Blocks of one table are zero when they have arrived: other tokens, whichever table it is.

    Of two prompts the answers complete rows that their ends began: of 4 tokens, and of 128.
    """
    used = set[int]()
    for tokens in (7, 251):
        (prompt,) = prompts(1, tokens, tokens + 1, 3)
        alone = one.run(new_name(), prompt, _MOST)[0]
        for number in set(range(_TABLES)) - used:
            name = f"{WIPED}-{number}-{new_name()}"
            if over(one, two, prompt, _MOST, name)[0] != alone and name in two.fetched:
                used.add(number)
    if unused := set(range(_TABLES)) - used:
        yield f"tables {unused}: the same tokens, or none fetched: their blocks were not used"


PAIRS = [
    Pair(
        "DeepSeek V4, a window, rows of 4 and of 128 tokens, their indexes and inputs, one of them in chunks",
        _V4,
        {**_V4, "max_num_batched_tokens": 64},
        [few_tokens, each_table, cases.left_idle],
    ),
    Pair(
        "MiMo-V2, windows of 4 heads beside layers of 2, keys wider than values, block 32 and 64",
        {"model": "mimo", **IN_TORCH, **ALONE},
        {"model": "mimo", "block_size": 64, **IN_TORCH, **ALONE},
        [few_tokens, cases.one_bit, cases.left_idle],
    ),
]


def interpret() -> None:
    """Have vLLM use Triton here, and Triton interpret; of vLLM 0.33 also name the plans of all types of layers.

    Its metadata of DeepSeek V4 asks for those of V4.1 too, which its own builder for CPUs does not have.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import backends

    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.models.deepseek_v4.cpu import cpu_mla

    def build_tile_scheduler(_: Any, tokens: int) -> Any:
        return defaultdict[str, None](lambda: None)

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler


if __name__ == "__main__":
    interpret()
    sys.exit(run(PAIRS, *sys.argv[1:]))
