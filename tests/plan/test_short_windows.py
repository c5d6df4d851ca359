"""Windows that lack items are refused before a byte moves, also where they are of many pages."""

import attrs
import numpy as np
import pytest

from kvproto.copying.lowering import MapSpec, row_map
from kvproto.copying.program import IntArray, Window
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Group, gqa
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

PAGES = gqa(0, "target", 0, 1, 8, 1)
DEALT = attrs.evolve(PAGES, cp_size=2, interleave=1)


def window(group: Group, first: int, count: int, lacks: int = 0) -> Window:
    """Of so many tokens, with so many items too few."""
    items: IntArray = np.arange(count // group.cp_size - lacks)
    return Window(first, count, items)


@pytest.mark.parametrize("group", [PAGES, DEALT], ids=["pages", "dealt"])
@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("side", ["source", "sink"])
def test_an_item_too_few(group: Group, count: int, side: str) -> None:
    """KVP-GRANT-COUNT: at the end of either window."""
    both = MapSpec(group, group, 0, 0, False, False, False)
    windows = {each: window(group, 0, count, each == side) for each in ("source", "sink")}
    with raises(RemoteError, code=ErrorCode.BAD_GRANT):
        row_map(both, windows["source"], windows["sink"])


@pytest.mark.parametrize("group", [PAGES, DEALT], ids=["pages", "dealt"])
@pytest.mark.parametrize("count", [20, 100])
def test_tokens_before_the_window_of_the_source(group: Group, count: int) -> None:
    """KVP-GRANT-COUNT: the source holds the rest alone."""
    both = MapSpec(group, group, 0, 0, False, False, False)
    with raises(RemoteError, code=ErrorCode.BAD_GRANT):
        row_map(both, window(group, 8, count), window(group, 0, count))
