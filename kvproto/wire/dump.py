"""An annotated dump of a frame for human readers: what each byte is, up to the first that is wrong."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvproto.errors import WireError
from kvproto.wire import tables
from kvproto.wire.codec import Buffer, decode, decode_struct, message_class
from kvproto.wire.strict import read_whole

_WIDTH = 12
"""Bytes on a line."""
_LINES = 3
"""Lines of one long value; the rest is left out."""
_ELEMENTS = 8
"""Numbers of an array that are shown."""


def explain(buffer: Buffer, struct: str | None = None, secrets: bool = False) -> str:
    """A frame, or a bare struct, line by line: offset, bytes and meaning, then a verdict; secrets if `secrets`."""
    data = memoryview(buffer).tobytes()
    lines = list(_envelope(data)) if struct is None else []
    trace: list[tuple[int, str, Any]] = []
    try:
        value: Any = decode(data) if struct is None else decode_struct(tables.CLASSES[struct], data)
        verdict = f"{type(value).__name__}: good"
    except WireError as error:
        verdict = f"refused: {error.between('expected', 'found', ' ')}"
    with contextlib.suppress(WireError):
        name = message_class(data).__name__ if struct is None else struct
        start = tables.HEADER_BYTES if struct is None else 0
        with contextlib.suppress(WireError):
            read_whole(name, memoryview(data)[start:], trace)
        lines += _body(name, data, start, trace, secrets)
    return "\n".join([*lines, verdict])


def _row(at: int, data: bytes, text: str) -> Iterator[str]:
    shown = [data[i : i + _WIDTH] for i in range(0, len(data), _WIDTH)] or [b""]
    for i, piece in enumerate(shown[:_LINES]):
        dots = " ..." if i == _LINES - 1 and len(shown) > _LINES else ""
        yield f"{at + i * _WIDTH:>6}  {piece.hex(' ') + dots:<{3 * _WIDTH}} {text if not i else ''}".rstrip()


_HEADER = (
    (0, 4, "magic"),
    (4, 1, "major"),
    (5, 1, "minor"),
    (6, 2, "type"),
    (8, 2, "flags"),
    (10, 2, "reserved"),
    (12, 4, "body length"),
)


def _envelope(data: bytes) -> Iterator[str]:
    for at, size, name in _HEADER:
        piece = data[at : at + size]
        if piece:
            value = repr(piece.decode("latin-1")) if name == "magic" else str(int.from_bytes(piece, "little"))
            if name == "type":
                value = f"{int.from_bytes(piece, 'little'):#06x}"
                with contextlib.suppress(WireError):
                    value += f" {message_class(data).__name__}"
            yield from _row(at, piece, f"{name} = {value}")


def _body(name: str, data: bytes, base: int, trace: list[tuple[int, str, Any]], secrets: bool) -> Iterator[str]:
    """Walk the marks of the strict reader; a container opens with its mark and ends with "end"."""
    body, start = data[base:], 0
    label = ""
    stack: list[str] = []
    for at, kind, note in trace:
        piece, offset = body[start:at], base + start
        indent = "  " * (len(stack) + 1)
        if kind == "map":
            stack.append(str(note).split(",")[0])
            yield from _row(offset, piece, f"{indent[2:]}{label}{': ' if label else ''}{note}")
        elif kind == "list":
            stack.append("")
            yield from _row(offset, piece, f"{indent[2:]}{label}: list, {note}")
        elif kind == "end":
            stack.pop()
        elif kind == "element":
            label = f"[{note}]"
            continue
        elif kind == "id":
            owner = next((s for s in reversed(stack) if s), name)
            number = next((row[0] for row in tables.FIELDS[owner] if row[1] == note), None)
            label = f"{number} {note}" if number is not None else str(note)
            continue
        else:
            owner = next((s for s in reversed(stack) if s), name)
            hidden = not secrets and label.partition(" ")[2] in tables.SECRET[owner]
            shown = b"" if hidden else piece
            text = (
                "(ignored)"
                if kind == "skipped"
                else f"= (secret, {len(piece)} bytes with its id)"
                if hidden
                else f"= {_value(note)}"
            )
            yield from _row(offset, shown, f"{indent[2:]}{label} {text}")
        start = at
    if start < len(body):
        rest = body[start:] if secrets or not _secretive(name) else b""
        yield from _row(base + start, rest, f"{label} (not read: {len(body) - start} bytes)".lstrip())


def _secretive(name: str) -> bool:
    """Tell if a message or struct holds a secret field, at any depth."""
    inner = (row[2].rpartition("struct:")[2].rstrip(">") for row in tables.FIELDS[name] if "struct:" in row[2])
    return bool(tables.SECRET[name]) or any(map(_secretive, inner))


def _value(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, np.ndarray):
        shown = ", ".join(map(str, value[:_ELEMENTS].tolist())) + (", ..." if value.size > _ELEMENTS else "")
        return f"{value.dtype.name} [{shown}] ({value.size})"
    return getattr(value, "name", None) or repr(value)
