"""Attention of DCP groups in JAX on GPUs, float32 at precision 'highest', against float64 attention over all tokens."""

from collections.abc import Callable

import pytest

pytest.importorskip("jax", exc_type=ImportError)
from kvproto_reference.jax_engine.attention import EXCHANGES
from tests.reference.jax_case import DEALS, Case, variant, worst

Record = Callable[[str, object], None]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_ranks_attend_to_all_tokens(kind: str, jax_gpus: range, record_property: Record) -> None:
    case, ranks = Case.draw(kind), len(jax_gpus)
    exchanges = [variant(case, ranks, exchange=exchange) for exchange in EXCHANGES]
    errors = worst(case, ranks, DEALS, *exchanges, on=jax_gpus)
    for exchange, error in zip(EXCHANGES, errors, strict=True):
        record_property(f"largest error, {exchange}", float(error))
    assert max(errors) < 1e-5


def test_each_token_by_bounds_of_its_own(jax_gpus: range, record_property: Record) -> None:
    case, ranks = Case.draw("gqa", 2), len(jax_gpus)
    (error,) = worst(case, ranks, DEALS, variant(case, ranks, by_token=True), on=jax_gpus)
    record_property("largest error", float(error))
    assert error < 1e-5
