"""From SGLang's own pool objects and configuration to a Pool of kvproto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvproto import Parallel, Pool, lay_out
from kvproto_engines.converting import converting
from kvproto_engines.facts import facts_of, weights_of
from kvproto_sglang import metadata
from kvproto_sglang.pools.classes import DRAFTS, SHARDED, state
from kvproto_sglang.pools.refusals import COMPONENTS
from kvproto_sglang.pools.stated import Owner, Stated, Table, of, refused
from kvproto_sglang.pools.states import recurrent
from kvproto_sglang.settings import Settings

__all__ = ["Engine", "Layout", "Opened", "facts", "open_pool", "scales_of", "title_of"]

_SERVED = ("model_path", "revision", "quantization"), ("path", "revision", "quantization")
"""Of ServerArgs, what says which weights the target has; and a draft, behind `speculative_draft_model_`."""
_DRAFT = "speculative_draft_model_"
_PAGED = frozenset({"dsa", "minimax_index_k", "minimax_dense_kv", "qsa_compressed", "block_scale"})
"""Components whose items are the pages of the request."""
Scales = Mapping[int, tuple[float, float]]


@attrs.frozen
class Layout:
    """The place of this process among those of its engine.

    Fields:
        dcp: Ranks that deal the tokens of a page among themselves, one after another.
        refused: Sizes that have to be 1, by name.
        replica: Which of the `replicas` of data parallel, that of attention too.
    """

    tp: int = 1
    rank: int = 0
    dcp: int = 1
    refused: tuple[tuple[str, int], ...] = ()
    replica: int = 0
    replicas: int = 1


@attrs.frozen
class Engine:
    """The objects that SGLang has at the start of a rank.

    Fields:
        pools: The KVCache of the target, and those of its draft: one, or one for each layer that predicts a token.
        slots: Pools of recurrent states that lie beside these, each of the model of the same place; None: none.
        models: The ModelConfig of each.
        scales: Of K and of V by layer, of each, where the checkpoint has some.
        server: ServerArgs.
        buffers: MetadataBuffers.
        states: The types of the components of its state.
        entries: Buffers of the first draft among its pages.
        window: Tokens before the next one that a sliding window needs, where pages serve one request alone; else 0.
    """

    pools: tuple[Any, ...]
    models: tuple[Any, ...]
    server: Any
    buffers: Any
    states: Sequence[str] = ()
    entries: int = 0
    scales: tuple[Scales, ...] = ({}, {})
    window: int = 0
    slots: tuple[Any, ...] = ()


@attrs.frozen
class Opened:
    """An engine's pool as kvproto sees it.

    Fields:
        tables: By the name of a group, what its page table is.
        parts: Of the metadata.
        page: Tokens of a page.
    """

    pool: Pool
    tables: dict[str, Table]
    parts: tuple[str, ...]
    page: int


def open_pool(engine: Engine, layout: Layout, settings: Settings, parts: str) -> Opened:
    """The pool of one rank; `parts` is a name of `metadata.SETS`.

    Raises LocalError for what this back end cannot state, by its name.
    """
    for name, size in ((name, size) for name, size in layout.refused if size != 1):
        raise refused(name, "1", str(size))
    if layout.tp > 1 and settings.options.spread != "even":  # ranks that nobody reads would keep pages for long
        raise refused("options.spread", '"even" with tensor parallel', settings.options.spread)
    if getattr(engine.server, "enable_memory_saver", False):
        raise refused("enable_memory_saver", "memory that stays where it is, as peers map it", "True")
    if (device := torch.device(engine.pools[0].device)).type not in ("cpu", "cuda"):
        raise refused("device", "cpu or cuda", str(device))
    stated = [each for n in range(len(engine.pools)) for each in _of(engine, n, layout)]
    if settings.convert:
        stated = [_converting(each, engine) for each in stated]
    _check(engine, stated, layout.dcp)
    warm = len(engine.pools) > 1 and not settings.options.cold_draft
    page, names = engine.pools[0].page_size * layout.dcp, metadata.names_of(engine.buffers, parts, warm)
    told = [
        facts(n, engine.models[n], engine.server, settings.weights, engine.scales[n], stated)
        for n in range(len(engine.pools))
    ]
    drafts = {name: value for each in told[1:] for name, value in each.items()}
    compared, warned = (told[0], drafts) if settings.options.cold_draft else (told[0] | drafts, {})
    if settings.convert:  # an engine in BF16 has no scales; those that both state are compared (KVP-CNV-SCALES)
        scaled = {name: value for name, value in compared.items() if name.startswith("kv_scales.")}
        compared = {name: value for name, value in compared.items() if name not in scaled}
        warned = warned | scaled
    geometry = lay_out(
        [each.cache for each in stated] + metadata.cache_of(engine.buffers, names),
        Parallel(tp=layout.tp, dcp=layout.dcp), layout.replica,
        settings.facts if settings.facts is not None else compared,
        depth=_depth(engine.models[0]), warn=warned,
    )  # fmt: skip
    tensors = {each.cache.group.name: each.tensors for each in stated}
    axes = {each.cache.group.name: each.axes for each in stated}
    tables = {each.cache.group.name: _table(each, engine) for each in stated}
    return Opened(Pool(geometry, tensors, rank=layout.rank, axes=axes), tables, names, page)


def _converting(stated: Stated, engine: Engine) -> Stated:
    """The same rows, which state the conversions that they may have."""
    cache, ids = stated.cache, list(stated.cache.layers)
    of_model = engine.scales[cache.group.model] if cache.group.model < len(engine.scales) else {}
    scales = [of_model.get(layer, (1.0, 1.0)) for layer in ids]
    return attrs.evolve(stated, cache=converting(cache, cache.group.name, ids, scales))


def _depth(model: Any) -> int:
    """Layers with caches of their own, of which a model may have more than layers: LongCat has two in each."""
    layers: int = max(model.num_hidden_layers, getattr(model, "num_attention_layers", 0))
    return layers


def title_of(number: int) -> str:
    """The name of the groups of the pages of a model."""
    return of(number) if number else "kv"


def _of(engine: Engine, number: int, layout: Layout) -> list[Stated]:
    """All that is stated of a model: its pool, and the states beside it."""
    owner = Owner(number, title_of(number), engine.models[number], layout.tp, dcp=layout.dcp)
    kinds = DRAFTS if number else None
    if layout.dcp > 1:
        kinds = SHARDED
    made = state(engine.pools[number], owner, kinds)
    slots = engine.slots[number] if number < len(engine.slots) else None
    return made + (recurrent(slots, owner) if slots is not None else [])


def scales_of(modules: Iterable[Any]) -> dict[int, tuple[float, float]]:
    """Of K and of V by layer, of the attention layers of a model of SGLang."""
    found = {}
    for each in modules:
        if hasattr(each, "k_scale_float") and hasattr(each, "layer_id"):
            found[int(each.layer_id)] = each.k_scale_float or 1.0, each.v_scale_float or 1.0
    return found


def _table(stated: Stated, engine: Engine) -> Table:
    """With the place of its component among those that SGLang names items of."""
    if not stated.component or stated.component in _PAGED:
        return stated.table
    window = engine.window if stated.component == "swa" else 0
    return attrs.evolve(stated.table, component=engine.states.index(stated.component), window=window)


def _check(engine: Engine, stated: list[Stated], dcp: int) -> None:
    """Raise LocalError where SGLang hands over other states, or buffers of another draft, than what is stated."""
    held = {name for each in stated for name in (each.component, each.beside) if name}
    wanted = sorted([*held, *{each.component for each in stated if each.repeats}])
    if sorted(engine.states) != wanted:
        unknown = [f"{name}: {COMPONENTS[name]}" for name in engine.states if name in COMPONENTS]
        raise refused("state pools", ", ".join(wanted) or "none", ", ".join(unknown or engine.states) or "none")
    drafts = [each for each in stated if each.cache.group.model and not each.component]
    first = [each for each in drafts if each.cache.group.model == 1]
    buffers = sum(
        len(each.cache.layers) * (len(each.tensors) if isinstance(each.tensors, dict) else 1) for each in first
    )
    pages = {each.table.page * each.table.split for each in drafts}
    page = engine.pools[0].page_size * dcp
    if buffers != engine.entries or pages - {page}:
        mine = f"{engine.entries} buffers of one, in pages of {page}"
        raise refused("draft model", mine, f"{buffers} buffers, in pages of {sorted(pages)}")


def facts(number: int, model: Any, server: Any, weights: Any, scales: Any, stated: list[Stated]) -> dict[str, str]:
    """Facts that have to be equal so that bytes of the target, or of a draft, mean the same.

    `weights` names those of the target; `model` and `scales` are those of the number.
    """
    own = [each for each in stated if each.cache.group.model == number]
    if not own:
        return {}
    drafted = min(number, 1)
    path, revision, quantized = (getattr(server, _DRAFT * drafted + name, None) for name in _SERVED[drafted])
    words = [quantized, f"dummy {server.random_seed}" if server.load_format == "dummy" else ""]
    named = (weights if not number else None) or weights_of(path or server.model_path, revision, words)
    values = [[scales.get(n, (1.0, 1.0)) for n in each.cache.layers] for each in own if each.scaled]
    order = next((each.order for each in own if each.order), "")
    return facts_of(of(number), named, model.hf_text_config, values, order)
