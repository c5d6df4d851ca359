"""Statements of the states of vLLM's layers: of Mamba 1 and 2, delta nets, linear attention and short convolutions.

A block of such a layer is the one state of a request: rows of the convolution's last inputs, [row, channel] or
[channel, row] as vLLM was told, and a matrix a head, or for Mamba 1 a row a channel. What ranks divide follows from the
shapes.
"""

from __future__ import annotations

import torch

from kvproto import Block, LocalError
from kvproto.errors import ErrorCode
from kvproto_engines.elements import FLOATS
from kvproto_engines.states import convolved, state_of
from kvproto_vllm.pools.caches import Layers, Stated
from kvproto_vllm.specs import STATE, refused

__all__ = ["KINDS", "order_of", "states"]

KINDS = {
    "mamba1": (("heads",), True),
    "mamba2": (("heads", "groups", "groups"), True),
    "gdn_attn": (("groups", "groups", "heads"), True),
    "linear": ((), True),
    "short_conv": (("all",), False),
}
"""By vLLM's kinds of states: what a convolution has one after the other, and whether there is a matrix. Mamba:
inputs of the heads, which in Mamba 1 are channels, then B and C. Delta nets, Kimi's too: queries and keys, as wide as a
row of a head's matrix, and values."""
_ORDERS = {"gdn_attn": ("key, value", "value, key"), "linear": ("key, value", "key, value")}
"""Axes of the matrix of a head on a CPU and on a GPU, where other engines have others under the same shape."""


def states(layers: Layers, rows_first: bool) -> list[Stated]:
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
    (inputs, matrix), found = KINDS.get(kind, ((), False)), layers.tensors[0]
    whole = getattr(spec, "tp_replicated", False)  # of embeddings per layer
    ranks, part = (1, "ple_conv") if whole else (layers.ranks, "conv")
    if kind not in KINDS or len(found) != bool(inputs) + matrix or (whole and matrix):
        shapes = f"{kind} {[x.shape for x in found]}{' that ranks do not divide' * whole}"
        raise refused(layers.names[0], f"states of {', '.join(KINDS)}, as they are alone", shapes)
    made: list[Stated] = []
    lanes: tuple[int, ...] = ()
    if matrix:
        *sizes, width = found[-1].shape[1:]
        heads, dim = (*sizes, 1)[:2]
        lanes = heads * ranks, dim, width
        ssm = [each[-1].flatten(2).unsqueeze(2) for each in layers.tensors]
        made.append(_state(layers, "ssm", ssm, [Block(lanes[0])]))
    if inputs:
        conv = [(each[0].transpose(1, 2) if rows_first else each[0]).unsqueeze(-1) for each in layers.tensors]
        channels = conv[0].shape[1] * ranks
        blocks = [Block(channels, channels)] if whole else convolved(inputs, channels, *lanes)
        made.insert(0, _state(layers, part, conv, blocks))
    return made


def order_of(layers: Layers) -> str:
    """The order of the matrix of a head, where engines differ under the same shape: else nothing."""
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
