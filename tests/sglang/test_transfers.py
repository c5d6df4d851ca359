"""Requests at both engines over a Source and a Sink, in the states that SGLang polls."""

import ast
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvproto_sglang
from kvproto import Options, Prompt, Sink, Source, Ticket
from kvproto_engines.told import stop_unwanted
from kvproto_sglang.holding import Holding
from kvproto_sglang.pools.stated import Table
from kvproto_sglang.receiving import Receiving
from kvproto_sglang.sending import Sending
from kvproto_sglang.state import State
from kvproto_sglang.tickets import ticket_of
from tests.door.doors import PAGE, PROMPT, STEPPED, filled, rows

TABLE, PAGES = [3, 1, 2], [5, 6, 7]
TABLES = {"kv": Table(PAGE)}


class Pair:
    """A prefill and a decode rank, without threads."""

    def __init__(self, folder: Path, options: Options = STEPPED) -> None:
        place = f"ipc://{folder}/p"
        self.pools = filled(), filled()
        self.source = Source("p", self.pools[0], place, options)
        self.sink = Sink("d", self.pools[1], {"p": place}, options)
        self._rooms = iter(range(1, 100))

    def both(self, deadline: float = 30) -> tuple[Sending, Receiving, Ticket]:
        """One request at both, begun at neither."""
        ticket = ticket_of(next(self._rooms), "p", 0, deadline)
        return Sending(self.source, TABLES), Receiving(self.sink, TABLES, PAGE), ticket

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(2000):
            if condition():
                return
            stop_unwanted(self.source.step(0.005))
            self.sink.step(0.005)
        raise AssertionError("it does not happen")

    def equal(self, cached: int = 0) -> bool:
        """Whether the pages of the sink hold the prompt's."""
        return bool((rows(self.pools[0], TABLE, cached) == rows(self.pools[1], PAGES, cached)).all())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.sink.close()
    made.source.close()


def nothing() -> dict[str, dict[str, bytes]]:
    return {}


def begun(pair: Pair, prompt: Prompt = PROMPT, deadline: float = 30) -> tuple[Sending, Receiving]:
    sending, receiving, ticket = pair.both(deadline)
    sending.begin(ticket, PROMPT, len(PROMPT))
    receiving.begin(ticket, prompt, len(prompt))
    receiving.resolve(0)
    return sending, receiving


def test_a_prompt_in_chunks_goes_through_the_states_that_sglang_waits_for(pair: Pair) -> None:
    sending, receiving, ticket = pair.both()
    assert (sending.state, receiving.state) == (State.BOOTSTRAPPING, State.BOOTSTRAPPING)
    sending.begin(ticket, PROMPT, len(PROMPT))
    receiving.begin(ticket, PROMPT, len(PROMPT))
    receiving.resolve(0)
    assert (sending.state, receiving.state) == (State.WAITING, State.WAITING)
    receiving.fetch(PAGES, 0)
    sending.send(TABLE[:2], 2 * PAGE, nothing)
    assert (sending.state, receiving.state) == (State.WAITING, State.TRANSFERRING)
    sending.send(TABLE[2:], len(PROMPT) - 2 * PAGE, nothing)
    assert sending.state == State.TRANSFERRING
    pair.until(lambda: sending.state == receiving.state == State.SUCCESS)
    assert pair.equal()


def test_a_token_that_another_engine_computes_itself_is_in_the_prompt_alone(pair: Pair) -> None:
    ticket, end = ticket_of(33, "p"), len(PROMPT) - 1
    sending, receiving = Sending(pair.source, TABLES), Receiving(pair.sink, TABLES, PAGE)
    before = rows(pair.pools[1], PAGES)[:, end:].copy()
    sending.begin(ticket, PROMPT, end)
    receiving.begin(ticket, PROMPT, end)
    receiving.resolve(0)
    receiving.fetch(PAGES, 0)
    sending.send(TABLE, end, nothing)
    pair.until(lambda: sending.state == receiving.state == State.SUCCESS)
    here, there = rows(pair.pools[0], TABLE), rows(pair.pools[1], PAGES)
    assert (here[:, :end] == there[:, :end]).all()
    assert (there[:, end:] == before).all()


