"""Straight-line code for the common case: a function for each message or struct and direction, without loops over fields.

The code reads the canonical form as it must be, field by field, and raises Doubt at the first byte that differs.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.specgen.registry import HEAD, Facts

__all__ = ["straight_module"]

_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}


def straight_module(facts: Facts) -> str:
    """kvproto/wire/straight.py"""
    bodies = facts["struct"] | facts["message"]
    out = [
        f'"""Straight-line encoding and decoding. {HEAD}"""', "", "# ruff: noqa", "", "from collections.abc import Callable", "from typing import Any", "", "from kvproto.wire import enums, messages",
        "from kvproto.wire.primitives import (", "    BYTE, BYTE_OF, Doubt, array_ascends, ascends, new, read_array, read_bin, read_count, read_text, read_uint, rises, setter, u64, unique,",
        "    write_array, write_bin, write_count, write_text, write_uint,", ")", "",
    ]  # fmt: skip
    for name in [*facts["enum"], "ErrorCode"]:
        out.append(f"_{name} = {{int(v): v for v in enums.{name}}}")
    out.append("")
    for name, body in bodies.items():
        setters = (f'_{name}_{f["name"]} = setter({name}, "{f["name"]}")' for f in body["field"])
        out += [
            "",
            f"{name} = messages.{name}",
            *setters,
            "",
            "",
            *_decoder(name, body, facts),
            "",
            "",
            *_encoder(name, body, facts),
            "",
        ]
    names = list(bodies)
    out += [
        "",
        "DECODE: dict[str, Callable[[Any, int], tuple[Any, int]]] = {",
        *(f'    "{n}": _d_{n},' for n in names),
        "}",
    ]
    out += ["ENCODE: dict[type[Any], Callable[[Any, list[Any]], None]] = {", *(f"    {n}: _e_{n}," for n in names), "}"]
    return "\n".join(out) + "\n"


def _limits(f: Facts, facts: Facts, kind: str, floor: int = 0) -> tuple[int, int]:
    return f.get("min", floor), f.get("max", facts["limit"][kind]["value"])


_SHORT = 15
"""The most entries of a map whose header is one byte; larger ones go through the strict tables."""
_NESTED = 8
"""The most elements of a list inside a list of a message; longer ones go through the strict tables, which count."""


def _weight(type_: str, facts: Facts) -> int:
    """The most entries and elements of a value of a message, without those of lists that are not in lists."""
    if type_.startswith("struct:"):
        fields = facts["struct"][type_[7:]]["field"]
        return len(fields) + sum(_weight(f["type"], facts) for f in fields)
    return _NESTED * (1 + _weight(type_[5:-1], facts)) if type_.startswith("list<") else 0


def _listed(facts: Facts) -> set[str]:
    """Structs that are in lists of messages."""
    types = {f["type"] for body in facts["message"].values() for f in body["field"]}
    return {type_[len("list<struct:") : -1] for type_ in types if type_.startswith("list<struct:")}


def _counts(name: str, body: Facts, facts: Facts) -> Iterator[str]:
    """A line that sets how many values a message with lists may have (KVP-BODY-VALUES)."""
    if name in facts["message"] and any(f["type"].startswith("list<") for f in body["field"]):
        fixed = sum(_weight(f["type"], facts) for f in body["field"] if not f["type"].startswith("list<"))
        yield f"    room = {facts['limit']['max_values']['value'] - len(body['field']) - fixed}"


def _counted(name: str, f: Facts, facts: Facts, count: str) -> Iterator[str]:
    """Lines that raise Doubt for a list that may have more values than are left, or that is in a list and not short."""
    if not f["type"].startswith("list<"):
        return
    if name in facts["message"]:
        yield f"room -= {1 + _weight(f['type'][5:-1], facts)} * {count}"
        yield "if room < 0:"
        yield "    raise Doubt"
    elif name in _listed(facts):
        yield f"if {count} > {_NESTED}:"
        yield "    raise Doubt"


def _decoder(name: str, body: Facts, facts: Facts) -> Iterator[str]:
    fields = body["field"]
    required = sum(f["presence"] == "required" for f in fields)
    optional = len(fields) - required
    yield f"def _d_{name}(b: Any, p: int) -> tuple[{name}, int]:"
    if optional:
        yield "    left = b[p]"
        yield f"    if not {0x80 + required} <= left <= {0x80 + min(len(fields), _SHORT)}:"
        yield "        raise Doubt"
        yield f"    left -= {0x80 + required}"
    else:
        yield f"    if b[p] != {0x80 + required}:"
        yield "        raise Doubt"
    yield "    p += 1"
    yield from _counts(name, body, facts)
    for f in fields:
        var, (test, size) = f"f{f['id']}", _key(f["id"])
        if f["presence"] == "required":
            yield f"    if not ({test}):" if size > 1 else f"    if b[p] != {f['id']}:"
            yield "        raise Doubt"
            yield from ("    " + line for line in _read(f, facts, var, f"p + {size}", name))
        else:
            yield f"    if left and {test}:"
            yield "        left -= 1"
            yield from ("        " + line for line in _read(f, facts, var, f"p + {size}", name))
            yield "    else:"
            yield f"        {var} = None"
    if optional:
        yield "    if left:"
        yield "        raise Doubt"
    values = {f["name"]: f"f{f['id']}" for f in fields}
    yield from _rules(name, body, facts, values)
    yield f"    o = new({name})"
    yield "    " + "; ".join(f"_{name}_{n}(o, {v})" for n, v in values.items())
    yield "    return o, p"


def _read(f: Facts, facts: Facts, var: str, at: str, name: str = "") -> Iterator[str]:
    """Lines that read the value at `at` into `var` and move p past it."""
    type_ = f["type"]
    if type_ in _BITS:
        low, high = f.get("min", 0), f.get("max", (1 << _BITS[type_]) - 1)
        yield from _read_head(var, at, type_ == "u64")
        if low:
            yield f"if {var} < {low}:"
            yield "    raise Doubt"
        if high < (1 << 64) - 1:
            yield f"if {var} > {high}:"
            yield "    raise Doubt"
    elif type_.startswith("enum:"):
        enum = type_[5:]
        is_open = enum == "ErrorCode" or facts["enum"][enum]["open"]
        yield from _read_head(var, at)
        if is_open:
            yield f"if {var} > 65535:"
            yield "    raise Doubt"
            yield f"{var} = _{enum}.get({var}, {var})"
        else:
            yield f"{var} = _{enum}.get({var})"
            yield f"if {var} is None:"
            yield "    raise Doubt"
    elif type_ == "bool":
        yield f"{var} = b[{at}]"
        yield f"if {var} != 194 and {var} != 195:"
        yield "    raise Doubt"
        yield f"{var} = {var} == 195"
        yield f"p = {at} + 1"
    elif type_ == "str":
        low, high = _limits(f, facts, "max_string")
        yield f"{var}, p = read_text(b, {at}, {low}, {high})"
    elif type_ == "bytes" and f.get("length", 256) < 256:
        size = f["length"]
        yield f"if b[{at}] != 196 or b[{at} + 1] != {size}:"
        yield "    raise Doubt"
        yield f"p = {at} + {size + 2}"
        yield f"{var} = bytes(b[p - {size} : p])"
    elif type_ == "bytes":
        low, high = (f["length"],) * 2 if "length" in f else _limits(f, facts, "max_bytes")
        yield f"{var}, p = read_bin(b, {at}, {low}, {high})"
    elif type_.startswith("array<"):
        low, high = _limits(f, facts, "max_array")
        widest = {8: 1, 16: 2, 32: 3, 64: 4}[_BITS[type_[6:-1]]]
        yield f"{var}, p = read_array(b, {at}, {widest}, {low}, {high})"
    elif type_.startswith("struct:"):
        yield f"{var}, p = _d_{type_[7:]}(b, {at})"
    else:
        low, high = _limits(f, facts, "max_list")
        items, item = f"v{var[1:]}", f"x{var[1:]}"
        yield f"n, p = read_count(b, {at}, {low}, {high})"
        yield from _counted(name, f, facts, "n")
        yield f"{items} = []"
        yield "for _ in range(n):"
        yield from ("    " + line for line in _read({"type": type_[5:-1]}, facts, item, "p"))
        yield f"    {items}.append({item})"
        yield f"{var} = tuple({items})"


def _id(number: int) -> bytes:
    """The bytes of a field id."""
    size = next(n for n in (0, 1, 2) if number < (0x80, 1 << 8, 1 << 16)[n])
    return (b"", b"\xcc", b"\xcd")[size] + number.to_bytes(max(1, size), "big")


def _key(number: int) -> tuple[str, int]:
    """An expression that says whether a field id is at p, and the number of its bytes."""
    tests = [f"b[p{f' + {i}' if i else ''}] == {byte}" for i, byte in enumerate(_id(number))]
    return " and ".join(tests), len(tests)


def _read_head(var: str, at: str, long: bool = False) -> Iterator[str]:
    yield f"{var} = b[{at}]"
    yield f"p = {at} + 1" if at == "p" else f"p += {int(at.removeprefix('p + ')) + 1}"
    yield f"if {var} > 127:"
    if long:  # 64 bits are the common case of these
        yield f"    if {var} == 207:"
        yield f"        ({var},) = u64(b, p)"
        yield f"        if {var} < 4294967296:"
        yield "            raise Doubt"
        yield "        p += 8"
        yield "    else:"
        yield f"        {var}, p = read_uint(b, {var}, p)"
    else:
        yield f"    {var}, p = read_uint(b, {var}, p)"


def _encoder(name: str, body: Facts, facts: Facts) -> Iterator[str]:
    """The function that encodes; constant bytes are gathered, with variable ones between them."""
    fields = body["field"]
    optional = [f for f in fields if f["presence"] == "optional"]
    yield f"def _e_{name}(o: Any, out: list[Any]) -> None:"
    yield f"    if o.__class__ is not {name}:"
    yield "        raise Doubt"
    for f in fields:
        yield f"    f{f['id']} = o.{f['name']}"
    yield from _counts(name, body, facts)
    yield from _rules(name, body, facts, {f["name"]: f"f{f['id']}" for f in fields}, writing=True)
    count = 0x80 + len(fields)
    if len(fields) > _SHORT:
        absent = ", ".join(f"f{f['id']}" for f in optional)
        yield f"    if ({absent},).count(None) < {len(fields) - _SHORT}:"
        yield "        raise Doubt"
    if optional:
        absent = " - ".join(f"(f{f['id']} is None)" for f in optional)
        yield f"    out.append(BYTE_OF[{count} - {absent}])"
        held = b""
    else:
        held = bytes((count,))
    parts: list[str] = []

    def flush() -> Iterator[str]:
        if parts:
            yield f"    out += ({', '.join(parts)},)"
            parts.clear()

    for f in fields:
        var = f"f{f['id']}"
        if f["presence"] == "optional":
            if held:
                parts.append(repr(held))
                held = b""
            yield from flush()
            yield f"    if {var} is not None:"
            lines, expression = _write(f, facts, var, name)
            if expression is None:
                yield f"        out.append({_id(f['id'])!r})"
                yield from ("        " + line for line in lines)
            else:
                yield from ("        " + line for line in lines)
                yield f"        out += ({_id(f['id'])!r}, {expression})"
            continue
        held += _id(f["id"])
        lines, expression = _write(f, facts, var, name)
        if expression is None:
            parts.append(repr(held))
            yield from flush()
            yield from ("    " + line for line in lines)
        else:
            yield from ("    " + line for line in lines)
            parts += [repr(held), expression]
        held = b""
    if held:
        parts.append(repr(held))
    yield from flush()


def _write(f: Facts, facts: Facts, var: str, name: str = "") -> tuple[list[str], str | None]:
    """Lines that check `var`, and an expression for its bytes; None if the lines write them themselves."""
    type_ = f["type"]
    if type_ in _BITS:
        low, high = f.get("min", 0), f.get("max", (1 << _BITS[type_]) - 1)
        check = [f"if {var}.__class__ is not int or not {low} <= {var} <= {high}:", "    raise Doubt"]
        return check, f"BYTE[{var}] if {var} < 256 else write_uint({var})"
    if type_.startswith("enum:"):
        enum = type_[5:]
        is_open = enum == "ErrorCode" or facts["enum"][enum]["open"]
        test = f"not 0 <= {var} <= 65535" if is_open else f"{var} not in _{enum}"
        check = [f"if {var}.__class__ is not enums.{enum} and {var}.__class__ is not int or {test}:", "    raise Doubt"]
        return check, f"BYTE[{var}] if {var} < 256 else write_uint({var})"
    if type_ == "bool":
        return [f"if {var}.__class__ is not bool:", "    raise Doubt"], f"b'\\xc3' if {var} else b'\\xc2'"
    if type_ == "str":
        low, high = _limits(f, facts, "max_string")
        return [], f"write_text({var}, {low}, {high})"
    if type_ == "bytes" and f.get("length", 256) < 256:
        size = f["length"]
        return [
            f"if {var}.__class__ is not bytes or len({var}) != {size}:",
            "    raise Doubt",
        ], f"{bytes((0xC4, size))!r}, {var}"
    if type_ == "bytes":
        low, high = (f["length"],) * 2 if "length" in f else _limits(f, facts, "max_bytes")
        return [f"write_bin({var}, {low}, {high}, out)"], None
    if type_.startswith("array<"):
        low, high = _limits(f, facts, "max_array")
        widest = {8: 1, 16: 2, 32: 3, 64: 4}[_BITS[type_[6:-1]]]
        return [f"write_array({var}, {widest}, {low}, {high}, out)"], None
    if type_.startswith("struct:"):
        return [f"_e_{type_[7:]}({var}, out)"], None
    low, high = _limits(f, facts, "max_list")
    item = f"x{var[1:]}"
    inner, expression = _write({"type": type_[5:-1]}, facts, item)
    lines = [
        f"if {var}.__class__ is not tuple:",
        "    raise Doubt",
        *_counted(name, f, facts, f"len({var})"),
        f"out.append(write_count(len({var}), {low}, {high}))",
        f"for {item} in {var}:",
    ]
    lines += ["    " + line for line in inner]
    if expression is not None:
        lines.append(f"    out += ({expression},)")
    return lines, None


def _rules(name: str, body: Facts, facts: Facts, values: dict[str, str], writing: bool = False) -> Iterator[str]:
    """Lines that raise Doubt for values that may break a rule; values of a wrong type make the comparison raise."""
    types = {f["name"]: f["type"] for f in body["field"]}
    optional = {f["name"] for f in body["field"] if f["presence"] == "optional"}
    for rule in body.get("rule", ()):
        args = rule["args"]
        a = values[args[0]]
        guard = f"{a} is not None and " if args[0] in optional else ""
        test = _broken(rule["rule"], args, values, types, facts)
        for other in args[1:]:
            if other in optional and rule["rule"] in ("le", "lt", "sum_le"):
                guard += f"{values[other]} is not None and "
        if rule["rule"] in ("present_iff", "only_if"):
            guard = ""
        yield f"    if {guard}{test}:"
        yield "        raise Doubt"


def _broken(rule: str, args: list[str | int], values: dict[str, str], types: dict[str, str], facts: Facts) -> str:
    v = [values[a] if isinstance(a, str) and a in values else str(a) for a in args]
    if rule in ("ascend", "rise", "unique"):
        function = {"ascend": "ascends", "rise": "rises", "unique": "unique"}[rule]
        if len(args) == 2:
            return f"len({v[0]}) > 1 and not {function}([x.{args[1]} for x in {v[0]}])"
        array = types[str(args[0])].startswith("array<")
        return f"not array_ascends({v[0]})" if array else f"len({v[0]}) > 1 and not ascends({v[0]})"
    if rule == "subset":
        return f"{v[0]} and not set({v[0]}) <= set({v[1]})"
    if rule in ("le", "lt"):
        return f"{v[0]} {'>' if rule == 'le' else '>='} {v[1]}"
    if rule == "sum_le":
        return f"{v[0]} + {v[1]} > {v[2]}"
    if rule == "same_length":
        return " or ".join(f"len({v[0]}) != len({other})" for other in v[1:])
    name = types[str(args[1])][5:]
    is_member = f"{v[1]} == {facts['enum'][name]['values'][args[2]]}"
    known = f"{v[1]} in _{name} and " if facts["enum"][name]["open"] else ""
    if rule == "present_iff":
        return f"{known}({v[0]} is not None) != ({is_member})"
    return f"{known}{v[0]} is not None and not {is_member}"
