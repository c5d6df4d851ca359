"""`kvproto tail` and `kvproto top` at real Sources and Sinks, and at files that somebody else has written."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kvproto import Options
from kvproto.cli.main import main
from kvproto.observability.names import BUCKETS
from kvproto.observability.records import transfer_name
from tests.commands import Ran
from tests.door.doors import Two, two

from .test_feed import followed
from .test_metrics import ask, serve

METRICS = {"kind": "metrics", "time": 1.0}
OWN = {"engine": "decode", "replica": "0", "rank": "0", "role": "sink"}


class Command(threading.Thread):
    """A command that runs beside a test."""

    def __init__(self, *argv: object) -> None:
        super().__init__()
        self.argv, self.status = list(map(str, argv)), -1
        self.start()

    def run(self) -> None:
        self.status = main(self.argv)

    def ended(self) -> int:
        self.join(30)
        return self.status


def until_followed(both: Two) -> None:
    feed = both.sink._observer.feed
    assert feed is not None
    both.until(lambda: feed.followed)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics many times a second, so that rates show at once."""
    monkeypatch.setattr("kvproto.observability.feed._EVERY", 0.02)
    monkeypatch.setattr("kvproto.cli.top._EVERY", 1.0)
    monkeypatch.setenv("COLUMNS", "200")


def test_tail_prints_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with followed(tmp_path) as (both, path):
        tail = Command("tail", path)
        until_followed(both)
        found, said = ask(both), [""]

        def printed() -> bool:
            said[0] += capsys.readouterr().out
            return " arrived " in said[0]

        both.until(printed)
    assert tail.ended() == 0
    [line] = [line for line in (said[0] + capsys.readouterr().out).splitlines() if " arrived " in line]
    name = transfer_name(bytes(found.ticket.key))
    assert f"decode/0/0 sink arrived transfer={name} peer=prefill epoch=1 bytes=320 seconds=" in line


def test_top_shows_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = [Options(thread=False, feed=tmp_path / name) for name in ("source", "sink")]
    with two(tmp_path, *ways) as both:
        serve(both, 3)
        top = Command("top", "--once", tmp_path / "source", f"ipc://{tmp_path}/sink")
        both.until(lambda: not top.is_alive())
    assert top.ended() == 0
    head, source, sink, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:4] == ["engine", "rank", "role", "peers"]
    assert source[:7] == ["prefill/0", "0", "source", "1", "0", "0", "3"]
    assert sink[:7] == ["decode/0", "0", "sink", "1", "0", "0", "3"]


def test_top_shows_the_sessions_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that began before it looked, and none that has ended."""
    ways = [Options(thread=False, feed=tmp_path / name) for name in ("source", "sink")]
    with two(tmp_path, *ways) as both:
        serve(both, 1)
        top = Command("top", "--once", tmp_path / "source", tmp_path / "sink")
        both.until(lambda: not top.is_alive())
        said = capsys.readouterr().out.splitlines()
        rows = [line.split() for line in said[said.index("") + 1 :] if line]
        assert rows[0] == ["engine", "peer", "version", "transports", "features"]
        assert [row[0] for row in rows[1:]] == ["prefill/0/0", "decode/0/0"]
        assert rows[2][1:6] == ["prefill", "rank", "0", "1.0", "shm"]
        assert "VERIFY" in rows[2][6]
        both.sink.disconnect("prefill")
        both.until(lambda: not both.sink.ready)
        alone = Command("top", "--once", tmp_path / "sink")
        both.until(lambda: not alone.is_alive())
    assert "transports" not in capsys.readouterr().out


def test_a_dead_feed_does_not_stop_the_living(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of an engine that was killed; its rates are blank."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "feed-left"))
    with followed(tmp_path) as (both, path):
        serve(both, 2)
        top = Command("top", "--once", tmp_path / "feed-left", path)
        both.until(lambda: not top.is_alive())
    assert top.ended() == 0
    _, dead, living, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert dead[:3] == ["feed-left", "(silent)", "(ended)"]
    assert living[:7] == ["decode/0", "0", "sink", "1", "0", "0", "2"]
    assert not any("." in cell for cell in dead)
    assert any("." in cell for cell in living)  # a rate


def test_an_engine_that_starts_again_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setattr("kvproto.cli.top._EVERY", 0.05)
    (tmp_path / "other").mkdir(mode=0o700)
    with followed(tmp_path / "other") as (_, living):
        with followed(tmp_path) as (both, path):
            top = Command("top", path, living)
            until_followed(both)
        with followed(tmp_path) as (again, _):
            until_followed(again)
    assert top.ended() == 0


def test_an_engine_that_drains_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KVP-SES-DRAINING: in `top` as long as it lasts, in `tail` and the log when it begins."""
    with followed(tmp_path) as (both, path):
        tail = Command("tail", path)
        until_followed(both)
        both.sink.drain()
        top = Command("top", "--once", path)
        both.until(lambda: not top.is_alive())
    assert (tail.ended(), top.ended()) == (0, 0)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decode/0", "(drains)", "0", "sink"] in [line[:4] for line in words]
    assert ["INFO", "decode/0/0", "sink", "draining"] in [line[1:] for line in words]


