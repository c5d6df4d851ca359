"""Which rows go now: decisions over an attempt and a request, without a copy."""

from typing import Any

import attrs
import pytest

from kvproto.source.schedule import Scheduler, Send
from kvproto.transport.shm.transport import ShmTransport
from kvproto.transport.staging.packed import Layer, PackedLink
from kvproto.wire.enums import ErrorCode
from tests.node.nodes import finished
from tests.node.stages import HERE, LAYER, TOKENS, Stage, able, computed

DRAFT = 2 * 2 * 16 * TOKENS


def attempt(stage: Stage, first: int = 0, **capabilities: Any) -> Send:
    return stage.send(stage.peer(able(ShmTransport(), **capabilities)), first=first)


def sizes(parts: Any) -> list[tuple[tuple[int, int] | None, int]]:
    return [(part.layers, part.bytes) for part in parts]


def end(tokens: int = TOKENS, after: int | None = None) -> Any:
    return finished({0: HERE, 1: HERE}, tokens, {(2, "token"): b"\7\0\0\0"}, after)


def test_all_at_once_where_nothing_was_said_before(stage: Stage) -> None:
    made = attempt(stage)
    request = made.prefill
    request.finished = end(after=77)
    (part,) = Scheduler(1, None).steps(made)
    assert (part.layers, part.bytes, part.after, part.grows) == (None, 3 * LAYER + DRAFT, (77,), False)
    assert made.program is part.program


def test_what_is_computed_goes_once(stage: Stage) -> None:
    """Each layer when it is there, with the events that it waits for; then what is left, and no byte twice."""
    scheduler, made = Scheduler(1, 0), attempt(stage)
    request = made.prefill
    assert scheduler.steps(made) == []
    request.add(computed(TOKENS, (0, 1), after=5))
    (part,) = scheduler.steps(made)
    assert (part.layers, part.bytes, part.after) == ((0, 1), LAYER, (5,))
    made.progress.advance(request.available)
    assert scheduler.steps(made) == []  # no news
    request.add(computed(6, (1, 3), after=6))
    (part,) = scheduler.steps(made)
    assert (part.layers, part.bytes, part.after) == ((1, 3), 2 * 40 * 6, (6,))
    made.progress.advance(request.available)
    request.finished = end()
    assert sizes(scheduler.steps(made)) == [((1, 3), 2 * 40 * 5), ((0, 1), DRAFT)]


@pytest.mark.parametrize(
    ("asked", "least", "ratio", "before", "after", "sent"),
    [
        ({}, 2 * LAYER, 0, (TOKENS, (0, 1)), (TOKENS, (1, 2)), [((0, 2), 2 * LAYER)]),
        # 8 of 11 are cached, which do not count (KVP-HND-WINDOW: the hand-off's window says nothing)
        ({"first": 8}, 1, 1, (8, (0, 3)), (10, (0, 3)), [((0, 3), 3 * 40 * 2)]),
        ({"incremental": False}, 1, 0, (TOKENS, (0, 3)), None, [(None, 3 * LAYER + DRAFT)]),
    ],
    ids=["a part that is too small", "tokens that the sink holds already", "a transport that is not incremental"],
)
def test_what_waits_for_more(
    stage: Stage, asked: dict[str, Any], least: int, ratio: float, before: Any, after: Any, sent: list[Any]
) -> None:
    scheduler, made = Scheduler(least, ratio), attempt(stage, **asked)
    request = made.prefill
    request.add(computed(*before))
    assert scheduler.steps(made) == []
    if after is None:
        request.finished = end()
    else:
        request.add(computed(*after))
    assert sizes(scheduler.steps(made)) == sent


@pytest.mark.parametrize(("ratio", "layers"), [(0, 1), (1, 2), (3, 3)])
def test_the_first_part_waits_as_the_engine_or_the_link_says(stage: Stage, ratio: float, layers: int) -> None:
    for scheduler, made in (
        (Scheduler(1, ratio), attempt(stage)),
        (Scheduler(1, None), attempt(stage, first_part_ratio=ratio)),
    ):
        request = made.prefill
        for n in range(1, layers + 1):
            assert not scheduler.steps(made)
            request.add(computed(TOKENS, (n - 1, n)))
        assert sizes(scheduler.steps(made)) == [((0, layers), layers * LAYER)]


