"""`python -m tools.layout_vectors`: Descriptions and tensors of well-known models in today's engines.

Each case is what `kvproto describe --engine` prints for a config.json of examples/configs: a digest of the Description,
the tensors for people, and a digest of the columns that Register carries. `--check` compares.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvproto.cli.main import main as kvproto
from kvproto.planning.geometry import digest, encode_geometry
from kvproto.wire import encode_struct, from_json
from kvproto.wire.messages import Columns, Geometry
from kvproto_conformance.data import spec
from tools.files import renew
from tools.specgen.registry import ROOT, SPEC

CONFIGS = ROOT / "examples/configs"
ENGINES = {
    "vllm": "each backend's order, one allocation that block tables overlay",
    "sglang": "a tensor a layer, or one of all layers",
    "trtllm": "one pool a shape",
}
TP = {
    "command-r": 8, "deepseek-v2-lite": 2, "deepseek-v3": 8, "deepseek-v3.2": 8, "falcon-h1-7b": 2, "gemma-3-27b": 4,
    "glm-4.5": 8, "gpt-oss-120b": 4, "jamba-1.5-mini": 2, "kimi-k2": 16, "kimi-linear-48b-a3b": 4, "llama-3.3-70b": 8,
    "llama-4-scout": 8, "mamba-codestral-7b": 2, "minimax-m2": 4, "minimax-text-01": 8, "mixtral-8x7b": 4,
    "nemotron-h-8b": 2, "qwen3-235b-a22b": 8, "qwen3-next-80b-a3b": 4, "step3": 8,
}  # fmt: skip
"""Ranks of the larger models."""
APART = ("deepseek-v4-flash", "gemma-4-31b", "glm-5.2", "hunyuan-large", "minimax-m3")
"""Models of which it is not known which layers engines store, or how they arrange them."""
UNKNOWN = {"trtllm": ("deepseek-v3.2",)}
"""Pools that no table describes."""
MORE: list[tuple[str, str, str]] = [
    # engine, configs with drafts behind a plus sign, options
    ("vllm", "llama-3.1-8b+draft-eagle3-llama-3.1-8b", "--tp 2"),
    ("vllm", "deepseek-v3+draft-eagle3-deepseek-v3", "--tp 8"),
    ("vllm", "qwen3-8b+draft-dflash-qwen3-8b", ""),
    ("vllm", "deepseek-v3", "--tp 8 --nextn"),
    ("vllm", "deepseek-v3", "--tp 8 --dcp 8 --interleave 64"),
    ("vllm", "deepseek-v3.2", "--tp 8 --kv-dtype fp8_ds_mla"),
    ("vllm", "glm-4.5", "--tp 8 --nextn --layout LBHNC"),
    ("vllm", "minimax-m2", "--tp 4 --nextn"),
    ("vllm", "llama-3.3-70b", "--tp 8 --kv-dtype fp8"),
    ("vllm", "llama-3.3-70b", "--tp 8 --backend TRITON_ATTN --kv-dtype fp8_per_token_head"),
    ("vllm", "llama-3.3-70b", "--tp 8 --backend B12X"),
    ("vllm", "llama-3.3-70b", "--tp 4 --pp 2 --layout BLHNC"),
    ("vllm", "llama-3.3-70b", "--tp 16"),
    ("vllm", "qwen3-next-80b-a3b", "--tp 4 --backend FLASHINFER --layout LBHNC --state-layout DS"),
    ("vllm", "gpt-oss-20b", "--backend ROCM_ATTN"),
    ("vllm", "llama-3.3-70b", "--tp 8 --kv-dtype nvfp4 --sm 100"),
    ("vllm", "llama-3.1-8b+draft-eagle3-llama-3.1-8b", "--tp 2 --kv-dtype nvfp4 --sm 100 --layout BLHNC --page 64"),
    ("vllm", "gemma-3-27b", "--tp 4 --kv-dtype nvfp4 --sm 100"),
    ("vllm", "llama-3.3-70b", "--tp 8 --kv-dtype nvfp4 --sm 120 --layout LBNHC"),
    ("vllm", "deepseek-v3.2", "--tp 8 --kv-dtype nvfp4_ds_mla"),
    ("sglang", "llama-3.1-8b+draft-eagle3-llama-3.1-8b", "--tp 2 --page 16"),
    ("sglang", "deepseek-v3+draft-eagle3-deepseek-v3", "--tp 8 --page 64"),
    ("sglang", "qwen3-8b+draft-dflash-qwen3-8b", "--page 64"),
    ("sglang", "deepseek-v3", "--tp 8 --dp 8 --nextn --page 64"),
    ("sglang", "deepseek-v3", "--tp 8 --dcp 8 --page 16 --nextn"),
    ("sglang", "deepseek-v3.2", "--tp 8 --kv-dtype fp8_e4m3"),
    ("sglang", "llama-3.3-70b", "--tp 8 --page 64 --layout HND"),
    ("sglang", "llama-3.3-70b", "--tp 8 --page 32 --kv-dtype fp8_e4m3"),
    ("sglang", "minimax-m2", "--tp 4 --nextn --page 64"),
    ("sglang", "llama-3.3-70b", "--tp 8 --kv-dtype mxfp8"),
    ("sglang", "llama-3.3-70b", "--tp 8 --page 64 --kv-dtype nvfp4 --sm 120"),
    ("sglang", "llama-3.3-70b", "--tp 8 --page 16 --kv-dtype fp4_mx_block16"),
    ("sglang", "deepseek-v3", "--tp 8 --page 64 --kv-dtype fp4_mx_block16"),
    ("trtllm", "llama-3.3-70b", "--tp 8 --kv-dtype fp8"),
    ("trtllm", "llama-3.3-70b", "--tp 8 --kv-dtype nvfp4 --sm 100"),
    ("trtllm", "deepseek-v3", "--tp 8 --nextn --page 64"),
    ("trtllm", "llama-3.1-8b+draft-eagle3-llama-3.1-8b", "--tp 2 --pp 2"),
]


def cases() -> Iterator[tuple[str, str, str]]:
    """Every model in every engine, and the variants."""
    for path in sorted(CONFIGS.glob("*.json")):
        name = path.stem
        for engine in ENGINES:
            if not name.startswith("draft-") and name not in (*APART, *UNKNOWN.get(engine, ())):
                yield engine, name, f"--tp {TP[name]}" if name in TP else ""
    yield from MORE


CASES = list(cases())


def printed(arguments: list[str]) -> str:
    """The output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = kvproto(arguments)
    if status:
        raise SystemExit(f"kvproto {' '.join(arguments)}: exit status {status}")
    return out.getvalue()