def test_what_tail_has_kept_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    with followed(tmp_path) as (both, path):
        tail = Command("tail", "--json", path)
        until_followed(both)
        serve(both, 2)
    assert tail.ended() == 0
    kept = tmp_path / "kept.jsonl"
    kept.write_text(capsys.readouterr().out)
    row = ran("top", kept).splitlines()[1].split()
    assert (row[:3], row[4:7]) == (
        ["decode/0", "0", "sink"],
        ["0", "0", "2"],
    )  # peers: as of the last sample that it heard
    assert ran("tail", kept).count(" arrived ") == 2


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def metrics(labels: Any = OWN, value: Any = 1, name: Any = "kvproto_peers") -> bytes:
    return line(**METRICS, samples=[{"name": name, "labels": labels, "value": value}])


BAD: dict[str, bytes] = {
    "binary": b"\x00\xff\xfe",
    "a number": b"1",
    "deep": b"[" * 100_000,
    "no kind": b"{}",
    "no time": line(kind="event"),
    "a time that cannot be": line(kind="event", time=1e300),
    "no samples": line(**METRICS),
    "sessions of another kind": line(**METRICS, samples=[], sessions=[1]),
    "samples of another kind": line(**METRICS, samples=[1]),
    "no labels": metrics({}),
    "text for a number": metrics(value="1"),
    "short histogram": metrics(value=[1, 2]),
    "not a number": b'{"kind": "metrics", "time": NaN, "samples": []}',
    "a key twice": b'{"kind": "lost", "kind": "lost"}',
    "endless": b"x" * (2 << 20),
}


@pytest.mark.parametrize("command", ["tail", "top"])
@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_feed(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, kind: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(BAD[kind] + b"\n")
    assert main([command, str(path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert len(said.err) < 1000


def test_an_event_without_a_level_is_shown(tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "feed"
    path.write_bytes(b"\n".join([line(kind="event", time=1), line(kind="event", time=1, level=["x"], event={}), b""]))
    assert len(ran("tail", path).splitlines()) == 2


def test_nothing_drives_the_terminal(tmp_path: Path, ran: Ran) -> None:
    """KVP-SEE-TEXT, of a feed that is none of ours."""
    evil = "[red]x\x1b[2J\n"
    path = tmp_path / "evil"
    event = line(kind="event", time=1.0, level=evil, event=evil, peer=evil, **OWN)
    histogram = metrics({**OWN, "phase": "fetch"}, [0] * (len(BUCKETS) + 2), "kvproto_phase_seconds")
    lost = line(kind="lost", lines=evil)
    path.write_bytes(b"".join(each + b"\n" for each in (metrics({**OWN, "engine": evil}), event, histogram, lost)))
    for command in ("tail", "top"):
        said = ran(command, path)
        assert "\x1b" not in said
        assert "[red]x" in said


@pytest.mark.parametrize("command", ["tail", "top"])
def test_where_nobody_is(tmp_path: Path, ran: Ran, command: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    for name in ("left", "missing", "."):
        assert ran(command, tmp_path / name, status=1).startswith("error: ")
