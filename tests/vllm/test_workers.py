"""The workers' side of the connector over a Source and Sinks: blocks are held, freed and refused as vLLM needs it."""

import ast
import logging
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvproto_vllm
from kvproto import Options, Prompt, Sink, Source, Ticket, new_ticket
from kvproto_engines import told
from kvproto_engines.loading import Loading
from kvproto_engines.orders import Computed, Load, Orders, Table
from kvproto_engines.sending import Sending, Unread
from tests.door.doors import PAGE, PROMPT, STEPPED, filled, rows

TABLE, PAGES = [3, 1, 2], [5, 6, 7]
LOGGER = logging.getLogger("engine")
LAST = len(PROMPT) - 1


_ALL = Table(0)


class Pair:
    """A prefill and a decode worker, without threads."""

    def __init__(
        self, folder: Path, table: Table = _ALL, whole: bool = True, options: Options = STEPPED, patience: float = 10
    ) -> None:
        place = f"ipc://{folder}/p"
        self.pools = filled(), filled()
        self.sending = Sending(Source("p", self.pools[0], place, options), {"kv": table}, LOGGER, patience=patience)
        self.sink = Sink("d", self.pools[1], {"p": place}, options)
        self.loading = Loading(self.sink, {"kv": table}, LOGGER, whole)
        self.freed: set[str] = set()
        self.done: set[str] = set()
        self.failed: set[str] = set()

    def close(self) -> None:
        self.sink.close()
        self.sending.source.close()

    def turn(self, send: Orders | None = None, load: Orders | None = None) -> None:
        """A step of each engine, and a turn of what drives their transfers."""
        self.sending.take(send or Orders())
        self.sending.computed(send or Orders())
        self.loading.take(load or Orders())
        self.sending.source.step(0.005)
        self.sink.step(0.005)
        self.freed |= self.sending.freed(send or Orders())
        done, failed = self.loading.results()
        self.done, self.failed = self.done | done, self.failed | failed

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(2000):
            if condition():
                return
            self.turn()
        raise AssertionError("it does not happen")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def load(ticket: Ticket, prompt: Prompt = PROMPT, cached: int = 0, tokens: int = LAST, pages: Any = PAGES) -> Load:
    return Load("a", ticket, prompt, (pages,), cached, tokens)


def last(name: str = "a") -> Computed:
    return Computed(name, len(PROMPT), (TABLE,), True)


def test_blocks_are_held_until_the_sink_has_them(pair: Pair) -> None:
    ticket = new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}, computed=[last()], held=["a"]))
    for _ in range(5):
        pair.turn()
    assert pair.freed == set()
    pair.turn(load=Orders(loads=[load(ticket)]))
    pair.until(lambda: pair.freed and pair.done)
    assert (pair.freed, pair.done, pair.failed) == ({"a"}, {"a"}, set())
    assert pair.sending.taken() == {"a": (0,)}
    sent, got = rows(pair.pools[0], TABLE, 0, LAST), rows(pair.pools[1], PAGES, 0, LAST)
    assert (sent == got).all()


def test_chunks_and_a_prefix_that_is_there(pair: Pair) -> None:
    ticket, before = new_ticket("p"), rows(pair.pools[1], PAGES, 0, PAGE)
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}), Orders(loads=[load(ticket, cached=PAGE)]))
    pair.turn(Orders(computed=[Computed("a", 2 * PAGE, (TABLE,), False)]))
    pair.turn(Orders(computed=[last()], held=["a"]))
    pair.until(lambda: pair.freed and pair.done)
    assert (rows(pair.pools[0], TABLE, PAGE, LAST) == rows(pair.pools[1], PAGES, PAGE, LAST)).all()
    assert (before == rows(pair.pools[1], PAGES, 0, PAGE)).all()


def test_blocks_that_a_window_has_left_are_not_sent(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Table(0, window=PAGE))
    ticket, before = new_ticket("p"), rows(pair.pools[1], PAGES, 0, PAGE)
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}), Orders(loads=[load(ticket, pages=[0, *PAGES[1:]])]))
    pair.turn(Orders(computed=[Computed("a", 2 * PAGE, ([3, 1],), False)]))
    gone = [0, *TABLE[1:]]
    pair.turn(Orders(computed=[Computed("a", len(PROMPT), (gone,), True)], held=["a"]))
    pair.until(lambda: pair.freed and pair.done)
    pair.close()
    assert pair.failed == set()
    assert (rows(pair.pools[0], TABLE, PAGE, LAST) == rows(pair.pools[1], PAGES, PAGE, LAST)).all()
    assert (before == rows(pair.pools[1], PAGES, 0, PAGE)).all()


