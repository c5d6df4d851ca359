"""Vectors of the JSON form and of byte streams: the same messages, with each value in forms that a reader must refuse.

What is expected follows from how a case was made, and not from running a codec. The frames are those of the boundary vectors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.specgen.edges import edges, many_values
from tools.specgen.registry import SPEC, Facts, version
from tools.specgen.vectors import turned, uint

Case = dict[str, Any]
_TYPE, _INT, _RANGE, _ENUM = "KVP-JSON-TYPE", "KVP-JSON-INT", "KVP-JSON-RANGE", "KVP-JSON-ENUM"
_WRONG: dict[str, list[tuple[str, Any, str, str]]] = {
    "uint": [
        ("zeros", "01", _INT, "two texts of one number"), ("minus", "-1", _INT, "a reader that casts gets 2^64 - 1"),
        ("plus", "+1", _INT, "a parser that takes signs"), ("hex", "0x1", _INT, "a parser that guesses the base"),
        ("blank", " 1", _INT, "a parser that strips"), ("empty", "", _INT, "a parser that says 0 of nothing"),
        ("point", "1.0", _INT, "a parser of floats"), ("exponent", "1e3", _INT, "a parser of floats"),
        ("underscore", "1_0", _INT, "a parser of source code"), ("arabic", "\u0661", _INT, "digits that are not ASCII"),
        ("newline", "1\n", _INT, "a pattern that ends before the last newline"),
        ("negative", -1, _INT, "a JSON number below 0"), ("double", 1 << 53, _INT, "a number that doubles cannot tell from the next"),
        ("half", 1.5, _INT, "a JSON number that is none of ours"), ("true", True, _TYPE, "true is not 1"),
        ("null", None, _TYPE, "null is no way to be absent"), ("list", [], _TYPE, "a list is no number"),
        ("object", {"unknown": "1"}, _TYPE, "the form of an enum"),
    ],
    "enum": [
        ("number", 1, _TYPE, "values go by name"), ("digits", "1", _ENUM, "values go by name"), ("lower", "lower", _ENUM, "names have one spelling"),
        ("null", None, _TYPE, "null is no way to be absent"), ("other-key", {"value": "9"}, _TYPE, "a key that is not `unknown`"),
        ("two-keys", {"unknown": "61680", "name": "X"}, _TYPE, "a second key"), ("wide", {"unknown": "65536"}, _RANGE, "beyond 16 bits, before all else"),
        ("zeros", {"unknown": "061680"}, _TYPE, "two texts of one number"),
    ],
    "bytes": [
        ("upper", "AB", _TYPE, "digits have one spelling"), ("odd", "abc", _TYPE, "half a byte"), ("prefix", "0x00", _TYPE, "a parser of source code"),
        ("blank", "00 00", _TYPE, "a parser that skips blanks"), ("base64", "AAEC", _TYPE, "another form of bytes"), ("number", 0, _TYPE, "a number is no bytes"),
        ("null", None, _TYPE, "null is no way to be absent"), ("list", [0, 1], _TYPE, "a list of numbers is no bytes"),
    ],
    "str": [
        ("number", 1, _TYPE, "a number is no text"), ("null", None, _TYPE, "null is no way to be absent"),
        ("list", ["a"], _TYPE, "a list is no text"), ("true", True, _TYPE, "a bool is no text"),
    ],
    "bool": [
        ("text", "true", _TYPE, "text is no bool"), ("one", 1, _TYPE, "1 is not true"), ("null", None, _TYPE, "null is not false"),
    ],
    "list": [
        ("object", {}, _TYPE, "an object is no list"), ("text", "1", _TYPE, "one element without its list"), ("null", None, _TYPE, "null is not empty"),
    ],
    "struct": [
        ("list", [], _TYPE, "fields by place"), ("text", "x", _TYPE, "text is no map"), ("null", None, _TYPE, "null is no way to be absent"),
    ],
}  # fmt: skip
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_EACH = 2
"""Wrong forms that each field has; those of a ticket, which travels in JSON, have all of them."""
_EVERY = ("Ticket",)


def forms(facts: Facts, codec: Mapping[Path, str]) -> dict[Path, str]:
    """The files of JSON forms, streams, enums and edges, made from the files of boundary vectors."""
    rows = {}
    for text in codec.values():
        file = json.loads(text)
        rows[file["suite"]] = {row["id"]: row for row in file["cases"]}
    cases = [case for name in rows for case in _of(facts, name, rows[name])]
    cases.append(_too_large(facts, rows))
    files = {
        "json": cases,
        "streams": list(_streams(facts, rows)),
        "codec/enums": list(_enums(facts, rows)),
        "codec/edges": edges(facts),
    }
    return {SPEC / f"vectors/{name}.json": _text(facts, name, file_cases) for name, file_cases in files.items()}


def _text(facts: Facts, suite: str, cases: Iterable[Case]) -> str:
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    return f'{{"suite": "{Path(suite).name}", "version": "{version(facts)}", "made": "by tools.specgen from the registry", "cases": [\n{lines}\n]}}\n'


def _of(facts: Facts, name: str, rows: dict[str, Case]) -> Iterator[Case]:
    """Cases of one message or struct."""
    least, full = rows["least"]["fields"], rows["full"]["fields"]
    kind = "message" if name in facts["message"] else "struct"
    body = facts[kind][name]

    def case(id_: str, clause: str, fields: Any, note: str, **answer: str) -> Case:
        return {"id": f"{name}-{id_}", "clause": clause, kind: name, "fields": fields, **answer, "note": note}

    whole = {"bytes": rows["least"]["bytes"]}
    yield case("keys", "KVP-BODY-W-FORM", dict(reversed(least.items())), "keys in any order make one body", **whole)
    yield case(
        "unknown-key",
        "KVP-JSON-KEY",
        {**least, "color": "1"},
        "a misspelt option is not no option",
        error="UNKNOWN_FIELD",
        path="color",
    )
    yield case(
        "id-as-key", "KVP-JSON-KEY", {**least, "#0001": "1"}, "ids are no keys", error="UNKNOWN_FIELD", path="#0001"
    )
    for form, ignored in (("text", "1"), ("null", None), ("map", {"x": [{}, -1.5]})):
        note = "a later version has a field that may be ignored"
        yield case(f"ignored-key-{form}", "KVP-JSON-IGNORE", {"x_color": ignored, **least}, note, **whole)
    for form, value in (("list", []), ("null", None)):
        yield case(form, _TYPE, value, "fields are an object", error="BAD_TYPE", path="")
    for field in body["field"]:
        at = field["name"]
        if field["presence"] == "required":
            fields = {key: value for key, value in least.items() if key != at}
            yield case(
                f"{at}-missing", "KVP-JSON-REQUIRED", fields, "a default nobody stated", error="MISSING_FIELD", path=at
            )
            fields = {**fields, "color": "1"}
            yield case(
                f"{at}-missing-and-unknown",
                "KVP-JSON-KEY",
                fields,
                "unknown keys come first",
                error="UNKNOWN_FIELD",
                path="color",
            )
        if field["type"] in _BITS and at in least and int(least[at]) < 1 << 53:
            yield case(f"{at}-as-number", _INT, {**least, at: int(least[at])}, "a JSON number is a number too", **whole)
        for predicate, args, error in ((r["rule"], r["args"], r["error"]) for r in body.get("rule", ())):
            if predicate in ("ascend", "unique") and args == [at] and len(full.get(at, ())) > 1:
                again, path = [*full[at][:-1], full[at][-2]], f"{at}[{len(full[at]) - 1}]"
                yield case(
                    f"{at}-again",
                    "KVP-JSON-RULE",
                    {**full, at: again},
                    "the last element twice",
                    error=error,
                    path=path,
                )
        for form, clause, value, error, where, note in _wrong(facts, name, field, full.get(at)):
            yield case(f"{at}-{form}", clause, {**least, at: value}, note, error=error, path=at + where)


def _too_large(facts: Facts, rows: dict[str, dict[str, Case]]) -> Case:
    """A message that no reader accepts, although each of its fields is valid."""
    fields = rows["Welcome"]["least"]["fields"] | many_values(facts, beyond=1)[1]
    note = "a frame that its own writer could not read"
    return {
        "id": "Welcome-values",
        "clause": "KVP-BODY-W-FORM",
        "message": "Welcome",
        "fields": fields,
        "error": "TOO_LARGE",
        "path": "",
        "note": note,
    }


def _wrong(facts: Facts, owner: str, field: Case, good: Any) -> Iterator[tuple[Any, ...]]:
    """Wrong values of a field: name, clause, value, error, path below the field, and what they guard against."""
    kind, _, inner = field["type"].partition("<" if "<" in field["type"] else ":")
    kind = "uint" if kind in _BITS else "list" if kind == "array" else kind
    wrong, turn = _WRONG[kind], turned(owner, field)
    some = wrong if owner in _EVERY else [wrong[(turn + i) % len(wrong)] for i in range(_EACH)]
    for form, value, clause, note in some:
        error = {_RANGE: "OUT_OF_RANGE", _ENUM: "UNKNOWN_ENUM_VALUE"}.get(clause, "BAD_TYPE")
        yield form, clause, value, error, "", note
    if kind == "uint":
        top = (1 << _BITS[field["type"]]) - 1
        if field.get("max", top) < (1 << 64) - 1:
            yield "above", _RANGE, str(field.get("max", top) + 1), "OUT_OF_RANGE", "", "one above its range"
        yield "digits", _RANGE, "9" * 30, "OUT_OF_RANGE", "", "a number that no machine word holds"
        if field.get("min"):
            yield "below", _RANGE, str(field["min"] - 1), "OUT_OF_RANGE", "", "one below its range"
    if kind == "enum":
        values = facts["enum"][inner]["values"] if inner in facts["enum"] else {}
        if inner in facts["enum"]:
            known = {"unknown": str(min(values.values()))}
            yield "known", _ENUM, known, "UNKNOWN_ENUM_VALUE", "", "a value that has a name goes by it"
        if inner in facts["enum"] and not facts["enum"][inner]["open"]:
            yield "closed", _ENUM, {"unknown": "61680"}, "UNKNOWN_ENUM_VALUE", "", "a closed enum has no other values"
    if kind == "list" and isinstance(good, list) and good:
        yield "last", _TYPE, [*good, None], "BAD_TYPE", f"[{len(good)}]", "elements are read to the last"
        if field.get("min") or field.get("length"):
            yield "none", _RANGE, [], "OUT_OF_RANGE", "", "as many as its range says"
    if kind == "bytes" and field.get("length") and good:
        yield "short", _RANGE, good[2:], "OUT_OF_RANGE", "", "a byte less than its length"
        yield "long", _RANGE, good + "00", "OUT_OF_RANGE", "", "a byte more than its length"
    if kind == "str" and field.get("max"):
        yield "long", _RANGE, "x" * (field["max"] + 1), "OUT_OF_RANGE", "", "a byte more than its range"
    if kind == "str" and field.get("min"):
        yield "none", _RANGE, "", "OUT_OF_RANGE", "", "an empty name"


def _stream(id_: str, clause: str, chunks: list[bytes], frames: list[Any], note: str) -> Case:
    return {
        "id": id_,
        "clause": clause,
        "chunks": [chunk.hex() for chunk in chunks],
        "frames": frames,
        "note": note,
    }


def _streams(facts: Facts, rows: dict[str, dict[str, Case]]) -> Iterator[Case]:
    """Cases of streams: frames and where they are cut."""
    good = [rows[name]["least"] for name in ("DoneAck", "Ping", "Drained")]
    one, two, three = (bytes.fromhex(row["bytes"]) for row in good)
    says = [_answer(row) for row in good]
    whole = one + two + three

    split = "KVP-STREAM-SPLIT"
    yield _stream("frame-by-frame", split, [one, two, three], says, "a frame a read")
    yield _stream("at-once", split, [whole], says, "three frames in one read")
    yield _stream("byte-by-byte", split, [bytes([b]) for b in whole], says, "every cut there is")
    yield _stream("empty-reads", split, [b"", one, b"", b"", two + three, b""], says, "reads without a byte")
    yield _stream("nothing", split, [b""], [], "no frame yet")
    for at in range(1, len(one + two)):
        where = "the magic" if at % len(one) < 4 else "an envelope" if at % len(one) < 16 else "a body"
        yield _stream(f"cut-at-{at}", split, [whole[:at], whole[at:]], says, f"cut in or at {where}")
    for at in (3, 15, len(one) - 1):
        yield _stream(f"unfinished-{at}", split, [whole + one[:at]], says, "what is not whole is no frame yet")
    for name in ("trailing", "unknown-must", "twice", "wide-map", "other-major"):
        row = rows["DoneAck"][name]
        bad = bytes.fromhex(row["bytes"])
        frames = [says[0], _answer(row), says[1]]
        yield _stream(
            f"on-after-{name}", "KVP-STREAM-GO-ON", [one + bad + two], frames, "one bad frame costs one frame"
        )
        cut = [one + bad[:9], bad[9:-1], bad[-1:] + two]
        yield _stream(f"on-after-{name}-cut", "KVP-STREAM-GO-ON", cut, frames, "the same, cut")
    yield from _bad_envelopes(facts, one, two, says)


def _bad_envelopes(facts: Facts, one: bytes, two: bytes, says: list[Any]) -> Iterator[Case]:
    """Cases of streams in which an envelope is refused, or is none; `says` are the answers to the good frames."""
    split = "KVP-STREAM-SPLIT"
    for name, at, value, answer in (
        ("type", 6, 0xFF, ("UNKNOWN_MESSAGE", "@type")), ("flag", 8, 0x01, ("UNKNOWN_FLAG", "@flags")), ("major", 4, 9, ("UNSUPPORTED_VERSION", "@major")),
    ):  # fmt: skip
        bad = one[:at] + bytes([value]) + one[at + 1 :]
        note = "what is not whole is no frame yet, whatever its envelope says"
        yield _stream(f"unfinished-{name}", split, [one + bad[:-1]], says[:1], note)
        frames = [{"error": answer[0], "path": answer[1]}, says[1]]
        yield _stream(
            f"on-after-{name}",
            "KVP-STREAM-GO-ON",
            [bad + two],
            frames,
            "an envelope that is refused has its length all the same",
        )
    long = one[:12] + (facts["limit"]["max_body"]["value"] + 1).to_bytes(4, "little")
    frames = [says[0], {"error": "TOO_LARGE", "path": "@length"}]
    for id_, chunks in (("long", [one + long + two]), ("long-cut", [one + long[:7], long[7:]])):
        yield _stream(id_, split, chunks, frames, "who waits for the end of it holds what is sent until then")
    bare = one[:12] + bytes(4)
    yield _stream(
        "no-body",
        "KVP-STREAM-GO-ON",
        [bare + two],
        [{"error": "TRUNCATED", "path": ""}, says[1]],
        "a body of no bytes has no map",
    )
    for at, form in ((0, b"\0"), (0, b"KVPX"), (3, b"KVP\0"), (0, b"\xff" * 40)):
        lost = {"error": "BAD_MAGIC", "path": "@magic"}
        id_ = f"lost-{form[:4].hex()}-{at}"
        yield _stream(id_, "KVP-STREAM-MAGIC", [one + form, two], [says[0], lost], "what follows might be anything")
        yield _stream(
            f"{id_}-cut",
            "KVP-STREAM-MAGIC",
            [*(bytes([b]) for b in one + form[:4]), two],
            [says[0], lost],
            "the same, cut",
        )


def _enums(facts: Facts, rows: dict[str, dict[str, Case]]) -> Iterator[Case]:
    """Every value of every enum, in a frame that has the enum once, so that a codec with another number fails."""
    known = {name: enum["values"] for name, enum in facts["enum"].items()}
    known["ErrorCode"] = {name: error["code"] for name, error in facts["error"].items()}
    for enum, values in known.items():
        for row in (copy.deepcopy(cases[id_]) for cases in rows.values() for id_ in ("full", "least") if id_ in cases):
            places = list(_places(facts, enum, row.get("message") or row["struct"], row["fields"]))
            marks = {uint(id_) + uint(values[where[key]]) for where, key, id_ in places if where[key] in values}
            data = bytes.fromhex(row["bytes"])
            if len(places) == len(marks) == 1 and data.count(min(marks)) == 1:
                break
        else:
            continue
        (where, key, id_), head = places[0], 0 if "struct" in row else 16
        for word, value in values.items():
            where[key] = word
            frame = data.replace(min(marks), uint(id_) + uint(value))
            frame = frame[:12] + (len(frame) - head).to_bytes(4, "little") + frame[16:] if head else frame
            about: Case = {k: copy.deepcopy(row[k]) for k in ("message", "struct", "fields") if k in row}
            yield {
                "id": f"{enum}-{word}",
                "clause": "KVP-JSON-W-ENUM",
                "bytes": frame.hex(),
                **about,
                "note": f"{word} is {value}",
            }


def _places(facts: Facts, enum: str, name: str, fields: Any) -> Iterator[tuple[Any, str, int]]:
    """Yield the places where a JSON form has fields of an enum that no rule restricts: object, key, id of the field."""
    for field in (facts["struct"] | facts["message"])[name]["field"]:
        if field["name"] not in fields:
            continue
        inner = field["type"].partition("<")[2][:-1] or field["type"]
        ruled = any(
            field["name"] in rule["args"] for rule in (facts["struct"] | facts["message"])[name].get("rule", ())
        )
        if inner == f"enum:{enum}" and inner == field["type"] and not ruled:
            yield fields, field["name"], field["id"]
        if inner.startswith("struct:"):
            value = fields[field["name"]]
            for item in value if isinstance(value, list) else [value]:
                yield from _places(facts, enum, inner[7:], item)


def _answer(row: Case) -> dict[str, Any]:
    return {key: row[key] for key in ("message", "fields", "error", "path") if key in row}
