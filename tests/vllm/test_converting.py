"""Caches of vLLM's back ends in BF16 and in FP8, handed over with conversion: every byte by torch's own rounding."""

from pathlib import Path

import attrs
import pytest
import torch

from kvproto import Cache, DType, LocalError, Pool, Prompt, RemoteError, Sink, Source, lay_out, new_ticket
from kvproto.errors import ErrorCode
from kvproto_engines.converting import converting
from kvproto_engines.orders import Table
from kvproto_vllm.pools.caches import Stated, state
from kvproto_vllm.settings import Settings
from tests.conversions import made_scale, narrow, wide
from tests.vllm.backends import DIM, LATENT, TOKENS, Backend

BF16, MLA = Backend(), Backend(mla=True, name="FLASH_ATTN_MLA")
TENSOR = Backend("BHNC", stored="fp8_e4m3", scales=(0.5, 0.0123), block=32, kernel=32, name="FLASHINFER")
HEADS_OWN = Backend(stored="fp8_per_token_head", name="TRITON_ATTN", block=48)
MLA_FP8 = attrs.evolve(MLA, stored="fp8_e4m3", scales=(0.25, 1.0), order="LBNHC", block=64, kernel=64)


def opened(backend: Backend, convert: bool = True) -> tuple[Pool, Stated, list[torch.Tensor]]:
    """A back end's caches, as the connector states them with its setting `convert`."""
    tensors = backend.tensors("cpu")
    layers = backend.layers(tensors)
    stated = state(layers, True)
    cache = converting(stated.cache, layers.names[0], layers.ids, layers.scales) if convert else stated.cache
    pool = Pool(lay_out([cache]), {layers.title: stated.tensors}, rank=0, axes="page head token dim")
    return pool, stated, tensors


def moved(source: Backend, sink: Backend, place: Path, both: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [layer, token, head, content] of a request at the source, and at the sink after the hand-over."""
    (here, stated, mine), (there, wanted, theirs) = opened(source), opened(sink, both)
    source.fill(mine)
    if source.stored == "auto":  # bytes of BF16 below 2, some of them not numbers
        for tensor in mine:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
            tensor[:, 0, 3, 5] = torch.nan
    tables = [[5, 2, 6, 0, 3][: -(-TOKENS // each.block)] for each in (source, sink)]
    prompt, ticket, address = Prompt(range(TOKENS)), new_ticket("prefill"), f"ipc://{place}/p"
    with Source("prefill", here, address) as prefill, Sink("decode", there, {"prefill": address}) as decode:
        request = prefill.request(ticket, prompt)
        fetch = decode.fetch(ticket, prompt, {sink.name.lower(): Table(0, wanted.pages).of((tables[1],))})
        request.finish({source.name.lower(): Table(0, stated.pages).of((tables[0],))})
        fetch.wait(20)
    return source.rows(mine, tables[0]), sink.rows(theirs, tables[1])


def halves(backend: Backend, rows: torch.Tensor) -> list[torch.Tensor]:
    """Bytes of K and of V, or of the latent; with their scale behind them if a head has one."""
    return [rows] if backend.mla else list(rows.chunk(2, -1))


def bf16(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.bfloat16)


@pytest.mark.parametrize(
    ("plain", "fp8"), [(BF16, TENSOR), (BF16, HEADS_OWN), (MLA, MLA_FP8)], ids=["tensor", "token and head", "latent"]
)
def test_rows_are_those_of_the_formulas(plain: Backend, fp8: Backend, tmp_path: Path) -> None:
    """To FP8 and back, from pages to pages of another length; KVP-CNV-EXACT."""
    size = LATENT if plain.mla else DIM
    sent, came = moved(plain, fp8, tmp_path)
    for part, found, stated in zip(halves(plain, sent), halves(fp8, came), fp8.scales, strict=False):
        scale = made_scale(bf16(part)) if fp8.inline else torch.tensor([stated])
        assert torch.equal(found[..., :size], narrow(bf16(part), scale))
        if fp8.inline:
            assert torch.equal(found[..., size:].contiguous().view(torch.float32), scale)
    sent, came = moved(fp8, plain, tmp_path)
    for part, found, stated in zip(halves(fp8, sent), halves(plain, came), fp8.scales, strict=False):
        codes = part[..., :size].contiguous()
        scale = part[..., size:].contiguous().view(torch.float32) if fp8.inline else torch.tensor([stated])
        assert (wide(codes, scale) == found.contiguous().view(torch.int16).numpy().view("u2")).all()


def test_rows_of_one_type_go_as_they_are(tmp_path: Path) -> None:
    """What may be converted changes no pair that needs no conversion; equal scales are equal, and others are refused."""
    sent, came = moved(TENSOR, attrs.evolve(TENSOR, order="BNHC", block=16, kernel=16), tmp_path)
    assert torch.equal(sent, came)
    with pytest.raises(RemoteError, match=r"serve one checkpoint.s scales on both sides") as caught:
        moved(TENSOR, attrs.evolve(TENSOR, scales=(0.5, 0.0124)), tmp_path)
    assert caught.value.path == "groups[flashinfer].parts[v].x_scales"


def test_an_engine_that_was_not_told_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="state e4m3_tensor on both") as caught:
        moved(BF16, TENSOR, tmp_path, both=False)
    assert (caught.value.code, caught.value.path) == (ErrorCode.DTYPE_MISMATCH, "groups[flashinfer].parts[k].dtype")


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (Backend(stored="fp8_e5m2"), "elements of F8E5M2"), (attrs.evolve(BF16, dtype=torch.float16), "elements of F16"),
        (Backend(stored="int8_per_token_head"), "elements of I8"),
    ],
    ids=["E5M2", "float16", "INT8"],
)  # fmt: skip
def test_other_elements_are_refused_by_name(backend: Backend, says: str) -> None:
    with pytest.raises(LocalError, match=says) as caught:
        opened(backend)
    assert (caught.value.code, caught.value.path) == (ErrorCode.LAYOUT_UNSUPPORTED, "model.layers.0.attn")


def test_rows_in_sections_are_refused_and_other_caches_stay_as_they_are() -> None:
    """As vLLM's back end of the CPU keeps K; an index is no row of attention."""
    split = Cache.mla("kv", 2, latent=32, rope=16, page=16, split=True)
    with pytest.raises(LocalError, match="rows in sections"):
        converting(split, "layer", [0, 1], [])
    index = Cache.paged("index", 2, parts={"index": (DType.F8E4M3, 1, 128), "index_scale": (DType.F32, 1, 4)}, page=16)
    assert converting(index, "layer", [0, 1], []) == index


def test_the_setting_is_a_yes_or_no() -> None:
    given = {"listen": "ipc:///a", "convert": "fp8"}
    with pytest.raises(LocalError, match="true or false"):
        Settings.read(given, "p", True, False)
    assert Settings.read(given | {"convert": True}, "p", True, False).convert
