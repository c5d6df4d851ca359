"""What vLLM's GPU back ends allocate, stated from its tensors: pages meet between any two, or are refused by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import DType, LocalError, Prompt, RemoteError, Sink, Source, new_ticket
from kvproto_vllm.pools.caches import check_sizes, state
from kvproto_vllm.releases import layers_of
from tests.vllm.backends import HEADS, LAYERS, Backend, hand_over, indexer_k_quant_and_cache

NHD, HND = Backend(), Backend("BHNC", name="FLASHINFER")
TOGETHER = Backend("BLNHC", name="TRITON_ATTN")
FP8 = Backend(stored="fp8_e4m3", scales=(0.5, 0.25))
INT8 = Backend(stored="int8_per_token_head", name="TRITON_ATTN")
MLA = Backend(order="BNHC", mla=True, axes=3, name="FLASH_ATTN_MLA")
PACKED = Backend(mla=True, stored="fp8_ds_mla", block=64, kernel=64, name="FLASHMLA_SPARSE")
INDEX = Backend(mla=True, index=True, block=64, kernel=64, name="DEEPSEEK_V32_INDEXER")


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function that stores keys of an index."""
    made = SimpleNamespace(indexer_k_quant_and_cache=indexer_k_quant_and_cache)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=made))


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        (NHD, HND),
        (HND, NHD),
        (NHD, TOGETHER),
        (Backend("BHLNC"), Backend("LBHNC", gap=64)),
        (Backend("LHBNC"), NHD),
        (attrs.evolve(HND, block=64, kernel=16), NHD),
        (attrs.evolve(NHD, block=32, kernel=32), attrs.evolve(HND, block=48, kernel=16)),
        (attrs.evolve(NHD, dtype=torch.float32), attrs.evolve(HND, dtype=torch.float32, block=32, kernel=32)),
        (FP8, attrs.evolve(FP8, order="BHNC")),
        (Backend(stored="fp8_e5m2"), Backend("BLHNC", stored="fp8_e5m2")),
        (INT8, attrs.evolve(INT8, order="LBHNC", block=32, kernel=32)),
        (Backend(stored="fp8_per_token_head"), Backend("BHNC", stored="fp8_per_token_head")),
        (MLA, attrs.evolve(MLA, order="LBNHC", axes=4, block=64, kernel=64, name="FLASHMLA")),
        (attrs.evolve(MLA, block=128, kernel=128, name="CUTLASS_MLA"), MLA),
        (PACKED, attrs.evolve(PACKED, order="LBNHC", block=128, kernel=64)),
        (attrs.evolve(PACKED, order="BLNHC", gap=32), attrs.evolve(PACKED, axes=3)),
        (INDEX, attrs.evolve(INDEX, order="LBNHC", block=32, kernel=32, axes=3)),
        (attrs.evolve(INDEX, order="BLNHC"), attrs.evolve(INDEX, block=192)),
        (attrs.evolve(MLA, stored="fp8_e4m3"), attrs.evolve(MLA, stored="fp8_e4m3", order="BLNHC", gap=32)),
    ],
    ids=str,
)
def test_pages_meet_by_token_and_head(source: Backend, sink: Backend, tmp_path: Path) -> None:
    hand_over(source, sink, f"ipc://{tmp_path}/p")


@pytest.mark.parametrize("rows", [MLA, PACKED, INDEX], ids=["MLA", "quantized MLA", "index"])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2)])
def test_rows_that_each_rank_has_meet_in_any_number_of_ranks(
    rows: Backend, ranks: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(
        rows, attrs.evolve(rows, order="LBNHC", block=128, kernel=32), f"ipc://{tmp_path}/p-{{rank}}", ranks=ranks
    )


def test_rows_of_mla_with_a_window_are_rows_of_mla() -> None:
    layers = PACKED.layers(PACKED.tensors("cpu"))
    plain = state(layers, True).cache
    layers.spec.__class__ = type("SlidingWindowMLASpec", (), {})
    assert state(layers, True).cache == plain


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (attrs.evolve(NHD, planes=True, name="ROCM_ATTN"), "ROCM_ATTN stores it elsewhere"),
        (attrs.evolve(NHD, stored="nvfp4"), "NVFP4"),
        (attrs.evolve(INDEX, name="ANOTHER_INDEXER"), "DEEPSEEK_V32_INDEXER, keys of 128 bytes"),
        (attrs.evolve(INDEX, order="BNLHC"), "pages without gaps"),
    ],
    ids=["elsewhere", "NVFP4", "an index of another back end", "an index between layers"],
)
def test_what_does_not_add_up_is_refused_by_name(wrong: Backend, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        state(wrong.layers(wrong.tensors("cpu")), True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda layers: setattr(layers.spec, "block_size", 24), "blocks of 24 tokens"),
        (lambda layers: setattr(layers.spec, "num_kv_heads", HEADS + 1), f"{HEADS + 1} heads"),
        (lambda layers: setattr(layers.spec, "head_size", 8), "bytes of k, v"),
        (lambda layers: setattr(layers.spec, "__class__", type("CrossAttentionSpec", (), {})), "an encoder saw"),
        (lambda layers: setattr(layers.layer, "impl", SimpleNamespace()), "do_kv_cache_update"),
    ],
    ids=["tokens", "heads", "bytes", "another class", "a function that cannot be asked"],
)
def test_a_tensor_is_what_the_engine_specifies(change: Callable[[Any], None], says: str) -> None:
    layers = NHD.layers(NHD.tensors("cpu"))
    change(layers)
    with pytest.raises(LocalError, match=says):
        state(layers, True)


