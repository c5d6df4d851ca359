"""The feed of a real Source or Sink: what followers get, and what they cannot do."""

import contextlib
import gc
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproto import LocalError, Options, Pool, Sink, Source
from tests.door.doors import GEOMETRY, PAGES, Two, two

from .test_metrics import serve


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics many times a second, so that nothing waits for them."""
    monkeypatch.setattr("kvproto.observability.feed._EVERY", 0.05)


class Following:
    """A follower, and what it has been told."""

    def __init__(self, path: Path) -> None:
        self.conn = socket.socket(socket.AF_UNIX)
        self.conn.settimeout(10)
        self.conn.connect(str(path))
        self.lines = self.conn.makefile("rb")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(ConnectionResetError):  # it was left with something unread
            yield from map(json.loads, self.lines)

    def until(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first line that is wanted."""
        return next(line for line in self if wanted(line))

    def event(self, name: str) -> dict[str, Any]:
        return self.until(lambda line: line.get("event") == name)

    def close(self) -> None:
        self.lines.close()
        self.conn.close()


@contextlib.contextmanager
def followed(folder: Path) -> Iterator[tuple[Two, Path]]:
    """A sink with a feed."""
    theirs = Options(thread=False, feed=folder / "feed-{rank}")
    with two(folder, Options(thread=False), theirs) as both:
        yield both, folder / "feed-0"


def following(path: Path) -> Following:
    """Once it has been told the metrics, it is followed."""
    made = Following(path)
    made.until(lambda line: line["kind"] == "metrics")
    return made


def test_it_tells_metrics_and_events(tmp_path: Path) -> None:
    with followed(tmp_path) as (both, path), contextlib.closing(following(path)) as one:
        serve(both)
        arrived = one.event("arrived")
        metrics = one.until(lambda line: line["kind"] == "metrics")
        assert metrics["samples"] == both.sink.metrics()
    assert (arrived["engine"], arrived["rank"], arrived["bytes"], arrived["level"]) == ("decode", "0", 320, "DEBUG")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_several_follow_and_one_that_speaks_is_left(tmp_path: Path) -> None:
    with followed(tmp_path) as (both, path):
        one, other = following(path), following(path)
        other.conn.sendall(b'{"close": true}\n')
        assert all(line["kind"] == "metrics" for line in other)  # to the end
        serve(both)
        assert one.event("arrived")["transfer"]
        one.close()
        other.close()


def test_one_too_many(tmp_path: Path) -> None:
    with followed(tmp_path) as (both, path), contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(following(path))) for _ in range(8)]
        ninth = stack.enter_context(contextlib.closing(Following(path)))
        assert list(ninth) == []
        serve(both)
        for each in made:
            each.event("arrived")


def test_a_slow_one_loses_lines_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.observability.feed._KEPT", 1 << 12)
    with followed(tmp_path) as (both, path), contextlib.closing(following(path)) as good:
        slow = following(path)
        observer = both.sink._observer
        assert observer.feed is not None
        for number in range(2000):
            observer.feed.publish({"kind": "event", "event": "filler", "number": number, "text": "x" * 500})
            if number % 4 == 3:
                good.until(lambda line, number=number: line.get("number") == number)
        serve(both)
        good.event("arrived")
        heard = []
        for line in slow:
            heard.append(line)
            if line["kind"] == "lost":
                break
        assert 0 < heard[-1]["lines"] < 2000
        slow.close()


def test_it_ends_with_its_sink(tmp_path: Path) -> None:
    with followed(tmp_path) as (_, path):
        one = following(path)
        mode = path.stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert [line["kind"] for line in one][-1] == "metrics"
    assert not path.exists()
    one.close()


def test_a_socket_that_a_process_left_behind_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "feed-0"))
    with followed(tmp_path) as (_, path):
        following(path).close()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda folder: (folder / "feed-0").write_text("mine"), "a file that is no socket"),
    "an open folder": (lambda folder: folder.chmod(0o755), "mode 0700"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_path_that_may_not_be_used(tmp_path: Path, kind: str) -> None:
    """KVP-NET-INSECURE, of the feed; the pool can be used afterwards."""
    make, says = BAD[kind]
    folder = tmp_path / "feeds"
    folder.mkdir(mode=0o700)
    make(folder)
    pool, wrong = Pool.allocate(GEOMETRY, PAGES), Options(feed=folder / "feed-{rank}")
    Sink("decode", pool).close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(LocalError, match=says) as caught:
            Sink("decode", pool, {}, wrong)
        assert caught.value.path == "Options.feed"
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    Sink("decode", pool).close()


def test_an_engine_that_is_both_has_two(tmp_path: Path) -> None:
    """By one and the same options."""
    both, pool = Options(feed=tmp_path / "feed-{role}-{rank}"), Pool.allocate(GEOMETRY, PAGES)
    with (
        contextlib.closing(Source("engine", pool, f"ipc://{tmp_path}/engine-{{rank}}", both)),
        contextlib.closing(Sink("engine", pool, {}, both)),
    ):
        assert {path.name for path in tmp_path.glob("feed-*")} == {"feed-source-0", "feed-sink-0"}


def test_one_that_another_has_is_left_alone(tmp_path: Path) -> None:
    with followed(tmp_path) as (both, path):
        with pytest.raises(LocalError, match="the feed of another process or rank"):
            Sink("another", Pool.allocate(GEOMETRY, PAGES), {}, Options(feed=path))
        following(path).close()
        serve(both)
