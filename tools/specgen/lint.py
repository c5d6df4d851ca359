"""Rules that the registry itself must follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tools.specgen.registry import CORE, Facts, moves, number

_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_PLAIN = {*_BITS, "bool", "str", "bytes", "array<u32>", "array<u64>"}
_BLOCKS = {"malformed": 1, "invalid": 2, "incompatible": 3, "state": 4, "limit": 5, "internal": 6}
_RECOVERY = {"fix", "renegotiate", "reconnect", "retry-later", "give-up"}
_UNITS = {"none", "byte", "token", "row", "item", "lane", "layer", "ms"}
_SECRET = {"address", "ticket", "key", "base", "Handle.data"}
_FACTS = {"id", "name", "type", "unit", "presence", "since", "doc"}
_MORE = {"min", "max", "length", "secret", "clauses", "feature"}
_CLAUSE = re.compile(r"KVP(-[A-Z0-9]+)+")
_NEVER = {0x3FFF, 0x4001, 0x7FFF, 0x8000, 0x8001, 0xFFFF}
"""Field ids that vectors use as unknown ones, besides grease. No field may get them, as vectors of kept versions would become wrong."""
_NEVER_VALUE, _NEVER_TYPE = 0xF000, 0x0FFF
"""Likewise enum values from here on, and this message type."""
DIGESTED = {"Content", "Axis"}
"""Structs that both sides digest, so nothing in them may be ignored."""
_HEAD = {1: ("session", "u64"), 2: ("request", "u64")}


class RegistryError(Exception):
    """The registry contradicts itself."""


def lint(facts: Facts) -> None:
    """Raise RegistryError at the first rule that is broken."""
    _need(len(set(facts["ext"].values())) == len(facts["ext"]), "ext codes repeat")
    _ascend([e["code"] for e in facts["error"].values()], "error codes")
    for name, error in facts["error"].items():
        _keys(error, {"code", "class", "recovery", "since", "doc"}, set(), f"error {name}")
        _need(error["code"] >> 8 == _BLOCKS.get(error["class"]), f"error {name} is not in the block of its class")
        _need(error["recovery"] in _RECOVERY, f"error {name}: recovery")
    for name, limit in facts["limit"].items():
        _keys(limit, {"value", "unit", "scope", "doc"}, {"profile"}, f"limit {name}")
        _need(limit.get("profile", CORE) in facts["profile"], f"limit {name}: profile")
        _need(limit["value"] > 0 and limit["unit"] in _UNITS, f"limit {name}")
        _need(limit["scope"] in ("body", "session", "plan", "net"), f"limit {name}: scope")
    for name, fact in facts["fact"].items():
        _keys(fact, {"rule", "since", "doc"}, set(), f"fact {name}")
        _need(fact["rule"] in facts["enum"]["FactRule"]["values"], f"fact {name}: rule")
    _versions(facts)
    _profiles(facts)
    _parts(facts)
    _metrics(facts)
    for name in ("field_ids", "features"):
        row = facts["grease"][name]
        _need((row["last"] - row["first"]) % row["step"] == 0, f"grease {name}: the last is not of the series")
    _enums(facts)
    _messages(facts)
    _bodies(facts)
    _frozen(facts)
    _machines(facts)


def _versions(facts: Facts) -> None:
    """Nothing is newer than the protocol, and candidates come one after the other."""
    for table in ("message", "struct", "error", "feature", "fact", "part", "metric"):
        for name, row in facts[table].items():
            for each in (row, *row.get("field", ())):
                at = f"{name}.{each['name']}" if each is not row else name
                _need(
                    _version(each.get("since", "0")) <= number(facts),
                    f"{at}: since a later version than the protocol's",
                )
    said = [row["version"] for row in facts["candidate"]]
    _need(len(set(said)) == len(said), "candidates repeat")
    for row in facts["candidate"]:
        _keys(row, {"version", "day", "why"}, set(), "candidate")
        _need(
            _version(row["version"].partition("-")[0]) <= number(facts), f"candidate {row['version']}: a later version"
        )


def _profiles(facts: Facts) -> None:
    before: set[str] = set()
    for name, row in facts["profile"].items():
        _keys(row, {"title", "kind", "doc", "needs", "clauses", "check"}, {"status", "features"}, f"profile {name}")
        _need(row["kind"] in ("core", "extension", "beside"), f"profile {name}: kind")
        _need(set(row["needs"]) <= before, f"profile {name}: needs what comes before it")
        _need(set(row.get("features", ())) <= facts["feature"].keys(), f"profile {name}: features")
        _need(("status" in row) != ("features" in row or row["kind"] == "core"), f"profile {name}: status, or features")
        _need(row.get("status", "stable") in facts["status"], f"profile {name}: status")
        before.add(name)


def _parts(facts: Facts) -> None:
    parts = facts["part"]
    names = [*parts, *(alias for row in parts.values() for alias in row["aliases"])]
    _need(len(set(names)) == len(names), f"part names and aliases repeat: {sorted(names)}")
    for name, row in parts.items():
        _keys(row, {"lane", "row", "since", "aliases", "doc"}, {"of", "scales", "optional"}, f"part {name}")
        for key in ("of", "scales"):
            _need(row.get(key, "k") in parts and row.get(key) != name, f"part {name}: {key} {row.get(key)}")
    for name, row in facts["group"].items():
        _keys(row, {"kinds", "has", "may", "aliases", "doc"}, set(), f"group {name}")
        _need(set(row["kinds"]) <= facts["enum"]["ItemKind"]["values"].keys(), f"group {name}: kinds")
        _need(set(row["has"] + row["may"]) <= parts.keys(), f"group {name}: parts")
    for name, row in facts["conversion"].items():
        _keys(row, {"wide", "narrow", "scales", "since", "doc"}, set(), f"conversion {name}")
        _need({row["wide"], row["narrow"]} <= facts["enum"]["DType"]["values"].keys(), f"conversion {name}: dtypes")
        _need(row["scales"] in ("stated", "part"), f"conversion {name}: scales")


def _metrics(facts: Facts) -> None:
    known, buckets = {*facts["metric_label"], "code", "group", "version", "spec"}, facts["metric_buckets"]["second"]
    for name, row in facts["metric"].items():
        _keys(row, {"type", "unit", "roles", "labels", "since", "doc"}, set(), f"metric {name}")
        _need(row["type"] in ("counter", "gauge", "histogram"), f"metric {name}: type")
        _need(
            name.endswith("_total") == (row["type"] == "counter"),
            f"metric {name}: counters, and no others, end in _total",
        )
        _need(row["unit"] in {*_UNITS, "second"} and set(row["labels"]) <= known, f"metric {name}: unit, labels")
        _need({*row["roles"]} <= facts["metric_label"]["role"].keys(), f"metric {name}: roles")
    _need(buckets == sorted(set(buckets)), "buckets ascend")


def _enums(facts: Facts) -> None:
    for name, row in facts["feature"].items():
        _keys(row, {"value", "since", "status", "doc"}, set(), f"feature {name}")
        _need(row["status"] in facts["status"], f"feature {name}: status")
        _need(row["value"] not in _range(facts["grease"]["features"]), f"feature {name} is grease")
        _need(
            sum(name in p.get("features", ()) for p in facts["profile"].values()) == 1, f"feature {name}: one profile"
        )
    for name, enum in facts["enum"].items():
        values = list(enum["values"].values())
        _need(0 not in values, f"enum {name}: 0 is not a value")
        _need(len(set(values)) == len(values) and max(values) < _NEVER_VALUE, f"enum {name}: values")
        _need(enum["docs"].keys() == enum["values"].keys(), f"enum {name}: docs")
        since = enum.get("since", {})
        late = [word for word, each in since.items() if _version(each) > number(facts)]
        _need(since.keys() <= enum["values"].keys() and not late, f"enum {name}: since of {late or list(since)}")
        _need(isinstance(enum["open"], bool) and bool(enum["doc"]), f"enum {name}: a fact is missing")


def _messages(facts: Facts) -> None:
    messages = facts["message"]
    _ascend([m["id"] for m in messages.values()], "message ids")
    for name, m in messages.items():
        facts_of = {"id", "since", "status", "sender", "delivery", "reply", "frozen", "doc", "field"}
        _keys(m, facts_of, {"rule", "feature"}, name)
        _features(m, facts, name)
        statuses = {facts["feature"][feature]["status"] for feature in m.get("feature", ())} or {"stable"}
        firmest = "stable" if "stable" in statuses else "draft"
        _need(m["status"] == firmest, f"{name}: a message is as firm as the firmest of its features")
        _need(m["status"] in facts["status"] and m["id"] != _NEVER_TYPE, f"{name}: status, id")
        _need(m["sender"] in ("source", "sink", "both"), f"{name}: sender")
        _need(m["delivery"] in facts["delivery"], f"{name}: delivery")
        _need(bool(m["reply"]) == (m["delivery"] == "request"), f"{name}: requests have replies, others none")
        for other in m["reply"]:
            _need(other in messages, f"{name}: reply {other}")
            _need(
                other == "Error" or other == "Failed" or messages[other]["delivery"] == "reply",
                f"{name}: {other} is no reply",
            )
            _need(
                messages[other]["sender"] in ("both", {"source": "sink", "sink": "source"}.get(m["sender"])),
                f"{name}: {other} comes from the same side",
            )
        names = {f["name"]: f for f in m["field"]}
        _need(
            ("request" in names) == (m["delivery"] != "notice") or name == "Error",
            f"{name}: a request id for all but notices",
        )
        for id_, (field, type_) in _HEAD.items():
            for f in m["field"]:
                _need(
                    f["name"] != field or (f["id"], f["type"]) == (id_, type_),
                    f"{name}.{field} is field {id_}, {type_}",
                )
        _need(m["frozen"] == (m["id"] <= 5), f"{name}: frozen are ids 1 to 5")
        _need(
            not m["frozen"] or all(f["id"] <= 15 or f["id"] & 0x8000 for f in m["field"]),
            f"{name}: fields of frozen messages are 1 to 15, or may be ignored",
        )
    replies = {r for m in messages.values() for r in m["reply"]}
    for name, m in messages.items():
        _need(m["delivery"] != "reply" or name in replies, f"{name}: a reply to nothing")


def _bodies(facts: Facts) -> None:
    messages, structs = facts["message"], facts["struct"]
    _need(not structs.keys() & messages.keys(), "a struct has the name of a message")
    for name, body in (structs | messages).items():
        _need({"since", "doc", "field"} <= body.keys(), f"{name}: a fact is missing")
        _need(body.get("profile", CORE) in facts["profile"], f"{name}: profile {body.get('profile')}")
        _ascend([f["id"] for f in body["field"]], f"{name}: field ids")
        _need(len({f["name"] for f in body["field"]}) == len(body["field"]), f"{name}: field names repeat")
        required = sum(f["presence"] == "required" for f in body["field"])
        _need(required <= 15, f"{name}: more than 15 required fields")
        for f in body["field"]:
            _field(name, body, f, facts)
        ids = [r["id"] for r in body.get("rule", ())]
        _need(len(set(ids)) == len(ids), f"{name}: rule ids repeat")
        for r in body.get("rule", ()):
            _rule(name, body, r, facts)
        _need(_depth(name, facts, ()) <= facts["limit"]["max_depth"]["value"], f"{name}: nested beyond max_depth")


def _frozen(facts: Facts) -> None:
    """Check what any two versions say to each other: its enums are open, and all later fields may be ignored."""
    todo, seen = [name for name, m in facts["message"].items() if m["frozen"]], set()
    while todo:
        seen.add(name := todo.pop())
        for f in (facts["struct"] | facts["message"])[name]["field"]:
            at = f"{name}.{f['name']}"
            if f["id"] & 0x8000:
                continue  # older versions skip it whole
            _need(_version(f["since"]) <= (1, 0), f"{at}: later than 1.0, and must be understood by any version")
            if inner := re.search(r"(struct|enum):(\w+)", f["type"]):
                kind, what = inner.groups()
                todo += [what] if kind == "struct" and what in facts["struct"] and what not in seen else []
                closed = kind == "enum" and what in facts["enum"] and not facts["enum"][what]["open"]
                _need(not closed, f"{at}: a closed enum, in what any version reads")


def _field(owner: str, body: Facts, f: Facts, facts: Facts) -> None:
    at = f"{owner}.{f.get('name')}"
    _keys(f, _FACTS, _MORE, at)
    _need(f["presence"] in ("required", "optional"), f"{at}: presence")
    _need(f["unit"] in _UNITS, f"{at}: unit")
    _need(_version(f["since"]) >= _version(body["since"]), f"{at}: older than {owner}")
    _need(_known(f["type"], facts), f"{at}: type {f['type']}")
    low = f["id"] & 0x7FFF
    core = facts["field_ids"]["core"]
    _need(core[0] <= low <= core[1], f"{at}: id outside the core range")
    _need(not f["id"] & 0x8000 or f["presence"] == "optional", f"{at}: required, but may be ignored")
    _need(f["id"] not in _range(facts["grease"]["field_ids"]), f"{at}: id is grease")
    _need(owner not in DIGESTED or not f["id"] & 0x8000, f"{at}: may be ignored, and is under a digest")
    draft = facts["feature"].get(f.get("feature"), {}).get("status") == "draft"
    _need("feature" not in f or (draft and bool(f["id"] & 0x8000)), f"{at}: of a draft, which others skip")
    _need(f["id"] not in _NEVER, f"{at}: id is for what is unknown")
    _need(
        bool(f["id"] & 0x8000) == f["name"].startswith("x_"), f"{at}: what may be ignored, and no other, is called x_"
    )
    _need(not {f["name"], at} & _SECRET or bool(f.get("secret")), f"{at} must be secret")
    _need("length" not in f or f["type"] == "bytes", f"{at}: length is for bytes")
    _clauses(f.get("clauses", ()), at)
    if "min" in f or "max" in f:
        top = _top(f["type"], facts)
        _need(0 <= f.get("min", 0) <= f.get("max", top) <= top, f"{at}: range")


def _top(type_: str, facts: Facts) -> int:
    if type_ in _BITS:
        return (1 << _BITS[type_]) - 1
    for prefix, limit in (
        ("str", "max_string"),
        ("bytes", "max_bytes"),
        ("list<", "max_list"),
        ("array<", "max_array"),
    ):
        if type_.startswith(prefix):
            value: int = facts["limit"][limit]["value"]
            return value
    return -1


def _rule(owner: str, body: Facts, r: Facts, facts: Facts) -> None:
    at = f"{owner}, rule {r.get('id')}"
    _keys(r, {"id", "rule", "args", "error"}, set(), at)
    _need(r["rule"] in facts["predicate"], f"{at}: predicate")
    _need(facts["error"].get(r["error"], {}).get("class") == "invalid", f"{at}: error")
    fields = {f["name"]: f["type"] for f in body["field"]}
    types = [fields.get(a) if isinstance(a, str) else "number" for a in r["args"]]
    _need(_fits(r["rule"], r["args"], types, facts), f"{at}: arguments {r['args']}")


def _fits(rule: str, args: list[Any], types: list[str | None], facts: Facts) -> bool:
    """Tell if a predicate can work on its arguments."""
    first = types[0] if types else None
    if first is None:
        return False
    if rule in ("ascend", "rise", "unique"):
        if len(args) == 1:
            return rule == "ascend" and first.startswith(("array<", "list<enum:"))
        inner = first[len("list<struct:") : -1] if first.startswith("list<struct:") else ""
        keys = {f["name"]: f for f in facts["struct"].get(inner, {}).get("field", ())}
        return len(args) == 2 and args[1] in keys and keys[args[1]]["presence"] == "required"
    if rule == "subset":
        return len(args) == 2 and first == types[1] and first.startswith("list<enum:")
    if rule in ("le", "lt"):
        return len(args) == 2 and first in _BITS and types[1] in _BITS
    if rule == "sum_le":
        return len(args) == 3 and first in _BITS and types[1] in _BITS and types[2] in (*_BITS, "number")
    if rule == "same_length":
        return len(args) > 1 and all(t is not None and t.startswith("array<") for t in types)
    enum = facts["enum"].get((types[1] or "")[5:], {}) if len(args) == 3 else {}
    return rule in ("present_iff", "only_if") and args[-1] in enum.get("values", {})


def _depth(name: str, facts: Facts, above: tuple[str, ...]) -> int:
    _need(name not in above, f"{name}: contains itself")
    body = (facts["struct"] | facts["message"])[name]
    deepest = 0
    for f in body["field"]:
        inner = re.search(r"struct:(\w+)", f["type"])
        below = _depth(inner[1], facts, (*above, name)) if inner and inner[1] in facts["struct"] else 0
        deepest = max(deepest, below + f["type"].startswith("list<"))
    return 1 + deepest


def _machines(facts: Facts) -> None:
    heard = set()
    for name, machine in facts["machine"].items():
        states = [s["name"] for s in machine["state"]]
        _need(len(set(states)) == len(states) and machine["first"] in states, f"machine {name}: states")
        for move in machine["move"]:
            _keys(move, {"from", "message", "to"}, {"but", "feature"}, f"machine {name}")
            _features(move, facts, f"machine {name}: {move['message']}")
        rows = moves(facts, name)
        _need(len({row[:2] for row in rows}) == len(rows), f"machine {name}: two moves for one message in one state")
        for state in machine["state"]:
            _features(state, facts, f"machine {name}: {state['name']}")
        for before, message, after, _ in rows:
            _need({before, after} <= set(states), f"machine {name}: {before} to {after}")
            _need(message in facts["message"], f"machine {name}: message {message}")
            heard.add(message)
        reached, todo = {machine["first"]}, [machine["first"]]
        while todo:
            fresh = {row[2] for row in rows if row[0] == todo[-1]} - reached
            todo.pop()
            reached |= fresh
            todo += fresh
        _need(reached == set(states), f"machine {name}: {sorted(set(states) - reached)} is never reached")
    _need(
        heard | {"Error"} == facts["message"].keys(),
        f"no state hears {sorted(facts['message'].keys() - heard - {'Error'})}",
    )


def _known(type_: str, facts: Facts) -> bool:
    inner = re.fullmatch(r"(struct|enum):(\w+)|list<(struct|enum):(\w+)>|list<(str|bytes)>", type_)
    if inner is None:
        return type_ in _PLAIN
    if inner[5]:
        return True
    kind, name = (part for part in inner.groups()[:4] if part)
    return name in facts[kind] or (kind, name) == ("enum", "ErrorCode")


def _range(row: Facts) -> range:
    return range(row["first"], row["last"] + 1, row["step"])


def _features(row: Facts, facts: Facts, at: str) -> None:
    _need(row.get("feature") != [], f"{at}: no feature")
    _need(set(row.get("feature", ())) <= facts["feature"].keys(), f"{at}: feature {row.get('feature')}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("."))


def _clauses(ids: Sequence[str], at: str) -> None:
    _need(all(_CLAUSE.fullmatch(c) for c in ids), f"{at}: clauses {list(ids)}")


def _keys(row: Facts, must: set[str], may: set[str], at: str) -> None:
    _need(must <= row.keys(), f"{at}: a fact is missing: {sorted(must - row.keys())}")
    _need(row.keys() <= must | may, f"{at}: unknown facts {sorted(row.keys() - must - may)}")
    _need(all(row[k] != "" for k in must), f"{at}: an empty fact")


def _ascend(numbers: Sequence[int], what: str) -> None:
    _need(list(numbers) == sorted(set(numbers)), f"{what} do not ascend")


def _need(good: bool, what: str) -> None:
    if not good:
        raise RegistryError(what)
