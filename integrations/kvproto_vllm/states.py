"""How the recurrent states of vLLM's layers are stated: Mamba 1 and 2, gated delta nets, short convolutions.

A block of such a layer is the one state of a request: rows of the convolution's last inputs, [row, channel] or
[channel, row] as vLLM was told, and a matrix a head, or a row a channel. What ranks divide follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvproto import Block, Cache, DType, LocalError
from kvproto.errors import ErrorCode
from kvproto_vllm.caches import FLOATS, Layers, Stated, refused

__all__ = ["STATE", "order_of", "states"]

STATE = "MambaSpec"
"""vLLM's name of caches whose block is a state."""


def states(layers: Layers, ranks: int, rows_first: bool) -> list[Stated]:
    """The states of these layers, each a cache: of the convolution's inputs, stored as `rows_first` says, and beyond.

    Raises LocalError for states that are kept in several blocks, or of a kind that is not known.
    """
    spec = layers.spec
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower()
    if spec.mamba_cache_mode != "none":
        advice = "start the engine with --no-enable-prefix-caching"
        mine = "a state that stays in its block, mamba_cache_mode none"
        raise LocalError(ErrorCode.BAD_COLUMNS, layers.names[0], mine, spec.mamba_cache_mode, advice)
    if spec.num_speculative_blocks:
        raise refused(layers.names[0], "states without drafts", f"{spec.num_speculative_blocks} blocks for drafts")
    if kind not in _KINDS:
        raise refused(layers.names[0], f"states of {', '.join(_KINDS)}", kind)
    parts, cut = _KINDS[kind]
    by_part = [[tensor[n] for tensor in layers.tensors] for n in range(len(parts))]
    found = dict(zip(parts, by_part, strict=True))
    blocks = cut({part: tuple(each[0].shape[1:]) for part, each in found.items()}, ranks, rows_first)
    return [_state(layers, part, found[part], blocks[part], rows_first) for part in parts]


def order_of(layers: list[Layers]) -> str:
    """In which order a head's state lies, where back ends differ under the same shape; else nothing."""
    of_deltas = [each for each in layers if type(each.spec).__name__ == STATE and "GDN" in each.backend]
    if not of_deltas:
        return ""
    return "key, value" if of_deltas[0].tensors[0][0].device.type == "cpu" else "value, key"


def _state(layers: Layers, part: str, tensors: list[torch.Tensor], blocks: list[Block], rows_first: bool) -> Stated:
    """One state of each layer, [block, head, row, bytes]."""
    if tensors[0].dtype not in FLOATS:
        raise refused(layers.names[0], f"states of {', '.join(map(str, FLOATS))}", str(tensors[0].dtype))
    rows = 1
    if part == "conv":
        made = [(each.transpose(1, 2) if rows_first else each).unsqueeze(-1) for each in tensors]
        rows = made[0].shape[2]
    else:
        made = [each.flatten(2).unsqueeze(2) for each in tensors]
    lanes, size = sum(block.lanes for block in blocks), made[0].shape[-1] * made[0].itemsize
    parts: dict[str, tuple[DType, int, int]] = {part: (FLOATS[made[0].dtype], lanes, size)}
    title = f"{layers.title} {part}"
    cache = Cache.state(title, layers.ids, parts=parts, rows=rows, blocks={part: blocks}, model=layers.model)
    return Stated(cache, made)


Shapes = dict[str, tuple[int, ...]]
Cut = Callable[[Shapes, int, bool], dict[str, list[Block]]]


def _channels(shape: tuple[int, ...], ranks: int, rows_first: bool) -> int:
    return shape[1 if rows_first else 0] * ranks


def _alike(shapes: Shapes, ranks: int, rows_first: bool) -> dict[str, list[Block]]:
    """Channels of the convolution and of the state are divided alike; a state alone by its heads."""
    return {
        part: [Block(_channels(shape, ranks, rows_first) if part == "conv" else shape[0] * ranks)]
        for part, shape in shapes.items()
    }


def _by_group(shapes: Shapes, ranks: int, rows_first: bool) -> dict[str, list[Block]]:
    """Mamba 2: inputs by heads, then B and C by groups, as many elements each as a head's state is wide."""
    heads, dim, width = shapes["ssm"]
    inputs = heads * ranks * dim
    group = (_channels(shapes["conv"], ranks, rows_first) - inputs) // 2
    conv = [Block(inputs, dim), Block(group, width), Block(group, width)]
    return {"conv": conv, "ssm": [Block(heads * ranks)]}


def _by_key(shapes: Shapes, ranks: int, rows_first: bool) -> dict[str, list[Block]]:
    """Gated delta nets: queries and keys by their heads, then values by theirs."""
    heads, value, key = shapes["ssm"]
    values = heads * ranks * value
    keys = (_channels(shapes["conv"], ranks, rows_first) - values) // 2
    return {"conv": [Block(keys, key), Block(keys, key), Block(values, value)], "ssm": [Block(heads * ranks)]}


_KINDS: dict[str, tuple[tuple[str, ...], Cut]] = {
    "mamba1": (("conv", "ssm"), _alike),
    "mamba2": (("conv", "ssm"), _by_group),
    "gdn_attn": (("conv", "ssm"), _by_key),
    "short_conv": (("conv",), _alike),
    "linear": (("ssm",), _alike),
}
"""By vLLM's name of a kind: its tensors of a layer, and how ranks divide them."""
