"""vLLM hands prompts over to vLLM through `kvproto_vllm`: `ENGINE/python -m tools.engines.vllm_pd FOLDER [WORD ...]`.

ENGINE is the environment of install.sh, FOLDER is for models of random weights; of the pairs of engines those run whose
titles hold one of the words, by default all but those that have to be asked for. Each engine is a process on the CPU with both roles; what it computes alone
is the baseline of what it decodes for another. Prints a line for each case.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs

from tools.engines import vllm_cases as cases
from tools.engines import vllm_moving as moving
from tools.engines.vllm_distance import apart, handed_over
from tools.engines.vllm_engine import Engine
from tools.engines.vllm_models import make, make_adapter
from tools.engines.vllm_random import at_random
from tools.engines.vllm_unlike import unlike

IN_TORCH = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Rotary embedding in torch: vLLM's kernel for CPUs is not for keys whose heads are an axis of their own."""
MLA = {"model": "mla", "block_size": 16, "attention_backend": "CPU_MLA", **IN_TORCH}
"""Settings for latents: on a machine with AMX, vLLM's own choice wants bfloat16."""
ALONE = {"enable_prefix_caching": False}
_DELTAS = {"model": "deltas", "dtype": "bfloat16", "max_num_batched_tokens": cases.PIECE, **IN_TORCH, **ALONE}
"""vLLM's kernels of gated delta nets on a CPU know no other type of element."""
_TILES = {"model": "llama", "dtype": "bfloat16", "block_size": 64, "max_num_batched_tokens": cases.PIECE, **ALONE}
_SPECULATING = {"num_speculative_tokens": 3}
DRAFT = {"speculative_config": {"method": "draft_model", "model": "llama", **_SPECULATING}}
"""A model that is its own draft: whatever it proposes is right, if its pages are."""
WIDE = {"speculative_config": {"method": "draft_model", "model": "llama4", **_SPECULATING}}
"""A draft of more KV heads than its target: vLLM has both in one block table, each layer with a specification."""
EAGLE = {"speculative_config": {"method": "eagle", "model": "eagle", **_SPECULATING}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}}
N_GRAMS = {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4, **_SPECULATING}}
_COLD = {"extra": {"options": {"cold_draft": True}}}
WARM = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""Of stages: the back end makes what they pass on in the forward by which it warms up, and that where it compiles."""
_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_NAMED = {"weights": "llama"}
"""Engines of two makers name the weights alike."""


@attrs.frozen
class Pair:
    """Two engines, what each does when a load fails, and what is tried with them."""

    title: str
    one: dict[str, Any]
    two: dict[str, Any]
    cases: list[cases.Case]
    policies: tuple[str, str] = ("fail", "recompute")
    often: bool = False
    """Whether with each release of vLLM; else with the first."""
    asked: bool = False
    """Whether only where a word names it."""
    distance: bool = False
    """Whether log probabilities are compared too: of two engines that differ in their block sizes."""


CROWDED = Pair(
    "Llama, 24 blocks of 32 and 14 of 64 tokens",
    {"model": "llama", "num_gpu_blocks_override": 24, "max_num_batched_tokens": 96, "enable_prefix_caching": True},
    {"model": "llama", "block_size": 64, "num_gpu_blocks_override": 14, "enable_prefix_caching": False},
    [unlike, at_random],
    ("recompute", "recompute"),
)
PAIRS = [
    Pair(
        "Llama, block 64 in chunks of 96 tokens, and block 32",
        {"model": "llama", "block_size": 64, "max_num_batched_tokens": 96, "enable_prefix_caching": False},
        {"model": "llama", "enable_prefix_caching": True},
        [
            cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.prefix_hits, cases.tenants, cases.aborts,
            cases.bad_input, cases.left_idle, cases.killed,
        ],
        often=True,
        distance=True,
    ),
    Pair(
        "Llama, block 64 and block 32, which both prefill and decode for each other",
        {"model": "llama", "block_size": 64, "max_num_batched_tokens": 96, "enable_prefix_caching": True},
        {"model": "llama", "enable_prefix_caching": True},
        [moving.next_turn, moving.moves, moving.hints, cases.left_idle],
        ("recompute", "recompute"),
        often=True,
    ),
    CROWDED,
    Pair("MLA, block 16", MLA, MLA, [cases.same_tokens, cases.one_bit, cases.left_idle], often=True),
    Pair(
        "Llama, block 32, and the torch reference engine, page 16",
        {"model": "llama", "extra": _NAMED},
        {"model": "llama", "block_size": 16, "kind": "reference_child", "extra": _NAMED},
        [cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.left_idle],
    ),
    Pair(
        "The torch reference engine, page 32, and Llama, block 64",
        {"model": "llama", "block_size": 32, "kind": "reference_child", "extra": _NAMED},
        {"model": "llama", "block_size": 64, "extra": _NAMED},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
    ),
    Pair(
        "Llama with LoRA adapters, block 64 in chunks of 96 tokens, and block 32",
        {"model": "llama", "block_size": 64, "max_num_batched_tokens": 96, **_ADAPTERS},
        {"model": "llama", "enable_prefix_caching": True, **_ADAPTERS},
        [cases.adapters, cases.tenants, cases.other_weights, cases.left_idle],
    ),
    Pair(
        "Llama with LoRA adapters, block 32, and the torch reference engine, page 16",
        {"model": "llama", "extra": _NAMED, **_ADAPTERS},
        {
            "model": "llama", "block_size": 16, "kind": "reference_child", "extra": _NAMED,
            "adapters": cases.ADAPTERS,
        },
        [cases.adapters, cases.left_idle],
    ),
    Pair(
        "Layers with a sliding window of 80 tokens beside full ones, block 32 in chunks of 96 tokens, and block 64",
        {"model": "window", "max_num_batched_tokens": 96, "enable_prefix_caching": True},
        {"model": "window", "block_size": 64, "enable_prefix_caching": False},
        [cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.aborts, cases.left_idle],
    ),
    Pair(
        "Layers of Mamba 2 beside attention, block 64 in chunks of 96 tokens, and block 128",
        {"model": "states", "block_size": 64, "max_num_batched_tokens": 96, "enable_prefix_caching": False},
        {"model": "states", "block_size": 128, "enable_prefix_caching": False},
        [
            cases.same_tokens, cases.one_bit, cases.one_state_bit, cases.rows_behind, cases.ticket_beforehand,
            cases.aborts, cases.left_idle,
        ],
        often=True,
    ),
    Pair(
        "Layers of gated delta nets beside attention, bfloat16, blocks of any size and of 1024",
        _DELTAS,
        {**_DELTAS, "block_size": 1024},
        [cases.same_pieces, cases.one_bit, cases.one_state_bit, cases.left_idle],
    ),
    Pair("Llama, bfloat16, block 64, in tiles where the machine has AMX", _TILES, _TILES, [
        cases.same_pieces, cases.one_bit, cases.left_idle,
    ]),
    Pair(
        "Layers of short convolutions beside attention, block 32 in chunks of 96 tokens, and block 64",
        {"model": "convolutions", "max_num_batched_tokens": 96, **IN_TORCH, **ALONE},
        {"model": "convolutions", "block_size": 64, **IN_TORCH, **ALONE},
        [
            cases.same_tokens, cases.one_bit, cases.one_state_bit, cases.ticket_beforehand, cases.aborts,
            cases.left_idle,
        ],
    ),
    Pair(
        "Layers that attend to their own chunk of 64 tokens beside full ones, block 32, and block 64",
        {"model": "chunks", "max_num_batched_tokens": 96, **ALONE},
        {"model": "chunks", "block_size": 64, **ALONE},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
    ),
    Pair(
        "Layers of short convolutions, TP 2 and 1",
        {"model": "convolutions", "tensor_parallel_size": 2, **IN_TORCH, **ALONE},
        {"model": "convolutions", **IN_TORCH, **ALONE},
        [cases.same_tokens, cases.one_bit, cases.one_state_bit, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Layers of Mamba 2 beside attention, TP 2 and 1",
        {"model": "states", "tensor_parallel_size": 2, **ALONE},
        {"model": "states", **ALONE},
        [cases.same_tokens, cases.one_bit, cases.one_state_bit, cases.left_idle],
        asked=True,
    ),
    Pair(
        "MLA that predicts a token more (MTP), block 16",
        {**MLA, "model": "mtp", "enable_prefix_caching": False, **MTP},
        {**MLA, "model": "mtp", **MTP},
        [cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.aborts, cases.left_idle],
    ),
    Pair(
        "Llama with a draft model, block 32 in chunks of 96 tokens, and block 64",
        {"model": "llama", "max_num_batched_tokens": 96, "enable_prefix_caching": False, **DRAFT},
        {"model": "llama", "block_size": 64, "enable_prefix_caching": True, **DRAFT},
        [cases.same_tokens, cases.one_bit, cases.speculates, cases.aborts, cases.left_idle],
    ),
    Pair(
        "Llama of 2 KV heads with a draft of 4, block 32 and 64",
        {"model": "llama", **WIDE},
        {"model": "llama", "block_size": 64, **WIDE},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
    ),
    Pair(
        "Llama that speculates by n-grams, and by a draft model of its own",
        {"model": "llama", "enable_prefix_caching": True, **N_GRAMS, **_COLD},
        {"model": "llama", "block_size": 64, "enable_prefix_caching": False, **DRAFT, **_COLD},
        [cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.left_idle],
    ),
    Pair(
        "Llama with EAGLE, block 32 and 64",
        {"model": "llama", **EAGLE},
        {"model": "llama", "block_size": 64, **EAGLE},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Llama, PP 2 and 1",
        {"model": "llama", "block_size": 64, "pipeline_parallel_size": 2, **WARM},
        {"model": "llama"},
        [cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.aborts, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Layers with a sliding window beside full ones, PP 2 and 1",
        {"model": "window", "block_size": 64, "pipeline_parallel_size": 2, **WARM, **ALONE},
        {"model": "window", **ALONE},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Llama, TP 2 and 1",
        {"model": "llama", "block_size": 64, "tensor_parallel_size": 2, "enable_prefix_caching": False},
        {"model": "llama", "enable_prefix_caching": True},
        [
            cases.same_tokens, cases.one_bit, cases.ticket_beforehand, cases.prefix_hits, moving.hints, cases.aborts,
            cases.left_idle, cases.killed_other,
        ],
    ),
    Pair(
        "Llama of 2 KV heads, TP 4 and 2",
        {"model": "llama", "tensor_parallel_size": 4},
        {"model": "llama", "block_size": 64, "tensor_parallel_size": 2},
        [cases.same_tokens, cases.one_bit, cases.aborts, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Llama of 6 KV heads, TP 3 and 2",
        {"model": "llama6", "tensor_parallel_size": 3},
        {"model": "llama6", "tensor_parallel_size": 2},
        [cases.same_tokens, cases.one_bit, cases.left_idle],
        asked=True,
    ),
    Pair(
        "Llama, MultiConnector beside one that stores on disk",
        {"model": "llama", "beside": "ExampleConnector", "enable_prefix_caching": False},
        {"model": "llama", "block_size": 64, "beside": "ExampleConnector", "enable_prefix_caching": False},
        [cases.same_tokens, cases.one_bit, cases.stored, cases.aborts, cases.left_idle],
        asked=True,
    ),
]  # fmt: skip


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    import vllm

    first = vllm.__version__.startswith("0.32")
    pairs = PAIRS if argv[1:] else [pair for pair in PAIRS if not pair.asked and (first or pair.often)]
    return run(pairs, *argv)


def run(pairs: list[Pair], folder: str, *words: str) -> int:
    """Print each case of the pairs whose titles hold one of the words, or of all, and whether it went well; the exit
    status. Models are made in the folder.
    """

    models, wrong, begun = Path(folder), 0, time.monotonic()
    chosen = [pair for pair in pairs if not words or any(word in pair.title for word in words)]
    for pair in chosen:
        engines: list[Engine] = []
        with tempfile.TemporaryDirectory() as folder:
            each = zip(("one", "two"), ("two", "one"), pair.policies, (pair.one, pair.two), strict=True)
            for name, other, policy, given in each:
                engines.append(Engine.of(name, folder, [other], policy, **_filled(models, given)))
            try:
                for engine in engines:
                    engine.start()
                for engine in engines:
                    engine.ready()
                ways = [(engines[0], engines[1]), (engines[1], engines[0])] if pair.distance else []
                for seed, (prefill, decode) in enumerate(ways):
                    said, found = apart(decode, handed_over(prefill), prefill, "in the other's blocks", seed)
                    wrong += told(begun, f"{pair.title}: {prefill.name} to {decode.name}: {said}", found)
                for case in pair.cases:
                    wrong += told(begun, f"{pair.title}: {case.__name__.replace('_', ' ')}", list(case(*engines)))
            except (RuntimeError, TimeoutError, OSError) as error:  # other pairs go on
                wrong += told(begun, pair.title, [str(error)])
            finally:
                for engine in engines:
                    engine.stop()
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def _filled(models: Path, given: Any) -> Any:
    """Settings with the folder of a model in place of its name."""
    if not isinstance(given, dict):
        return given
    found = {n: str(make(models, each)) if n == "model" else _filled(models, each) for n, each in given.items()}
    if "adapters" in given:
        found["adapters"] = {name: str(make_adapter(Path(found["model"]), name)) for name in given["adapters"]}
    return found


def told(begun: float, title: str, found: list[str]) -> bool:
    """Print a line, and what differs; whether it does."""
    import vllm

    print(
        f"{'DIFFERS' if found else 'same   '} {time.monotonic() - begun:5.0f} s  vllm {vllm.__version__}, {title}",
        flush=True,
    )
    for line in found:
        print(f"        {line}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
