"""Engines that do not fit a Llama of vllm_models.py: Sources and Sinks of this process, each with one difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from kvproto import Cache, DType, KvprotoError, Pool, Prompt, Seed, Sink, Source, Ticket, lay_out, new_ticket
from kvproto_engines.facts import rope_of
from tools.engines.child import prompts

_PAGES = 64
_PATIENCE = 60.0
"""Within how many seconds it is refused."""
_SHAPE: dict[str, Any] = {"kv_heads": 2, "head_dim": 32, "page": 16, "dtype": DType.F32}


@attrs.frozen
class Stranger:
    """A difference from the model, with the words by which it is refused."""

    name: str
    says: str
    shape: dict[str, Any] = attrs.Factory(dict)
    layers: tuple[int, int] = (4, 4)
    """As a source, and as a sink: a sink may leave layers out."""
    facts: dict[str, str] = attrs.Factory(dict)


STRANGERS = (
    Stranger("weights", "IDENTITY_MISMATCH at facts[weights.target]", facts={"weights.target": "others"}),
    Stranger("rope", "IDENTITY_MISMATCH at facts[rope.target]", facts={"rope.target": "another"}),
    Stranger("bfloat16", "DTYPE_MISMATCH", {"dtype": DType.BF16}),
    Stranger("heads", "LANE_MISMATCH", {"kv_heads": 4}),
    Stranger("wider", "LANE_MISMATCH", {"head_dim": 64}),
    Stranger("layers", "LAYER_MISSING", layers=(3, 5)),
)


def _pool(stranger: Stranger, model: Path, weights: str, sink: bool) -> Pool:
    """Its pages, which are empty."""
    layers = stranger.layers[sink]
    rope = rope_of(SimpleNamespace(**json.loads((model / "config.json").read_text())))
    facts = {"weights.target": weights, "rope.target": rope, **stranger.facts}
    cache = Cache.gqa("kv", range(layers), **_SHAPE | stranger.shape)
    return Pool.allocate(lay_out([cache], facts=facts, depth=layers), _PAGES)


def as_sources(folder: str, model: Path, weights: str, ask: Callable[[Ticket, list[int]], str]) -> Iterator[str]:
    """Each prefills a prompt; `ask` has an engine decode it, and says what became of it. Each listens in the folder."""
    (prompt,) = prompts(1, 60, 61, 9)
    for stranger in STRANGERS:
        pool = _pool(stranger, model, weights, False)
        with Source(stranger.name, pool, f"ipc://{folder}/{stranger.name}-0") as source:
            ticket = new_ticket(stranger.name)
            source.request(ticket, Prompt(prompt)).finish({"kv": [1, 2, 3, 4]})
            if stranger.says not in (said := ask(ticket, prompt)):
                yield f"{stranger.name}: {said}"


def as_sinks(name: str, address: str, model: Path, weights: str) -> Iterator[str]:
    """Each asks a prefill engine of that name for a prompt."""
    for stranger in STRANGERS:
        with Sink(stranger.name, _pool(stranger, model, weights, True), {(name, 0): Seed(address)}) as sink:
            fetch = sink.fetch(new_ticket(name), Prompt([3, 4, 5]), {"kv": [1]})
            try:
                found = str(fetch.wait(_PATIENCE))
            except KvprotoError as error:
                found = str(error)
            if stranger.says.partition(" ")[0] not in found:
                yield f"{stranger.name} asks {name}: {found}"
