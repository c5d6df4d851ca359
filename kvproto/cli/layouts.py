"""`kvproto describe --engine`: the pools of an engine by its name, as a Description or as tensors and strides."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvproto.catalog.config import Config
from kvproto.catalog.engines import ENGINES, Pools, Setup, pools
from kvproto.catalog.tensors import Array, RankMemory
from kvproto.catalog.vllm import BACKENDS
from kvproto.errors import bad
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.layout import Parallel
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind, word

__all__ = ["add_options", "as_json", "check_without_engine", "described", "lines", "setup_of"]

_STATE_DTYPES = [d.name for d in (DType.BF16, DType.F16, DType.F32)]


def add_options(made: argparse.ArgumentParser) -> None:
    """Add the options of `describe` that need `--engine`."""
    made.add_argument("--engine", choices=ENGINES, help="describe this engine's own pools, with its defaults")
    backends = ", ".join(name for kind in BACKENDS.values() for name in kind)
    made.add_argument("--backend", metavar="NAME", help=f"attention backend of vLLM: {backends}")
    layouts = "; ".join(f"{name}: {', '.join(e.layouts)}" for name, e in ENGINES.items() if e.layouts)
    made.add_argument("--layout", metavar="ORDER", help=f"order of the engine's pool ({layouts})")
    made.add_argument("--state-layout", choices=("SD", "DS"), default="SD", help="order of vLLM's convolution states")
    made.add_argument("--state-dtype", choices=_STATE_DTYPES, help="element type of recurrent states")
    made.add_argument(
        "--dp", type=int, default=1, metavar="N", help="attention data parallel size over TP ranks (SGLang)"
    )
    made.add_argument("--sm", type=int, metavar="N", help="compute capability of the GPUs; NVFP4 depends on it")
    made.add_argument(
        "--tensors", action="store_true", help="print the tensors and their strides instead of a Description"
    )
    made.add_argument("--rank", type=int, default=0, metavar="N", help="rank whose tensors to print (default 0)")
    made.add_argument("--blocks", type=int, default=1024, metavar="N", help="blocks in each pool (default 1024)")
    made.add_argument("--json", action="store_true", help="print the tensors as JSON")


_ALONE = {
    "backend": None, "layout": None, "state_layout": "SD", "state_dtype": None, "dp": 1, "sm": None, "tensors": False,
    "rank": 0, "blocks": 1024, "json": False,
}  # fmt: skip
"""Options that have no meaning without an engine, with their defaults."""


def check_without_engine(args: argparse.Namespace) -> None:
    """Raise LocalError if an option would be ignored without `--engine`."""
    for name, default in _ALONE.items():
        if getattr(args, name) != default:
            raise bad(name, "--engine beside it", "none")


def setup_of(args: argparse.Namespace, parallel: Parallel) -> Setup:
    """The setup of an engine that the options state."""
    state = DType[args.state_dtype] if args.state_dtype else None
    return Setup(
        parallel, args.page, args.kv_dtype or "auto", args.backend, args.layout, args.state_layout, args.dp, state,
        args.sm,
    )  # fmt: skip


def described(
    args: argparse.Namespace, configs: Sequence[Config], parallel: Parallel, facts: Mapping[str, str]
) -> Iterator[str]:
    """The lines that `describe --engine` prints; raises LocalError."""
    made = pools(args.engine, configs[0], configs[1:], setup_of(args, parallel), args.replica, facts)
    validate(made.geometry)
    if args.state_dtype and all(part.name != "ssm" for group in made.geometry.groups for part in group.parts):
        raise bad("state_dtype", "a model with recurrent states beside it", args.state_dtype)
    if not args.tensors:
        yield json.dumps(to_json(made.geometry))
        return
    ranks = len(made.geometry.ranks)
    if not 0 <= args.rank < ranks:
        raise bad("rank", f"0 to {ranks - 1}", args.rank)
    if args.blocks < 1:
        raise bad("blocks", "at least 1", args.blocks)
    found = made.memory(args.rank, args.blocks)
    if args.json:
        yield json.dumps(as_json(made, args.rank, found))
        return
    yield f"{args.engine} ({ENGINES[args.engine].releases}), rank {args.rank} of {ranks}, {args.blocks:,} blocks"
    yield from lines(made.geometry, args.rank, found)


def as_json(made: Pools, rank: int, found: RankMemory) -> dict[str, Any]:
    """Allocations, tensors and the columns of Register as JSON data; sizes, offsets and strides are in bytes."""
    tensors = [
        {"name": a.name, "allocation": found.regions[a.region][0], "offset": a.offset, "axes": list(a.axes),
         "shape": list(a.shape), "strides": list(a.strides)}
        for a in found.arrays
    ]  # fmt: skip
    return {
        "rank": rank,
        "allocations": [{"name": name, "bytes": size} for name, size in found.regions],
        "tensors": tensors,
        "columns": [to_json(c) for c in found.columns],
    }


def lines(geometry: Geometry, rank: int, found: RankMemory) -> Iterator[str]:
    """Tables of groups and tensors: lengths of axes, outermost first, with the bytes from one element to the next."""
    owned = {o.group: o.layers.tolist() for r in geometry.ranks if r.rank == rank for o in r.owns}
    yield ""
    yield from _table(
        ["group", "items", "rows", "layers", "parts: lanes x bytes, of all ranks"],
        [
            [g.name, ItemKind(g.kind).name.lower(), str(g.rows), _runs(owned[g.id]),
             ", ".join(f"{p.name} {p.lanes} x {p.lane_bytes} {word(DType, p.dtype)}" for p in g.parts)]
            for g in geometry.groups if g.id in owned
        ],
    )  # fmt: skip
    alike: dict[tuple[Any, ...], list[Array]] = {}
    for a in found.arrays:
        key = a.name.partition(".")[0], a.axes, a.shape, a.strides, a.offset
        alike.setdefault(key, []).append(a)
    yield ""
    yield from _table(
        ["tensors", "number", "in", "at byte", "axes: length (bytes from one to the next)"],
        [
            [some[0].name if len(some) == 1 else f"{some[0].name} .. {some[-1].name}", str(len(some)),
             "-" if found.regions[some[0].region][0] == some[0].name else found.regions[some[0].region][0],
             str(some[0].offset), _axes(some[0])]
            for some in alike.values()
        ],
    )  # fmt: skip


def _axes(array: Array) -> str:
    named = zip(array.axes, array.shape, array.strides, strict=True)
    return ", ".join(f"{n} {axis}" + f" ({stride})" * (stride != 1) for axis, n, stride in named)


def _runs(layers: Sequence[int]) -> str:
    """Layers as runs with a step: 0-79, or 5-59 by 6."""
    if len(layers) < 3:
        return ", ".join(map(str, layers))
    steps = {b - a for a, b in zip(layers, layers[1:], strict=False)}
    if len(steps) == 1:
        step = steps.pop()
        return f"{layers[0]}-{layers[-1]}" + f" by {step}" * (step > 1)
    return f"{layers[0]}, {layers[1]}, .. {layers[-1]} ({len(layers)})"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
