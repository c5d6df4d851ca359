"""`kvproto top` and `kvproto tail`: follow what Sources and Sinks do, as a table or line by line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import selectors
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import printable
from kvproto.observability.names import BASE, BUCKETS
from kvproto.wire.plain import read_json


def add(commands: Any) -> None:
    where = "socket of Options(feed=...), or a file that `kvproto tail --json` wrote"
    tail = commands.add_parser("tail", help="print what happens at a Source or Sink")
    tail.add_argument("feed", nargs="+", metavar="ADDRESS|FILE", help=where)
    tail.add_argument(
        "--json", action="store_true", help="print every line of the feed, metrics too, for programs and for `top FILE`"
    )
    top = commands.add_parser("top", help="watch Sources and Sinks at work, in a terminal")
    top.add_argument("feed", nargs="+", metavar="ADDRESS|FILE", help=where)
    top.add_argument(
        "--once",
        action="store_true",
        help="print the state once every feed has told its figures twice, within two seconds, and exit",
    )
    tail.set_defaults(run=_run)
    top.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Follow feeds until all of them end; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not be able to show all names
    with contextlib.suppress(KeyboardInterrupt), selectors.DefaultSelector() as selector:
        feeds = [_FeedReader.open(path, selector, len(args.feed) > 1) for path in args.feed]
        if all(feed.live and feed.ended for feed in feeds):
            raise OSError("; ".join(feed.why for feed in feeds))
        if args.command == "top":
            _top(feeds, selector, args.once)
            return 0
        for _, line in _lines_of(feeds, selector, None):
            if args.json:
                print(json.dumps(line), flush=True)
            elif line["kind"] != "metrics":
                print(_line_text(line), flush=True)
    return 0


_EVERY = 1.0
_LATEST = 12
"""The most events that are shown."""
_Series = dict[tuple[str, ...], Any]


@attrs.define(eq=False)
class _RankState:
    """The figures of one rank."""

    who: tuple[str, ...] = ("?", "?", "?", "?")
    before: tuple[float, _Series] = (0.0, {})
    now: tuple[float, _Series] = (0.0, {})
    ended: bool = False
    feed: str = ""
    """The feed's name, shown until its rank is known."""
    sessions: Sequence[dict[str, Any]] = ()

    def hear(self, line: Line) -> None:
        series: _Series = {}
        self.sessions = line.get("sessions", ())
        for sample in line["samples"]:
            labels = sample["labels"]
            self.who = tuple(str(labels[name]) for name in BASE)
            series[sample["name"], *(str(v) for k, v in labels.items() if k not in BASE)] = sample["value"]
        self.before, self.now = self.now, (float(line["time"]), series)

    def total(self, name: str, *values: str) -> float:
        """The sum of a metric's series whose labels include these values."""
        return _total(self.now[1], name, values)

    def rate(self, name: str, *values: str, unit: float = 1.0) -> str:
        """The increase of a metric per second, between the two latest lines; empty if nobody tells any more."""
        seconds = self.now[0] - self.before[0]
        if self.ended or not self.before[1] or seconds <= 0:
            return "" if self.ended else "0.0"
        return f"{(self.total(name, *values) - _total(self.before[1], name, values)) / seconds / unit:.1f}"

    def quantile(self, share: float) -> str:
        """The upper end of the bucket that holds a quantile of the role's main phase, since the rank was opened."""
        counted = self.now[1].get(("kvproto_phase_seconds", self.good[1]))
        if not counted or not sum(counted[:-1]):
            return "-"
        sums = list(accumulate(counted[:-1]))
        at = next(i for i, up_to in enumerate(sums) if up_to >= share * sums[-1])
        return f"<={BUCKETS[at] * 1e3:g} ms" if at < len(BUCKETS) else f">{BUCKETS[-1]:g} s"

    @property
    def good(self) -> tuple[str, str]:
        """The outcome of a transfer that went well, and the phase that ends with it."""
        return {"source": ("sent", "copy"), "sink": ("arrived", "fetch")}.get(self.who[3], ("", ""))

    @property
    def name(self) -> str:
        """Engine and replica, and whether the rank drains or has ended."""
        note = " (ended)" if self.ended else " (drains)" if self.total("kvproto_draining") else ""
        return (f"{self.who[0]}/{self.who[1]}" if self.who[3] != "?" else f"{self.feed} (silent)") + note


