"""`kvproto top` and `kvproto tail`: follow what Sources and Sinks do, as a table or line by line."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs

from kvproto.cli.feeds import FeedReader, Line, line_text, lines_of, plain
from kvproto.errors import KvprotoError
from kvproto.observability.names import BASE, BUCKETS

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the commands and their options."""
    where = "socket of Options(feed=...), or a file that `kvproto tail --json` wrote"
    tail = commands.add_parser("tail", help="print what happens at a Source or Sink")
    tail.add_argument("feed", nargs="+", metavar="ADDRESS|FILE", help=where)
    tail.add_argument(
        "--json", action="store_true", help="print every line of the feed, metrics too, for programs and for `top FILE`"
    )
    top = commands.add_parser("top", help="watch Sources and Sinks at work, in a terminal")
    top.add_argument("feed", nargs="+", metavar="ADDRESS|FILE", help=where)
    top.add_argument("--once", action="store_true", help="watch for two seconds, print the state, and exit")


def run(args: argparse.Namespace) -> int:
    """Follow feeds until all of them end; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not be able to show all names
    try:
        with selectors.DefaultSelector() as selector:
            feeds = [FeedReader.open(path, selector) for path in args.feed]
            if args.command == "tail":
                return _tail(feeds, selector, args.json)
            return _top(feeds, selector, args.once)
    except (OSError, ValueError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _tail(feeds: Sequence[FeedReader], selector: selectors.BaseSelector, whole: bool) -> int:
    for _, line in lines_of(feeds, selector, None):
        if whole:
            print(json.dumps(line), flush=True)
        elif line["kind"] != "metrics":
            print(line_text(line), flush=True)
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

    def hear(self, line: Line) -> None:
        """Update the state by a line of metrics."""
        series: _Series = {}
        for sample in line["samples"]:
            labels = sample["labels"]
            self.who = tuple(str(labels[name]) for name in BASE)
            series[sample["name"], *(str(v) for k, v in labels.items() if k not in BASE)] = sample["value"]
        self.before, self.now = self.now, (float(line["time"]), series)

    def total(self, name: str, *values: str) -> float:
        """The sum of a metric's series whose labels include these values."""
        return _total(self.now[1], name, values)

    def rate(self, name: str, *values: str) -> float:
        """The increase of a metric per second, between the two latest lines."""
        seconds = self.now[0] - self.before[0]
        if not self.before[1] or seconds <= 0:
            return 0.0
        return (self.total(name, *values) - _total(self.before[1], name, values)) / seconds

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
    "per s": lambda state: f"{state.rate('kvproto_transfers_total', state.good[0]):.1f}",
    "MB/s": lambda state: f"{state.rate('kvproto_bytes_total') / 1e6:.1f}",
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


def _top(feeds: Sequence[FeedReader], selector: selectors.BaseSelector, once: bool) -> int:
    """Draw until all feeds end, or only `once`; returns the exit status."""
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
            cells = (Text(plain(_COLUMNS[name](state))) for name in shown)
            table.add_row(*cells, style="yellow" if troubled else "")
        return Group(table, Text(), *map(Text, latest[-_LATEST:]))

    def look(until: float | None) -> None:
        for feed, line in lines_of(feeds, selector, until):
            if line["kind"] == "metrics":
                states[id(feed)].hear(line)
            elif line.get("level") not in ("DEBUG", None):  # the table shows what goes well
                latest.append(line_text(line))
                del latest[:-_LATEST]
        for feed in feeds:
            states[id(feed)].ended = feed.live and feed.ended

    console = Console()
    if not console.is_terminal:
        console = Console(width=2 * _NARROW)
    if once or not console.is_terminal:
        look(time.monotonic() + 2.2 * _EVERY)
        console.print(drawn(), soft_wrap=True)
        return 0
    with Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
        while not all(feed.ended for feed in feeds):
            look(time.monotonic() + _EVERY)
            live.update(drawn(), refresh=True)
    console.print(drawn())
    return 0
