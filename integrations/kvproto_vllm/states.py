"""How the recurrent states of vLLM's layers of Mamba 2 are stated.

A block of such a layer is the one state of a request: rows of the convolution's last inputs, [row, channel] or
[channel, row] as vLLM was told, and a matrix a head. What ranks divide follows from the shapes.
"""

from __future__ import annotations

import torch

from kvproto import Block, Cache, DType, LocalError
from kvproto.errors import ErrorCode
from kvproto_vllm.caches import FLOATS, Layers, Stated, refused

__all__ = ["STATE", "states"]

STATE = "MambaSpec"
"""vLLM's name of caches whose block is a state."""
_KIND = "mamba2"
"""The kind of states that two engines were tried with."""


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
    if kind != _KIND:
        raise refused(layers.names[0], f"states of {_KIND}", kind)
    conv, ssm = ([tensor[n] for tensor in layers.tensors] for n in range(2))
    conv = [each.transpose(1, 2) if rows_first else each for each in conv]
    _, heads, dim, width = ssm[0].shape
    inputs = heads * ranks * dim
    group = (conv[0].shape[1] * ranks - inputs) // 2  # lanes of B, and of C, over all ranks
    blocks = [Block(inputs, dim), Block(group, width), Block(group, width)]
    return [
        _state(layers, "conv", [each.unsqueeze(-1) for each in conv], blocks),
        _state(layers, "ssm", [each.flatten(2).unsqueeze(2) for each in ssm], [Block(heads * ranks)]),
    ]


def _state(layers: Layers, part: str, tensors: list[torch.Tensor], blocks: list[Block]) -> Stated:
    """One state of each layer, [block, lane, row, element]; ranks divide each of the `blocks` among them."""
    first = tensors[0]
    if first.dtype not in FLOATS:
        raise refused(layers.names[0], f"states of {', '.join(map(str, FLOATS))}", str(first.dtype))
    size, lanes = int(first.shape[3]) * first.itemsize, sum(block.lanes for block in blocks)
    parts: dict[str, tuple[DType, int, int]] = {part: (FLOATS[first.dtype], lanes, size)}
    rows, title = int(first.shape[2]), f"{layers.title} {part}"
    cache = Cache.state(title, layers.ids, parts=parts, rows=rows, blocks={part: blocks}, model=layers.model)
    return Stated(cache, tensors)
