"""`kvproto describe`: a model as an engine divides it, as a Description or, with `--engine`, as tensors and strides."""

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvproto.cli.slices import aligned
from kvproto.errors import bad
from kvproto.planning.cache import BLOCK_SCALED
from kvproto.planning.conversion import scales_of, stating
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.layout import DEALS, Parallel
from kvproto.planning.parts import CONVERSIONS
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind, word
from kvproto.wire.plain import read_file, read_json
from kvproto_catalog.config import Config, draft_of, text
from kvproto_catalog.engines import ENGINES, pools
from kvproto_catalog.models import PRESETS, Setup, describe, fields_read
from kvproto_catalog.tensors import Array, RankMemory
from kvproto_catalog.vllm import BACKENDS

_KV_DTYPES = [d.name for d in (DType.BF16, DType.F16, DType.F32, DType.F8E4M3)] + list(BLOCK_SCALED)
_STATE_DTYPES = [d.name for d in (DType.BF16, DType.F16, DType.F32)]


def _numbers(path: str, text: str, between: str = "+", most: int | None = None) -> tuple[int, ...]:
    parts = text.split(between)
    if not all(part.strip().isdecimal() for part in parts) or (most is not None and len(parts) > most):
        raise bad(path, "a number" if most else f"numbers, with {between} between", text)
    return tuple(int(part) for part in parts)


def _number(path: str, text: str) -> int:
    return _numbers(path, text, most=1)[0]


def _deal(path: str, text: str, between: str = "+") -> str | tuple[int, ...]:
    return _numbers(path, text, between) if text[:1].isdecimal() else text


def _copies(path: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise bad(path, "yes or no", text)
    return text == "yes"


_OWN: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("tp", "cp", "dcp", "interleave", "origin"), _number),
    "deal": _deal,
    "stages": _numbers,
    "virtual": _number,
    "copies": _copies,
}
"""The sizes that can be set for a single cache, and how their text is read."""


IGNORE: dict[str, Any] = {
    "action": "append", "default": [], "metavar": "FIELD", "help": "a field of a config.json on which no cache depends; may be repeated",
}  # fmt: skip
"""The arguments of `add_argument` for `--ignore`, which errors about a field advise wherever a config.json is read."""


def read_configs(paths: Iterable[Path], ignored: Collection[str]) -> list[Config]:
    """Models' config.json files without these fields, inside and outside their language models' parts.

    Raises LocalError for a field that no file has, or that is read for caches; OSError or ValueError.
    """
    files = []
    for path in paths:
        files.append(data := read_json(read_file(path), str(path), finite=False))  # Mamba models state an Infinity
        if not isinstance(data, dict):
            raise ValueError(f"{path}: not a config.json, which is an object")
    there = {name for data in files for part in (data, data.get("text_config")) for name in part or ()}
    configs = [_without(data, ignored) for data in files]
    if unknown := {*ignored} - there:
        raise bad("ignore", "a field of the config.json", min(unknown))
    for config in configs if ignored else ():
        if read := {*ignored} & fields_read(config) - {"model_type"}:
            raise bad("ignore", "a field on which no cache depends: state other caches by kvproto.Cache", min(read))
    return configs


def _without(config: Config, ignored: Collection[str]) -> Config:
    kept = {name: value for name, value in config.items() if name not in ignored}
    inner = kept.get("text_config")
    return {**kept, "text_config": _without(inner, ignored)} if isinstance(inner, dict) else kept


