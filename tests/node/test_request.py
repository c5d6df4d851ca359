"""What a source checks of grants when prefill is over."""

import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.source.prefill import check_ends
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants
from tests.node.stages import Stage


def check(stage: Stage, valid: int, state_after: int | None = None) -> None:
    """The second of two groups asks for it, and the hand-off group, whose window says nothing, for more."""
    items = np.array([1], np.uint32)
    grants = [
        Grants(group=0, first=0, count=4, valid=4, items=items),
        Grants(group=1, first=0, count=4, valid=valid, items=items, state_after=state_after),
        Grants(group=2, first=0, count=99, valid=99),
    ]
    check_ends(stage.pair, grants, 20)


@pytest.mark.parametrize("valid", [4, 20])
def test_valid_within_what_was_computed(stage: Stage, valid: int) -> None:
    """KVP-GRANT-REAL, KVP-HND-WINDOW."""
    check(stage, valid)


def test_valid_beyond_what_was_computed(stage: Stage) -> None:
    """KVP-GRANT-REAL."""
    with pytest.raises(RemoteError) as caught:
        check(stage, 21)
    error = caught.value
    assert (error.code, error.path, error.mine, error.yours) == (ErrorCode.BAD_GRANT, "grants[1].valid", "20", "21")


@pytest.mark.parametrize("after", [None, 20])
def test_state_of_this_position(stage: Stage, after: int | None) -> None:
    """KVP-GRANT-STATE."""
    check(stage, 4, after)


@pytest.mark.parametrize("after", [19, 21])
def test_state_of_another_position(stage: Stage, after: int) -> None:
    """KVP-GRANT-STATE: state is that after exactly so many tokens, neither more nor fewer."""
    with pytest.raises(RemoteError) as caught:
        check(stage, 4, after)
    assert (caught.value.code, caught.value.path) == (ErrorCode.STATE_POSITION, "grants[1].state_after")
