"""`kvproto describe`, `check` and `plan`: write Descriptions, check that they fit, and show who sends what to whom."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvproto.calibration import ORIGIN, Cost, advise, estimates, load_costs, reference_costs
from kvproto.catalog.engines import ENGINES
from kvproto.catalog.models import PRESETS, Config, describe, draft_of
from kvproto.cli import layouts, sizes, slices
from kvproto.cli.page import page
from kvproto.cli.programs import as_data, programs, shown, spreads
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.cache import BLOCK_SCALED
from kvproto.planning.compare import unstated
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.plan import Plan, differences, plan
from kvproto.planning.slices import slices as slices_of
from kvproto.wire import from_json, to_json
from kvproto.wire.enums import DType, ErrorCode, Feature
from kvproto.wire.plain import read_json, refuse

__all__ = ["add", "chosen", "compatible", "read_config", "read_geometry", "run"]

REFUSED = 3
"""The exit status if two Descriptions do not fit."""
_MOST_TOKENS = 1 << 24
_KV_DTYPES = [d.name for d in (DType.BF16, DType.F16, DType.F32, DType.F8E4M3)] + list(BLOCK_SCALED)
_LETTERS = "TDEFGHIJ"


def add(commands: Any) -> None:
    """Add the three commands and their options."""
    made = commands.add_parser("describe", help="write the Description of a model and its parallel sizes, as JSON")
    made.add_argument("config", nargs="?", type=Path, help="a Hugging Face config.json")
    known = ", ".join(sorted(PRESETS))
    made.add_argument("--preset", choices=sorted(PRESETS), metavar="NAME", help=f"a known model, not a file: {known}")
    made.add_argument(
        "--draft", action="append", type=Path, default=[], metavar="CONFIG", help="a draft model; may be repeated"
    )
    made.add_argument(
        "--nextn", action="store_true", help="use the checkpoint's own multi-token-prediction layers as a draft"
    )
    sizes.add_options(made)
    made.add_argument("--page", type=int, metavar="TOKENS", help="tokens per page (default: the engine's, or 64)")
    dtypes = "; ".join(
        [f"without --engine {', '.join(_KV_DTYPES)}"]
        + [f"with --engine {n} {', '.join(e.dtypes)}" for n, e in ENGINES.items()]
    )
    made.add_argument("--kv-dtype", metavar="NAME", help=f"element type of pages: {dtypes}")
    made.add_argument("--replica", type=int, default=0, metavar="N", help="number of this replica (default 0)")
    made.add_argument(
        "--fact", action="append", default=[], metavar="NAME=VALUE", help="an identity that both sides must share"
    )
    layouts.add_options(made)
    for name, text in (
        ("check", "say whether two Descriptions fit: exit status 0, or 3 and why not"),
        ("plan", "say who sends what to whom"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("source", type=Path, help="Description of the prefill side")
        one.add_argument("sink", type=Path, help="Description of the decode side")
        one.add_argument("--json", action="store_true", help="print JSON, for programs")
        one.add_argument(
            "--spread-one", action="store_true", help="feature SPREAD_ONE: read replicated bytes from the lowest rank"
        )
        one.add_argument(
            "--few-sources",
            action="store_true",
            help="feature FEW_SOURCES: await few of the ranks that have the same bytes",
        )
        one.add_argument(
            "--cold-draft", action="store_true", help="feature COLD_DRAFT: let a draft that prefill lacks start cold"
        )
        if name == "plan":
            one.add_argument(
                "--tokens",
                type=_tokens,
                default=8192,
                metavar="N",
                help="tokens of the request to cost, and positions on its other axes (default 8192)",
            )
            for side in ("source", "sink"):
                one.add_argument(
                    f"--{side}-layout", choices=("NHD", "HND"), default="NHD", help="order within a page (default NHD)"
                )
            one.add_argument(
                "--first-token", type=_tokens, default=0, metavar="K", help="first token to transfer (default 0)"
            )
            one.add_argument(
                "--costs",
                type=Path,
                metavar="FILE",
                help="costs measured by `kvproto probe --out FILE`, instead of those of a pair of H200",
            )
            one.add_argument(
                "--slices",
                action="store_true",
                help="for each cache, print the remote rank, and the global, local and remote range",
            )
            one.add_argument(
                "--html", type=Path, metavar="FILE", help="write the plan as a picture, one self-contained page"
            )


def _tokens(text: str) -> int:
    if not 0 <= int(text) <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"0 to {_MOST_TOKENS}, not {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run one of the three commands; returns the exit status."""
    try:
        if args.command == "describe":
            return _describe(args)
        source, sink = read_geometry(args.source), read_geometry(args.sink)
        file = args.costs if args.command == "plan" else None
        costs = load_costs(file) if file else reference_costs()
    except KvprotoError as error:
        print(f"error: {error.between('wanted', 'found', ' ')}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    features = chosen(args)
    try:
        made = plan(source, sink, features)
    except KvprotoError as error:
        return _refused(error, args.json)
    warnings = differences(source, sink)
    if args.command == "check":
        return compatible(made, warnings, unstated(source, sink), args.json)
    request = args.first_token, args.tokens, (args.source_layout, args.sink_layout)
    try:
        moved = programs(source, sink, made, request)
        rules = spreads(source, sink, features, request, costs)
    except KvprotoError as error:
        print(f"error: {error.between('wanted', 'found', ' ')}", file=sys.stderr)
        return 1
    if args.html is not None:
        moved_bytes = {key: program.bytes for key, program in moved.items()}
        try:
            args.html.write_text(page(source, sink, made, moved_bytes, _letters(sink), args.tokens))
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        more = {"slices": slices.as_json(slices_of(source, sink, made))} if args.slices else {}
        print(
            json.dumps(
                _as_json(sink, made, moved, costs)
                | {"rules": as_data(rules), "costs": str(file) if file else ORIGIN}
                | more
            )
        )
        return 0
    if args.slices:
        for line in slices.table(slices_of(source, sink, made)):
            print(line)
        return 0
    for line in _picture(source, sink, made, moved, args.first_token, args.tokens):
        print(line)
    for line in _costed(moved, costs, f"by {file}" if file else ORIGIN):
        print(line)
    for line in shown(rules):
        print(line)
    return 0


def chosen(args: argparse.Namespace) -> list[Feature]:
    """The features that options of `check` and `plan` choose."""
    known = (Feature.SPREAD_ONE, Feature.FEW_SOURCES, Feature.COLD_DRAFT)
    return [f for f in known if getattr(args, f.name.lower())]


def read_geometry(path: Path) -> Geometry:
    """Read a Description: a Geometry in JSON form; raises KvprotoError, OSError or ValueError."""
    data = _json(path)
    try:
        _check_printable(data, "geometry")
        geometry = from_json(Geometry, data)
        validate(geometry)
    except KvprotoError as error:
        raise error.at(f"{path}: {error.path}") from None
    return geometry


def _describe(args: argparse.Namespace) -> int:
    if (args.config is None) == (args.preset is None):
        raise LocalError(
            ErrorCode.OUT_OF_RANGE, "config", "a config.json or --preset", "both" if args.config else "neither"
        )
    configs = list(PRESETS[args.preset]) if args.preset else [read_config(args.config)]
    if args.nextn:
        own = draft_of(configs[0])
        if own is None:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "nextn", "num_nextn_predict_layers in the config", "none")
        configs.append(own)
    configs += [read_config(path) for path in args.draft]
    own_sizes = sizes.own_of(args)
    parallel = sizes.parallel_of(args)
    pairs = [fact.partition("=")[::2] for fact in args.fact]
    if any("=" not in fact for fact in args.fact) or len(dict(pairs)) < len(pairs):
        raise LocalError(ErrorCode.OUT_OF_RANGE, "fact", "NAME=VALUE, each name once", " ".join(args.fact))
    if args.engine:
        for name in ("own", "sharded", "replicated"):
            if getattr(args, name):
                wanted = f"no --{name} beside --engine, which divides its caches by the sizes of all of them"
                raise LocalError(ErrorCode.OUT_OF_RANGE, name, wanted, getattr(args, name)[0])
        for line in layouts.described(args, configs, parallel, dict(pairs)):
            print(line)
        return 0
    if args.kv_dtype not in (None, *_KV_DTYPES):
        raise LocalError(ErrorCode.OUT_OF_RANGE, "kv_dtype", ", ".join(_KV_DTYPES), args.kv_dtype)
    layouts.check_without_engine(args)
    dtype = args.kv_dtype if args.kv_dtype in (None, *BLOCK_SCALED) else DType[args.kv_dtype]
    geometry = describe(
        configs[0], configs[1:], parallel, 64 if args.page is None else args.page, dtype, args.replica, dict(pairs), args.sharded,
        args.replicated, own_sizes,
    )  # fmt: skip
    print(json.dumps(to_json(geometry)))
    return 0