def _options() -> dict[str, dict[str, Any]]:
    """The arguments of `add_argument` for each option that a Description of any engine depends on."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    dtypes = {"without --engine": _KV_DTYPES} | {f"with --engine {name}": e.dtypes for name, e in ENGINES.items()}
    kv_dtypes = "; ".join(f"{when} {', '.join(names)}" for when, names in dtypes.items())
    deals = f"{', '.join(DEALS)}, or the cp rank of each run of --interleave tokens until the pattern repeats"
    whose = "name of a cache that cp or dcp ranks"
    return {
        "--preset": {"choices": sorted(PRESETS), "metavar": "NAME", "help": f"a known model, not a file: {', '.join(sorted(PRESETS))}"},
        "--draft": {"action": "append", "type": Path, "default": [], "metavar": "CONFIG", "help": "a draft model; may be repeated"},
        "--nextn": {"action": "store_true", "help": "use the checkpoint's own multi-token-prediction layers as a draft"},
        "--ignore": IGNORE,
        "--tp": number | {"default": 1, "help": "tensor parallel ranks (default 1)"},
        "--pp": number | {"default": 1, "help": "pipeline stages (default 1)"},
        "--cp": number | {"default": 1, "help": "context parallel ranks for each TP rank (default 1)"},
        "--dcp": number | {"default": 1, "help": "TP ranks that deal the tokens among themselves in decode (default 1)"},
        "--interleave": number | {"default": 1, "help": "consecutive tokens that a cp or dcp rank stores (default 1)"},
        "--origin": number | {"default": 0, "help": "token at which cp or dcp ranks begin the deal (default 0)"},
        "--deal": {"default": "cyclic", "metavar": "NAME|R,R,...", "help": deals},
        "--sharded": {"action": "append", "default": [], "metavar": "NAME", "help": f"{whose} deal among themselves; may be repeated"},
        "--replicated": {"action": "append", "default": [], "metavar": "NAME", "help": f"{whose} each store whole; may be repeated"},
        "--pp-layers": {"metavar": "N,N,...", "help": "layers of each stage, if not equal"},
        "--virtual": number | {"default": 1, "help": "chunks of layers per stage (default 1)"},
        "--own": {"action": "append", "default": [], "metavar": "NAME:SIZE=N,...", "help": f"sizes of the cache NAME ({', '.join(_OWN)}; lists as 1+2+1); may be repeated"},
        "--page": {"type": int, "metavar": "TOKENS", "help": "tokens per page (default: the engine's, or 64)"},
        "--kv-dtype": {"metavar": "NAME", "help": f"element type of pages: {kv_dtypes}"},
        "--replica": number | {"default": 0, "help": "number of this replica (default 0)"},
        "--fact": {"action": "append", "default": [], "metavar": "NAME=VALUE", "help": "an identity that both sides must share"},
        "--convert": {"action": "append", "metavar": "NAME[=SCALE]", "help": f"a conversion that it states, {', '.join(CONVERSIONS)}; an FP8 cache without scales of its own has one of this number; may be repeated"},
        "--engine": {"choices": ENGINES, "help": "describe this engine's own pools, with its defaults"},
    }  # fmt: skip


def _engine_options() -> dict[str, dict[str, Any]]:
    """The same of the options that have no meaning without an engine."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    backends = ", ".join(name for kind in BACKENDS.values() for name in kind)
    layouts = "; ".join(f"{name}: {', '.join(e.layouts)}" for name, e in ENGINES.items() if e.layouts)
    return {
        "--backend": {"metavar": "NAME", "help": f"attention backend of vLLM: {backends}"},
        "--layout": {"metavar": "ORDER", "help": f"order of the engine's pool ({layouts})"},
        "--state-layout": {"choices": ("SD", "DS"), "default": "SD", "help": "order of vLLM's convolution states"},
        "--dtype": {
            "choices": _STATE_DTYPES,
            "help": "element type that the engine computes in, its own --dtype (default: the config's)",
        },
        "--state-dtype": {"choices": _STATE_DTYPES, "help": "element type of recurrent states"},
        "--dp": number | {"default": 1, "help": "attention data parallel size over TP ranks (SGLang)"},
        "--sm": number | {"help": "compute capability of the GPUs; NVFP4 depends on it"},
        "--tensors": {"action": "store_true", "help": "print the tensors and their strides instead of a Description"},
        "--rank": number | {"default": 0, "help": "rank whose tensors to print (default 0)"},
        "--blocks": number | {"default": 1024, "help": "blocks in each pool (default 1024)"},
        "--json": {"action": "store_true", "help": "print the tensors as JSON"},
    }


def add(commands: Any) -> None:
    parser = commands.add_parser("describe", help="write the Description of a model and its parallel sizes, as JSON")
    parser.add_argument("config", nargs="?", type=Path, help="a Hugging Face config.json")
    for name, option in (_options() | _engine_options()).items():
        parser.add_argument(name, **option)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Print a Description, or an engine's tensors; returns the exit status."""
    for line in _described(args):
        print(line)
    return 0


