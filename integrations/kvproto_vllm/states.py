"""How the states of vLLM's layers are stated: of Mamba 1 and 2, delta nets, linear attention and short convolutions.

A block of such a layer is the one state of a request: rows of the convolution's last inputs, [row, channel] or
[channel, row] as vLLM was told, and a matrix a head, or for Mamba 1 a row a channel. What ranks divide follows from the
shapes.
"""

from __future__ import annotations

import torch

from kvproto import Block, LocalError
from kvproto.errors import ErrorCode
from kvproto_engines.elements import FLOATS
from kvproto_engines.states import state_of
from kvproto_vllm.caches import Layers, Stated, refused

__all__ = ["STATE", "order_of", "states"]

STATE = "MambaSpec"
"""vLLM's name of caches whose block is a state."""
_KINDS = {
    "mamba1": (("heads",), True),
    "mamba2": (("heads", "groups", "groups"), True),
    "gdn_attn": (("groups", "groups", "heads"), True),
    "linear": ((), True),
    "short_conv": (("all",), False),
}
"""By vLLM's kinds of states: what a convolution has one after the other, and whether there is a matrix. Mamba: inputs of
the heads, which Mamba 1 has one of for each channel, then B and C. Delta nets, Kimi's too: queries and keys, as wide as a
row of a head's matrix, and values."""
_ORDERS = {"gdn_attn": ("key, value", "value, key"), "linear": ("key, value", "key, value")}
"""Axes of the matrix of a head on a CPU and on a GPU, where other engines have others under the same shape."""


def states(layers: Layers, ranks: int, rows_first: bool) -> list[Stated]:
    """The states of these layers, each a cache: the convolution's inputs, stored as `rows_first` says, and matrices.

    Raises LocalError for states that are kept in several blocks, or of another kind.
    """
    spec, kind = layers.spec, _kind(layers)
    if spec.mamba_cache_mode != "none":
        advice = "start the engine with --no-enable-prefix-caching"
        mine = "a state that stays in its block, mamba_cache_mode none"
        raise LocalError(ErrorCode.BAD_COLUMNS, layers.names[0], mine, spec.mamba_cache_mode, advice)
    if spec.num_speculative_blocks:
        raise refused(layers.names[0], "states without drafts", f"{spec.num_speculative_blocks} blocks for drafts")
    if kind not in _KINDS:
        raise refused(layers.names[0], f"states of {', '.join(_KINDS)}", kind)
    convolved, matrix = _KINDS[kind]
    if len(found := layers.tensors[0]) != bool(convolved) + matrix or getattr(spec, "tp_replicated", False):
        mine, shapes = f"{kind}: a convolution's inputs, a matrix, divided by ranks", [tuple(x.shape) for x in found]
        raise refused(layers.names[0], mine, f"{shapes}, replicated {getattr(spec, 'tp_replicated', False)}")
    made: list[Stated] = []
    blocks: dict[str, Block] = {}
    if matrix:
        ssm = [each[-1].flatten(2).unsqueeze(2) for each in layers.tensors]
        heads, *sizes = found[-1].shape[1:]
        inputs, width = heads * ranks * (sizes[0] if sizes[1:] else 1), sizes[-1]
        blocks["heads"] = Block(inputs, inputs // (heads * ranks))
        made.append(_state(layers, "ssm", ssm, [Block(heads * ranks)]))
    if convolved:
        conv = [each[0].transpose(1, 2) if rows_first else each[0] for each in layers.tensors]
        blocks["all"] = Block(conv[0].shape[1] * ranks)
        if "groups" in convolved:
            blocks["groups"] = Block((blocks["all"].lanes - inputs) // 2, width)
        cut = [blocks[name] for name in convolved]
        made.insert(0, _state(layers, "conv", [each.unsqueeze(-1) for each in conv], cut))
    return made


def order_of(layers: Layers) -> str:
    """How the matrix of a head lies, where engines differ under the same shape: else nothing."""
    if type(layers.spec).__name__ != STATE:
        return ""
    return _ORDERS.get(_kind(layers), ("", ""))[layers.tensors[0][-1].device.type != "cpu"]


def _kind(layers: Layers) -> str:
    """vLLM's name of what these are the states of."""
    return getattr(layers.spec.mamba_type, "name", str(layers.spec.mamba_type)).lower()


def _state(layers: Layers, part: str, tensors: list[torch.Tensor], blocks: list[Block]) -> Stated:
    """One state of each layer, [block, lane, row, element]; ranks divide each of the `blocks` among them."""
    first = tensors[0]
    if first.dtype not in FLOATS:
        raise refused(layers.names[0], f"states of {', '.join(map(str, FLOATS))}", str(first.dtype))
    cache = state_of(f"{layers.title} {part}", layers.ids, part, first, blocks, layers.model)
    return Stated(cache, tensors)
