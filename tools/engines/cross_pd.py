"""vLLM, SGLang and the reference engines hand prompts over to each other: `ENGINE/python -m tools.engines.cross_pd FOLDER [MODEL ...] [--jax PYTHON]`.

As sglang_pd.py; the router is this program: it makes the ticket of a room, or hands on what the prefill engine answered.
The reference engine in JAX runs by a Python that has JAX; without one it is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvproto import Ticket, new_ticket, write_ticket
from kvproto_sglang import ticket_of
from tools.engines import sglang_engine as sg
from tools.engines import vllm_engine as vl
from tools.engines.child import new_name, prompts
from tools.engines.sglang_bench import CORRUPT, CORRUPT_STATE
from tools.engines.strangers import STRANGERS, as_sinks, as_sources
from tools.engines.vllm_distance import HandOver, apart, handed_over

Answers = list[tuple[list[int], str]]
"""Tokens of each prompt, and what its decode engine says of it."""
Over = Callable[..., Answers]
_FLIPPED = {"": 0, "page": CORRUPT, "state": CORRUPT_STATE}
"""By what is changed after it has arrived: the bit of a room that says so to the tests' plug-in of SGLang."""


def from_sglang(
    prefill: sg.Engine, decode: vl.Engine, asked: list[list[int]], most: int = sg.MOST, corrupt: str = "",
    states: bool = False,
) -> Answers:  # fmt: skip
    """SGLang prefills: both engines are asked at once, one with the room and one with its ticket."""
    first, params = read_by_sglang(prefill, asked, states)
    second = [(f"corrupt-{corrupt}-" if corrupt else "") + new_name() for _ in asked]
    for two, prompt, given in zip(second, asked, params, strict=True):
        decode.add(two, prompt, most, given)
    answers = [decode.result(two) for two in second]
    for one in first:
        prefill.result(one)
    return [(tokens, f"{reason}, {cached} cached") for tokens, reason, _, cached in answers]


def read_by_sglang(
    prefill: sg.Engine, asked: list[list[int]], states: bool = False
) -> tuple[list[str], list[dict[str, Any]]]:  # fmt: skip
    """Ask SGLang to prefill; request names, and what the decode engine gets.

    `states`: of a model with recurrent states, whose last token of a prompt vLLM computes itself.
    """
    names, params = [new_name() for _ in asked], []
    for name, prompt in zip(names, asked, strict=True):
        number = sg.room()
        if states:
            sampling = {"custom_params": {"kvproto": {"more": prompt[-1:]}}}
            prefill.add(name, prompt[:-1], sampling=sampling, **sg.where(prefill, number))
        else:
            prefill.add(name, prompt, **sg.where(prefill, number))
        ticket = write_ticket(ticket_of(number, f"{prefill.name}:1", 0, sg.DEADLINE))
        params.append({"do_remote_prefill": True, "ticket": ticket})
    return names, params


def to_sglang(
    prefill: vl.Engine, decode: sg.Engine, asked: list[list[int]], most: int = sg.MOST, corrupt: str = "",
    states: bool = False,
) -> Answers:  # fmt: skip
    """SGLang decodes: it gets the ticket and the token that the prefill engine answered.

    `states`: of a model with recurrent states it goes on after the tokens before the last one, which it gets as the first
    of its answer.
    """
    first, second = [new_name() for _ in asked], [new_name() for _ in asked]
    for one, prompt in zip(first, asked, strict=True):
        prefill.add(one, prompt, 1, vl.ASK)
    for one, two, prompt in zip(first, second, asked, strict=True):
        (token, *_), _, params, _ = prefill.result(one)
        given: dict[str, Any] = {"ticket": json.dumps(params["ticket"]), "first_token": token}
        if states:
            given |= {"first_token": prompt[-1], "more": prompt[-1:]}
        place: dict[str, Any] = {
            "bootstrap_host": "router",
            "bootstrap_port": 0,
            "bootstrap_room": sg.room() | _FLIPPED[corrupt],
        }
        sampling = {"custom_params": {"kvproto": given}}
        decode.add(two, prompt[: len(prompt) - states], most + states, sampling=sampling, **place)
    return [(tokens[states:], str(said["finish_reason"])) for tokens, said in map(decode.result, second)]


