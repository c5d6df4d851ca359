"""A config.json whose fields are of other types than their names say, and options of engines that are none."""

from typing import Any

import pytest

from kvproto.errors import LocalError
from kvproto_catalog.config import draft_of
from kvproto_catalog.engines import pools
from kvproto_catalog.models import Setup, describe, specs
from tests.errors import raises

HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
ODD: list[tuple[str, Any, str]] = [
    ("sliding_window", [1], "a whole number"),
    ("sliding_window", "32", "a whole number"),
    ("sliding_window", True, "a whole number"),
    ("sliding_window", float("nan"), "a whole number"),
    ("sliding_window", -4, "a whole number"),
    ("attention_chunk_size", 8.0, "a whole number"),
    ("kv_lora_rank", "", "a whole number"),
    ("num_hidden_layers", "32", "a whole number"),
    ("num_hidden_layers", True, "a whole number"),
    ("num_key_value_heads", -8, "a whole number"),
    ("head_dim", 1 << 40, "a whole number"),
    ("num_nextn_predict_layers", "1", "a whole number"),
    ("use_sliding_window", "no", "true or false"),
    ("use_cla", 1, "true or false"),
    ("torch_dtype", 0, "a name"),
    ("model_type", 7, "a name"),
    ("attn_type_list", [2, 1], "a list of 0 and 1"),
    ("no_rope_layers", ["a", 0], "a list of 0 and 1"),
    ("attn_layer_indices", [True], "a list of layers"),
    ("layer_types", "attention", "a list of names"),
    ("layer_types", [1, 2], "a list of names"),
    ("sliding_window_pattern", [2], "a whole number, or letters"),
    ("hybrid_override_pattern", 7, "letters"),
    ("text_config", [1], "an object"),
    ("text_config", "", "an object"),
    ("linear_attn_config", 3, "an object"),
    ("quantization_config", "fp8", "an object"),
]


@pytest.mark.parametrize(("field", "value", "says"), ODD)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: Any, says: str) -> None:
    """It says what is not there as well: taken in silence it would change which layers have a window, say."""
    config = {**HEADS, field: value}
    for make in (describe, specs, lambda c: pools("vllm", c), lambda c: describe({"text_config": c}), lambda c: describe(HEADS, [c])):  # fmt: skip
        with raises(LocalError, path=f"config.{field}") as caught:
            make(config)
        assert caught.value.mine.startswith(says)
        assert caught.value.yours == repr(value) or field == "num_hidden_layers"
    with pytest.raises(LocalError):
        draft_of({**config, "num_nextn_predict_layers": config.get("num_nextn_predict_layers", "1")})


@pytest.mark.parametrize("more", [{"is_encoder_decoder": True, "num_hidden_layers": 32}, {"decoder_layers": 32}])
def test_an_encoder_decoder_is_refused_by_name(more: dict[str, Any]) -> None:
    with raises(LocalError, match=r"encoder-decoders are not read.*got whisper", path="config.is_encoder_decoder"):
        describe({"model_type": "whisper", "d_model": 1280, "decoder_attention_heads": 20, **more})


def test_a_list_of_layers_names_those_of_the_model() -> None:
    with raises(LocalError, path="config.linear_attn_config.kda_layers"):
        describe({**HEADS, "linear_attn_config": {"kda_layers": ["x"]}})


@pytest.mark.parametrize("nothing", [None, 0])
def test_null_and_0_say_that_there_is_none(nothing: int | None) -> None:
    odd = dict.fromkeys(("sliding_window", "attention_chunk_size", "kv_lora_rank", "num_kv_shared_layers"), nothing)
    assert describe({**HEADS, **odd}) == describe(HEADS)


SETUPS: list[tuple[str, Any]] = [
    ("page", "16"), ("page", True), ("page", 0), ("kv_dtype", ["auto"]), ("dp", "2"), ("dp", -1), ("backend", ["x"]),
    ("layout", 3), ("state_layout", "XX"), ("state_layout", "DS"), ("state_dtype", "F32"), ("parallel", 3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), SETUPS)
def test_what_no_engine_is_started_with(field: str, value: Any) -> None:
    with raises(LocalError, path=field) as caught:
        pools("sglang", HEADS, (), Setup(**{field: value}))
    assert caught.value.mine


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((["vllm"], HEADS), "engine"),
        (("vllm", [1]), "config"),
        (("vllm", HEADS, [3]), "config"),
        (("vllm", HEADS, (), 7), "setup"),
    ],
)
def test_what_is_no_engine_config_or_setup(args: Any, path: str) -> None:
    with raises(LocalError, path=path):
        pools(*args)


def test_describe_refuses_what_is_no_page_or_element_type() -> None:
    for path, value in (("page", "16"), ("page", 0), ("kv_dtype", ["NVFP4"]), ("kv_dtype", 3)):
        with raises(LocalError, path=path):
            describe(HEADS, **{path: value})