def _json(path: Path) -> Any:
    """The content of a JSON file; Infinity is allowed, as the config.json of Mamba models has one."""
    return read_json(path.read_bytes(), str(path), finite=False)


def _check_printable(value: Any, path: str) -> None:
    """Raise BAD_TEXT for text with control characters, which would reach the terminal."""
    if isinstance(value, str) and not value.isprintable():
        raise refuse(ErrorCode.BAD_TEXT, path, "printable text", value)
    for key, held in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        _check_printable(held, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}")


def read_config(path: Path) -> Config:
    """Read a model's config.json; raises LocalError, OSError or ValueError."""
    data = _json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a config.json, which is an object")
    return data


def _refused(error: KvprotoError, as_json: bool) -> int:
    if as_json:
        said = {
            "code": error.code.name,
            "path": error.path,
            "source": error.mine,
            "sink": error.yours,
            "advice": error.advice,
        }
        print(json.dumps({"compatible": False, **said}))
    else:
        print(f"refused: {error.between('prefill', 'decode')}")
    return REFUSED


def compatible(
    made: Plan, warnings: Sequence[tuple[str, str, str]], unsaid: Sequence[str], as_json: bool, advice: str = ""
) -> int:  # fmt: skip
    """Print the plan's digest, its warnings, and which facts were not compared; returns the exit status."""
    if as_json:
        differing = [{"path": p, "source": a, "sink": b} for p, a, b in warnings]
        print(
            json.dumps(
                {
                    "compatible": True,
                    "plan": made.digest.hex(),
                    "cold": list(made.cold),
                    "warnings": differing,
                    "unstated": list(unsaid),
                }
            )
        )
        return 0
    print(f"compatible: plan {made.digest.hex()[:16]}, {len(made.routes)} routes")
    for path, a, b in warnings:
        print(f"warning: {path}: prefill has {a}, decode has {b}")
    for model in made.cold:
        print(f"warning: draft {model} starts cold: prefill does not have it")
    if unsaid:
        print(f"not compared, as neither side states them: {', '.join(unsaid)}{advice}")
    return 0


