"""`kvproto check` and `plan`: say whether two Descriptions fit, and who sends what to whom."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from string import ascii_letters
from typing import Any

import attrs
import numpy as np

from kvproto.calibration import ORIGIN, advise, estimates, load_costs, reference_costs
from kvproto.cli.slices import as_json, page, slices, table
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Runs, Window
from kvproto.errors import KvprotoError, bad
from kvproto.planning.compare import unstated
from kvproto.planning.conversion import converted
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Plan, differences, plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.bench import CostedWay
from kvproto.wire import from_json
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.plain import read_file, read_json, refuse

REFUSED = 3
"""The exit status if two Descriptions do not fit."""
_MOST_TOKENS = 1 << 24
_LETTERS = "TDEFGHIJ"
_FEATURES = (Feature.SPREAD_ONE, Feature.FEW_SOURCES, Feature.COLD_DRAFT, Feature.CONVERT)


def _tokens(text: str) -> int:
    if not 0 <= int(text) <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"0 to {_MOST_TOKENS}, not {text}")
    return int(text)


_COMMANDS = {
    "check": "say whether two Descriptions fit: exit status 0, or 3 and why not",
    "plan": "say who sends what to whom",
}
_SWITCHES = {
    "--json": "print JSON, for programs",
    "--spread-one": "feature SPREAD_ONE: read replicated bytes from the lowest rank",
    "--few-sources": "feature FEW_SOURCES: await few of the ranks that have the same bytes",
    "--cold-draft": "feature COLD_DRAFT: let a draft that prefill lacks start cold",
    "--convert": "feature CONVERT: convert parts of which both Descriptions state the conversion",
}
_ORDER: dict[str, Any] = {"choices": ("NHD", "HND"), "default": "NHD", "help": "order within a page (default NHD)"}
_PLAN_OPTIONS: dict[str, dict[str, Any]] = {
    "--tokens": {"type": _tokens, "default": 8192, "metavar": "N", "help": "tokens of the request to cost, and positions on its other axes (default 8192)"},
    "--source-layout": _ORDER,
    "--sink-layout": _ORDER,
    "--first-token": {"type": _tokens, "default": 0, "metavar": "K", "help": "first token to transfer (default 0)"},
    "--costs": {"type": Path, "metavar": "FILE", "help": "costs measured by `kvproto probe --out FILE`, instead of those of a pair of H200"},
    "--slices": {"action": "store_true", "help": "for each cache, print the remote rank, and the global, local and remote range"},
    "--html": {"type": Path, "metavar": "FILE", "help": "write the plan as a picture, one self-contained page"},
}  # fmt: skip


def add(commands: Any) -> None:
    for command, text in _COMMANDS.items():
        parser = commands.add_parser(command, help=text)
        parser.add_argument("source", type=Path, help="Description of the prefill side")
        parser.add_argument("sink", type=Path, help="Description of the decode side")
        for name, what in _SWITCHES.items():
            parser.add_argument(name, action="store_true", help=what)
        for name, option in _PLAN_OPTIONS.items() if command == "plan" else ():
            parser.add_argument(name, **option)
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source, sink = read_geometry(args.source), read_geometry(args.sink)
    file = args.costs if args.command == "plan" else None
    costs = load_costs(file) if file else reference_costs()
    features = chosen(args)
    try:
        agreed = plan(source, sink, features)
    except KvprotoError as error:
        return _refused(error, args.json)
    if args.command == "check":
        return compatible(agreed, differences(source, sink), unstated(source, sink), args.json)
    request = args.first_token, args.tokens, (args.source_layout, args.sink_layout)
    moved = programs(source, sink, agreed, request)
    source_as_sent = converted(source, sink) if Feature.CONVERT in features else source
    rules = spreads(source, sink, features, request, costs)
    if args.html is not None:
        sizes = {pair: program.bytes for pair, program in moved.items()}
        args.html.write_text(page(source, sink, agreed, sizes, _letters(sink), args.tokens))
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        data = _as_json(sink, agreed, moved, costs) | {"rules": as_data(rules), "costs": str(file) if file else ORIGIN}
        if args.slices:
            data["slices"] = as_json(slices(source_as_sent, sink, agreed))
        print(json.dumps(data))
        return 0
    if args.slices:
        lines = table(slices(source_as_sent, sink, agreed))
    else:
        by = f"by {file}" if file else ORIGIN
        picture = _picture(source, sink, agreed, moved, args.first_token, args.tokens)
        lines = chain(picture, _costed(moved, costs, by), shown(rules))
    for line in lines:
        print(line)
    return 0


def chosen(args: argparse.Namespace) -> list[Feature]:
    """The features that options of `check` and `plan` choose."""
    return [feature for feature in _FEATURES if getattr(args, feature.name.lower())]


def read_geometry(path: Path) -> Geometry:
    """Read a Description: a Geometry in JSON form; raises KvprotoError, OSError or ValueError."""
    data = read_json(read_file(path), str(path), finite=False)  # a config.json, which is refused below, may have one
    try:
        _check_printable(data, "geometry")
        if isinstance(data, dict) and data.keys() & {"model_type", "num_hidden_layers", "text_config"}:
            raise bad("geometry", "a Description, which `kvproto describe` writes of a config.json", "a config.json")
        geometry = from_json(Geometry, data)
        validate(geometry)
    except KvprotoError as error:
        raise error.at(f"{path}: {error.path}") from None
    return geometry


def _check_printable(value: Any, path: str) -> None:
    """Raise BAD_TEXT for text with control characters, which would reach the terminal."""
    if isinstance(value, str) and not value.isprintable():
        raise refuse(ErrorCode.BAD_TEXT, path, "printable text", value)
    for key, held in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        _check_printable(held, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}")


def _refused(error: KvprotoError, as_json: bool) -> int:
    if as_json:
        sides = {"source": error.mine, "sink": error.yours, "advice": error.advice}
        print(json.dumps({"compatible": False, "code": error.code.name, "path": error.path} | sides))
    else:
        print(f"refused: {error.between('prefill', 'decode')}")
    return REFUSED


def compatible(
    agreed: Plan, warnings: Sequence[tuple[str, str, str]], unsaid: Sequence[str], as_json: bool, advice: str = ""
) -> int:
    """Print the plan's digest, its warnings, and which facts were not compared; returns the exit status."""
    if as_json:
        differing = [{"path": path, "source": a, "sink": b} for path, a, b in warnings]
        data = {"compatible": True, "plan": agreed.digest.hex(), "cold": list(agreed.cold)}
        print(json.dumps(data | {"warnings": differing, "unstated": list(unsaid)}))
        return 0
    print(f"compatible: plan {agreed.digest.hex()[:16]}, {len(agreed.routes)} routes")
    for path, a, b in warnings:
        print(f"warning: {path}: prefill has {a}, decode has {b}")
    for model in agreed.cold:
        print(f"warning: draft {model} starts cold: prefill does not have it")
    if unsaid:
        print(f"not compared, as neither side states them: {', '.join(unsaid)}{advice}")
    return 0


