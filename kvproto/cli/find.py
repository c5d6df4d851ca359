"""`kvproto find ADDRESS ...`: which engines hold most of a prompt's cache (draft)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import KvprotoError
from kvproto.finder import Finder
from kvproto.options import Options

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command and its options."""
    command = commands.add_parser("find", help="say which source engines have most of a prompt's cache")
    command.add_argument(
        "sources", metavar="ADDRESS[=KEY]", nargs="+", help="address of any one rank of each source, and its public key"
    )
    command.add_argument(
        "--tokens", metavar="FILE", help="token ids of the prompt, separated by blanks or commas; - for standard input"
    )
    command.add_argument("--name", help="name of this router in allow-lists (default: a unique one)")
    command.add_argument("--keys", metavar="DIR", help="folder with this router's CURVE keys, made by `kvproto keygen`")
    command.add_argument("--insecure", action="store_true", help="allow TCP without keys")
    command.add_argument(
        "--wait",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for all of them (default %(default).0f)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what engines hold, the longest first; exits with 1 on errors, and with 3 if an engine did not answer."""
    try:
        tokens = [] if args.tokens is None else _tokens(args.tokens)
        sources = {address: key or None for address, _, key in (source.partition("=") for source in args.sources)}
        with Finder(sources, args.name, Options(keys=args.keys, insecure=args.insecure)) as finder:
            finder.wait(args.wait)
            engines, unknown = finder.find(tokens), finder.why()
    except (KvprotoError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"found": [attrs.asdict(held) for held in engines], "unknown": unknown}))
    else:
        for held in engines:
            of = f"{held.tokens:,} of {len(tokens):,} tokens, {held.device:,} on the device; " if tokens else ""
            print(f"{held.engine} replica {held.replica} at {held.address}: {of}{held.pages:,} pages in all")
        for address, why in unknown.items():
            print(f"{address}: {why}")
    return 3 if unknown else 0


def _tokens(file: str) -> list[int]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    return [int(token) for token in text.replace(",", " ").split()]
