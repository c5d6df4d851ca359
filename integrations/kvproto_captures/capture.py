"""Captures, the files that messages come in: hex, JSON, the bytes of a ZeroMQ connection, msgpack, pickles, logs.

docs/import.md shows each. A capture is read whole, and refused if anything in it cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import attrs

from kvproto.errors import WireError
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_json, refuse
from kvproto_captures.pickles import objects
from kvproto_captures.tables import MessageTable, engines
from kvproto_captures.values import from_msgpack, from_value

__all__ = ["RawMessage", "messages"]

"""Bytes of a capture."""
_MOST_TEXT = 8 << 20
_MOST_FRAMES = 64
_MOST_MESSAGES = 1 << 12
_GREETING = 64
"""Bytes of ZMTP before the first frame: signature, version, mechanism (RFC 23 of ZeroMQ)."""


@attrs.frozen
class RawMessage:
    """A message before it is known what it is."""

    path: str
    value: Any
    """Frames, or a map or list of plain values."""
    form: str
    """The form of messages that it may have."""
    engine: str = ""
    release: str = ""
    """The engine's, if the capture notes it."""
    kind: str = ""
    """Name of the class in a pickle, or the marker of a line."""

    def may_be(self, message: MessageTable) -> bool:
        """Whether its form, its kind and its first frames are those of a message."""
        if self.form != message.form or (self.kind and self.kind not in (*message.classes, message.marker)):
            return False
        return self.form != "frames" or list(self.value[: len(message.head)]) == message.head

    def summary(self) -> str:
        """Its contents, for an error."""
        if self.form == "frames":
            return f"{len(self.value)} frames, the first {self.value[0][:16].hex() if self.value else 'absent'}"
        return f"{self.kind or type(self.value).__name__} of {', '.join(map(str, islice(self.value, 8)))}"


def messages(data: bytes) -> list[RawMessage]:
    """The messages of a capture, in order; raises WireError."""
    read: list[RawMessage] = []
    for raw in _messages(data):
        if len(read) == _MOST_MESSAGES:
            raise refuse(ErrorCode.TOO_LARGE, "messages", f"at most {_MOST_MESSAGES}", "more")
        if raw.form == "frames" and len(raw.value) > _MOST_FRAMES:
            raise refuse(ErrorCode.TOO_LARGE, f"{raw.path}.frames", f"at most {_MOST_FRAMES}", len(raw.value))
        read.append(raw)
    if not read:
        raise refuse(ErrorCode.MISSING_FIELD, "messages", "at least one message", "none")
    return read


def _messages(data: bytes) -> Iterator[RawMessage]:
    if data[:1] == b"\xff" and data[9:10] == b"\x7f":
        yield from _zmtp(data)
    elif data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and data[-1:] == b".":
        for i, (kind, attributes) in enumerate(objects(data, "messages[0]")):
            yield RawMessage(f"messages[{i}]", attributes, "map", kind=kind)
    elif data[:1] and (0x80 <= data[0] <= 0x9F or 0xDC <= data[0] <= 0xDF):
        value = from_msgpack(data, "messages[0]")
        yield RawMessage("messages[0]", value, "map" if isinstance(value, dict) else "array")
    else:
        yield from _text(data)


def _zmtp(data: bytes) -> Iterator[RawMessage]:
    """One direction of a connection; its commands, and the empty frame that REQ and ROUTER put first, are left out."""
    at, count, steps = _GREETING, 0, 0
    frames: list[bytes] = []
    if len(data) < at:
        raise refuse(ErrorCode.TRUNCATED, "capture", f"a greeting of {at} bytes", len(data))
    while at < len(data):
        steps += 1
        if steps > _MOST_FRAMES * _MOST_MESSAGES:
            raise refuse(ErrorCode.TOO_LARGE, "capture", f"{_MOST_FRAMES * _MOST_MESSAGES} frames and commands", "more")
        flags, size = data[at], 8 if data[at] & 2 else 1
        path = f"messages[{count}].frames[{len(frames)}]"
        if flags & ~7:
            raise refuse(ErrorCode.UNKNOWN_FLAG, path, "flags of a ZMTP frame", hex(flags))
        length = int.from_bytes(data[at + 1 : at + 1 + size], "big")
        at += 1 + size
        if at + length > len(data):
            raise refuse(ErrorCode.TRUNCATED, path, f"{length} bytes", f"{max(len(data) - at, 0)} bytes")
        body = data[at : at + length]
        at += length
        command, more = flags & 4, flags & 1
        if command:
            continue
        if frames or body or not more:
            _append(frames, body, count)
        if not more:
            yield _framed(count, frames)
            frames, count = [], count + 1
    if frames:
        raise refuse(ErrorCode.TRUNCATED, f"messages[{count}]", "a last frame", "more to follow")