def _as_json(
    sink: Geometry, agreed: Plan, moved: dict[tuple[int, int], CopyProgram], costs: Sequence[CostedWay]
) -> dict[str, Any]:
    pairs = []
    for (a, b), program in moved.items():
        runs = program.runs()
        ways = estimates(runs, costs)
        pairs.append(
            {
                "source": a,
                "sink": b,
                "send_flags": list(agreed.send_flags(a, b)),
                "bytes": runs.bytes,
                "runs": runs.count,
                "bytes_per_run": runs.mean,
                "routes": {str(r.group): r.digest.hex() for r in agreed.between(a, b)},
                "seconds": {e.name: e.seconds for e in ways},
                "advice": advise(ways).kind,
            }
        )
    required = {str(r.rank): list(agreed.required(r.rank)) for r in sink.ranks}
    return {"plan": agreed.digest.hex(), "cold": list(agreed.cold), "required": required, "pairs": pairs}


def _picture(
    source: Geometry, sink: Geometry, agreed: Plan, moved: dict[tuple[int, int], CopyProgram], first: int, tokens: int
) -> Iterator[str]:
    """A matrix of ranks with a letter for each group, and the bytes that the request moves."""
    letters = _letters(sink)
    shown = ", ".join(f"{letters[g.id]} = {g.name}" for g in sink.groups)
    yield f"{shown}; prefill ranks across, decode ranks down"
    width = max(4, len("".join(letters.values())) + 2)
    columns = [r.rank for r in source.ranks]
    if len(columns) * width > 200:
        yield f"({len(columns)} x {len(sink.ranks)} ranks: only those with routes, rank by rank)"
        for rank in sink.ranks[:64]:
            yield f"D{rank.rank:<4} <- " + " ".join(
                f"P{a}:{''.join(letters[g] for g in agreed.send_flags(a, rank.rank))}"
                for a in agreed.required(rank.rank)
            )
    else:
        yield "       " + "".join(f"P{c:<{width - 1}}" for c in columns) + " awaits"
        for rank in sink.ranks:
            cells = "".join(
                f"{''.join(letters[g] for g in agreed.send_flags(a, rank.rank)) or '.':<{width}}" for a in columns
            )
            yield f"  D{rank.rank:<4}{cells} {len(agreed.required(rank.rank))} of {len(columns)}"
    total = Runs(sum(p.runs().count for p in moved.values()), sum(p.bytes for p in moved.values()))
    yield ""
    yield f"tokens [{first:,}, {first + tokens:,}), pools without gaps, items in no order:"
    yield f"  {_size(total.bytes)} in {total.count:,} runs of {_size(total.mean)} on average, over {len(moved)} rank pairs"


