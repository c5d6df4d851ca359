"""Statements of SGLang's recurrent states: of Mamba 2, of gated and Kimi's delta nets, and of short convolutions.

A request has one slot. It holds the last inputs of a convolution, [channel, input] (Kimi's: [input, channel]), and a
matrix a head, but for short convolutions. What a convolution has one after another, ranks divide each on its own.
"""

from __future__ import annotations

from typing import Any

from kvproto import Block
from kvproto_engines.elements import FLOATS
from kvproto_engines.states import state_of
from kvproto_sglang.stated import Owner, Stated, Table, refused

__all__ = ["recurrent"]

_GROUPS = {"nemotron_h": "n_groups"} | dict.fromkeys(("granitemoehybrid", "falcon_h1"), "mamba_n_groups")
"""By the types of models with Mamba 2, how their configs call the groups. Inputs of heads, B and C are convolved."""


def recurrent(pool: Any, owner: Owner) -> list[Stated]:
    """The states of a MambaPool; raises LocalError for those of another kind, or with more than these in a slot."""
    if (kind := type(pool).__name__) != "MambaPool":
        raise refused("state pool", "MambaPool", kind)
    if pool._slot_siblings or getattr(pool, "replayssm_write_pos", None) is not None:
        raise refused("state pool", "a convolution and a matrix in a slot", "updates of them, or other states, too")
    conv, matrix, ids = pool.mamba_cache.conv, pool.mamba_cache.temporal, list(pool.mamba_layer_ids)
    if len(conv) != 1 or conv[0].dim() != 4 or not conv[0].numel():
        raise refused("state pool", "one convolution", f"tensors {[tuple(each.shape) for each in conv]}")
    inputs = conv[0].transpose(2, 3) if pool.conv_slice_axis == 1 else conv[0]  # [layer, slot, channel, input]
    blocks = _blocks(pool, owner, inputs.shape[2] * owner.tp)
    made = [_state(owner, "conv", inputs.unsqueeze(-1), ids, blocks, "")]
    if matrix.numel():
        if matrix.stride(3) != matrix.shape[4] or matrix.stride(4) != 1:
            raise refused("state pool", "a matrix a head without gaps", f"strides {matrix.stride()}")
        heads, order = [Block(matrix.shape[2] * owner.tp)], "value, key" if pool.conv_shard_groups else ""
        made.append(_state(owner, "ssm", matrix.flatten(3).unsqueeze(3), ids, heads, order))
    return made


def _blocks(pool: Any, owner: Owner, channels: int) -> list[Block]:
    """Blocks of the convolution of all ranks, in order: `channels`, but where ranks hold the same groups."""
    matrix, tp, text = pool.mamba_cache.temporal, owner.tp, owner.model.hf_text_config
    if sizes := [int(size) for size in pool.conv_shard_groups or ()]:
        if sum(sizes) != channels or any(size % tp for size in sizes):
            raise refused("state pool", f"{channels} channels, of which {tp} ranks hold equal parts", str(sizes))
        return [Block(size) for size in sizes]
    if not matrix.numel():
        return [Block(channels)]
    if (kind := getattr(text, "model_type", "")) not in _GROUPS:
        raise refused("model_type", f"one of {sorted(_GROUPS)}, or states whose parts SGLang says", repr(kind))
    _, _, heads, dim, width = matrix.shape
    groups, lanes = int(getattr(text, _GROUPS[kind])), heads * dim * tp
    held = (channels // tp - heads * dim) // (2 * width)
    if held != max(1, groups // tp) or (groups > tp and groups % tp):
        raise refused("groups of Mamba", f"{groups} divided by {tp} ranks", f"{held} on a rank")
    return [Block(lanes, dim), Block(groups * width, width), Block(groups * width, width)]


def _state(owner: Owner, part: str, tensor: Any, ids: list[int], blocks: list[Block], order: str) -> Stated:
    """One state of all layers, [layer, slot, lane, row, element]; ranks divide each of the blocks among them."""
    if tensor.dtype not in FLOATS:
        raise refused(f"state {part}", f"one of {[str(each) for each in FLOATS]}", str(tensor.dtype))
    cache = state_of(f"{owner.title} {part}", ids, part, tensor[0], blocks, owner.number)
    return Stated(cache, list(tensor), "page head token dim", Table(slot=True), "mamba", order=order)
