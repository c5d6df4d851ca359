"""The JAX engine over tiers: what it writes after evictions is what the torch engine writes that never evicts."""

from pathlib import Path

import pytest

pytest.importorskip("jax", exc_type=ImportError)

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.planning.plan import Route
from kvproto.tiers import host_copies
from kvproto_reference import checkpoint
from kvproto_reference.demo import tiers
from kvproto_reference.engine.description import Layout
from kvproto_reference.engine.tiered_engine import TieredEngine
from kvproto_reference.jax_engine.build import jax_hosted
from kvproto_reference.jax_engine.mesh import host_devices

host_devices(8)

FOLDERS = checkpoint.CHECKPOINTS / "target-gqa", checkpoint.CHECKPOINTS / "draft-mla"
SMALL = {"page_size": 4, "max_new": 5, "chunk": 64, "k": 4}


def test_turns_of_conversations_in_jax_write_what_torch_writes() -> None:
    """Found on the device, on the host and in a folder, with the draft; an engine in torch that never evicts agrees."""
    turns, engine = tiers.play(FOLDERS, **SMALL, hosted=jax_hosted)
    assert tiers.verdict(turns) == {"tokens": True, "acceptance": True, "tiers": True}
    assert engine.tiers.device.slots.free + engine.tiers.device.slots.idle == engine.tiers.device.slots.count


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, dcp=2, interleave=4)], ids=["TP", "DCP"])
def test_ranks_of_jax_find_what_ranks_of_torch_stored(tmp_path: Path, layout: Layout) -> None:
    """One rank in torch stores a prompt; two in JAX find it, each its share, and what they store torch finds."""
    solo = TieredEngine(*FOLDERS, pages=32, host=32, page_size=8, storage=tmp_path)
    pair = TieredEngine(*FOLDERS, pages=32, host=32, page_size=8, storage=tmp_path, layout=layout, hosted=jax_hosted)
    alone = TieredEngine(*FOLDERS, pages=64, host=1, page_size=8)
    prompt, kept = [*range(60)], 0
    for turn, engine in enumerate((solo, pair, solo)):
        answer, right = engine.answer(prompt, 12), alone.answer(prompt, 12)
        assert (answer.tokens, answer.stats) == (right.tokens, right.stats)
        assert answer.device + answer.host + answer.storage >= kept, "all whole pages of the turn before"
        assert answer.storage or not turn
        engine.drain()
        kept = (len(prompt) + 11) // 16 * 16
        prompt += [*answer.tokens, *range(7 * turn, 7 * turn + 17)]
    for engine in (solo, pair, alone):
        engine.close()


def test_a_draft_that_does_not_come_back_to_jax_costs_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: target alone goes to the host of every engine that evicts."""

    def without_draft(routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> Pair:
        return Pair(tuple(route for route in routes if source.groups[route.group].model == 0), source, sink)

    monkeypatch.setattr(host_copies, "Pair", without_draft)
    turns, _ = tiers.play(FOLDERS, **SMALL, hosted=jax_hosted)
    assert tiers.verdict(turns) == {"tokens": True, "acceptance": False, "tiers": True}