def _as_json(
    sink: Geometry, made: Plan, moved: dict[tuple[int, int], CopyProgram], costs: Sequence[Cost]
) -> dict[str, Any]:
    pairs = []
    for (a, b), program in moved.items():
        runs = program.runs()
        ways = estimates(runs, costs)
        pairs.append(
            {
                "source": a,
                "sink": b,
                "send_flags": list(made.send_flags(a, b)),
                "bytes": runs.bytes,
                "runs": runs.count,
                "bytes_per_run": runs.mean,
                "routes": {str(r.group): r.digest.hex() for r in made.between(a, b)},
                "seconds": {e.name: e.seconds for e in ways},
                "advice": advise(ways).kind,
            }
        )
    required = {str(r.rank): list(made.required(r.rank)) for r in sink.ranks}
    return {"plan": made.digest.hex(), "cold": list(made.cold), "required": required, "pairs": pairs}


def _picture(
    source: Geometry, sink: Geometry, made: Plan, moved: dict[tuple[int, int], CopyProgram], first: int, tokens: int
) -> Iterator[str]:
    """A matrix of ranks with a letter for each group, and what the request moves."""
    letters = _letters(sink)
    shown = ", ".join(f"{letters[g.id]} = {g.name}" for g in sink.groups)
    yield f"{shown}; prefill ranks across, decode ranks down"
    width = max(4, len("".join(letters.values())) + 2)
    columns = [r.rank for r in source.ranks]
    if len(columns) * width > 200:
        yield f"({len(columns)} x {len(sink.ranks)} ranks: only those with routes, rank by rank)"
        for rank in sink.ranks[:64]:
            yield f"D{rank.rank:<4} <- " + " ".join(
                f"P{a}:{''.join(letters[g] for g in made.send_flags(a, rank.rank))}" for a in made.required(rank.rank)
            )
    else:
        yield "       " + "".join(f"P{c:<{width - 1}}" for c in columns) + " awaits"
        for rank in sink.ranks:
            cells = "".join(
                f"{''.join(letters[g] for g in made.send_flags(a, rank.rank)) or '.':<{width}}" for a in columns
            )
            yield f"  D{rank.rank:<4}{cells} {len(made.required(rank.rank))} of {len(columns)}"
    total = Runs(sum(p.runs().count for p in moved.values()), sum(p.bytes for p in moved.values()))
    yield ""
    yield f"tokens [{first:,}, {first + tokens:,}), pools without gaps, items in no order:"
    yield f"  {_size(total.bytes)} in {total.count:,} runs of {_size(total.mean)} on average, over {len(moved)} rank pairs"


def _costed(moved: dict[tuple[int, int], CopyProgram], costs: Sequence[Cost], origin: str) -> Iterator[str]:
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
    """The letter of each group: T for the target, D for the draft, and the last of the name for further groups."""
    return {g.id: _LETTERS[min(g.model, 7)] if _nth(sink, g.id) == 0 else g.name[-1] for g in sink.groups}


def _nth(geometry: Geometry, id: int) -> int:
    """The index of a group among those of its model."""
    model = next(g.model for g in geometry.groups if g.id == id)
    return [g.id for g in geometry.groups if g.model == model].index(id)


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return ""
