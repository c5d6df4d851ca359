"""The comparison of `kvproto describe` with what transformers allocates, on a few types; `make models` has all."""

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.cache_utils import DynamicLayer

from tools import models


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "bert", "granitemoehybrid"])
def test_types_of_every_kind_are_described_as_they_are(name: str) -> None:
    assert models.judged(("type", name)) == models.Verdict(name, "equal")


def test_another_number_of_heads_is_noticed() -> None:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=2, num_key_value_heads=4)
    wrong = models.stated({**config.to_dict(), "num_key_value_heads": 8})
    found = models.compared("llama", wrong, models.allocated(config))
    assert (found.word, found.why[:8]) == ("DIFFERS", "layer 0:")


def test_a_state_that_describe_leaves_out_is_noticed() -> None:
    theirs = models.allocated(CONFIG_MAPPING["granitemoehybrid"](**models.WITH["granitemoehybrid"]))
    mine = {layer: parts for layer, parts in theirs.items() if "state" not in parts}
    assert models.compared("granite", mine, theirs).word == "DIFFERS"


def test_a_tensor_that_is_not_known_is_no_cache_to_compare() -> None:
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))
    layer.new = torch.zeros(3)
    with pytest.raises(ValueError, match="new is not known here"):
        models.of_layer(layer)


def test_what_is_refused_needs_no_model() -> None:
    found = models.judged(("type", "recurrent_gemma"))
    assert (found.word, "block_types" in found.why) == ("refused", True)
