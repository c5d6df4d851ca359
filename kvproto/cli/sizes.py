"""Options of `kvproto describe` that state how an engine divides its caches among its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvproto.errors import LocalError
from kvproto.planning.layout import DEALS, Parallel
from kvproto.wire.enums import ErrorCode

__all__ = ["add_options", "own_of", "parallel_of"]


_SIZES = {
    "tp": "tensor parallel ranks",
    "pp": "pipeline stages",
    "cp": "context parallel ranks for each TP rank",
    "dcp": "TP ranks that deal the tokens among themselves in decode",
    "interleave": "consecutive tokens that a cp or dcp rank stores",
}


def add_options(made: argparse.ArgumentParser) -> None:
    """Add the options for parallel sizes, of all caches and of single ones."""
    for name, text in _SIZES.items():
        made.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{text} (default 1)")
    made.add_argument(
        "--origin", type=int, default=0, metavar="N", help="token at which cp or dcp ranks begin the deal (default 0)"
    )
    made.add_argument(
        "--deal", default="cyclic", metavar="NAME|R,R,...",
        help=f"{', '.join(DEALS)}, or the cp rank of each run of --interleave tokens until the pattern repeats",
    )  # fmt: skip
    for name, what in (("sharded", "deal among themselves"), ("replicated", "each store whole")):
        text = f"name of a cache that cp or dcp ranks {what}; may be repeated"
        made.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=text)
    made.add_argument("--pp-layers", metavar="N,N,...", help="layers of each stage, if not equal")
    made.add_argument("--virtual", type=int, default=1, metavar="N", help="chunks of layers per stage (default 1)")
    made.add_argument(
        "--own", action="append", default=[], metavar="NAME:SIZE=N,...",
        help=f"sizes of the cache NAME ({', '.join(_OWN)}; lists as 1+2+1); may be repeated",
    )  # fmt: skip


def parallel_of(args: argparse.Namespace) -> Parallel:
    """The sizes of all caches; raises LocalError for a list that is not of numbers."""
    stages = _list("pp_layers", args.pp_layers, ",") if args.pp_layers else None
    deal = _deal("deal", args.deal, ",")
    return Parallel(args.tp, args.pp, args.cp, args.dcp, args.interleave, args.origin, stages, args.virtual, deal)


def own_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sizes of single caches by name, as `Cache.over` accepts them; raises LocalError for malformed text."""
    found: dict[str, dict[str, Any]] = {}
    for text in args.own:
        name, _, sizes = text.partition(":")
        pairs = [size.partition("=")[::2] for size in sizes.split(",")]
        if name in found or any(key not in _OWN for key, _ in pairs) or len(dict(pairs)) < len(pairs):
            wanted = f"NAME:SIZE=N,..., each cache and size once, of the sizes {', '.join(_OWN)}"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "own", wanted, text)
        found[name] = {key: _OWN[key](f"own {name}.{key}", value) for key, value in pairs}
    return found


def _number(path: str, text: str) -> int:
    return _list(path, text, "+", 1)[0]


def _list(path: str, text: str, between: str = "+", most: int | None = None) -> tuple[int, ...]:
    parts = text.split(between)
    if not all(part.strip().isdecimal() for part in parts) or (most is not None and len(parts) > most):
        raise LocalError(ErrorCode.OUT_OF_RANGE, path, "a number" if most else f"numbers, with {between} between", text)
    return tuple(int(part) for part in parts)


def _deal(path: str, text: str, between: str = "+") -> str | tuple[int, ...]:
    return _list(path, text, between) if text[:1].isdecimal() else text


def _copies(path: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise LocalError(ErrorCode.OUT_OF_RANGE, path, "yes or no", text)
    return text == "yes"


_OWN: dict[str, Callable[[str, str], Any]] = {
    "tp": _number, "cp": _number, "dcp": _number, "interleave": _number, "origin": _number, "deal": _deal,
    "stages": _list, "virtual": _number, "copies": _copies,
}  # fmt: skip
"""The sizes that can be set for a single cache, and how their text is read."""
