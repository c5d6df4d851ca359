"""A decode engine with its cache in FP8 behind a prefill engine in BF16, and the other way round."""

from pathlib import Path

import pytest

from kvproto_reference.demo.arguments import check, parse
from kvproto_reference.demo.options import parse as parse_engine
from kvproto_reference.errors import EngineError
from tests.demo.test_by_hand import Start, folder, start, wait_ready
from tests.demo.test_demo import demo, prompts, right

__all__ = ["folder", "prompts", "start"]


@pytest.mark.parametrize(
    "args",
    [
        "--decode-kv-dtype e4m3_block --target gqa --draft gqa --decode-page-size 32",
        "--decode-kv-dtype e4m3_tensor --target gqa --transport inline --prefill-tp 1 --decode-tp 2 --dcp 2",
        "--prefill-kv-dtype e4m3_block --decode-tp 2 --target gqa --pull",
        "--prefill-kv-dtype e4m3_block --decode-kv-dtype e4m3_block --draft eagle",
        "--prefill-framework jax --decode-kv-dtype e4m3_block --draft none",
        "--prefill-kv-dtype e4m3_tensor --decode-framework jax --target gqa --draft none",
    ],
    ids=["to FP8", "to FP8 with one scale, dealt", "from FP8, pulled", "FP8 to FP8", "JAX to FP8", "FP8 to JAX"],
)
def test_tokens_are_those_of_one_engine_that_stores_them_so(args: str, prompts: Path) -> None:
    pytest.importorskip("jax") if "jax" in args else None
    told = right(*args.split(), "--dtype", "bfloat16", "--prompt-file", prompts, "--max-new", "16")
    assert any(request["same_tokens"] for request in told["requests"])


def test_an_engine_that_does_not_say_so_is_refused(start: Start, folder: Path) -> None:
    """By code, path, and what to do."""
    wait_ready(folder, "prefill-0", start("prefill", "--dir", folder, "--dtype", "bfloat16"))
    status, _, said = start("decode", "--dir", folder, "--dtype", "bfloat16", "--kv-dtype", "e4m3_block").wait()
    assert status == 1
    assert "DTYPE_MISMATCH at groups[target].parts[latent].dtype" in said
    assert "state e4m3_block on both" in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--kv-dtype e4m3_block --framework jax", "--kv-dtype is torch's"),
        ("--kv-converts e4m3_block --host-pages 8", "--host-pages keeps rows as the model is"),
        ("--kv-converts fp4 --dtype bfloat16", "e4m3_tensor, e4m3_block"),
    ],
)
def test_options_that_do_not_go_together(args: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=says):
        parse_engine("decode", ["--dir", str(tmp_path / "kv"), *args.split()]).check("decode")


def test_two_forms_of_fp8_are_not_converted() -> None:
    with pytest.raises(EngineError, match="two forms of FP8"):
        check(parse(["--prefill-kv-dtype", "e4m3_block", "--decode-kv-dtype", "e4m3_tensor", "--dtype", "bfloat16"]))
    status, _, said = demo("--decode-kv-dtype", "e4m3_block", "--json")
    assert status == 1
    assert "choose --dtype bfloat16" in said
