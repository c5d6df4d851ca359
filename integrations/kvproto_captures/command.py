"""`kvproto import`, and `check` of captures: what messages of other engines state, and what they leave unsaid."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvproto.cli import plans
from kvproto.cli.plans import REFUSED, chosen, compatible, read_config, read_geometry
from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.compare import differences as warned
from kvproto.planning.compare import unstated
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan, plan
from kvproto.wire import to_json
from kvproto.wire.enums import ErrorCode
from kvproto_captures.captures import MOST_BYTES, messages
from kvproto_captures.compare import Difference, compare
from kvproto_captures.fleet import Fleet
from kvproto_captures.reading import Reading, read, resolve
from kvproto_captures.tables import engines, words

__all__ = ["add"]

UNTOLD = 4
"""The exit status if nothing differs, but too little is stated to plan."""


def add(commands: Any) -> None:
    """Add `import`, and the options of `check` for captures."""
    made = commands.add_parser("import", help="read a capture of another engine's messages")
    made.add_argument("capture", help="a file, or - for standard input, in any form of docs/import.md")
    made.add_argument("--engine", choices=sorted(engines()), help="the engine, if the messages do not show it")
    made.add_argument("--release", metavar="N.N.N", help="its release, if the messages do not show it")
    made.add_argument("--json", action="store_true", help="print JSON, for programs")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the Description there")
    made.set_defaults(run=_import)
    commands.choices["check"].set_defaults(run=_check_any)
    for one, both in (
        (made, ""),
        (commands.choices["check"], " of a capture; prefill.NAME or decode.NAME for one side"),
    ):
        one.add_argument(
            "--say",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"state what the messages leave unsaid{both}",
        )
        one.add_argument("--config", type=Path, help=f"the model's config.json{both and ', for captures'}")
        one.add_argument(
            "--draft",
            action="append",
            type=Path,
            default=[],
            metavar="CONFIG",
            help="a draft model's config.json; may be repeated",
        )
        one.add_argument(
            "--fact", action="append", default=[], metavar="NAME=VALUE", help="an identity that both sides must share"
        )


def _import(args: argparse.Namespace) -> int:
    """Run `kvproto import`; returns the exit status."""
    try:
        if args.release and not args.engine:
            raise LocalError(ErrorCode.MISSING_FIELD, "engine", "the engine whose release it is", "none", "--engine")
        fleet = _fleet(args.capture, _pairs("say", args.say), args.engine, args.release)
        unsaid = [u for u in fleet.unsaid(args.config is not None) if u.usual is None]
        geometry = None if unsaid and not args.out else _describe(fleet, args)
        if args.out and geometry:
            args.out.write_text(json.dumps(to_json(geometry)) + "\n")
    except (KvprotoError, OSError, ValueError) as error:
        print(f"error: {_said(error)}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(_as_json(fleet, geometry)))
        return 0
    for line in _lines(fleet, args.config is not None):
        print(line)
    if args.out:
        print(f"wrote {args.out}")
    elif geometry is not None:
        print("The Description follows from this: --out FILE writes it.")
    return 0


def _check_any(args: argparse.Namespace) -> int:
    """Run `kvproto check`: its own for two Descriptions without options of captures; returns the exit status."""
    if any(_is_capture(path) for path in (args.source, args.sink)) or _own(args):
        return _check(args)
    return plans.run(args)


def _own(args: argparse.Namespace) -> list[str]:
    return [option for option in ("say", "config", "draft", "fact") if getattr(args, option)]


def _check(args: argparse.Namespace) -> int:
    """Run `kvproto check` for two captures, or a capture and a Description; returns the exit status."""
    fleets: list[Fleet | None] = []
    sides: list[Geometry | None] = []
    try:
        said = _by_side(_pairs("say", args.say))
        for side, path in (("source", args.source), ("sink", args.sink)):
            if not _is_capture(path):
                if said[side]:
                    raise LocalError(
                        ErrorCode.OUT_OF_RANGE,
                        "say",
                        f"words of captures: {path} is a Description",
                        ", ".join(said[side]),
                    )
                fleets.append(None)
                sides.append(read_geometry(path))
                continue
            try:
                fleets.append(_fleet(str(path), said["both"] | said[side]))
                sides.append(_described(fleets[-1], args))
            except KvprotoError as error:
                raise error.at(f"{path}: {error.path}") from None
    except (KvprotoError, OSError, ValueError) as error:
        print(f"error: {_said(error)}", file=sys.stderr)
        return 1
    if not any(fleets):
        print(f"error: --{_own(args)[0]} is of captures, and both files are Descriptions", file=sys.stderr)
        return 1
    differences = compare(fleets[0], fleets[1]) if fleets[0] and fleets[1] else []
    made, refused = None, None
    if sides[0] is not None and sides[1] is not None:
        try:
            made = plan(sides[0], sides[1], chosen(args))
        except KvprotoError as error:
            refused = error
    unsaid = [[u.word for u in f.unsaid(bool(args.config)) if u.usual is None] if f else [] for f in fleets]
    warnings = warned(sides[0], sides[1]) if made and sides[0] and sides[1] else []
    bare = unstated(sides[0], sides[1]) if made and sides[0] and sides[1] else []
    _tell(args.json, fleets, unsaid, differences, made, refused, warnings, bare)
    if differences or refused:
        return REFUSED
    return 0 if made is not None else UNTOLD


def _described(fleet: Fleet | None, args: argparse.Namespace) -> Geometry | None:
    """The Description, if enough is stated for one."""
    try:
        return _describe(fleet, args) if fleet else None
    except LocalError as error:
        if error.code != ErrorCode.MISSING_FIELD:
            raise
        return None


def _tell(
    as_json: bool, fleets: Sequence[Fleet | None], unsaid: Sequence[Sequence[str]], differences: Sequence[Difference],
    made: Plan | None, refused: KvprotoError | None, warnings: Sequence[tuple[str, str, str]], bare: Sequence[str],
) -> None:  # fmt: skip
    names = [fleet.name if fleet else "Description" for fleet in fleets]
    if as_json:
        rows = [{"path": d.path, "source": d.source, "sink": d.sink} for d in differences]
        fits = None if made is None and not differences and not refused else not differences and not refused
        told: dict[str, Any] = {"compatible": fits, "source": names[0], "sink": names[1], "differences": rows}
        told |= {
            "unsaid": {"source": unsaid[0], "sink": unsaid[1]},
            "plan": made.digest.hex() if made else None,
            "unstated": bare,
        }
        if refused:
            told["refused"] = {
                "code": refused.code.name,
                "path": refused.path,
                "source": refused.mine,
                "sink": refused.yours,
            }
        print(json.dumps(told))
        return
    if all(fleets):
        verdict = "differ" if differences else "do not differ in what both state"
        print(f"their messages: prefill {names[0]}, decode {names[1]}: {verdict}")
        width = max((len(d.path) for d in differences), default=0)
        for d in differences:
            print(f"  {d.path:<{width}}  prefill {d.source}; decode {d.sink}")
    for side, words_ in zip(("prefill", "decode"), unsaid, strict=True):
        if words_ and made is None and refused is None:
            print(f"unsaid by {side}: {', '.join(words_)} (--say NAME=VALUE)")
    if refused:
        print(f"by kvproto, refused: {refused.between('prefill', 'decode')}")
    elif made is not None:
        print("by kvproto, ", end="")
        compatible(made, warnings, bare, False, " (--fact NAME=VALUE)")


def _fleet(path: str, said: Mapping[str, str], engine: str | None = None, release: str | None = None) -> Fleet:
    data = sys.stdin.buffer.read(MOST_BYTES + 1) if path == "-" else _bounded(Path(path))
    return Fleet.of(resolve([read(raw, engine, release) for raw in messages(data)]), said)


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _is_capture(path: Path) -> bool:
    """Whether a file is not JSON, or has a known message; others are read, and refused, as Descriptions."""
    try:
        data = _bounded(path)
    except OSError:
        return False
    if data.lstrip()[:1] not in (b"{", b"["):
        return bool(data)
    try:
        return any(raw.forms != ("map",) or raw.engine or read(raw) for raw in messages(data))
    except KvprotoError:
        return b'"frames"' in data


def _describe(fleet: Fleet, args: argparse.Namespace) -> Geometry:
    config = read_config(args.config) if args.config else None
    return fleet.describe(config, [read_config(path) for path in args.draft], _pairs("fact", args.fact))


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in given)
    if len(pairs) < len(given) or any("=" not in text for text in given):
        raise LocalError(ErrorCode.OUT_OF_RANGE, option, "NAME=VALUE, each name once", " ".join(given))
    return pairs


def _by_side(said: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Words for both captures and for each; raises LocalError for an unknown side, or a word given twice for one."""
    found: dict[str, dict[str, str]] = {"both": {}, "source": {}, "sink": {}}
    for name, value in said.items():
        side, dot, word = name.rpartition(".")
        if side not in _SIDES or (dot and not side):
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", "NAME, prefill.NAME or decode.NAME", name)
        if word in found[_SIDES[side]]:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", "each name of a side once", name)
        found[_SIDES[side]][word] = value
    return found


