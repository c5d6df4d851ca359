"""`kvproto import`, and `check` of captures: what messages of other engines state, and what they leave unsaid."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvproto.cli import plans
from kvproto.cli.plans import REFUSED, chosen, compatible, read_geometry
from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.compare import differences as warnings_of
from kvproto.planning.compare import unstated
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan, plan
from kvproto.wire import to_json
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_file
from kvproto_captures.capture import messages
from kvproto_captures.compare import Difference, compare
from kvproto_captures.fleet import Fleet
from kvproto_captures.interpreter import read, resolve
from kvproto_captures.tables import engines, words
from kvproto_catalog.command import IGNORE, read_configs

__all__ = ["add"]

UNTOLD = 4
"""The exit status if nothing differs, but too little is stated to plan."""


def add(commands: Any) -> None:
    """Add `import`, and let `check` read captures."""
    parser = commands.add_parser("import", help="read a capture of another engine's messages")
    parser.add_argument("capture", help="a file, or - for standard input, in any form of docs/import.md")
    parser.add_argument("--engine", choices=sorted(engines()), help="the engine, if the messages do not show it")
    parser.add_argument("--release", metavar="N.N.N", help="its release, if the messages do not show it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the Description there")
    parser.set_defaults(run=_import)
    _add_words(parser, "", "")
    check = commands.choices["check"]
    check.set_defaults(run=_check_any)
    _add_words(check, " of a capture; prefill.NAME or decode.NAME for one side", ", for captures")


def _add_words(parser: argparse.ArgumentParser, which: str, what: str) -> None:
    """Add the options that state what messages leave unsaid."""
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--say", metavar="NAME=VALUE", help=f"state what the messages leave unsaid{which}", **many)
    parser.add_argument("--config", type=Path, help=f"the model's config.json{what}")
    drafts = "a draft model's config.json; may be repeated"
    parser.add_argument("--draft", type=Path, metavar="CONFIG", help=drafts, **many)
    parser.add_argument("--ignore", **IGNORE)
    parser.add_argument("--fact", metavar="NAME=VALUE", help="an identity that both sides must share", **many)


def _import(args: argparse.Namespace) -> int:
    """Run `kvproto import`; returns the exit status."""
    try:
        if args.release and not args.engine:
            raise LocalError(ErrorCode.MISSING_FIELD, "engine", "the engine whose release it is", "none", "--engine")
        fleet = _fleet(args.capture, _pairs("say", args.say), args.engine, args.release)
        complete = args.out or not fleet.missing(args.config is not None)
        geometry = _describe(fleet, args) if complete else None
        if args.out and geometry:
            args.out.write_text(json.dumps(to_json(geometry)) + "\n")
    except (KvprotoError, OSError, ValueError) as error:
        return _failed(error)
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
    if any(_is_capture(path) for path in (args.source, args.sink)) or _options(args):
        return _check(args)
    return plans.run(args)


def _options(args: argparse.Namespace) -> list[str]:
    return [option for option in ("say", "config", "draft", "ignore", "fact") if getattr(args, option)]


@attrs.frozen
class _Side:
    """One of the two files, as far as it states a Description."""

    fleet: Fleet | None
    """None for a Description."""
    geometry: Geometry | None
    unsaid: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.fleet.name if self.fleet else "Description"


def _check(args: argparse.Namespace) -> int:
    """Run `kvproto check` for two captures, or a capture and a Description; returns the exit status."""
    try:
        said = _by_side(_pairs("say", args.say))
        source, sink = _side(args, args.source, said, "source"), _side(args, args.sink, said, "sink")
    except (KvprotoError, OSError, ValueError) as error:
        return _failed(error)
    if not source.fleet and not sink.fleet:
        print(f"error: --{_options(args)[0]} is of captures, and both files are Descriptions", file=sys.stderr)
        return 1
    differences = compare(source.fleet, sink.fleet) if source.fleet and sink.fleet else []
    agreed, refused = None, None
    if source.geometry is not None and sink.geometry is not None:
        try:
            agreed = plan(source.geometry, sink.geometry, chosen(args))
        except KvprotoError as error:
            refused = error
    (_tell_json if args.json else _tell)((source, sink), differences, agreed, refused)
    if differences or refused:
        return REFUSED
    return 0 if agreed is not None else UNTOLD


def _side(args: argparse.Namespace, path: Path, said: Mapping[str, dict[str, str]], side: str) -> _Side:
    if not _is_capture(path):
        if said[side]:
            wanted = f"words of captures: {path} is a Description"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", wanted, ", ".join(said[side]))
        return _Side(None, read_geometry(path))
    try:
        fleet = _fleet(str(path), said["both"] | said[side])
        unsaid = [word.word for word in fleet.missing(bool(args.config))]
        try:
            return _Side(fleet, _describe(fleet, args), unsaid)
        except LocalError as error:
            if error.code != ErrorCode.MISSING_FIELD:
                raise
            return _Side(fleet, None, unsaid)
    except KvprotoError as error:
        raise error.at(f"{path}: {error.path}") from None


def _tell_json(
    sides: tuple[_Side, _Side], differences: Sequence[Difference], agreed: Plan | None, refused: KvprotoError | None
) -> None:
    source, sink = sides
    differ = bool(differences or refused)
    verdict: dict[str, Any] = {
        "compatible": None if agreed is None and not differ else not differ,
        "source": source.name,
        "sink": sink.name,
        "differences": [attrs.asdict(difference) for difference in differences],
        "unsaid": {"source": list(source.unsaid), "sink": list(sink.unsaid)},
        "plan": agreed.digest.hex() if agreed else None,
        "unstated": unstated(source.geometry, sink.geometry) if agreed and source.geometry and sink.geometry else [],
    }
    if refused:
        names = {"code": refused.code.name, "path": refused.path}
        verdict["refused"] = {**names, "source": refused.mine, "sink": refused.yours}
    print(json.dumps(verdict))


def _tell(
    sides: tuple[_Side, _Side], differences: Sequence[Difference], agreed: Plan | None, refused: KvprotoError | None
) -> None:
    source, sink = sides
    if source.fleet and sink.fleet:
        verdict = "differ" if differences else "do not differ in what both state"
        print(f"their messages: prefill {source.name}, decode {sink.name}: {verdict}")
        width = max((len(d.path) for d in differences), default=0)
        for d in differences:
            print(f"  {d.path:<{width}}  prefill {d.source}; decode {d.sink}")
    for name, side in (("prefill", source), ("decode", sink)):
        if side.unsaid:
            print(f"unsaid by {name}: {', '.join(side.unsaid)} (--say NAME=VALUE)")
    if refused:
        print(f"by kvproto, refused: {refused.between('prefill', 'decode')}")
    elif agreed is not None and source.geometry and sink.geometry:
        print("by kvproto, ", end="")
        between = source.geometry, sink.geometry
        compatible(agreed, warnings_of(*between), unstated(*between), False, " (--fact NAME=VALUE)")


def _failed(error: Exception) -> int:
    text = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else str(error)
    print(f"error: {text}", file=sys.stderr)
    return 1


def _fleet(path: str, said: Mapping[str, str], engine: str | None = None, release: str | None = None) -> Fleet:
    return Fleet.of(resolve([read(raw, engine, release) for raw in messages(read_file(path))]), said)


def _is_capture(path: Path) -> bool:
    """Whether a file is not JSON, or has a known message; others are read, and refused, as Descriptions."""
    try:
        data = read_file(path)
    except OSError:
        return False
    if data.lstrip()[:1] not in (b"{", b"["):
        return bool(data)
    try:
        return any(raw.form != "map" or raw.engine or read(raw) for raw in messages(data))
    except KvprotoError:
        return b'"frames"' in data


def _describe(fleet: Fleet, args: argparse.Namespace) -> Geometry:
    configs = read_configs([args.config, *args.draft] if args.config else args.draft, args.ignore)
    config, drafts = (configs[0], configs[1:]) if args.config else (None, configs)
    return fleet.describe(config, drafts, _pairs("fact", args.fact))


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in texts)
    if len(pairs) < len(texts) or any("=" not in text for text in texts):
        raise LocalError(ErrorCode.OUT_OF_RANGE, option, "NAME=VALUE, each name once", " ".join(texts))
    return pairs


def _by_side(said: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Words for both captures and for each; raises LocalError for an unknown side, or a word given twice for one."""
    words: dict[str, dict[str, str]] = {"both": {}, "source": {}, "sink": {}}
    for name, value in said.items():
        side, dot, word = name.rpartition(".")
        if side not in _SIDES or (dot and not side):
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", "NAME, prefill.NAME or decode.NAME", name)
        if word in words[_SIDES[side]]:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", "each name of a side once", name)
        words[_SIDES[side]][word] = value
    return words


