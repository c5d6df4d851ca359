"""What a session costs, alone and beside others: `python benchmarks/session.py [PART ...] [--write]`.

    latency    the four messages of a transfer, one transfer after the other: bare sockets, sessions alone, Source and Sink; CURVE and ipc
    many       2,000 transfers at once of 500 sinks of one source
    held       a transfer beside 4,096 that wait, and beside none
    floods     a transfer beside a peer that sends garbage, or requests, as fast as the source takes them
    frames     the greatest frame of every message, in every state that hears it, by every way in which bytes move
    limits     what ZeroMQ does not bound: `floods.py`
    messages   1,000,000 transfers of sessions alone: do memory and descriptors grow?
    transfers  100,000 small ones of a Source and a Sink: likewise
    sessions   10,000 sinks that come, fetch and go: likewise
    recovery   a source that is stopped, and one that is killed and started again

Sources and sinks are processes of one host, over loopback. --write keeps the samples of each part that was run in
benchmarks/results/session.json, with its date and the load of the machine; the others stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq
from session_latency import latency, quantiles
from session_long import messages, recovery, sessions, transfers
from session_peers import floods, held, many

RESULTS = Path(__file__).parent / "results/session.json"


def frames(ways: int) -> dict[str, Any]:
    """The frames are made by the tests, which are imported for this part alone."""
    from worst_frames import frames

    return frames(ways)


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[int, ...], tuple[int, ...]]] = {
    "latency": (latency, (30, 100), (1, 20)),
    "many": (many, (500, 2000), (8, 32)),
    "held": (held, (20, 100), (1, 20)),
    "floods": (floods, (10, 200), (1, 20)),
    "messages": (messages, (1_000_000,), (1_024,)),
    "transfers": (transfers, (100_000,), (2_000,)),
    "sessions": (sessions, (10_000,), (40,)),
    "recovery": (recovery, (3,), (1,)),
    "frames": (frames, (6,), (1,)),
}
"""What measures each part, with which numbers, and with which in a short run, which only shows that it works."""


def ahead() -> bool:
    """Whether the scheduler gives this process, or its session, priority."""
    session = Path("/proc/self/autogroup")
    words = session.read_text().split() if session.exists() else []  # empty where the kernel keeps no groups
    return (bool(words) and int(words[-1]) < 0) or os.sched_getscheduler(0) != os.SCHED_OTHER


def facts() -> dict[str, Any]:
    """The context of the samples."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2),
        "ahead": ahead(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pyzmq")} | {"zmq": zmq.zmq_version()},
    }  # fmt: skip


def shown(found: dict[str, Any], indent: str = "  ") -> None:
    """Print figures, and quantiles in microseconds in place of samples."""
    for name, value in found.items():
        if name == "samples":
            continue
        if name == "worst":
            for row in value:
                figures = f"{row['bytes']:12,}{row['seconds'] * 1e3:8.1f} ms{row['memory'] / 2**20:7.1f} MiB"
                print(
                    f"{indent}{row['message']:14}{row['field']:32}{figures}  {row['to']}, {row['state']}, {row['way']}"
                )
        elif isinstance(value, dict) and not name.endswith("frames"):
            print(f"{indent}{name}")
            shown(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], float):
            print(f"{indent}{name:<24}{quantiles(value)} us, n {len(value)}")
        else:
            print(f"{indent}{name:<24}{value}")


def rounded(value: Any) -> Any:
    """Floats to 100 ns."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 7) if isinstance(value, float) else value


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--short", action="store_true", help="few of everything, to see that it works")
    parser.add_argument("--number", type=int, help="of transfers or sessions, in place of the default")
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    args = parser.parse_args()
    if unknown := set(args.parts) - {*PARTS, "limits"}:
        parser.error(f"unknown parts: {sorted(unknown)}")
    grown = []
    for name in args.parts or [*PARTS, "limits"]:
        if name == "limits":
            subprocess.run([sys.executable, Path(__file__).with_name("floods.py")], check=True)
            continue
        measure, full, short = PARTS[name]
        numbers = short if args.short else full if args.number is None else (args.number,)
        began, before = time.monotonic(), facts()
        found = measure(*numbers)
        print(f"{name}: {time.monotonic() - began:.0f} s, load {before['load']} before")
        shown(found)
        grown += [name] * any(not verdict["flat"] for verdict in found.get("verdicts", {}).values())
        if args.write:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            kept[name] = before | {"unit": "s", "found": rounded(found)}
            RESULTS.write_text(json.dumps(kept, separators=(",", ":")).replace('"samples"', '\n"samples"') + "\n")
    if grown and not args.short:
        print(f"memory or descriptors have grown: {', '.join(grown)}")
    return int(bool(grown) and not args.short)


if __name__ == "__main__":
    sys.exit(main())
