"""Back ends and exchanges by name, where there is no GPU: what is refused, and what falls back and says so."""

import contextlib
import math
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from kvproto_reference.attention.exchange import AllToAll, exchange_of
from kvproto_reference.attention.flashinfer_kernel import FlashInferKernel, kernel_of
from kvproto_reference.attention.lse import Base2
from kvproto_reference.attention.torch_kernel import TorchKernel
from kvproto_reference.cache import KVPool
from kvproto_reference.demo.arguments import DemoOptions
from kvproto_reference.demo.options import parse
from kvproto_reference.demo.prefill import PrefillProcess
from kvproto_reference.demo.start import devices
from kvproto_reference.engine.captured import CapturedRunner
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.models import ModelConfig

POOL = KVPool.allocate(ModelConfig(kind="gqa", hidden=8, layers=1, heads=2, kv_heads=1, head_dim=64, ffn=8), 2, 4)


def test_flashinfer_that_cannot_run_falls_back_to_torch_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="FlashInfer .*; attention runs on back end torch"):
        assert isinstance(kernel_of("flashinfer", POOL, [0, 0], [0, 0]), TorchKernel)
    with pytest.raises(EngineError, match="FlashInfer"):
        FlashInferKernel(POOL, [0, 0], [0, 0])


FLASHINFER = "--back-end flashinfer --dtype bfloat16 --transport cuda"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--back-end flashinfer --dtype bfloat16", "flashinfer runs on CUDA: it needs --transport cuda, or nixl with"),
        ("--back-end flashinfer --transport cuda", "flashinfer needs --dtype bfloat16 or float16"),
        ("--back-end flashinfer --framework jax", "--framework jax has attention of its own"),
        ("--captured", "--captured is of torch on GPUs: it needs --transport cuda"),
        ("--captured --tp 2 --transport cuda --devices 0,0", "--captured needs a GPU for each of the 2 ranks"),
        ("--captured --pp 2 --transport cuda --devices 0,1", "--captured needs all layers on every rank"),
        ("--exchange peer", "--exchange peer needs torch and a GPU for each of the 1 ranks"),
        ("--tp 2 --dcp 2 --exchange a2a_packed --transport cuda", "a2a_packed needs torch and a GPU for each of the 2"),
        pytest.param(FLASHINFER, r"needs FlashInfer: pip install 'kvproto-reference\[flashinfer\]'", marks=pytest.mark.skipif(
            find_spec("flashinfer") is not None, reason="FlashInfer is installed")),
    ],
)  # fmt: skip
def test_engines_say_what_the_options_need(tmp_path: Path, options: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        parse("decode", ["--dir", str(tmp_path / "kv"), *options.split()])


@pytest.mark.parametrize(
    ("options", "gpus"),
    [("--tp 2 --devices 3,1,0", (3, 1)), ("--tp 2 --devices 1,1", ()), ("--tp 2", ()), ("--devices 2", ())],
)
def test_ranks_compute_over_nccl_where_each_has_a_gpu(tmp_path: Path, options: str, gpus: tuple[int, ...]) -> None:
    parsed = parse("decode", ["--dir", str(tmp_path / "kv"), "--transport", "cuda", *options.split()])
    assert parsed.gpus == gpus


@pytest.mark.parametrize(
    ("count", "prefill", "decode", "gpus"),
    [
        (1, 2, 1, ("0", "0")),
        (2, 1, 1, ("0", "1")),
        (2, 2, 2, ("0,1", "1,0")),
        (2, 4, 2, ("0", "1,0")),
        (4, 2, 2, ("0,1", "2,3")),
        (4, 2, 4, ("0,1", "2,3,0,1")),
    ],
)
def test_engines_of_the_demo_share_gpus_where_half_are_too_few(
    monkeypatch: pytest.MonkeyPatch, count: int, prefill: int, decode: int, gpus: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert devices(DemoOptions(transport="cuda", prefill_tp=prefill, decode_tp=decode)) == gpus


@pytest.mark.parametrize(
    ("exchange", "dtype", "says"),
    [
        ("peer", "float32", "choose --dtype bfloat16"),
        ("a2a_packed", "auto", "32 elements in float32"),
        ("a2a", "float32", ""),
    ],
)
def test_exchanges_of_16_bits_refuse_32(tmp_path: Path, exchange: str, dtype: str, says: str) -> None:
    options = ["--tp", "2", "--dcp", "2", "--transport", "cuda", "--devices", "0,1", "--exchange", exchange]
    parsed = parse("decode", ["--dir", str(tmp_path / "kv"), "--dtype", dtype, *options])
    with pytest.raises(EngineError, match=says) if says else contextlib.nullcontext():
        parsed.check("decode")


def test_an_engine_asks_for_the_back_end_of_its_options(tmp_path: Path) -> None:
    """Where that cannot run for a model it computes with torch, and says so for each."""
    options = attrs.evolve(parse("prefill", ["--dir", str(tmp_path / "kv")]), back_end="flashinfer", captured=True)
    with pytest.warns(RuntimeWarning, match="attention runs on back end torch") as said:
        engine = PrefillProcess(options, World())
    engine.sources[0].close("over")
    assert not isinstance(engine.target, CapturedRunner)
    assert len([each for each in said if "back end torch" in str(each.message)]) == 2


def test_unknown_names_are_refused() -> None:
    with pytest.raises(EngineError, match="'fa9'"):
        kernel_of("fa9", POOL, [0], [0])


def test_exchanges_by_name(tmp_path: Path) -> None:
    """Those of GPUs are refused where the group is not one of NCCL."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert isinstance(exchange_of("a2a", 1, group), AllToAll)
        for name in ("a2a_packed", "peer"):
            with pytest.raises(EngineError, match=f"{name} needs a process group of NCCL"):
                exchange_of(name, 1, group)
        with pytest.raises(EngineError, match="'ring'"):
            exchange_of("ring", 1, group)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("left", [math.nan, math.inf, 0.0])
def test_base_2_becomes_natural_and_nothing_read_is_selected_away(left: float) -> None:
    out = torch.tensor([[[1.0, 2.0]], [[left, left]]])
    found = Base2(out, torch.tensor([[3.0], [left]]), torch.tensor([5, 0])).natural()
    assert found.out.tolist() == [[[1.0, 2.0]], [[0.0, 0.0]]]
    assert found.lse.tolist() == [[pytest.approx(3 * math.log(2))], [-math.inf]]
