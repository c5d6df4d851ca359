"""vLLM keeps pages in storage and finds them again, by `kvproto_vllm`: `ENGINE/python -m tools.engines.vllm_tiers FOLDER [WORD ...]`.

As vllm_pd.py. Each engine is fresh, so that what it finds came from storage; what one computes alone is the baseline.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from tools.engines.child import new_name, prompts
from tools.engines.vllm_engine import Engine
from tools.engines.vllm_models import make
from tools.engines.vllm_pd import DRAFT, MLA

MOST = 16
"""Tokens of an answer."""


def keeping(name: str, storage: Path, about: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """A vLLM that keeps pages in this folder; `about` are more settings of its tiers."""
    transfer = {
        "kv_connector": "KvprotoTiers", "kv_connector_module_path": "kvproto_vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "storage": str(storage), "host_bytes": 64 << 20, "prefetch_threshold": 0, "prefetch_policy": "wait_complete",
            "weights": "of this test", **(about or {}),
        },
    }  # fmt: skip
    return Engine("recompute", {"kv": transfer, "enable_prefix_caching": True, **settings}, name=name)


def started(*engines: Engine) -> None:
    """Start engines, and wait until each is ready."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.ready()


def asked(engine: Any, given: list[list[int]]) -> list[tuple[list[int], int]]:
    """Answers to several prompts at once, and how many tokens of each the engine had."""
    names = [new_name() for _ in given]
    for name, prompt in zip(names, given, strict=True):
        engine.add(name, prompt, MOST)
    return [(tokens, cached or 0) for tokens, _, _, cached in map(engine.result, names)]


def same(wanted: list[tuple[list[int], int]], found: list[tuple[list[int], int]]) -> Iterator[str]:
    """Tokens are equal."""
    for (tokens, _), (again, cached) in zip(wanted, found, strict=True):
        if tokens != again:
            yield f"{again}, not {tokens}, of {cached} tokens found"


def hits(given: list[list[int]], found: list[tuple[list[int], int]], page: int) -> Iterator[str]:
    """All whole pages were found, but for the last token."""
    for prompt, (_, cached) in zip(given, found, strict=True):
        if cached != (len(prompt) - 1) // page * page:
            yield f"{cached} tokens of {len(prompt)} were found"


def misses(found: list[tuple[list[int], int]]) -> Iterator[str]:
    """Nothing was found."""
    yield from (f"{cached} tokens were found" for _, cached in found if cached)


def stored(storage: Path) -> list[Path]:
    """The files of objects of pages, the largest last."""
    return sorted((each for each in (storage / "o").rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)


def flip(storage: Path) -> int:
    """Flip a bit of each object that is stored; how many there are."""
    files = stored(storage)
    for each in files:
        data = bytearray(each.read_bytes())
        data[len(data) // 2] ^= 0x40
        each.write_bytes(data)
    return len(files)


@attrs.frozen
class Tried:
    """An engine that keeps pages, and one that differs in this, which finds them."""

    title: str
    settings: dict[str, Any]
    page: int
    other: dict[str, Any] = attrs.Factory(dict)
    often: bool = False


_IN_BLOCKS = {"model": "llama", "max_num_batched_tokens": 96}
TRIED = [
    Tried("Llama, block 32 in chunks of 96 tokens, and block 64", _IN_BLOCKS, 32, {"block_size": 64}, often=True),
    Tried("MLA, block 16", MLA, 16),
    Tried("Llama with a draft model, one object for both, block 32", _IN_BLOCKS | DRAFT, 32),
]


def tried(each: Tried, models: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Cases and what differs in each."""
    settings = _filled(models, each.settings)
    given, storage = prompts(4, 100, 300, 5), folder / "storage"
    first = keeping("first", storage, **settings)
    started(first)
    try:
        wanted = asked(first, given)
        yield "nothing is found in an empty folder", list(misses(wanted))
        again = asked(first, given)
        yield "found on the device", [*same(wanted, again), *hits(given, again, each.page)]
        first.forget()
        again = asked(first, given)
        yield "evicted from the device, found on the host", [*same(wanted, again), *hits(given, again, each.page)]
    finally:
        first.stop()
    second = keeping("second", storage, **settings | each.other)
    started(second)
    try:
        page = each.other.get("block_size", each.page)
        again = asked(second, given)
        yield f"a fresh engine, block {page}, finds them in storage", [*same(wanted, again), *hits(given, again, page)]
        more = [prompt + tail for prompt, tail in zip(given, prompts(4, 40, 60, 6), strict=True)]
        yield "longer prompts", list(same(asked(second, more), asked(second, more)))
    finally:
        second.stop()
    stranger = keeping("stranger", storage, {"weights": "of another revision"}, **settings)
    started(stranger)
    try:
        found = asked(stranger, given)
        yield "pages of other weights are not found", [*same(wanted, found), *misses(found)]
    finally:
        stranger.stop()
    count = flip(storage)
    third = keeping("third", storage, **settings)
    started(third)
    try:
        found = asked(third, given)
        damaged = [] if count else ["nothing is stored"]
        yield (
            f"a bit of each of {count} objects is flipped: none is served",
            [*damaged, *same(wanted, found), *misses(found)],
        )
    finally:
        third.stop()


def _filled(models: Path, given: Any) -> Any:
    """Settings with the folder of a model in place of its name."""
    if not isinstance(given, dict):
        return given
    return {n: str(make(models, each)) if n == "model" else _filled(models, each) for n, each in given.items()}


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    models, words = Path(argv[0]), argv[1:]
    import vllm

    wrong, begun = 0, time.monotonic()
    newest = vllm.__version__.startswith("0.33")
    chosen = [each for each in TRIED if any(word in each.title for word in words)]
    for each in chosen or [each for each in TRIED if newest or each.often]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for title, found in tried(each, models, Path(folder)):
                    wrong += _told(begun, f"vllm {vllm.__version__}, {each.title}: {title}", found)
            except (RuntimeError, TimeoutError, OSError) as error:
                wrong += _told(begun, each.title, [str(error)])
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def _told(begun: float, title: str, found: list[str]) -> bool:
    print(f"{'DIFFERS' if found else 'same   '} {time.monotonic() - begun:5.0f} s  {title}", flush=True)
    for line in found:
        print(f"        {line}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
