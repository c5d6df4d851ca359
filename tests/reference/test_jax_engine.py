"""The JAX engine against the torch engine: tokens, logits, and whose memory the pools are."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("jax", exc_type=ImportError)
import attrs
import jax

from kvproto import Pool, Prompt, Sink, Source, allocate, new_ticket
from kvproto_reference import checkpoint
from kvproto_reference.cache import PageAllocator
from kvproto_reference.cache.memory import shareable
from kvproto_reference.engine.build import torch_hosted
from kvproto_reference.engine.description import DRAFT, FIRST, TARGET, Layout, geometry, shards
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.runner import Chunk
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.jax_engine.build import jax_hosted, jax_runner
from kvproto_reference.jax_engine.mesh import host_devices
from kvproto_reference.jax_engine.programs import quick
from kvproto_reference.models import Dense, ModelConfig, MoeConfig
from tests.cases import rest
from tests.reference import jax_engines

host_devices(8)


@pytest.mark.parametrize(("target", "draft", "layout"), [
    ("gqa", "mla", jax_engines.DEALT),
    ("mla", "gqa", Layout(tp=2, cp=3, interleave=2, draft_sharded=True)),
    ("hybrid", "gqa", Layout(tp=4)),
    *rest(
        ("gqa", "gqa", jax_engines.DEALT), ("mla", "mla", jax_engines.DEALT),
        ("mla", "gqa", attrs.evolve(jax_engines.DEALT, draft_sharded=True)),
    ),
])  # fmt: skip
def test_tokens_are_those_of_the_torch_engine(target: str, draft: str, layout: Layout) -> None:
    folders = checkpoint.CHECKPOINTS / f"target-{target}", checkpoint.CHECKPOINTS / f"draft-{draft}"
    hosted = jax_hosted(folders, jax_engines.stated(*folders, layout), layout, jax_engines.PAGES)
    torchs = Undivided(*folders, page_size=jax_engines.PAGE)
    for request in jax_engines.generate(hosted.target, hosted.draft):
        expected = torchs.generate(bytes(request.prompt), max_new=24)
        assert request.generated == expected.tokens
        assert request.stats == expected.stats


@pytest.mark.parametrize(("target", "draft", "layout"), [
    ("target-small", "mtp-small", Layout(tp=2, pp=2, dcp=2, interleave=3)),
    ("target-gqa", "eagle-gqa", Layout(tp=2, cp=2, interleave=2, draft_tp=1)),
    ("target-mla", "draft-gqa", Layout(tp=2, pp=2, virtual=2, draft_tp=1)),
    ("target-hybrid", "draft-gqa", Layout(pp=2)),
])  # fmt: skip
def test_heads_and_stages_are_those_of_the_torch_engine(target: str, draft: str, layout: Layout) -> None:
    """MTP and EAGLE-3; stages with a chunk of layers each, and with two; a draft on one rank of the last."""
    folders = checkpoint.CHECKPOINTS / target, checkpoint.CHECKPOINTS / draft
    hosted = jax_hosted(folders, jax_engines.stated(*folders, layout), layout, jax_engines.PAGES)
    assert hosted.draft is not None
    torchs = Undivided(*folders, page_size=jax_engines.PAGE)
    for request in jax_engines.generate(hosted.target, hosted.draft):
        expected = torchs.generate(bytes(request.prompt), max_new=24)
        assert request.generated == expected.tokens
        assert request.stats == expected.stats
        assert request.stats.mean_acceptance > 1.2


@pytest.mark.parametrize("there", ["jax", "torch"])
def test_frameworks_hand_over_to_each_other(tmp_path: Path, there: str) -> None:
    """From one rank in torch to four in JAX with DCP, or back."""
    folders = checkpoint.CHECKPOINTS / "target-gqa", checkpoint.CHECKPOINTS / "draft-mla"
    configs = checkpoint.load_config(folders[0]), checkpoint.load_config(folders[1])
    alone, four = jax_engines.stated(*folders, jax_engines.ALONE, 8), jax_engines.stated(*folders, jax_engines.DEALT)
    solo = torch_hosted(
        folders, configs, alone, jax_engines.ALONE, World(), jax_engines.PAGES, torch.device("cpu"), shareable
    )
    dealt = jax_hosted(folders, four, jax_engines.DEALT, jax_engines.PAGES)
    near, far = (solo, dealt) if there == "jax" else (dealt, solo)
    request, expected = (
        TokenSequence(prompt=list(jax_engines.PROMPTS[0]), max_new=24),
        Undivided(*folders).generate(jax_engines.PROMPTS[0], max_new=24),
    )
    landed = TokenSequence(prompt=request.prompt, max_new=24)
    for side, sequence, seed in ((near, request, 1), (far, landed, 5)):
        counts = [shard.pages(len(sequence.prompt) + 24) for shard in side.shards]
        sequence.tables = [PageAllocator(jax_engines.PAGES, seed).allocate(n) for n in counts]
    tables = [dict(zip((TARGET, DRAFT), each.tables, strict=True)) for each in (request, landed)]

    addresses = {rank: f"ipc://{tmp_path}/{rank}" for rank in near.pools}
    prompt, ticket = Prompt(request.prompt), new_ticket("prefill")
    with ExitStack() as stack:
        sources = [stack.enter_context(Source("prefill", pool, addresses)) for pool in near.pools.values()]
        sinks = [stack.enter_context(Sink("decode", pool, {"prefill": addresses[0]})) for pool in far.pools.values()]
        fetches = [sink.fetch(ticket, prompt, tables[1]) for sink in sinks]
        asked = [source.request(ticket, prompt) for source in sources]
        prefiller = Prefiller(near.target, near.draft, 128)
        prefiller.add(request)
        prefiller.step()
        for each in asked:
            each.finish(tables[0], handoff={FIRST: {"token": request.newest.to_bytes(4, "little")}})
        for fetch in fetches:
            fetch.wait(60)
        landed.append(request.generated)
        decoder = SpeculativeDecoder(far.target, far.draft)
        while not landed.finished:
            decoder.step([landed])
    assert landed.generated == expected.tokens
    assert landed.stats == expected.stats


def test_states_go_back_to_what_was_accepted() -> None:
    """A step that begins elsewhere is refused; after one that begins where it may, logits are those of the whole."""
    folder, ids = checkpoint.CHECKPOINTS / "target-hybrid", jax_engines.IDS
    config = checkpoint.load_config(folder)
    made = geometry([folder], [config], "bytes", Layout(), 8)
    runner = jax_runner(folder, [Pool.allocate(made, 12)], TARGET, Layout())
    expected = checkpoint.load(folder).forward(torch.tensor(ids), torch.arange(len(ids)), Dense(config))
    pages, window = [5, 1, 3, 0, 9], [4, 2, 7, 11, 6, 8, 10, 1]

    def run(start: int, stop: int, proposed: int = 0) -> None:
        chunk = Chunk(ids[start:stop], start, pages, every=True, proposed=proposed, window=window)
        found = runner.run([chunk])
        for i in range(start, stop):
            np.testing.assert_allclose(found.row(i - start), expected[i].numpy(), atol=1e-4)

    run(0, 13)
    run(13, 18, proposed=4)
    runner.settle([4])  # the end of a page is among what stays
    assert runner.states(pages, 17) == {8, 16}
    with pytest.raises(
        EngineError, match="position 18 needs the state after 18 tokens, and item 3 has the state after 17"
    ):
        run(18, 19)
    run(17, 19)
    run(16, 21)


MOE = MoeConfig(layers=(0,), experts=16, top_k=3, ffn=10, shared_ffn=12, scores="sigmoid", groups=4, top_groups=2,
                group_best=2, normalize=True, scale=1.5, correction=True)  # fmt: skip
MODELS = {
    "biases": ModelConfig(kind="gqa", kv_heads=3, head_dim=8, qk_norm=False, qkv_bias=True, tied=False, **jax_engines.SIZES),
    "experts": ModelConfig(kind="mla", latent=12, rope_dim=4, nope_dim=8, v_dim=6, q_rank=20, rope_pairs=True,
                           rope_gain=1.1, moe=MOE, **jax_engines.SIZES | {"layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "by_token"), [
    ("biases", Layout(tp=6, dcp=2, replicate_q=True, exchange="ag_rs"), False),
    ("experts", Layout(tp=3, dcp=3, interleave=4), True),
    ("experts", Layout(tp=4), False),
    ("biases", Layout(tp=2, cp=3, interleave=2), False),
])  # fmt: skip
def test_logits_of_chunks_are_those_of_the_torch_model(
    tmp_path: Path, name: str, layout: Layout, by_token: bool
) -> None:
    """The third with shares that differ: 6 heads and widths of 50 over 4 ranks."""
    model = jax_engines.drawn(MODELS[name], tmp_path)
    runner, _ = jax_engines.one(tmp_path, layout, page=4, by_token=by_token)
    expected = model.forward(torch.tensor(jax_engines.IDS), torch.arange(len(jax_engines.IDS)), Dense(model.config))
    pages = PageAllocator(jax_engines.PAGES, 3).allocate(runner.shard.pages(len(jax_engines.IDS)))
    for start, stop in ((0, 8), (8, 12), (12, 20), (20, 21)):  # the last reads the weights of chosen experts alone
        found = runner.run([Chunk(jax_engines.IDS[start:stop], start, pages, every=True)])
        assert found.best().tolist() == expected[start:stop].argmax(-1).tolist()
        for i in range(start, stop):
            np.testing.assert_allclose(found.row(i - start), expected[i].numpy(), atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    made = tmp_path_factory.mktemp("tiny")
    jax_engines.drawn(ModelConfig(kind="gqa", kv_heads=2, head_dim=8, **jax_engines.SIZES | {"layers": 1}), made)
    return made


def raw(pool: Pool) -> dict[str, np.ndarray]:
    """A view of what the one layer has, [pages, rows, heads, dim], by part."""
    return {part: pool.array(TARGET, 0, part).view(np.float32) for part in "kv"}


@pytest.mark.parametrize("layout", [jax_engines.PAIR, jax_engines.CONTEXT], ids=["decode", "prefill"])
def test_each_rank_stores_its_tokens_and_touches_nothing_else(folder: Path, layout: Layout) -> None:
    runner, pools = jax_engines.one(folder, layout, page=4)
    for pool in pools:
        for rows in raw(pool).values():
            rows.fill(np.nan)
    pages = [5, 2, 9]
    runner.run([Chunk(jax_engines.IDS[:8], 0, pages)])
    assert np.isfinite(runner.run([Chunk(jax_engines.IDS[8:11], 8, pages)]).row(0)).all()
    for rank, pool in enumerate(pools):
        slots = shards(pool.geometry, rank)[TARGET].slots(np.array(pages), np.arange(11))
        for rows in raw(pool).values():
            written = np.isfinite(rows.reshape(jax_engines.PAGES * 4, -1)).all(1)
            assert np.flatnonzero(written).tolist() == sorted(slots[slots >= 0])


def test_rows_that_a_transport_writes_between_steps_are_read(folder: Path) -> None:
    runner, pools = jax_engines.one(folder, jax_engines.PAIR, page=4)
    pages, step = [3, 1, 4], Chunk(jax_engines.IDS[8:11], 8, [3, 1, 4])
    runner.run([Chunk(jax_engines.IDS[:8], 0, pages)])
    before = runner.run([step]).row(0)
    kept = raw(pools[1])["v"].copy()
    raw(pools[1])["v"][...] = 0
    assert np.abs(runner.run([step]).row(0) - before).max() > 1e-2
    raw(pools[1])["v"][...] = kept
    assert (runner.run([step]).row(0) == before).all()


def test_layers_are_announced_when_their_rows_are_in_the_pool(folder: Path) -> None:
    runner, pools = jax_engines.one(folder, jax_engines.PAIR, page=4)
    seen: list[tuple[int, bool]] = []
    runner.run(
        [Chunk(jax_engines.IDS[:8], 0, [7, 8])], lambda layer: seen.append((layer, bool(raw(pools[0])["k"][7].all())))
    )
    assert seen == [(0, True)]


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of each program that XLA compiles meanwhile."""
    found: list[float] = []
    on = lambda name, seconds, **_: found.append(seconds) if name.endswith("backend_compile_duration") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(on)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(on)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_and_logits_of_other_types_are_those_of_torch(dtype: str) -> None:
    """Within a few roundings of 8 or 11 bits; and what one framework stored, the other goes on with."""
    folder, ids, pages = checkpoint.CHECKPOINTS / "target-mla", [*jax_engines.PROMPTS[0][:24]], [3, 1]
    config = checkpoint.load_config(folder, dtype)
    made = geometry([folder], [config], "bytes", Layout(), 16)
    sides = [
        jax_hosted([folder], made, Layout(), 4, dtype=dtype),
        torch_hosted([folder], [config], made, Layout(), World(), 4, torch.device("cpu"), shareable),
    ]
    steps = [[side.target.run([Chunk(ids[:20], 0, pages, every=True)]).row(19)] for side in sides]
    rows = [side.pools[0].array(TARGET, 1, "latent").copy().view(np.uint16)[[3, 1]] for side in sides]
    kept = [side.pools[0].array(TARGET, layer, "latent") for side in sides for layer in range(config.layers)]
    for mine, theirs in zip(kept[: config.layers], kept[config.layers :], strict=True):
        mine[:] = theirs
    for side, logits in zip(sides, steps, strict=True):
        logits.append(side.target.run([Chunk(ids[20:], 20, pages)]).row(0))
    near = {"bfloat16": 2.0**-5, "float16": 2.0**-8}[dtype]
    for jax_logits, torch_logits in zip(*steps, strict=True):
        np.testing.assert_allclose(jax_logits, torch_logits, atol=near * np.abs(torch_logits).max())
    both = [torch.from_numpy(each).view(getattr(torch, dtype)).double() for each in rows]
    assert (both[0] - both[1]).abs().max() < near * both[1].abs().max()
    assert (rows[0] != 0).any(-1).sum() == 20


