"""`kvproto keygen DIR`: make the pair of CURVE keys of one engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvproto.errors import LocalError

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command and its options."""
    made = commands.add_parser("keygen", help="make the CURVE keys of an engine")
    made.add_argument(
        "folder", metavar="DIR", type=Path, help="folder for secret.key and public.key; created if missing"
    )


def run(args: argparse.Namespace) -> int:
    """Make the keys and print the public one; returns the exit status."""
    from kvproto.net import make_keys  # imported here, as the other commands need no ZeroMQ

    try:
        pair = make_keys(args.folder)
    except LocalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(pair.public.decode())
    return 0
