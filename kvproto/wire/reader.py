"""Strict reader of canonical msgpack: lengths meet their limits and the buffer before anything is made."""

from __future__ import annotations

from kvproto.errors import WireError
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode

__all__ = ["Reader", "refuse"]


def refuse(code: ErrorCode, path: str, mine: object, yours: object) -> WireError:
    """A WireError; `mine` is what the spec wants, `yours` what came."""
    return WireError(code, path, str(mine), str(yours))


_UINT = {0xCC: (1, 0x80), 0xCD: (2, 0x100), 0xCE: (4, 0x10000), 0xCF: (8, 0x100000000)}
"""Form to its bytes and the least value that needs it."""
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT = {0xC7: (1, 0), 0xC8: (2, 0x100), 0xC9: (4, 0x10000)}
_BIN = {0xC4: (1, 0), 0xC5: (2, 0x100), 0xC6: (4, 0x10000)}
_STR = {0xD9: (1, 32), 0xDA: (2, 0x100), 0xDB: (4, 0x10000)}
_ARRAY = {0xDC: (2, 16), 0xDD: (4, 0x10000)}
_MAP = {0xDE: (2, 16), 0xDF: (4, 0x10000)}


class Reader:
    """A cursor over one body."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.at, self._end = view, 0, len(view)

    def _byte(self, path: str) -> int:
        if self.at >= self._end:
            raise refuse(ErrorCode.TRUNCATED, path, "a value", "the end")
        value = self.view[self.at]
        self.at += 1
        return value

    def _take(self, size: int, path: str) -> memoryview:
        if size > self._end - self.at:
            raise refuse(ErrorCode.TRUNCATED, path, f"{size} bytes", f"{self._end - self.at} bytes")
        part = self.view[self.at : self.at + size]
        self.at += size
        return part

    def _number(self, form: tuple[int, int], path: str) -> int:
        value = int.from_bytes(self._take(form[0], path), "big")
        if value < form[1]:
            raise refuse(ErrorCode.NOT_CANONICAL, path, "the shortest form", f"{value} in {form[0]} bytes")
        return value

    def uint(self, path: str) -> int:
        """An integer from 0 on."""
        head = self._byte(path)
        if head < 0x80:
            return head
        form = _UINT.get(head)
        if form is None:
            raise self._wrong(head, path, "an unsigned integer")
        return self._number(form, path)

    def boolean(self, path: str) -> bool:
        """True or false."""
        head = self._byte(path)
        if head not in (0xC2, 0xC3):
            raise self._wrong(head, path, "a boolean")
        return head == 0xC3

    def _length(
        self,
        path: str,
        head: int,
        fix: tuple[int, int] | None,
        forms: dict[int, tuple[int, int]],
        kind: str,
        limit: int,
    ) -> int:
        if fix is not None and fix[0] <= head <= fix[1]:
            return head - fix[0]
        form = forms.get(head)
        if form is None:
            raise self._wrong(head, path, kind)
        size = self._number(form, path)
        if size > limit:
            raise refuse(ErrorCode.TOO_LARGE, path, limit, size)
        return size

    def map_header(self, path: str, depth: int) -> int:
        """Entries of a map; each takes two bytes at least."""
        return self._count(path, depth, (0x80, 0x8F), _MAP, "a map", 2)

    def array_header(self, path: str, depth: int) -> int:
        """Elements of a list; each takes one byte at least."""
        return self._count(path, depth, (0x90, 0x9F), _ARRAY, "a list", 1)

    def _count(
        self, path: str, depth: int, fix: tuple[int, int], forms: dict[int, tuple[int, int]], kind: str, least: int
    ) -> int:
        if depth > tables.MAX_DEPTH:
            raise refuse(ErrorCode.TOO_DEEP, path, tables.MAX_DEPTH, depth)
        count = self._length(path, self._byte(path), fix, forms, kind, tables.MAX_LIST)
        if count * least > self._end - self.at:
            raise refuse(ErrorCode.TRUNCATED, path, f"{count} entries", f"{self._end - self.at} bytes")
        return count

    def bytes(self, path: str, exact: int | None) -> memoryview:
        """A byte string, as a view."""
        size = self._length(path, self._byte(path), None, _BIN, "a byte string", tables.MAX_BYTES)
        data = self._take(size, path)
        if exact is not None and size != exact:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"{exact} bytes", f"{size} bytes")
        return data

    def text(self, path: str, low: int, high: int) -> str:
        """A UTF-8 string of low to high bytes."""
        size = self._length(path, self._byte(path), (0xA0, 0xBF), _STR, "a string", tables.MAX_STRING)
        data = self._take(size, path)
        try:
            made = str(data, "utf-8")
        except UnicodeDecodeError:
            raise refuse(ErrorCode.BAD_TEXT, path, "UTF-8", "other bytes") from None
        if not low <= size <= high:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"{low}..{high} bytes", f"{size} bytes")
        return made

    def ext(self, path: str) -> tuple[int, memoryview]:
        """Type and bytes of an extension value."""
        head = self._byte(path)
        size = _FIXEXT.get(head)
        if size is None:
            size = self._length(path, head, None, _EXT, "a number array", tables.MAX_ARRAY * 8)
            if size in (1, 2, 4, 8, 16):
                raise refuse(ErrorCode.NOT_CANONICAL, path, "the shortest form", f"{size} bytes of ext")
        return self._byte(path), self._take(size, path)

    def skip(self, path: str, depth: int) -> None:
        """A value that may be ignored, which is canonical all the same."""
        head = self.view[self.at] if self.at < self._end else self._byte(path)
        if head < 0x80 or head in _UINT:
            self.uint(path)
        elif 0x80 <= head <= 0x8F or head in _MAP:
            last = -1
            for _ in range(self.map_header(path, depth)):
                key = self.uint(path)
                if key <= last:
                    raise refuse(ErrorCode.FIELD_ORDER, path, f"above {last}", key)
                last = key
                self.skip(path, depth + 1)
        elif 0x90 <= head <= 0x9F or head in _ARRAY:
            for _ in range(self.array_header(path, depth)):
                self.skip(path, depth + 1)
        elif 0xA0 <= head <= 0xBF or head in _STR:
            self.text(path, 0, tables.MAX_STRING)
        elif head in _BIN:
            self.bytes(path, None)
        elif head in (0xC2, 0xC3):
            self.boolean(path)
        elif head in _FIXEXT or head in _EXT:
            self.ext(path)
        else:
            raise self._wrong(head, path, "a value of the canonical form")

    def _wrong(self, head: int, path: str, wanted: str) -> WireError:
        return refuse(ErrorCode.BAD_TYPE, path, wanted, f"head {head:#04x}")
