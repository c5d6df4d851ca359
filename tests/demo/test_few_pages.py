"""A decode engine whose pages are few: requests are cancelled in every state, and it drains and sleeps meanwhile."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvproto_reference.checkpoint import CHECKPOINTS
from kvproto_reference.demo import decode, prefill
from kvproto_reference.demo.engines import Engines, Main
from kvproto_reference.demo.prompts import Prompt
from kvproto_reference.demo.router import Request, Router
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.undivided import Undivided
from tests.processes import imported

imported("kvproto_reference.demo.__main__")

PAGES, NEW = 9, 40
MODELS = CHECKPOINTS / "target-mla", CHECKPOINTS / "draft-gqa"


@contextmanager
def engines(folder: Path, *sizes: object, main: Main = decode.main) -> Iterator[tuple[Router, Engines]]:
    """A prefill engine, a decode engine of these sizes, and their router."""
    folder.mkdir(mode=0o700)
    with Engines() as started:
        started.start("prefill-0", prefill.main, ["--dir", str(folder), "--pages", "16"])
        started.start("decode-0", main, ["--dir", str(folder), "--quiet", *map(str, sizes)])
        router = Router(folder, "prefill", started)
        router.wait_ready(60)
        yield router, started
        router.stop()
        router.close()


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Router, Engines]]:
    """Engines of which decode has few pages."""
    with engines(tmp_path / "kv", "--pages", PAGES, "--tp", request.param) as made:
        yield made


def prompt(n: int) -> Prompt:
    return Prompt(name=str(n), tokens=[*f"{n} times Alice was beginning to get very tired"[: 20 + 4 * n].encode()])


def collected(router: Router, cancels: Callable[[Request], bool], count: int) -> Request:
    """Serve `count` prompts, cancel the first request of which `cancels` holds, and wait until both engines freed it."""
    router.submit([prompt(n) for n in range(count)], NEW)
    chosen: list[Request] = []

    def on_news(request: Request) -> None:
        if not chosen and cancels(request):
            chosen.append(request)
            router.cancel(request)

    for request in router.requests:
        on_news(request)
    router.collect(on_news, lambda: bool(chosen and chosen[0].freed and chosen[0].left))
    return chosen[0]


STATES: dict[str, Callable[[Request], bool]] = {
    "waits": lambda request: request.number == 6,
    "is handed over": lambda request: request.number == 1 and "prefilled" in request.at,
    "is decoded": lambda request: request.number == 1 and len(request.tokens) > 4,
    "gave way": lambda request: "gave_way" in request.at and not request.over,
}


@pytest.mark.parametrize(
    ("pair", "state"), [(1, "is decoded"), *((2, state) for state in STATES)], indirect=["pair"], ids=str
)
def test_a_cancelled_request_leaves_no_page(pair: tuple[Router, Engines], state: str) -> None:
    """Two ranks do all that one does, and agree on it besides."""
    router, _ = pair
    cancelled = collected(router, STATES[state], 7)
    assert (cancelled.error, cancelled.stats) == ("cancelled", None)
    assert len(cancelled.tokens) < NEW
    others = [request for request in router.requests if request is not cancelled]
    assert right(others)
    assert max(request.stats["available"] for request in others if request.stats) == [PAGES, PAGES]


def test_a_request_is_cancelled_while_it_is_fetched(pair: tuple[Router, Engines]) -> None:
    """Prefill stands still until decode has asked it and was told of the cancel."""
    router, engines = pair
    engines.signal("prefill-0", signal.SIGSTOP)
    router.submit([prompt(0)], NEW)
    (request,) = router.requests
    line = router._engines["decode-0"].line
    for _ in range(2):  # once the second is answered, decode has taken a turn after it heard of the request
        line.send("hello")
        while not [word for word in line.receive() if word["op"] == "ready"]:
            line.socket.poll(100)
    router.cancel(request)
    engines.signal("prefill-0", signal.SIGCONT)
    router.collect(lambda request: None, lambda: request.freed and request.left)
    assert (request.error, request.tokens) == ("cancelled", [])
    router.submit([prompt(1)], NEW)
    router.collect(lambda request: None)
    stats = router.requests[1].stats
    assert stats is not None
    assert stats["available"] == [PAGES, PAGES]


def test_a_request_that_no_pool_can_hold_fails_once(pair: tuple[Router, Engines]) -> None:
    """Both engines refuse it, the router says so once, and the next request is served."""
    router, _ = pair
    router.submit([Prompt(name="long", tokens=[65] * 400), prompt(1)], NEW)
    news: list[tuple[str, str | None]] = []
    router.collect(lambda request: news.append((request.prompt.name, request.error)))
    (failed,) = [error for name, error in news if name == "long"]
    assert failed is not None
    assert re.search("the pools have (9|16): raise --pages, or ask for less", failed)
    assert router.requests[1].error is None
    assert len(router.requests[1].tokens) == NEW


def right(requests: list[Request]) -> bool:
    """Whether one undivided engine writes the same."""
    one = Undivided(*MODELS, pages=128)
    asked = [(request.prompt.tokens, SamplingParams()) for request in requests]
    results = one.generate_all(asked, requests[0].max_new)
    return [request.tokens for request in requests] == [result.tokens for result in results]


def test_what_gave_way_is_finished_before_the_engine_drains(pair: tuple[Router, Engines]) -> None:
    """Requests that had no token yet are refused; those that wait to come back are served to their end."""
    router, engines = pair
    router.submit([prompt(n) for n in range(7)], NEW)
    gave_way: list[Request] = []

    def on_news(request: Request) -> None:
        if not gave_way and "gave_way" in request.at:
            gave_way.append(request)
            engines.signal("decode-0", signal.SIGTERM)

    while engines.exit_status("decode-0") is None:
        router._turn(on_news)
    router._turn(on_news)
    assert engines.exit_status("decode-0") == 0
    assert gave_way[0].stats is not None, gave_way[0].lost
    assert gave_way[0].stats["gave_way"] > 0
    assert right([request for request in router.requests if request.stats is not None])
    lost = {why for request in router.requests for why in request.lost}
    assert lost <= {"this engine drains: ask another", "decode-0 is gone"}


def test_what_gave_way_comes_back_into_other_memory(pair: tuple[Router, Engines]) -> None:
    """The engine sleeps once nothing is decoded, and forgets all rows."""
    router, engines = pair
    asleep: list[Request] = []

    def on_news(request: Request) -> None:
        if not asleep and "gave_way" in request.at:
            asleep.append(request)
            engines.signal("decode-0", signal.SIGUSR1)

    router.submit([prompt(n) for n in range(7)], NEW)
    router.collect(on_news)
    assert asleep
    assert [request.error for request in router.requests] == 7 * [None]
    assert right(router.requests)
    assert all("POOL_MOVED" in why for request in router.requests for why in request.lost)


class Watched(decode.DecodeProcess):
    """A decode engine that ends by an error rather than rest while a request waits and every page is free.

    It counts the turns in which it had nothing to compute.
    """

    idle = 0

    def _rest(self) -> bool:
        if not self.busy:
            assert self._fetching or not self._admission.waiting, "nothing will wake it"
            self.idle += 1
        return super()._rest()

    def serve(self, role: str) -> int:
        status = super().serve(role)
        (self.options.folder / "idle").write_text(str(self.idle))
        return status


def watched(argv: list[str]) -> int:
    """The entry point of such an engine, in a process of its own."""
    decode.DecodeProcess = Watched  # type: ignore[misc]
    return decode.main(argv)


def test_no_request_waits_beside_free_pages(tmp_path: Path) -> None:
    """Twenty of them, of which twelve short pages hold one or two; the engine wakes only for what it is told."""
    with engines(tmp_path / "kv", "--pages", 12, "--page-size", 8, main=watched) as (router, _):
        router.submit([prompt(n) for n in range(20)], 40)
        router.collect(lambda request: None)
    assert [request.lost for request in router.requests] == 20 * [[]]
    assert right(router.requests)
    assert int((tmp_path / "kv" / "idle").read_text()) < 20 * 4