def _described(args: argparse.Namespace) -> Iterator[str]:
    """The lines to print; raises LocalError, OSError or ValueError."""
    configs = _configs(args)
    own = _own_of(args)
    stages = _numbers("pp_layers", args.pp_layers, ",") if args.pp_layers else None
    dealt = args.interleave, args.origin, stages, args.virtual, _deal("deal", args.deal, ",")
    parallel = Parallel(args.tp, args.pp, args.cp, args.dcp, *dealt)
    pairs = [fact.partition("=")[::2] for fact in args.fact]
    if any("=" not in fact for fact in args.fact) or len(dict(pairs)) < len(pairs):
        raise bad("fact", "NAME=VALUE, each name once", " ".join(args.fact))
    if args.engine:
        for name in ("own", "sharded", "replicated"):
            if getattr(args, name):
                wanted = f"no --{name} beside --engine, which divides its caches by the sizes of all of them"
                raise bad(name, wanted, getattr(args, name)[0])
        yield from _engine_lines(args, configs, parallel, dict(pairs))
        return
    if args.kv_dtype not in (None, *_KV_DTYPES):
        raise bad("kv_dtype", ", ".join(_KV_DTYPES), args.kv_dtype)
    for option, stated in _engine_options().items():
        name = option.removeprefix("--").replace("-", "_")
        default = stated.get("default", False if "action" in stated else None)
        if getattr(args, name) != default:
            raise bad(name, "--engine beside it", "none")
    dtype = args.kv_dtype if args.kv_dtype in (None, *BLOCK_SCALED) else DType[args.kv_dtype]
    more = args.replica, dict(pairs), args.sharded, args.replicated, own
    yield _line(args, describe(configs[0], configs[1:], parallel, args.page, dtype, *more))


def _line(args: argparse.Namespace, geometry: Geometry) -> str:
    """A Description as a line of JSON, which states the conversions that are asked for; raises LocalError."""
    if args.convert:
        stated = [text.partition("=") for text in args.convert]
        names = tuple(name for name, _, _ in stated)
        if {*names} - CONVERSIONS.keys() or len({*names}) < len(names):
            raise bad("convert", f"{', '.join(CONVERSIONS)}, each once", ", ".join(names))
        if with_scale := [name for name, _, scale in stated if scale and CONVERSIONS[name][2]]:
            raise bad("convert", f"{with_scale[0]} without a scale, as its scales are parts", ", ".join(args.convert))
        narrow = {CONVERSIONS[name][1] for name in names}
        plain = [
            p.name
            for g in geometry.groups
            for i, p in enumerate(g.parts)
            if p.dtype in narrow and scales_of(g, i) is None
        ]
        scales = {part: scale for _, _, scale in stated if scale for part in plain}
        if any(scale for _, _, scale in stated) and not scales:
            raise bad("convert", "no scale, as no cache of FP8 lacks one", ", ".join(args.convert))
        stating_it = tuple(stating(group, names, scales) for group in geometry.groups)
        if stating_it == geometry.groups:
            raise bad("convert", "a cache in one of the two forms, BF16 or F8E4M3, to state it", "none")
        geometry = attrs.evolve(geometry, groups=stating_it)
        validate(geometry)
    return json.dumps(to_json(geometry))


def _configs(args: argparse.Namespace) -> list[Config]:
    if (args.config is None) == (args.preset is None):
        raise bad("config", "a config.json or --preset", "both" if args.config else "neither")
    configs = read_configs([*([] if args.preset else [args.config]), *args.draft], args.ignore)
    if args.preset:
        targets, drafts = [*PRESETS[args.preset]], configs
    else:
        targets, drafts = configs[:1], configs[1:]
        if (
            args.kv_dtype is None
            and args.dtype is None
            and not any(text(targets[0]).get(name) for name in ("torch_dtype", "dtype"))
        ):
            raise bad("config.torch_dtype", "a dtype, as its default depends on the engine: state --kv-dtype", "absent")
    if args.nextn:
        draft = draft_of(targets[0])
        if draft is None:
            raise bad("nextn", "num_nextn_predict_layers in the config", "none")
        targets.append(draft)
    return targets + drafts


