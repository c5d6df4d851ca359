"""Pools of SGLang in BF16 and in FP8, handed over with conversion: every byte by torch's own rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvproto import LocalError, Prompt, RemoteError, Sink, Source, new_ticket
from kvproto.errors import ErrorCode
from kvproto.wire.enums import FactRule
from kvproto_sglang.engine import Opened
from kvproto_sglang.settings import Settings
from tests.conversions import narrow, wide
from tests.sglang.test_engine import engine, mha, opened

FP8 = torch.float8_e4m3fn
SCALES = ({0: (0.5, 0.0123), 1: (0.031, 2.0)}, {})
TOKENS, HERE, THERE = 40, [5, 0, 3], [1, 6]
"""Tokens in pages of 16 at prefill, and of 32 at decode."""


def rows(pool: Any, table: list[int], layer: int) -> list[torch.Tensor]:
    """K and V [token, head, dim] of a request, by SGLang's own functions."""
    page = pool.page_size
    slots = torch.tensor([table[t // page] * page + t % page for t in range(TOKENS)])
    return [get(layer)[slots] for get in (pool.get_key_buffer, pool.get_value_buffer)]


def moved(source: Any, sink: Any, place: Path, told: str = "") -> None:
    """Hand a request over from pages of one pool to those of another; `told` is the one side that was told to convert."""
    here, there = (
        opened(engine(pool, scales=SCALES), convert=told in ("", side))
        for side, pool in (("source", source), ("sink", sink))
    )
    prompt, ticket, address = Prompt(range(TOKENS)), new_ticket("prefill"), f"ipc://{place}/p"
    with Source("prefill", here.pool, address) as prefill, Sink("decode", there.pool, {"prefill": address}) as decode:
        fetch = decode.fetch(ticket, prompt, {"kv": THERE})
        request = prefill.request(ticket, prompt)
        request.finish({"kv": HERE}, handoff=handed(here))
        fetch.wait(20)


def handed(made: Opened) -> dict[str, dict[str, bytes]]:
    """Zeros for what a request's metadata hold."""
    return {
        group.name: {part.name: bytes(part.lane_bytes) for part in group.parts}
        for group in made.pool.geometry.groups
        if group.name != "kv"
    }


@pytest.mark.parametrize("widens", [False, True])
def test_rows_are_those_of_the_formulas(widens: bool, tmp_path: Path) -> None:
    """By the scale of each layer; KVP-CNV-EXACT."""
    dtypes = (FP8, torch.bfloat16) if widens else (torch.bfloat16, FP8)
    source, sink = (mha(page=page, dtype=dtype) for page, dtype in zip((16, 32), dtypes, strict=True))
    dice = torch.Generator().manual_seed(1)
    for buffer in (*source.k_buffer, *source.v_buffer):
        values = torch.randn(buffer.shape, generator=dice) * 3
        buffer.copy_(values.to(FP8).view(torch.uint8) if widens else values.bfloat16())
    moved(source, sink, tmp_path)
    for layer in range(2):
        pairs = zip(rows(source, HERE, layer), rows(sink, THERE, layer), SCALES[0][layer], strict=True)
        for sent, came, scale in pairs:
            assert sent.any()
            if widens:
                wanted = wide(sent.view(torch.uint8), torch.tensor([scale]))
                assert (wanted == came.contiguous().view(torch.int16).numpy().view("u2")).all()
            else:
                assert torch.equal(came.contiguous().view(torch.uint8), narrow(sent, torch.tensor([scale])))


def test_scales_are_stated_and_no_longer_insisted_on() -> None:
    made = opened(engine(mha(dtype=FP8), scales=SCALES), convert=True).pool.geometry
    k, v = made.groups[0].parts[:2]
    assert (k.x_conversions, v.x_conversions) == (("e4m3_tensor",), ("e4m3_tensor",))
    stated = [part.x_scales for part in (k, v)]
    assert [torch.tensor(x.view("f4")).tolist() for x in stated if x is not None] == [
        torch.tensor([0.5, 0.031]).tolist(), torch.tensor([0.0123, 2.0]).tolist()
    ]  # fmt: skip
    rules = {fact.name: fact.rule for fact in made.facts}
    assert rules["kv_scales.target"] == FactRule.WARN


@pytest.mark.parametrize(
    ("told", "code", "path"),
    [
        ("source", ErrorCode.IDENTITY_MISMATCH, "facts[kv_scales.target]"),
        ("sink", ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].dtype"),
    ],
)
def test_a_pair_of_which_one_was_told_to_is_refused(told: str, code: ErrorCode, path: str, tmp_path: Path) -> None:
    """Scales that a side insists on come first; then the dtypes, with what to state."""
    with pytest.raises(RemoteError) as caught:
        moved(mha(), mha(page=32, dtype=FP8), tmp_path, told)
    assert (caught.value.code, caught.value.path) == (code, path)


def test_other_elements_are_refused_by_name() -> None:
    with pytest.raises(LocalError, match="elements of F16") as caught:
        opened(engine(mha(dtype=torch.float16)), convert=True)
    assert (caught.value.code, caught.value.path) == (ErrorCode.LAYOUT_UNSUPPORTED, "kv")


def test_the_setting_is_a_yes_or_no() -> None:
    with pytest.raises(LocalError, match="true or false"):
        Settings.read({"name": "p", "listen": "ipc:///a", "convert": "fp8"}, True)
