"""Attention of DCP groups in JAX against float64 attention over all tokens; every row that a rank has not is NaN."""

import numpy as np
import pytest

pytest.importorskip("jax", exc_type=ImportError)
import jax

from kvproto_conformance import cases
from kvproto_reference.errors import EngineError
from kvproto_reference.jax_engine import attention
from kvproto_reference.jax_engine.attention import Attention, Partial
from kvproto_reference.jax_engine.mesh import RANKS, host_devices, mesh_of
from kvproto_reference.jax_engine.programs import compiled, quick
from tests.reference.jax_case import DEALS, Case, variant, worst

host_devices(8)


@pytest.mark.parametrize(("kind", "ranks"), [*(("gqa", n) for n in (1, 2, 3, 4, 6, 8)), ("mla", 3), ("mla", 8)])
def test_ranks_attend_to_all_tokens(kind: str, ranks: int) -> None:
    case = Case.draw(kind)
    exchanges = [variant(case, ranks, exchange=exchange) for exchange in ("ag_rs", "a2a")]
    assert max(worst(case, ranks, DEALS, *exchanges)) < 1e-5


@pytest.mark.parametrize(("kind", "ranks"), [("gqa", 3), ("mla", 8)])
def test_queries_that_every_rank_projects(kind: str, ranks: int) -> None:
    case = Case.draw(kind, 1)
    assert max(worst(case, ranks, DEALS[1:3], variant(case, ranks, replicated=True))) < 1e-5


@pytest.mark.parametrize(("kind", "ranks"), [("gqa", 6), ("mla", 1)])
def test_each_token_by_bounds_of_its_own(kind: str, ranks: int) -> None:
    case = Case.draw(kind, 2)
    assert max(worst(case, ranks, DEALS, variant(case, ranks, by_token=True))) < 1e-5


def test_a_log_sum_exp_of_base_2_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case, wrong = Case.draw("gqa"), []
    for name in ("ag_rs", "a2a"):
        right = attention.EXCHANGES[name]
        base2 = lambda part, ranks, right=right: right(Partial(part.out, part.lse / np.log(2)), ranks)  # noqa: E731
        monkeypatch.setitem(attention.EXCHANGES, f"{name} of base 2", base2)
        wrong.append(variant(case, 2, exchange=f"{name} of base 2"))
    assert min(worst(case, 2, DEALS[:1], *wrong)) > 1e-2


def test_nothing_and_nothing_is_nothing() -> None:
    none = Partial(np.zeros((2, 1, 1, 3, 4), np.float32), np.full((2, 1, 1, 3), -np.inf, np.float32))
    out, lse = jax.jit(attention.merge, compiler_options=quick())(none)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


def test_what_a_kernel_leaves_where_it_read_nothing_does_not_spread() -> None:
    """The first token is on rank 0 alone, the second on neither."""
    lse = np.full((2, 1, 2, 4), -np.inf, np.float32)
    lse[0, :, 0], out = 3, np.ones((2, 1, 2, 4, 3), np.float32)

    def run(part: Partial) -> list[Partial]:
        mine, whole = Partial(part.out[0], part.lse[0]), Partial(*(attention.lax.all_gather(x[0], "dcp") for x in part))
        found = [exchange(mine, 2) for exchange in attention.EXCHANGES.values()] + [attention.merge(whole)]
        return [Partial(*(x[None] for x in each)) for each in found]

    merged = compiled(mesh_of(2, 2), run, (RANKS,), RANKS)
    for left in (np.nan, np.inf, 7.0):
        out[1], out[0, :, 1] = left, left
        for found in merged(Partial(out, lse)):
            np.testing.assert_array_equal(found.lse, np.broadcast_to(lse[:1, :, :, :1], found.lse.shape))
            np.testing.assert_array_equal(found.out[:, :, 0], 1)
            np.testing.assert_array_equal(found.out[:, :, 1], 0)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(EngineError, match=r"one of \['a2a', 'ag_rs'\], not 'ring'"):
        Attention(1.0, 8, 2, "ring")


@pytest.mark.parametrize("case", [case for case in cases.load() if case.suite == "merge"], ids=lambda case: case.id)
def test_the_merge_of_the_conformance_cases(case: cases.Case) -> None:
    """Of natural log-sum-exps, -inf where no token was read; outputs are as a kernel left them."""
    [ask] = case.asks
    parts = ask.question["parts"]
    lse, out = (np.array([part[name] for part in parts], np.float32) for name in ("lse", "out"))
    bases = np.array([[np.log(2) if part["base"] == "2" else 1] for part in parts], np.float32)
    some = (np.array([part["tokens"] for part in parts], np.int64) > 0) & ~np.isneginf(lse)
    found = jax.jit(attention.merge, compiler_options=quick())(Partial(out, np.where(some, lse * bases, -np.inf)))
    for name, array in found._asdict().items():
        np.testing.assert_allclose(array, np.array(ask.expected[name], np.float32), ask.tolerance, ask.tolerance)