def _total(series: _Series, name: str, values: tuple[str, ...]) -> float:
    return float(sum(v for (n, *labels), v in series.items() if n == name and set(values) <= set(labels)))


def _count(name: str, *values: str) -> Callable[[_RankState], str]:
    return lambda state: f"{state.total(f'kvproto_{name}', *values):.0f}"


_COLUMNS: dict[str, Callable[[_RankState], str]] = {
    "engine": lambda state: state.name,
    "rank": lambda state: state.who[2],
    "role": lambda state: state.who[3],
    "peers": _count("peers"),
    "suspect": _count("suspects"),
    "in flight": _count("in_flight"),
    "transfers": lambda state: f"{state.total('kvproto_transfers_total', state.good[0]):.0f}",
    "per s": lambda state: state.rate("kvproto_transfers_total", state.good[0]),
    "MB/s": lambda state: state.rate("kvproto_bytes_total", unit=1e6),
    "p50": lambda state: state.quantile(0.5),
    "p99": lambda state: state.quantile(0.99),
    "lost": _count("transfers_total", "lost"),
    "refused": _count("refusals_total"),
    "quarantine": _count("quarantined_pages"),
    "resends": _count("resends_total"),
}
_NARROW = 120
"""The width of the terminal, in characters, below which the columns in `_WIDE` are left out."""
_WIDE = ("peers", "per s", "p50", "refused", "resends")


def _top(feeds: Sequence[_FeedReader], selector: selectors.BaseSelector, once: bool) -> None:
    """Draw until all feeds end, or only `once`."""
    if importlib.util.find_spec("rich") is None:
        raise ValueError("top draws with rich: pip install 'kvproto[cli]'")
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    states, latest = {id(feed): _RankState(feed=Path(feed.path).name) for feed in feeds}, list[str]()

    def drawn() -> Group:
        table = Table(box=None, header_style="bold", pad_edge=False)
        shown = [name for name in _COLUMNS if console.width >= _NARROW or name not in _WIDE]
        for name in shown:
            table.add_column(name, justify="left" if name in ("engine", "role") else "right", no_wrap=name == "engine")
        for state in states.values():
            troubled = state.total("kvproto_suspects") or state.total("kvproto_quarantined_pages")
            cells = (Text(printable(_COLUMNS[name](state))) for name in shown)
            table.add_row(*cells, style="yellow" if troubled else "")
        heads = ("engine", "peer", "version", "transports", "features")
        joined = Table(*heads, box=None, header_style="bold", pad_edge=False)
        for state in states.values():
            for each in () if state.ended else state.sessions:
                told = (str(each.get(name, "")) for name in ("peer", "version", "transports", "features"))
                joined.add_row(*(Text(printable(word)) for word in ("/".join(state.who[:3]), *told)))
        below: list[Table | Text] = [joined, Text()] if joined.row_count else []
        return Group(table, Text(), *below, *map(Text, latest[-_LATEST:]))

    def heard_twice() -> bool:
        return all(feed.ended or states[id(feed)].before[0] for feed in feeds)

    def look(until: float, enough: Callable[[], bool] = lambda: False) -> None:
        for feed, line in _lines_of(feeds, selector, until, enough):
            if line["kind"] == "metrics":
                states[id(feed)].hear(line)
            elif line.get("level") not in ("DEBUG", None):  # the table shows what goes well
                latest.append(_line_text(line))
                del latest[:-_LATEST]
        for feed in feeds:
            states[id(feed)].ended = feed.live and feed.ended
            if states[id(feed)].ended and feed.follow(selector):  # its engine has been started again
                states[id(feed)] = _RankState(feed=Path(feed.path).name)

    console = Console()
    if not console.is_terminal:
        console = Console(width=2 * _NARROW)
    if once or not console.is_terminal:
        look(time.monotonic() + 2.2 * _EVERY, heard_twice)
        console.print(drawn(), soft_wrap=True)
        return
    with Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
        while not all(feed.ended for feed in feeds):
            look(time.monotonic() + _EVERY)
            live.update(drawn(), refresh=True)
    console.print(drawn())