def test_what_decode_has_is_not_fetched(pair: Pair) -> None:
    sending, receiving = begun(pair)
    before = rows(pair.pools[1], PAGES)[:, :PAGE].copy()
    receiving.fetch(PAGES[1:], PAGE)
    sending.send(TABLE, len(PROMPT), nothing)
    pair.until(lambda: sending.state == receiving.state == State.SUCCESS)
    assert pair.equal(PAGE)
    assert (rows(pair.pools[1], PAGES)[:, :PAGE] == before).all()


def test_the_ticket_says_the_replica_where_a_router_made_it(pair: Pair) -> None:
    _, receiving, ticket = pair.both()
    receiving.begin(ticket, PROMPT, len(PROMPT))
    receiving.resolve(None)
    receiving.fetch(PAGES, 0)
    assert receiving.state == State.TRANSFERRING
    other = Receiving(pair.sink, TABLES, PAGE)
    other.begin(ticket, PROMPT, len(PROMPT))
    other.resolve(1)
    other.fetch(PAGES, 0)
    assert other.state == State.FAILED
    assert "WRONG_PEER" in str(other.error)


def test_pages_that_prefill_takes_back_are_read_by_nobody(pair: Pair) -> None:
    sending, receiving = begun(pair)
    receiving.fetch(PAGES, 0)
    sending.send(TABLE[:2], 2 * PAGE, nothing)
    sending.abort("the request was aborted")
    assert sending.state == State.FAILED
    pair.until(lambda: receiving.state == State.FAILED)
    assert "aborted" in str(receiving.error)


def test_a_request_that_decode_aborts_is_not_computed_on(pair: Pair) -> None:
    sending, receiving = begun(pair)
    receiving.fetch(PAGES, 0)
    pair.until(lambda: pair.sink.ready)
    receiving.abort("the client is gone")
    pair.until(lambda: receiving.state == State.FAILED and receiving.pages_free)
    pair.until(lambda: sending.state == State.FAILED)
    sending.send(TABLE, len(PROMPT), nothing)
    assert sending.state == State.FAILED


def test_a_request_that_decode_aborts_before_it_has_pages_is_told_to_prefill(pair: Pair) -> None:
    sending, receiving = begun(pair)
    receiving.abort("no pages")
    assert receiving.state != State.SUCCESS
    sending.send(TABLE, len(PROMPT), nothing)
    pair.until(lambda: receiving.state == State.FAILED and sending.state in (State.FAILED, State.SUCCESS))


def all_ranks(flags: list[bool]) -> list[bool]:
    """Of an engine of one rank."""
    return flags


