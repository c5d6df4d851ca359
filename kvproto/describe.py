"""Descriptions of well-known models: from a Hugging Face config.json and parallel sizes to what each rank owns.

Parallel sizes end here: a Description states layers, lanes and token shares, and planning knows nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.geometry import Geometry, Group, LaneSpan, Owns, Rank, owns
from kvproto.wire.enums import DType, ErrorCode, FactRule, ItemKind
from kvproto.wire.messages import Fact, Part

__all__ = ["PRESETS", "Parallel", "describe", "draft_of"]

Config = Mapping[str, Any]

_BYTES = {
    DType.F32: 4, DType.F16: 2, DType.BF16: 2, DType.F8E4M3: 1, DType.F8E5M2: 1, DType.U8: 1, DType.I8: 1,
}  # fmt: skip


@attrs.frozen
class Parallel:
    """How an engine divides its ranks; rank = (pp * cp + cp_rank) * tp + tp_rank."""

    tp: int = 1
    """Tensor parallel: KV heads, latents and states."""
    pp: int = 1
    """Pipeline parallel: layers, the first ranks taking one more where they do not divide."""
    cp: int = 1
    """Context parallel: tokens, over ranks of their own (prefill)."""
    dcp: int = 1
    """Decode context parallel: tokens, over the TP ranks that would otherwise hold the same heads."""
    interleave: int = 1
    """Consecutive tokens that one cp or dcp rank takes."""
    page: int = 64
    """Tokens of a page."""

    def check(self) -> None:
        """Raise LocalError for sizes that no engine can have."""
        for name in ("tp", "pp", "cp", "dcp", "interleave", "page"):
            if getattr(self, name) < 1:
                raise _bad(name, "at least 1", getattr(self, name))
        if self.tp % self.dcp:
            raise _bad("dcp", f"a divisor of tp {self.tp}", self.dcp)
        if self.cp > 1 and self.dcp > 1:
            raise _bad("dcp", "1 with cp above 1: tokens are dealt once", self.dcp)


@attrs.frozen
class _Layers:
    """A group of layers of one model, and how a TP rank cuts its lanes: part by part, intervals of the whole."""

    group: Group
    layers: Sequence[int]
    blocks: Mapping[str, Sequence[tuple[int, int]]]
    """Of each part: blocks (lanes, lanes of a unit) one after the other on the lane axis, each cut on its own."""


def describe(
    target: Config, drafts: Iterable[Config] = (), parallel: Parallel | None = None, kv_dtype: DType | None = None,
    replica: int = 0, facts: Mapping[str, str] | None = None,
) -> Geometry:  # fmt: skip
    """The Geometry of one replica; `facts` are compared for equality by the other side. Raises LocalError."""
    sizes = parallel or Parallel()
    sizes.check()
    found: list[_Layers] = []
    for model, config in enumerate((target, *drafts)):
        found += _groups(config, model, len(found), sizes, kv_dtype)
    ranks: list[Rank] = []
    for pp in range(sizes.pp):
        for cp in range(sizes.cp):
            for tp in range(sizes.tp):
                shares = [s for one in found if (s := _share(one, pp, cp, tp, sizes)) is not None]
                ranks.append(Rank(rank=len(ranks), owns=tuple(shares)))
    named = tuple(Fact(name=n, value=v, rule=FactRule.EQUAL) for n, v in sorted((facts or {}).items()))
    return Geometry(replica=replica, facts=named, groups=tuple(one.group for one in found), ranks=tuple(ranks))


def draft_of(config: Config) -> Config | None:
    """The multi-token-prediction layers of a checkpoint, as a draft; None where it has none."""
    layers = int(config.get("num_nextn_predict_layers") or 0)
    return {**config, "num_hidden_layers": layers, "num_nextn_predict_layers": 0} if layers else None


def _groups(config: Config, model: int, first: int, sizes: Parallel, kv_dtype: DType | None) -> list[_Layers]:
    dtype = kv_dtype or _dtype(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"))
    size = _BYTES[dtype]
    count = _number(config, "num_hidden_layers")
    kinds = _layer_kinds(config, count)
    name = "target" if model == 0 else f"draft{model if model > 1 else ''}"
    dealt = sizes.cp if sizes.cp > 1 else sizes.dcp
    deal = {"cp_size": dealt, "interleave": sizes.interleave, "origin": 0} if dealt > 1 else _ALONE
    attention = [i for i, k in enumerate(kinds) if k == "attention"]
    made: list[_Layers] = []

    def add(
        label: str,
        kind: ItemKind,
        rows: int,
        parts: list[tuple[str, DType, int, int]],
        layers: list[int],
        blocks: Any,
        live: int | None = None,
    ) -> None:
        group = Group(
            id=first + len(made), name=label, model=model, kind=kind, rows=rows, tokens_per_row=1, live_rows=live,
            parts=tuple(Part(name=n, dtype=d, lanes=lanes, lane_bytes=b) for n, d, lanes, b in parts),
            **(deal if kind == ItemKind.PAGE else _ALONE),
        )  # fmt: skip
        made.append(_Layers(group, layers, blocks))

    if attention and config.get("kv_lora_rank"):
        width = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        add(name, ItemKind.PAGE, sizes.page, [("latent", dtype, 1, width * size)], attention, {"latent": [(1, 1)]})
    elif attention:
        heads = _number(config, "num_key_value_heads", "num_attention_heads")
        dim = int(config.get("head_dim") or _number(config, "hidden_size") // _number(config, "num_attention_heads"))
        v_dim = int(config.get("v_head_dim") or dim)
        parts = [("k", dtype, heads, dim * size), ("v", dtype, heads, v_dim * size)]
        add(name, ItemKind.PAGE, sizes.page, parts, attention, {"k": [(heads, 1)], "v": [(heads, 1)]})
    mamba = [i for i, k in enumerate(kinds) if k == "mamba"]
    if mamba:
        heads, head_dim = (
            _number(config, "mamba_num_heads", "mamba_n_heads"),
            _number(config, "mamba_head_dim", "mamba_d_head"),
        )
        groups, state = (
            _number(config, "n_groups", "mamba_n_groups"),
            _number(config, "ssm_state_size", "mamba_d_state"),
        )
        kernel = _number(config, "conv_kernel", "mamba_d_conv")
        inner, side = heads * head_dim, groups * state
        conv = [(inner, head_dim), (side, state), (side, state)]  # x by heads; B and C by groups
        plain = _BYTES[DType.BF16]
        add(
            f"{name} conv",
            ItemKind.SLOT,
            kernel - 1,
            [("conv", DType.BF16, inner + 2 * side, plain)],
            mamba,
            {"conv": conv},
            kernel - 1,
        )
        add(
            f"{name} ssm",
            ItemKind.SLOT,
            1,
            [("ssm", DType.F32, heads, head_dim * state * 4)],
            mamba,
            {"ssm": [(heads, 1)]},
            1,
        )
    if not made:
        raise _bad("config", "layers with a cache", "none")
    return made


_ALONE = {"cp_size": 1, "interleave": 1, "origin": 0}


def _layer_kinds(config: Config, count: int) -> list[str]:
    """attention, mamba or none, layer by layer."""
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        return [{"*": "attention", "M": "mamba"}.get(c, "none") for c in str(pattern)]
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed:
        return ["mamba" if "mamba" in k or "linear" in k else "attention" for k in listed]
    if config.get("attn_layer_indices"):
        return ["attention" if i in config["attn_layer_indices"] else "mamba" for i in range(count)]
    return ["attention"] * count


def _share(one: _Layers, pp: int, cp: int, tp: int, sizes: Parallel) -> Owns | None:
    """What one rank owns of a group; None where its stage has none of the layers."""
    total = max(one.layers) + 1 if sizes.pp == 1 else None
    layers = list(one.layers) if total else _stage(one.layers, pp, sizes.pp)
    if not layers:
        return None
    paged = one.group.kind == ItemKind.PAGE
    ranks, rank = (sizes.tp // sizes.dcp, tp // sizes.dcp) if paged else (sizes.tp, tp)
    spans = []
    for p, part in enumerate(one.group.parts):
        start = 0
        for lanes, unit in one.blocks[part.name]:
            lo, hi = _cut(lanes // unit, rank, ranks)
            spans.append(LaneSpan(part=p, lo=start + lo * unit, hi=start + hi * unit))
            start += lanes
    cp_rank = (cp if sizes.cp > 1 else tp % sizes.dcp) if paged else 0
    return attrs.evolve(owns(one.group, layers), lanes=tuple(spans), cp_rank=cp_rank)


def _stage(layers: Sequence[int], pp: int, stages: int) -> list[int]:
    """Layers of a pipeline stage: equal runs, the first stages one more."""
    base, more = divmod(len(layers), stages)
    start = pp * base + min(pp, more)
    return list(layers[start : start + base + (pp < more)])


def _cut(units: int, rank: int, ranks: int) -> tuple[int, int]:
    """Units of one rank: a share of them, or one that consecutive ranks hold alike where ranks are more."""
    if ranks >= units:
        at = rank * units // ranks
        return at, at + 1
    return units * rank // ranks, units * (rank + 1) // ranks


def _number(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise _bad(f"config.{names[0]}", "a number", "absent")


def _dtype(name: str) -> DType:
    known = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16, "float8_e4m3fn": DType.F8E4M3}
    if name not in known:
        raise _bad("config.torch_dtype", ", ".join(known), name)
    return known[name]


def _bad(path: str, mine: str, yours: object) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, str(yours))


def _llama(layers: int, hidden: int, heads: int, kv: int, dim: int = 128) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
    }


_DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1}
PRESETS: dict[str, tuple[Config, ...]] = {
    "llama-3-70b": (_llama(80, 8192, 64, 8),),
    "qwen3-235b-a22b": (_llama(94, 4096, 64, 4),),
    "deepseek-v3": (_DEEPSEEK_V3,),
    "deepseek-v3-nextn": (_DEEPSEEK_V3, draft_of(_DEEPSEEK_V3) or {}),
    "deepseek-v3-eagle3": (_DEEPSEEK_V3, _llama(1, 7168, 56, 8)),
    "nemotron-h-8b": (
        {
            **_llama(52, 4096, 32, 8), "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        },
    ),
}  # fmt: skip
"""Shapes of well-known models, the target first, then drafts; dtypes are bfloat16 unless told otherwise."""
