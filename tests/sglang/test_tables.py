"""The page tables of groups, of what SGLang names: pages chunk by chunk, and items of states with the last."""

import numpy as np
import pytest

from kvproto_sglang.stated import HOLE, PADDING, Table

PAGES = Table(16)
WINDOW = Table(16, component=0)
SLOT = Table(component=1, slot=True)
STATES = [np.array([7, 9], np.int32), [np.array([5])]]


def test_pages_of_the_request_are_its_table() -> None:
    assert PAGES.of(np.array([4, 2]), None, 20) == [4, 2]
    assert (PAGES.first(None, 20), PAGES.wanted(None, 20, 16)) == (0, 16)


def test_a_window_has_pages_from_the_first_that_it_needs() -> None:
    assert WINDOW.of([1, 2, 3, 4], STATES, 50) == [HOLE, HOLE, 7, 9]
    assert (WINDOW.first(STATES, 50), WINDOW.wanted(STATES, 50, 0), WINDOW.wanted(STATES, 50, 48)) == (32, 32, 48)


def test_of_the_first_page_of_a_window_no_more_is_wanted_than_it_needs() -> None:
    exact = Table(16, component=0, window=12)
    assert exact.wanted(STATES, 50, 0) == 38
    assert exact.wanted(STATES, 50, 40) == 40


def test_a_state_is_one_slot() -> None:
    assert SLOT.of([1, 2], STATES, 50) == [5]
    assert (SLOT.first(STATES, 50), SLOT.nothing(50)) == (0, [PADDING])


def test_a_state_that_sglang_does_not_name_is_an_error() -> None:
    for states in (None, [None, None]):
        with pytest.raises(ValueError, match="component"):
            WINDOW.of([1], states, 10)


def test_nothing_is_fetched_into_no_page() -> None:
    assert PAGES.nothing(40) == [HOLE, HOLE, PADDING]