def _append(frames: list[bytes], frame: bytes, index: int) -> None:
    """Append a frame to the message of that index, which is refused before it has too many."""
    if len(frames) == _MOST_FRAMES:
        raise refuse(ErrorCode.TOO_LARGE, f"messages[{index}].frames", f"at most {_MOST_FRAMES}", "more")
    frames.append(frame)


def _framed(index: int, frames: list[bytes], engine: str = "", release: str = "") -> RawMessage:
    return RawMessage(f"messages[{index}]", tuple(frames), "frames", engine, release)


def _text(data: bytes) -> Iterator[RawMessage]:
    if len(data) > _MOST_TEXT:
        raise refuse(ErrorCode.TOO_LARGE, "capture", f"at most {_MOST_TEXT} bytes of text", len(data))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(ErrorCode.UNKNOWN_MESSAGE, "capture", "a capture, see docs/import.md", data[:16].hex()) from None
    lines = text.split("\n")
    if all(map(_is_hex, lines)):
        return _hex(lines)
    if text.lstrip()[:1] in ("{", "[") and not _is_log(lines):
        return _json(text, lines)
    return _log(lines)


def _is_log(lines: list[str]) -> bool:
    """Whether the first line is not JSON, such as "[2025-05-06 06:24:25] ...", and a line has a marker of a table."""
    if not any(marker in line for line in lines for marker in _markers()):
        return False
    try:
        read_json(next(filter(str.strip, lines)), "messages[0]")
    except WireError:
        return True
    return False


def _is_hex(line: str) -> bool:
    digits = line.strip()
    try:
        return digits[:1] == "#" or digits == "-" or bytes.fromhex(digits) is not None
    except ValueError:
        return False


def _hex(lines: list[str]) -> Iterator[RawMessage]:
    """One frame on a line, - for an empty one, a blank line between messages, # before a comment."""
    frames: list[bytes] = []
    count = 0
    for line in [*lines, ""]:
        digits = line.strip()
        if digits.startswith("#"):
            continue
        if digits:
            _append(frames, b"" if digits == "-" else bytes.fromhex(digits), count)
        elif frames:
            yield _framed(count, frames)
            frames, count = [], count + 1


def _json(text: str, lines: list[str]) -> Iterator[RawMessage]:
    """One value, or one on each line: a record with `frames` or `json`, a message's own map, or a list of these."""
    values: Iterable[Any]
    try:
        whole = read_json(text, "messages[0]")
        values = whole if isinstance(whole, list) else [whole]
    except WireError:
        full = [line for line in lines if line.strip()]
        if len(full) < 2:
            raise
        values = (read_json(line, f"messages[{i}]") for i, line in enumerate(full))
    for i, value in enumerate(values):
        path = f"messages[{i}]"
        if not isinstance(value, dict):
            raise refuse(ErrorCode.BAD_TYPE, path, "an object", type(value).__name__)
        notes = [from_value("text", value.get(key, ""), f"{path}.{key}") for key in ("package", "release")]
        if "frames" in value:
            yield _framed(i, from_value("list<bytes>", value["frames"], f"{path}.frames"), *notes)
        elif "json" in value:
            yield RawMessage(path, value["json"], "map", *notes)
        else:
            yield RawMessage(path, value, "map")


_PAIR = re.compile(r"(\b\w{1,60}=|'\w{1,60}': )('[^']{0,400}'|\"[^\"]{0,400}\"|[^\s,()}]{1,400})")


def _markers() -> dict[str, str]:
    """The name of the engine by marker."""
    return {m.marker: e.name for e in engines().values() for m in e.messages if m.marker}


def _log(lines: list[str]) -> Iterator[RawMessage]:
    """Lines with a marker of a table, by the NAME=VALUE or 'NAME': VALUE after it."""
    markers = _markers().items()
    marked = ((line, marker, engine) for line in lines for marker, engine in markers if marker in line)
    for i, (line, marker, engine) in enumerate(marked):
        values: dict[str, str] = {}
        for key, value in _PAIR.findall(line.partition(marker)[2]):
            if value != "None":
                values.setdefault(key.strip("'=: "), value.strip("'\""))
        yield RawMessage(f"messages[{i}]", values, "log", engine, kind=marker)
