"""vLLM's classes of cache specifications, by their names: `tools/engines/vllm_specs.py` counts those that releases have."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvproto import LocalError
from kvproto_vllm.specs import REFUSED, RING, STATED, check_spec, heads_of, key_of, packed, specs_of


def spec(kind: str, **fields: Any) -> Any:
    made = type(kind, (), {})()
    made.__dict__ |= fields
    return made


def model(**fields: Any) -> Any:
    """A model of vLLM's, with these fields in its config."""
    config = SimpleNamespace(to_dict=lambda: fields)
    return SimpleNamespace(hf_text_config=config, get_total_num_kv_heads=lambda: fields["num_key_value_heads"])


@pytest.mark.parametrize("kind", STATED)
def test_what_is_stated_may_be_plain(kind: str) -> None:
    plain = spec(kind, tokens_per_state=-1 if kind == "MambaSpec" else 1, model_version=None)
    check_spec("layer", plain, "KPOOL_TAIL" if kind == RING else None)


def test_a_ring_is_stated_of_a_back_end_that_is_known() -> None:
    with pytest.raises(LocalError, match=f"a back end that is known, got {RING}"):
        check_spec("layer", spec(RING))


@pytest.mark.parametrize(
    ("kind", "mine", "ranks", "heads"),
    [
        ("FullAttentionSpec", 8, 1, 8),
        ("SlidingWindowSpec", 2, 4, 8),
        ("FullAttentionSpec", 1, 1, 1),
        ("FullAttentionSpec", 1, 8, 4),  # two ranks have the same head
        ("MLAAttentionSpec", 1, 8, 1),
        (RING, 2, 8, 1),
    ],
)
def test_heads_of_all_ranks_follow_from_those_of_a_rank(kind: str, mine: int, ranks: int, heads: int) -> None:
    assert heads_of(model(num_key_value_heads=4), "layer", spec(kind, num_kv_heads=mine), ranks) == heads


@pytest.mark.parametrize("fields", [{"swa_num_key_value_heads": 8}, {"num_global_key_value_heads": 2}])
def test_a_head_on_each_of_several_ranks_is_refused_where_layers_differ(fields: dict[str, int]) -> None:
    mixed = model(num_key_value_heads=4, **fields)
    assert heads_of(mixed, "layer", spec("SlidingWindowSpec", num_kv_heads=2), 4) == 8
    with pytest.raises(LocalError, match="on each of 8 ranks"):
        heads_of(mixed, "layer", spec("SlidingWindowSpec", num_kv_heads=1), 8)


@pytest.mark.parametrize(("kind", "holds"), [*REFUSED.items(), ("NewSpec", "not known")])
def test_other_classes_are_refused_with_what_they_hold(kind: str, holds: str) -> None:
    with pytest.raises(LocalError, match=f"{kind}: {holds}"):
        check_spec("layer", spec(kind))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("MLAAttentionSpec", "tokens_per_state", 4),  # an index over pooled keys, a latent of several tokens
        ("FullAttentionSpec", "tokens_per_state", 8),
        ("SlidingWindowMLASpec", "model_version", "deepseek_v4"),
    ],
)
def test_a_class_that_holds_something_else_is_refused_by_field(kind: str, field: str, value: Any) -> None:
    with pytest.raises(LocalError, match=rf"layer {field}.*{value} in {kind}"):
        check_spec("layer", spec(kind, **{field: value}))


@dataclass(frozen=True)
class _Led:
    block_size: int
    is_index_group_leader: bool


def test_layers_with_and_without_an_index_of_their_own_are_one_kind() -> None:
    assert key_of(_Led(64, True)) == key_of(_Led(64, False)) != key_of(_Led(32, True))


def test_layers_of_a_group_have_a_specification_each() -> None:
    one, two = spec("MLAAttentionSpec"), spec("SlidingWindowMLASpec")
    several = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"b": two, "a": one})
    assert specs_of(SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=several)) == {"a": one, "b": two}
    assert specs_of(SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=one)) == {"a": one, "b": one}


def test_rows_hold_their_scales_by_the_type_of_the_cache() -> None:
    assert packed(spec("MLAAttentionSpec", cache_dtype_str="fp8_ds_mla"))
    assert not packed(spec("MLAAttentionSpec", cache_dtype_str="fp8"))
    assert not packed(spec("FullAttentionSpec"))
