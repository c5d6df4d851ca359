"""Caches of vLLM's GPU back ends in device memory, stated by the connector and moved by transport `cuda`."""

from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from tests.vllm.backends import Backend, hand_over  # noqa: E402

NHD, HND = Backend(dtype=torch.bfloat16), Backend("BHNC", dtype=torch.bfloat16, name="FLASHINFER")
MLA = Backend(dtype=torch.bfloat16, mla=True, axes=3, name="FLASH_ATTN_MLA")
PAIRS = {
    "NHD to HND": (NHD, HND),
    "a layer to all layers": (HND, Backend("BLNHC")),
    "all layers, heads outside, to padded blocks": (Backend("BHLNC"), Backend("LBHNC", gap=64)),
    "kernel blocks of a quarter": (attrs.evolve(HND, block=64, kernel=16), attrs.evolve(NHD, block=32, kernel=32)),
    "FP8": (Backend(stored="fp8_e4m3", scales=(0.5, 0.25)), Backend("BHNC", stored="fp8_e4m3")),
    "INT8 with scales": (Backend(stored="int8_per_token_head"), Backend("BLNHC", stored="int8_per_token_head")),
    "MLA, blocks of 16 to 64": (MLA, attrs.evolve(MLA, order="LBNHC", axes=4, block=64, kernel=64, name="FLASHMLA")),
    "MLA, FP8": (attrs.evolve(MLA, stored="fp8_e4m3"), attrs.evolve(MLA, stored="fp8_e4m3", block=128, kernel=128)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_pages_meet_by_token_and_head(pair: str, tmp_path: Path) -> None:
    hand_over(*PAIRS[pair], f"ipc://{tmp_path}/p", "cuda")


def test_what_a_forward_is_still_writing_is_waited_for(tmp_path: Path) -> None:
    hand_over(NHD, HND, f"ipc://{tmp_path}/p", "cuda", torch.cuda.Stream())
