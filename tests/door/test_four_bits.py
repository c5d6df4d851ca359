"""Caches of 4-bit elements and their block scales, in the types of torch and as bytes, handed over between TP sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvproto import Cache, DType, LocalError, Parallel, Pool, Prompt, Sink, Source, allocate, lay_out, new_ticket
from kvproto.wire.enums import ErrorCode

from .doors import address_in

HEADS, DIM, PAGE, PAGES = 4, 64, 4, 8
KINDS = {"NVFP4": (16, DType.F8E4M3, torch.float8_e4m3fn), "MXFP4": (32, DType.F8E8M0, torch.float8_e8m0fnu)}


def cache(kind: str) -> Cache:
    block, dtype, _ = KINDS[kind]
    return Cache.gqa(
        "kv", 1, kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.F4E2M1, scale_block=block, scale_dtype=dtype
    )


def tensor(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Pages of shared memory, [page, token, head, byte], as elements of `dtype`."""
    made = torch.from_dlpack(allocate(PAGES * PAGE * HEADS * width))
    made.copy_(torch.from_numpy(np.random.default_rng(seed).integers(1, 256, made.shape[0], np.uint8)))
    return made.view(dtype).reshape(PAGES, PAGE, HEADS, width)


@pytest.mark.parametrize("kind", KINDS)
def test_four_bits_and_their_scales_arrive_by_heads(kind: str, tmp_path: Path) -> None:
    block, _, scale = KINDS[kind]
    four = torch.float4_e2m1fn_x2
    given: dict[str, Any] = {"k": [tensor(DIM // 2, four, 1)], "v": [tensor(DIM // 2, torch.uint8, 2)]}
    given |= {f"{part}_scale": [tensor(DIM // block, scale, seed)] for seed, part in enumerate("kv", 3)}
    address, prompt = address_in(tmp_path), Prompt(range(10))
    halves = lay_out([cache(kind)], Parallel(tp=2))
    with Source("prefill", Pool(lay_out([cache(kind)]), {"kv": given}), address) as source:
        pools = [Pool.allocate(halves, PAGES, rank=rank) for rank in range(2)]
        sinks = [Sink("decode", pool, {"prefill": address}) for pool in pools]
        ticket = new_ticket(source.name)
        request = source.request(ticket, prompt)
        found = [sink.fetch(ticket, prompt, {"kv": [6, 0, 3]}) for sink in sinks]
        request.finish({"kv": [5, 1, 2]})
        for fetch in found:
            fetch.wait(10)
        at = np.arange(10)
        for part, (whole,) in given.items():
            sent = whole.view(torch.uint8).numpy()[np.array([5, 1, 2])[at // PAGE], at % PAGE]
            came = [pool.array("kv", 0, part)[np.array([6, 0, 3])[at // PAGE], at % PAGE] for pool in pools]
            assert np.array_equal(np.concatenate(came, axis=1), sent), part
        for sink in sinks:
            sink.close()


@pytest.mark.parametrize(
    ("width", "dtype", "says"), [(DIM, torch.float4_e2m1fn_x2, "32 bytes"), (DIM // 2, torch.float8_e4m3fn, "F4E2M1")]
)
def test_elements_that_are_not_four_bits_are_refused(width: int, dtype: torch.dtype, says: str) -> None:
    plain = Cache.gqa("kv", 1, kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.F4E2M1)
    given = {part: [tensor(width, dtype, 1)] for part in "kv"}
    with pytest.raises(LocalError, match=says) as caught:
        Pool(lay_out([plain]), {"kv": given})
    assert caught.value.code == ErrorCode.BAD_COLUMNS