def test_what_is_given_up_waits_for_nobody_and_is_released_when_no_sink_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sink is silent, and may read until its lease is over."""
    pair = Pair(tmp_path, Options(thread=False, pull=True, lease=1.0))
    sending, receiving = begun(pair)
    receiving.fetch(PAGES, 0)
    pair.until(lambda: pair.sink.ready)
    for _ in range(20):
        pair.until(lambda: True)
        pair.source.step(0.001)
        pair.sink.step(0.001)
    sending.send(TABLE, len(PROMPT), nothing)
    pair.source.step(0.0)
    holding, released, began = Holding(patience=0.0), list[str](), time.monotonic()
    sending.abort("the client is gone")
    assert time.monotonic() - began < 0.5
    assert sending.state == State.TRANSFERRING
    request = SimpleNamespace(rid="r")
    for _ in range(2):  # SGLang releases what it has retired already once more
        holding.keep(request, sending, lambda: released.append("r"))
    holding.settle(all_ranks)
    assert (released, len(holding), request in holding) == ([], 1, True)
    while not released:
        assert time.monotonic() - began < 60
        pair.source.step(0.005)
        holding.settle(all_ranks)
    assert (released, len(holding), sending.state) == (["r"], 0, State.FAILED)
    assert time.monotonic() - began > 0.9
    assert sum("request r was given up" in record.message for record in caplog.records) == 1


def test_a_rank_whose_pages_nobody_reads_waits_for_the_others(pair: Pair) -> None:
    """Schedulers of all ranks have to allocate alike."""
    sending, released, holding = Sending(pair.source, TABLES), list[int](), Holding()
    for n in range(2):
        holding.keep(SimpleNamespace(rid=str(n)), sending, lambda n=n: released.append(n))  # type: ignore[misc]
    holding.settle(lambda flags: [not n for n, _ in enumerate(flags)])
    assert released == [0]
    holding.settle(all_ranks)
    assert released == [0, 1]


def test_what_nobody_fetches_is_free_at_its_deadline(pair: Pair) -> None:
    sending, _ = begun(pair, deadline=0.05)
    sending.send(TABLE, len(PROMPT), nothing)
    pair.until(lambda: sending.state == State.FAILED)
    assert "deadline" in str(sending.error)


def test_another_prompt_is_refused(pair: Pair) -> None:
    _, receiving = begun(pair, Prompt(reversed(range(10))))
    receiving.fetch(PAGES, 0)
    pair.until(lambda: receiving.state == State.FAILED)
    assert "CONTENT_MISMATCH" in str(receiving.error)


def test_the_log_says_once_that_a_decode_engine_was_declined(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """By kvproto's own record, which SGLang's root logger takes; another engine may still fetch the prompt."""
    sending, receiving = begun(pair, Prompt(reversed(range(10))))
    receiving.fetch(PAGES, 0)
    pair.until(lambda: receiving.state == State.FAILED)
    (said,) = [text for each in caplog.records if "declined" in (text := each.getMessage()).lower()]
    assert "peer='d rank 0'" in said
    assert "CONTENT_MISMATCH" in said
    assert sending.state == State.WAITING


def test_a_room_that_comes_twice_fails_the_second_time(pair: Pair) -> None:
    first, second = (Sending(pair.source, TABLES) for _ in range(2))
    for each in (first, second):
        each.begin(ticket_of(5, "p"), PROMPT, len(PROMPT))
    assert (first.state, second.state) == (State.WAITING, State.FAILED)
    assert "TICKET_USED" in str(second.error)


def test_pages_that_cannot_be_fail_their_request_alone(pair: Pair) -> None:
    sending, receiving = begun(pair)
    receiving.fetch([10**6], 0)
    assert receiving.state == State.FAILED
    sending.send([3, 3, 3], len(PROMPT), nothing)
    pair.until(lambda: sending.state == State.FAILED)
    sending, receiving = begun(pair)
    receiving.fetch(PAGES, 0)
    sending.send(TABLE, len(PROMPT), nothing)
    pair.until(lambda: sending.state == receiving.state == State.SUCCESS)


def test_pages_are_named_to_nobody_before_the_gpu_has_done_with_them(pair: Pair) -> None:
    sending, receiving = begun(pair)
    sending.send(TABLE, len(PROMPT), nothing)
    idle: list[bool] = []
    receiving.fetch(PAGES, 0, None, lambda: bool(idle))
    for _ in range(20):
        pair.source.step(0.001)
        pair.sink.step(0.001)
        assert (sending.state, receiving.state) == (State.TRANSFERRING, State.TRANSFERRING)
    assert not pair.equal()
    idle.append(True)
    pair.until(lambda: sending.state == receiving.state == State.SUCCESS)
    assert pair.equal()


def test_a_request_that_is_aborted_while_the_gpu_works_names_no_pages(pair: Pair) -> None:
    sending, receiving = begun(pair)
    before = rows(pair.pools[1], PAGES).copy()
    receiving.fetch(PAGES, 0, None, lambda: False)
    receiving.abort("the client is gone")
    assert receiving.pages_free
    sending.send(TABLE, len(PROMPT), nothing)
    pair.until(lambda: receiving.state == State.FAILED and sending.state in (State.FAILED, State.SUCCESS))
    assert (rows(pair.pools[1], PAGES) == before).all()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_state_that_sglang_does_not_name_fails_its_request(side: str, pair: Pair) -> None:
    table = {"kv": Table(PAGE, component=0)}
    sending, receiving = Sending(pair.source, table), Receiving(pair.sink, table, PAGE)
    if side == "prefill":
        sending.begin(ticket_of(9, "p"), PROMPT, len(PROMPT))
        sending.send(TABLE, len(PROMPT), nothing, [None])
        pair.until(lambda: sending.state == State.FAILED)
        assert "component 0" in str(sending.error)
    else:
        receiving.begin(ticket_of(9, "p"), PROMPT, len(PROMPT))
        receiving.resolve(0)
        receiving.fetch(PAGES, 0, [None])
        assert receiving.state == State.FAILED


def test_it_uses_the_front_door_alone() -> None:
    doors = {"kvproto", "kvproto.distributions", "kvproto.errors", "kvproto.events", "kvproto.probes", "kvproto.tiers"}
    for path in Path(kvproto_sglang.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module if isinstance(node, ast.ImportFrom) else ""
            if name and name.split(".")[0] == "kvproto":
                assert name in doors, path.name
