"""Axes of their own: cross-attention, encoder caches, several images a request."""

import hashlib
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Cache, Options, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.errors import LocalError, PlanError, RemoteError, WireError
from kvproto.planning.geometry import validate
from kvproto.planning.plan import plan
from kvproto.wire.enums import ErrorCode, ItemKind
from tests.errors import raises

from .axes import ENDS, IMAGES, OURS, POISON, TABLES, TOKENS, both, engine, places, prompt
from .doors import address_in

WAYS = [
    pytest.param(Options(), id="push"),
    pytest.param(Options(pull=True), id="pull"),
    pytest.param(Options(verify="pages"), id="pages"),
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("images", [IMAGES, (3,), ()])
def test_rows_of_other_axes_move_as_far_as_their_axis_goes(
    tmp_path: Path, options: Options, images: tuple[int, ...]
) -> None:
    """Beside the tokens' in the same layers; a text without images has none."""
    with both(tmp_path, options) as two:
        ends = ENDS | {"cross": sum(images), "encoder": sum(images)}
        asked, ticket = prompt(*images), new_ticket("prefill")
        request, fetch = two.source.request(ticket, asked), two.sink.fetch(ticket, asked, OURS)
        for tokens in (8, 16):
            request.computed({**TABLES, "cross": [], "encoder": []}, tokens)
        request.finish(TABLES)
        arrived = fetch.wait(10)
        two.check(ends, {})
        assert sum(arrived.bytes.values()) == sum(ends[name] * _width(two, name) for name in ends)


def test_rows_of_other_axes_go_at_the_end_whatever_tokens_went_before(tmp_path: Path) -> None:
    options = Options(part_bytes=1, first_part_ratio=0, thread=False)
    with both(tmp_path, options) as two:
        ticket = new_ticket("prefill")
        request = two.source.request(ticket, prompt(*IMAGES))
        fetch = two.sink.fetch(ticket, prompt(*IMAGES), OURS)
        request.computed({**TABLES, "cross": [], "encoder": []}, 16)
        while (two.rows(("self", 0, "k"))[0][:16] == POISON).all():
            two.turn()
        assert (two.rows(("cross", 0, "cross_k"))[0] == POISON).all()
        request.finish(TABLES)
        while not fetch.done:
            two.turn()
        two.check(ENDS, {})


def _width(two: Any, group: str) -> int:
    """Bytes of a row, of all layers and parts."""
    arrays = [two.sink.pool.array(*place) for place in places() if place[0] == group]
    return sum(int(np.prod(array.shape[2:])) for array in arrays)


def test_each_group_begins_and_ends_on_its_own_axis(tmp_path: Path) -> None:
    """`cached` as a number is of tokens; by name it is of any axis, and so are `tokens`, `since` and `late`."""
    with both(tmp_path) as two:
        ticket = new_ticket("prefill")
        request = two.source.request(ticket, prompt(*IMAGES))
        fetch = two.sink.fetch(
            ticket, prompt(*IMAGES), OURS, cached={"self": 5, "cross": 3}, tokens={"image": 11}, late=["encoder"]
        )
        request.finish(TABLES, since={"encoder": 4, "cross": 2})
        assert fetch.wait(10).since == {"encoder": 4}
        two.check({"self": TOKENS, "cross": 11, "encoder": 11}, {"self": 5, "cross": 3, "encoder": 4})


def test_a_number_speaks_of_tokens_alone(tmp_path: Path) -> None:
    with both(tmp_path) as two:
        ticket = new_ticket("prefill")
        request = two.source.request(ticket, prompt(*IMAGES))
        fetch = two.sink.fetch(ticket, prompt(*IMAGES), OURS, cached=8, tokens=20)
        request.finish(TABLES, tokens=20, since=8)
        fetch.wait(10)
        two.check(ENDS | {"self": 20}, {"self": 8})


def test_images_of_another_number_are_another_prompt(tmp_path: Path) -> None:
    """KVP-TKT-CONTENT: the digest holds the lengths; that of a prompt without axes is what it was."""
    alone, image = "83 01 d5010102 02 a0 03 90", "84 01 d5010102 02 a0 03 90 04 91 82 01 a5696d616765 02 0d"
    for axes, content in (({}, alone), ({"image": 13}, image)):
        assert Prompt([1, 2], axes=axes).digest == hashlib.sha256(bytes.fromhex(content)).digest()
    with both(tmp_path) as two:
        ticket = new_ticket("prefill")
        two.source.request(ticket, prompt(13)).finish(TABLES)
        fetch = two.sink.fetch(ticket, prompt(12), OURS)
        with raises(RemoteError, code=ErrorCode.CONTENT_MISMATCH):
            fetch.wait(10)


def test_sides_that_mean_different_axes_are_refused(tmp_path: Path) -> None:
    """KVP-PLAN-AXIS: tokens are an axis like others."""
    with raises(PlanError, code=ErrorCode.AXIS_MISMATCH, path="groups[cross].axis") as refused:
        plan(engine(4), engine(8, "audio"))
    assert (refused.value.mine, refused.value.yours) == ("image", "audio")
    with raises(PlanError, mine="image", yours="tokens"):
        plan(lay_out([Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4).along("image")]), engine_of_tokens())


def test_rows_stand_for_tokens_without_a_word() -> None:
    with raises(LocalError, match="not 'tokens'", path="'kv'.along", yours="'tokens'"):
        Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4).along("tokens")


