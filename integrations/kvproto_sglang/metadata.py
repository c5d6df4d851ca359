"""SGLang's metadata buffers as hand-off data: what decode needs of a prompt beside its pages.

Each request has a row in every buffer. The first token and its log probability have the names of the specification, so
that other engines meet them; the rest is SGLang's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvproto import Cache, DType

__all__ = ["GROUP", "PARTS", "SETS", "cache_of", "read", "write"]

GROUP = "first"
"""Name of the group."""


@attrs.frozen
class Part:
    """A part of the group.

    Fields:
        dtype: Of its elements, of four bytes.
        buffer: The attribute of SGLang's MetadataBuffers.
        whole: Whether all of the buffer's row is handed over; else its first element.
    """

    dtype: DType
    buffer: str
    whole: bool = False


PARTS = {
    "token": Part(DType.U32, "output_ids"),
    "logprob": Part(DType.F32, "output_token_logprobs_val"),
    "sglang.counts": Part(DType.I32, "cached_tokens", True),
    "sglang.top_logprobs": Part(DType.F32, "output_top_logprobs_val", True),
    "sglang.top_tokens": Part(DType.I32, "output_top_logprobs_idx", True),
}
SETS: Mapping[str, tuple[str, ...]] = {"all": tuple(PARTS), "token": ("token",), "request": ()}
"""What a decode engine asks of those that prefill for it, by the setting `metadata`."""


def cache_of(buffers: Any, names: tuple[str, ...]) -> list[Cache]:
    """The hand-off group of these parts; none where there are none."""
    parts = {name: (PARTS[name].dtype, _bytes(buffers, name)) for name in names}
    return [Cache.handoff(GROUP, parts)] if parts else []


def read(buffers: Any, row: int, names: tuple[str, ...]) -> dict[str, dict[str, bytes]]:
    """What SGLang wrote into a row, as `Request.finish` takes it."""
    if not names:
        return {}
    found = {name: _row(buffers, name, row).numpy().tobytes() for name in names}
    return {GROUP: found}


def write(buffers: Any, row: int, room: int, handoff: Mapping[str, Mapping[str, bytes]], token: int | None) -> None:
    """Fill a row as the prefill engine's SGLang would have; `token` is the first token where it was not handed over."""
    for name, data in handoff.get(GROUP, {}).items():
        _row(buffers, name, row).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if token is not None:
        buffers.output_ids[row, 0] = token
    buffers.output_token_logprobs_idx[row, 0] = buffers.output_ids[row, 0]
    buffers.bootstrap_room[row, 0] = room  # by this SGLang knows that the row is there


def _row(buffers: Any, name: str, row: int) -> torch.Tensor:
    part = PARTS[name]
    found: torch.Tensor = getattr(buffers, part.buffer)[row]
    return (found if part.whole else found[:1]).view(torch.uint8)


def _bytes(buffers: Any, name: str) -> int:
    return _row(buffers, name, 0).numel()
