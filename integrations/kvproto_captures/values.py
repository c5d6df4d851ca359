"""The types of the tables: how the bytes of a frame, or a value of a map, become a checked Python value.

Number arrays in frames are in the byte order of the engines' hosts, little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import DEPTH, map_of, plain, refuse

__all__ = ["from_frame", "from_msgpack", "from_value"]

_MOST_NUMBERS = 1 << 20
_MOST_LISTS = 1 << 12
_MOST_PACKED = 8 << 20
_MOST_NAME = 1 << 9
_WIDTHS = {"u64": "<u8", "i64": "<i8", "u32": "<u4", "i32": "<i4"}
_DECIMAL = re.compile(rb"-?[0-9]{1,20}")


def from_frame(type_: str, frame: bytes, path: str) -> Any:
    """The value of one frame; raises WireError."""
    if type_.startswith("="):
        if frame != type_[1:].encode():
            raise refuse(ErrorCode.BAD_TYPE, path, repr(type_[1:]), repr(frame[:40]))
        return type_[1:]
    if type_.endswith("?"):
        return None if not frame else from_frame(type_[:-1], frame, path)
    if type_ == "u64" and len(frame) != 8:
        raise refuse(ErrorCode.BAD_LENGTH, path, "8 bytes", f"{len(frame)} bytes")
    if type_ == "u64":
        return int(struct.unpack("<Q", frame)[0])
    if type_.startswith("list<"):
        return _numbers(frame, type_[5:-1], path)
    if type_.startswith("lists<"):
        return _lists(frame, type_[6:-1], path)
    return _FRAMES[type_](frame, path)


def _text(frame: bytes, path: str) -> str:
    try:
        text = frame.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(ErrorCode.BAD_TEXT, path, "UTF-8", frame[:40].hex()) from None
    if not text.isprintable():
        raise refuse(ErrorCode.BAD_TEXT, path, "printable text", repr(text[:40]))
    return text


def _integer(frame: bytes, path: str) -> int:
    if not _DECIMAL.fullmatch(frame):
        raise refuse(ErrorCode.BAD_TYPE, path, "decimal digits", repr(frame[:40]))
    return int(frame)


def _flag(frame: bytes, path: str) -> bool:
    if frame not in (b"0", b"1"):
        raise refuse(ErrorCode.BAD_TYPE, path, "0 or 1", repr(frame[:40]))
    return frame == b"1"


def _names(frame: bytes, path: str) -> list[str]:
    return _text(frame, path).split(",") if frame else []


_FRAMES: dict[str, Callable[[bytes, str], Any]] = {
    "text": _text,
    "int": _integer,
    "flag": _flag,
    "names": _names,
    "bytes": lambda frame, path: frame,
}


def _numbers(frame: bytes | memoryview, width: str, path: str) -> list[int]:
    kind = np.dtype(_WIDTHS[width])
    if len(frame) % kind.itemsize:
        raise refuse(ErrorCode.BAD_LENGTH, path, f"a multiple of {kind.itemsize} bytes", f"{len(frame)} bytes")
    if len(frame) > _MOST_NUMBERS * kind.itemsize:
        raise refuse(ErrorCode.TOO_LARGE, path, f"at most {_MOST_NUMBERS} numbers", len(frame) // kind.itemsize)
    numbers: list[int] = np.frombuffer(frame, kind).tolist()
    return numbers


def _lists(frame: bytes, width: str, path: str) -> list[list[int]]:
    """u32 count, u32 bytes of each list, then the lists; an empty frame has no lists."""
    if not frame:
        return []
    count = struct.unpack("<I", frame[:4])[0] if len(frame) >= 4 else 0
    if len(frame) < 4 + 4 * count:
        raise refuse(ErrorCode.TRUNCATED, path, "a count, then as many lengths", f"{len(frame)} bytes, count {count}")
    if count > _MOST_LISTS:
        raise refuse(ErrorCode.TOO_LARGE, path, f"at most {_MOST_LISTS} lists", count)
    lengths = np.frombuffer(frame, "<u4", count, 4).tolist()
    ends = (4 + 4 * count + np.cumsum([0, *lengths], dtype=np.int64)).tolist()
    if ends[-1] != len(frame):
        code = ErrorCode.TRUNCATED if ends[-1] > len(frame) else ErrorCode.TRAILING_BYTES
        raise refuse(code, path, f"{ends[-1]} bytes, as the lengths say", f"{len(frame)} bytes")
    whole = memoryview(frame)
    return [
        _numbers(whole[lo:hi], width, f"{path}[{i}]") for i, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False))
    ]


def from_value(type_: str, value: Any, path: str) -> Any:
    """The value of a key or an element; raises WireError. Bytes may be given as hex, since JSON has none."""
    if type_.startswith("="):
        if value not in (type_[1:], type_[1:].encode()):
            raise refuse(ErrorCode.BAD_TYPE, path, repr(type_[1:]), _kind(value))
        return type_[1:]
    if type_.endswith("?"):
        return None if value is None else from_value(type_[:-1], value, path)
    if type_.startswith("list<"):
        if not isinstance(value, list | tuple):
            raise refuse(ErrorCode.BAD_TYPE, path, "a list", _kind(value))
        return [from_value(type_[5:-1], v, f"{path}[{i}]") for i, v in enumerate(value)]
    if type_.startswith("map<"):
        if not isinstance(value, dict):
            raise refuse(ErrorCode.BAD_TYPE, path, "a map", _kind(value))
        names = {from_value("text", k, path): v for k, v in value.items()}
        if any(len(name) > _MOST_NAME for name in names):  # they are in each value's path
            raise refuse(ErrorCode.TOO_LARGE, path, f"keys of at most {_MOST_NAME} characters", "more")
        return {k: from_value(type_[4:-1], v, f"{path}.{k}") for k, v in names.items()}
    if type_ == "bytes" and isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{2})*", value):
        return bytes.fromhex(value)
    if type_ == "any":
        return value
    if type(value) not in _KINDS[type_]:
        raise refuse(ErrorCode.BAD_TYPE, path, type_, _kind(value))
    if type_ == "text" and not value.isprintable():
        raise refuse(ErrorCode.BAD_TEXT, path, "printable text", repr(value[:40]))
    return value


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "text": (str,),
    "bytes": (bytes,),
}


def _kind(value: Any) -> str:
    return type(value).__name__


def from_msgpack(data: bytes, path: str) -> Any:
    """One msgpack value; raises WireError, also for repeated keys, extensions, NaN and deep nesting."""
    if len(data) > _MOST_PACKED:
        raise refuse(ErrorCode.TOO_LARGE, path, f"at most {_MOST_PACKED} bytes of msgpack", len(data))
    try:
        bounds = {"max_array_len": _MOST_NUMBERS, "max_map_len": _MOST_LISTS}
        value = msgpack.unpackb(data, object_pairs_hook=lambda pairs: map_of(pairs, path), **bounds)
    except msgpack.ExtraData as error:
        raise refuse(ErrorCode.TRAILING_BYTES, path, "one value", f"{len(error.extra)} bytes more") from None
    except UnicodeDecodeError:
        raise refuse(ErrorCode.BAD_TEXT, path, "UTF-8", "other bytes") from None
    except msgpack.StackError:
        raise refuse(ErrorCode.TOO_DEEP, path, f"{DEPTH} levels", "more") from None
    except (ValueError, msgpack.UnpackException) as error:
        codes = {"incomplete": ErrorCode.TRUNCATED, "exceeds": ErrorCode.TOO_LARGE}
        code = next((code for word, code in codes.items() if word in str(error)), ErrorCode.BAD_TYPE)
        raise refuse(code, path, "msgpack", error or "another byte") from None
    return plain(value, path)
