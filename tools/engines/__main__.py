"""`python -m tools.engines`: what `kvproto describe --engine` says beside what the engines' own packages allocate, and
engines that hand prompts over to each other (vllm_pd.py).

The packages are in an environment of their own (install.sh). Two parts run at a time, and each is printed when it ends;
a case that a package cannot run here says why, and counts as a difference. Backends that cannot be imported here are named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.layout import Parallel
from kvproto.wire.messages import Columns
from kvproto_catalog.engines import Pools, pools
from kvproto_catalog.models import Setup
from kvproto_catalog.vllm import BACKENDS
from kvproto_reference import smollm2
from tools.engines import cases, frames, own
from tools.specgen.registry import ROOT

HERE = Path(__file__).parent
Row = dict[str, Any]
Entry = tuple[int, int, int, int, int, int, int, int]
"""Region, offset, item, row and lane stride; rows, lanes of the rank, and bytes of a lane."""


def main(argv: list[str] | None = None) -> int:
    """Run both packages' probes and compare; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines", description=__doc__)
    parser.add_argument("--at", type=Path, default=ROOT / ".engines", help="the environment that install.sh made")
    at, begun = parser.parse_args(argv).at.resolve(), time.monotonic()
    jax = ["--jax", sys.executable] if importlib.util.find_spec("jax") else []
    models, second = str(at / "models"), "vllm-0.33.0"
    one, two = cases.vllm_cases([(1, "LBNHC"), (2, "LBHNC")]), cases.vllm_cases([(1, "BLHNC"), (2, "LBNHC")])

    def handed(module: str, path: str, *given: str) -> Part:
        return Part(f"{module} {path}", partial(handed_over, module, path, at, *given))

    def probed(engine: str, release: str, path: str, asked: list[Row], compare: Any) -> Part:
        return Part(f"pools of {engine} {release}", partial(probe, engine, release, path, asked, compare, at))

    vllm = deque([
        handed("vllm_pd", "", models), handed("vllm_triton", second, models), handed("vllm_pd", second, models),
        handed("vllm_tiers", second, models), handed("vllm_families", second, models),
        handed("vllm_cannot", "", models), handed("vllm_suite", ""), handed("vllm_specs", second),
        probed("vllm", "0.33.0", second, two, vllm_differences), probed("vllm", "0.32.0", "", one, vllm_differences),
        handed("vllm_serve", "", models), handed("vllm_tiers", "", models), handed("vllm_specs", ""),
        handed("vllm_directory", "", models),
    ])  # fmt: skip
    sglang = deque([
        Part("docs/engines_own.md", lambda: [report("what it says of the engines' own connectors", own.differences(at))]),
        handed("sglang_pd", "sgt", models), handed("cross_pd", "sgt", models, *jax),
        handed("sglang_dcp", "sgt", models), handed("tiers", "sgt", models), handed("sglang_suite", "sgt"),
        handed("sglang_serve", "sgt", models), handed("sglang_cannot", "sgt", models), handed("sglang_handover", "sgt"),
        probed("sglang", "0.5.23", "sgt", cases.sglang_cases(), sglang_differences), handed("sglang_specs", "sgt"),
        handed("sglang_drafts", "sgt"), handed("real_pd", "sgt", str(smollm2.FOLDER)),
    ])  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        lanes = [pool.submit(run, vllm), pool.submit(run, sglang, vllm)]
    wrong = [line for lane in lanes for line in lane.result()]
    for line in wrong:  # again, for those who read only the end
        print(line)
    print(f"{sum(line.startswith('DIFFERS') for line in wrong)} differ, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


@attrs.frozen
class Part:
    """A comparison that runs by itself: its title, and the function that makes its lines."""

    title: str
    lines: Callable[[], Iterable[list[str]]]


def _taken(queue: deque[Part]) -> Iterator[Part]:
    """Yield the parts of a queue from which another thread takes parts too."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


def run(*queues: deque[Part]) -> list[str]:
    """Run parts of these queues, the first queue before the next, and print each part when it ends; what differs.

    The ports of SGLang's servers are fixed: its parts are one queue.
    """
    wrong = []
    for queue in queues:
        for part in _taken(queue):
            begun = time.monotonic()
            lines = list(part.lines())
            text = "\n".join(line for each in lines for line in each)
            print(f"== {part.title}: {time.monotonic() - begun:.0f} s\n{text}", flush=True)
            wrong += [line for each in lines if each[0].startswith("DIFFERS") for line in each]
    return wrong


def report(what: str, found: Iterable[str]) -> list[str]:
    """One line, and what differs."""
    lines = [line for line in found if line]
    return [f"{'DIFFERS' if lines else 'same'}  {what}", *(f"         {line}" for line in lines[:6])]


def handed_over(module: str, path: str, at: Path, *given: str) -> Iterator[list[str]]:
    """Engines of a release hand prompts over to each other, through kvproto_vllm and kvproto_sglang; where that differs,
    also the errors and last lines of the engines' logs. `module` is one beside this, and `given` are its arguments.
    """
    sglang = path == "sgt"
    paths = [str(HERE / "sglang_cpu")] * sglang + [str(at / path)] * bool(path)
    paths += [str(ROOT), str(ROOT / "integrations"), str(ROOT / "reference")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",
        "SGLANG_USE_CPU_ENGINE": str(int(sglang)),
    }
    command = [str(at / "venv/bin/python"), "-m", f"tools.engines.{module}", *given]
    name = "-".join(filter(None, (module, path)))
    out, log = at / f"{name}.out", at / f"{name}.log"  # files: a server that does not end keeps a pipe open
    with out.open("w") as lines, log.open("w") as said:  # the engines' own output, which may hold bad input
        status = subprocess.run(command, env=env, stdout=lines, stderr=said, cwd=ROOT).returncode
    told = out.read_text().splitlines()
    yield [f"exit status {status}", *told]
    if status:
        first = [n for n, line in enumerate(told) if line.startswith("DIFFERS")]
        differ = [line for n in first for line in told[n : n + 3]] or told[-3:]
        ours = log.read_text().splitlines()
        raised = [
            line for line in ours if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]  # by an engine, before it ended
        yield [f"DIFFERS  {module} {path}", *differ, *raised[-6:], *ours[-12:]]


def probe(
    engine: str, release: str, path: str, asked: list[Row], compare: Callable[[Row, Row], list[str]], at: Path
) -> Iterator[list[str]]:  # fmt: skip
    """Compare what a release allocates with what we state, and the frames that it writes with the captures."""
    by_id = {case["id"]: case for case in asked}
    seen = set()
    for row in answers(engine, path, asked, at):
        if "release" in row:
            found = [f"release {row['release']}, not {release}"] * (row["release"] != release)
            cannot, differ = backend_differences(row.get("backends", {}))
            yield [*report(f"{engine} {row['release']}: {len(asked)} cases", found + differ), *cannot]
            continue
        case = by_id[row["id"]]
        seen.add(row["id"])
        found = [f"not run: {row['not_run']}"] if "not_run" in row else compare(case, row)
        yield report(f"{engine} {release}, {row['id']}", found)
    yield report(f"{engine} {release}: every case was answered", sorted(by_id.keys() - seen))
    yield report(f"{engine} {release}: the frames of the captures", frames.differences(engine, release, path, at))


def answers(engine: str, path: str, asked: list[Row], at: Path) -> Iterator[Row]:
    """Yield what a probe prints, as it prints it; a release that is not installed is a folder of Python files."""
    paths = [str(HERE / "sglang_cpu")] * (engine == "sglang") + [str(at / path)] * bool(path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"}
    probe = subprocess.Popen(
        [at / "venv/bin/python", HERE / f"{engine}_pools.py"], env=env, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert probe.stdin is not None
    assert probe.stdout is not None
    probe.stdin.write(json.dumps(asked))
    probe.stdin.close()
    for line in probe.stdout:
        if line.startswith("{"):  # the packages print other lines too
            yield json.loads(line)
    probe.wait()


def backend_differences(said: dict[str, Row]) -> tuple[list[str], list[str]]:
    """Backends of our table that cannot say here what they have, and layouts, block sizes and planes that differ."""
    cannot, found = list[str](), list[str]()
    for name, ours in ((n, b) for kind in BACKENDS.values() for n, b in kind.items()):
        theirs = said.get(name, {"not_run": "no such backend"}) if said else None
        if theirs is None:
            return [], []
        if "not_run" in theirs:
            cannot.append(f"         {name} cannot say its layouts here: {theirs['not_run'].splitlines()[0][:90]}")
            if theirs["not_run"] == "no such backend":
                found.append(f"{name}: no such backend")
            continue
        layouts = tuple(theirs["layouts"] or ())
        if layouts != ours.layouts:
            found.append(f"{name}: layouts {layouts}, not {ours.layouts}")
        if tuple(theirs["sizes"]) != ours.sizes or theirs["multiple"] != ([] if ours.sizes else [ours.multiple]):
            found.append(f"{name}: blocks {theirs['sizes'] or theirs['multiple']}, not {ours.sizes or ours.multiple}")
        if theirs["planes"] != ours.planes:
            found.append(f"{name}: planes {theirs['planes']}, not {ours.planes}")
    return cannot, found


def entries(side: Pools, blocks: int) -> dict[tuple[int, str, int], tuple[Entry, int]]:
    """Of (model, part, layer) on rank 0: where it is, and the group that it is in."""
    groups = {g.id: g for g in side.geometry.groups}
    shares = {o.group: o for o in side.geometry.ranks[0].owns}
    found = {}
    columns: Columns
    for columns in side.memory(0, blocks).columns:
        group, share = groups[columns.group], shares[columns.group]
        for n, layer in enumerate(share.layers.tolist()):
            for p, part in enumerate(group.parts):
                k = n * len(group.parts) + p
                lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
                at = (columns.region, columns.offset, columns.item_stride, columns.row_stride, columns.lane_stride)
                entry: Any = (*(int(a[k]) for a in at), group.rows, lanes, part.lane_bytes)
                found[group.model, part.name, layer] = entry, group.id
    return found


def vllm_differences(case: Row, said: Row) -> list[str]:
    """Addresses, strides and block tables of every layer, ours and theirs."""
    model = cases.config(case["model"])
    drafts = [cases.config(d) for d in case.get("drafts", ())]
    try:
        side = pools("vllm", model, drafts, cases.setup(case, model))
    except KvprotoError as error:
        return [str(error)]
    ours, found = entries(side, case["blocks"]), []
    size = side.memory(0, case["blocks"]).regions[0][1]
    if size != said["bytes"]:
        found.append(f"{size} bytes in all, not {said['bytes']}")
    left, tables = set(ours), dict[tuple[int, int], set[int]]()
    for name, row in said["layers"].items():
        layer = int((re.search(r"\.(\d+)\.", name) or [0, -1])[1])
        if re.match(r"model\.\d+\.mixer", name):  # Falcon-H1 numbers its mixers behind its attention
            layer -= model["num_hidden_layers"]
        number = int(name.startswith("draft"))
        for part, wanted in expected(name, row):
            key = number, part, layer
            if key not in ours:
                found.append(f"{name}: no {part}")
                continue
            left.discard(key)
            entry, group = ours[key]
            tables.setdefault((number, group), set()).add(row["table"])
            wrong = {n: (entry[i], value) for n, (i, value) in wanted.items() if entry[i] != value}
            found += [f"{name}, {part}: {n} {mine}, not {theirs}" for n, (mine, theirs) in wrong.items()]
    found += [f"{key}: the package has no such layer" for key in sorted(left)]
    found += [f"group {key} is in block tables {some}" for key, some in tables.items() if len(some) > 1]
    by_table: dict[tuple[int, int, str], int] = {}
    for (number, group), some in tables.items():
        kind = str(sorted(p.name for p in side.geometry.groups[group].parts))
        if by_table.setdefault((number, min(some), kind), group) != group:
            found.append(f"block table {min(some)} is two groups")
    return found


_AT = {"offset": 1, "item stride": 2, "row stride": 3, "lane stride": 4, "rows": 5, "lanes": 6, "bytes of a lane": 7}


def expected(name: str, row: Row) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Parts of a layer of vLLM, and what each number of ours must be."""

    def wanted(**numbers: int) -> dict[str, tuple[int, int]]:
        return {n.replace("_", " "): (_AT[n.replace("_", " ")], v) for n, v in numbers.items()}

    block, head, token, _ = row["strides"]
    if "states" in row:
        for state in row["states"]:
            of_conv = state is row["states"][0] and len(state["shape"]) == 2
            yield (
                "conv" if of_conv else "ssm",
                {
                    **wanted(offset=state["at"], item_stride=block),
                    **(
                        wanted(rows=state["shape"][0], lanes=state["shape"][1])
                        if of_conv
                        else wanted(lanes=state["shape"][0])
                    ),
                },
            )
        return
    _, heads, tokens, content = row["shape"]
    if "indexer" in name:
        at = wanted(item_stride=block, rows=tokens, lanes=1)
        yield "index", at | wanted(offset=row["at"], row_stride=128, bytes_of_a_lane=128)
        yield "index_scale", at | wanted(offset=row["at"] + tokens * 128, row_stride=4, bytes_of_a_lane=4)
        return
    at = wanted(item_stride=block, row_stride=token, rows=tokens, lanes=heads)
    at |= wanted(lane_stride=head) if heads > 1 else {}
    if content in (1152, 656):
        yield "latent", at | wanted(offset=row["at"], bytes_of_a_lane=content)
        return
    yield "k", at | wanted(offset=row["at"], bytes_of_a_lane=content // 2)
    yield "v", at | wanted(offset=row["at"] + content // 2, bytes_of_a_lane=content // 2)


def sglang_differences(case: Row, said: Row) -> list[str]:
    """Shapes, strides and places of the tensors of one pool, ours and theirs."""
    model, states = cases.config(case["model"]), case["kind"] == "states"
    try:
        side = pools("sglang", model, (), Setup(Parallel(tp=case["tp"]), page=case["page"], layout=case["layout"]))
    except KvprotoError as error:
        return [str(error)]
    ours, groups, found = entries(side, cases.BLOCKS), side.geometry.groups, []
    suffix = {"attention": "target", "window": "target window", "chunked": "target chunked"}
    for part, tensors in ((p, t) for p, t in said.items() if p != "id"):
        layers = sorted(
            layer for (_, name, layer), (_, group) in ours.items()
            if name == part and (states or part == "index" or groups[group].name == suffix[case["kind"]])
        )  # fmt: skip
        count = tensors[0]["shape"][0] if states else len(tensors)
        if len(layers) != count:
            found.append(f"{part}: {len(layers)} layers, not {count}")
            continue
        for n, layer in enumerate(layers):
            entry = ours[0, part, layer][0]
            theirs = tensors[0] if states else tensors[n]
            for name, (mine, value) in sglang_expected(part, theirs, n if states else 0, entry, case).items():
                if mine != value:
                    found.append(f"{part} of layer {layer}: {name} {mine}, not {value}")
    return found


def sglang_expected(part: str, t: Row, n: int, entry: Entry, case: Row) -> dict[str, tuple[int, int]]:
    """(ours, theirs) of each number of a tensor: slots and heads, pages and heads, or layers and slots."""
    _, offset, item, row, lane, rows, lanes, size = entry
    shape, strides = t["shape"], t["strides"]
    if part in ("conv", "ssm"):
        channels, inputs = (3, 2) if part == "conv" and case["pool"] == "kda" else (2, 3)
        found = {
            "offset": (offset, t["at"] + n * strides[0]),
            "item stride": (item, strides[1]),
            "items": (cases.BLOCKS, shape[1]),
        }
        found |= {"lanes": (lanes, shape[channels]), "lane stride": (lane, strides[channels])}
        of_conv = {"rows": (rows, shape[inputs]), "row stride": (row, strides[inputs])}
        state = 1
        for length in shape[3:]:
            state *= length
        return found | (of_conv if part == "conv" else {"bytes of a lane": (size, state * t["size"])})
    found = {"offset": (offset, t["at"])}
    if part == "index":
        return found | {"item stride": (item, strides[0]), "bytes of a page": (rows * (size + 4), shape[1] * t["size"])}
    if case["layout"] == "HND" and case["pool"] == "mha":
        found |= {"pages": (cases.BLOCKS, shape[0]), "item stride": (item, strides[0]), "rows": (rows, shape[2])}
        head, token, content = 1, 2, shape[3]
    else:
        found |= {"slots": (cases.BLOCKS * rows, shape[0]), "item stride": (item, strides[0] * case["page"])}
        head, token, content = 1, 0, shape[2]
    found |= {"row stride": (row, strides[token])} if rows > 1 else {}
    found |= {"lane stride": (lane, strides[head])} if lanes > 1 else {}
    return found | {"lanes": (lanes, shape[head]), "bytes of a lane": (size, content * t["size"])}


if __name__ == "__main__":
    sys.exit(main())