def _costed(moved: dict[tuple[int, int], CopyProgram], costs: Sequence[CostedWay], origin: str) -> Iterator[str]:
    """The rank pair that moves most, the time by each way to move it, and advice."""
    if not moved:
        return
    (a, b), busiest = max(moved.items(), key=lambda item: item[1].bytes)
    runs = busiest.runs()
    yield f"  busiest pair P{a} to D{b}: {_size(runs.bytes)} in {runs.count:,} runs of {_size(runs.mean)}; constants {origin}:"
    ways = estimates(runs, costs)
    for way in ways:
        yield f"    {way.seconds * 1e3:10.3f} ms  {way.name}"
    advice = advise(ways)
    yield f"  advice: {advice.kind}: {advice.why}"


def _letters(sink: Geometry) -> dict[int, str]:
    """The letter of each group: T for the target, D for the draft, and the last free one of the name for further groups."""
    first = {g.model: g.id for g in reversed(sink.groups)}
    letters = {g.id: _LETTERS[min(g.model, 7)] for g in sink.groups if first[g.model] == g.id}
    for group in (g for g in sink.groups if g.id not in letters):
        free = (c for c in (*reversed(group.name), *ascii_letters) if c.isalnum() and c not in letters.values())
        letters[group.id] = next(free, "?")
    return letters


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return ""


Moved = dict[tuple[int, int], CopyProgram]
"""The program of each routed (source, sink) rank pair."""
Request = tuple[int, int, Sequence[str]]
"""The first token, the number of tokens, and NHD or HND for each side."""
_RULES: dict[str, tuple[Feature, ...]] = {"even": (), "few": (Feature.FEW_SOURCES,), "one": (Feature.SPREAD_ONE,)}


def programs(source: Geometry, sink: Geometry, made: Plan, request: Request) -> Moved:
    """The program of each routed rank pair; raises KvprotoError for a request that is not possible."""
    first, tokens, layouts = request
    sides = [
        {r.rank: _side(g, r.rank, first, tokens, layout == "HND") for r in g.ranks}
        for g, layout in zip((source, sink), layouts, strict=True)
    ]
    found = {}
    for a, b in sorted({(r.source, r.sink) for r in made.routes}):
        (here, from_), (there, to) = sides[0][a], sides[1][b]
        found[a, b] = Pair(made.between(a, b), here, there).lower(from_, to)
    return found


