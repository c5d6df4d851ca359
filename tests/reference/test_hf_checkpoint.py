"""Hugging Face folders as they come: shards, leftover tensors, what is refused, names and ends of a text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvproto_reference import checkpoint
from kvproto_reference.errors import EngineError
from kvproto_reference.models import ExpertParallel, ModelConfig, TensorParallel
from kvproto_reference.models.hf import eos_ids, translate
from kvproto_reference.weights import weight_files
from tests.reference.hf_tiny import write


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write("llama", tmp_path)
    return tmp_path


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    write("deepseek-v3", tmp_path)
    return tmp_path


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def change(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**config(folder), **values}))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    """A further shard."""
    save_file(tensors, folder / "a.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_one_file(folder: Path) -> None:
    files = weight_files(folder)
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for path in [*files, folder / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_one_file_or_shards(llama: Path) -> None:
    assert len(weight_files(llama)) > 2
    shards = checkpoint.load(llama).state_dict()
    in_one_file(llama)
    one = checkpoint.load(llama).state_dict()
    assert all(torch.equal(shards[name], one[name]) for name in shards)


def test_older_names_of_config_keys_say_the_same(deepseek: Path) -> None:
    new = config(deepseek)
    old = {**new, "rope_scaling": {**new["rope_parameters"], "type": "yarn"}, "torch_dtype": "bfloat16"}
    old["rope_theta"] = old["rope_scaling"].pop("rope_theta")
    for key in ("rope_parameters", "dtype"):
        del old[key]
    del old["rope_scaling"]["rope_type"]
    assert translate(old, "float32") == translate(new, "float32")
    assert (translate(old, "auto").dtype, translate(new, "auto").dtype) == ("bfloat16", "float32")


def test_ranks_that_share_experts_read_their_own(deepseek: Path) -> None:
    whole = checkpoint.load(deepseek).blocks[1].state_dict()
    parts = [
        checkpoint.load(deepseek, TensorParallel(experts=ExpertParallel(r, 3))).blocks[1].state_dict() for r in range(3)
    ]
    names = [name for name in whole if ".experts." in name]
    assert names
    assert all(torch.equal(torch.cat([part[name] for part in parts]), whole[name]) for name in names)


def test_layers_that_predict_further_tokens_are_left_out(deepseek: Path) -> None:
    before = checkpoint.load(deepseek).state_dict()
    add(deepseek, **{"model.layers.3.eh_proj.weight": torch.ones(2, 2)})
    assert checkpoint.load(deepseek).state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss', supported: 'llama', 'qwen2'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is 'sliding_attention'"),
        ({"attention_sinks": True}, "attention_sinks is True"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope', supported: 'default'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn rope factor is None, a number is needed"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "yarn rope truncate is False"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, r"mscale_all_dim is \(0.7, 0\)"),
        ({"rope_parameters": {"full_attention": {}}}, "rope full_attention is {}"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling is {'rope_type': 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens"),
        ({"num_hidden_layers": 2}, r"no use is known for model\.layers\.2"),
        ({"num_hidden_layers": 4}, r"do not fit config\.json: no tensor model\.layers\.3"),
        ({"intermediate_size": 41}, r"do not fit config\.json: model\.layers\.0\.mlp\.gate_proj\.weight is \[40, 48\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_engine_has_not_is_refused(llama: Path, values: dict[str, Any], says: str) -> None:
    change(llama, **values)
    with pytest.raises(EngineError, match=says):
        checkpoint.load(llama)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', supported: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_group": 3}, "3 of 8 experts cannot be taken from 2 of 3 groups"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_deepseek_models_may_not_say(deepseek: Path, values: dict[str, Any], says: str) -> None:
    change(deepseek, **values)
    with pytest.raises(EngineError, match=says):
        checkpoint.load(deepseek)


def test_tied_output_that_is_stored_too(tmp_path: Path) -> None:
    write("llama-tied", tmp_path)
    embed = checkpoint.load(tmp_path).embed
    add(tmp_path, **{"lm_head.weight": embed.clone()})
    assert checkpoint.load(tmp_path).head is None
    add(tmp_path, **{"lm_head.weight": embed + 1})
    with pytest.raises(EngineError, match=r"lm_head\.weight is not model\.embed_tokens"):
        checkpoint.load(tmp_path)


def test_windows_that_are_off_are_no_matter(tmp_path: Path) -> None:
    write("qwen2", tmp_path)
    change(tmp_path, use_sliding_window=False, sliding_window=8, layer_types=None)
    assert checkpoint.load(tmp_path)
    change(tmp_path, use_sliding_window=True)
    with pytest.raises(EngineError, match="sliding_window is 8"):
        checkpoint.load(tmp_path)


def test_integer_weights_are_refused(llama: Path) -> None:
    add(llama, **{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(EngineError, match=r"model\.norm\.weight is torch\.int8"):
        checkpoint.load(llama)


def test_missing_and_broken_shards_are_named(llama: Path) -> None:
    shard = weight_files(llama)[1]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(EngineError, match=f"{shard} cannot be read"):
        checkpoint.load(llama)
    shard.unlink()
    with pytest.raises(EngineError, match=f"has no {shard.name}"):
        checkpoint.load(llama)
    (llama / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(EngineError, match=r"index\.json cannot be read"):
        checkpoint.load(llama)


def test_our_own_format_holds_every_family(deepseek: Path, tmp_path: Path) -> None:
    model = checkpoint.load(deepseek)
    checkpoint.save(tmp_path / "ours", model)
    again = checkpoint.load(tmp_path / "ours")
    assert again.config == model.config == ModelConfig.from_json(model.config.to_json())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_fingerprint_tells_config_and_weights(llama: Path) -> None:
    first = checkpoint.fingerprint(llama)
    os.utime(weight_files(llama)[0])
    assert checkpoint.fingerprint(llama) == first
    path = weight_files(llama)[-1]
    tensors = load_file(path)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    tuned = checkpoint.fingerprint(llama)
    change(llama, rms_norm_eps=1e-3)
    assert len({first, tuned, checkpoint.fingerprint(llama)}) == 3


@pytest.mark.parametrize(
    ("said", "generation", "ends"),
    [
        ({"eos_token_id": 5}, {}, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, {6, 7}),
        ({"eos_token_id": 0}, {"eos_token_id": None}, {0}),
        ({"eos_token_id": None}, {"bos_token_id": 1}, set()),
    ],
)
def test_tokens_that_end_a_text(said: dict[str, Any], generation: dict[str, Any], ends: set[int]) -> None:
    assert eos_ids(said, generation) == ends