def test_scales_that_the_first_forward_decides_are_refused() -> None:
    with pytest.raises(LocalError, match="first forward"):
        state(FP8.layers(FP8.tensors("cpu"), calculate_kv_scales=True), True)


def test_the_block_that_was_tried_is_left_as_it_was() -> None:
    tensors = NHD.tensors("cpu")
    NHD.fill(tensors)
    before = [tensor.clone() for tensor in tensors]
    state(NHD.layers(tensors), True)
    assert all(torch.equal(*both) for both in zip(before, tensors, strict=True))


def test_a_draft_is_a_model_of_its_own() -> None:
    layers = NHD.layers(NHD.tensors("cpu"))
    assert [state(attrs.evolve(layers, model=n), True).cache.group.model for n in (0, 1)] == [0, 1]


def test_sizes_that_are_not_stated_are_refused_by_name() -> None:
    check_sizes(SimpleNamespace())
    with pytest.raises(LocalError, match="prefill_context_parallel_size"):
        check_sizes(SimpleNamespace(prefill_context_parallel_size=2))


def test_other_element_types_refuse_each_other(tmp_path: Path) -> None:
    with pytest.raises(RemoteError):
        hand_over(NHD, FP8, f"ipc://{tmp_path}/p")


def test_an_index_that_is_shuffled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalError, match="shuffled"):
        state(INDEX.layers(INDEX.tensors("cpu"), uses_shuffled_layout=True), True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(LocalError, match="shuffled"):
        state(INDEX.layers(INDEX.tensors("cpu")), True)


def test_an_index_with_exponents_meets_its_like_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on Blackwell: as many bytes, of which each is a scale."""
    plain = state(INDEX.layers(INDEX.tensors("cpu")), True).cache.group.parts
    _on_blackwell(monkeypatch, True)
    parts = state(INDEX.layers(INDEX.tensors("cpu")), True).cache.group.parts
    assert [each.dtype for each in parts] == [DType.F8E4M3, DType.F8E8M0]
    assert [each.dtype for each in plain] == [DType.F8E4M3, DType.F32]
    hand_over(INDEX, INDEX, f"ipc://{tmp_path}/alike")
    opened = INDEX.open("cpu")[0]
    _on_blackwell(monkeypatch, False)
    place, prompt, ticket = f"ipc://{tmp_path}/p", Prompt(range(9)), new_ticket("prefill")
    with (
        Source("prefill", opened, place),
        Sink("decode", INDEX.open("cpu")[0], {"prefill": place}) as there,
        pytest.raises(RemoteError, match="F8E8M0"),
    ):
        there.fetch(ticket, prompt, {INDEX.name.lower(): [1]}).wait(20)


def _on_blackwell(monkeypatch: pytest.MonkeyPatch, so: bool) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", SimpleNamespace(mqa_logits_use_mx_scales=lambda: so))


@pytest.mark.parametrize(("order", "axes"), [((1, 0, 3, 2, 4), "BLNHC"), ((1, 2, 0, 3, 4), "BHLNC")])
def test_layers_of_one_tensor_are_told_apart(order: tuple[int, ...], axes: str) -> None:
    shape = dict(zip("LBHNC", (LAYERS, 4, HEADS, 16, 8), strict=True))
    tensor = torch.arange(LAYERS * 4 * HEADS * 16 * 8).view([shape[x] for x in axes])
    backend = SimpleNamespace(get_kv_cache_stride_order=lambda include_num_layers_dimension: order)
    names = [SimpleNamespace(shared_by=[f"layer {i}"]) for i in range(LAYERS)]
    found = layers_of(tensor, backend, SimpleNamespace(kv_cache_tensors=names))
    assert [tuple(each.shape) for each in found.values()] == [(4, HEADS, 16, 8)] * LAYERS
    place = dict(zip("LBHNC", (2, 3, 1, 9, 5), strict=True))
    assert found["layer 2"][3, 1, 9, 5] == tensor[tuple(place[x] for x in axes)]
