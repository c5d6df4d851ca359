"""Boundary vectors: for every field and rule of the registry, frames just inside and just outside of it.

Frames are put together from the registry and the prose, without the codec, as trees of raw msgpack; what a reader must
say about each follows from how it was made, not from running one. Every negative case breaks exactly one rule.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from tools.specgen.registry import SPEC, Facts, version

_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_UNKNOWN, _GREASE, _OPEN = 0x3FFF, 0x801B, 0xF0F0

Node = Any
"""Map: dict of id to Node; list: list of Nodes; anything else: raw bytes of a value."""
Case = dict[str, Any]


_PRESENCE = ("present_iff", "only_if")
_RULE = "KVP-RULE-BREAK"
_BARE = ("Geometry", "Ticket", "Content", "Manifest")
"""Structs that also occur outside messages: in a byte string, with a prompt, under a digest."""


def vectors(facts: Facts) -> dict[Path, str]:
    """A file for each message and each bare struct. The fields of a kind of struct are tested once, where it occurs first."""
    files = {}
    judged: set[str] = set()
    for name in (*facts["message"], *_BARE):
        cases = list(Body(facts, name, judged).cases())
        lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
        head = f'{{"suite": "{name}", "version": "{version(facts)}", "made": "by tools.specgen from the registry", "cases": [\n'
        number = f"{facts['message'][name]['id']:04x}" if name in facts["message"] else "struct"
        files[SPEC / f"vectors/codec/{number}-{name}.json"] = f"{head}{lines}\n]}}\n"
    return files


def turned(owner: str, field: Facts) -> int:
    """A number of a field, by which it takes some of many cases: its own, so that no other field changes which."""
    return zlib.crc32(f"{owner}.{field['name']}".encode())


def uint(value: int) -> bytes:
    """Canonical unsigned integer."""
    for limit, head, form in (
        (0x80, b"", "B"),
        (1 << 8, b"\xcc", "B"),
        (1 << 16, b"\xcd", "H"),
        (1 << 32, b"\xce", "I"),
        (1 << 64, b"\xcf", "Q"),
    ):
        if value < limit:
            return head + struct.pack(f">{form}", value)
    raise ValueError(value)


def _headed(size: int, fix: tuple[int, int] | None, heads: tuple[int, ...]) -> bytes:
    """Header of a value of `size`: the fixed form if it fits, else the shortest of 8, 16, 32 bits that `heads` has."""
    if fix is not None and size < fix[1]:
        return bytes((fix[0] | size,))
    for width, head in zip((1, 2, 4), heads, strict=True):
        if head and size < 1 << 8 * width:
            return bytes((head,)) + size.to_bytes(width, "big")
    raise ValueError(size)


def text(value: str) -> bytes:
    """Canonical string."""
    data = value.encode()
    return _headed(len(data), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + data


def binary(data: bytes) -> bytes:
    """Canonical byte string."""
    return _headed(len(data), None, (0xC4, 0xC5, 0xC6)) + data


def numbers(values: list[int], width: int | None = None) -> bytes:
    """Number array; of the narrowest width unless one is given."""
    top = max(values, default=0)
    width = width or next(w for w in (1, 2, 4, 8) if top < 1 << 8 * w)
    data = b"".join(v.to_bytes(width, "little") for v in values)
    return ext({1: 1, 2: 2, 4: 3, 8: 4}[width], data)


def ext(code: int, data: bytes) -> bytes:
    """Canonical ext value."""
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(data))
    head = bytes((fixed,)) if fixed else _headed(len(data), None, (0xC7, 0xC8, 0xC9))
    return head + bytes((code,)) + data


def raw(node: Node) -> bytes:
    """Bytes of a tree."""
    if isinstance(node, dict):
        return _headed(len(node), (0x80, 16), (0, 0xDE, 0xDF)) + b"".join(uint(k) + raw(v) for k, v in node.items())
    if isinstance(node, list):
        return _headed(len(node), (0x90, 16), (0, 0xDC, 0xDD)) + b"".join(map(raw, node))
    encoded: bytes = node
    return encoded


@attrs.frozen
class _Value:
    """A value, as msgpack and as JSON."""

    node: Node
    json: Any


def _replaced(node: Node, path: tuple[int, ...], new: Node | None) -> Node:
    """The tree with the node at a path of field ids and indices replaced; None removes it."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(node, list):
        return [_replaced(v, rest, new) if i == step else v for i, v in enumerate(node)]
    changed = {k: _replaced(v, rest, new) if k == step else v for k, v in node.items()}
    if step not in node and new is not None:
        changed = dict(sorted((changed | {step: new}).items()))
    return {k: v for k, v in changed.items() if v is not None}


_WRONG: dict[str, list[tuple[str, bytes, str]]] = {
    "int": [
        ("nil", b"\xc0", "nil is never a value"), ("float", b"\xca\x3f\x80\x00\x00", "floats do not occur"),
        ("negative", b"\xff", "a reader that casts gets 2^64 - 1"), ("text", b"\xa11", "digits are no number"),
        ("bool", b"\xc3", "true is not 1"), ("nan", b"\xcb\x7f\xf8" + bytes(6), "not even a number"),
    ],
    "str": [("bytes", b"\xc4\x01a", "bytes are no text"), ("nil", b"\xc0", "absent is left out"), ("int", b"\x01", "a number is no text")],
    "bytes": [("text", b"\xa1a", "text is no bytes"), ("nil", b"\xc0", "absent is left out"), ("int", b"\x01", "a number is no bytes")],
    "array": [
        ("list", b"\x91\x01", "a list of integers costs 20 times as much to read"), ("bytes", b"\xc4\x01\x01", "bytes have no width"),
        ("signed", b"\xd4\x05\x01", "a signed array where ids are unsigned"), ("timestamp", b"\xd6\xff\x00\x00\x00\x00", "timestamps do not occur"),
    ],
    "list": [("map", b"\x80", "a map is no list"), ("nil", b"\xc0", "empty is not nil"), ("array", b"\xd4\x01\x01", "elements are not numbers alone")],
    "struct": [("list", b"\x90", "positions are not ids"), ("nil", b"\xc0", "absent is left out"), ("int", b"\x01", "a number is no map")],
    "bool": [("int", b"\x01", "1 is not true"), ("nil", b"\xc0", "neither true nor false"), ("text", b"\xa4true", "text is no bool")],
}  # fmt: skip