def test_of_chunked_attention_the_chunk_of_the_next_token_is_taken(tmp_path: Path) -> None:
    """Chunks of two pages, and the next token in the second: what is before it, prefill has given up."""
    pair = Pair(tmp_path, Table(0, window=PAGE, chunk=2 * PAGE), False)
    ticket, before = new_ticket("p"), rows(pair.pools[1], PAGES, 0, 2 * PAGE)
    assert LAST // (2 * PAGE) == 1
    gone = [0, 0, *TABLE[2:]]
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}, computed=[Computed("a", len(PROMPT), (gone,), True)]))
    pair.turn(load=Orders(loads=[load(ticket)]))
    pair.until(lambda: pair.done)
    pair.close()
    assert pair.failed == set()
    assert (rows(pair.pools[0], TABLE, 2 * PAGE, LAST) == rows(pair.pools[1], PAGES, 2 * PAGE, LAST)).all()
    assert (before == rows(pair.pools[1], PAGES, 0, 2 * PAGE)).all()


@pytest.mark.parametrize(("following", "first"), [(0, 0), (7, 0), (8, 8), (15, 8), (17, 16)])
def test_a_chunk_begins_at_a_multiple_of_its_size(following: int, first: int) -> None:
    assert Table(0, window=4, chunk=8).since(([1, 2, 3, 4, 5],), following) == first


@pytest.mark.parametrize(
    ("whole", "span", "lost"),
    [
        (True, LAST - PAGE + 1, {"a"}),  # the whole block, as other requests' prefixes are found in it
        (False, LAST - PAGE + 1, set()),  # the window of the next token begins with the block that is there
        (False, LAST - PAGE + 2, {"a"}),  # and one token before it, of which prefill has nothing
    ],
)
def test_less_of_a_window_than_a_block_is_taken_where_no_other_request_uses_it(
    tmp_path: Path, whole: bool, span: int, lost: set[str]
) -> None:
    pair = Pair(tmp_path, Table(0, window=PAGE, span=span), whole)
    ticket, gone = new_ticket("p"), [0, *TABLE[1:]]
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}, computed=[Computed("a", len(PROMPT), (gone,), True)]))
    pair.turn(load=Orders(loads=[load(ticket)]))
    pair.until(lambda: pair.done)
    pair.close()
    assert pair.failed == lost


def test_what_the_sink_does_not_need_goes_free(pair: Pair) -> None:
    ticket = new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}, computed=[last()], held=["a"]))
    spared = Load("a", ticket, PROMPT, (), len(PROMPT), len(PROMPT))
    pair.turn(load=Orders(spared=[spared]))
    pair.until(lambda: pair.freed)
    assert pair.done == set()


def test_a_prefill_that_fails_fails_the_fetch(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    ticket = new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}), Orders(loads=[load(ticket)]))
    pair.turn(Orders(failed={"a": "it was aborted"}, held=["a"]))
    pair.until(lambda: pair.freed and pair.failed)
    assert pair.done == pair.failed == {"a"}
    assert [record.levelname for record in caplog.records if "could not be fetched" in record.msg] == ["ERROR"]
    assert pair.sending.taken() == {}  # else the other ranks would end what they are still sending


def test_blocks_of_a_preempted_request_are_given_up_before_they_are_reused(pair: Pair) -> None:
    ticket, again = new_ticket("p"), new_ticket("p")
    first = Orders(requests={"a": (ticket, PROMPT)}, computed=[Computed("a", PAGE, (TABLE,), False)])
    pair.turn(first, Orders(loads=[load(ticket)]))
    for _ in range(20):
        pair.turn()
    pair.sending.preempt(Orders(preempted={1: "a"}))
    pair.until(lambda: pair.failed)
    assert pair.sending.unread().free == {1: 1}
    other = [9, 8, 7]
    pair.turn(
        Orders(requests={"a": (again, PROMPT)}, computed=[Computed("a", len(PROMPT), (other,), True)], held=["a"])
    )
    pair.turn(load=Orders(loads=[load(again, pages=[1, 2, 3])]))
    pair.until(lambda: pair.freed)
    assert (rows(pair.pools[0], other, 0, LAST) == rows(pair.pools[1], [1, 2, 3], 0, LAST)).all()


