"""`kvproto top`: a table of Sources and Sinks at work, one per row, and their latest problems."""

from __future__ import annotations

import importlib.util
import selectors
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs

from kvproto.cli.feeds import FeedReader, Line, plain, said, taken
from kvproto.observability.names import BASE, BUCKETS

__all__ = ["top"]

_EVERY = 1.0
_LATEST = 12
"""The most events that are shown."""
_Series = dict[tuple[str, ...], Any]


@attrs.define(eq=False)
class _RankState:
    """What `top` knows of one rank."""

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

    def quantile(self, phase: str, share: float) -> str:
        """The upper end of the bucket that holds a quantile of a phase's seconds, since the rank was opened."""
        counted = self.now[1].get(("kvproto_phase_seconds", phase))
        if not counted or not sum(counted[:-1]):
            return "-"
        sums = list(accumulate(counted[:-1]))
        at = next(i for i, some in enumerate(sums) if some >= share * sums[-1])
        return f"<={BUCKETS[at] * 1e3:g} ms" if at < len(BUCKETS) else f">{BUCKETS[-1]:g} s"


def _total(series: _Series, name: str, values: tuple[str, ...]) -> float:
    return float(sum(v for (n, *labels), v in series.items() if n == name and set(values) <= set(labels)))


_GOOD = {"source": ("sent", "copy"), "sink": ("arrived", "fetch")}
_COLUMNS = (
    "engine", "rank", "role", "peers", "suspect", "in flight", "transfers", "per s", "MB/s", "p50", "p99", "lost",
    "refused", "quarantine", "resends",
)  # fmt: skip


_NARROW = 120
"""The width of the terminal, in characters, below which the columns in `_WIDE` are left out."""
_WIDE = ("peers", "per s", "p50", "refused", "resends")


def _row(state: _RankState) -> list[str]:
    engine, replica, rank, role = state.who
    outcome, phase = _GOOD.get(role, ("", ""))
    note = " (ended)" if state.ended else " (drains)" if state.total("kvproto_draining") else ""
    numbers = {name: state.total(f"kvproto_{name}") for name in ("peers", "suspects", "in_flight", "quarantined_pages")}
    return [
        (f"{engine}/{replica}" if role != "?" else f"{state.feed} (silent)") + note, rank, role,
        f"{numbers['peers']:.0f}", f"{numbers['suspects']:.0f}", f"{numbers['in_flight']:.0f}",
        f"{state.total('kvproto_transfers_total', outcome):.0f}",
        f"{state.rate('kvproto_transfers_total', outcome):.1f}", f"{state.rate('kvproto_bytes_total') / 1e6:.1f}",
        state.quantile(phase, 0.5), state.quantile(phase, 0.99),
        f"{state.total('kvproto_transfers_total', 'lost'):.0f}",
        f"{state.total('kvproto_refusals_total'):.0f}", f"{numbers['quarantined_pages']:.0f}",
        f"{state.total('kvproto_resends_total'):.0f}",
    ]  # fmt: skip


def top(feeds: Sequence[FeedReader], selector: selectors.BaseSelector, once: bool) -> int:
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
        shown = [at for at, name in enumerate(_COLUMNS) if console.width >= _NARROW or name not in _WIDE]
        for name in (_COLUMNS[at] for at in shown):
            table.add_column(name, justify="left" if name in ("engine", "role") else "right", no_wrap=name == "engine")
        for state in states.values():
            troubled = state.total("kvproto_suspects") or state.total("kvproto_quarantined_pages")
            row = _row(state)
            table.add_row(*(Text(plain(row[at])) for at in shown), style="yellow" if troubled else "")
        return Group(table, Text(), *map(Text, latest[-_LATEST:]))

    def look(until: float | None) -> None:
        for feed, line in taken(feeds, selector, until):
            if line["kind"] == "metrics":
                states[id(feed)].hear(line)
            elif line.get("level") not in ("DEBUG", None):  # the table shows what goes well
                latest.append(said(line))
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
