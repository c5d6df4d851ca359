"""Options.cold_draft: a sink with a draft model of which the source has nothing."""

from pathlib import Path

import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, events, lay_out, new_ticket
from kvproto.errors import KvprotoError
from kvproto.wire.enums import ErrorCode

from .doors import address_in

SIZES = {"kv_heads": 2, "head_dim": 4, "page": 4, "dtype": DType.U8}
TARGET, DRAFT = Cache.gqa("target", 2, **SIZES), Cache.gqa("draft", 1, **SIZES, model=1)
PROMPT, POISON = Prompt(range(10)), 0xA5


@pytest.mark.parametrize("options", [Options(cold_draft=True), Options(cold_draft=True, pull=True, verify="pages")])
def test_the_target_arrives_and_the_draft_is_left_alone(options: Options, tmp_path: Path) -> None:
    """KVP-PLAN-COLD: the engine hears which model starts cold, before any request."""
    address, ticket = address_in(tmp_path), new_ticket("prefill")
    both = lay_out([TARGET, DRAFT], warn={"weights.draft": "of which the source knows nothing"})
    with (
        Source("prefill", Pool.allocate(lay_out([TARGET]), 4), address, options) as source,
        Sink("decode", Pool.allocate(both, 4), {"prefill": address}, options) as sink,
    ):
        source.pool.array("target", 1, "k")[:] = 7
        sink.pool.array("draft", 0, "k")[:] = POISON
        fetch = sink.fetch(ticket, PROMPT, {"target": [3, 0, 1], "draft": [0, 1, 2]})
        source.request(ticket, PROMPT).finish({"target": [1, 2, 3]})
        fetch.wait(10)
        assert np.all(sink.pool.array("target", 1, "k")[[3, 0]] == 7)
        assert np.all(sink.pool.array("draft", 0, "k") == POISON)
        (plan,) = [event.plan for event in sink.events() if isinstance(event, events.Connected)]
        assert plan.cold == (1,)


@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True)])
def test_unless_both_sides_say_so_they_refuse_each_other(here: bool, there: bool, tmp_path: Path) -> None:
    address, ticket = address_in(tmp_path), new_ticket("prefill")
    with (
        Source("prefill", Pool.allocate(lay_out([TARGET]), 4), address, Options(cold_draft=here)),
        Sink(
            "decode", Pool.allocate(lay_out([TARGET, DRAFT]), 4), {"prefill": address}, Options(cold_draft=there)
        ) as sink,
    ):
        with pytest.raises(KvprotoError) as refused:
            sink.fetch(ticket, PROMPT, {"target": [3, 0, 1], "draft": [0, 1, 2]}).wait(10)
        assert refused.value.code == ErrorCode.PART_MISSING
        assert "Options.cold_draft" in refused.value.advice