_SIDES = {"": "both", "prefill": "source", "source": "source", "decode": "sink", "sink": "sink"}
"""The side that a prefix stands for."""


def _said(error: Exception) -> str:
    return error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else str(error)


def _lines(fleet: Fleet, config: bool) -> Iterator[str]:
    yield f"{fleet.name}: {len(fleet.readings)} message{'s' * (len(fleet.readings) > 1)}"
    for reading in fleet.readings:
        yield f"{reading.path} {reading.message.name}: {reading.message.doc}"
        yield from _fields(reading, reading.values, "  ")
    known = fleet.known()
    if known:
        yield "stated:"
    for word, value in known.items():
        yield f"  {word:<16} {value}  ({fleet.where.get(word, 'follows')})"
    for rank in fleet.ranks.values():
        yield f"  a rank: {', '.join(f'{word} {_counted(value)}' for word, value in rank.items() if value != [])}"
    unsaid = list(fleet.unsaid(config))
    if unsaid:
        yield "unsaid:"
    for one in unsaid:
        taken = "" if one.usual is None else f"; taken as {one.usual}"
        yield f"  {one.word:<16} {one.doc}{taken}  (--say {one.word}=...: {one.say})"
    yield "never said by these messages, and both sides must have alike (--fact NAME=VALUE):"
    for name, doc in words()["fact"].items():
        yield f"  {name:<16} {doc}"