class Body:
    """Cases of one message or bare struct: of its own fields, and of those of the structs inside it."""

    def __init__(self, facts: Facts, name: str, judged: set[str]) -> None:
        self.facts, self.name, self.judged = facts, name, judged
        self.bare = name not in facts["message"]
        self.body = self._body(name)
        self.least = self._struct(name, full=False)
        self.full = self._struct(name, full=True)

    def cases(self) -> Iterator[Case]:
        yield self.good("least", "KVP-BODY-W-FORM", self.least, "every required field at its least")
        yield self.good("full", "KVP-BODY-W-FORM", self.full, "every field, large values")
        yield from self._whole()
        if not self.bare:
            yield from self._enveloped()
        homes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._find(self.name, (), "", homes)
        for owner, (at, path) in homes.items():
            # a kind of struct is tested once in a message's file, where it occurs first
            for field in self._fields(owner):
                yield from self._field(owner, field, (*at, field["id"]), f"{path}{field['name']}")
            for i, rule in enumerate(self._body(owner).get("rule", ())):
                yield from self._rule(owner, i, rule, at, path)

    def _find(self, owner: str, at: tuple[int, ...], path: str, homes: dict[str, tuple[tuple[int, ...], str]]) -> None:
        """Find where in the full message the first struct of each kind is."""
        if owner in homes or owner in self.judged:
            return
        self.judged.add(owner)
        homes[owner] = at, path
        for f in self._fields(owner):
            name = f["type"].rpartition("struct:")[2].rstrip(">")
            if "struct:" in f["type"]:
                inside = f["type"].startswith("list<")
                step = (*at, f["id"], 0) if inside else (*at, f["id"])
                self._find(name, step, f"{path}{f['name']}{'[0]' if inside else ''}.", homes)

    def _body(self, name: str) -> Facts:
        body: Facts = (self.facts["struct"] | self.facts["message"])[name]
        return body

    def _fields(self, name: str) -> list[Facts]:
        fields: list[Facts] = self._body(name)["field"]
        return fields

    # values

    def _struct(self, name: str, full: bool, index: int = 0) -> _Value:
        node: dict[int, Node] = {}
        shown: dict[str, Any] = {}
        absent, must = self._absent(name, full), self._must(name, full)
        for f in self._fields(name):
            if (f["presence"] == "optional" and not full and f["name"] not in must) or f["name"] in absent:
                continue
            value = self._value(f, full, index, name)
            node[f["id"]], shown[f["name"]] = value.node, value.json
        return _Value(node, shown)

    def _absent(self, name: str, full: bool) -> set[str]:
        """Optional fields that the rules on presence exclude for the enum value of the sample."""
        absent = set()
        fields = {f["name"]: f for f in self._fields(name)}
        for rule in self._body(name).get("rule", ()):
            if rule["rule"] in ("present_iff", "only_if"):
                enum = self.facts["enum"][fields[rule["args"][1]]["type"][5:]]
                if self._member(enum, full) != rule["args"][2]:
                    absent.add(rule["args"][0])
        return absent

    def _must(self, name: str, full: bool) -> set[str]:
        """Optional fields that the rules on presence require."""
        rules = [r["args"][0] for r in self._body(name).get("rule", ()) if r["rule"] == "present_iff"]
        return set(rules) - self._absent(name, full)

    @staticmethod
    def _member(enum: Facts, full: bool) -> str:
        return str(list(enum["values"])[1 if full and len(enum["values"]) > 1 else 0])

    def _enum(self, name: str) -> Facts:
        if name == "ErrorCode":
            return {"open": True, "values": {n: e["code"] for n, e in self.facts["error"].items()}}
        enum: Facts = self.facts["enum"][name]
        return enum

    def _value(self, f: Facts, full: bool, index: int, owner: str) -> _Value:
        """A sample value, the least or a large one; it rises with the `index` in a list, so that lists ascend."""
        type_ = f["type"]
        if type_ in _BITS:
            low, high = f.get("min", 0), f.get("max", (1 << _BITS[type_]) - 1)
            value = min(low + index, high)
            if full:
                value = self._large(owner, f, high, index)
            return _Value(uint(value), str(value))
        if type_.startswith("enum:"):
            enum = self._enum(type_[5:])
            rules = self._body(owner).get("rule", ()) if owner else ()
            decides = any(r["rule"] in _PRESENCE and r["args"][1] == f["name"] for r in rules)
            least = not index or decides
            name = self._member(enum, full) if least else list(enum["values"])[index % len(enum["values"])]
            return _Value(uint(enum["values"][name]), name)
        if type_ == "bool":
            return _Value(b"\xc3" if full else b"\xc2", full)
        if type_ == "str":
            value_ = chr(97 + index) * f.get("min", 0)
            if full:
                value_ = chr(97 + index) + "\u00e9\u6f22\U0001f600"
            return _Value(text(value_), value_)
        if type_ == "bytes":
            size = f["length"] if "length" in f else 40 if full else f.get("min", 0)
            data = bytes((index + 1 + i) & 0xFF for i in range(size)) if full else bytes(size)
            if not full and self._ruled(owner, f["name"]):
                data = index.to_bytes(size, "big")
            return _Value(binary(data), data.hex())
        if type_.startswith("array<"):
            values = list(range(f.get("min", 0)))
            if full:
                top = (1 << _BITS[type_[6:-1]]) - 1
                values = [3, 700, top]
            return _Value(numbers(values), [str(v) for v in values])
        if type_.startswith("struct:"):
            return self._struct(type_[7:], full, index)
        count = 2 if full else f.get("min", 0)
        inner = {"type": type_[5:-1]}
        values_ = [self._value(inner, full, i, owner) for i in range(count)]
        if full and type_.startswith("list<enum:"):
            enum = self._enum(type_[10:-1])
            names = list(enum["values"])[:2]
            values_ = [_Value(uint(enum["values"][n]), n) for n in names]
        return _Value([v.node for v in values_], [v.json for v in values_])

    @staticmethod
    def _large(owner: str, f: Facts, high: int, index: int) -> int:
        """A large value that keeps the rules of its map."""
        special = {
            ("VersionRange", "major"): 1 + index, ("VersionRange", "min_minor"): 1, ("VersionRange", "max_minor"): 200,
            ("Region", "base"): 1 << 62, ("Region", "length"): 1 << 40, ("Grants", "first"): 1 << 33, ("Grants", "count"): 1 << 20,
            ("Grants", "valid"): 1 << 40, ("LaneSpan", "lo"): 1 << 20, ("LaneSpan", "part"): index,
        }  # fmt: skip
        return special.get((owner, f["name"]), high - 1 + index if index < 2 else high)

    # cases

    def _frame(self, body: bytes, major: int | None = None) -> str:
        if self.bare:
            return body.hex()
        major = (0 if self.body["frozen"] else self.facts["protocol"]["major"]) if major is None else major
        return (b"KVPW" + struct.pack("<BBHHHI", major, 0, self.body["id"], 0, 0, len(body)) + body).hex()

    def good(self, id_: str, clause: str, value: _Value, note: str) -> Case:
        kind = "struct" if self.bare else "message"
        return {
            "id": id_,
            "clause": clause,
            "bytes": self._frame(raw(value.node)),
            kind: self.name,
            "fields": value.json,
            "note": note,
        }

    def bad(self, id_: str, clause: str, node: Node, error: str, path: str, note: str) -> Case:
        body = node if isinstance(node, bytes) else raw(node)
        kind = {"struct": self.name} if self.bare else {}
        return {
            "id": id_,
            "clause": clause,
            "bytes": self._frame(body),
            **kind,
            "error": error,
            "path": path,
            "note": note,
        }

    def _enveloped(self) -> Iterator[Case]:
        """Cases of the envelope."""
        body = raw(self.least.node)
        frame = bytes.fromhex(self._frame(body))
        for what, bytes_, error, clause in (
            ("cut", frame[:-1], "TRUNCATED", "KVP-FRAME-LENGTH"),
            ("glued", frame + b"\x00", "TRAILING_BYTES", "KVP-FRAME-TRAILING"),
        ):
            note = "a frame cut short by its transport" if what == "cut" else "two frames in one"
            yield {"id": what, "clause": clause, "bytes": bytes_.hex(), "error": error, "path": "@length", "note": note}
        other = self.facts["protocol"]["major"] if self.body["frozen"] else 0
        yield {
            "id": "other-major",
            "clause": "KVP-FRAME-TYPE-MAJOR",
            "bytes": self._frame(body, other),
            "error": "UNSUPPORTED_VERSION",
            "path": "@major",
            "note": "a known type under another major",
        }

    def _whole(self) -> Iterator[Case]:
        """Cases of the body as a whole."""
        node, last = self.least.node, max(self.least.node)
        body = raw(node)
        yield self.bad(
            "trailing", "KVP-BODY-TRAILING", body + b"\x00", "TRAILING_BYTES", "", "a second value in the body"
        )
        yield self.bad(
            "unknown-must",
            "KVP-BODY-UNKNOWN",
            node | {_UNKNOWN: uint(1)},
            "UNKNOWN_FIELD",
            f"#{_UNKNOWN:04x}",
            "a newer field whose meaning is lost if ignored",
        )
        ignored = self.good("unknown-may", "KVP-BODY-IGNORE", self.least, "grease: a field that may be ignored")
        yield ignored | {"bytes": self._frame(raw(node | {_GREASE: text("grease")})), "canonical": False}
        names = {f["id"]: f["name"] for f in self.body["field"]}
        pairs = b"".join(uint(k) + raw(v) for k, v in node.items())
        twice = bytes((0x80 | len(node) + 1,)) + pairs + uint(last) + raw(node[last])
        yield self.bad(
            "twice",
            "KVP-BODY-ORDER",
            twice,
            "FIELD_ORDER",
            names[last],
            "two readers may take different ones of two values",
        )
        if len(node) > 1:
            first = min(node)
            moved = {k: v for k, v in node.items() if k != first} | {first: node[first]}
            yield self.bad(
                "descending", "KVP-BODY-ORDER", moved, "FIELD_ORDER", names[first], "one message must have one encoding"
            )
        wide = b"\xde" + len(node).to_bytes(2, "big") + pairs
        yield self.bad("wide-map", "KVP-BODY-FORM", wide, "NOT_CANONICAL", "", "one message must have one encoding")

    def _field(self, owner: str, f: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        if f["name"] in self._absent(owner, full=True):
            whole = self.full
            self.full = self._with(owner, f, at, path)
            yield from self._stated(owner, f, at, path)
            self.full = whole
            return
        yield from self._stated(owner, f, at, path)

    def _with(self, owner: str, f: Facts, at: tuple[int, ...], path: str) -> _Value:
        """The full value, with a field and the enum value that the field needs."""
        above, above_path = at[:-1], path.removesuffix(f["name"])
        rule = next(r for r in self._body(owner)["rule"] if r["rule"] in _PRESENCE and r["args"][0] == f["name"])
        _, enum_field, member = rule["args"]
        fields = {field["name"]: field for field in self._fields(owner)}
        number = self.facts["enum"][fields[enum_field]["type"][5:]]["values"][member]
        value = self._value(f, True, 0, "")
        node = _replaced(self.full.node, (*above, fields[enum_field]["id"]), uint(number))
        shown = _json_replaced(self.full.json, f"{above_path}{enum_field}", member)
        for mend in self._others(owner, rule, above, above_path):
            node, shown = mend(node, shown, member)
        return _Value(_replaced(node, at, value.node), _json_replaced(shown, path, value.json))

    def _stated(self, owner: str, f: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        node, id_ = self.full.node, path.replace("[0]", "")
        rules = [rule for rule in self._body(owner).get("rule", ()) if f["name"] in rule["args"]]
        if f["presence"] == "optional" and not any(rule["rule"] in _PRESENCE for rule in rules):
            absent = _Value(_replaced(node, at, None), _json_replaced(self.full.json, path, None))
            yield self.good(f"{id_}-absent", "KVP-BODY-W-FORM", absent, "it need not be there")
        if f["presence"] == "required":
            yield self.bad(
                f"{id_}-missing",
                "KVP-BODY-REQUIRED",
                _replaced(node, at, None),
                "MISSING_FIELD",
                path,
                "a default nobody stated",
            )
        kind = self._kind(f["type"])
        rows, turn = _WRONG[kind], turned(owner, f)
        for what, bytes_, note in (rows[turn % len(rows)], rows[(turn + 1) % len(rows)])[: 2 if at[0] > 4 else 1]:
            yield self.bad(
                f"{id_}-{what}",
                "KVP-BODY-TYPE" if what not in ("signed", "timestamp") else "KVP-BODY-ARRAY-KIND",
                _replaced(node, at, bytes_),
                "BAD_TYPE",
                path,
                note,
            )
        yield from getattr(self, f"_of_{kind}")(owner, f, at, path, id_)

    @staticmethod
    def _kind(type_: str) -> str:
        if type_ in _BITS or type_.startswith("enum:"):
            return "int"
        return type_.partition("<")[0].partition(":")[0]

    def _of_int(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        if f["type"].startswith("enum:"):
            yield from self._of_enum(owner, f, at, path, id_)
            return
        low, high = f.get("min", 0), f.get("max", (1 << _BITS[f["type"]]) - 1)
        if low:
            yield self.bad(
                f"{id_}-below",
                "KVP-BODY-RANGE",
                _replaced(node, at, uint(low - 1)),
                "OUT_OF_RANGE",
                path,
                "0 where something is counted or divided by",
            )
        if high < (1 << 64) - 1:
            yield self.bad(
                f"{id_}-above",
                "KVP-BODY-RANGE",
                _replaced(node, at, uint(high + 1)),
                "OUT_OF_RANGE",
                path,
                "a reader that casts wraps around",
            )
        if not self._ruled(owner, f["name"]):
            edges = [e for e in (0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 0xFFFFFFFF, 0x100000000) if low < e < high]
            head = turned(owner, f) % 3 if at[0] > 4 or self.bare else 99  # sessions and ids are the same everywhere
            inner = {f"{e:x}": e for e in edges[head::3]}
            for what, value in ({"low": low, "high": high} | inner).items():
                good = _Value(_replaced(node, at, uint(value)), _json_replaced(self.full.json, path, str(value)))
                note = "the end of the range" if what in ("low", "high") else "where the shortest form changes"
                yield self.good(
                    f"{id_}-{what}", "KVP-BODY-RANGE" if what in ("low", "high") else "KVP-BODY-FORM", good, note
                )
        wide = b"\xcf" + min(high, 5).to_bytes(8, "big")
        yield self.bad(
            f"{id_}-wide",
            "KVP-BODY-FORM",
            _replaced(node, at, wide),
            "NOT_CANONICAL",
            path,
            "an integer in 8 bytes that needs 1",
        )

    def _of_enum(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        enum = self._enum(f["type"][5:])
        yield from self._each_value(owner, f, at, path, id_, enum)
        if enum["open"]:
            rules = [r for r in self._body(owner).get("rule", ()) if f["name"] in r["args"]]
            if not rules:
                for what, number in (("unknown", _OPEN), ("next", max(enum["values"].values()) + 1)):
                    shown = _json_replaced(self.full.json, path, {"unknown": str(number)})
                    value = _Value(_replaced(node, at, uint(number)), shown)
                    yield self.good(f"{id_}-{what}", "KVP-BODY-OPEN", value, "a value of a newer minor is kept")
        else:
            beyond = max(enum["values"].values()) + 1
            yield self.bad(
                f"{id_}-unknown",
                "KVP-BODY-ENUM",
                _replaced(node, at, uint(beyond)),
                "UNKNOWN_ENUM_VALUE",
                path,
                "an unknown value is no default",
            )
            yield self.bad(
                f"{id_}-zero",
                "KVP-BODY-ENUM",
                _replaced(node, at, uint(0)),
                "UNKNOWN_ENUM_VALUE",
                path,
                "0 is never a value",
            )
        yield self.bad(
            f"{id_}-beyond", "KVP-BODY-RANGE", _replaced(node, at, uint(0x10000)), "OUT_OF_RANGE", path, "16 bits"
        )

    def _each_value(
        self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str, enum: Facts
    ) -> Iterator[Case]:
        """Cases for every value of an enum, unless a rule requires other fields with it; error codes only in Error."""
        if any(f["name"] in r["args"] for r in self._body(owner).get("rule", ())):
            return
        if f["type"] == "enum:ErrorCode" and owner != "Error":
            return
        for name, number in enum["values"].items():
            shown = _json_replaced(self.full.json, path, name)
            value = _Value(_replaced(self.full.node, at, uint(number)), shown)
            yield self.good(f"{id_}-is-{name}", "KVP-BODY-ENUM", value, "every value has its number")

    def _ruled(self, owner: str, name: str) -> bool:
        """Tell if a rule of this map or of one around it restricts the field; its ends are then cases of that rule."""
        own = any(name in r["args"] for r in self._body(owner).get("rule", ()))
        bodies = self.facts["struct"] | self.facts["message"]
        return own or any(
            r["rule"] in ("ascend", "rise", "unique") and r["args"][-1] == name and len(r["args"]) == 2
            for b in bodies.values()
            for r in b.get("rule", ())
        )

    def _of_bool(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        good = _Value(_replaced(self.full.node, at, b"\xc2"), _json_replaced(self.full.json, path, False))
        yield self.good(f"{id_}-false", "KVP-BODY-W-FORM", good, "false is not absent")

    def _of_str(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node, low = self.full.node, f.get("min", 0)
        high = f.get("max", self.facts["limit"]["max_string"]["value"])
        if low:
            yield self.bad(
                f"{id_}-empty",
                "KVP-BODY-RANGE",
                _replaced(node, at, b"\xa0"),
                "OUT_OF_RANGE",
                path,
                "a name that names nothing",
            )
        if "max" in f:
            yield self.bad(
                f"{id_}-long",
                "KVP-BODY-RANGE",
                _replaced(node, at, text("x" * (high + 1))),
                "OUT_OF_RANGE",
                path,
                "one byte too long",
            )
            wide = "\u00e9" * (high // 2) + "\u00e9"
            yield self.bad(
                f"{id_}-wide",
                "KVP-BODY-RANGE",
                _replaced(node, at, text(wide)),
                "OUT_OF_RANGE",
                path,
                "lengths are bytes, not characters",
            )
        else:
            yield self.bad(
                f"{id_}-huge",
                "KVP-BODY-LIMIT",
                _replaced(node, at, text("x" * (high + 1))),
                "TOO_LARGE",
                path,
                "beyond max_string",
            )
        yield self.bad(
            f"{id_}-utf8", "KVP-BODY-TEXT", _replaced(node, at, b"\xa2\xc3\x28"), "BAD_TEXT", path, "not UTF-8"
        )
        yield self.bad(
            f"{id_}-surrogate",
            "KVP-BODY-TEXT",
            _replaced(node, at, b"\xa3\xed\xa0\x80"),
            "BAD_TEXT",
            path,
            "a surrogate is not UTF-8",
        )
        if not self._ruled(owner, f["name"]) and "max" in f:
            good = _Value(_replaced(node, at, text("x" * high)), _json_replaced(self.full.json, path, "x" * high))
            yield self.good(f"{id_}-longest", "KVP-BODY-RANGE", good, "the longest")
        if self._ruled(owner, f["name"]) and "max" in f:  # the first of a list, where there is an order
            good = _Value(_replaced(node, at, text("a" * high)), _json_replaced(self.full.json, path, "a" * high))
            yield self.good(f"{id_}-longest", "KVP-BODY-RANGE", good, "the longest")
        if low:
            good = _Value(_replaced(node, at, text("a" * low)), _json_replaced(self.full.json, path, "a" * low))
            yield self.good(f"{id_}-shortest", "KVP-BODY-RANGE", good, "the shortest")

    def _of_bytes(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        if "length" in f:
            for what, size in (("short", f["length"] - 1), ("long", f["length"] + 1)):
                yield self.bad(
                    f"{id_}-{what}",
                    "KVP-BODY-RANGE",
                    _replaced(node, at, binary(bytes(size))),
                    "OUT_OF_RANGE",
                    path,
                    "a digest or key of another length",
                )
        else:
            least = f.get("min", 0)
            good = _Value(_replaced(node, at, binary(bytes(least))), _json_replaced(self.full.json, path, "00" * least))
            yield self.good(f"{id_}-least", "KVP-BODY-RANGE", good, "the shortest")
            if least:
                node_ = _replaced(node, at, binary(bytes(least - 1)))
                yield self.bad(f"{id_}-below", "KVP-BODY-RANGE", node_, "OUT_OF_RANGE", path, "nothing at all")
        bomb = b"\xc6\x00\x80\x00\x01"
        if "length" not in f:
            yield self.bad(
                f"{id_}-bomb",
                "KVP-BODY-LIMIT",
                _replaced(node, at, bomb),
                "TOO_LARGE",
                path,
                "a length beyond the limit and the buffer: nothing may be allocated for it",
            )
        wide = b"\xc5\x00\x03abc"
        yield self.bad(
            f"{id_}-wide",
            "KVP-BODY-FORM",
            _replaced(node, at, wide),
            "NOT_CANONICAL",
            path,
            "a header of 3 bytes where 2 do",
        )

    def _of_array(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        widest = _BITS[f["type"][6:-1]] // 8
        if widest < 8:
            yield self.bad(
                f"{id_}-beyond",
                "KVP-BODY-ARRAY-KIND",
                _replaced(node, at, numbers([1 << 8 * widest])),
                "BAD_TYPE",
                path,
                "elements wider than the field takes",
            )
        yield self.bad(
            f"{id_}-wide",
            "KVP-BODY-ARRAY-WIDTH",
            _replaced(node, at, numbers([1, 2, 255], 2)),
            "NOT_CANONICAL",
            path,
            "two bytes an element that needs one",
        )
        yield self.bad(
            f"{id_}-part",
            "KVP-BODY-ARRAY-LENGTH",
            _replaced(node, at, ext(2, b"\x00\x01\x02")),
            "BAD_LENGTH",
            path,
            "an array that ends inside an element",
        )
        yield self.bad(
            f"{id_}-long-form",
            "KVP-BODY-FORM",
            _replaced(node, at, b"\xc7\x02\x01\x01\x02"),
            "NOT_CANONICAL",
            path,
            "ext 8 where fixext does",
        )
        if f.get("min"):
            if not self._is_compared(owner, f["name"]):
                yield self.bad(
                    f"{id_}-empty",
                    "KVP-BODY-RANGE",
                    _replaced(node, at, numbers([])),
                    "OUT_OF_RANGE",
                    path,
                    "nobody at all",
                )
                least = list(range(f["min"]))
                shown = _json_replaced(self.full.json, path, [str(n) for n in least])
                good = _Value(_replaced(node, at, numbers(least)), shown)
                yield self.good(f"{id_}-shortest", "KVP-BODY-RANGE", good, "no more than must be there")
        elif not self._is_compared(owner, f["name"]):
            good = _Value(_replaced(node, at, numbers([])), _json_replaced(self.full.json, path, []))
            yield self.good(f"{id_}-empty", "KVP-BODY-ARRAY-WIDTH", good, "an empty array has code 1")
        yield from self._most(f, at, path, id_)
        if not self._is_compared(owner, f["name"]):
            for top in (0xFF, 0x100, 0xFFFF, 0x10000, 0xFFFFFFFF):
                if top < 1 << 8 * widest:
                    good = _Value(
                        _replaced(node, at, numbers([1, top])), _json_replaced(self.full.json, path, ["1", str(top)])
                    )
                    yield self.good(
                        f"{id_}-{top:x}", "KVP-BODY-ARRAY-WIDTH", good, "the narrowest width that holds the largest"
                    )

    def _most(self, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        """The most elements that a list or an array may have, and one more."""
        if "max" in f:
            most, more = (self._value(f | {"min": f["max"] + n}, False, 0, "") for n in (0, 1))
            good = _Value(_replaced(self.full.node, at, most.node), _json_replaced(self.full.json, path, most.json))
            yield self.good(f"{id_}-most", "KVP-BODY-RANGE", good, "as many as there may be")
            node = _replaced(self.full.node, at, more.node)
            yield self.bad(f"{id_}-more", "KVP-BODY-RANGE", node, "OUT_OF_RANGE", path, "one more than there may be")

    def _is_compared(self, owner: str, name: str) -> bool:
        return any(name in r["args"] for r in self._body(owner).get("rule", ()) if r["rule"] == "same_length")

    def _of_list(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        if f.get("min"):
            yield self.bad(
                f"{id_}-empty",
                "KVP-BODY-RANGE",
                _replaced(node, at, []),
                "OUT_OF_RANGE",
                path,
                "nothing where something must be",
            )
            least = self._value(f, False, 0, owner)
            if not any(f["name"] in r["args"][1:] for r in self._body(owner).get("rule", ()) if r["rule"] == "subset"):
                good = _Value(_replaced(node, at, least.node), _json_replaced(self.full.json, path, least.json))
                yield self.good(f"{id_}-shortest", "KVP-BODY-RANGE", good, "no more than must be there")
        elif not self._ruled_list(owner, f["name"]):
            good = _Value(_replaced(node, at, []), _json_replaced(self.full.json, path, []))
            yield self.good(f"{id_}-empty", "KVP-BODY-W-FORM", good, "an empty list is not absent")
        yield self.bad(
            f"{id_}-bomb",
            "KVP-BODY-LIMIT",
            _replaced(node, at, b"\xdd\x00\x01\x00\x01"),
            "TOO_LARGE",
            path,
            "a count beyond the limit: nothing may be allocated for it",
        )
        yield self.bad(
            f"{id_}-wide",
            "KVP-BODY-FORM",
            _replaced(node, at, b"\xdc\x00\x01\x80"),
            "NOT_CANONICAL",
            path,
            "array 16 where fixarray does",
        )

        yield from self._most(f, at, path, id_)
        rules = [r for r in self._body(owner).get("rule", ()) if r["rule"] == "subset"]
        if f["type"].startswith("list<enum:") and not any(r["args"][0] == f["name"] for r in rules):
            enum = self._enum(f["type"][10:-1])
            numbers_by_name = dict(sorted(enum["values"].items(), key=lambda member: member[1]))
            shown: list[Any] = list(numbers_by_name)
            if enum["open"]:
                numbers_by_name[""] = max(numbers_by_name.values()) + 1
                shown.append({"unknown": str(numbers_by_name[""])})
            nodes = [uint(number) for number in numbers_by_name.values()]
            value = _Value(_replaced(node, at, nodes), _json_replaced(self.full.json, path, shown))
            yield self.good(f"{id_}-every", "KVP-BODY-ENUM", value, "every value, and of an open enum the next")

    def _ruled_list(self, owner: str, name: str) -> bool:
        return any(r["rule"] == "subset" and name == r["args"][1] for r in self._body(owner).get("rule", ()))

    def _of_struct(self, owner: str, f: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        node = self.full.node
        inner = f["type"][7:]
        first = self._fields(inner)[0]
        yield self.bad(
            f"{id_}-empty",
            "KVP-BODY-REQUIRED",
            _replaced(node, at, {}),
            "MISSING_FIELD",
            f"{path}.{first['name']}",
            "an empty map lacks its first field",
        )

    # rules

    def _rule(self, owner: str, number: int, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        name = rule["rule"]
        if name in ("ascend", "rise", "unique"):
            yield from self._order(owner, rule, at, path)
        elif name == "subset":
            yield from self._subset(owner, rule, at, path)
        elif name in ("le", "lt"):
            yield from self._limit(owner, rule, at, path)
        elif name == "sum_le":
            yield from self._sum(owner, rule, at, path)
        elif name == "same_length":
            yield from self._lengths(owner, rule, at, path)
        elif name in ("present_iff", "only_if"):
            yield from self._presence(owner, rule, at, path, self._rule_id(rule, path))

    @staticmethod
    def _rule_id(rule: Facts, path: str) -> str:
        return f"{path.replace('[0]', '')}{rule['id']}"

    def _broken(self, rule: Facts, path: str, what: str, node: Node, where: str, note: str) -> Case:
        """A value that breaks the rule."""
        id_ = f"{self._rule_id(rule, path)}{what}"
        return self.bad(id_, _RULE, node, rule["error"], f"{path}{where}", note)

    def _order(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        """Values in another order, or twice."""
        fields, bad = {f["name"]: f for f in self._fields(owner)}, partial(self._broken, rule, path)
        name, args, clause, id_ = rule["rule"], rule["args"], _RULE, self._rule_id(rule, path)
        whole, first = self.full, fields[args[0]]
        here = (*at, first["id"])
        if args[0] in self._absent(owner, full=True):
            whole = self._with(owner, first, here, f"{path}{args[0]}")
        values = _at(whole.node, here)
        if not isinstance(values, list):
            yield bad("", _replaced(whole.node, here, numbers([5, 4])), f"{args[0]}[1]", "descending")
            yield bad("-twice", _replaced(whole.node, here, numbers([4, 9, 9])), f"{args[0]}[2]", "twice")
            return
        tail = f".{args[1]}" if len(args) == 2 else ""
        if name == "rise":
            first_json = _json_at(whole.json, f"{path}{args[0]}")[0]
            shown = _json_replaced(whole.json, f"{path}{args[0]}", [first_json, first_json])
            twice = _Value(_replaced(whole.node, here, [values[0], values[0]]), shown)
            yield self.good(f"{id_}-twice", clause, twice, "equal neighbours")
        else:
            yield bad("-twice", _replaced(whole.node, here, [values[0], values[0]]), f"{args[0]}[1]{tail}", "twice")
        if name != "unique":
            yield bad("", _replaced(whole.node, here, values[::-1]), f"{args[0]}[1]{tail}", "descending")
        else:
            shown = _json_replaced(whole.json, f"{path}{args[0]}", _json_at(whole.json, f"{path}{args[0]}")[::-1])
            yield self.good(
                f"{id_}-any-order",
                clause,
                _Value(_replaced(whole.node, here, values[::-1]), shown),
                "any order will do",
            )

    def _subset(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        """A value of which the other field has none."""
        fields, bad = {f["name"]: f for f in self._fields(owner)}, partial(self._broken, rule, path)
        args, whole = rule["args"], self.full
        here = (*at, fields[args[0]]["id"])
        extra = [*_at(whole.node, here), uint(_OPEN)]
        yield bad(
            "", _replaced(whole.node, here, extra), f"{args[0]}[{len(extra) - 1}]", "needs what it does not offer"
        )

    def _limit(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        """A value above another, or equal to it."""
        fields, bad = {f["name"]: f for f in self._fields(owner)}, partial(self._broken, rule, path)
        args, clause, id_ = rule["args"], _RULE, self._rule_id(rule, path)
        whole, absent = self.full, self._absent(owner, full=True)
        here = (*at, fields[args[0]]["id"])
        second = fields[args[1]]
        for what, low, high in (("", 7, 6), ("-equal", 7, 7)):
            node = _replaced(_replaced(whole.node, here, uint(low)), (*at, second["id"]), uint(high))
            if what and rule["rule"] == "le":
                shown = _json_replaced(
                    _json_replaced(whole.json, f"{path}{args[0]}", str(low)), f"{path}{args[1]}", str(high)
                )
                if args[0] not in absent:
                    yield self.good(f"{id_}{what}", clause, _Value(node, shown), "equal will do")
            elif args[0] not in absent:
                yield bad(what, node, args[1], "the end before the beginning")

    def _sum(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        """Two values whose sum is within a third, or beyond it."""
        fields, bad = {f["name"]: f for f in self._fields(owner)}, partial(self._broken, rule, path)
        args, clause, id_ = rule["args"], _RULE, self._rule_id(rule, path)
        whole, here = self.full, (*at, fields[args[0]]["id"])
        top = args[2] if isinstance(args[2], int) else 1 << 40
        last = args[1] if isinstance(args[2], int) else args[2]
        for what, a, b in (
            ("-reach", top - 9, 9), ("-reach-at-once", 0, top), ("-one", 0, 1),
            ("", top - 9, 10), ("-overflow", (1 << 64) - 1, 1),
        ):  # fmt: skip
            node = _replaced(_replaced(whole.node, here, uint(a)), (*at, fields[args[1]]["id"]), uint(b))
            shown = _json_replaced(_json_replaced(whole.json, f"{path}{args[0]}", str(a)), f"{path}{args[1]}", str(b))
            if what.startswith(("-reach", "-one")):
                note = "exactly at the end" if what != "-one" else "the least"
                yield self.good(f"{id_}{what}", clause, _Value(node, shown), note)
            else:
                yield bad(what, node, str(last), "beyond the end" if not what else "a sum that wraps around in 64 bits")

    def _lengths(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> Iterator[Case]:
        """Arrays of equal and of unequal length."""
        fields, bad = {f["name"]: f for f in self._fields(owner)}, partial(self._broken, rule, path)
        args, clause, id_ = rule["args"], _RULE, self._rule_id(rule, path)
        whole, first = self.full, fields[args[0]]
        for other in args[1:]:
            node = _replaced(whole.node, (*at, fields[other]["id"]), numbers([1, 2]))
            yield bad(f"-{other}", node, other, "arrays of unequal length, paired by position")
        node, shown = whole.node, whole.json
        for array in args:
            node = _replaced(node, (*at, fields[array]["id"]), numbers([1]))
            shown = _json_replaced(shown, f"{path}{array}", ["1"])
        yield self.good(f"{id_}-one", clause, _Value(node, shown), "one of each")
        for array in args if first.get("min") else ():
            node = _replaced(node, (*at, fields[array]["id"]), numbers([]))
        if first.get("min"):
            where = f"{path}{args[0]}"
            yield self.bad(f"{id_}-none", "KVP-BODY-RANGE", node, "OUT_OF_RANGE", where, "nothing at all")

    def _presence(self, owner: str, rule: Facts, at: tuple[int, ...], path: str, id_: str) -> Iterator[Case]:
        fields = {f["name"]: f for f in self._fields(owner)}
        field, enum_field, member = rule["args"]
        enum = self.facts["enum"][fields[enum_field]["type"][5:]]
        whole = self.full
        value = self._value(fields[field], True, 0, "")
        if fields[field]["type"] in _BITS:
            value = _Value(uint(1), "1")
        where = (*at, fields[field]["id"])
        others = [m for m in enum["values"] if m != member]
        for name in (member, others[0]):
            node = _replaced(whole.node, (*at, fields[enum_field]["id"]), uint(enum["values"][name]))
            shown = _json_replaced(whole.json, f"{path}{enum_field}", name)
            for rest in self._others(owner, rule, at, path):
                node, shown = rest(node, shown, name)
            wanted = name == member
            absent = _Value(_replaced(node, where, None), _json_replaced(shown, f"{path}{field}", None))
            present = _Value(_replaced(node, where, value.node), _json_replaced(shown, f"{path}{field}", value.json))
            label = name.lower()
            good, wrong = (present, absent) if wanted else (absent, present)
            yield self.good(f"{id_}-{label}", _RULE, good, "as the rule wants")
            if wanted and rule["rule"] == "only_if":
                yield self.good(f"{id_}-{label}-without", _RULE, absent, "a field that this kind may leave out")
            if not wanted or rule["rule"] == "present_iff":
                yield self.bad(
                    f"{id_}-{label}-not",
                    _RULE,
                    wrong.node,
                    rule["error"],
                    f"{path}{field}",
                    "a field that this kind must or must not have",
                )

        for what, number in (("unknown", _OPEN), ("next", max(enum["values"].values()) + 1)) if enum["open"] else ():
            node = _replaced(whole.node, (*at, fields[enum_field]["id"]), uint(number))
            shown = _json_replaced(whole.json, f"{path}{enum_field}", {"unknown": str(number)})
            note = "what belongs to a later value, only a later version knows"
            for label, presence in (("with", value), ("without", _Value(None, None))):
                one = _Value(
                    _replaced(node, where, presence.node), _json_replaced(shown, f"{path}{field}", presence.json)
                )
                yield self.good(f"{id_}-{what}-{label}", "KVP-BODY-OPEN", one, note)

    def _others(self, owner: str, rule: Facts, at: tuple[int, ...], path: str) -> list[Any]:
        """Changes that satisfy the other rules on presence by the same enum field."""
        body = self._body(owner)
        mends = []
        for other in body.get("rule", ()):
            presence = other["rule"] in ("present_iff", "only_if")
            if other is not rule and presence and other["args"][1] == rule["args"][1]:
                f = next(x for x in body["field"] if x["name"] == other["args"][0])

                def mend(node: Node, shown: Any, name: str, f: Facts = f, other: Facts = other) -> tuple[Node, Any]:
                    if name == other["args"][2] and other["rule"] == "only_if":
                        return node, shown
                    value = self._value(f, True, 0, "") if name == other["args"][2] else _Value(None, None)
                    return _replaced(node, (*at, f["id"]), value.node), _json_replaced(
                        shown, f"{path}{f['name']}", value.json
                    )

                mends.append(mend)
        return mends


def _at(node: Node, path: tuple[int, ...]) -> Node:
    for step in path:
        node = node[step]
    return node


def _steps(path: str) -> list[str | int]:
    return [int(s) if s.isdigit() else s for s in path.replace("[", ".").replace("]", "").split(".")]


def _json_at(shown: Any, path: str) -> Any:
    for step in _steps(path):
        shown = shown[step]
    return shown


def _json_replaced(shown: Any, path: str, new: Any) -> Any:
    """JSON fields with the value at a path replaced; None removes it."""
    first, *rest = _steps(path)

    def walk(value: Any, step: str | int, more: list[str | int]) -> Any:
        if isinstance(value, list):
            return (
                [walk(v, more[0], more[1:]) if i == step else v for i, v in enumerate(value)]
                if more
                else [new if i == step else v for i, v in enumerate(value)]
            )
        members = dict(value)
        members[str(step)] = walk(value[step], more[0], more[1:]) if more else new
        return {k: v for k, v in members.items() if v is not None}

    return walk(shown, first, rest)