def same_tokens(alone: sg.Alone, over: Over, one: Any, two: Any, seed: int) -> Iterator[str]:
    """Several prompts at once: the tokens are those of the model alone."""
    asked = prompts(4, 40, 200, seed)
    for prompt, (tokens, said) in zip(asked, over(one, two, asked), strict=True):
        if tokens != (wanted := alone.run(prompt)[0]):
            yield f"prompt of {len(prompt)}: {tokens}, not {wanted}: {said}"


def one_bit(
    alone: sg.Alone, over: Over, one: Any, two: Any, seed: int, what: str = "page"
) -> Iterator[str]:  # fmt: skip
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = prompts(1, 100, 101, seed)
    ((tokens, said),) = over(one, two, [prompt], corrupt=what)
    if len(tokens) != sg.MOST or tokens == alone.run(prompt)[0]:
        yield f"{tokens}, {said}: the {what}s were not used"


def one_state_bit(alone: sg.Alone, over: Over, one: Any, two: Any, seed: int) -> Iterator[str]:
    """A bit of a state that arrived is flipped, and no page: other tokens."""
    yield from one_bit(alone, over, one, two, seed, "state")


def prefix_hits(alone: sg.Alone, over: Over, one: Any, two: Any, seed: int) -> Iterator[str]:
    """Pages that the decode engine has are not fetched again: a bit flipped in them stays so, and nothing else does."""
    (prompt, other), (tail,) = prompts(2, 193, 194, seed), prompts(1, 60, 61, seed)
    for case in (prompt, prompt, prompt[:129], prompt[:128] + tail):
        ((tokens, said),) = over(one, two, [case])
        if tokens != alone.run(case)[0]:
            yield f"prompt of {len(case)}: {tokens}: {said}"
    over(one, two, [other], corrupt="page")
    ((tokens, said),) = over(one, two, [case := other[:128] + tail])
    if len(tokens) != sg.MOST or tokens == alone.run(case)[0]:
        yield f"{tokens}, {said}: the pages that were there were fetched again"


def moves(alone: sg.Alone, over: Over, one: Any, two: Any, seed: int) -> Iterator[str]:
    """A request is aborted where vLLM decodes it, after some tokens, and SGLang goes on with it."""
    (prompt,), running = prompts(1, 150, 151, seed), new_name()
    wanted, most = alone.run(prompt)[0], sg.MOST // 2
    one.add(running, prompt, 300)
    while one.rounds(running) < most:
        pass
    one.abort(running)
    ((tokens, said),) = over(one, two, [prompt + wanted[:most]], sg.MOST - most)
    if wanted[:most] + tokens != wanted:
        yield f"{wanted[:most]} and {tokens}, not {wanted}: {said}"


def strangers(prefill: sg.Engine, decode: sg.Engine, model: Path, folder: str) -> Iterator[str]:
    """Engines that do not fit, and one that is not there: a request to each fails and says why."""

    def ask(ticket: Ticket, prompt: list[int]) -> str:
        request, given = new_name(), {"ticket": json.dumps(write_ticket(ticket)), "first_token": 3}
        place: dict[str, Any] = {"bootstrap_host": "router", "bootstrap_port": 0, "bootstrap_room": sg.room()}
        decode.add(request, prompt, sampling={"custom_params": {"kvproto": given}}, **place)
        return str(decode.result(request)[1]["finish_reason"])

    yield from as_sources(folder, model, model.name, ask)
    yield from as_sinks(f"{prefill.name}:1", f"ipc://{folder}/{prefill.name}-0", model, model.name)
    for engine, says in ((ABSENT, ABSENT), ("of-another-fleet", "WRONG_PEER")):
        if says not in (said := ask(new_ticket(engine), [5] * 40)):
            yield f"{engine}: {said}"


ABSENT = "absent"
"""A prefill engine that decode engines know, and that does not run."""
_IN_TORCH = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Rotary embedding in torch: vLLM's kernel for CPUs is not for keys whose heads are an axis of their own."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "block_size": 32,
        "speculative_config": {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3},
    },
    "mla": {"block_size": 16, "attention_backend": "CPU_MLA", **_IN_TORCH},  # for machines with AMX too
    "convolutions": {"block_size": 32, "enable_prefix_caching": False, **_IN_TORCH},
}
"""Settings of a vLLM, by model; one of them speculates, which no engine that hands over to it does."""
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "mla": ({"max_num_batched_tokens": 64}, "in chunks of 64 tokens"),  # its kernel has blocks of 16 alone
}
"""In what another vLLM differs that computes alone, in settings and in words; else it has blocks of 64."""
REFERENCES = {"torch": 16, "jax": 32}
"""Rows of a page of a reference engine, by its framework."""
CACHED = ("llama",)
"""Models whose prefixes vLLM finds again on a CPU; SGLang those of all without states."""
STATES = ("convolutions",)
"""Models with recurrent states, which the reference engines do not have."""


