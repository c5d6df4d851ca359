"""Rows stored in FP8: by torch's own rounding, which is what a hand-over with conversion makes."""

import math
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from kvproto import Prompt, Sink, Source, lay_out, new_ticket
from kvproto.errors import KvprotoError
from kvproto_reference.cache import KVPool
from kvproto_reference.cache.forms import MODEL, narrow, scale_of, wide
from kvproto_reference.cache.memory import shareable
from kvproto_reference.checkpoint import CHECKPOINTS, load_config
from kvproto_reference.engine.description import TARGET, Layout, cache, hand_over
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.models import ModelConfig

FP8 = ["e4m3_tensor", "e4m3_block"]
GQA = ModelConfig(kind="gqa", hidden=1, layers=2, heads=4, ffn=1, kv_heads=2, head_dim=32, dtype="bfloat16")
MLA = ModelConfig(
    kind="mla", hidden=1, layers=2, heads=4, ffn=1, latent=48, rope_dim=16, nope_dim=32, v_dim=32, dtype="bfloat16"
)
PAGES, PAGE, TABLE = 6, 8, [4, 0, 3]
PROMPT = Prompt(range(20))


@pytest.fixture(params=[GQA, MLA], ids=["gqa", "mla"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    made: ModelConfig = request.param
    return made


def filled(config: ModelConfig, form: str) -> KVPool:
    """A pool with random rows of all sizes, an infinite one and NaN among them, stored in a form."""
    pool = KVPool.allocate(config, PAGES, PAGE, memory=shareable, form=form)
    dice, heads = torch.Generator().manual_seed(3), next(iter(pool.tensors.values())).shape[2]
    places = torch.arange(PAGES * PAGE)
    for layer in range(config.layers):
        size = 10.0 ** torch.randint(-6, 3, (len(places), heads, 1), generator=dice)
        rows = {p: torch.randn(len(places), heads, config.row_dim, generator=dice) * size for p in config.parts}
        for part in rows.values():
            part[1, 0, 2], part[2, 0, 3] = math.inf, math.nan
        pool.write(layer, places, {part: new.bfloat16() for part, new in rows.items()})
    return pool


@attrs.frozen(eq=False)
class Pair:
    """A prefill and a decode engine of one rank, in two forms."""

    source: KVPool
    sink: KVPool

    def handed_over(self, folder: Path, *layouts: Layout) -> None:
        """The pages of a table as kvproto has them."""
        pools = [
            hand_over(lay_out([cache(0, pool.config, layout, PAGE)]), {TARGET: pool}, 0)
            for pool, layout in zip((self.source, self.sink), layouts, strict=True)
        ]
        address, ticket = f"ipc://{folder}/p", new_ticket("p")
        with Source("p", pools[0], address) as source, Sink("d", pools[1], {"p": address}) as sink:
            fetch = sink.fetch(ticket, PROMPT, {TARGET: TABLE})
            source.request(ticket, PROMPT).finish({TARGET: TABLE})
            fetch.wait(20)


def held(pool: KVPool) -> Iterator[torch.Tensor]:
    """Bytes of the prompt's rows, by layer and part."""
    for tensor in pool.tensors.values():
        yield tensor[TABLE].flatten(0, 1)[: len(PROMPT.tokens)].contiguous().view(torch.uint8)


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("widens", [False, True])
def test_an_engine_stores_what_a_hand_over_converts_to(
    config: ModelConfig, form: str, widens: bool, tmp_path: Path
) -> None:
    """To the bit, by two implementations; KVP-CNV-EXACT."""
    forms, layouts = (MODEL, form), (Layout(kv_converts=(form,)), Layout(kv_dtype=form))
    if widens:
        forms, layouts = forms[::-1], layouts[::-1]
    source = filled(config, forms[0])
    pair = Pair(source, KVPool.allocate(config, PAGES, PAGE, memory=shareable, form=forms[1]))
    pair.handed_over(tmp_path, *layouts)
    own = KVPool.allocate(config, PAGES, PAGE, form=forms[1])
    own.take(source, TABLE)
    for theirs, ours in zip(held(pair.sink), held(own), strict=True):
        assert torch.equal(theirs, ours)
    assert any(rows.any() for rows in held(own))


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("states", ["source", "sink"])
def test_a_pair_of_which_one_states_it_is_refused(form: str, states: str, tmp_path: Path) -> None:
    """By code, path and what to do."""
    fp8, bf16 = Layout(kv_dtype=form), Layout(kv_converts=(form,) if states == "source" else ())
    if states == "source":  # an FP8 engine of ours always states its own: it is the other one of FP8 here
        fp8 = Layout(kv_dtype={"e4m3_tensor": "e4m3_block", "e4m3_block": "e4m3_tensor"}[form])
    sink = KVPool.allocate(GQA, PAGES, PAGE, memory=shareable, form=fp8.kv_dtype)
    pair = Pair(filled(GQA, MODEL), sink)
    with pytest.raises(KvprotoError, match=r"state e4m3_\w+ on both") as caught:
        pair.handed_over(tmp_path, bf16, fp8)
    assert (caught.value.code.name, caught.value.path) == ("DTYPE_MISMATCH", "groups[target].parts[k].dtype")


@pytest.mark.parametrize("form", FP8)
def test_rows_are_read_as_they_were_stored(form: str) -> None:
    """Within half of the last of three bits, of rows that the form has room for."""
    pool = KVPool.allocate(GQA, PAGES, PAGE, form=form)
    rows = (torch.rand(5, 2, 32, generator=torch.Generator().manual_seed(1)) + 1).bfloat16()
    pool.write(1, torch.arange(5), {"k": rows, "v": -rows})
    for part, sign in (("k", 1), ("v", -1)):
        found = pool.read(1, part, torch.tensor([0]))[0, :5]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found * sign, rows.float(), rtol=2**-4, atol=0)
        flat = pool.read_rows(1, part, torch.arange(10))
        assert torch.equal(flat.view(5, 2, 32), found)


@pytest.mark.parametrize("form", FP8)
def test_new_rows_are_read_as_they_are_stored(form: str) -> None:
    """By attention over the rows of a step, as over those of the pool."""
    pool = KVPool.allocate(GQA, PAGES, PAGE, form=form)
    rows = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = pool.write(0, torch.arange(5), {"k": rows, "v": rows})
    assert torch.equal(new["k"], pool.read(0, "k", torch.tensor([0]))[0, :5])
    assert not torch.equal(new["k"], rows.float())


def test_formulas() -> None:
    """Ties to even, 448 and beyond, NaN, the sign of zero; and a block without finite elements."""
    x = torch.tensor([17.0, 19.0, 449.0, -1e9, math.nan, -0.0, 2.0**-10]).bfloat16()
    assert narrow(x, torch.ones(1)).tolist() == [0x58, 0x5A, 0x7E, 0xFE, 0x7F, 0x80, 0x00]
    assert wide(torch.tensor([0x58, 0xFE], dtype=torch.uint8), torch.tensor(0.5)).tolist() == [8.0, -224.0]
    assert scale_of(torch.tensor([[math.inf, math.nan], [3.0, -896.0]])).tolist() == [
        [float(np.float32(2.0**-100) / np.float32(448))],
        [2.0],
    ]


@pytest.mark.parametrize("target", ["target-gqa", "target-mla"])
@pytest.mark.parametrize("form", FP8)
def test_undivided_engines_of_equal_forms_are_one(target: str, form: str) -> None:
    """One that prefills in bfloat16 and decodes in FP8 says almost what one in bfloat16 says, and a form is heeded."""
    engines = [
        Undivided(CHECKPOINTS / target, pages=32, dtype="bfloat16", prefill_form=a, decode_form=b)
        for a, b in ((MODEL, MODEL), (MODEL, form), (form, MODEL))
    ]
    prompt = b"Alice was beginning to get very tired of sitting by her sister"
    tokens = [engine.generate(prompt, max_new=24).tokens for engine in engines]
    ids = engines[0].tokenizer.encode(prompt)
    scores = [[row.tolist() for row in engine.scores(ids, tokens[0])] for engine in engines]
    assert scores[0] not in scores[1:]
    assert sum(a == b for a, b in zip(tokens[0], tokens[1], strict=False)) >= 8


@pytest.mark.parametrize(
    ("layout", "dtype", "target", "says"),
    [
        (Layout(kv_dtype="e4m3_block"), "float32", "target-gqa", "choose --dtype bfloat16"),
        (Layout(kv_converts=("e4m3_block",)), "float16", "target-gqa", "choose --dtype bfloat16"),
        (Layout(kv_dtype="e4m3_block", kv_converts=("e4m3_block",)), "bfloat16", "target-gqa", "states its own"),
        (Layout(kv_dtype="e4m3_block"), "bfloat16", "target-hybrid", "a hybrid model"),
    ],
)
def test_forms_that_cannot_be_are_refused(layout: Layout, dtype: str, target: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        layout.check([load_config(CHECKPOINTS / target, dtype)])


def test_pools_of_another_form_are_refused() -> None:
    pool = KVPool.allocate(GQA, 2, PAGE, form="e4m3_block")
    with pytest.raises(EngineError, match="k_scale"):
        KVPool.wrap(GQA, {key: tensor for key, tensor in pool.tensors.items() if key[1] != "k_scale"}, form=pool.form)
    with pytest.raises(EngineError, match=r"must be contiguous torch\.bfloat16"):
        KVPool.wrap(GQA, {key: tensor for key, tensor in pool.tensors.items() if key[1] in "kv"})
    with pytest.raises(EngineError, match="are stored as model, e4m3_tensor, e4m3_block, not fp4"):
        KVPool.allocate(GQA, 2, PAGE, form="fp4")
