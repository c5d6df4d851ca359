"""Windows that begin late: freed pages of a sliding window, evicted prefixes, and what sinks are told of them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Options
from kvproto import events as told
from kvproto.errors import LocalError, RemoteError
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .late import LAYERS, OURS, POISON, TABLES, TOKENS, WINDOWED, gone, late

WAYS = [
    pytest.param(Options(), id="push"),
    pytest.param(Options(pull=True), id="pull"),
    pytest.param(Options(part_bytes=1), id="parts"),
    pytest.param(Options(verify=False), id="unverified"),
]
FREED = {**TABLES, "window": gone(TABLES["window"], 4)}
"""The window has left 4 of its pages behind: tokens from 16 on are there."""


@pytest.mark.parametrize("options", WAYS)
def test_a_window_is_fetched_from_where_its_pages_are(tmp_path: Path, options: Options) -> None:
    """Neither side has pages of what lies before: the source names its null page there, the sink -1."""
    with late(tmp_path, options) as both:
        tables = {**OURS, "window": gone(OURS["window"], 2, -1)}
        (request,), found = both.begin(tables=tables, cached={"window": 17})
        request.finish(FREED, since={"window": 16})
        assert found.wait(10).since == {}
        both.check({"window": 17})


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("asked_first", [True, False])
def test_who_asks_for_what_is_gone_is_refused_with_the_number(
    tmp_path: Path, options: Options, asked_first: bool
) -> None:
    """KVP-GRANT-HELD, KVP-TRN-CHECKS; the next request is served."""
    with late(tmp_path, options) as both:
        (request,), found = both.begin(cached={"window": 15})
        if asked_first:
            request.computed(TABLES, 20)
            request.computed(FREED, 20, since={"window": 16})
        else:
            request.finish(FREED, since={"window": 16})
        said = {"code": ErrorCode.NOT_HELD, "path": "grants[1].first"}
        with raises(RemoteError, **said, mine="tokens from 16 on", yours="tokens from 15 on"):
            found.wait(10)
        assert found.pages_free
        if not asked_first:
            (lost,) = request.wait(10).lost.values()
            assert {"code": lost.code, "path": lost.path} == said
            assert not [e for e in both.sources[0].events() if isinstance(e, told.Unwanted)]
        both.poison()
        (request,), found = both.begin()
        request.finish(TABLES)
        found.wait(10)
        both.check({})


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    ("asked", "held", "since"),
    [
        ({"cached": {"window": 3}, "late": {"window"}}, FREED, 18),
        ({"late": True}, {**TABLES, "window": [0] * 7}, TOKENS),
    ],
    ids=["some", "nothing"],
)
def test_a_late_window_gets_what_there_is(
    tmp_path: Path, options: Options, asked: dict[str, Any], held: dict[str, list[int]], since: int
) -> None:
    """KVP-GRANT-LATE: what is before is not touched."""
    with late(tmp_path, options) as both:
        (request,), found = both.begin(**asked)
        request.finish(held, since={"window": since})
        assert found.wait(10).since == {"window": since}
        both.check({"window": since})


def test_pages_are_given_up_while_the_prompt_is_computed(tmp_path: Path) -> None:
    """KVP-GRANT-LATE: rows that were moved before do not count; the last number does, and other requests use the pages."""
    with late(tmp_path, Options(part_bytes=1, first_part_ratio=0)) as both:
        (request,), found = both.begin(late={"window"})
        source = both.sources[0].pool
        for tokens in range(4, TOKENS, 4):
            since = max(tokens - 8, 0)
            request.computed({**TABLES, "window": gone(TABLES["window"], since // 4)}, tokens, since={"window": since})
            if since:
                source.array("window", 1, "k")[TABLES["window"][since // 4 - 1]] = 0xEE
        request.finish({**TABLES, "window": gone(TABLES["window"], 5)}, since={"window": 20})
        assert found.wait(10).since == {"window": 20}
        for layer in (1, 3):
            ours, theirs = both.rows(layer, 20)
            assert (ours == theirs).all()


def test_a_page_that_was_given_up_may_hold_later_tokens_of_the_same_prompt(tmp_path: Path) -> None:
    with late(tmp_path) as both:
        (request,), found = both.begin(cached={"window": 20})
        first = TABLES["window"][5:] + TABLES["window"][2:5]
        request.computed({**TABLES, "window": first}, 12)
        request.finish(TABLES, since={"window": 12})
        found.wait(10)
        both.check({"window": 20})


def test_the_highest_number_of_the_source_ranks_counts(tmp_path: Path) -> None:
    """KVP-GRANT-BELOW: one stage has given up two pages, the other one."""
    with late(tmp_path, stages=2) as both:
        requests, found = both.begin(late=True)
        for request, pages in zip(requests, (2, 1), strict=True):
            tables = {**TABLES, "window": gone(TABLES["window"], pages)}
            request.finish(tables, since={"window": 4 * pages})
        assert found.wait(10).since == {"window": 8}
        both.sources[0].pool.array("window", 1, "k")[0] = 0
        assert (both.rows(1, 8)[0] == both.rows(1, 8)[1]).all()
        assert (both.rows(3, 4)[0] == both.rows(3, 4)[1]).all()


def test_a_prefix_that_was_evicted_everywhere(tmp_path: Path) -> None:
    with late(tmp_path) as both:
        (request,), found = both.begin(cached=8)
        request.finish({name: gone(table, 2, -1) for name, table in TABLES.items()}, since=8)
        found.wait(10)
        both.check({"full": 8, "window": 8})


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], ErrorCode, str]] = {
    "a group that is not there": (TABLES, {"since": {"w": 4}}, ErrorCode.BAD_GRANT, 'since["w"]'),
    "beyond what is computed": (TABLES, {"since": {"window": 25}}, ErrorCode.OUT_OF_RANGE, 'since["window"]'),
    "no number": (TABLES, {"since": "8"}, ErrorCode.OUT_OF_RANGE, "since"),
    "lower than before": (FREED, {"since": {"window": 8}}, ErrorCode.BAD_GRANT, 'since["window"]'),
    "a null page where rows are": (
        {**TABLES, "window": gone(TABLES["window"], 5)}, {}, ErrorCode.BAD_GRANT, 'pages["window"][4]',
    ),
    "no page where rows are": (
        {**TABLES, "window": gone(TABLES["window"], 5, -1)}, {}, ErrorCode.OUT_OF_REGION, 'pages["window"][4]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_a_source_cannot_mean(tmp_path: Path, case: str) -> None:
    """Refused by name, and the request goes on."""
    tables, more, code, path = BAD[case]
    with late(tmp_path) as both:
        (request,), found = both.begin(cached={"window": 16})
        request.computed(FREED, 24, since={"window": 16})
        with raises(LocalError, code=code, path=path):
            request.computed(tables, 24, **more)
        request.finish(FREED)
        found.wait(10)
        both.check({"window": 16})


def test_null_pages_of_a_source_that_does_not_say_so(tmp_path: Path) -> None:
    """A page that is named twice is no page of this request."""
    with late(tmp_path) as both:
        (request,), _ = both.begin()
        with raises(LocalError, code=ErrorCode.ITEM_ALIAS, path='pages["window"]') as refused:
            request.finish(FREED)
        assert "[0] and [1]" in refused.value.yours
        assert "`since`" in refused.value.advice


@pytest.mark.parametrize(
    ("more", "code", "path"),
    [
        ({"late": ["w"]}, ErrorCode.BAD_GRANT, "late"),
        ({"late": "window"}, ErrorCode.OUT_OF_RANGE, "late"),
        ({"cached": {"window": 15}}, ErrorCode.OUT_OF_REGION, 'pages["window"][1]'),
    ],
)
def test_what_a_sink_cannot_mean(tmp_path: Path, more: dict[str, Any], code: ErrorCode, path: str) -> None:
    """Names of no group, and a page that is not there where the fetch begins."""
    with late(tmp_path) as both, pytest.raises(LocalError) as refused:
        both.begin(tables={**OURS, "window": gone(OURS["window"], 2, -1)}, **more)
    assert (refused.value.code, refused.value.path) == (code, path)


@pytest.mark.parametrize("seed", range(30))
def test_any_prefill_that_gives_pages_up(tmp_path: Path, seed: int) -> None:
    """KVP-GRANT-HELD, KVP-GRANT-LATE, KVP-GRANT-BELOW: what changes hands while it is copied is nobody's answer."""
    rng = random.Random(seed)
    options = Options(
        pull=rng.random() < 0.3, part_bytes=1, first_part_ratio=rng.choice([0, None]), thread=False,
        verify=rng.choice([True, False, "pages"]),
        debug_pages=rng.choice([True, False]),
    )  # fmt: skip
    with late(tmp_path, options, stages=rng.choice([1, 2])) as both:
        truth = [both.rows(layer, 0)[0].copy() for layer in range(LAYERS)]
        first = {name: rng.choice([0, rng.randrange(TOKENS + 1)]) for name in WINDOWED}
        may = [name for name in WINDOWED if rng.random() < 0.6]
        requests, found = both.begin(cached=first, late=may)
        held, done = [dict.fromkeys(WINDOWED, 0) for _ in requests], 0
        while done < TOKENS:
            done = min(done + rng.randrange(1, 9), TOKENS)
            for source, request, since in zip(both.sources, requests, held, strict=True):
                tables = {}
                for name, before in since.items():
                    since[name] = rng.choice([before, before, rng.randrange(before, done + 1)])
                    tables[name] = gone(TABLES[name], since[name] // 4, rng.choice([0, -1]))
                    both.reuse(source, name, TABLES[name][: since[name] // 4])
                request.computed(tables, done, since=since)
                if done == TOKENS:
                    request.finish(tables)
            for _ in range(rng.randrange(4)):
                both.turn()
        while not found.done:
            both.turn()
        last = {name: max(each[name] for each in held) for name in WINDOWED}
        behind = {name: number for name, number in last.items() if first[name] < number and first[name] < TOKENS}
        if behind.keys() - set(may):
            with raises(RemoteError, code=ErrorCode.NOT_HELD):
                found.wait(0)
            return
        assert found.wait(0).since == behind
        for layer in range(LAYERS):
            name = next(name for name, layers in WINDOWED.items() if layer in layers)
            begin = max(first[name], behind.get(name, 0))
            assert np.array_equal(both.rows(layer, begin)[1], truth[layer][:, begin:])
            assert (both.rows(layer, 0, first[name])[1] == POISON).all()
