"""Statements of SGLang's recurrent states: of Mamba 1 and 2, of gated and Kimi's delta nets, of linear attention, of
short convolutions, and of embeddings per layer.

A request has one slot. It holds the last inputs of a convolution, [channel, input] (Kimi's: [input, channel]), and a
matrix a head, or one of the two: short convolutions have no matrix, linear attention no convolution. What a convolution
has one after another, ranks divide each on its own.
"""

from __future__ import annotations

from typing import Any

from kvproto import Block, Cache, DType
from kvproto_engines.elements import FLOATS
from kvproto_engines.states import state_of
from kvproto_sglang.pools.refusals import REFUSED
from kvproto_sglang.pools.stated import Owner, Stated, Table, refused

__all__ = ["SIBLINGS", "STATES", "recurrent"]

STATES = ("MambaPool",)
"""SGLang's classes of pools of states."""
SIBLINGS = ("ShortConvPool", "NGramPool")
"""Classes of what lies beside them in a slot."""

_GROUPS = dict.fromkeys(("nemotron_h", "mamba2"), "n_groups")
_GROUPS |= dict.fromkeys(("granitemoehybrid", "falcon_h1"), "mamba_n_groups")
"""By the types of models with Mamba 2, how their configs call the groups. Inputs of heads, B and C are convolved."""
_DELTAS = ("gigachat3_5", "jet_nemotron")
"""Types of models with gated delta nets whose shapes do not say that queries, keys and values are convolved."""
_STREAMS = (
    ("k_conv", False), ("v_conv", False), ("k_conv", True), ("v_conv", True), ("sglang.attn_conv", None),
    ("sglang.mlp_conv", None),
)  # fmt: skip
"""Of Inkling's convolutions the part, and whether it is of layers with a window, of the others, or of all."""
_ORDERS = {"delta": "value, key", "linear": "key, value"}
"""Axes of the matrix of a head, where other engines have others under the same shape."""


def recurrent(pool: Any, owner: Owner) -> list[Stated]:
    """The states of a MambaPool; raises LocalError for those of another kind, or with more than these in a slot."""
    if (kind := type(pool).__name__) not in STATES:
        raise refused("state pool", ", ".join(STATES), f"{kind}: {REFUSED.get(kind, 'not here')}")
    if getattr(pool, "replayssm_write_pos", None) is not None:
        raise refused("state pool", "states with all updates in them", "updates beside them (enable_linear_replayssm)")
    conv, matrix, ids = pool.mamba_cache.conv, pool.mamba_cache.temporal, list(pool.mamba_layer_ids)
    if len(conv) == len(_STREAMS) and hasattr(owner.model.hf_text_config, "local_layer_ids"):
        return _streams(conv, ids, owner)
    if len(conv) != 1 or conv[0].dim() != 4 or not (conv[0].numel() or matrix.numel()):
        raise refused("state pool", "one convolution", f"tensors {[tuple(each.shape) for each in conv]}")
    made, order = [], "linear"
    if conv[0].numel():
        inputs = conv[0].transpose(2, 3) if pool.conv_slice_axis == 1 else conv[0]  # [layer, slot, channel, input]
        blocks, order = _blocks(pool, owner, inputs.shape[2] * owner.tp)
        made.append(_state(owner, "conv", inputs.unsqueeze(-1), ids, blocks, ""))
    if matrix.numel():
        if matrix.stride(3) != matrix.shape[4] or matrix.stride(4) != 1:
            raise refused("state pool", "a matrix a head without gaps", f"strides {matrix.stride()}")
        heads = [Block(matrix.shape[2] * owner.tp)]
        ssm = matrix.flatten(3).unsqueeze(3)
        made.append(_state(owner, "ssm", ssm, ids, heads, _ORDERS.get(order, "")))
    return made + [each for sibling in pool._slot_siblings for each in _beside(sibling, owner)]