Line = dict[str, Any]
_LONGEST = 1 << 20
"""The most bytes in a line."""


@attrs.define(eq=False)
class _FeedReader:
    """A feed that is followed, or read from a file."""

    path: str
    file: Any
    live: bool
    rest: bytes = b""
    ended: bool = False
    why: str = ""
    """The reason that nothing is followed."""

    @classmethod
    def open(cls, path: str, selector: selectors.BaseSelector, several: bool = False) -> _FeedReader:
        """Open a socket, which is registered with the selector, or a file; raises OSError.

        If there are `several`, a socket without a writer is one that has ended, so that the others are followed.
        """
        path = path.removeprefix("ipc://")
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return cls(path, open(path, "rb"), False)
        feed = cls(path, None, True, ended=True)
        if not feed.follow(selector) and not several:
            raise OSError(feed.why)
        return feed

    def follow(self, selector: selectors.BaseSelector) -> bool:
        """Connect to the writer that a socket has now, if it has one."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self.path)
        except OSError as error:
            connection.close()
            self.why = f"{self.path}: {error.strerror}: it has no writer, or eight followers already"
            return False
        self.file, self.rest, self.ended = connection, b"", False
        selector.register(connection, selectors.EVENT_READ, self)
        return True

    def take(self) -> Iterator[Line]:
        """The lines that have come; raises ValueError if this is not a feed."""
        try:
            data = self.file.recv(1 << 16) if self.live else self.file.read(1 << 16)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST:
            raise ValueError(f"{self.path}: a line is longer than {_LONGEST} bytes: this is no feed of kvproto")
        for text in filter(None, lines):
            line = read_json(text, self.path)
            if not _is_line(line):
                raise ValueError(f"{self.path}: this is no feed of kvproto")
            yield line


def _is_line(line: Any) -> bool:
    """Whether an object has the form of a line in a feed."""
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind == "metrics":
        samples = line.get("samples")
        known, sessions = isinstance(samples, list) and all(map(_is_sample, samples)), line.get("sessions", [])
        told = isinstance(sessions, list) and all(isinstance(each, dict) for each in sessions)
        return _is_number(line.get("time")) and known and told
    return kind == "lost" or (kind == "event" and _is_number(line.get("time")))


def _is_sample(sample: Any) -> bool:
    if not isinstance(sample, dict) or not isinstance(sample.get("name"), str):
        return False
    labels, value = sample.get("labels"), sample.get("value")
    numbers = value if isinstance(value, list) and len(value) == len(BUCKETS) + 2 else [value]
    return isinstance(labels, dict) and set(BASE) <= labels.keys() and all(map(_is_number, numbers))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


def _lines_of(
    feeds: Sequence[_FeedReader],
    selector: selectors.BaseSelector,
    until: float | None,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[_FeedReader, Line]]:
    """The lines of all feeds as they come, until a time of `time.monotonic`, if given, or until all have ended.

    Files are read to their end; of what has come by a socket all is told before `enough` is asked.
    """
    for feed in feeds:
        while not (feed.live or feed.ended):
            yield from ((feed, line) for line in feed.take())
    while not (all(feed.ended for feed in feeds) or enough()):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return
        for key, _ in selector.select(left):
            yield from ((key.data, line) for line in key.data.take())
            if key.data.ended:
                selector.unregister(key.fileobj)
                key.data.file.close()


def _line_text(line: Line) -> str:
    """A line as text: time, level, event, then its other fields."""
    if line["kind"] == "lost":
        return printable(f"... {line.get('lines')} lines were lost, as this was too slow")
    clock = time.strftime("%H:%M:%S", time.localtime(float(line.get("time", 0))))
    who = f"{line.get('engine')}/{line.get('replica')}/{line.get('rank')}"
    rest = {k: v for k, v in line.items() if k not in ("kind", "time", "level", "event", *BASE)}
    fields = " ".join(f"{k}={v:.6f}" if isinstance(v, float) else f"{k}={v}" for k, v in rest.items())
    return printable(f"{clock} {line.get('level')!s:<7} {who} {line.get('role')} {line.get('event')} {fields}".rstrip())
