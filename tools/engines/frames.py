"""Makes the captures of tests/captures again with the installed packages: what differs from the committed ones."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvproto.errors import KvprotoError
from kvproto.planning.cache import Cache
from kvproto.planning.geometry import encode_geometry
from kvproto.planning.layout import Parallel, lay_out
from kvproto_captures.capture import messages
from kvproto_captures.fleet import Fleet
from kvproto_captures.interpreter import read, resolve
from tools.specgen.registry import ROOT

_CAPTURES = ROOT / "tests/captures/recordings"


def differences(engine: str, release: str, tree: str, at: Path) -> Iterator[str]:
    """Differences between what the encoders of a package write and the captures of that release.

    `tree` is its folder in the environment `at`, or empty where it is installed there.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.jsonl"
        where = at / tree if tree else next((at / "venv/lib").glob("python*/site-packages"))
        if error := _run(at, f"{engine}_frames", where, release, made):
            yield error
            return
        yield from _unlike(_records(made), _records(_CAPTURES / f"{engine}-{release}.jsonl"))
        if engine == "sglang":
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(_TINY))
            error = _run(at, "sglang_live", folder, made, Path(folder) / "log")
            yield error or _undescribed(made.read_bytes())


def _run(at: Path, module: str, *args: object) -> str:
    """The last line of the error, or an empty string."""
    path = f"{ROOT / 'tools/engines/sglang_cpu'}:{at / 'sgt'}:{ROOT}" if module == "sglang_live" else str(ROOT)
    env = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [str(a) for a in (at / "venv/bin/python", "-m", f"tools.engines.{module}", *args)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, cwd=at)
    return f"{module}: {done.stderr.strip().splitlines()[-1:]}" if done.returncode else ""


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _unlike(made: list[dict[str, Any]], kept: list[dict[str, Any]]) -> Iterator[str]:
    if len(made) != len(kept):
        yield f"{len(made)} messages, not {len(kept)}"
    for new, old in zip(made, kept, strict=False):
        what = f"{old['backend']} {old['message']} {old['variant']}"
        if [_stable(new, n) for n in _frames(new)] != [_stable(old, n) for n in _frames(old)]:
            yield f"{what}: {_frames(new)}, not {_frames(old)}"


def _frames(record: dict[str, Any]) -> list[Any]:
    frames: list[Any] = record.get("frames", [record.get("json")])
    return frames


def _stable(record: dict[str, Any], frame: Any) -> Any:
    """Nothing of what is another each time: NIXL's own blob, and a clock."""
    passing = isinstance(frame, str) and frame.startswith((b"nixlSerDes".hex(), "cb"))
    return None if passing and record["backend"] == "nixl" else frame


_TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512, "intermediate_size": 512,
}  # fmt: skip


def _undescribed(data: bytes) -> str:
    """Whether the registrations of the package's own pools make the Description of those pools."""
    same = lay_out([Cache.gqa("target", 3, kv_heads=8, head_dim=64, page=16)], Parallel(tp=4))
    said = {"page": "16", "dtype": "bfloat16", "kv_heads": "8"}
    try:
        found = Fleet.of(resolve([read(raw) for raw in messages(data)]), said).describe()
    except KvprotoError as error:
        return str(error)
    return "" if encode_geometry(found) == encode_geometry(same) else "another Description"
