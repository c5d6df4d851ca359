"""SGLang hands prompts over to SGLang through `kvproto_sglang`: `ENGINE/python -m tools.engines.sglang_pd FOLDER [MODEL ...]`.

ENGINE is the environment of install.sh, FOLDER is for models of random weights, by default all of them. Each engine is
a group of processes on the CPU; what transformers computes with the same weights is the baseline, in float32. Prints a
line for each case.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvproto_reference.adapters import adapters_of
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.undivided import Undivided
from tools.engines.sglang_bench import CORRUPT, CORRUPT_STATE
from tools.engines.sglang_engine import (
    MOST,
    Alone,
    Engine,
    new_name,
    prompts,
    replicas,
    room,
    run,
    settings_of,
    told,
    where,
)
from tools.engines.sglang_random import at_random
from tools.engines.vllm_cases import ADAPTERS
from tools.engines.vllm_models import make_adapter


def begin(one: Engine, two: Engine, prompt: list[int], number: int | None = None, **more: Any) -> tuple[str, str]:
    """Both engines get one body, as the load balancer does it; the names of the request at both."""
    body = where(one, room() if number is None else number)
    names = new_name(), new_name()
    for engine, request in zip((one, two), names, strict=True):
        engine.add(request, prompt, **body, **more)
    return names


def over(one: Engine, two: Engine, prompt: list[int], number: int | None = None, **more: Any) -> Any:
    """A prompt through both: tokens of the decode engine, and what SGLang says of the request at each."""
    first, second = begin(one, two, prompt, number, **more)
    tokens, said = two.result(second)
    return tokens, said, one.result(first)[1]


def same_tokens(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Several prompts at once: the tokens are those of the model alone, and so are their log probabilities."""
    asked = prompts(4, 40, 200)
    begun = [begin(one, two, prompt, return_logprob=True) for prompt in asked]
    for prompt, (first, second) in zip(asked, begun, strict=True):
        (wanted, values), (tokens, said) = alone.run(prompt), two.result(second)
        if tokens != wanted:
            yield f"prompt of {len(prompt)}: {tokens}, not {wanted}: {said['finish_reason']}"
            continue
        found = [value for value, *_ in said["output_token_logprobs"]]
        if max(abs(a - b) for a, b in zip(found, values, strict=True)) > 1e-3:
            yield f"log probabilities {found}, not {values}"
        if (reason := one.result(first)[1]["finish_reason"]["type"]) != "length":
            yield f"{one.name}: {reason}"