_SIDES = {"": "both", "prefill": "source", "source": "source", "decode": "sink", "sink": "sink"}
"""The side that a prefix stands for."""


def _lines(fleet: Fleet, config: bool) -> Iterator[str]:
    yield f"{fleet.name}: {len(fleet.messages)} message{'s' * (len(fleet.messages) > 1)}"
    for one in fleet.messages:
        yield f"{one.path} {one.message.name}: {one.message.doc}"
        places = {row.name: row.at for row in one.engine.rows(one.message, one.releases[-1])}
        yield from _fields(places, one.values, "  ")
    known = fleet.known()
    if known:
        yield "stated:"
    for word, value in known.items():
        yield f"  {word:<16} {value}  ({fleet.where.get(word, 'follows')})"
    for rank in fleet.ranks.values():
        yield f"  a rank: {', '.join(f'{word} {_counted(value)}' for word, value in rank.items() if value != [])}"
    unsaid = fleet.unsaid(config)
    if unsaid:
        yield "unsaid:"
    for missing in unsaid:
        taken = "" if missing.usual is None else f"; taken as {missing.usual}"
        yield f"  {missing.word:<16} {missing.doc}{taken}  (--say {missing.word}=...: {missing.say})"
    yield "never said by these messages, and both sides must have alike (--fact NAME=VALUE):"
    for name, doc in words()["fact"].items():
        yield f"  {name:<16} {doc}"


def _fields(places: Mapping[str, int], values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _fields(places, value, indent + "  ")
        else:
            at = places.get(name, -1)
            yield f"{indent}{at if at >= 0 else '':>3} {name:<24} {_short(value)}"


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
    rows = [{"message": one.message.name, "path": one.path, "fields": _hex(one.values)} for one in fleet.messages]
    return {
        "engine": fleet.engine.name,
        "releases": list(fleet.messages[0].releases),
        "messages": rows,
        "stated": fleet.known(),
        "ranks": list(fleet.ranks.values()),
        "unsaid": [attrs.asdict(missing) for missing in fleet.unsaid()],
        "description": to_json(geometry) if geometry else None,
    }


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {k: _hex(v) for k, v in value.items()}
    return value