def _streams(conv: list[Any], ids: list[int], owner: Owner) -> list[Stated]:
    """The short convolutions of Inkling, [layer, slot, input, channel].

    Ranks divide those of K and V by heads; each has those of what attention and MLP add whole.
    """
    model, made, hidden = owner.model, list[Stated](), owner.model.hf_text_config.hidden_size
    local = {*model.hf_text_config.local_layer_ids}
    if owner.number or {each.shape[3] for each in conv[4:]} != {hidden} or conv[0].dtype not in FLOATS:
        mine = f"convolutions of a target, of {hidden} channels each"
        raise refused("state pool", mine, f"{conv[4].shape[3]} of the {owner.of}, {conv[0].dtype}")
    for tensor, (part, windowed) in zip(conv, _STREAMS, strict=True):
        places = [n for n, layer in enumerate(ids) if windowed is None or (layer in local) == windowed]
        if not places:
            continue
        layers, views = [ids[n] for n in places], [tensor[n].transpose(1, 2).unsqueeze(-1) for n in places]
        title, blocks = owner.title, [Block(hidden)]
        if windowed is not None:
            heads = int(model.get_swa_num_kv_heads(1) if windowed else model.get_total_num_kv_heads())
            dim = tensor.shape[3] // max(1, heads // owner.tp)
            title, blocks = owner.within(layers, windowed).title, [Block(heads * dim, dim)]
        cache = state_of(f"{title} {part}", layers, part, views[0], blocks, owner.number)
        whole = cache.over(tp=1) if windowed is None else cache
        made.append(Stated(whole, views, "page head token dim", Table(slot=True), "mamba"))
    return made


def _blocks(pool: Any, owner: Owner, channels: int) -> tuple[list[Block], str]:
    """Blocks of the convolution of all ranks, in order, and what it is one of."""
    matrix, tp, text = pool.mamba_cache.temporal, owner.tp, owner.model.hf_text_config
    if sizes := [int(size) for size in pool.conv_shard_groups or ()]:
        if sum(sizes) != channels or any(size % tp for size in sizes):
            raise refused("state pool", f"{channels} channels, of which {tp} ranks hold equal parts", str(sizes))
        return [Block(size) for size in sizes], "delta"
    _, _, heads, dim, width = matrix.shape
    lanes = heads * dim * tp
    if not matrix.numel() or (dim == 1 and lanes == channels):  # short convolutions, and Mamba 1
        return [Block(channels)], ""
    if (kind := getattr(text, "model_type", "")) in _DELTAS:
        keys = (channels - lanes) // 2
        if keys % tp:
            raise refused("state pool", f"keys of {tp} ranks in equal parts", str(keys))
        return [Block(keys), Block(keys), Block(lanes)], "delta"
    if kind not in _GROUPS:
        known = sorted([*_GROUPS, *_DELTAS])
        raise refused("model_type", f"one of {known}, or states whose parts SGLang says", repr(kind))
    groups = int(getattr(text, _GROUPS[kind]))
    held = (channels // tp - heads * dim) // (2 * width)
    if held != max(1, groups // tp) or (groups > tp and groups % tp):
        raise refused("groups of Mamba", f"{groups} divided by {tp} ranks", f"{held} on a rank")
    return [Block(lanes, dim), Block(groups * width, width), Block(groups * width, width)], ""


def _beside(sibling: Any, owner: Owner) -> list[Stated]:
    """State of Qwen4-Exp's embeddings per layer in the same slot: inputs of a short convolution, or the last tokens.

    It is whole on every rank.
    """
    if (kind := type(sibling).__name__) not in SIBLINGS:
        raise refused("state pool", "a convolution, a matrix and embeddings per layer in a slot", kind)
    if not sibling.enabled:
        return []
    if kind == SIBLINGS[0]:
        held, ids, part = sibling.conv_state, list(sibling.layer_map), "ple_conv"  # [layer, slot, channel, input]
        size = {part: (FLOATS[held.dtype], held.shape[2], held.itemsize)}
        rows = held.shape[3]
    else:
        held, ids, part = sibling.context[None, :, None], [0], "ngram"  # [layer, slot, 1, token]
        size, rows = {part: (DType.I64, 1, held.itemsize)}, held.shape[3]
    cache = Cache.state(f"{owner.title} {part}", ids, parts=size, rows=rows, model=owner.number).over(tp=1)
    tensors = [each.unsqueeze(-1) for each in held]
    return [Stated(cache, tensors, "page head token dim", Table(slot=True), "mamba")]


def _state(owner: Owner, part: str, tensor: Any, ids: list[int], blocks: list[Block], order: str) -> Stated:
    """One state of all layers, [layer, slot, lane, row, element]; ranks divide each of the blocks among them."""
    if tensor.dtype not in FLOATS:
        raise refused(f"state {part}", f"one of {[str(each) for each in FLOATS]}", str(tensor.dtype))
    cache = state_of(f"{owner.title} {part}", ids, part, tensor[0], blocks, owner.number)
    return Stated(cache, list(tensor), "page head token dim", Table(slot=True), "mamba", order=order)