def tried(jax: str, models: Path, model: str, folder: str) -> int:
    """To and from SGLang; how many cases differ. `jax` is a Python."""
    shared, wrong = sg.settings_of(models, model), 0
    path, named = shared["model_path"], {"weights": model}
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "vllm": (f"vLLM, block {MODELS[model]['block_size']}", MODELS[model])
    }
    states = model in STATES
    for framework, rows in () if states else REFERENCES.items():
        python = jax if framework == "jax" else ""
        if framework == "jax" and not python:
            print(f"NOT RUN {model}: the reference engine in JAX, which needs --jax PYTHON", flush=True)
            continue
        own = {"kind": "reference_child", "framework": framework, "block_size": rows, "python": python}
        others[framework] = f"the reference engine in {framework}, page {rows}", own
    engines: dict[str, vl.Engine] = {}
    for name, (_, given) in others.items():
        engines[name] = vl.Engine.of(name, folder, [], "fail", extra=named, model=path, **given)
        about = engines[name].settings["kv"]["kv_connector_extra_config"]
        about["sources"] = {"p64:1": f"ipc://{folder}/p64-0"}
        if name == "vllm":
            about["sources"] |= {other: f"ipc://{folder}/{other}-0" for other in REFERENCES}
        engines[name].start()
    differs, words = OTHERS.get(model, ({"block_size": 64}, "in blocks of 64"))
    other = engines["vllm"].like("other", kv=None, **differs)
    other.start()
    prefill = sg.Engine.prefill("p64", folder, named, **shared, page_size=64, chunked_prefill_size=128)
    known = [*engines, ABSENT, *(stranger.name for stranger in STRANGERS)]
    about = named | {"metadata": "request"}
    caches = {"disaggregation_decode_enable_radix_cache": not states}
    decode = sg.Engine.decode("d64", folder, known, about, **shared, **caches, page_size=64)
    try:
        alone = sg.Alone(path)
        for engine in (*engines.values(), other, prefill, decode):
            engine.ready()
        if model == "llama":
            wrong += sg.told("llama: engines that do not fit", list(strangers(prefill, decode, Path(path), folder)))
        seeds = itertools.count(100)  # what an engine has cached of a case is none of another's
        for name, (title, _) in others.items():
            routes: list[tuple[str, Over, Any, Any]] = [
                (f"SGLang, page 64, to {title}", partial(from_sglang, states=states), prefill, engines[name]),
                (f"{title}, to SGLang, page 64", partial(to_sglang, states=states), engines[name], decode),
            ]
            for route, over, one, two in routes:
                finds = model in CACHED if two is engines["vllm"] else two is decode and not states
                moving = [moves] * (one is engines["vllm"] and not states)
                cases = (same_tokens, one_bit, *[one_state_bit] * states, same_tokens, *[prefix_hits] * finds, *moving)
                for case in cases:
                    seed = 900 if case is moves else next(seeds)
                    found = list(case(alone, over, one, two, seed))
                    wrong += sg.told(f"{model}: {route}: {case.__name__.replace('_', ' ')}", found)
        readers: dict[str, HandOver] = {"SGLang, page 64": lambda asked: read_by_sglang(prefill, asked, states)[1]}
        readers |= {others[name][0]: handed_over(engines[name]) for name in REFERENCES if name in engines}
        for reader, read in readers.items():
            said, found = apart(engines["vllm"], read, other, words)
            wrong += sg.told(f"{model}: {reader}, to {others['vllm'][0]}: {said}", found)
        for engine in engines.values():
            if not engine.idle():
                wrong += sg.told(f"{model}: {engine.name} at the end", [f"{engine.free()}, not {engine.blocks} free"])
    finally:
        prefill.kill()
        decode.kill()
        for engine in (*engines.values(), other):
            engine.stop()
    return wrong


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines.cross_pd", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="*", default=list(MODELS))
    parser.add_argument("--jax", default="")
    args = parser.parse_args(argv)
    return sg.run(args.folder, args.model, partial(tried, args.jax))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
