"""EAGLE-3 heads and MTP layers: what they read of a target, their rows, their proposals, and heads that do not fit."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from kvproto import lay_out
from kvproto_reference import checkpoint
from kvproto_reference.cache import KVPool, PageAllocator, Shard
from kvproto_reference.data import load_text, paragraphs
from kvproto_reference.demo.options import parse
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import Layout, cache, hidden_bytes, hidden_from
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.runner import Chunk, Runner
from kvproto_reference.engine.sampling import SamplingParams, probabilities, sample
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder, verify
from kvproto_reference.engine.tiered_engine import TieredEngine
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, Dense, Head, HeadConfig, Taps
from kvproto_reference.presets import HEADS
from kvproto_reference.train import train
from kvproto_reference.train_head import Unrolled, loss_of

from .conftest import CONFIGS
from .engines import close

PROMPT = b"So she was considering in her own mind"
PAGE, PAGES = 8, 16
SHIPPED = checkpoint.CHECKPOINTS / "target-gqa"
TAPS = (0, 1)
SAYS = 90
"""Tokens that the untrained heads can propose, from 20 on."""
FORMS = {"eagle3": {}, "mtp": {"form": "mtp", "taps": (1,), "vocab": 257}}
Fixed = Callable[..., Path]


@pytest.fixture(scope="session")
def head(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fixed:
    """Saves an untrained head of an untrained target, of a kind of attention, with changes to what it says of itself."""

    def build(target: str, kind: str = "gqa", shift: int = 20, **changes: object) -> Path:
        reads = HeadConfig(target=checkpoint.fingerprint(folders[target]), width=32, taps=TAPS, vocab=SAYS)
        torch.manual_seed(7)
        made = Head(
            attrs.evolve(
                CONFIGS[kind], layers=1, tied=changes.get("form") == "mtp", head=attrs.evolve(reads, **changes)
            )
        )
        made.d2t.fill_(0 if made.whole else shift)
        folder = tmp_path_factory.mktemp("head")
        checkpoint.save(folder, made)
        return folder

    return build


@attrs.frozen
class Engine:
    """Target and head over pools of their own."""

    target: Runner
    draft: Runner
    pools: Sequence[KVPool]

    @classmethod
    def of(cls, target: Path, head: Path) -> "Engine":
        models, pools, runners = (checkpoint.load(target), checkpoint.load_head(head, target)), [], []
        for number, model in enumerate(models):
            (group,) = lay_out([cache(number, model.config, Layout(), PAGE)]).groups
            pools.append(KVPool.allocate(model.config, PAGES, PAGE))
            taps = () if number else models[1].config.head.taps
            runners.append(torch_runner(model, pools[-1], Shard(group, 0), taps=taps))
        return cls(*runners, pools)

    def started(self, sampling: SamplingParams, chunk: int = 16, max_new: int = 24) -> TokenSequence:
        pages = PageAllocator(PAGES, seed=1)
        tables = [pages.allocate(8), pages.allocate(8)]
        made = TokenSequence(prompt=[*PROMPT], max_new=max_new, sampling=sampling, tables=tables)
        prefiller = Prefiller(self.target, self.draft, chunk)
        prefiller.add(made)
        while prefiller.busy:
            prefiller.step()
        return made

    def rows(self, table: Sequence[int], count: int) -> list[Tensor]:
        """The head's rows of the first positions."""
        return [t[list(table)].flatten(0, 1)[:count].clone() for t in self.pools[1].tensors.values()]