def _own_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sizes of single caches by name, as `Cache.over` accepts them; raises LocalError for malformed text."""
    own: dict[str, dict[str, Any]] = {}
    for option in args.own:
        name, _, sizes = option.partition(":")
        pairs = [size.partition("=")[::2] for size in sizes.split(",")]
        if name in own or any(key not in _OWN for key, _ in pairs) or len(dict(pairs)) < len(pairs):
            raise bad("own", f"NAME:SIZE=N,..., each cache and size once, of the sizes {', '.join(_OWN)}", option)
        own[name] = {key: _OWN[key](f"own {name}.{key}", value) for key, value in pairs}
    return own


def _engine_lines(
    args: argparse.Namespace, configs: Sequence[Config], parallel: Parallel, facts: Mapping[str, str]
) -> Iterator[str]:
    """The lines that `describe --engine` prints; raises LocalError."""
    state = DType[args.state_dtype] if args.state_dtype else None
    dtype = DType[args.dtype] if args.dtype else None
    own = args.kv_dtype or "auto", args.backend, args.layout, args.state_layout, args.dp, state, dtype, args.sm
    pooled = pools(args.engine, configs[0], configs[1:], Setup(parallel, args.page, *own), args.replica, facts)
    validate(pooled.geometry)
    if args.state_dtype and all(part.name != "ssm" for group in pooled.geometry.groups for part in group.parts):
        raise bad("state_dtype", "a model with recurrent states beside it", args.state_dtype)
    if not args.tensors:
        yield _line(args, pooled.geometry)
        return
    ranks = len(pooled.geometry.ranks)
    if not 0 <= args.rank < ranks:
        raise bad("rank", f"0 to {ranks - 1}", args.rank)
    if args.blocks < 1:
        raise bad("blocks", "at least 1", args.blocks)
    memory = pooled.memory(args.rank, args.blocks)
    if args.json:
        yield json.dumps(_memory_json(args.rank, memory))
        return
    yield f"{args.engine} ({ENGINES[args.engine].releases}), rank {args.rank} of {ranks}, {args.blocks:,} blocks"
    yield from _memory_tables(pooled.geometry, args.rank, memory)


def _memory_json(rank: int, memory: RankMemory) -> dict[str, Any]:
    """Allocations, tensors and the columns of Register as JSON data; sizes, offsets and strides are in bytes."""
    tensors = []
    for a in memory.arrays:
        place = {"name": a.name, "allocation": memory.regions[a.region][0], "offset": a.offset}
        tensors.append(place | {"axes": list(a.axes), "shape": list(a.shape), "strides": list(a.strides)})
    return {
        "rank": rank,
        "allocations": [{"name": name, "bytes": size} for name, size in memory.regions],
        "tensors": tensors,
        "columns": [to_json(columns) for columns in memory.columns],
    }


def _memory_tables(geometry: Geometry, rank: int, memory: RankMemory) -> Iterator[str]:
    """Tables of groups and tensors: lengths of axes, outermost first, with the bytes from one element to the next."""
    owned = {o.group: o.layers.tolist() for r in geometry.ranks if r.rank == rank for o in r.owns}
    groups = [["group", "items", "rows", "layers", "parts: lanes x bytes, of all ranks"]]
    for g in (g for g in geometry.groups if g.id in owned):
        parts = ", ".join(f"{p.name} {p.lanes} x {p.lane_bytes} {word(DType, p.dtype)}" for p in g.parts)
        groups.append([g.name, ItemKind(g.kind).name.lower(), str(g.rows), _layer_text(owned[g.id]), parts])
    yield ""
    yield from aligned(groups)
    alike: dict[tuple[Any, ...], list[Array]] = {}
    for a in memory.arrays:
        alike.setdefault((a.name.partition(".")[0], a.axes, a.shape, a.strides, a.offset), []).append(a)
    tensors = [["tensors", "number", "in", "at byte", "axes: length (bytes from one to the next)"]]
    for first, *others in alike.values():
        name = f"{first.name} .. {others[-1].name}" if others else first.name
        region = memory.regions[first.region][0]
        axes = zip(first.axes, first.shape, first.strides, strict=True)
        lengths = ", ".join(f"{n} {axis}" + f" ({stride})" * (stride != 1) for axis, n, stride in axes)
        within = "-" if region == first.name else region
        tensors.append([name, str(1 + len(others)), within, str(first.offset), lengths])
    yield ""
    yield from aligned(tensors)


def _layer_text(layers: Sequence[int]) -> str:
    """Layers as runs with a step: 0-79, or 5-59 by 6."""
    if len(layers) < 3:
        return ", ".join(map(str, layers))
    steps = {b - a for a, b in zip(layers, layers[1:], strict=False)}
    if len(steps) == 1:
        step = steps.pop()
        return f"{layers[0]}-{layers[-1]}" + f" by {step}" * (step > 1)
    return f"{layers[0]}, {layers[1]}, .. {layers[-1]} ({len(layers)})"
