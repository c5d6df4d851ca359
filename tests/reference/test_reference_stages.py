"""Pipeline stages give what one engine gives, load their own layers only, and leave the draft where the Layout says."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from kvproto_reference import checkpoint
from kvproto_reference.cache.memory import shareable
from kvproto_reference.demo.options import parse
from kvproto_reference.engine.build import torch_hosted
from kvproto_reference.engine.description import Layout, geometry
from kvproto_reference.engine.runner import Chunk, Runner
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, ModelConfig, Pipeline, TensorParallel
from tests.processes import all_end_well, imported
from tests.reference.test_reference_parallel import PAGE, PROMPTS

imported(__name__)

TARGETS = {
    "tied": ModelConfig(kind="mla", hidden=32, layers=4, heads=4, latent=12, rope_dim=4, nope_dim=8, v_dim=6, ffn=48),
    "untied": ModelConfig(
        kind="gqa", hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48, qk_norm=True, tied=False
    ),
}
LAYOUTS = {
    "pp 4": ("tied", Layout(pp=4)),
    "pp 2 of tp 2 and dcp 2, the draft on one rank": ("untied", Layout(tp=2, pp=2, dcp=2, interleave=3, draft_tp=1)),
    "pp 2 of cp 2, each stage with two chunks": ("untied", Layout(pp=2, virtual=2, cp=2, interleave=3)),
    "the draft on three ranks of four": ("tied", Layout(tp=4, draft_tp=3)),
}
"""Of each its target."""
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def models(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Targets of four layers, and a draft."""
    root = tmp_path_factory.mktemp("stages")
    for name, config in TARGETS.items():
        torch.manual_seed(7)
        checkpoint.save(root / name, Decoder(config))
    return {name: root / name for name in TARGETS} | {"draft": folders["draft-gqa"]}


def spoilt(length: int, device: torch.device) -> Tensor:
    """Memory for pools in which every number is NaN: a row that is read before it is written spoils everything."""
    return shareable(length, device).fill_(255)


def scores(runner: Runner) -> Tensor:
    """Logits [tokens, vocab] of a prompt in two steps, the second with another sequence, which goes on alone."""
    ids = PROMPTS[0]
    steps = [
        [Chunk(ids[:13], 0, [5, 1, 3], every=True)],
        [Chunk(ids[13:17], 13, [5, 1, 3], every=True), Chunk(ids[:2], 0, [7])],
        [Chunk(ids[2:3], 2, [7])],
    ]
    told = zip(map(runner.run, steps), (13, 5, 1), strict=True)
    return torch.stack([torch.from_numpy(logits.row(i)) for logits, count in told for i in range(count)])


def found(target: Path, draft: Path, layout: Layout, world: World, device: str = "cpu") -> list[Tensor]:
    """What one rank finds, with the target and with the draft."""
    configs = checkpoint.load_config(target), checkpoint.load_config(draft)
    layout.check(configs)
    stated = geometry((target, draft), configs, "bytes", layout, PAGE)
    made = torch_hosted((target, draft), configs, stated, layout, world, 9, torch.device(device), spoilt)
    return [scores(made.target), scores(made.draft)]


def work(rank: int, models: Folders, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=4)
    for name, (target, layout) in LAYOUTS.items():
        world = World(rank, 4, dist.group.WORLD)
        torch.save(found(models[target], models["draft"], layout, world), out / f"{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(models: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each rank has put what it found."""
    out = tmp_path_factory.mktemp("ranks")
    all_end_well(work, *((rank, models, out) for rank in range(4)))
    return out


@pytest.fixture(scope="module")
def alone(models: Folders) -> dict[str, list[Tensor]]:
    """What one engine finds, by target."""
    return {target: found(models[target], models["draft"], Layout(), World()) for target in TARGETS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_of_all_stages_find_what_one_engine_finds(
    name: str, ranks: Path, alone: dict[str, list[Tensor]]
) -> None:
    target, layout = LAYOUTS[name]
    one, told = alone[target], [torch.load(ranks / f"{name}-{rank}.pt") for rank in range(layout.ranks)]
    for rank in told:
        torch.testing.assert_close(rank, one, atol=1e-4 if layout.stage > 1 else 0, rtol=0)
        torch.testing.assert_close(rank, told[0], atol=0, rtol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_a_stage_reads_the_weights_of_its_layers_alone(target: str, models: Folders, tmp_path: Path) -> None:
    whole = checkpoint.state(models[target])
    ends = {"norm", "embed" if TARGETS[target].tied else "head"}
    parts: tuple[set[str], set[str]] = {"embed"}, ends
    for rank, (layers, outer) in enumerate(zip((range(2), range(2, 4)), parts, strict=True)):
        wanted = {name for name in whole if name.startswith(tuple(f"layers.{layer}." for layer in layers))} | outer
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / checkpoint.CONFIG_FILE).write_text(TARGETS[target].to_json())
        save_file({name: whole[name] for name in wanted}, folder / "model.safetensors")
        stages = Pipeline(rank, ((0, range(2)), (1, range(2, 4))))
        loaded = checkpoint.load(folder, TensorParallel(pipeline=stages)).state_dict()
        assert loaded.keys() == wanted
        assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
        with pytest.raises(EngineError, match="no tensor"):
            checkpoint.load(folder)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(pp=5), "5 pipeline stages with 1 chunks each are too many for 4 layers: lower --pp or --virtual"),
        (Layout(pp=2, virtual=3), "2 pipeline stages with 3 chunks each are too many for 4 layers"),
        (Layout(tp=2, draft_tp=3), "--draft-tp 3 is more than the 2 ranks of a pipeline stage: lower it"),
        (Layout(tp=2, dcp=2, draft_tp=2, draft_sharded=True), "not over those of --draft-tp: leave one of them out"),
        (Layout(pp=2, cp=2, draft_sharded=True), "--draft-sharded with --cp needs --pp 1"),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(layout: Layout, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        layout.check((TARGETS["tied"], TARGETS["untied"]))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--framework jax.distributed --pp 2", "choose --framework jax, which has all ranks in one process"),
        ("--framework jax.distributed --draft-tp 1", "choose --framework jax, which has all ranks in one process"),
        ("--virtual 2", "needs --pp above 1"),
        ("--pp 0", "--pp must be at least 1, not 0"),
        ("--draft-tp 0", "--draft-tp must be at least 1, not 0"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(args: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=says):
        parse("prefill", ["--dir", str(tmp_path), *args.split()])


def test_the_description_says_where_layers_draft_and_first_token_are(models: Folders) -> None:
    folders = models["tied"], models["draft"]
    configs = checkpoint.load_config(folders[0]), checkpoint.load_config(folders[1])
    stated = geometry(folders, configs, "bytes", Layout(tp=2, pp=2, virtual=2, draft_tp=1), PAGE)
    names = {group.id: group.name for group in stated.groups}
    first, second = {"target": [0, 2]}, {"target": [1, 3], "first token": [0]}
    assert [{names[share.group]: share.layers.tolist() for share in rank.owns} for rank in stated.ranks] == [
        first, first, {**second, "draft": [0, 1]}, second,
    ]  # fmt: skip