def whole(model: Decoder, ids: Sequence[int], layers: Sequence[int] = TAPS) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of all tokens, without a cache."""
    taps = Taps(layers)
    logits = model.forward(torch.tensor([*ids]), torch.arange(len(ids)), Dense(model.config), taps=taps)
    return logits, taps.hidden


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_hidden_states_of_a_step(folders: dict[str, Path], head: Fixed, kind: str) -> None:
    engine = Engine.of(folders[f"target-{kind}"], head(f"target-{kind}"))
    found = [
        engine.target.run([Chunk([*PROMPT[lo : lo + 16]], lo, range(8))]).hidden for lo in range(0, len(PROMPT), 16)
    ]
    model = checkpoint.load(folders[f"target-{kind}"])
    _, hidden = whole(model, PROMPT)
    close(torch.cat([each for each in found if each is not None]), hidden)
    # a tap is what the next layer reads, and the last one what the final norm does
    assert model.embed is not None
    last = hidden[:, -model.config.hidden :]
    said = torch.nn.functional.linear(model.ops.norm(last, model.norm, model.config.norm_eps), model.embed)  # type: ignore[arg-type]
    close(said, whole(model, PROMPT)[0])
    untapped = torch_runner(model, engine.pools[0], engine.target.shard)
    assert untapped.run([Chunk([*PROMPT[:8]], 0, range(8))]).hidden is None


def with_forms(*values: Sequence[Any]) -> list[Any]:
    """Every choice of these values, each with one of the two forms, so that any three of them all meet."""
    found = product(*(range(len(some)) for some in values))
    forms = [*FORMS]
    return [(*(some[n] for some, n in zip(values, at, strict=True)), forms[sum(at) % 2]) for at in found]


@pytest.mark.parametrize(("kind", "temperature", "chunk", "form"), with_forms(["gqa", "mla"], [0.0, 1.0], [5, 64]))
def test_rows_are_of_the_targets_states(
    folders: dict[str, Path], head: Fixed, kind: str, temperature: float, chunk: int, form: str
) -> None:
    folder = head("target-mla", kind, **FORMS[form])
    taps = FORMS[form].get("taps", TAPS)
    engine = Engine.of(folders["target-mla"], folder)
    sequence = engine.started(SamplingParams(temperature=temperature, seed=5, ignore_eos=True), chunk)
    assert sequence.shared == sequence.valid - 1  # prefill has filled the last row too, and decode fills it again
    decoder, model = SpeculativeDecoder(engine.target, engine.draft, k=3), checkpoint.load(folders["target-mla"])
    filled = sequence.valid
    while True:
        ids = [*PROMPT, *sequence.generated]
        fresh = Engine.of(folders["target-mla"], folder)
        _, hidden = whole(model, ids, taps)
        fresh.draft.run([Chunk(ids[1 : filled + 1], 0, sequence.tables[1], hidden=hidden[:filled])])
        for held, wanted in zip(*(e.rows(sequence.tables[1], filled) for e in (engine, fresh)), strict=True):
            close(held, wanted, 1e-4)
        if sequence.finished:
            break
        assert sequence.hidden is not None
        close(sequence.hidden, hidden[sequence.shared : sequence.valid], 1e-4)
        decoder.step([sequence])
        filled = sequence.shared
    assert sequence.shared == sequence.valid == len(PROMPT) + 23


@pytest.mark.parametrize(
    ("target", "kind", "max_new", "form"), with_forms(["target-gqa", "target-mla"], ["gqa", "mla"], [1, 2, 5, 30])
)
def test_a_head_changes_no_token(
    folders: dict[str, Path], head: Fixed, target: str, kind: str, max_new: int, form: str
) -> None:
    plain = Undivided(folders[target], page_size=8, pages=16)
    drafted = Undivided(folders[target], head(target, kind, **FORMS[form]), page_size=8, pages=16, chunk=7, k=3)
    for sampling in (
        SamplingParams(),
        SamplingParams(repetition=1.3, frequency=0.5),
        SamplingParams(temperature=0.8, top_k=1, seed=2),  # drawn, from one token
    ):
        assert drafted.generate(PROMPT, sampling, max_new).tokens == plain.generate(PROMPT, sampling, max_new).tokens


@pytest.mark.parametrize("name", ["eagle-mla", "eagle-gqa", "eagle-small", "mtp-small"])
def test_shipped_heads(name: str) -> None:
    target, head = checkpoint.CHECKPOINTS / f"target-{name.split('-')[1]}", checkpoint.CHECKPOINTS / name
    engines = [Undivided(target, draft, pages=64) for draft in (head, None)]
    prompts = [(list(part.encode()[:100]), SamplingParams()) for part in paragraphs(load_text())[2:6]]
    drafted, plain = (engine.generate_all(prompts, 40) for engine in engines)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    steps, tokens = (sum(getattr(each.stats, name) for each in drafted) for name in ("steps", "tokens"))
    assert tokens / steps > 1.8
    cold = Undivided(target, head, pages=64, cold=True).generate_all(prompts, 40)
    assert [each.tokens for each in cold] == [each.tokens for each in plain]
    assert sum(each.stats.steps for each in cold) > steps
    once = engines[0].generate_all([(p, SamplingParams(temperature=0.8, seed=3)) for p, _ in prompts], 30)
    again = Undivided(target, head, pages=128, page_size=4, chunk=9)
    assert [again.generate(p, SamplingParams(temperature=0.8, seed=3), 30).tokens for p, _ in prompts] == [
        each.tokens for each in once
    ]


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_proposals_are_those_of_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, after hidden states that prefill gave and after those of a verification."""
    folders = [checkpoint.CHECKPOINTS / f"{role}-{kind}" for role in ("target", "eagle")]
    engine, made, model = Engine.of(*folders), checkpoint.load_head(folders[1], folders[0]), checkpoint.load(folders[0])
    sequence, runs, real = engine.started(SamplingParams()), list[Sequence[int]](), engine.target.run
    decoder = SpeculativeDecoder(engine.target, engine.draft, k=4)

    def run(chunks: Sequence[Chunk]) -> object:
        runs.append(chunks[0].tokens[1:])
        return real(chunks)

    monkeypatch.setattr(engine.target, "run", run)
    while not sequence.finished:
        ids = [*PROMPT, *sequence.generated]
        _, hidden = whole(model, ids[:-1], made.config.head.taps)
        tokens, features, attention, right = torch.tensor(ids[1:]), made.fuse(hidden), Unrolled(made.config), []
        decoder.step([sequence])
        for u in range(len(runs[-1])):
            logits, features = made.forward(tokens, torch.arange(len(tokens)) + u, features, attention)
            right.append(int(made.tokens[logits[-1].argmax()]))
            tokens = torch.full_like(tokens, right[-1])
        assert list(runs[-1]) == right
    assert len(runs) > 4