def _fields(reading: Reading, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    places = {row.name: row.at for row in reading.message.rows if reading.releases[-1] in _span(reading, row)}
    for name, value in values.items():
        at = places.get(name, -1)
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _fields(reading, value, indent + "  ")
        else:
            yield f"{indent}{at if at >= 0 else '':>3} {name:<24} {_short(value)}"


def _span(reading: Reading, row: Any) -> tuple[str, ...]:
    return tuple(r for r in reading.releases if row in reading.engine.rows(reading.message, r))


def _counted(value: Any) -> str:
    """A value as text; a list of equal values, or a long list, by its length."""
    if isinstance(value, list) and len(value) > 1 and all(v == value[0] for v in value):
        return f"{len(value)} x {value[0]}"
    return f"of {len(value)}" if isinstance(value, list) and len(value) > 4 else str(value)


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{value[:16].hex()}{'...' if len(value) > 16 else ''} [{len(value)} bytes]"
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(repr, value[:8]))}, ...] [{len(value)}]"
    text = str(value)
    return text if text.isprintable() else repr(text)


def _as_json(fleet: Fleet, geometry: Geometry | None) -> dict[str, Any]:
    releases = list(fleet.readings[0].releases)
    rows = [{"message": r.message.name, "path": r.path, "fields": _hex(r.values)} for r in fleet.readings]
    unsaid = [{"word": u.word, "doc": u.doc, "say": u.say, "usual": u.usual} for u in fleet.unsaid()]
    return {
        "engine": fleet.readings[0].engine.name, "releases": releases, "messages": rows, "stated": fleet.known(),
        "ranks": list(fleet.ranks.values()), "unsaid": unsaid, "description": to_json(geometry) if geometry else None,
    }  # fmt: skip


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {k: _hex(v) for k, v in value.items()}
    return value
