"""`kvproto decode`: print one frame, or one struct, field by field or byte by byte."""

import argparse
import json
import os
import string
import sys
from collections.abc import Iterator
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from kvproto.errors import KvprotoError, quoted
from kvproto.wire import decode, decode_struct, explain, messages, tables, to_json
from kvproto.wire.plain import read_file


def add(commands: Any) -> None:
    show = commands.add_parser("decode", help="print one frame, field by field; secrets are left out")
    show.add_argument("frame", help="a file, - for standard input, or hex digits")
    show.add_argument("--struct", metavar="NAME", help="decode a bare struct, such as Geometry, instead of a frame")
    how = show.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the JSON form, for programs")
    how.add_argument(
        "--bytes", action="store_true", help="print every byte with its meaning, up to the first that is wrong"
    )
    show.set_defaults(run=partial(_decode, show))


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
        print(f"error: {quoted(source)}: no such file, and not whole bytes of hex", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {quoted(source)}: {error.strerror}", file=sys.stderr)
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
