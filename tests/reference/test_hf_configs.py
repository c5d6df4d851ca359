"""A config.json as it was published and as transformers saves it again: two forms of one model, with the same caches."""

import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvproto.catalog.models import describe
from tools.specgen.registry import ROOT

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "examples/configs").glob("*.json"))}
OWN_CODE = {"hunyuan", "kimi_k2", "mimo", "minimax_text_01", "step3_vl"}
"""Model types of which transformers has no class."""


@pytest.mark.parametrize("name", [name for name, config in FILES.items() if config["model_type"] not in OWN_CODE])
def test_what_transformers_saves_is_described_alike(name: str) -> None:
    published = FILES[name]
    saved = CONFIG_MAPPING[published["model_type"]].from_dict(dict(published)).to_json_string(use_diff=False)
    assert describe(json.loads(saved)) == describe(published)
