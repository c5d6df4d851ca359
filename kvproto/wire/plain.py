"""JSON of unknown origin, before its meaning is known: reading it costs little, and no key may occur twice."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvproto.errors import WireError, printable
from kvproto.wire.enums import ErrorCode

MOST_BYTES = 64 << 20
"""The most bytes of a file that are read."""
DEPTH = 16
"""The most levels of maps and lists within each other."""
_SHOWN = 200


def refuse(code: ErrorCode, path: str, mine: object, yours: object, advice: str = "") -> WireError:
    """A WireError whose texts are shortened and without control characters, as they may be what was read."""
    return WireError(code, _shown(path), _shown(mine), _shown(yours), advice)


def _shown(value: object) -> str:
    text = str(value)
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return printable(text)


def read_file(path: str | Path) -> bytes:
    """The content of a file, or of stdin ("-"); raises OSError, and WireError(TOO_LARGE) beyond `MOST_BYTES`."""
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise refuse(ErrorCode.TOO_LARGE, str(path), f"at most {MOST_BYTES} bytes", "more")
    return content


def read_json(text: str | bytes, path: str, finite: bool = True) -> Any:
    """The value of a JSON text; raises WireError, also for repeated keys, deep nesting, and what is not `finite`."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value = json.loads(decoded, object_pairs_hook=lambda pairs: map_of(pairs, path))
    except RecursionError:
        raise refuse(ErrorCode.TOO_DEEP, path, f"{DEPTH} levels", "more") from None
    except ValueError as error:
        raise refuse(ErrorCode.BAD_TYPE, path, "JSON", f"other text: {error}") from None
    return plain(value, path, finite)


def map_of(pairs: Iterable[tuple[Any, Any]], path: str) -> dict[Any, Any]:
    """A map of these pairs; raises WireError if a key occurs twice."""
    entries: dict[Any, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise refuse(ErrorCode.REPEATED, path, "each key once", key)
        entries[key] = value
    return entries


def plain(value: Any, path: str, finite: bool = True, depth: int = 0) -> Any:
    """The value itself, if it has plain types, at most `DEPTH` levels and finite numbers; raises WireError if not."""
    if depth > DEPTH:
        raise refuse(ErrorCode.TOO_DEEP, path, f"{DEPTH} levels", "more")
    if isinstance(value, dict | list):
        for held in value.values() if isinstance(value, dict) else value:
            plain(held, path, finite, depth + 1)
    elif isinstance(value, float) and finite and not math.isfinite(value):
        raise refuse(ErrorCode.OUT_OF_RANGE, path, "a finite number", value)
    elif not isinstance(value, str | bytes | int | float | None):
        raise refuse(ErrorCode.BAD_TYPE, path, "plain values", type(value).__name__)
    return value
