"""vLLM keeps pages in storage and finds them again, by `kvproto_vllm`: `ENGINE/python -m tools.engines.vllm_tiers FOLDER [WORD ...]`.

As vllm_pd.py. Each engine is fresh, so that what it finds came from storage; what one computes alone is the baseline.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvproto.tiers.manifest import object_key
from kvproto.tiers.store import open_store
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.messages import Manifest
from tools.engines.child import new_name, prompts
from tools.engines.vllm_engine import ASK, Engine
from tools.engines.vllm_models import make
from tools.engines.vllm_pd import DRAFT, EAGLE, MLA

MOST = 16
"""Tokens of an answer."""
_LARGE = 1 << 30
Cases = Iterator[tuple[str, list[str]]]
"""Titles, and what differs."""
_BESIDE = "Llama, MultiConnector beside the one that hands over"


def keeping(name: str, storage: Path, about: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """A vLLM that keeps pages in this folder; `about` are more settings of its tiers."""
    transfer = {
        "kv_connector": "KvprotoTiers", "kv_connector_module_path": "kvproto_vllm.tiers", "kv_role": "kv_both",
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
    return counted(engine, given)[0]


def counted(engine: Any, given: list[list[int]]) -> tuple[list[tuple[list[int], int]], list[int]]:
    """As `asked`, and the steps that gave each request its tokens: fewer where more of a draft is accepted."""
    names = [new_name() for _ in given]
    for name, prompt in zip(names, given, strict=True):
        engine.add(name, prompt, MOST)
    found = [(tokens, cached or 0) for tokens, _, _, cached in map(engine.result, names)]
    return found, [engine.rounds(name) for name in names]


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


def flip(storage: Path) -> int:
    """Flip a bit of each object that is stored; how many there are."""
    files = [each for each in (storage / "o").rglob("*") if each.is_file()]
    for each in files:
        each.write_bytes(_flipped(each.read_bytes()))
    return len(files)


def forge(storage: Path) -> None:
    """Flip a bit of each object, and have its manifest name the digest that it then has."""
    store = open_store(storage)
    for key in list(store.keys("m")):
        manifest = decode_struct(Manifest, store.get(key) or b"")
        components = []
        for component in manifest.components:
            data = _flipped(store.get(object_key(manifest, component)) or b"")
            components.append(attrs.evolve(component, digest=hashlib.sha256(data).digest()))
            store.put(object_key(manifest, components[-1]), data)
        store.put(key, encode_struct(attrs.evolve(manifest, components=tuple(components))))


def _flipped(data: bytes) -> bytes:
    """The bit that makes a small number a large one, of a float32 that is one, about the middle."""
    numbers = np.frombuffer(data, np.uint32).copy()
    half = len(numbers) // 2
    numbers[half + np.flatnonzero(numbers[half:] & _LARGE == 0)[0]] ^= _LARGE
    return numbers.tobytes()


@attrs.frozen
class Tried:
    """An engine that keeps pages, and one that differs in this, which finds them."""

    title: str
    settings: dict[str, Any]
    page: int
    other: dict[str, Any] = attrs.Factory(dict)
    often: bool = False
    device: bool = True
    """Whether vLLM finds all pages again that are on its device; else it computes the last one again."""
    spoilt: bool = False
    """Whether other weights, forged pages and damaged ones are tried, too."""


_IN_BLOCKS = {"model": "llama", "max_num_batched_tokens": 96}
TRIED = [
    Tried(
        "Llama, block 32 in chunks of 96 tokens, and block 64",
        _IN_BLOCKS,
        32,
        {"block_size": 64},
        often=True,
        spoilt=True,
    ),
    Tried("MLA, block 16", MLA, 16),
    Tried(
        "Layers with a sliding window of 80 tokens beside full ones, block 32, and 64",
        {"model": "window"},
        32,
        {"block_size": 64},
    ),
    Tried("Llama with a draft model, one object for both, block 32", _IN_BLOCKS | DRAFT, 32, spoilt=True),
    Tried("Llama with EAGLE, whose rows look ahead, block 32", {"model": "llama", **EAGLE}, 32, device=False),
    Tried(
        "Llama, TP 2, and 1 in blocks of 64",
        {"model": "llama", "tensor_parallel_size": 2},
        32,
        {"tensor_parallel_size": 1, "block_size": 64},
    ),
]


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Engines that are started, and stopped in the end."""
    started(*engines)
    try:
        yield
    finally:
        for engine in engines:
            engine.stop()


def tried(each: Tried, models: Path, folder: Path) -> Cases:
    """Cases and what differs in each."""
    settings, page = _filled(models, each.settings), each.other.get("block_size", each.page)
    given, storage = prompts(4, 100, 300, 5), folder / "storage"
    more = [prompt + tail for prompt, tail in zip(given, prompts(4, 40, 60, 6), strict=True)]
    first, second = keeping("first", storage, **settings), keeping("second", storage, **settings | each.other)
    with running(first):
        wanted, steps = counted(first, given)
        yield "nothing is found in an empty folder", list(misses(wanted))
        found = asked(first, given)
        again = list(hits(given, found, each.page)) if each.device else []
        yield "found on the device", [*same(wanted, found), *again]
        first.forget()
        found, taken = counted(first, given)
        again = [*hits(given, found, each.page), *_accepted(steps, taken)]
        yield "evicted from the device, found on the host, as many tokens a step", [*same(wanted, found), *again]
    with running(second):
        found, taken = counted(second, given)
        again = [*hits(given, found, page), *(_accepted(steps, taken) if page == each.page else ())]
        yield f"a fresh engine, block {page}, finds them in storage", [*same(wanted, found), *again]
        yield "longer prompts", list(same(asked(second, more), asked(second, more)))
    if each.spoilt:
        yield from _wrong(settings, each.page, storage, given, wanted)


