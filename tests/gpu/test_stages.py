"""Pipeline stages on two GPUs, over NCCL and over gloo, beside one rank."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kvproto_reference import checkpoint
from kvproto_reference.engine.description import Layout
from kvproto_reference.engine.world import World
from kvproto_reference.models import Decoder
from tests.gpu.test_dcp_exchange import on_gpus
from tests.reference.test_reference_stages import TARGETS, found

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAYOUTS = (Layout(pp=2, virtual=2), Layout(tp=2, draft_tp=1))


def _compare(folders: tuple[Path, Path], rank: int) -> None:
    one = found(*folders, Layout(), World(), f"cuda:{rank}")
    for layout in LAYOUTS:
        told = found(*folders, layout, World(rank, 2, dist.group.WORLD), f"cuda:{rank}")
        torch.testing.assert_close(told, one, atol=1e-3, rtol=0)


@pytest.mark.parametrize("back_end", ["nccl", "gloo"])
def test_both_ranks_find_what_one_finds(back_end: str, tmp_path: Path) -> None:
    for name, config in TARGETS.items():
        torch.manual_seed(7)
        checkpoint.save(tmp_path / name, Decoder(config))
    on_gpus(partial(_compare, (tmp_path / "untied", tmp_path / "tied")), back_end=back_end)
