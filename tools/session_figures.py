"""The results in benchmarks/results/session.json, as rows of the page of figures on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_WAYS = {
    "floor": ("bare sockets, the same number of frames of the same lengths", "messages"),
    "messages": ("sessions alone: nothing is lowered, copied or summed", "messages"),
    "step": ("Source and Sink, stepped", "messages"),
    "thread": ("Source and Sink with I/O threads", "messages"),
    "step, whole": ("the same, from `fetch` to its callback, stepped", "door"),
    "thread, whole": ("the same, with I/O threads", "door"),
}
_MIB = 1 << 20


def session_rows(parts: Mapping[str, Any]) -> list[str]:
    """The tables; `parts` are those of the file, by name."""
    found = {name: part["found"] for name, part in parts.items()}
    ahead = [name for name in parts if parts[name].get("ahead")]
    rows = ["", "## Sessions", ""]
    rows += [
        "Two processes of one host with 2 cores, loopback; a request of one page, 128 bytes, with VERIFY. Microseconds",
        "unless a unit is named. `python benchmarks/session.py`",
        "Load of the machine meanwhile: "
        + ", ".join(f"{parts[name]['load']:.0f} ({name})" for name in parts)
        + ". Compare within a table, and with its first row."
        + (f" Other work had lower priority than {', '.join(ahead)}." if ahead else ""),
        "",
        *_latency(found["latency"]),
        "",
        *_beside(found["floods"], found["held"]),
        "",
        *_frames(found["frames"]),
        "",
        *_many(found["many"]),
        "",
        *_growth(found),
        "",
        *_recovery(found["recovery"]),
    ]
    return rows


def _cuts(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    p50, p99 = (float(each) * 1e6 for each in np.percentile(seconds, (50, 99)))
    return p50, p99


def _latency(found: Mapping[str, Any]) -> list[str]:
    rows = ["| one transfer at a time, from Transfer to DoneAck | CURVE: p50, p99 | ipc: p50, p99 |", "|---|---|---|"]
    for way, (words, what) in _WAYS.items():
        samples = [found[f"{kind} {way.partition(',')[0]}"][what] for kind in ("curve", "ipc")]
        cells = ["{:,.0f}, {:,.0f}".format(*_cuts(each)) for each in samples]
        rows.append(f"| {words} | {cells[0]} | {cells[1]} |")
    return rows


def _beside(floods: Mapping[str, Any], held: Mapping[str, Any]) -> list[str]:
    p99 = {name: _cuts(floods[name])[1] for name in floods if not name.endswith("frames_s")}

    def by(other: str) -> list[float]:
        """p99 during each flood here, divided by that during the same flood there, or alone."""
        return [p99[f"{kind} here"] / p99.get(f"{kind} {other}", p99["alone"]) for kind in ("garbage", "requests")]

    here, alone = ("{:.2f} for garbage and {:.2f} for requests", "{:.1f} and {:.1f}")
    here, alone = here.format(*by("elsewhere")), alone.format(*by("alone"))
    rows = [
        "A flood takes the machine's time wherever it goes: its sender and ZeroMQ's threads use the same cores as the",
        "transfer. So a transfer is measured during a flood of its own source, during the same flood of another source",
        f"on this machine, and alone. The flooded source loses the first divided by the second: p99 times {here}.",
        f"Compared with a transfer alone on the two cores it is {alone} times, most of which is the machine's share.",
        "",
        "| a transfer of a good peer, with CURVE | p50 | p99 |",
        "|---|---|---|",
    ]
    for name, samples in (
        ("alone", floods["alone"]),
        ("garbage floods another source", floods["garbage elsewhere"]),
        ("garbage floods its own source", floods["garbage here"]),
        ("requests flood another source", floods["requests elsewhere"]),
        ("requests flood its own source", floods["requests here"]),
        ("no other transfer waits", held["alone"]),
        (f"{held['held']:,} other transfers wait", held["beside"]),
    ):
        rows.append("| {} | {:,.0f} | {:,.0f} |".format(name, *_cuts(samples)))
    return rows


def _frames(found: Mapping[str, Any]) -> list[str]:
    """The five slowest."""
    words = f"the slowest of {found['number']:,} frames, CPU time of the receiver"
    rows = [f"| {words} | bytes | ms | MiB |", "|---|---|---|---|"]
    for row in found["worst"][:5]:
        where = f"{row['message']}, {row['field']}: {row['to']}, {row['state']}, {row['way']}"
        rows.append(f"| {where} | {row['bytes']:,} | {row['seconds'] * 1e3:.0f} | {row['memory'] / _MIB:.0f} |")
    return rows


def _many(found: Mapping[str, Any]) -> list[str]:
    words = f"one source, {found['peers']} sinks, {found['transfers']:,} transfers at once, CURVE"
    rows = [f"| {words} | seconds since the last | MiB | descriptors |", "|---|---|---|---|"]
    since = {
        "before": None,
        "registered": "registered_s",
        "in_flight": "accepted_s",
        "over": "arrived_s",
        "closed": None,
    }
    for name, seconds in since.items():
        state, word = found[name], name.replace("_", " ")
        time = f"{found[seconds]:.1f}" if seconds is not None else ""
        rows.append(f"| {word} | {time} | {state['rss'] / _MIB:.0f} | {state['fds']} |")
    return rows


def _growth(found: Mapping[str, Any]) -> list[str]:
    rows = [
        "| growth from the second quarter to the last | number | source: MiB, descriptors | sink: MiB, descriptors |",
        "|---|---|---|---|",
    ]
    names = {
        "messages": "transfers by sessions alone", "transfers": "transfers between a Source and a Sink",
        "sessions": "sinks that come, fetch and go",
    }  # fmt: skip
    for part, name in names.items():
        if part not in found:
            continue
        sides = [found[part]["verdicts"][side] for side in ("source", "sink")]
        cells = [f"{each['rss_grown'] / _MIB:+.1f}, {each['fds_grown']:+d}" for each in sides]
        rows.append(f"| {name} | {found[part]['number']:,} | {cells[0]} | {cells[1]} |")
    words = "A source remembers up to 65,536 used tickets until their deadlines, 300 bytes each, and grows until then."
    rows += ["", words]
    return rows


def _recovery(found: Mapping[str, Any]) -> list[str]:
    words = {
        "suspect": "from SIGSTOP of the source until the sink says suspect",
        "recovered": "from SIGCONT until it says recovered",
        "heard": "from kill -9 until a request under way is lost",
        "started": "until another source listens at the address",
        "served": "from then until a request is served",
    }
    return [
        "| a source that stops, and one that dies: seconds | median | worst |",
        "|---|---|---|",
        *(f"| {words[name]} | {np.median(found[name]):.3f} | {max(found[name]):.3f} |" for name in words),
    ]
