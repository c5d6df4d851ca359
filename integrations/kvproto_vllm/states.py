"""How the states of vLLM's layers of Mamba 2, of gated delta nets and of short convolutions are stated.

A block of such a layer is the one state of a request: rows of the convolution's last inputs, [row, channel] or
[channel, row] as vLLM was told, and a matrix a head, but for short convolutions. What ranks divide follows from the
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
_CONVOLVED = {
    "mamba2": ("heads", "groups", "groups"),
    "gdn_attn": ("groups", "groups", "heads"),
    "short_conv": ("all",),
}
"""By the kinds of states that two engines were tried with: what a convolution has one after the other. Mamba 2: inputs
of the heads, B and C. Gated delta nets: queries and keys, as wide as a row of a head's matrix, and values."""


def states(layers: Layers, ranks: int, rows_first: bool) -> list[Stated]:
    """The states of these layers, each a cache: the convolution's inputs, stored as `rows_first` says, and matrices.

    Raises LocalError for states that are kept in several blocks, or of another kind.
    """
    spec = layers.spec
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower()
    if spec.mamba_cache_mode != "none":
        advice = "start the engine with --no-enable-prefix-caching"
        mine = "a state that stays in its block, mamba_cache_mode none"
        raise LocalError(ErrorCode.BAD_COLUMNS, layers.names[0], mine, spec.mamba_cache_mode, advice)
    if spec.num_speculative_blocks:
        raise refused(layers.names[0], "states without drafts", f"{spec.num_speculative_blocks} blocks for drafts")
    if kind not in _CONVOLVED:
        raise refused(layers.names[0], f"states of {', '.join(_CONVOLVED)}", kind)
    conv, *rest = ([tensor[n] for tensor in layers.tensors] for n in range(len(layers.tensors[0])))
    conv = [each.transpose(1, 2) if rows_first else each for each in conv]
    blocks = {"all": Block(conv[0].shape[1] * ranks)}
    made: list[Stated] = []
    for ssm in rest:
        _, heads, dim, width = ssm[0].shape
        inputs = heads * ranks * dim
        blocks |= {"heads": Block(inputs, dim), "groups": Block((blocks["all"].lanes - inputs) // 2, width)}
        made.append(_state(layers, "ssm", [each.flatten(2).unsqueeze(2) for each in ssm], [Block(heads * ranks)]))
    cut = [blocks[name] for name in _CONVOLVED[kind]]
    return [_state(layers, "conv", [each.unsqueeze(-1) for each in conv], cut), *made]


def order_of(layers: Layers) -> str:
    """How the matrix of a head lies, where back ends differ under the same shape: else nothing."""
    if type(layers.spec).__name__ != STATE or "GDN" not in layers.backend:
        return ""
    return "key, value" if layers.tensors[0][0].device.type == "cpu" else "value, key"


def _state(layers: Layers, part: str, tensors: list[torch.Tensor], blocks: list[Block]) -> Stated:
    """One state of each layer, [block, lane, row, element]; ranks divide each of the `blocks` among them."""
    first = tensors[0]
    if first.dtype not in FLOATS:
        raise refused(layers.names[0], f"states of {', '.join(map(str, FLOATS))}", str(first.dtype))
    cache = state_of(f"{layers.title} {part}", layers.ids, part, first, blocks, layers.model)
    return Stated(cache, tensors)