def test_for_a_sink_that_reads_a_copy_of_nothing_waits_for_the_rows(stage: Stage) -> None:
    scheduler, made = Scheduler(1, 0), attempt(stage)
    request = made.prefill
    made.peer.reads = True
    request.add(computed(TOKENS, (0, 3)))
    assert scheduler.steps(made) == []
    request.finished = end(after=9)
    (part,) = scheduler.steps(made)
    assert (part.program.bytes, part.bytes, part.after) == (0, 0, (9,))
    assert made.program is not None
    assert made.program.bytes == 3 * LAYER + DRAFT


@pytest.mark.parametrize("stream", [False, True])
def test_fewer_tokens_than_were_asked_for_is_a_failure(stage: Stage, stream: bool) -> None:
    """KVP-GRANT-REAL."""
    scheduler, made = Scheduler(1, 0), attempt(stage)
    request = made.prefill
    request.finished = end(TOKENS - 1)
    if stream:
        assert scheduler.stream_rows(made) is None
    else:
        assert scheduler.steps(made) == []
    assert made.failure is not None
    assert (made.failure.code, made.failure.mine, made.failure.yours) == (ErrorCode.BAD_GRANT, "10", "11")


def test_before_the_end_a_page_that_is_not_named_is_no_failure(stage: Stage) -> None:
    scheduler, made = Scheduler(1, 0), attempt(stage)
    request = made.prefill
    request.add(computed(TOKENS, (0, 1)))
    request.items = {group: pages[:1] for group, pages in request.items.items()}
    assert scheduler.steps(made) == []
    assert made.failure is None
    request.add(computed(TOKENS, (1, 2)))
    assert sizes(scheduler.steps(made)) == [((0, 2), 2 * LAYER)]


def test_a_stream_is_told_of_whole_layers(stage: Stage) -> None:
    """All tokens that the sink asked for, each layer's events once; at the end of all of them."""
    scheduler, made = Scheduler(1, 0), attempt(stage)
    request = made.prefill

    def told() -> tuple[frozenset[Layer] | None, tuple[int, ...]] | None:
        rows = scheduler.stream_rows(made)
        return None if rows is None else (rows.layers, rows.after)

    assert told() is None
    request.add(computed(6, (0, 3), after=1))
    assert told() == (frozenset(), ())
    request.add(computed(TOKENS, (0, 2), after=2))
    assert told() == (frozenset({(0, 0), (0, 1)}), (2,))
    assert told() is None
    request.add(computed(TOKENS, (2, 3), after=3))
    assert told() == (frozenset({(0, 0), (0, 1), (0, 2)}), (3,))
    request.finished = end(after=4)
    assert told() == (None, (4,))


def test_through_staging_slots_the_whole_request_goes_as_one_that_grows(stage: Stage) -> None:
    made = attempt(stage)
    made.peer.connection.link = PackedLink()
    made.peer = attrs.evolve(made.peer)
    request = made.prefill
    request.add(computed(6, (0, 3)))
    request.add(computed(6, (0, 1), model=1))
    (part,) = Scheduler(1 << 30, 1e9).steps(made)
    assert (part.grows, part.layers, part.bytes) == (True, None, 3 * LAYER + DRAFT)


def test_rows_of_the_end_of_prefill_go_where_a_part_before_it_was_too_small(stage: Stage) -> None:
    """The program that was made for that part has no rows of them: without another Done would speak of holes."""
    scheduler, made = Scheduler(4 * LAYER, 0), attempt(stage)
    request = made.prefill
    made.attempt.whole, made.attempt.end = False, 8
    request.add(computed(6, (0, 3)))
    assert scheduler.steps(made) == []
    request.finished, request.version = end(), request.version + 1
    assert sum(part.bytes for part in scheduler.steps(made)) == (3 * LAYER + DRAFT) * 8 // TOKENS
