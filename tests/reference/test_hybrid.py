"""Recurrent states and sliding windows in the reference engine: against a recurrence written out token by token."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvproto import Prompt, Sink, Source, lay_out, new_ticket
from kvproto.errors import ErrorCode, KvprotoError
from kvproto_reference import checkpoint
from kvproto_reference.cache import HybridPools, KVPool, PageAllocator, Shard, StatePool
from kvproto_reference.cache.memory import private, shareable
from kvproto_reference.cache.states import CONV, SSM, shapes_of
from kvproto_reference.cache.windows import check_window, first_row, needed, window_table
from kvproto_reference.demo.options import parse
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import (
    STATES,
    WINDOW,
    Layout,
    cache,
    caches,
    check_kept,
    geometry,
    hand_over,
    page_tables,
)
from kvproto_reference.engine.kept_pages import KeptPages
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.prefix import PrefixCache, tokens_a_unit
from kvproto_reference.engine.runner import Chunk, Runner
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, DeltaConfig, Dense, ModelConfig, TensorParallel, WindowConfig
from kvproto_reference.models.delta import DeltaNet
from kvproto_reference.presets import PRESETS, Preset
from kvproto_reference.tokenizer import EOS
from kvproto_reference.train import train

from .engines import close

CONFIG = ModelConfig(
    kind="gqa", hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48,
    delta=DeltaConfig(layers=(0, 2), key_heads=2, key_dim=6, value_heads=4, value_dim=10, kernel=4),
    window=WindowConfig(layers=(1,), tokens=11),
)  # fmt: skip
PROMPT = b"So she was considering in her own mind"
OTHER = b"You may reproduce and distribute copies of the Work or of the Rabbit"
SHIPPED = checkpoint.CHECKPOINTS / "target-hybrid"
DRAFT = checkpoint.CHECKPOINTS / "draft-gqa"
PAGE, PAGES = 8, 16
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid")
    checkpoint.save(out, model)
    return out


def tokens(n: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 257 for i in range(n)]


# the oracle: one token, one head and one number at a time


def written_out(layer: DeltaNet, xs: Sequence[Floats]) -> tuple[list[Floats], Floats, list[Floats]]:
    """Outputs of a layer before its last matrix and norm for inputs [hidden], its state, and the last inputs of its
    convolution."""
    sizes, heads = CONFIG.delta_sizes, 4
    weights = {name: p.double().numpy() for name, p in layer.named_parameters()}
    state = np.zeros((heads, sizes.key_dim, sizes.value_dim))
    past = [np.zeros(2 * 12 + 40) for _ in range(sizes.kernel - 1)]
    outs = []
    for x in xs:
        past.append(np.concatenate([weights[name] @ x for name in ("query", "key", "value")]))
        taps = np.concatenate([weights[name] for name in ("query_conv", "key_conv", "value_conv")])
        mixed = sum(row * taps[:, i] for i, row in enumerate(past[-sizes.kernel :]))
        mixed = mixed / (1 + np.exp(-mixed))
        out = np.zeros((heads, sizes.value_dim))
        for head in range(heads):
            at = head // 2 * sizes.key_dim
            q, k = mixed[at : at + sizes.key_dim], mixed[12 + at : 12 + at + sizes.key_dim]
            v = mixed[24 + head * sizes.value_dim : 24 + (head + 1) * sizes.value_dim]
            q, k = q / np.linalg.norm(q) / sizes.key_dim**0.5, k / np.linalg.norm(k)
            step = np.log1p(np.exp(weights["decay"][head] @ x + weights["shift"][head]))
            strength = 1 / (1 + np.exp(-weights["strength"][head] @ x))
            state[head] *= np.exp(-np.exp(weights["rate"][head]) * step)
            state[head] += strength * np.outer(k, v - k @ state[head])
            out[head] = q @ state[head]
        outs.append(out)
    return outs, state, past[1 - sizes.kernel :]


class Recorder(Dense):
    """Attention of a forward without a cache, which keeps what recurrent layers put out."""

    def recur(self, layer, rule, inputs):  # type: ignore[no-untyped-def]
        self.out = super().recur(layer, rule, inputs)
        return self.out


def test_a_layer_is_the_recurrence_written_out(model: Decoder) -> None:
    """Over more than one chunk of matrix products; its state too, whenever it is asked for."""
    layer, xs = model.blocks[0].attn, torch.randn(150, 32, generator=torch.Generator().manual_seed(1))
    assert isinstance(layer, DeltaNet)
    recorder = Recorder(CONFIG)
    layer.forward(xs, None, recorder)  # type: ignore[arg-type]
    outs, _, _ = written_out(layer, [*xs.double().numpy()])
    np.testing.assert_allclose(recorder.out.numpy(), np.stack(outs), atol=2e-5)
    inputs = torch.nn.functional.linear(xs, torch.cat([getattr(layer, n) for n in ("query", "key", "value")] + [
        layer.decay, layer.strength]))  # fmt: skip
    counts = (1, 2, 3, 64, 65, 150)
    _, states = layer.run(layer.begin(inputs), inputs, counts)
    for count, state in zip(counts, states, strict=True):
        _, ssm, conv = written_out(layer, [*xs[:count].double().numpy()])
        np.testing.assert_allclose(state[SSM].numpy(), ssm, atol=2e-5)
        np.testing.assert_allclose(state[CONV].numpy(), np.stack(conv), atol=2e-5)


def test_a_layer_is_that_of_qwen3_next(model: Decoder) -> None:
    """Its matrices have the same rows, key head by key head: q, k, v and the gate, or strengths and decays."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = CONFIG.delta_sizes
    theirs = modeling.Qwen3NextGatedDeltaNet(
        modeling.Qwen3NextConfig(
            hidden_size=32, linear_num_key_heads=sizes.key_heads, linear_num_value_heads=sizes.value_heads,
            linear_key_head_dim=sizes.key_dim, linear_value_head_dim=sizes.value_dim,
            linear_conv_kernel_dim=sizes.kernel, rms_norm_eps=CONFIG.norm_eps, num_hidden_layers=1,
            layer_types=["linear_attention"],
        ), 0,
    )  # fmt: skip
    ours = DeltaNet(CONFIG, TensorParallel(), 0)
    with torch.no_grad():
        for vector in (ours.rate, ours.shift, ours.out_norm):
            vector.add_(torch.randn(vector.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3)
        each = sizes.value_heads // sizes.key_heads
        heads = [w.unflatten(0, (sizes.key_heads, -1)) for w in (ours.query, ours.key, ours.value, ours.output_gate)]
        theirs.in_proj_qkvz.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
        both = [w.unflatten(0, (sizes.key_heads, each)) for w in (ours.strength, ours.decay)]
        theirs.in_proj_ba.weight.copy_(torch.cat(both, 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(torch.cat((ours.query_conv, ours.key_conv, ours.value_conv))[:, None])
        theirs.A_log.copy_(ours.rate)
        theirs.dt_bias.copy_(ours.shift)
        theirs.norm.weight.copy_(ours.out_norm)
        theirs.out_proj.weight.copy_(ours.out)
        x = torch.randn(2, 90, 32, generator=torch.Generator().manual_seed(3))
        found = ours.forward(x, None, Dense(CONFIG))  # type: ignore[arg-type]
        close(found, theirs(x), 2e-5)


# one engine


@attrs.frozen
class Alone:
    """A hybrid model over pools of its own."""

    model: Decoder
    states: StatePool
    runner: Runner

    @classmethod
    def of(cls, model: Decoder, page: int = PAGE, pages: int = PAGES) -> "Alone":
        (group,) = lay_out([cache(0, model.config, Layout(), page)]).groups
        rows, shard = KVPool.allocate(model.config, pages, page), Shard(group, 0)
        beside = HybridPools.allocate(model.config, pages, shard)
        assert beside.windows is not None
        assert beside.states is not None
        for pool in (rows, beside.windows, beside.states):
            for tensor in pool.tensors.values():
                tensor.fill_(torch.nan)  # what is read and is not written yet spoils everything
        return cls(model, beside.states, torch_runner(model, rows, shard, beside=beside))

    def run(
        self, ids: Sequence[int], start: int, pages: Sequence[int], proposed: int = 0, window: Sequence[int] = ()
    ) -> Tensor:
        """Logits [tokens, vocab] of one step; its window has a page for each of the others if none are given."""
        logits = self.runner.run([Chunk(ids, start, pages, every=True, proposed=proposed, window=window or pages)])
        return logits.values  # type: ignore[attr-defined,no-any-return]

    def state(self, pages: Sequence[int], count: int) -> list[Tensor]:
        """The state after `count` tokens, of all layers and parts."""
        item = self.states.record.item(pages, count)
        assert self.states.record.after[item] == count
        return [tensor[item].clone() for tensor in self.states.tensors.values()]


def full(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits [n, vocab] of the batched forward that training uses."""
    return model.forward(torch.tensor([ids, ids[::-1]]), torch.arange(len(ids)), Dense(model.config))[0]


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 9, 64])
def test_chunks_match_the_whole_and_leave_their_states(model: Decoder, chunk: int) -> None:
    ids, pages = tokens(61), PageAllocator(PAGES, seed=3).allocate(8)
    alone = Alone.of(model)
    logits = torch.cat([alone.run(ids[i : i + chunk], i, pages) for i in range(0, len(ids), chunk)])
    close(logits, full(model, ids), 1e-4)
    assert alone.runner.states(pages, 61) == {8, 16, 24, 32, 40, 48, 56}
    for count in (8, 16, 40, 56, 61):
        whole = Alone.of(model, page=64)
        whole.run(ids[:count], 0, [2])
        for part, wanted in zip(alone.state(pages, count), whole.state([2], count), strict=True):
            close(part, wanted, 1e-5)


def test_sequences_in_one_step_do_not_disturb_each_other(model: Decoder) -> None:
    ids, other, alone = tokens(20), tokens(45)[20:], Alone.of(model)
    mine, theirs = [5, 1, 3], [0, 2, 9, 4]
    alone.run(ids[:10], 0, mine)
    alone.runner.run([Chunk(ids[10:17], 10, mine, window=mine), Chunk(other[:16], 0, theirs, window=theirs)])
    both = alone.runner.run(
        [Chunk(ids[17:], 17, mine, every=True, window=mine), Chunk(other[16:], 16, theirs, every=True, window=theirs)]
    )
    close(both.values, torch.cat([full(model, ids)[17:], full(model, other)[16:]]), 1e-4)  # type: ignore[attr-defined]


def plain_greedy(model: Decoder, prompt: bytes, count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full(model, ids)[-1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("sizes", [(16, 64), (8, 5), (4, 64)])
def test_the_undivided_engine_writes_what_the_whole_forward_says(
    model: Decoder, folder: Path, sizes: tuple[int, int]
) -> None:
    page, chunk = sizes
    expected = plain_greedy(model, PROMPT, 24)
    for draft in (None, DRAFT):
        engine = Undivided(folder, draft, page_size=page, pages=24, chunk=chunk)
        assert engine.generate(PROMPT, max_new=24).tokens == expected
        assert engine._pages[0].available == 24


# sliding windows


@pytest.mark.parametrize(("page", "chunk"), [(4, 5), (8, 1), (8, 16), (16, 7)])
def test_a_window_moves_in_a_few_pages(model: Decoder, page: int, chunk: int) -> None:
    ids, most, alone = tokens(61), needed(CONFIG, page, chunk), Alone.of(model, page)
    pages, window = PageAllocator(16, seed=3).allocate(-(-61 // page)), [*range(15, 15 - most, -1)]
    assert len(window) < len(pages)
    steps = [alone.run(ids[i : i + chunk], i, pages, window=window) for i in range(0, len(ids), chunk)]
    close(torch.cat(steps), full(model, ids), 1e-4)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 30))
def test_a_page_is_used_again_when_the_window_has_left_it(reach: int, page: int, most: int) -> None:
    """The pages that are needed, and no fewer, let all rows that a step reads or writes lie in places of their own."""
    config = attrs.evolve(CONFIG, window=WindowConfig(layers=(1,), tokens=reach))
    own, refused = [*range(needed(config, page, most))], 0
    for start in range(reach + page):
        stop = start + most
        check_window(own, reach, page, start, stop)
        table = window_table(own, -(-stop // page))
        places = [(table[at // page], at % page) for at in range(first_row(reach, start), stop)]
        assert len({*places}) == len(places)
        try:
            check_window(own[1:], reach, page, start, stop)
        except EngineError as error:
            refused += f"a window of {reach} tokens needs {len(own)} pages for positions {start}" in str(error)
    assert refused


# speculation


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("prompt", "counts"), [(PROMPT, {3, 4}), (OTHER, {0, 2})], ids=["known", "unknown"])
def test_the_state_after_each_step_is_that_of_the_accepted_tokens(
    prompt: bytes, counts: set[int], temperature: float
) -> None:
    """With the shipped models, of four proposals in a text that they know, and in one that they do not; at ends of
    pages too."""
    model, draft = checkpoint.load(SHIPPED), checkpoint.load(DRAFT)
    target = Alone.of(model)
    (group,) = lay_out([cache(1, draft.config, Layout(), PAGE)]).groups
    second = torch_runner(draft, KVPool.allocate(draft.config, PAGES, PAGE), Shard(group, 0))
    pages = PageAllocator(PAGES, seed=1)
    sequence = TokenSequence(
        prompt=list(prompt), max_new=40, sampling=SamplingParams(temperature=temperature, seed=5),
        tables=[pages.allocate(14), [*range(14)], [2, 9, 7, 11, 3, 8, 1, 12, 0]],
    )  # fmt: skip
    prefiller, decoder = Prefiller(target.runner, second, 16), SpeculativeDecoder(target.runner, second, k=4)
    prefiller.add(sequence)
    while prefiller.busy:
        prefiller.step()
    accepted = set()
    while not sequence.finished:
        before = sequence.stats.accepted
        decoder.step([sequence])
        accepted.add(sequence.stats.accepted - before)
        fresh, ids = Alone.of(model), sequence.text(0, sequence.valid)
        fresh.run(ids, 0, sequence.tables[0], window=sequence.tables[0])
        ends = target.runner.states(sequence.tables[0], len(ids))
        assert ends == fresh.runner.states(sequence.tables[0], len(ids))
        for count in {*(ends or ()), len(ids)}:
            for held, wanted in zip(*(one.state(sequence.tables[0], count) for one in (target, fresh)), strict=True):
                close(held, wanted, 1e-4)
    assert accepted >= counts


def test_nothing_goes_on_from_a_proposal_that_was_not_settled(model: Decoder) -> None:
    ids, pages, alone = tokens(30), [5, 1, 3, 0], Alone.of(model)
    alone.run(ids[:12], 0, pages)
    alone.run(ids[12:17], 12, pages, proposed=4)
    for start in (14, 17):
        with pytest.raises(EngineError, match=f"position {start} needs the state after {start} tokens"):
            alone.run(ids[start : start + 1], start, pages)
    again = alone.run(ids[13:14], 13, pages)  # the step of proposals left the state before them
    close(again, full(model, ids)[13:14], 1e-4)
    for wrong in (0, 6):
        alone.run(ids[14:19], 14, pages, proposed=4)
        with pytest.raises(EngineError, match=f"{wrong} of 5 tokens cannot stay, 4 of them proposals"):
            alone.runner.settle([wrong])
        alone.run(ids[:14], 0, pages)


# states at another position


def test_a_step_that_begins_elsewhere_than_the_state_is_refused(model: Decoder) -> None:
    ids, pages, alone = tokens(40), [5, 1, 3, 0, 2], Alone.of(model)
    alone.run(ids[:20], 0, pages)
    with pytest.raises(
        EngineError, match="position 19 needs the state after 19 tokens, and item 3 has the state after 20"
    ):
        alone.run(ids[19:20], 19, pages)
    with pytest.raises(EngineError, match="position 30 needs the state after 30 tokens, and item 0 has no state"):
        alone.run(ids[30:31], 30, pages)
    close(alone.run(ids[16:20], 16, pages), full(model, ids)[16:20], 1e-4)  # a full page keeps the state at its end


def test_a_page_that_another_sequence_had_is_no_state_of_the_next(model: Decoder) -> None:
    """The page held the state after as many tokens, of other text."""
    ids, alone = tokens(24), Alone.of(model)
    alone.run(ids, 0, [5, 1, 3])
    assert alone.runner.states([5, 1, 3], 24) == {8, 16, 24}
    alone.runner.begin([5, 1, 3], 8)  # a prefix of one page was found
    alone.runner.arrived([5, 1, 3], 20)
    assert alone.runner.states([5, 1, 3], 24) == {8}
    with pytest.raises(EngineError, match="item 1 has no state"):
        alone.run(ids[16:], 16, [5, 1, 3])


def test_states_are_gone_when_their_pool_has_moved(model: Decoder) -> None:
    ids, alone = tokens(24), Alone.of(model)
    alone.run(ids[:20], 0, [5, 1, 3])
    alone.states.move(private)
    with pytest.raises(EngineError, match="item 3 has no state"):
        alone.run(ids[20:], 20, [5, 1, 3])


def test_the_page_of_the_last_token_is_the_sequences_own() -> None:
    """A state arrives in it, so it may be no page that others read, even if all of a prompt was found."""
    (group,) = lay_out([cache(0, CONFIG, Layout(), 4)]).groups
    for hybrid, found in ((True, 4), (False, 8)):
        prefixes = PrefixCache([PageAllocator(8), PageAllocator(5)], [Shard(group, 0)], hybrid=hybrid)
        first, second = (TokenSequence(prompt=[*range(8)], max_new=1) for _ in range(2))
        prefixes.allocate(first, [2, 3])
        first.append([1])
        prefixes.free(first, first.valid)
        assert prefixes.available == [8, 5]  # pages in which windows move are not kept
        assert prefixes.allocate(second, [2, 3]) == found
        assert [*map(len, second.tables)] == [2, 3]
        prefixes.free(second, 0)
        second.append([1])
        assert prefixes.allocate(second, [2, 3]) == (0 if hybrid else 8)  # it is computed again, and its state is gone
        prefixes.free(second, 0)
        assert prefixes.available == [8, 5]


class Rank:
    """A rank of an engine with the pools that kvproto serves."""

    def __init__(self, folder: Path, tp: TensorParallel, layout: Layout, page: int) -> None:
        self.folder = folder
        config = checkpoint.load_config(folder)
        self.geometry = geometry([folder], [config], "bytes", layout, page)
        (group,) = (g for g in self.geometry.groups if g.name == "target")
        rows = KVPool.allocate(config, PAGES, page, tp, memory=shareable)
        self.shard = Shard(group, 0)
        beside = HybridPools.allocate(config, PAGES, self.shard, tp, memory=shareable)
        self.pool = hand_over(self.geometry, {"target": rows}, tp.rank, beside)
        self.runner = torch_runner(checkpoint.load(folder, tp), rows, self.shard, beside=beside)

    def tables(self, pages: Sequence[int], count: int) -> dict[str, Sequence[int]]:
        return page_tables(self.geometry, {"target": pages, WINDOW: pages}, count, self.shard.span)


@pytest.mark.parametrize(
    ("computed", "fetched", "code", "path"),
    [
        (21, 20, ErrorCode.STATE_POSITION, r"grants\[\d\].state_after"),
        (20, 21, ErrorCode.BAD_GRANT, r"grants\[\d\].valid"),
    ],
    ids=["one more", "one less"],
)
def test_a_state_after_another_token_is_refused_with_code_path_and_advice(
    folder: Path, computed: int, fetched: int, code: ErrorCode, path: str
) -> None:
    """An engine that leaves the last token of a prompt to decode, with one that does not (KVP-GRANT-STATE)."""
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    source, sink = (Rank(folder, TensorParallel(), Layout(), PAGE) for _ in range(2))
    prompt, first = Prompt(tokens(21)), {"first token": {"token": bytes(4)}}
    with Source("prefill", source.pool, address) as prefill, Sink("decode", sink.pool, {"prefill": address}) as decode:
        for count in (computed, fetched):
            ticket = new_ticket("prefill")
            request = prefill.request(ticket, prompt)
            fetch = decode.fetch(ticket, prompt, sink.tables([1, 2, 3], fetched), tokens=fetched)
            request.finish(source.tables([4, 5, 6], count), tokens=count, handoff=first)
            if count == fetched:
                assert fetch.wait(20).bytes
                continue
            with pytest.raises(KvprotoError, match="tokens=") as caught:
                fetch.wait(20)
            assert caught.value.code == code
            assert re.fullmatch(path, caught.value.path)
            assert "finish(tokens=...)" in caught.value.advice


@pytest.mark.parametrize(("windows", "found"), [(0, [0, 24, 32]), (10, [0, 0, 32])], ids=["rows of all", "of the last"])
def test_a_decode_engine_keeps_no_states_that_it_never_had(
    folder: Path, tmp_path: Path, windows: int, found: list[int]
) -> None:
    """It got the state after 20 tokens, and went on to 33. Who begins alike goes on only after a page with a state.

    Where only the last rows of a window came, that page's window has to be there as well.
    """
    ids = tokens(33)

    def kept(rank: Rank) -> KeptPages:
        names = {"weights.target": "hybrid", "rope.target": "none", "dtype.target": "float32"}
        windowed = {WINDOW: CONFIG.window.tokens if CONFIG.window else 0}
        shards, storage = [rank.shard], str(tmp_path)
        return KeptPages({0: rank.pool}, names, shards, World(), 8, storage, 0, windowed, rank.runner.states)

    def allocated(pages: KeptPages, sequence: TokenSequence) -> int:
        pages.begin("it", sequence, len(sequence.prompt) - 1)
        while not (said := pages.turn()):
            continue
        assert [word["op"] for word in said] == ["fetched"]
        pages.fetched("it", 0)
        taken = pages.allocate("it", 40)
        assert taken is not None
        return taken[0]

    decode = Rank(folder, TensorParallel(), Layout(), PAGE)
    pages, sequence = kept(decode), TokenSequence(prompt=ids[:20], max_new=20)
    assert allocated(pages, sequence) == 0
    table = sequence.tables[0]
    decode.runner.begin(table, 0)
    decode.runner.arrived(table, 20)
    decode.runner.run([Chunk(ids[20:], 20, table, window=sequence.tables[-1])])
    sequence.append(ids[20:])
    pages.free(sequence, 33, windows)
    pages.close(True)
    for alike, tokens_found in zip((18, 26, 33), found, strict=True):
        pages = kept(Rank(folder, TensorParallel(), Layout(), PAGE))
        other = TokenSequence(prompt=[*ids[:alike], 200, 201], max_new=4)
        assert allocated(pages, other) == tokens_found
        pages.free(other, 0)
        pages.close(False)


def test_without_their_states_other_tokens_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the shipped model's text depends on its states, so that equal tokens say something of them."""
    engine = Undivided(SHIPPED, DRAFT)
    right, real = engine.generate(PROMPT, max_new=16), Prefiller.step

    def without_states(self: Prefiller) -> list[TokenSequence]:
        over = real(self)
        for tensor in self.target.attention._states.tensors.values() if over else ():  # type: ignore[attr-defined]
            tensor.zero_()
        return over

    monkeypatch.setattr(Prefiller, "step", without_states)
    wrong = engine.generate(PROMPT, max_new=16)
    assert wrong.tokens[0] == right.tokens[0]
    assert wrong.tokens != right.tokens


# what ranks have of it


def test_tiers_that_would_keep_a_state_in_another_page_are_refused(tmp_path: Path) -> None:
    """Its draft's pages are twice as long as the target's, so that two of these make a slot with one state."""
    drafted = lay_out([*caches([CONFIG], Layout(), 4), cache(1, CONFIG, Layout(), 8).replicated()])
    with pytest.raises(EngineError, match="a state for each 2 pages of the target"):
        check_kept(
            drafted,
            tokens_a_unit([Shard(group, 0) for group in drafted.groups if group.name in ("target", "draft")])[1],
        )


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_state_the_channels_and_heads_that_they_have(tp: int) -> None:
    """Blocks of q, k and v, each divided by heads; ranks without a key head of their own share one."""
    said = lay_out(caches([CONFIG], Layout(tp=tp), PAGE), Layout(tp=tp).parallel)
    names = {group.id: group.name for group in said.groups}
    for rank in said.ranks:
        shapes = shapes_of(CONFIG, TensorParallel(rank.rank, tp))
        spans = {names[share.group]: [(s.lo, s.hi) for s in share.lanes] for share in rank.owns}
        (heads,) = spans[STATES[SSM]]
        assert shapes[SSM] == (heads[1] - heads[0], 6, 10)
        lanes = [lane for lo, hi in spans[STATES[CONV]] for lane in range(lo, hi)]
        keys = {head // 2 for head in range(*heads)}
        wanted = [block + 6 * key + i for block in (0, 12) for key in sorted(keys) for i in range(6)]
        assert lanes == wanted + [24 + lane for lane in range(10 * heads[0], 10 * heads[1])]
        assert shapes[CONV] == (3, len(lanes))


def test_more_ranks_than_value_heads_are_refused() -> None:
    with pytest.raises(EngineError, match=r"delta.value_heads 4 are too few for TP 8"):
        Decoder(attrs.evolve(CONFIG, heads=8), TensorParallel(0, 8))


# what is refused by name

REFUSED = {
    "--cp 2": "leave --cp out",
    "--tp 2 --dcp 2 --framework jax": "leave --dcp out",
    "--window-pages 7": "raise --window-pages",
    "--pp 2 --host-pages 9": "leave --pp out",
    "--target gqa --window-pages 9": "leave it out",
    f"--draft {SHIPPED}": "choose a draft with attention in all layers",
}


@pytest.mark.parametrize("args", REFUSED)
def test_what_is_not_built_is_refused_by_name(args: str, tmp_path: Path) -> None:
    options = parse("prefill", ["--dir", str(tmp_path / "d"), "--target", "hybrid", *args.split()])
    with pytest.raises(EngineError, match=REFUSED[args]):
        options.check("prefill")


def test_a_hybrid_that_cannot_be_is_refused() -> None:
    for changes, says in (
        ({"window": WindowConfig(layers=(0,), tokens=4)}, "layers of its own"),
        ({"window": WindowConfig(layers=(9,), tokens=4)}, "layers of its own"),
        ({"window": WindowConfig(layers=(1, 3), tokens=4)}, "one layer at least"),
    ):
        with pytest.raises(EngineError, match=says):
            attrs.evolve(CONFIG, **changes)
    with pytest.raises(EngineError, match="4 value heads must divide into 3 key heads"):
        attrs.evolve(CONFIG.delta_sizes, key_heads=3)
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG


def test_the_shipped_model_is_the_presets_and_can_be_trained_again(tmp_path: Path) -> None:
    preset = PRESETS["target-hybrid"]
    assert checkpoint.load_config(SHIPPED) == preset.config
    train("target-hybrid", Preset(config=preset.config, steps=2), tmp_path / "out")
    assert checkpoint.load(tmp_path / "out").config == preset.config
