"""Sparse MLA between vLLM and SGLang: rows that hold their scales, and the index of the layers that have one of their own."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto_engines.orders import Table
from kvproto_sglang.pools.classes import state as state_of_sglang
from kvproto_sglang.pools.stated import Owner
from kvproto_vllm.pools.caches import state
from tests.sglang.handover import index_of
from tests.sglang.standins import DSATokenToKVPool
from tests.vllm.backends import KEY, LATENT, LAYERS, ROPE, ROW, TOKENS, Backend, indexer_k_quant_and_cache

ROWS = Backend(mla=True, stored="fp8_ds_mla", order="LBNHC", block=128, kernel=64, name="FLASHMLA_SPARSE")
INDEX = Backend(mla=True, index=True, order="BLNHC", block=128, kernel=128, name="DEEPSEEK_V32_INDEXER")
LED, PAGE = [0, 2], 64
"""Layers with an index of their own, which layer 1 uses too; tokens of a page of SGLang."""


class VLLM:
    """Two groups of layers in one block table, in blocks of different kernels."""

    table = (3,)

    def __init__(self) -> None:
        self.rows_of, self.index = ROWS.tensors("cpu"), INDEX.tensors("cpu")[: len(LED)]
        index = attrs.evolve(INDEX.layers(self.index), ids=LED, names=[f"layers.{n}.indexer.k_cache" for n in LED])
        stated = [state(each, True) for each in (ROWS.layers(self.rows_of), index)]
        self.pool = Pool(
            lay_out([each.cache for each in stated]), {each.cache.group.name: each.tensors for each in stated},
            axes="page head token dim",
        )  # fmt: skip
        self.pages = {each.cache.group.name: Table(0, each.pages).of((list(self.table),)) for each in stated}

    def fill(self) -> None:
        ROWS.fill(self.rows_of)
        INDEX.fill(self.index)

    def rows(self) -> list[torch.Tensor]:
        found = [each.rows(tensors, list(self.table)) for each, tensors in ((ROWS, self.rows_of), (INDEX, self.index))]
        return [each[:, :, 0] for each in found]


class SGLang:
    """A pool of SGLang, whose layer 1 skips its index."""

    table = (2, 1)

    def __init__(self) -> None:
        self.held = DSATokenToKVPool(
            size=4 * PAGE, page_size=PAGE, dtype=torch.float8_e4m3fn, kv_lora_rank=LATENT - ROPE, qk_rope_head_dim=ROPE,
            layer_num=LAYERS, kv_cache_dim=ROW, index_head_dim=KEY, skip_topk_layers=[n not in LED for n in range(LAYERS)],
        )  # fmt: skip
        model: Any = SimpleNamespace(get_total_num_kv_heads=lambda: 1)
        stated = state_of_sglang(self.held, Owner(0, "kv", model, 1))
        self.pool = Pool(
            lay_out([each.cache for each in stated]), {each.cache.group.name: each.tensors for each in stated},
            axes={each.cache.group.name: each.axes for each in stated},
        )  # fmt: skip
        self.pages = {each.cache.group.name: list(self.table) for each in stated}

    def fill(self) -> None:
        dice = torch.Generator().manual_seed(1)
        for each in (*self.held.kv_buffer, *self.held.index_k_with_scale_buffer):
            each.copy_(torch.randint(0, 120, each.shape, generator=dice).to(torch.uint8))

    def rows(self) -> list[torch.Tensor]:
        pages = torch.tensor(self.table)[torch.arange(TOKENS) // PAGE]
        at = pages, torch.arange(TOKENS) % PAGE
        rows = [each.view(-1, PAGE, ROW)[at] for each in self.held.kv_buffer]
        index = [torch.cat([view[at] for _, _, view in index_of(self.held, n)], -1) for n in range(len(LED))]
        return [torch.stack(rows), torch.stack(index)]


@pytest.mark.parametrize("kinds", [(VLLM, SGLang), (SGLang, VLLM), (VLLM, VLLM)], ids=lambda kinds: kinds[0].__name__)
def test_rows_and_indexes_go_from_one_engine_to_another(
    kinds: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(indexer_k_quant_and_cache=indexer_k_quant_and_cache)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=made))
    one, two = (kind() for kind in kinds)
    one.fill()
    prompt, ticket, place = Prompt(range(TOKENS)), new_ticket("prefill"), f"ipc://{tmp_path}/p"
    with Source("prefill", one.pool, place) as here, Sink("decode", two.pool, {"prefill": place}) as there:
        request, fetch = here.request(ticket, prompt), there.fetch(ticket, prompt, two.pages)
        request.finish(one.pages)
        fetch.wait(20)
    for sent, got, layers, size in zip(one.rows(), two.rows(), (LAYERS, len(LED)), (ROW, KEY + 4), strict=True):
        assert sent.shape == (layers, TOKENS, size)
        assert sent.any()
        assert torch.equal(sent, got)