def test_sampling_keeps_the_distribution_of_tokens_that_a_head_cannot_say() -> None:
    target, draft = np.array([0.5, 2.0, 1.0, -1.0]), np.array([-np.inf, 0.5, 1.0, -np.inf])
    counts = np.zeros(4)
    for seed in range(6000):
        params = SamplingParams(temperature=1.0, seed=seed)
        token = sample(draft, params, 9, "draft")
        accepted, extra = verify([1, 1], lambda _: target, [token], [probabilities(draft, params)], params, 9)
        counts[token if accepted else extra] += 1
    np.testing.assert_allclose(counts / 6000, probabilities(target, SamplingParams(temperature=1.0)), atol=0.025)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("form", FORMS)
def test_training_sees_what_decode_will(folders: dict[str, Path], head: Fixed, kind: str, form: str) -> None:
    folder, ids, unrolled = head("target-gqa", kind, **FORMS[form]), [*PROMPT], 3
    made, model = checkpoint.load_head(folder, folders["target-gqa"]), checkpoint.load(folders["target-gqa"])
    _, hidden = whole(model, ids, FORMS[form].get("taps", TAPS))
    count, attention, trained = len(ids) - unrolled, Unrolled(made.config), []
    features = made.fuse(hidden[:count])
    for u in range(unrolled):
        tokens = torch.tensor(ids[u + 1 : u + 1 + count])
        logits, features = made.forward(tokens, torch.arange(count) + u, features, attention)
        trained.append(logits)
    for place in (1, 17, count - 1):  # decode, as if the tokens up to place + 1 were there and the rest was proposed
        draft = Engine.of(folders["target-gqa"], folder).draft
        got = draft.run([Chunk(ids[1 : place + 2], 0, range(8), hidden=hidden[: place + 1])])
        for u in range(unrolled):
            close(torch.from_numpy(got.row(0))[made.tokens].float(), trained[u][place], 1e-4)
            if u + 1 < unrolled:
                got = draft.run([Chunk([ids[place + u + 2]], place + u + 1, range(8), made=got.hidden)])


def test_training_is_repeatable(tmp_path: Path) -> None:
    preset = attrs.evolve(HEADS["eagle-gqa"], steps=2)
    assert train("eagle-gqa", preset, tmp_path / "one") == train("eagle-gqa", preset, tmp_path / "two")
    one, two = (checkpoint.load_head(tmp_path / name, SHIPPED).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_shipped_heads_have_learnt() -> None:
    for name, preset in HEADS.items():
        folder = checkpoint.CHECKPOINTS / preset.target
        target = checkpoint.load(folder)
        ids = torch.tensor([[*paragraphs(load_text())[3].encode()[:120]]])
        assert float(loss_of(checkpoint.load_head(checkpoint.CHECKPOINTS / name, folder), target, ids, 4)) < 2.0


def test_a_prefix_is_found_for_the_same_next_token() -> None:
    (group,) = lay_out([cache(0, CONFIGS["gqa"], Layout(), 4)]).groups
    pages = PageAllocator(20, 1)
    kept = PrefixCache([pages], [Shard(group, 0)], ahead=1)
    first = TokenSequence(prompt=[1, 2, 3, 4, 5, 6, 7, 8], max_new=2)
    assert kept.allocate(first, [3]) == 0
    first.append([9, 10])
    kept.free(first, 8)  # the row of position 7 was computed with the token 9
    for prompt, cached in (
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 4, 6], 0),
        ([1, 2, 3, 4, 5, 9], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
    ):
        other = TokenSequence(prompt=prompt, max_new=1)
        assert kept.allocate(other, [3]) == cached
        kept.free(other, 0)


