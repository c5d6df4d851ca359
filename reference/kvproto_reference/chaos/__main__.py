"""`python -m kvproto_reference.chaos`: runs seeds, with a line for each and a summary."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from kvproto.net import make_keys

from . import jobs
from .breaks import BREAKS
from .plan import DECODES, ENGINES, PREFILLS, WAYS, make, transport_of
from .processes import prepare
from .report import Result, line, summary, write
from .world import Keys, World

__all__ = ["main", "seeds_of"]


def parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    made = argparse.ArgumentParser(prog="python -m kvproto_reference.chaos", description=__doc__)
    made.add_argument("--seed", type=int, help="the seed to run; with --minutes, the first of as many as fit")
    made.add_argument("--seeds", metavar="A..B", help="run seeds A to B")
    made.add_argument("--minutes", type=float, help="go on for this long")
    made.add_argument(
        "--seconds",
        type=float,
        default=2.6,
        help="duration of faults in each seed; the end takes as long again (default 2.6)",
    )
    made.add_argument(
        "--transport", choices=sorted(WAYS), default="", help="use this transport instead of the seed's own"
    )
    made.add_argument(
        "--break",
        dest="broken",
        choices=BREAKS,
        default="",
        help="build a fault into the engines; exit status 0 if it is found",
    )
    made.add_argument("--jobs", type=int, default=1, help="seeds to run at a time (default 1)")
    made.add_argument("--show", action="store_true", help="print what the seeds would do, and do nothing")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--json", type=Path, help="write the summary to this file")
    return made


def keys_in(folder: Path) -> Keys:
    """Fresh key pairs, and an allow-list that knows the proxy."""
    made = {name: make_keys(folder / name) for name in ENGINES}
    front = make_keys(folder / "front")
    backs = {name: make_keys(folder / f"back-{name}") for name in DECODES}
    rows = [
        f'[[client]]\nkey = "{keys.public.decode()}"\nengine = "{engine}"\n'
        for name, keys in backs.items()
        for engine in (name, f"{name}-router")
    ]
    for name in PREFILLS:
        (folder / name / "allow.toml").touch(0o600)  # whatever the umask
        (folder / name / "allow.toml").write_text("\n".join(rows))
    return Keys(folder, made, front, backs)


def seeds_of(args: argparse.Namespace) -> Iterator[int]:
    """The seeds of a command."""
    if args.seeds:
        first, _, last = args.seeds.partition("..")
        yield from range(int(first), int(last or first) + 1)
        return
    until = time.monotonic() + 60 * args.minutes if args.minutes else None
    seed = args.seed if args.seed is not None else 0
    yield seed
    while until is not None and time.monotonic() < until:
        seed += 1
        yield seed


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a seed has a violation, or if a fault that was built in was not found."""
    args = parser().parse_args(argv)
    transport = args.transport or (BREAKS[args.broken].transport if args.broken else "")
    seeds = list(seeds_of(args)) if args.minutes is None else range(10)
    args.transport, args.nixl = transport, args.nixl or "nixl" in {transport or transport_of(seed) for seed in seeds}
    if args.worker:
        for found in run(args, (int(each) for each in sys.stdin)):
            print(json.dumps(attrs.asdict(found)), flush=True)
        return 0
    if args.show:
        for seed in seeds_of(args):
            print("\n".join(make(seed, args.seconds, args.transport).lines()))
        return 0
    results = []
    for found in jobs.results(seeds_of(args), args) if args.jobs > 1 else run(args, seeds_of(args)):
        results.append(found)
        print(line(found), flush=True)
        for each in found.violations:
            print(f"      {each.kind}: {each.text}", flush=True)
        if args.broken and _kinds([found]) & BREAKS[args.broken].kinds:
            break
    if args.json:
        write(args.json, results)
    print(json.dumps(summary(results), indent=1))
    if args.broken:
        return 0 if _kinds(results) & BREAKS[args.broken].kinds else 1
    return 1 if _kinds(results) else 0


def _kinds(results: list[Result]) -> set[str]:
    return {each.kind for found in results for each in found.violations}


def run(args: argparse.Namespace, seeds: Iterable[int]) -> Iterator[Result]:
    """Run one seed after the other."""
    prepare(args.nixl)
    with tempfile.TemporaryDirectory(prefix="kvproto-chaos-") as folder:
        keys = keys_in(Path(folder))
        for seed in seeds:
            yield World(make(seed, args.seconds, args.transport), keys, args.broken).run()


if __name__ == "__main__":
    sys.exit(main())
