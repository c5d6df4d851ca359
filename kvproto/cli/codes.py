"""`kvproto errors` and `keygen`, which start without numpy and sockets."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from kvproto.errors import quoted
from kvproto.wire.enums import ErrorCode


def add(commands: Any) -> None:
    keys = commands.add_parser("keygen", help="make the CURVE keys of an engine")
    folder = "folder for secret.key and public.key; created if missing"
    keys.add_argument("folder", metavar="DIR", type=Path, help=folder)
    keys.set_defaults(run=_keygen)
    codes = commands.add_parser("errors", help="print error codes, their classes and what to do")
    codes.add_argument("code", nargs="*", help="names, or numbers such as 0x0404 (default: all codes)")
    codes.set_defaults(run=partial(_errors, codes))


def _errors(line: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    for code in [_code(line, text) for text in args.code] or ErrorCode:
        print(f"0x{code:04x} {code.name:<22} {code.error_class:<13} {code.recovery:<12} {code.__doc__}")
        if args.code:
            print(f"       what to do: docs/troubleshooting.md#{code.name}")
    return 0


def _keygen(args: argparse.Namespace) -> int:
    from kvproto.net import make_keys  # imported here, as the other commands need no ZeroMQ

    print(make_keys(args.folder).public.decode())
    return 0


def _code(line: argparse.ArgumentParser, text: str) -> ErrorCode:
    """The error code of this name or number; ends the program if there is none."""
    if text.upper() in ErrorCode.__members__:
        return ErrorCode[text.upper()]
    try:
        return ErrorCode(int(text, 0))
    except ValueError:
        from difflib import get_close_matches

        near = get_close_matches(text.upper(), ErrorCode.__members__)
        advice = f"is it {' '.join(near)}?" if near else "see `kvproto errors`"
        line.error(f"no error code {quoted(text)}; {advice}")
