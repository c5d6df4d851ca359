"""A reader of Register in C, made from the spec alone, passes its vectors; under the sanitizers too."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "conformance/testees/c/register.c"
VECTORS = ROOT / "spec/v1/vectors/codec"
STRICT = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
SANITIZED = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def answers(program: Path, frames: list[str]) -> list[dict[str, Any]]:
    text = "".join(json.dumps({"op": "decode", "frame": frame}) + "\n" for frame in frames)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("flags", [STRICT, SANITIZED], ids=["strict", "sanitized"])
def test_register_in_c(flags: list[str], tmp_path: Path) -> None:
    program = tmp_path / "register"
    subprocess.run(["gcc", *flags, "-o", program, SOURCE], check=True, timeout=60)
    rows = [c for p in sorted(VECTORS.glob("*.json")) for c in json.loads(p.read_text())["cases"] if "struct" not in c]
    found = answers(program, [c["bytes"] for c in rows])
    judged = 0
    for case, answer in zip(rows, found, strict=True):
        about = case["bytes"][12:16] == "0301"
        if answer == {"unsupported": True}:
            assert not about, case["id"]
            continue
        judged += about
        assert answer == {k: case[k] for k in ("error", "path", "message", "fields") if k in case}, case["id"]
    assert judged > 100
    # a good frame cut short anywhere, and its body cut with the length mended
    whole = bytes.fromhex(next(c["bytes"] for c in rows if c["id"] == "register"))
    cut = [whole[:n] for n in range(len(whole))] + [
        whole[:12] + (n - 16).to_bytes(4, "little") + whole[16:n] for n in range(16, len(whole))
    ]
    assert {a["error"] for a in answers(program, [c.hex() for c in cut])} == {"TRUNCATED"}