def one_bit(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    tokens, wanted = over(one, two, prompt, room() | CORRUPT)[0], alone.run(prompt)[0]
    if tokens == wanted:
        yield f"the same tokens, {tokens}: the pages were not used"


def one_state_bit(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a state, or of the last page of a window, that arrived is flipped: other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    tokens, wanted = over(one, two, prompt, room() | CORRUPT_STATE)[0], alone.run(prompt)[0]
    if tokens == wanted:
        yield f"the same tokens, {tokens}: the state, or the window, was not used"


def one_after_the_other(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Decode is asked before prefill, and prefill before decode."""
    (prompt,) = prompts(1, 300, 301, 2)
    wanted = alone.run(prompt)[0]
    for order in ((one, two), (two, one)):
        body, names = where(one, room()), {}
        for engine in order:
            names[engine.name] = new_name()
            engine.add(names[engine.name], prompt, **body)
            time.sleep(0.5)
        tokens = two.result(names[two.name])[0]
        one.result(names[one.name])
        if tokens != wanted:
            yield f"{[engine.name for engine in order]}: {tokens}, not {wanted}"


def aborts(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Requests are aborted at each engine, alone and with the other; the next is served."""
    (prompt,) = prompts(1, 200, 201, 3)
    for aborted in ((one,), (two,), (one, two)):
        first, second = begin(one, two, prompt)
        names = {one.name: first, two.name: second}
        for engine in aborted:
            engine.abort(names[engine.name])
        for engine in (one, two):
            engine.result(names[engine.name])
    lonely = new_name()
    two.add(lonely, prompt, **where(one, room()))  # prefill never comes
    two.abort(lonely)
    two.result(lonely)
    if over(one, two, prompt)[0] != alone.run(prompt)[0]:
        yield "other tokens afterwards"


def bad_input(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Input that cannot be handed over fails that request, with the reason; the next is served."""
    (prompt,) = prompts(1, 80, 81, 4)
    for wrong, says in (
        ({"bootstrap_host": "nobody"}, "nobody"),
        ({"sampling": {"custom_params": {"kvproto": {"ticket": "{}"}}}}, "MISSING_FIELD"),
        ({"sampling": {"custom_params": {"kvproto": 7}}}, "kvproto"),
        ({}, "UNKNOWN_TICKET"),
    ):
        request = new_name()
        two.add(request, prompt, **where(one, room()) | wrong)
        reason = two.result(request)[1]["finish_reason"]
        if reason["type"] == "length" or says not in reason["message"]:
            yield f"{wrong}: {reason}"
    first, second, number = new_name(), new_name(), room()
    one.add(first, prompt, **where(one, number))
    two.add(second, list(reversed(prompt)), **where(one, number))
    if "CONTENT_MISMATCH" not in str(two.result(second)[1]["finish_reason"]):
        yield "pages of another prompt were used"
    one.abort(first)  # whoever has its room may still come
    one.result(first)
    if over(one, two, prompt)[0] != alone.run(prompt)[0]:
        yield "other tokens afterwards"


def prefix_hits(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Pages that the decode engine has are not fetched again."""
    (prompt,) = prompts(1, 193, 194, 5)
    for case in (prompt, prompt, prompt[:129], [*prompt[:64], *prompts(1, 60, 61, 6)[0]]):
        tokens = over(one, two, case)[0]
        if tokens != alone.run(case)[0]:
            yield f"prompt of {len(case)}: {tokens}"


def tenants(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Pages of a `cache_salt` are found by its own requests alone, in decode's tree too; two salts are refused."""
    (prompt,) = prompts(1, 193, 194, 9)
    wanted, found = alone.run(prompt)[0], []
    for salt in ("", "red", "blue") * 2:
        tokens, said, _ = over(one, two, prompt, cache_salt=salt or None)
        found.append(said["cached_tokens"])
        if tokens != wanted:
            yield f"tenant {salt!r}: {tokens}, not {wanted}"
    if any(found[:3]) or not all(found[3:]):
        yield f"tokens that were found, tenants in turn: {found}"
    first, second, number = new_name(), new_name(), room()
    one.add(first, prompt, **where(one, number), cache_salt="red")
    two.add(second, prompt, **where(one, number), cache_salt="green")
    if "CONTENT_MISMATCH" not in str(two.result(second)[1]["finish_reason"]):
        yield "pages of another tenant were fetched"
    one.abort(first)  # whoever has its room may still come
    one.result(first)


def adapters(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """One prompt with either LoRA adapter and with none, twice: tokens of the reference engine with the same adapter."""
    (prompt,) = prompts(1, 193, 194, 10)
    folders = {name: make_adapter(alone.folder, name) for name in ADAPTERS}
    right = Undivided(alone.folder, adapters=adapters_of(folders))
    greedy, found = SamplingParams(ignore_eos=True), []
    for name in ("", *ADAPTERS) * 2:
        tokens, said, _ = over(one, two, prompt, lora_path=name or None)
        found.append(said.get("cached_tokens"))
        if tokens != (wanted := right.generate(prompt, greedy, MOST, name).tokens):
            yield f"adapter {name!r}: {tokens}, not {wanted}: {said['finish_reason']}"
    if any(found[:3]):
        yield f"tokens that were found, adapters in turn: {found}"


def still_there(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Neither engine has found a page missing: SGLang counts its pool when it is idle, and ends where some are lost."""
    (prompt,) = prompts(1, 50, 51, 8)
    if over(one, two, prompt)[0] != alone.run(prompt)[0] or not (one.alive() and two.alive()):
        yield "an engine has ended"


def killed(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """The prefill engine dies with a request that decode waits for: that request fails, the decode engine lives."""
    (prompt,) = prompts(1, 150, 151, 7)
    request = new_name()
    two.add(request, prompt, **where(one, room()))
    one.kill()
    begun = time.monotonic()
    reason = two.result(request)[1]["finish_reason"]
    if reason["type"] == "length" or not two.alive():
        yield f"{reason}"
    if (took := time.monotonic() - begun) > 15:
        yield f"after {took:.0f} s"


_LORA = {
    "lora_backend": "torch_native",
    "max_loras_per_batch": 3,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
}
Case = Callable[[Alone, Engine, Engine], Iterator[str]]
CHUNKS = {"page_size": 64, "chunked_prefill_size": 128}
ALL: list[Case] = [same_tokens, one_bit, one_state_bit, still_there]
MODELS: dict[str, list[tuple[str, dict[str, Any], dict[str, Any], list[Case]]]] = {
    "llama": [
        (
            "Llama, page 64 in chunks of 128 tokens to page 16",
            {"page_size": 64, "chunked_prefill_size": 128, "max_total_tokens": 1536},
            {
                "page_size": 16,
                "disaggregation_decode_enable_radix_cache": True,
                "max_total_tokens": 1536,
            },
            [
                same_tokens,
                one_bit,
                one_after_the_other,
                prefix_hits,
                tenants,
                aborts,
                bad_input,
                at_random,
                still_there,
            ],
        ),
        (
            "Llama with LoRA adapters, page 64 in chunks of 128 tokens to page 32",
            {"page_size": 64, "chunked_prefill_size": 128, "lora_paths": ADAPTERS, **_LORA},
            {"page_size": 32, "disaggregation_decode_enable_radix_cache": True, "lora_paths": ADAPTERS, **_LORA},
            [adapters, still_there],
        ),
        (
            "Llama, page 64 to page 1",
            {"page_size": 64, "chunked_prefill_size": 128},
            {"page_size": 1},
            [same_tokens, one_bit, still_there],
        ),
        (
            "Llama, TP 1, page 64, to TP 2",
            {"page_size": 64, "chunked_prefill_size": 128},
            {"page_size": 32, "tp_size": 2},
            [same_tokens, one_bit, aborts],
        ),
        (
            "Llama, TP 2, page 16, to TP 1",
            {"page_size": 16, "tp_size": 2},
            {"page_size": 1},
            [same_tokens, one_bit, aborts, still_there, killed],
        ),
        (
            "Llama, two replicas, page 64, to page 1",
            {"page_size": 64, "dp_size": 2},
            {"page_size": 1},
            [same_tokens, one_bit, aborts, still_there],
        ),
    ],
    "convolutions": [
        (
            "LFM2 with short convolutions, page 64 in chunks of 128 tokens, to page 16",
            {"page_size": 64, "chunked_prefill_size": 128},
            {"page_size": 16},
            [same_tokens, one_bit, one_state_bit, one_after_the_other, aborts, still_there],
        ),
        (
            "LFM2 with short convolutions, TP 2, page 16, to page 64",
            {"page_size": 16, "tp_size": 2},
            {"page_size": 64},
            [same_tokens, one_bit, one_state_bit, still_there],
        ),
    ],
    "gemma3": [
        (
            "Gemma 3, windows in pages of all tokens, page 64 to page 1",
            {"page_size": 64},
            {"page_size": 1},
            [same_tokens, one_bit, still_there],
        ),
    ],
    "laguna": [
        ("Laguna, sliding windows, page 64 in chunks to page 16", CHUNKS, {"page_size": 16}, ALL),
        ("Laguna, sliding windows, TP 2, page 16, to page 64", {"page_size": 16, "tp_size": 2}, {"page_size": 64}, ALL),
    ],
    "deltas": [
        ("Qwen3-Next, gated delta nets, page 64 in chunks to page 16", CHUNKS, {"page_size": 16}, ALL),
        (
            "Qwen3-Next, gated delta nets, TP 2, page 16, to page 64",
            {"page_size": 16, "tp_size": 2},
            {"page_size": 64},
            ALL,
        ),
    ],
    "qwen35": [("Qwen3.5, page 64 in chunks to page 16", CHUNKS, {"page_size": 16}, ALL)],
    "granite": [
        ("Granite 4, Mamba 2, page 64 in chunks to page 16", CHUNKS, {"page_size": 16}, ALL),
    ],
    "falcon-h1": [
        ("Falcon-H1, Mamba 2 beside attention, page 64 in chunks to page 16", CHUNKS, {"page_size": 16}, ALL)
    ],
    "falcon-mamba": [
        (
            "Falcon-Mamba, Mamba 1, page 64 in chunks to page 16",
            CHUNKS,
            {"page_size": 16},
            [same_tokens, one_state_bit, still_there],
        ),
        (
            "Falcon-Mamba, Mamba 1, TP 2 to TP 1",
            {"page_size": 16, "tp_size": 2},
            {"page_size": 16},
            [same_tokens, one_state_bit, still_there],
        ),
    ],
    "mla": [
        ("MLA, page 64 to page 16", {"page_size": 64}, {"page_size": 16}, [same_tokens, one_bit, still_there]),
        (
            "MLA, two ranks of data-parallel attention, page 64, to two others, page 16",
            {"page_size": 64, "tp_size": 2, "attn_dp_size": 2, "enable_dp_lm_head": True},
            {"page_size": 16, "tp_size": 2, "attn_dp_size": 2, "enable_dp_lm_head": True, "port": 31000},
            [same_tokens, one_bit, aborts, still_there],
        ),
    ],
}
"""By model: what two engines differ in, and what is tried with them. Engines of equal settings are one."""


def _title(settings: dict[str, Any]) -> str:
    """Engines with the same one are the same engine."""
    sizes = "x".join(str(settings.get(size, 1)) for size in ("page_size", "tp_size", "dp_size", "attn_dp_size"))
    return sizes + "-lora" * ("lora_paths" in settings)


def _with_adapters(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the folders of adapters of a model in place of their names."""
    if "lora_paths" not in settings:
        return settings
    return settings | {"lora_paths": [f"{name}={make_adapter(Path(model), name)}" for name in settings["lora_paths"]]}


def _replicas(settings: dict[str, Any]) -> Iterator[str]:
    """Names by which decode engines call a prefill engine of these settings."""
    number = replicas(settings)
    for n in range(number):
        yield f"p{_title(settings)}:1" + f"/{n}" * (number > 1)


def tried(models: Path, chosen: str, folder: str) -> int:
    """Try the pairs of one model, or "MODEL:n" its nth pair; how many cases differ."""
    model, _, nth = chosen.partition(":")
    shared, wrong = settings_of(models, model), 0
    engines: dict[str, Engine] = {}
    try:
        pairs = []
        chosen_pairs = MODELS[model][int(nth) :][:1] if nth else MODELS[model]
        sources = list(dict.fromkeys(name for _, first, _, _ in chosen_pairs for name in _replicas(first)))
        for title, first, second, cases in chosen_pairs:
            names = [f"{kind}{_title(given)}" for kind, given in (("p", first), ("d", second))]
            first, second = (_with_adapters(shared["model_path"], given) for given in (first, second))
            if names[0] not in engines:
                engines[names[0]] = Engine.prefill(names[0], folder, **shared | first)
            if names[1] not in engines:
                engines[names[1]] = Engine.decode(names[1], folder, sources, **shared | second)
            pairs.append((title, engines[names[0]], engines[names[1]], cases))
        alone = Alone(shared["model_path"])
        for engine in engines.values():
            engine.ready()
        for title, one, two, cases in pairs:
            for case in cases:
                found = list(case(alone, one, two))
                wrong += told(f"sglang, {title}: {case.__name__.replace('_', ' ')}", found)
    finally:
        for engine in engines.values():
            engine.kill()
    return wrong


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    return run(Path(argv[0]), argv[1:] or MODELS, tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