def case(engine: str, names: str, options: str) -> dict[str, Any]:
    """One vector."""
    paths = [str(CONFIGS / f"{name}.json") for name in names.split("+")]
    command = ["describe", "--engine", engine, paths[0], *options.split()]
    command += [word for path in paths[1:] for word in ("--draft", path)]
    geometry = from_json(Geometry, json.loads(printed(command)))
    shown = printed([*command, "--tensors"]).splitlines()
    columns = json.loads(printed([*command, "--tensors", "--json"]))["columns"]
    of_columns = b"".join(encode_struct(from_json(Columns, c)) for c in columns)
    return {
        "id": " ".join([names, *options.split()]),
        "note": ENGINES[engine],
        "configs": [json.loads(Path(path).read_text()) for path in paths],
        "options": options,
        "digest": digest(encode_geometry(geometry)).hex(),
        "columns": hashlib.sha256(of_columns).hexdigest(),
        "shown": [line for line in shown if line],
    }


def suites() -> dict[Path, str]:
    """One file per engine."""
    found = {}
    for engine in ENGINES:
        rows = [case(*row) for row in CASES if row[0] == engine]
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
        head = f'{{"suite": "layouts/{engine}", "version": "{spec()}", "made": "by tools.layout_vectors", "cases": [\n'
        found[SPEC / f"vectors/layouts/{engine}.json"] = f"{head}{lines}\n]}}\n"
    return found


def main(argv: list[str] | None = None) -> int:
    """Write the vectors, or compare; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.layout_vectors", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 naming what differs")
    args = parser.parse_args(argv)
    return 1 if renew(suites(), args.check) and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
