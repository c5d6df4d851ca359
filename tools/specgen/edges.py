"""Vectors of the edges of forms: the longest value of each header and the shortest of the next, both ways.

vectors.py has cases for every field and rule; these are at the limits of every msgpack form. What is expected follows
from how a case was made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import attrs

from tools.specgen.registry import Facts
from tools.specgen.vectors import Body, Case, Node, binary, ext, numbers, raw, text, uint

_TEXTS = [
    ("nul", b"\0", "NUL is a character"), ("control", b"\x1f\x7f", "control characters"), ("two", b"\xc2\x80\xdf\xbf", "the first and the last of 2 bytes"),
    ("three", b"\xe0\xa0\x80\xef\xbf\xbf", "the first and the last of 3 bytes"), ("four", b"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf", "the first and the last of 4 bytes"),
    ("around-surrogates", b"\xed\x9f\xbf\xee\x80\x80", "what is beside the surrogates"), ("quotes", b'"\\/\r\n', "what JSON escapes"),
]  # fmt: skip
_NO_TEXTS = [
    ("overlong-2", b"\xc1\xbf", "2 bytes for 7 bits"), ("overlong-3", b"\xe0\x9f\xbf", "3 bytes for 11 bits"), ("overlong-4", b"\xf0\x8f\xbf\xbf", "4 bytes for 16 bits"),
    ("beyond", b"\xf4\x90\x80\x80", "above U+10FFFF"), ("five", b"\xf8\x88\x80\x80\x80", "5 bytes"), ("low-surrogate", b"\xed\xbf\xbf", "the last surrogate"),
    ("pair", b"\xed\xa0\x80\xed\xb0\x80", "a character as two surrogates"), ("alone", b"a\x80", "a byte that continues nothing"),
    ("cut-2", b"\xc3", "half a character"), ("cut-4", b"\xf0\x9f\x98", "three quarters of a character"), ("ff", b"\xff", "a byte that UTF-8 never has"),
]  # fmt: skip
_ORDERS = [
    ("length", "b", "aa", "a longer name may come first"), ("case", "Z", "a", "capital letters come before small ones"),
    ("utf-16", "\uffff", "\U00010000", "UTF-16 units have the other order"), ("prefix", "a", "a\0", "a name before those that it begins"),
]  # fmt: skip


@attrs.frozen
class _Of:
    """Cases of one message or bare struct, whose least value is known."""

    body: Body

    @classmethod
    def named(cls, facts: Facts, name: str) -> _Of:
        """The message or bare struct of this name."""
        return cls(Body(facts, name, set()))

    def at(self, field: str) -> int:
        """The id of one of its fields."""
        return int(next(field_row["id"] for field_row in self.body.body["field"] if field_row["name"] == field))

    def good(self, id_: str, clause: str, note: str, nodes: dict[int, Node], fields: dict[str, Any]) -> Case:
        """A case of these fields in addition to the least ones, which is read and written."""
        value = attrs.evolve(
            self.body.least,
            node=dict(sorted({**self.body.least.node, **nodes}.items())),
            json={**self.body.least.json, **fields},
        )
        case = self.body.good(id_, clause, value, note)
        return case | ({"canonical": False} if max(nodes) >= 0x8000 else {})

    def bad(self, id_: str, clause: str, note: str, nodes: dict[int, Node], error: str, path: str) -> Case:
        """A case of these fields in addition to the least ones, which is refused."""
        return self.body.bad(id_, clause, dict(sorted({**self.body.least.node, **nodes}.items())), error, path, note)


def edges(facts: Facts) -> list[Case]:
    """The cases of `edges.json`."""
    kinds = (_texts, _bytes, _integers, _arrays, _lists, _maps, _ignored, _rules, _flags)
    return [case for kind in kinds for case in kind(facts)]


def _texts(facts: Facts) -> Iterator[Case]:
    limit = facts["limit"]["max_string"]["value"]
    of = _Of.named(facts, "Goodbye")
    at = of.at("reason")
    for size in (31, 32, 255, 256, limit):
        value = "x" * size
        yield of.good(f"text-{size}", "KVP-BODY-FORM", "where the header changes", {at: text(value)}, {"reason": value})
    for head, size in ((b"\xd9\x1f", 31), (b"\xda\x00\xff", 255), (b"\xdb\x00\x00\x10\x00", limit)):
        nodes = {at: head + b"x" * size}
        yield of.bad(
            f"text-{size}-wide", "KVP-BODY-FORM", "a longer header than it needs", nodes, "NOT_CANONICAL", "reason"
        )
    beyond = {at: text("x" * (limit + 1))}
    yield of.bad("text-too-long", "KVP-BODY-LIMIT", "one byte beyond the limit", beyond, "TOO_LARGE", "reason")
    for name, data, note in _TEXTS:
        yield of.good(f"text-{name}", "KVP-BODY-TEXT", note, {at: text(data.decode())}, {"reason": data.decode()})
    for name, data, note in _NO_TEXTS:
        nodes = {at: bytes((0xA0 | len(data),)) + data}
        yield of.bad(f"text-{name}", "KVP-BODY-TEXT", note, nodes, "BAD_TEXT", "reason")


def _bytes(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "Data")
    at = of.at("data")
    for size in (255, 256, 65_535, 65_536):
        data = bytes(size)
        yield of.good(
            f"bytes-{size}", "KVP-BODY-FORM", "where the header changes", {at: binary(data)}, {"data": data.hex()}
        )
    for head, size in ((b"\xc5\x00\xff", 255), (b"\xc6\x00\x00\x01\x00", 256), (b"\xc6\x00\x00\xff\xff", 65_535)):
        nodes = {at: head + bytes(size)}
        yield of.bad(
            f"bytes-{size}-wide", "KVP-BODY-FORM", "a longer header than it needs", nodes, "NOT_CANONICAL", "data"
        )


def _integers(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "DoneAck")
    at = of.at("sequence")
    for bits, head, form in ((7, 0xCC, "B"), (8, 0xCD, "H"), (16, 0xCE, "I"), (32, 0xCF, "Q")):
        for value in ((1 << bits) - 1, 1 << bits):
            nodes = {at: uint(value)}
            yield of.good(f"int-{value:x}", "KVP-BODY-FORM", "where the form changes", nodes, {"sequence": str(value)})
        wide = {at: bytes((head,)) + struct.pack(f">{form}", (1 << bits) - 1)}
        yield of.bad(
            f"int-{(1 << bits) - 1:x}-wide", "KVP-BODY-FORM", "a longer form", wide, "NOT_CANONICAL", "sequence"
        )
    for value in (1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        nodes = {at: uint(value)}
        yield of.good(
            f"int-{value:x}", "KVP-BODY-RANGE", "where other number types end", nodes, {"sequence": str(value)}
        )


def _arrays(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "Done")
    at, checksums = of.at("groups"), of.at("checksums")
    json: dict[str, Any]
    for size in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 255, 256):
        values = list(range(size))
        json = {"groups": [str(v) for v in values]}
        yield of.good(f"array-{size}", "KVP-BODY-FORM", "bytes where the header changes", {at: numbers(values)}, json)
    for size, head in (
        (8, b"\xc7\x08"),
        (16, b"\xc7\x10"),
        (17, b"\xc8\x00\x11"),
        (255, b"\xc8\x00\xff"),
        (256, b"\xc9\x00\x00\x01\x00"),
        (65_535, b"\xc9\x00\x00\xff\xff"),
    ):
        nodes = {at: head + b"\x01" + bytes(n % 256 for n in range(size))}
        yield of.bad(
            f"array-{size}-wide", "KVP-BODY-FORM", "a longer header than it needs", nodes, "NOT_CANONICAL", "groups"
        )
    for bits in (8, 16):
        for value in ((1 << bits) - 1, 1 << bits):
            json = {"groups": ["0", str(value)]}
            nodes = {at: numbers([0, value])}
            yield of.good(f"array-of-{value:x}", "KVP-BODY-ARRAY-WIDTH", "where elements become wider", nodes, json)
        wide = {at: numbers([0, (1 << bits) - 1], bits // 4)}
        yield of.bad(
            f"array-of-{(1 << bits) - 1:x}-wide",
            "KVP-BODY-ARRAY-WIDTH",
            "wider than it needs",
            wide,
            "NOT_CANONICAL",
            "groups",
        )
    checksum = {1: uint(1), 2: uint(0)}
    for value in ((1 << 32) - 1, 1 << 32):
        json = {"checksums": [{"group": "1", "value": "0", "pages": [str(value)]}]}
        pages: dict[int, Node] = {checksums: [checksum | {3: numbers([value])}]}
        yield of.good(f"array-of-{value:x}", "KVP-BODY-ARRAY-WIDTH", "where elements become wider", pages, json)
    for value in (1, 255, 65_535, (1 << 32) - 1):
        pages = {checksums: [checksum | {3: numbers([value], 8)}]}
        path = "checksums[0].pages"
        yield of.bad(
            f"array-of-{value:x}-as-u64", "KVP-BODY-ARRAY-WIDTH", "8 bytes where fewer do", pages, "NOT_CANONICAL", path
        )
    many, items = _Of.named(facts, "Grant"), 1 << 16
    ((place, (grant,)),) = ((key, value) for key, value in many.body.least.node.items() if isinstance(value, list))
    (said,) = many.body.least.json["grants"]
    pages = {place: [{**grant, 5: numbers([7] * items)}]}
    json = {"grants": [{**said, "items": ["7"] * items}]}
    yield many.good("array-65536", "KVP-BODY-FORM", "the shortest of a 32-bit length", pages, json)
    part = {checksums: [checksum | {3: ext(4, bytes(7))}]}
    path = "checksums[0].pages"
    yield of.bad("array-part", "KVP-BODY-ARRAY-LENGTH", "7 of 8 bytes", part, "BAD_LENGTH", path)


def _lists(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "Done")
    at = of.at("begins")
    for size in (15, 16):
        nodes = [{1: uint(group), 2: uint(group)} for group in range(size)]
        json = {"begins": [{"group": str(group), "first": str(group)} for group in range(size)]}
        yield of.good(f"list-{size}", "KVP-BODY-FORM", "where the header changes", {at: nodes}, json)
        head = b"\xdc\x00\x0f" if size == 15 else b"\xdd\x00\x00\x00\x10"
        body = {at: head + b"".join(map(raw, nodes))}
        yield of.bad(
            f"list-{size}-wide", "KVP-BODY-FORM", "a longer header than it needs", body, "NOT_CANONICAL", "begins"
        )


def _maps(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "DoneAck")
    for size in (15, 16):
        more = {0x801B + 31 * i: uint(i) for i in range(size - len(of.body.least.node))}
        yield of.good(f"map-{size}", "KVP-BODY-FORM", "where the header changes", more, {})
        whole = {**of.body.least.node, **more}
        head = b"\xde\x00\x0f" if size == 15 else b"\xdf\x00\x00\x00\x10"
        body = head + b"".join(uint(key) + raw(value) for key, value in whole.items())
        yield of.body.bad(
            f"map-{size}-wide", "KVP-BODY-FORM", body, "NOT_CANONICAL", "", "a longer header than it needs"
        )
    room = facts["limit"]["max_values"]["value"] - len(of.body.least.node) - 1
    yield of.good(
        "values",
        "KVP-BODY-VALUES",
        "as many values as there may be, the body's own entries too",
        {0x801B: [b"\0"] * room},
        {},
    )
    beyond = {0x801B: [b"\0"] * (room + 1)}
    yield of.bad("values-beyond", "KVP-BODY-VALUES", "one more than there may be", beyond, "TOO_LARGE", "#801b")
    welcome = _Of.named(facts, "Welcome")
    nodes, json = many_values(facts)
    yield welcome.good("values-written", "KVP-BODY-W-FORM", "as many values as a writer may write", nodes, json)


def many_values(facts: Facts, beyond: int = 0) -> tuple[dict[int, Node], dict[str, Any]]:
    """Endpoints and features by which a least Welcome has as many values as a body may have, or more: both ways."""
    of = _Of.named(facts, "Welcome")
    own = {id_: node for id_, node in of.body.least.node.items() if id_ not in (of.at("endpoints"), of.at("features"))}
    ranks, more = divmod(facts["limit"]["max_values"]["value"] - _values(own) - 2, 3)
    features = dict(list(facts["enum"]["Feature"]["values"].items())[: more + beyond])
    nodes = {
        of.at("features"): [uint(value) for value in features.values()],
        of.at("endpoints"): [{1: uint(rank), 2: text("")} for rank in range(ranks)],
    }
    json = {"features": list(features), "endpoints": [{"rank": str(rank), "address": ""} for rank in range(ranks)]}
    return nodes, json


def _values(node: Node) -> int:
    """Entries of maps and elements of lists."""
    if isinstance(node, bytes):
        return 0
    return len(node) + sum(map(_values, node.values() if isinstance(node, dict) else node))


def _ignored(facts: Facts) -> Iterator[Case]:
    of, inner = _Of.named(facts, "DoneAck"), _Of.named(facts, "Done")
    yield of.good("ignored-8000", "KVP-BODY-IGNORE", "the first id that is skipped", {0x8000: uint(1)}, {})
    yield of.bad(
        "unknown-7fff", "KVP-BODY-UNKNOWN", "the last id that is not", {0x7FFF: uint(1)}, "UNKNOWN_FIELD", "#7fff"
    )
    for code in range(2, 9):
        empty = {0x801B: b"\xc7\x00" + bytes((code,))}
        note = "an empty array has one form, signed or not"
        yield of.bad(f"ignored-empty-{code}", "KVP-BODY-ARRAY-WIDTH", note, empty, "NOT_CANONICAL", "#801b")
    begins, json = inner.at("begins"), {"begins": [{"group": "1", "first": "2"}]}
    for id_ in (0x8000, 0x801B, 0xFFFF):
        nodes = {begins: [{1: uint(1), 2: uint(2), id_: uint(1)}]}
        case = inner.good(
            f"ignored-inside-{id_:x}", "KVP-BODY-IGNORE", "a struct inside grows like a message", nodes, json
        )
        yield case | {"canonical": False}
    nodes = {begins: [{1: uint(1), 2: uint(2), 0x7FFF: uint(1)}]}
    yield inner.bad(
        "unknown-inside-7fff", "KVP-BODY-UNKNOWN", "the same inside", nodes, "UNKNOWN_FIELD", "begins[0].#7fff"
    )


def _rules(facts: Facts) -> Iterator[Case]:
    of = _Of.named(facts, "Content")
    at = of.at("axes")

    def axes(*names: str) -> dict[int, Node]:
        return {at: [{1: text(name), 2: uint(1)} for name in names]}

    for name, first, second, note in _ORDERS:
        forth = sorted((first, second), key=str.encode) == [first, second]
        low, high = (first, second) if forth else (second, first)
        json = {"axes": [{"name": axis, "length": "1"} for axis in (low, high)]}
        yield of.good(f"order-{name}", "KVP-RULE-BREAK", note, axes(low, high), json)
        yield of.bad(f"order-{name}-not", "KVP-RULE-BREAK", note, axes(high, low), "NOT_ASCENDING", "axes[1].name")
    hello = _Of.named(facts, "Hello")
    (version,) = hello.body.least.node[hello.at("versions")]
    nodes = {hello.at("versions"): [{**version, 1: uint(major)} for major in (1, 2, 1)]}
    yield hello.bad(
        "unique-apart", "KVP-RULE-BREAK", "twice, and not side by side", nodes, "REPEATED", "versions[2].major"
    )


def _flags(facts: Facts) -> Iterator[Case]:
    body = Body(facts, "DoneAck", set())
    frame = bytes.fromhex(body.good("", "", body.least, "")["bytes"])
    for bit in range(8):
        flagged = frame[:8] + bytes((1 << bit,)) + frame[9:]
        yield {
            "id": f"flag-{bit}",
            "clause": "KVP-FRAME-FLAGS",
            "bytes": flagged.hex(),
            "error": "UNKNOWN_FLAG",
            "path": "@flags",
            "note": "a bit of the low byte",
        }
