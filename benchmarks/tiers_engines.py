"""SGLang's HiCache on the CPU over its own files and over `kvproto_sglang.tiers`: what a fresh engine finds, and when.

`PYTHONPATH=tools/engines/sglang_cpu:.engines/sgt:.:integrations SGLANG_USE_CPU_ENGINE=1 .engines/venv/bin/python
benchmarks/tiers_engines.py [--out] [--rounds N]` after `make engines`. Caches are as large as those of SmolLM2-135M in
float32, and the model computes little.

In each round every contender computes prompts in one engine, and is asked for them in a fresh one; the order of
contenders rotates. Of each prompt the time to the first token, and the share of its tokens that were found; of HiCache's
reads and writes the bytes a second, in the thread that waits for the store. `computed` has no storage. Files were just written, so that they are
in the page cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness import arguments, facts, keep

from tools.engines import sglang_engine as sg
from tools.engines.child import new_name, prompts
from tools.engines.sglang_bench import RATES
from tools.engines.tiers import hicache
from tools.engines.vllm_models import make

PROMPTS, TOKENS, PAGE = 8, 1024, 64
ROW = 30 * 2 * 3 * 64 * 4
"""Bytes of a token."""


def settings(contender: str, folder: Path, model: Path) -> dict[str, Any]:
    """Of an SGLang that stores in this folder."""
    shared: dict[str, Any] = {
        "model_path": str(model), "load_format": "dummy", "page_size": PAGE, "max_total_tokens": 16384,
        "chunked_prefill_size": TOKENS, "context_length": 2 * TOKENS,
    }  # fmt: skip
    if contender == "computed":
        return shared
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder)
    storage = f"packs:{folder}" if "packs" in contender else str(folder)
    own = hicache(storage, {}) | {"hicache_ratio": 1.2}
    return shared | (own | {"hicache_storage_backend": "file"} if contender == "HiCache's files" else own)


CONTENDERS = ("computed", "HiCache's files", "kvproto, files", "kvproto, packs")


def run(contender: str, folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """One round: milliseconds to the first token, the share of tokens that were found, and bytes a second."""
    given = prompts(PROMPTS, TOKENS + 1, TOKENS + 2, seed)
    rates = folder / "rates"
    os.environ[RATES] = str(rates)
    for fresh in (False, True):
        rates.unlink(missing_ok=True)
        engine = sg.Engine.start("hicache", settings(contender, folder / "kv", model), {})
        try:
            engine.ready()
            _first(engine, prompts(1, TOKENS + 1, TOKENS + 2, 10**6 + fresh)[0])  # the first is slow in any case
            answers = [_first(engine, prompt) for prompt in given]
            whole = (PROMPTS + (not fresh)) * TOKENS * ROW  # what is written has the first prompt, too
            moved = _rates(rates, whole * (contender != "computed"), "read" if fresh else "write")
        finally:
            engine.kill()
        if not fresh:
            written = moved
    return {
        "first_ms": [round(1e3 * seconds, 1) for seconds, _ in answers],
        "found": [round(found / TOKENS, 3) for _, found in answers], "write": written, "read": moved,
    }  # fmt: skip


def _first(engine: sg.Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the one token of an answer, and how many tokens of the prompt came from storage."""
    name, began = new_name(), time.perf_counter()
    engine.add(name, prompt, 1)
    _, said = engine.result(name)
    return time.perf_counter() - began, (said.get("cached_tokens_details") or {}).get("storage", 0)


def _rates(file: Path, wanted: int, way: str) -> float | None:
    """Bytes a second of one direction, once so many have been moved."""
    until = time.monotonic() + 60
    while wanted and time.monotonic() < until:
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        mine = [(pages, seconds) for each, pages, seconds in lines if each == way]
        if sum(pages for pages, _ in mine) * PAGE * ROW >= wanted:
            return round(sum(pages for pages, _ in mine) * PAGE * ROW / sum(seconds for _, seconds in mine))
        time.sleep(0.05)
    return None


def main() -> None:
    """Run all rounds, and print medians."""
    parser = arguments(__doc__, "tiers_engines")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {each: [] for each in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        sg.plug_in(folder)
        model = make(Path(folder), "thin")
        for n in range(args.rounds):
            for contender in CONTENDERS[n % 4 :] + CONTENDERS[: n % 4]:
                place = Path(folder) / f"{n} {contender}"
                place.mkdir()
                samples[contender].append(run(contender, place, model, n))
                print(n, contender, samples[contender][-1], flush=True)
    for contender, rounds in samples.items():
        first = median(ms for each in rounds for ms in each["first_ms"])
        found = median(share for each in rounds for share in each["found"])
        write, read = (median([each[way] or 0 for each in rounds]) / 1e6 for way in ("write", "read"))
        print(
            f"{contender}: first token {first:.0f} ms, {found:.2f} found, write {write:.0f} MB/s, read {read:.0f} MB/s"
        )
    keep(args.out, facts("sglang") | {"samples": samples, "bytes_of_a_token": ROW, "tokens": TOKENS, "page": PAGE})


if __name__ == "__main__":
    main()