def _side(
    geometry: Geometry, rank: int, first: int, tokens: int, heads_first: bool
) -> tuple[RankLayout, dict[int, Window]]:
    groups = {g.id: g for g in geometry.groups}
    dice = np.random.default_rng(rank)
    windows, counts = {}, {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        count = tokens
        if KINDS[group.kind].wraps:
            count = min(tokens, group.rows * group.tokens_per_row)
        need = items_needed(group, share.cp_rank, first + tokens - count, count)
        counts[group.id] = max(2 * need, 1)
        windows[group.id] = Window(first + tokens - count, count, dice.permutation(counts[group.id])[:need])
    return RankLayout(geometry, rank, columns_without_gaps(geometry, rank, counts, heads_first)[0]), windows


ANSWER = 300e-6
"""Seconds that a sink rank spends on each source that it awaits, in addition to the bytes: benchmarks/spread.py."""
SHARE = 0.7
"""The share of a source's time that it can send before requests wait for one another."""


@attrs.frozen
class Spread:
    """The cost of a rule of election for one request that one sink replica fetches."""

    rule: str
    """"even", "few" or "one", as in `kvproto.Options.spread`."""
    awaited: int
    """Sources of the sink rank that awaits most."""
    source: float
    """Seconds that the busiest source sends."""
    sink: float
    """Seconds that the busiest sink rank receives."""

    @property
    def seconds(self) -> float:
        """Seconds of the request by itself: the busier side, then the answers."""
        return max(self.source, self.sink) + self.awaited * ANSWER

    @property
    def rate(self) -> float:
        """The requests a second up to which they hardly wait for each other at the source."""
        return SHARE / self.source if self.source else float("inf")


def spread(rule: str, pairs: Mapping[tuple[int, int], Runs], costs: Sequence[CostedWay]) -> Spread:
    """Cost a rule by the runs of each (source, sink) rank pair, each moved the fastest way."""
    sides = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for pair, runs in pairs.items():
        seconds = estimates(runs, costs)[0].seconds
        for side, rank in zip(sides, pair, strict=True):
            side[rank].append(seconds)
    source, sink = (max(map(sum, side.values()), default=0.0) for side in sides)
    return Spread(rule, max(map(len, sides[1].values()), default=0), source, sink)


def advise_spread(rules: Iterable[Spread]) -> str:
    """The rule that serves a request fastest, and up to which rate of requests it does."""
    ranked = sorted(rules, key=lambda rule: (round(rule.seconds, 6), -rule.rate))
    fastest, most = ranked[0], max(ranked, key=lambda rule: rule.rate)
    if fastest.rate >= most.rate:
        return f"{fastest.rule}: the fastest, and no rule bears more requests"
    bounds = f"{fastest.rate:,.0f} requests a second from one source replica", f"up to {most.rate:,.0f}"
    return f"{fastest.rule} up to {bounds[0]}, {most.rule} beyond, {bounds[1]}"


def spreads(
    source: Geometry, sink: Geometry, features: Collection[Feature], request: Request, costs: Sequence[CostedWay]
) -> list[Spread]:
    """The cost of a request by each rule of election; empty if all rules make the same plan."""
    others = set(features) - {Feature.FEW_SOURCES, Feature.SPREAD_ONE}
    plans = {name: plan(source, sink, {*others, *chosen}) for name, chosen in _RULES.items()}
    if len({made.digest for made in plans.values()}) == 1:
        return []
    found = []
    for name, made in plans.items():
        runs = {pair: program.runs() for pair, program in programs(source, sink, made, request).items()}
        found.append(spread(name, runs, costs))
    return found


def as_data(found: Sequence[Spread]) -> dict[str, dict[str, float]]:
    """The costs by rule as JSON data; times are in seconds."""
    return {
        rule.rule: {"awaited": rule.awaited, "source_s": rule.source, "request_s": rule.seconds, "rate": rule.rate}
        for rule in found
    }


def shown(found: Sequence[Spread]) -> Iterator[str]:
    """A table of the rules, and advice on which to use when."""
    if not found:
        return
    yield ""
    yield "rules of election:  awaits   busiest source     one request   requests a second, at most"
    for rule in found:
        times = f"{rule.source * 1e3:14.3f} ms {rule.seconds * 1e3:12.3f} ms"
        yield f"  {rule.rule:<18}{rule.awaited:6} {times} {rule.rate:28,.0f}"
    yield f"  advice: {advise_spread(found)}"
