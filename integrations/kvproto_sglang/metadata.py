"""SGLang's metadata buffers as hand-off data: what decode needs of a prompt beside its pages.

Each request has a row in every buffer. The first token, its log probability and the hidden state for a draft have the
names of the specification, so that other engines meet them; the rest is SGLang's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvproto import Cache, DType
from kvproto_engines.elements import FLOATS
from kvproto_sglang.pools.stated import refused

__all__ = ["DRAFTED", "GROUP", "PARTS", "SETS", "cache_of", "names_of", "read", "write"]

GROUP = "first"
"""Name of the group."""


@attrs.frozen
class Part:
    """A part of the group.

    Fields:
        dtype: Of its elements; None: that of the buffer.
        buffer: The attribute of SGLang's MetadataBuffers; what is None there is not handed over.
        whole: Whether all of the buffer's row is handed over; else its first element.
    """

    dtype: DType | None
    buffer: str
    whole: bool = False


PARTS = {
    "token": Part(DType.U32, "output_ids"),
    "logprob": Part(DType.F32, "output_token_logprobs_val"),
    "sglang.counts": Part(DType.I32, "cached_tokens", True),
    "sglang.top_logprobs": Part(DType.F32, "output_top_logprobs_val", True),
    "sglang.top_tokens": Part(DType.I32, "output_top_logprobs_idx", True),
    "sglang.mask_length": Part(DType.I32, "output_token_sampling_mask_len", True),
    "sglang.mask_tokens": Part(DType.I32, "output_token_sampling_mask_idx", True),
    "sglang.mask_logprobs": Part(DType.F32, "output_token_sampling_logprobs", True),
    "hidden": Part(None, "output_hidden_states", True),
    "sglang.draft_probs": Part(DType.F32, "output_topk_p", True),
    "sglang.draft_tokens": Part(DType.I64, "output_topk_index", True),
    "sglang.draft_index": Part(DType.I32, "output_dsa_topk_indices", True),
}
DRAFTED = ("hidden", "sglang.draft_probs", "sglang.draft_tokens", "sglang.draft_index")
"""Parts that the first step of a draft needs."""
SETS: Mapping[str, tuple[str, ...]] = {"all": tuple(PARTS), "token": ("token",), "request": ()}
"""Parts that a decode engine asks of its prefill engines, by the setting `metadata`."""


def names_of(buffers: Any, chosen: str, draft: bool) -> tuple[str, ...]:
    """The parts of a set that an engine has, with a draft or without; raises LocalError for buffers on a device."""
    if getattr(buffers, "kv_checksum", None) is not None:
        advice = "no checksums of SGLang's: kvproto has its own, the option `verify`"
        raise refused("disaggregation_enable_kv_checksum", advice, "True")
    if buffers.output_ids.device.type != "cpu":
        raise refused("metadata buffers", "host memory", str(buffers.output_ids.device))
    names = [name for name in SETS[chosen] if draft or name not in DRAFTED]
    return tuple(name for name in names if getattr(buffers, PARTS[name].buffer, None) is not None)


def cache_of(buffers: Any, names: tuple[str, ...]) -> list[Cache]:
    """The hand-off group of these parts; none where there are none."""
    parts = {name: (_dtype(buffers, name), _row(buffers, name, 0).numel()) for name in names}
    return [Cache.handoff(GROUP, parts)] if parts else []


def read(buffers: Any, row: int, names: tuple[str, ...]) -> dict[str, dict[str, bytes]]:
    """Read what SGLang wrote into a row, as `Request.finish` takes it."""
    found = {name: _row(buffers, name, row).numpy().tobytes() for name in names}
    return {GROUP: found} if names else {}


def write(buffers: Any, row: int, room: int, handoff: Mapping[str, Any], token: int | None) -> None:
    """Fill a row as the prefill engine's SGLang would have; `token` is the first token where it was not handed over.

    What a draft would start with, and did not come, is nothing, rather than that of an earlier request.
    """
    came = handoff.get(GROUP, {})
    for name in DRAFTED:
        if name not in came and (left := getattr(buffers, PARTS[name].buffer, None)) is not None:
            left[row] = -1 if name == "sglang.draft_index" else 0
    for name, data in came.items():
        _row(buffers, name, row).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if token is not None:
        buffers.output_ids[row, 0] = token
    buffers.output_token_logprobs_idx[row, 0] = buffers.output_ids[row, 0]
    buffers.bootstrap_room[row, 0] = room  # by this SGLang knows that the row is there


def _row(buffers: Any, name: str, row: int) -> torch.Tensor:
    part = PARTS[name]
    found: torch.Tensor = getattr(buffers, part.buffer)[row]
    return (found if part.whole else found[:1]).view(torch.uint8)


def _dtype(buffers: Any, name: str) -> DType:
    part = PARTS[name]
    if part.dtype is not None:
        return part.dtype
    found = getattr(buffers, part.buffer).dtype
    if found not in FLOATS:
        raise refused(part.buffer, f"one of {[str(each) for each in FLOATS]}", str(found))
    return FLOATS[found]
