"""`kvproto tail` and `kvproto top`: follow what Sources and Sinks do."""

from __future__ import annotations

import argparse
import io
import json
import selectors
import sys
from collections.abc import Sequence
from typing import Any

from kvproto.cli.feeds import FeedReader, said, taken
from kvproto.cli.top import top
from kvproto.errors import KvprotoError

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
            return top(feeds, selector, args.once)
    except (OSError, ValueError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _tail(feeds: Sequence[FeedReader], selector: selectors.BaseSelector, whole: bool) -> int:
    for _, line in taken(feeds, selector, None):
        if whole:
            print(json.dumps(line), flush=True)
        elif line["kind"] != "metrics":
            print(said(line), flush=True)
    return 0
