"""Pools with block scales in today's engines: NVFP4, MXFP8, FP4 of blocks of 16, and where their scales lie."""

from itertools import pairwise
from typing import Any

import pytest

from kvproto.errors import PlanError
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto_catalog.config import Config
from kvproto_catalog.engines import pools
from kvproto_catalog.models import Setup

from .test_engines import HEADS, MLA, TOKENS, move

SMALL = {**HEADS, "num_hidden_layers": 2, "head_dim": 64}
LATENT = {"num_hidden_layers": 2, **MLA}
MIXED = [
    ("vllm", {"kv_dtype": "nvfp4", "sm": 100}, 1),
    ("trtllm", {"kv_dtype": "nvfp4", "sm": 100}, 2),
    ("vllm", {"kv_dtype": "nvfp4_4over6", "sm": 100, "layout": "BLHNC", "page": 128}, 4),
]
LINEAR = [
    ("vllm", {"kv_dtype": "nvfp4", "sm": 120}, 1),
    ("sglang", {"kv_dtype": "nvfp4", "sm": 120, "page": 8}, 4),
    ("vllm", {"kv_dtype": "nvfp4", "sm": 90, "layout": "LBNHC", "page": 64}, 2),
]
BLOCKS_OF: dict[str, tuple[Config, list[tuple[str, dict[str, Any], int]]]] = {
    "NVFP4, mixed": (SMALL, MIXED),
    "NVFP4, mixed, windows": ({**SMALL, "sliding_window": 8, "sliding_window_pattern": 2}, MIXED),
    "NVFP4, in rows": (SMALL, LINEAR),
    "FP4 of 16": (SMALL, [("sglang", {"kv_dtype": "fp4_mx_block16", "page": n}, n) for n in (1, 4)]),
    "FP4 of 16, latent": (LATENT, [("sglang", {"kv_dtype": "fp4_mx_block16", "page": n}, n) for n in (1, 4)]),
    "MXFP8": (SMALL, [("sglang", {"kv_dtype": "mxfp8"}, n) for n in (1, 4)]),
    "NVFP4 of sparse attention": (
        LATENT | {"index_head_dim": 128}, [("vllm", {"kv_dtype": "nvfp4_ds_mla"}, n) for n in (1, 4)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS_OF)
def test_blocks_move_with_their_scales(name: str) -> None:
    """Between other TP sizes, pages and orders of a pool, as far as scales lie alike."""
    config, setups = BLOCKS_OF[name]
    sides = [pools(engine, config, (), Setup(Parallel(tp=tp), **options)) for engine, options, tp in setups]
    assert all(any("scale" in part.name for group in side.geometry.groups for part in group.parts) for side in sides)
    tokens = 128 if "sparse" in name else TOKENS  # what strides do not describe moves in whole pages
    assert all(move(a, b, tokens) > 0 for a, b in pairwise([*sides, sides[0]]))


def test_scales_that_lie_otherwise_are_refused() -> None:
    """The same option on two GPUs: bytes of one would be read as other tokens' scales on the other."""
    a, b = (pools("vllm", SMALL, (), Setup(kv_dtype="nvfp4", sm=sm)) for sm in (100, 120))
    with pytest.raises(PlanError) as caught:
        plan(a.geometry, b.geometry)
    assert caught.value.path == "groups[target].parts[v_scale].lanes"


def test_a_block_is_k_its_scales_v_and_its_scales() -> None:
    """As vLLM's own split of a block has it: 16 tokens of a head are 512 bytes of either, and 64 of scales."""
    made = pools("vllm", SMALL, (), Setup(Parallel(tp=4), kv_dtype="nvfp4", sm=100)).memory(0, 3)
    assert made.columns[0].offset.tolist()[:3] == [0, 512, 576]
    assert made.columns[1].offset.tolist()[0] == 1088
    assert [int(c.item_stride[0]) for c in made.columns] == [1152, 1152]
    assert [int(c.row_stride[-1]) for c in made.columns] == [32, 16]
