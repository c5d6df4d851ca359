"""Caches as they are described from a config.json, and as transformers saves that file and allocates them."""

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import attrs
import pytest
import torch

from kvproto import DType
from kvproto.planning.geometry import Geometry
from kvproto_catalog.models import describe
from tools.specgen.registry import ROOT

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "examples/configs").glob("*.json"))}
OWN_CODE = {"hunyuan", "kimi_k2", "mimo", "minimax_m3", "minimax_text_01", "step3_vl"}
"""Model types of which transformers has no class."""
TYPES = ("dory", "falcon", "falcon_h1", "gpt_oss", "hrm_text", "kimi_linear", "lfm2", "qwen3_next")
"""Model types whose default config says in ways of its own which layer has which cache, and how large."""
SIZES = {"k": ("keys", 1), "v": ("values", 1), "conv": ("conv_states", 1), "ssm": ("recurrent_states", 1)}
"""By part: the tensor of a layer that it is, and the axis of its lanes."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, which only the worker of these tests imports."""
    return import_module("transformers")


def saved(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("name", [name for name, config in FILES.items() if config["model_type"] not in OWN_CODE])
def test_what_transformers_saves_is_described_alike(name: str, transformers: Any) -> None:
    """But for rotary embeddings of which a file says nothing, and the class has its default."""
    published = FILES[name]
    config = transformers.CONFIG_MAPPING[published["model_type"]].from_dict(dict(published))
    ours, theirs = describe(published), describe(saved(config))
    said = {fact.name for fact in ours.facts}
    facts = tuple(fact for fact in theirs.facts if fact.name in said or fact.name != "rope.target")
    assert attrs.evolve(theirs, facts=facts) == ours


@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_described_is_what_transformers_allocates(model_type: str, transformers: Any) -> None:
    """Of each layer, which caches it has, their lanes and the size of a lane."""
    config = transformers.CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tokens = torch.zeros(1, 5, dtype=torch.long)
    layers = model(input_ids=tokens, use_cache=True).past_key_values.layers
    found = {(i, part): size for i, layer in enumerate(layers) for part, size in allocated(layer)}
    assert found
    assert dict(stated(describe(saved(config)), getattr(config, "kv_lora_rank", 0))) == found


def allocated(layer: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """Lanes and elements of a lane of what transformers has for a layer."""
    for part, (name, axis) in SIZES.items():
        tensor = getattr(layer, name, None)
        if isinstance(tensor, dict):
            tensor = next(iter(tensor.values()), None)
        if tensor is not None:
            lane = 1 if part == "conv" else tensor.shape[2:].numel() if part == "ssm" else tensor.shape[3]
            yield part, (tensor.shape[axis], lane)


def stated(geometry: Geometry, latent: int) -> Iterator[tuple[tuple[int, str], tuple[int, int]]]:
    """The same of a Description, by layer and part; transformers has a latent as keys, and its rotary key as values."""
    groups = {group.id: group for group in geometry.groups}
    for share in geometry.ranks[0].owns:
        for part in groups[share.group].parts:
            size = part.lane_bytes // (4 if part.dtype == DType.F32 else 2)
            halves = {"k": latent, "v": size - latent} if part.name == "latent" else {part.name: size}
            yield from (
                ((layer, name), (part.lanes, n)) for layer in share.layers.tolist() for name, n in halves.items()
            )