def test_an_engine_wakes_with_other_memory(folder: Path) -> None:
    """What it computes then is in the new pools alone, and is what it was."""
    hosted = jax_hosted([folder], geometry([folder], [checkpoint.load_config(folder)], "", Layout(tp=2), 4),
                        Layout(tp=2), 8)  # fmt: skip
    step = Chunk(jax_engines.IDS[:6], 0, [3, 5])
    before = hosted.target.run([step]).row(0)
    old = [raw(pool)["k"] for pool in hosted.pools.values()]
    assert hosted.elsewhere is not None
    pools = hosted.elsewhere()
    new = [raw(pool)["k"] for pool in pools.values()]
    assert not any(rows.any() for rows in new)
    for rows in old:
        rows[:] = np.nan
    assert (hosted.target.run([step]).row(0) == before).all()
    assert all(rows[3].all() for rows in new)


def test_few_programs_compile(folder: Path) -> None:
    """One for one token a span and one for up to 8, of up to 4 spans; then one for each doubling of pages."""
    runner, _ = jax_engines.one(folder, Layout(tp=2), page=4)
    quick()  # which compiles to see what XLA knows

    def steps(counts: Sequence[int], starts: Sequence[int]) -> None:
        tables = PageAllocator(jax_engines.PAGES, 4)
        chunks = [
            Chunk(jax_engines.IDS[:count], start, tables.allocate(-(-(start + count) // 4)), every=True)
            for count, start in zip(counts, starts, strict=True)
        ]
        runner.run(chunks)

    with compilations() as found:
        for count in range(2, 9):
            steps([count], [0])
        assert len(found) == 1
        for start in range(1, 32):
            steps([1], [start])
        assert len(found) == 2
        steps([1], [33])
        assert len(found) == 3  # more than 8 pages
        for start in range(5, 11):
            steps([1] * 4, [start, 1, start + 1, 2])
            steps([1] * 3, [start, 1, 2])
        assert len(found) == 3


def test_misuse_is_refused(folder: Path, tmp_path: Path) -> None:
    runner, pools = jax_engines.one(folder, page=4)
    with pytest.raises(EngineError, match="outside a pool of 24 pages"):
        runner.run([Chunk(jax_engines.IDS[:3], 0, [24])])
    with pytest.raises(EngineError, match="needs 3 pages"):
        runner.run([Chunk(jax_engines.IDS[:9], 0, [1, 2])])
    with pytest.raises(EngineError, match="a vocabulary of 40, not 1 to 40"):
        runner.run([Chunk([1, 40], 0, [1])])
    with pytest.raises(EngineError, match="all 2 ranks"):
        jax_runner(folder, pools, TARGET, jax_engines.CONTEXT)
    with pytest.raises(EngineError, match="not 9: ask for all"):
        host_devices(9)
    jax_engines.drawn(ModelConfig(kind="gqa", kv_heads=4, head_dim=8, **jax_engines.SIZES | {"heads": 8}), tmp_path)
    with pytest.raises(EngineError, match=r"as many KV heads on every rank.*: choose ranks that divide the heads"):
        jax_engines.one(tmp_path, Layout(tp=3))
    head = checkpoint.CHECKPOINTS / "eagle-gqa"
    with pytest.raises(EngineError, match="eagle-gqa is a head, which runs beside its target: give it as the draft"):
        jax_runner(head, pools, TARGET, jax_engines.ALONE)
    assert runner.run([Chunk(jax_engines.IDS[:3], 0, [23])]).row(0).shape == (40,)


def test_a_pool_that_xla_would_copy_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jax_engines.stated(folder, folder, jax_engines.ALONE, 4)
    memory = np.from_dlpack(allocate(1 << 16)).view(np.float32)
    step, shape = jax_engines.PAGES * 4 * 2 * 8, (jax_engines.PAGES, 4, 2, 8)

    def pool(shift: int) -> Pool:
        rows = [memory[shift + i * step : shift + (i + 1) * step].reshape(shape) for i in range(4)]
        return Pool(made, {name: {"k": [k], "v": [v]} for name, k, v in ((TARGET, *rows[:2]), (DRAFT, *rows[2:]))})

    with pytest.raises(EngineError, match="at a multiple of 64 bytes"):
        jax_runner(folder, [pool(1)], TARGET, jax_engines.ALONE)
    runner = jax_runner(folder, [pool(16)], TARGET, jax_engines.ALONE)
    runner.run([Chunk(jax_engines.IDS[:4], 0, [0])])
    assert memory[16 : 16 + 4 * 2 * 8].all()
    put = jax.device_put
    copied = lambda x, where: put([view.copy() for view in x] if isinstance(x, list) else x, where)  # noqa: E731
    monkeypatch.setattr(jax, "device_put", copied)
    with pytest.raises(EngineError, match="would read a copy"):
        runner.run([Chunk(jax_engines.IDS[:4], 0, [0])])
