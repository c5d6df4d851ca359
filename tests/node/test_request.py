"""What a source checks of grants when prefill is over."""

import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.source.prefill import check_ends
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants
from tests.errors import raises
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


@pytest.mark.parametrize(("valid", "after"), [(4, None), (20, None), (4, 20)])
def test_valid_within_what_was_computed_and_the_state_after_it(stage: Stage, valid: int, after: int | None) -> None:
    """KVP-GRANT-REAL, KVP-GRANT-STATE, KVP-HND-WINDOW."""
    check(stage, valid, after)


def test_valid_beyond_what_was_computed(stage: Stage) -> None:
    """KVP-GRANT-REAL."""
    with raises(RemoteError, code=ErrorCode.BAD_GRANT, path="grants[1].valid", mine="20", yours="21"):
        check(stage, 21)


@pytest.mark.parametrize("after", [19, 21])
def test_state_of_another_position(stage: Stage, after: int) -> None:
    """KVP-GRANT-STATE: state is that after exactly so many tokens, neither more nor fewer."""
    with raises(RemoteError, code=ErrorCode.STATE_POSITION, path="grants[1].state_after"):
        check(stage, 4, after)
