"""`kvproto describe --engine`: the page that shows it, the vectors that hold it, and options that nobody has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvproto.wire import from_json
from kvproto.wire.messages import Columns
from kvproto_catalog.config import text
from kvproto_catalog.models import specs
from tests.commands import Ran
from tools.layout_vectors import APART, CASES, CONFIGS, case
from tools.specgen.registry import ROOT, SPEC

PAGE = (ROOT / "docs/layouts.md").read_text()
SHOWN = re.findall(r"^```text\n\$ kvproto (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
VECTORS = {
    engine: {row["id"]: row for row in json.loads((SPEC / f"vectors/layouts/{engine}.json").read_text())["cases"]}
    for engine in ("vllm", "sglang", "trtllm")
}
LLAMA = str(CONFIGS / "llama-3.1-8b.json")


@pytest.mark.parametrize(("command", "printed"), SHOWN)
def test_the_page_shows_what_the_command_prints(
    command: str, printed: str, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    monkeypatch.chdir(ROOT)
    assert ran(*command.split()) == printed


def test_the_page_shows_every_engine_and_its_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {command.split()[2] for command, _ in SHOWN} == {"vllm", "sglang", "trtllm"}
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "docs/layouts.md", "exec"), {})


def test_there_are_vectors_of_every_model_in_every_engine_that_runs_it() -> None:
    models = {path.stem for path in CONFIGS.glob("*.json") if not path.stem.startswith("draft-")} - set(APART)
    assert len(models) >= 25
    assert {name.partition(" ")[0].partition("+")[0] for rows in VECTORS.values() for name in rows} == models
    assert sum(map(len, VECTORS.values())) == len(CASES) >= 60


@pytest.mark.parametrize("row", CASES[::7], ids=lambda row: " ".join(row))
def test_vectors_are_what_is_described(row: tuple[str, str, str]) -> None:
    """Every seventh: `make check` compares all of them."""
    made = case(*row)
    assert made == VECTORS[row[0]][made["id"]]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_each_config_has_caches_of_the_layers_that_it_says(path: Path) -> None:
    config = text(json.loads(path.read_text()))
    layers = {layer for cache in specs(config) for layer in cache.layers}
    shared = config.get("num_kv_shared_layers", 0) + (config["num_hidden_layers"] // 2 if config.get("use_cla") else 0)
    without = config.get("hybrid_override_pattern", "").count("-")
    assert len(layers) == config["num_hidden_layers"] - shared - without


def test_layers_that_share_have_the_first_layers_ids() -> None:
    """Gemma 3n keeps the caches of its first 20 layers, a large Hunyuan those of every second."""
    found = {}
    for name in ("gemma-3n-e4b", "hunyuan-large"):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        found[name] = sorted(layer for cache in specs(config) for layer in cache.layers)
    assert found == {"gemma-3n-e4b": [*range(20)], "hunyuan-large": [*range(0, 64, 2)]}


def test_tensors_for_programs_are_a_register_s(ran: Ran) -> None:
    options = ["--engine", "vllm", "--tp", "2", "--blocks", "10", "--rank", "1", "--tensors", "--json"]
    made: dict[str, Any] = json.loads(ran("describe", LLAMA, *options))
    columns = from_json(Columns, made["columns"][0])
    tensor = made["tensors"][0]
    assert (tensor["axes"], tensor["shape"]) == (["layer", "block", "token", "head", "byte"], [32, 10, 16, 4, 512])
    assert (columns.items, columns.region.size, int(columns.item_stride[0])) == (10, 64, tensor["strides"][1])
    assert made["allocations"] == [{"name": "kv", "bytes": 32 * 10 * 16 * 4 * 512}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm", "--tensors", "--rank", "1"], "rank: wanted 0 to 0, found 1"),
        (["--engine", "vllm", "--tensors", "--blocks", "0"], "blocks: wanted at least 1, found 0"),
        (["--engine", "sglang", "--layout", "LBHNC"], "layout: wanted NHD, HND"),
        (["--engine", "vllm", "--kv-dtype", "nvfp9"], "kv_dtype: wanted auto, bfloat16"),
        (["--engine", "vllm", "--backend", "FLASHMLA"], "backend: wanted FLASH_ATTN"),
        (["--backend", "FLASH_ATTN"], "backend: wanted --engine beside it"),
        (["--tensors"], "tensors: wanted --engine beside it"),
        (["--tp", "1000000000"], "tp: wanted at most 4096 ranks in all"),
        (["--engine", "vllm", "--page", "0"], "page: wanted 1 or more"),
        (["--dp", "8"], "dp: wanted --engine beside it"),
        (["--engine", "vllm", "--sharded", "target"], "sharded: wanted no --sharded beside --engine"),
        (["--kv-dtype", "fp8"], "kv_dtype: wanted BF16, F16, F32"),
        (["--page", "0"], "page: wanted 1 or more, found 0"),
        (
            ["--engine", "vllm", "--state-dtype", "F32"],
            "state_dtype: wanted a model with recurrent states beside it, found F32",
        ),
    ],
)
def test_options_that_nobody_has(options: list[str], said: str, ran: Ran) -> None:
    assert said in ran("describe", LLAMA, *options, status=1)


def test_layers_that_engines_may_store_twice_are_refused(ran: Ran) -> None:
    assert "config.use_cla" in ran("describe", CONFIGS / "hunyuan-large.json", "--engine", "vllm", status=1)
