"""The page tables of groups, of what SGLang names: pages chunk by chunk, and items of states with the last."""

import numpy as np
import pytest

from kvproto_sglang.pools.stated import HOLE, PADDING, Table

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


RINGS = Table(4, component=0, ring=8, within=16)
"""A ring of eight rows in each page of a window of pages of 16 tokens."""


@pytest.mark.parametrize(
    ("tokens", "first", "found"),
    [
        (3, 0, [14]),  # the first page of four
        (4, 0, [14]),
        (6, 0, [14, 15]),
        (16, 12, [15]),
        (18, 12, [15, 18]),  # over the border of two pages
        (21, 16, [18, 19]),
    ],
)
def test_the_last_two_pages_of_rings_are_live(tokens: int, first: int, found: list[int]) -> None:
    states = [np.array([7, 9][: -(-tokens // 16)])]
    assert (RINGS.of([1, 2], states, tokens), RINGS.first(states, tokens)) == ([HOLE] * (first // 4) + found, first)


def test_what_decode_has_is_not_looked_for_in_rings_that_are_not_named() -> None:
    assert RINGS.of([1, 2], [np.array([9])], 18) == [HOLE] * 4 + [18]


def test_nothing_is_pending_at_the_end_of_a_row() -> None:
    ring = Table(4, component=0)
    assert (ring.of([1], [np.array([], np.int32)], 8), ring.first([np.array([], np.int32)], 8)) == ([HOLE, HOLE], 8)


def test_only_the_first_number_names_a_row_of_a_request() -> None:
    assert Table(4, component=0, most=1).of([1], [[5, 0, 3, 0, 0, 4]], 7) == [HOLE, 5]


def test_a_page_holds_several_of_another_table() -> None:
    assert Table(16, split=4).of([HOLE, 3], None, 100) == [HOLE] * 4 + [12, 13, 14]