@pytest.mark.parametrize(("axes", "known"), [({"image": 0}, "axes of ['image']"), ({}, "none, as all caches")])
def test_an_axis_that_neither_side_has_is_refused(tmp_path: Path, axes: dict[str, int], known: str) -> None:
    """Neither side knows until both have described themselves; the next request is served."""
    made = engine if axes else (lambda page: engine_of_tokens())
    address = address_in(tmp_path)
    with (
        Source("prefill", Pool.allocate(made(4), 8), address) as source,
        Sink("decode", Pool.allocate(made(4), 8), {"prefill": address}) as sink,
    ):
        tables = TABLES if axes else {"kv": [5, 3, 1, 6, 2, 7]}
        for more in ({"token": 3}, {}):
            ticket, asked = new_ticket("prefill"), Prompt(range(TOKENS), axes=axes | more)
            request, fetch = source.request(ticket, asked), sink.fetch(ticket, asked, tables)
            request.finish(tables)
            if more:
                with raises(LocalError, path="prompt.axes", yours="'token'") as refused:
                    fetch.wait(10)
                assert refused.value.mine.startswith(known)
                assert fetch.pages_free
            else:
                assert fetch.wait(10).bytes


def engine_of_tokens() -> Any:
    return lay_out([Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4)])


def test_other_axes_are_dealt_over_no_tokens() -> None:
    """Nor is a state on an axis; what is dealt by hand is."""
    caches = [Cache.gqa("self", 1, kv_heads=2, head_dim=4, page=4), Cache.encoder("encoder", dim=4, page=4)]
    dealt = lay_out(caches, Parallel(tp=4, dcp=2))
    assert [g.cp_size for g in dealt.groups] == [2, 1]
    assert lay_out([caches[1].sharded()], Parallel(tp=4, dcp=2)).groups[0].cp_size == 2
    with pytest.raises(LocalError, match="items of another kind"):
        Cache.window("ring", 1, kv_heads=2, head_dim=4, ring_rows=8).along("image")


BAD: dict[str, tuple[Prompt, dict[str, Any], str]] = {
    "an axis that nobody states": (Prompt(range(TOKENS)), {}, "prompt.axes"),
    "an axis that is not stated": (prompt(13), {"tokens": {"images": 3}}, "tokens"),
    "beyond the end": (prompt(13), {"tokens": {"image": 14}}, 'tokens["image"]'),
    "cached beyond the end": (prompt(13), {"cached": {"cross": 14}}, 'cached["cross"]'),
    "pages for fewer positions": (Prompt(range(TOKENS), axes={"image": 17}), {}, 'pages["cross"]'),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_fetched(tmp_path: Path, case: str) -> None:
    asked, more, path = BAD[case]
    with both(tmp_path) as two, pytest.raises(LocalError) as refused:
        two.sink.fetch(new_ticket("prefill"), asked, OURS, **more)
    assert refused.value.path == path


def test_what_a_source_cannot_mean(tmp_path: Path) -> None:
    """KVP-TKT-W-AXES, among others."""
    with both(tmp_path) as two:
        with raises(LocalError, path="prompt.axes") as refused:
            two.source.request(new_ticket("prefill"), Prompt(range(TOKENS)))
        assert 'Prompt(..., axes={"image": 0})' in refused.value.advice
        request = two.source.request(new_ticket("prefill"), prompt(13))
        with raises(LocalError, path='pages["cross"]', mine="4 pages for 13 image"):
            request.finish({**TABLES, "cross": [1, 2, 3]})
        with pytest.raises(LocalError) as refused:
            request.computed(TABLES, 4, since={"cross": 1})
        assert refused.value.path == 'since["cross"]'  # none of its rows is there yet
        with raises(LocalError, match="by name and not by axis", path='since["image"]'):
            request.computed(TABLES, 4, since={"image": 1})


@pytest.mark.parametrize(
    ("axes", "path"),
    [
        ({"tokens": 3}, "Prompt.axes['tokens']"),
        ({"": 3}, "Prompt.axes['']"),
        ({"a" * 65: 3}, f"Prompt.axes['{'a' * 65}']"),
        ({"image": -1}, "Prompt.axes['image']"),
        ({"image": 1.5}, "Prompt.axes['image']"),
        ({3: 3}, "Prompt.axes[3]"),
        ([("image", 3)], "Prompt.axes"),
    ],
)
def test_axes_that_a_prompt_cannot_have(axes: Any, path: str) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path):
        Prompt([1], axes=axes)


def test_a_window_beyond_the_end_of_its_axis_is_refused_on_the_wire(tmp_path: Path) -> None:
    """KVP-GRANT-PROMPT: a sink that states another length under the same digest; the next request is served."""
    with both(tmp_path) as two:
        ticket, asked, longer = new_ticket("prefill"), prompt(13), prompt(14)
        object.__setattr__(longer, "digest", asked.digest)
        two.source.request(ticket, asked).finish(TABLES)
        fetch = two.sink.fetch(ticket, longer, OURS)
        with raises(RemoteError, code=ErrorCode.BAD_GRANT, path="grants[1].valid") as refused:
            fetch.wait(10)
        assert refused.value.mine == "a prompt of 13 image"
        ticket = new_ticket("prefill")
        two.source.request(ticket, asked).finish(TABLES)
        two.sink.fetch(ticket, asked, OURS).wait(10)
        two.check(ENDS, {})


def test_kinds_of_items_that_have_no_axis() -> None:
    """KVP-RULE-BREAK."""
    ring = lay_out([Cache.window("ring", 1, kv_heads=2, head_dim=4, ring_rows=8)])
    odd = attrs.evolve(ring, groups=(attrs.evolve(ring.groups[0], axis="image"),))
    assert odd.groups[0].kind == ItemKind.RING
    with raises(WireError, code=ErrorCode.BAD_GEOMETRY, path="groups[0].axis"):
        validate(odd)
