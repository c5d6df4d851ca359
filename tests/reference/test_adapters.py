"""LoRA adapters in the reference engine: tokens of weights with an adapter in them, and pages that none shares."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvproto import LocalError, adapter_digest
from kvproto_reference import checkpoint
from kvproto_reference.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapters,
    adapters_of,
    changeable,
    chosen,
    draw_adapter,
    load_adapters,
)
from kvproto_reference.cache import PageAllocator
from kvproto_reference.engine.build import Hosted
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.tiered_engine import TieredEngine
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.models import SOLO
from kvproto_reference.models.hf import source
from tests.reference.adapters import two
from tests.reference.test_reference_prefix import shards

TARGETS = {kind: checkpoint.CHECKPOINTS / f"target-{kind}" for kind in ("mla", "gqa", "moe", "hybrid")}
DRAFT = checkpoint.CHECKPOINTS / "draft-gqa"
PROMPT = [
    *b"The Cheshire Cat said: the cache that you lost is not mine, and what I have is of another, so that you may as"
]
NEW = 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def merged(target: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint of the target whose weights have the adapter in them."""
    config, weights, halves = (
        checkpoint.load_config(target),
        checkpoint.state(target),
        load_file(adapter / WEIGHTS_FILE),
    )
    for name in changeable(config):
        module = "base_model.model." + source(name, config).removesuffix(".weight")
        down, up = (halves[f"{module}.lora_{half}.weight"] for half in "AB")
        weights[name] = weights[name] + 2.0 * up @ down
    folder.mkdir()
    (folder / checkpoint.CONFIG_FILE).write_text(config.to_json())
    save_file(weights, folder / checkpoint.WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("kind", TARGETS)
def test_tokens_are_those_of_weights_that_have_the_adapter_in_them(kind: str, tmp_path: Path) -> None:
    """A batch of requests with one adapter, another and none: each as by an engine of its own."""
    target = TARGETS[kind]
    adapters = two(tmp_path, target)
    asked = [(PROMPT, SamplingParams(ignore_eos=True))] * 3
    names = ["red", "", "blue"]
    found = Undivided(target, adapters=adapters).generate_all(asked, NEW, adapters=names)
    for name, result in zip(names, found, strict=True):
        folder = merged(target, adapters[name].folder, tmp_path / f"{name} merged") if name else target
        assert result.tokens == Undivided(folder).generate_all(asked[:1], NEW)[0].tokens
    assert len({tuple(result.tokens) for result in found}) == 3


def test_pages_of_an_adapter_are_found_by_its_requests_alone(tmp_path: Path) -> None:
    """On the device, on the host and in storage; a tenant's by the tenant's."""
    target = TARGETS["mla"]
    adapters = two(tmp_path / "adapters", target)
    right = Undivided(target, DRAFT, adapters=adapters)
    ways = [("", ""), ("red", ""), ("blue", ""), ("", "tenant"), ("red", "tenant")]
    held = len(PROMPT) - len(PROMPT) % 16
    for pages in (64, 10):  # of which all fit into the pool, or one request and what is moved to the host and storage
        engine = TieredEngine(
            target, DRAFT, pages=pages, host=12, storage=tmp_path / f"{pages} pages", adapters=adapters
        )
        try:
            for found in (0, held):
                for adapter, tenant in ways:
                    answer = engine.answer(PROMPT, NEW, adapter, tenant)
                    engine.drain()
                    assert answer.device + answer.host + answer.storage == found, (adapter, tenant)
                    assert answer.tokens == right.generate(PROMPT, max_new=NEW, adapter=adapter).tokens
        finally:
            engine.close()


def test_an_engine_that_torch_does_not_compute_has_no_adapters(tmp_path: Path) -> None:
    def hosted(*given: object) -> Hosted:
        raise AssertionError

    with pytest.raises(EngineError, match="adapters are torch's"):
        TieredEngine(TARGETS["mla"], DRAFT, pages=4, host=4, hosted=hosted, adapters=two(tmp_path, TARGETS["mla"]))


def test_prefixes_of_an_adapter_are_found_by_its_requests_alone(tmp_path: Path) -> None:
    adapters = two(tmp_path, TARGETS["mla"])
    cache = PrefixCache([PageAllocator(n, 1) for n in (40, 40)], shards(1, 1, 4))
    ways = [(adapter, tenant) for adapter in (None, *adapters.values()) for tenant in ("", "one", "other")]
    for found in (0, 8):
        for adapter, tenant in ways:
            sequence = TokenSequence(prompt=[*range(9)], max_new=1, adapter=adapter, cache_salt=tenant)
            assert cache.allocate(sequence, (3, 3)) == found
            cache.free(sequence, 9)


def test_an_adapter_is_known_by_its_weights_and_settings(tmp_path: Path) -> None:
    """The name of a folder is not part of it."""
    target = TARGETS["gqa"]
    first, same, other = (draw_adapter(tmp_path / name, target, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert adapter_digest(first) == adapter_digest(same) != adapter_digest(other)
    said = json.loads((same / CONFIG_FILE).read_text())
    (same / CONFIG_FILE).write_text(json.dumps({**said, "lora_alpha": 9}))
    assert adapter_digest(first) != adapter_digest(same)


def reconfigured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(said | changes))

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        save_file({name.replace(old, new): each for name, each in tensors.items()}, folder / WEIGHTS_FILE)

    return change


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "of another kind": (reconfigured(peft_type="IA3"), "peft_type 'IA3', not 'LORA'"),
    "that changes magnitudes too": (reconfigured(use_dora=True), "use_dora True"),
    "of other ranks by layer": (reconfigured(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "without a rank": (reconfigured(r=None), "r None"),
    "of another rank than it says": (reconfigured(r=5), "[4, 64], not [5, 64]"),
    "of other projections": (renamed("k_proj", "o_proj"), "o_proj.lora_A.weight is no change of q, k, v"),
    "of more layers": (renamed("layers.3", "layers.4"), "layers.4"),
    "with one half of a change": (renamed("2.self_attn.q_proj.lora_A", "9.self_attn.q_proj.lora_A"), "no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    change, says = REFUSED[name]
    folder = draw_adapter(tmp_path / "adapter", TARGETS["gqa"], 1)
    change(folder)
    with pytest.raises(EngineError) as told:
        load_adapters(adapters_of({"one": folder}), checkpoint.load_config(TARGETS["gqa"]), SOLO)
    assert says in str(told.value)


def test_an_adapter_of_another_target_is_refused(tmp_path: Path) -> None:
    adapters = two(tmp_path, TARGETS["mla"])
    with pytest.raises(EngineError, match="do not fit"):
        load_adapters(adapters, checkpoint.load_config(TARGETS["gqa"]), SOLO)


@pytest.mark.parametrize(("adapters", "has"), [({}, "no adapter"), ({"red": None}, "the adapters red")])
def test_an_unknown_adapter_is_refused_by_code(adapters: Adapters, has: str) -> None:
    with pytest.raises(LocalError) as told:
        chosen(adapters, "green")
    assert told.value.code.name == "CONTENT_MISMATCH"
    assert has in str(told.value)
    assert "--adapter green=DIR" in str(told.value)


def test_a_folder_without_an_adapter_is_refused_by_code(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=CONFIG_FILE) as told:
        adapters_of({"red": tmp_path})
    assert told.value.code.name == "OUT_OF_RANGE"
