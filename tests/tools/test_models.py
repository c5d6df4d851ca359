"""The comparison of `kvproto describe` with what transformers allocates, on a few types; `make models` has all."""

from importlib import import_module
from typing import Any

import attrs
import pytest
import torch

from kvproto_catalog.types import CLASSES, TYPES
from tools import adversary, classes, models


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


def test_the_table_of_classes_is_that_of_the_installed_transformers(transformers: Any) -> None:
    """`python -m tools.classes` writes it, and `make models` compares all of it."""
    transformers.logging.set_verbosity_error()
    rows = {kind: row for kind in sorted(TYPES) if (row := classes.row_of(kind)) is not None}
    assert {kind: attrs.evolve(row, derived=frozenset()) for kind, row in CLASSES.items()} == rows


@pytest.mark.parametrize("kind", ["gemma3n_text", "llama", "olmo_hybrid"])
def test_fields_that_a_class_derives_are_in_the_table(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = CLASSES[kind]
    monkeypatch.setitem(CLASSES, kind, attrs.evolve(row, derived=frozenset()))
    assert classes.derived_of(kind) == row.derived


@pytest.mark.parametrize("seed", range(2))
def test_hostile_files_of_every_type_are_refused_or_read_as_transformers_does(seed: int, transformers: Any) -> None:
    """A share of those of `make models`, compared with what transformers saves."""
    transformers.logging.set_verbosity_error()
    verdicts = [adversary.judged(kind, seed, allocate=False) for kind in adversary.KINDS]
    assert [verdict for verdict in verdicts if verdict.word == "DIFFERS"] == []
    assert sum(verdict.word == "equal" for verdict in verdicts) > len(verdicts) / 4


def test_a_field_of_another_class_that_is_used_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile files find a table that has a field too many."""
    row = CLASSES["gpt_neox"]
    monkeypatch.setitem(CLASSES, "gpt_neox", attrs.evolve(row, fields=row.fields | {"num_key_value_heads"}))
    words = {adversary.judged("gpt_neox", seed).word for seed in range(20)}
    assert "DIFFERS" in words
