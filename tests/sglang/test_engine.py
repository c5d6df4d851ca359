"""SGLang's pools, stated from its own objects: pages of [slot, head, dim] and of latents meet any other page size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvproto import LocalError, Options, Pool, Prompt, Sink, Source, new_ticket
from kvproto_engines.memory import ShareableMemory
from kvproto_sglang import metadata
from kvproto_sglang.engine import Layout, open_pool
from kvproto_sglang.settings import Settings

LAYERS, HEADS, DIM, SLOTS, TOKENS = 2, 2, 8, 128, 45
MODEL = SimpleNamespace(
    num_hidden_layers=LAYERS, get_total_num_kv_heads=lambda: HEADS, hf_text_config=SimpleNamespace(rope_theta=1e4)
)
SERVER = SimpleNamespace(
    model_path="nobody/model", revision=None, quantization=None, load_format="auto", random_seed=0
)  # fmt: skip


class MHATokenToKVPool:
    """SGLang's pool of K and V, as far as the back end looks: halves of one allocation a layer."""

    kv_cache_layout = "nhd"

    def __init__(self, page: int, heads: int = HEADS, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> None:
        self.page_size, self.layer_num, self.start_layer = page, LAYERS, 0
        self.head_dim = self.v_head_dim = DIM
        self.dtype = self.store_dtype = dtype
        with ShareableMemory():
            both = [torch.zeros((2, slots, heads, DIM), dtype=dtype, device="cpu") for _ in range(LAYERS)]
        self.k_buffer, self.v_buffer = ([each[n] for each in both] for n in range(2))


class MLATokenToKVPool:
    """SGLang's pool of latents."""

    def __init__(self, page: int) -> None:
        self.page_size, self.layer_num, self.start_layer, self.kv_cache_dim = page, LAYERS, 0, DIM
        self.dtype = self.store_dtype = torch.float32
        with ShareableMemory():
            self.kv_buffer = [torch.zeros((SLOTS, 1, DIM), dtype=torch.float32, device="cpu") for _ in range(LAYERS)]


class HybridLinearKVPool(MHATokenToKVPool):
    """One that this back end does not state."""


def buffers(rows: int = 4) -> Any:
    """SGLang's metadata buffers, as far as the back end looks."""
    made = {name: torch.zeros((rows, 16), dtype=torch.int32) for name in ("output_ids", "cached_tokens")}
    made |= {"output_token_logprobs_idx": torch.zeros((rows, 16), dtype=torch.int32)}
    made |= {"output_token_logprobs_val": torch.zeros((rows, 16))}
    made |= {"output_top_logprobs_val": torch.zeros((rows, 8))}
    made |= {"output_top_logprobs_idx": torch.zeros((rows, 8), dtype=torch.int32)}
    return SimpleNamespace(**made, bootstrap_room=torch.zeros((rows, 8), dtype=torch.uint64))


def opened(pool: Any, layout: Layout | None = None, states: Any = (), drafts: int = 0, parts: str = "request") -> Pool:
    made = open_pool(
        pool, MODEL, SERVER, buffers(), states, drafts, layout or Layout(), Settings(), metadata.SETS[parts]
    )  # fmt: skip
    return made.pool


def slots(table: list[int], page: int) -> torch.Tensor:
    """The slot of each token."""
    at = torch.arange(TOKENS)
    return torch.tensor(table)[at // page] * page + at % page


@pytest.mark.parametrize(("pages", "tables"), [((64, 16), ([1], [3, 5, 1])), ((1, 32), (list(range(50, 95)), [2, 1]))])
@pytest.mark.parametrize("kind", [MHATokenToKVPool, MLATokenToKVPool])
def test_pages_of_any_size_meet(kind: Any, pages: Any, tables: Any, tmp_path: Any) -> None:
    theirs, ours = kind(pages[0]), kind(pages[1])
    names = ("k_buffer", "v_buffer") if kind is MHATokenToKVPool else ("kv_buffer",)
    for n, name in enumerate(names):
        for layer, tensor in enumerate(getattr(theirs, name)):
            tensor[:] = torch.rand(tensor.shape) + n + 10 * layer
    tmp_path.chmod(0o700)
    place = f"ipc://{tmp_path}/p"
    with Source("p", opened(theirs), place) as source, Sink("d", opened(ours), {"p": place}) as sink:
        ticket, prompt = new_ticket("p"), Prompt(range(TOKENS))
        request = source.request(ticket, prompt)
        fetch = sink.fetch(ticket, prompt, {"kv": tables[1]})
        request.finish({"kv": tables[0]})
        fetch.wait(10)
        request.wait(10)
    for name in names:
        for sent, came in zip(getattr(theirs, name), getattr(ours, name), strict=True):
            assert torch.equal(sent[slots(tables[0], pages[0])], came[slots(tables[1], pages[1])])


def test_two_ranks_have_half_of_the_heads_each() -> None:
    layout = Layout(tp=2, rank=1)
    pool = opened(MHATokenToKVPool(16, heads=1), layout)
    assert [pool.rank, len(pool.geometry.ranks)] == [1, 2]


def test_weights_and_rope_are_compared() -> None:
    facts = {fact.name: fact.value for fact in opened(MHATokenToKVPool(16)).geometry.facts}
    assert facts.keys() == {"weights.target", "rope.target"}
    assert facts["weights.target"] == "nobody/model@main"


@pytest.mark.parametrize(
    ("pool", "more", "says"),
    [
        (HybridLinearKVPool(16), {}, "HybridLinearKVPool"),
        (MHATokenToKVPool(16), {"states": ["mamba"]}, "mamba"),
        (MHATokenToKVPool(16), {"drafts": 4}, "draft"),
        (MHATokenToKVPool(16), {"layout": Layout(refused=(("pp_size", 2),))}, "pp_size"),
        (MHATokenToKVPool(16, dtype=torch.float64), {}, "kv_cache_dtype"),
        (MHATokenToKVPool(16, slots=100), {}, "slots"),
    ],
)
def test_what_is_not_stated_is_refused_by_name(pool: Any, more: Any, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        opened(pool, **more)


def test_memory_that_is_given_back_is_refused() -> None:
    asleep = SimpleNamespace(**vars(SERVER), enable_memory_saver=True)
    with pytest.raises(LocalError, match="enable_memory_saver"):
        open_pool(MHATokenToKVPool(16), MODEL, asleep, buffers(), (), 0, Layout(), Settings(), ())


def test_ranks_that_nobody_reads_are_refused() -> None:
    few = Settings(options=Options(spread="few"))
    with pytest.raises(LocalError, match="spread"):
        open_pool(MHATokenToKVPool(16, 1), MODEL, SERVER, buffers(), (), 0, Layout(tp=2), few, ())


def test_metadata_arrives_in_the_row_of_the_request() -> None:
    theirs, ours = buffers(), buffers()
    theirs.output_ids[1, 0], theirs.cached_tokens[1, 3], theirs.output_top_logprobs_val[1, 2] = 77, 9, -1.5
    theirs.output_token_logprobs_val[1, 0] = -0.25
    sent = metadata.read(theirs, 1, metadata.SETS["all"])
    metadata.write(ours, 2, 1 << 62, sent, None)
    assert (ours.output_ids[2, 0], ours.cached_tokens[2, 3], ours.output_top_logprobs_val[2, 2]) == (77, 9, -1.5)
    assert (ours.output_token_logprobs_val[2, 0], ours.output_token_logprobs_idx[2, 0]) == (-0.25, 77)
    assert int(ours.bootstrap_room[2, 0]) == 1 << 62
    assert not ours.output_ids[[0, 1, 3]].any()


def test_a_first_token_that_a_router_knows_needs_no_metadata() -> None:
    made = buffers()
    metadata.write(made, 0, 5, {}, 123)
    assert (int(made.output_ids[0, 0]), int(made.bootstrap_room[0, 0])) == (123, 5)
    assert metadata.cache_of(made, ()) == []
