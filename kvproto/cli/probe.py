"""`kvproto probe`: measure what this machine's transports cost, for people and for `kvproto plan --costs`."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvproto.calibration import LEAST_MEMORY, Probe, probe, save
from kvproto.transport import names

SLOW = 4
"""The exit status if a path is slower than it should be."""
Tell = Callable[[str, int, int], None]


def add(commands: Any) -> None:
    parser = commands.add_parser("probe", help="measure this machine's transports: exit status 0, or 4 if one is slow")
    parser.add_argument("--quick", action="store_true", help="take under 10 seconds instead of 60")
    parser.add_argument("--json", action="store_true", help="print everything that --out writes, for programs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results for `kvproto plan --costs FILE`")
    only = f"measure only these: {', '.join(names())}"
    parser.add_argument("--transport", nargs="+", action="extend", choices=names(), metavar="NAME", help=only)
    memory = f"memory of all pools together, at least {LEAST_MEMORY >> 20} (default %(default)s)"
    parser.add_argument("--memory", type=int, default=512, metavar="MB", help=memory)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with _quiet(), _progress() as tell:
        results = probe(args.transport, args.quick, args.memory << 20, tell)
    if args.out is not None:
        save(results, args.out)
        print(f"wrote {args.out}", file=sys.stderr)
    for line in [json.dumps(results.to_dict())] if args.json else _table(results):
        print(line)
    return SLOW if results.slow() else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what libraries such as UCX write to standard output to standard error, as the former is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _progress() -> Iterator[Tell]:
    """Show progress on standard error: as a bar on a terminal with rich, otherwise as one line per path."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda what, done, all_: print(f"[{done}/{all_}] {what}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, all_: bar.update(task, description=what, completed=done, total=all_)


def _table(results: Probe) -> Iterator[str]:
    host = results.host
    gpus = f"; {len(host.gpus)} x {host.gpus[0]}, driver {host.driver}" if host.gpus else ""
    yield f"{host.cpus} CPUs, {host.machine}{gpus}; GB/s by bytes of a run"
    lengths = sorted({s.run for m in results.measured for s in m.samples})
    width = max(20, *(len(m.name) + 1 for m in results.measured))
    heads = "".join(f"{_length(n):>8}" for n in lengths)
    yield f"{'fitted on the right':{width}}{heads}  |{'link':>8}{'a run':>10}{'start':>10}"
    for m in results.measured:
        rates = {s.run: f"{s.rate / 1e9:.3g}" for s in m.samples}  # for equal lengths, the larger program comes last
        cells = "".join(f"{rates.get(n, ''):>8}" for n in lengths)
        c = m.constants
        yield f"{m.name:{width}}{cells}  |{c.link / 1e9:8.3g}{_time(c.run):>10}{_time(c.start):>10}"
    for path in results.absent:
        if not path.slow:
            yield f"not measured: {path.what}: {path.reason}" + (f" ({path.advice})" if path.advice else "")
    for slow in results.slow():
        if slow.rate is None or slow.floor is None:
            yield f"warning: {slow.what}: {slow.advice}"
        else:
            yield f"warning: {slow.what}: {slow.rate / 1e9:.2g} GB/s, below {slow.floor / 1e9:g} ({slow.advice})"


def _length(bytes_: int) -> str:
    for shift, unit in ((20, "MB"), (10, "KB")):
        if bytes_ >= 1 << shift:
            return f"{bytes_ >> shift} {unit}"
    return f"{bytes_} B"


def _time(seconds: float) -> str:
    for unit, name in ((1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e12:.3g} ps"