def _accepted(steps: list[int], taken: list[int]) -> Iterator[str]:
    """As much of a draft's proposals is accepted."""
    if steps != taken:
        yield f"answers in {taken} steps, not {steps}"


def _wrong(
    settings: dict[str, Any], page: int, storage: Path, given: list[list[int]], wanted: list[tuple[list[int], int]]
) -> Cases:  # fmt: skip
    """Storage with pages of other weights, with forged ones, and with damaged ones."""
    with running(engine := keeping("stranger", storage, {"weights": "of another revision"}, **settings)):
        found = asked(engine, given)
        yield "pages of other weights are not found", [*same(wanted, found), *misses(found)]
    forge(storage)
    with running(engine := keeping("credulous", storage, **settings)):
        found = asked(engine, given)
        alike = [f"{a} all the same" for (a, _), (b, _) in zip(wanted, found, strict=True) if a == b]
        yield "pages that were forged give other tokens: what is found is used", [*alike, *hits(given, found, page)]
    count = flip(storage)
    with running(engine := keeping("fresh", storage, **settings)):
        found = asked(engine, given)
        missing = [] if count else ["nothing is stored"]
        yield (
            f"a bit of each of {count} objects is flipped: none is served",
            [*missing, *same(wanted, found), *misses(found)],
        )


def handed_on(models: Path, folder: Path) -> Cases:
    """Beside the connector that hands over, by MultiConnector: prefill finds a prompt in storage, and decode gets it."""
    llama: dict[str, Any] = {"model": str(make(models, "llama"))}
    (prompt,) = prompts(1, 200, 201, 7)
    prefill = Engine.of("prefill", str(folder), ["decode"], "fail", **llama, enable_prefix_caching=True)
    tiers = keeping("tiers", folder / "storage").settings["kv"]
    own = prefill.settings["kv"] | {"kv_connector": "KvprotoConnector", "kv_connector_module_path": "kvproto_vllm"}
    prefill.settings["kv"] = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, tiers]},
    }  # fmt: skip
    decode = Engine.of("decode", str(folder), ["prefill"], "fail", **llama, block_size=64)
    with running(prefill, decode):
        wanted = prefill.run(new_name(), prompt, MOST)[0]
        prefill.forget()
        _, _, params, cached = prefill.run(new_name(), prompt, 1, ASK)
        tokens, reason, _, fetched = decode.run(new_name(), prompt, MOST, params)
        found = [] if tokens == wanted else [f"{tokens}, not {wanted}, {reason}"]
        if (cached, fetched) != (192, 192):  # whole blocks
            found.append(f"prefill found {cached} tokens, decode fetched {fetched}")
        yield "what prefill finds is handed over", found
        yield "nothing is left", [f"{each.name}: {each.free()}" for each in (prefill, decode) if not each.idle()]


def policies(models: Path, folder: Path) -> Cases:
    """Tests of when pages are kept, and of how long a request waits for storage."""
    llama: dict[str, Any] = {"model": str(make(models, "llama"))}
    given, storage = prompts(2, 200, 300, 8), folder / "storage"
    with running(engine := keeping("selective", storage, {"write_policy": "write_through_selective"}, **llama)):
        wanted = asked(engine, given)
        engine.forget()
        found = asked(engine, given)
        yield "write_through_selective keeps nothing that one request has", [*same(wanted, found), *misses(found)]
        asked(engine, given[:1])
    with running(engine := keeping("timeout", storage, {"prefetch_policy": "timeout"}, **llama)):
        found = asked(engine, given)
        kept = [*hits(given[:1], found[:1], 32), *misses(found[1:])]
        yield "and what a second has found; timeout", [*same(wanted, found), *kept]
    with running(engine := keeping("best", storage, {"prefetch_policy": "best_effort"}, **llama)):
        yield "best_effort, whatever has come", list(same(wanted, asked(engine, given)))


def refused(models: Path, folder: Path) -> Cases:
    """A setting that cannot be kept ends the engine's start, by its name."""
    for title, about, says in (
        ("write_back", {"write_policy": "write_back"}, "vLLM does not say which block it is about to give up"),
        ("a name that is unknown", {"storrage": "x"}, "'storrage'"),
    ):
        engine = keeping("refused", folder / "storage", about, model=str(make(models, "llama")))
        engine.start()
        try:
            engine.ready()
            found = ["the engine has started"]
        except RuntimeError as error:
            found = [] if says in str(error) else [str(error)[-600:]]
        finally:
            engine.stop()
        yield f"{title}: refused", found


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
    runs: dict[str, Callable[[Path, Path], Cases]] = {each.title: partial(tried, each) for each in TRIED}
    runs |= {_BESIDE: handed_on, "Policies": policies, "What is refused": refused}
    often = [each.title for each in TRIED if each.often]
    chosen = [title for title in runs if any(word in title for word in words)]
    for title in chosen if words else runs if newest else often:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for case, found in runs[title](models, Path(folder)):
                    wrong += _told(begun, f"vllm {vllm.__version__}, {title}: {case}", found)
            except (RuntimeError, TimeoutError, OSError) as error:
                wrong += _told(begun, title, [str(error)])
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def _told(begun: float, title: str, found: list[str]) -> bool:
    print(f"{'DIFFERS' if found else 'same   '} {time.monotonic() - begun:5.0f} s  {title}", flush=True)
    for line in found:
        print(f"        {line}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
