"""libkvproto: frames, Descriptions and plans, and how large it is: `python benchmarks/library.py [--out]`. CPU time, medians."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, arguments, facts, keep
from plan import gqa_engine

from kvproto.planning.geometry import encode_geometry

LIBRARY = ROOT / "libkvproto"
FRAME = "a Transfer of 2 x 2,048 pages"
PLANS = {
    "64 x 64 ranks, 80 layers GQA (8 heads) + draft": (gqa_engine(64, 8), gqa_engine(64, 8)),
    "64 x 64 ranks, 80 layers GQA (64 heads) + draft": (gqa_engine(64, 64), gqa_engine(64, 64)),
    "64 x 32 ranks, 80 layers GQA (8 heads) + draft": (gqa_engine(64, 8), gqa_engine(32, 8)),
    "512 x 512 ranks, 80 layers GQA (8 heads) + draft": (gqa_engine(512, 8), gqa_engine(512, 8)),
}


def size(folder: Path) -> dict[str, int]:
    """Lines of header and sources, and bytes of the shared library as `make` builds it, stripped."""
    subprocess.run(["make", "-s", "-C", LIBRARY, f"BUILD={folder}"], check=True)
    subprocess.run(["strip", folder / "libkvproto.so"], check=True)
    lines = [len(path.read_text().splitlines()) for path in (LIBRARY / "include/kvproto.h", *LIBRARY.glob("src/*.c"))]
    return {"lines": sum(lines), "bytes": (folder / "libkvproto.so").stat().st_size}


def measured(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Samples of each round, in seconds."""
    command: list[Path | str] = [folder / "library", str(rounds)]
    for name, pair in PLANS.items():
        for i, side in enumerate(pair):
            path = folder / f"{name.replace(' ', '-')}-{i}"
            path.write_bytes(encode_geometry(side))
            command.append(path)
    source = ROOT / "benchmarks/library.c"
    flags = ["-std=c11", "-O2", f"-I{LIBRARY}/include"]
    subprocess.run(["gcc", *flags, "-o", folder / "library", source, folder / "libkvproto.a"], check=True)
    samples: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return samples


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "library", rounds=9).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = size(Path(folder))
        rounds = measured(Path(folder), args.rounds)
    frames = {way: [one[way] * 1e6 for one in rounds] for way in ("encode", "decode")}
    plans = {
        way: {name: [one["plans"][i][way] * 1e3 for one in rounds] for i, name in enumerate(PLANS)}
        for way in ("describe", "plan")
    }
    print(f"{large['lines']:,} lines, {large['bytes']:,} bytes stripped")
    for way, took in frames.items():
        print(f"{f'{way} {FRAME}, us':64}{median(took):10.2f}")
    for way, of in plans.items():
        for name, took in of.items():
            print(f"{f'{way}, {name}, ms':64}{median(took):10.3f}")
    keep(
        args.out,
        {"benchmark": "library"}
        | facts()
        | {"size": large, "frames_us": frames}
        | {f"{way}_ms": of for way, of in plans.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