def test_a_kept_page_is_found_for_the_same_next_token() -> None:
    """KVP-TIER-AHEAD: the last row of a page was computed with the token after it."""
    folders = [checkpoint.CHECKPOINTS / f"{role}-mla" for role in ("target", "eagle")]
    engine = TieredEngine(*folders, pages=32, host=8, page_size=8)
    pages = [*paragraphs(load_text())[2].encode()[:32]]
    try:
        found = [engine.answer([*pages, *ends], 2).device for ends in ([65, 66], [65, 67], [68, 66])]
    finally:
        engine.close()
    assert found == [0, 32, 24]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_as_hand_off_data(dtype: str) -> None:
    configs = [attrs.evolve(CONFIGS["mla"], dtype=dtype)]
    hidden = torch.randn(1, 96).to(getattr(torch, dtype))
    data = hidden_bytes(hidden)
    assert len(data) == 96 * hidden.element_size()
    assert torch.equal(hidden_from(data, configs, torch.device("cpu")), hidden)


def test_heads_that_do_not_fit(folders: dict[str, Path], head: Fixed) -> None:
    target, other = folders["target-gqa"], folders["target-mla"]
    own, theirs = (checkpoint.fingerprint(folder) for folder in (target, other))
    for folder, at, says in (
        (head("target-gqa"), other, f"was trained for the target {own}, and .* is {theirs}: choose the target"),
        (head("target-gqa", width=48), target, "hidden states of 48 elements, the target's have 32"),
        (head("target-gqa", taps=(0, 2)), target, "reads layer 2, the target has layers 0 to 1"),
        (head("target-gqa", shift=250), target, "token 257, and the target has 257"),
        (head("target-gqa", shift=-1), target, "token -1, and the target has 257"),
    ):
        with pytest.raises(EngineError, match=says):
            Undivided(at, folder)
    with pytest.raises(EngineError, match="give it as the draft"):
        Undivided(head("target-gqa"))
    for fields, says in (
        ({"taps": [1, 0]}, "ascending"),
        ({"vocab": 258}, "258 tokens of 257"),
        ({"width": 0}, "width"),
    ):
        folder = head("target-gqa")
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | {"head": said["head"] | fields}))
        with pytest.raises(EngineError, match=says):
            Undivided(target, folder)


def test_a_map_that_names_a_token_twice(folders: dict[str, Path], head: Fixed, tmp_path: Path) -> None:
    made = checkpoint.load_head(head("target-gqa"), folders["target-gqa"])
    made.d2t[3] -= 1
    checkpoint.save(tmp_path, made)
    with pytest.raises(EngineError, match=f"maps {SAYS} tokens to {SAYS - 1} of the target's"):
        Undivided(folders["target-gqa"], tmp_path)


@pytest.mark.parametrize(
    ("role", "args", "says"),
    [
        ("decode", "--cold-draft compute", "choose --cold-draft zero"),
        ("prefill", "--cp 2 --draft-sharded", "leave --draft-sharded out"),
        ("prefill", "--target gqa-of-mine", "gqa-of-mine does not exist"),
        ("prefill", "--target {draft}", "no eagle3 head of target .* is shipped, only .*: choose another draft"),
        ("prefill", "--draft mtp", r"only mtp-small \(--target small\), mtp-smollm2 \(--real\): choose another"),
        ("prefill", "--draft {draft} --target gqa", "was trained for the target"),
    ],
)
def test_options_that_a_head_does_not_have(role: str, args: str, says: str, tmp_path: Path) -> None:
    given = args.format(draft=checkpoint.CHECKPOINTS / "eagle-mla").split()
    with pytest.raises(EngineError, match=says):
        parse(role, ["--dir", str(tmp_path / "d"), "--draft", "eagle", *given]).check(role)


@pytest.mark.parametrize(
    ("role", "args"),
    [
        ("prefill", "--target gqa --pp 2 --cp 2"),
        ("prefill", "--cold-draft compute"),
        ("decode", "--tp 4 --dcp 2 --draft-sharded --host-pages 8"),
        ("decode", "--cold-draft zero"),
    ],
)
def test_options_that_a_head_has(role: str, args: str, tmp_path: Path) -> None:
    parse(role, ["--dir", str(tmp_path / "d"), "--draft", "eagle", *args.split()]).check(role)
