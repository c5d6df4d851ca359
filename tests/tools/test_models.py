"""The comparison of `kvproto describe` with what transformers allocates, on a few types; `make models` has all."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tools import models


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, which only the worker of these tests imports."""
    return import_module("transformers")


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "bert", "granitemoehybrid"])
def test_types_of_every_kind_are_described_as_they_are(name: str) -> None:
    assert models.judged(("type", name)) == models.Verdict(name, "equal")


def test_another_number_of_heads_is_noticed(transformers: Any) -> None:
    config = transformers.CONFIG_MAPPING["llama"](num_hidden_layers=2, num_key_value_heads=4)
    wrong = models.stated({**config.to_dict(), "num_key_value_heads": 8})
    found = models.compared("llama", wrong, models.allocated(config))
    assert (found.word, found.why[:8]) == ("DIFFERS", "layer 0:")


def test_a_state_that_describe_leaves_out_is_noticed(transformers: Any) -> None:
    theirs = models.allocated(transformers.CONFIG_MAPPING["granitemoehybrid"](**models.WITH["granitemoehybrid"]))
    mine = {layer: parts for layer, parts in theirs.items() if "state" not in parts}
    assert models.compared("granite", mine, theirs).word == "DIFFERS"


def test_a_tensor_that_is_not_known_is_no_cache_to_compare(transformers: Any) -> None:
    layer = transformers.cache_utils.DynamicLayer()
    layer.update(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))
    layer.new = torch.zeros(3)
    with pytest.raises(ValueError, match="new is not known here"):
        models.of_layer(layer)


def test_what_is_refused_needs_no_model() -> None:
    found = models.judged(("type", "recurrent_gemma"))
    assert (found.word, "block_types" in found.why) == ("refused", True)
