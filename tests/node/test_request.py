"""What a source checks of a grant when prefill is over."""

import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.node.request import check_grant
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants


def grant(valid: int, state_after: int | None = None) -> Grants:
    return Grants(group=3, first=0, count=4, valid=valid, items=np.array([1], np.uint32), state_after=state_after)


@pytest.mark.parametrize(("valid", "refused"), [(4, False), (20, False), (21, True)])
def test_valid_beyond_what_was_computed(valid: int, refused: bool) -> None:
    """KVP-GRANT-REAL."""
    if not refused:
        check_grant(grant(valid), 20)
        return
    with pytest.raises(RemoteError) as caught:
        check_grant(grant(valid), 20)
    assert (caught.value.code, caught.value.mine, caught.value.yours) == (ErrorCode.BAD_GRANT, "20", "21")


@pytest.mark.parametrize(("after", "refused"), [(None, False), (20, False), (19, True), (21, True)])
def test_state_of_another_position(after: int | None, refused: bool) -> None:
    """KVP-GRANT-STATE: state is that after exactly so many tokens, neither more nor fewer."""
    if not refused:
        check_grant(grant(4, after), 20)
        return
    with pytest.raises(RemoteError) as caught:
        check_grant(grant(4, after), 20)
    assert caught.value.code == ErrorCode.STATE_POSITION
