"""`kvproto`: the command line, with the commands that read frames and the tables of the specification."""

import argparse
import json
import os
import string
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from kvproto import __version__
from kvproto.cli import plans, probe, tiers, top
from kvproto.errors import KvprotoError
from kvproto.wire import decode, decode_struct, explain, messages, tables, to_json
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_file

GROUP = "kvproto.commands"
"""The entry points of other packages: functions that add a command with its `run`, or options to another command."""
_KNOWN = {
    "describe": "write the Description of a model and its parallel sizes, as JSON",
    "import": "read a capture of another engine's messages",
}
"""Commands of packages that come with kvproto."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # as with `kvproto ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KvprotoError, OSError, ValueError) as error:
        said = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else error
        print(f"error: {said}", file=sys.stderr)
        return 1
    return status


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvproto", description="Tools for the contract by which LLM engines hand over KV caches."
    )
    parser.add_argument("--version", action="version", version=f"kvproto {__version__}, spec {tables.SPEC}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("decode", help="print one frame, field by field; secrets are left out")
    show.add_argument("frame", help="a file, - for standard input, or hex digits")
    show.add_argument("--struct", metavar="NAME", help="decode a bare struct, such as Geometry, instead of a frame")
    how = show.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the JSON form, for programs")
    how.add_argument(
        "--bytes", action="store_true", help="print every byte with its meaning, up to the first that is wrong"
    )
    show.set_defaults(run=partial(_decode, parser))
    for module in (plans, probe, tiers, top):
        module.add(commands)
    keys = commands.add_parser("keygen", help="make the CURVE keys of an engine")
    folder = "folder for secret.key and public.key; created if missing"
    keys.add_argument("folder", metavar="DIR", type=Path, help=folder)
    keys.set_defaults(run=_keygen)
    codes = commands.add_parser("errors", help="print error codes, their classes and what to do")
    codes.add_argument("code", nargs="*", help="names, or numbers such as 0x0404 (default: all codes)")
    codes.set_defaults(run=partial(_errors, parser))
    _add_of_packages(commands)
    for listed in commands._choices_actions:  # `kvproto COMMAND --help` begins with what `kvproto --help` says
        text = listed.help or ""
        commands.choices[listed.dest].description = f"{text[:1].upper()}{text[1:]}."
    return parser


def _add_of_packages(commands: Any) -> None:
    """Add the commands of other packages; one that cannot be loaded says so when it is called."""
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted({*entries, *_KNOWN}):
        try:
            if name not in entries:
                raise ImportError("no installed package has it")
            add = entries[name].load()
        except (ImportError, AttributeError) as error:
            absent = commands.add_parser(name, help=_KNOWN.get(name, "(broken)"), prefix_chars="\0", add_help=False)
            absent.add_argument("rest", nargs="*")
            absent.set_defaults(run=partial(_absent, f"{name!r} of the entry points {GROUP}: {error}"))
        else:
            add(commands)


def _absent(reason: str, args: argparse.Namespace) -> int:
    print(f"error: {reason} (install its package again; of kvproto: pip install -e . in a checkout)", file=sys.stderr)
    return 1


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
        near = get_close_matches(text.upper(), ErrorCode.__members__)
        advice = f"is it {' '.join(near)}?" if near else "see `kvproto errors`"
        line.error(f"no error code {_short(text)}; {advice}")


def _decode(line: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    source, struct = args.frame, args.struct
    if struct is not None and struct not in tables.FIELDS:
        line.error(f"no struct {struct!r}; there are {', '.join(sorted(tables.FIELDS))}")
    try:
        data = _read(source)
        if args.bytes:
            text = explain(data, struct)
            print(text)
            return 1 if text.splitlines()[-1].startswith("refused") else 0
        message: Any = decode(data) if struct is None else decode_struct(getattr(messages, struct), data)
    except KvprotoError as error:
        doc = (error.code.__doc__ or "").rstrip(".")
        print(f"error: {doc[0].lower()}{doc[1:]} ({error.between('expected', 'found', ' ')})", file=sys.stderr)
        return 1
    except FileNotFoundError:
        print(f"error: {_short(source)}: no such file, and not whole bytes of hex", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {_short(source)}: {error.strerror}", file=sys.stderr)
        return 1
    if args.json:
        kind = "message" if struct is None else "struct"
        print(json.dumps({kind: type(message).__name__, "fields": to_json(message, redact=True)}))
        return 0
    print(f"{type(message).__name__} (0x{message.TYPE:04x})" if struct is None else struct)
    for text in _lines(message, "  "):
        print(text)
    return 0


def _read(source: str) -> bytes:
    # os.path.exists is False for names that are too long, where Path.exists raises
    digits = "".join(source.split())
    if digits and not len(digits) % 2 and set(digits) <= set(string.hexdigits) and not os.path.exists(source):
        return bytes.fromhex(digits)
    return read_file(source)


def _short(source: str) -> str:
    return repr(source if len(source) <= 64 else source[:61] + "...")


def _lines(value: Any, indent: str) -> Iterator[str]:
    cls = type(value).__name__
    for number, name, type_, *_ in tables.FIELDS[cls]:
        item = getattr(value, name)
        if item is None:
            continue
        head = f"{indent}{number:>3} {name}"
        unit = tables.UNITS[cls][name]
        note = f"{type_}, {unit}" if unit else type_
        if name in tables.SECRET[cls]:
            yield f"{head} = (secret)  ({note})"
        elif type_.startswith("struct:"):
            yield f"{head}:"
            yield from _lines(item, indent + "    ")
        elif type_.startswith("list<struct:"):
            yield f"{head}: {len(item)}"
            for i, part in enumerate(item):
                yield f"{indent}    [{i}]"
                yield from _lines(part, indent + "      ")
        else:
            yield f"{head} = {_text(item)}  ({note})"


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{value[:32].hex()}{'...' if len(value) > 32 else ''} [{len(value)} bytes]"
    if isinstance(value, np.ndarray):
        return f"{np.array2string(value, threshold=16, separator=', ')} [{value.size}]"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return value.name if isinstance(value, IntEnum) else repr(value)


if __name__ == "__main__":
    sys.exit(main())