def test_a_preempted_request_waits_for_nobody_and_keeps_its_blocks_until_no_sink_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sink is silent, and may read until its lease is over."""
    pair, ticket = Pair(tmp_path, options=Options(thread=False, pull=True, lease=1.0), patience=0.0), new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}), Orders(loads=[load(ticket)]))
    pair.until(lambda: pair.sink.ready)
    for _ in range(20):
        pair.turn()
    pair.sending.computed(Orders(computed=[last()]))
    pair.sending.source.step(0.0)
    began = time.monotonic()
    pair.sending.preempt(Orders(preempted={1: "a"}))
    assert time.monotonic() - began < 0.5
    assert pair.sending.unread() == Unread({}, {1: 1})
    assert pair.sending.unread() == Unread({}, {})  # which is said once
    free: dict[int, int] = {}
    while not free:
        assert time.monotonic() - began < 60
        pair.sending.source.step(0.005)
        free = pair.sending.unread().free
    assert free == {1: 1}
    assert time.monotonic() - began > 0.9
    assert sum("may still be read" in record.message for record in caplog.records) == 1
    pair.close()


def test_what_was_preempted_before_it_was_known_is_read_by_nobody(pair: Pair) -> None:
    pair.sending.preempt(Orders(preempted={7: "never"}))
    assert pair.sending.unread() == Unread({7: 1}, {})


def test_an_aborted_fetch_is_over_and_its_blocks_may_be_used_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """And what was asked for is no error in the log."""
    caplog.set_level(logging.INFO)
    ticket = new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}), Orders(loads=[load(ticket)]))
    pair.turn(load=Orders(aborted=["a"]))
    pair.until(lambda: pair.done)
    assert pair.failed == {"a"}
    assert [record.levelname for record in caplog.records if "could not be fetched" in record.msg] == ["INFO"]
    pair.turn(load=Orders(loads=[load(new_ticket("p"))]))  # else ITEM_ALIAS
    assert pair.failed == {"a"}


@pytest.mark.parametrize(
    ("ticket", "pages"), [(new_ticket("nobody"), PAGES), (new_ticket("p"), [0, 1]), (new_ticket("p"), [0, 1, 99])]
)
def test_a_fetch_that_cannot_be_fails_alone(pair: Pair, ticket: Ticket, pages: list[int]) -> None:
    good = new_ticket("p")
    pair.turn(load=Orders(loads=[load(ticket, pages=pages)]))
    assert pair.failed == {"a"}
    pair.turn(Orders(requests={"b": (good, PROMPT)}, computed=[last("b")], held=["b"]))
    pair.turn(load=Orders(loads=[load(good)]))
    pair.until(lambda: pair.freed == {"b"})


def test_a_fetch_that_the_scheduler_refuses_fails(pair: Pair) -> None:
    pair.turn(load=Orders(refused={"a": ("no ticket", ())}))
    assert pair.done == pair.failed == {"a"}


def test_an_engine_that_only_prefills_fails_what_it_cannot_fetch() -> None:
    loading = Loading(None, {"kv": _ALL}, LOGGER)
    loading.take(Orders(refused={"a": ("it prefills", ())}))
    assert loading.results() == ({"a"}, {"a"})


def test_a_ticket_that_was_used_holds_no_blocks(pair: Pair) -> None:
    ticket = new_ticket("p")
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}))
    pair.turn(Orders(requests={"b": (ticket, PROMPT)}, computed=[last("b")], held=["b"]))
    assert pair.freed == {"b"}


def test_what_nobody_fetches_goes_free(pair: Pair) -> None:
    ticket = new_ticket("p", deadline=0.05)
    pair.turn(Orders(requests={"a": (ticket, PROMPT)}, computed=[last()], held=["a"]))
    pair.until(lambda: pair.freed)
    assert pair.sending.taken() == {}


def test_a_rank_without_part_in_a_transfer_frees_its_blocks(pair: Pair) -> None:
    pair.turn(Orders(requests={"a": (new_ticket("p"), PROMPT)}, computed=[last()], held=["a"]))
    pair.turn(Orders(taken={"a": (0, 1)}))
    assert pair.freed == set()  # it is one of them
    pair.turn(Orders(taken={"a": (1,)}))
    pair.until(lambda: pair.freed)


def test_only_the_front_door_is_used() -> None:
    allowed = {
        "kvproto",
        "kvproto.distributions",
        "kvproto.events",
        "kvproto.errors",
        "kvproto.probes",
        "kvproto.tiers",
    }
    for path in Path(kvproto_vllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inner = {name for name in names if name.split(".")[0] == "kvproto"} - allowed
            assert not inner, (path.name, inner)


def test_what_happens_to_peers_is_logged_while_the_engine_does_nothing(tmp_path: Path) -> None:
    """No step of the engine asks for events: the thread that drives the transfers logs them."""
    heard: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: heard.put(record.getMessage())  # type: ignore[method-assign]
    logger, events = logging.getLogger("vllm.kvproto.test"), logging.getLogger("kvproto.events")
    before = events.level, list(events.handlers)
    logger.addHandler(handler)
    try:
        told.follow(logger)
        told.follow(logger)  # a second engine in this process
        place = f"ipc://{tmp_path}/p"
        with Source("p", filled(), place), Sink("d", filled(), {"someone else": place}):
            refused = heard.get(timeout=60)
            assert "refused" in refused
            assert "code=WRONG_PEER" in refused
        with Source("p", filled(), f"{place}2") as source, Sink("d", filled(), {"p": f"{place}2"}) as sink:
            until = time.monotonic() + 60
            while not sink.ready:
                assert time.monotonic() < until
            source.close("bye")
            while "role=sink peer='p rank 0' reason=bye" not in heard.get(timeout=60):
                pass
    finally:
        logger.removeHandler(handler)
        events.setLevel(before[0])
        events.handlers[:] = before[1]
