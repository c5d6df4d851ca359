"""Facts that two engines state alike: a rotary embedding is the same in whichever form a config keeps it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproto_engines.facts import rope_of, weights_of


def config(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


PLAIN = config(rope_theta=10000, rope_scaling=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (PLAIN, config(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})),
        (
            PLAIN,
            config(rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 1.0}, partial_rotary_factor=None),
        ),
        (
            config(rope_theta=5e5, rope_scaling=YARN),
            config(rope_parameters=YARN | {"rope_theta": 500000, "truncate": True}),
        ),
        (config(rope_theta=1, rope_scaling={"type": "yarn"}), config(rope_theta=1, rope_scaling={"rope_type": "yarn"})),
    ],
)
def test_two_forms_are_one_embedding(one: Any, two: Any) -> None:
    assert rope_of(one) == rope_of(two)


@pytest.mark.parametrize(
    "other",
    [
        config(rope_theta=20000), config(rope_theta=10000, rope_scaling=YARN), config(rope_theta=10000, partial_rotary_factor=0.5),
        config(rope_parameters={"full_attention": {"rope_theta": 10000}, "sliding_attention": {"rope_theta": 1e6}}),
    ],
)  # fmt: skip
def test_another_embedding_is_told_apart(other: Any) -> None:
    assert rope_of(other) != rope_of(PLAIN)


def test_weights_are_a_digest_of_files_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = weights_of(str(tmp_path), None, [None])
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert first.startswith("sha256 ")
    assert first != weights_of(str(tmp_path), None, [None])
    assert weights_of("org/model", None, ["fp8", ""]) == "org/model@main fp8"
