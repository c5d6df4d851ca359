"""SGLang, vLLM and the reference engine find each other's pages in storage: `ENGINE/python -m tools.engines.tiers FOLDER [MODEL ...]`.

As cross_pd.py. What finds pages is fresh, or is asked for prompts that it has never seen, so that they came from storage;
transformers says which tokens are right.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from kvproto import lay_out
from kvproto.tiers import Tiers
from kvproto_engines.facts import rope_of
from kvproto_engines.tiers import names_of
from tools.engines import sglang_engine as sg
from tools.engines import vllm_tiers as vl
from tools.engines.child import new_name, prompts
from tools.engines.cross_pd import MODELS

WEIGHTS = "of this test"
Found = list[tuple[list[int], int]]
"""Tokens of each prompt, and how many tokens of it were found."""


def hicache(storage: str, about: dict[str, Any]) -> dict[str, Any]:
    """SGLang's settings for pages in this place; `about` are more of the back end."""
    given = {
        "backend_name": "kvproto", "module_path": "kvproto_sglang.tiers", "class_name": "KvprotoTiers",
        "interface_v1": 1, "storage": storage, "weights": WEIGHTS, "prefetch_threshold": 1, **about,
    }  # fmt: skip
    return {
        "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(given),
    }  # fmt: skip


@attrs.define
class _SGLang:
    """An SGLang whose HiCache stores in a folder."""

    engine: sg.Engine

    @classmethod
    def start(cls, name: str, storage: Path, shared: dict[str, Any], about: dict[str, Any] | None = None) -> _SGLang:
        """`about` are more settings of the back end; `shared` are SGLang's."""
        return cls(sg.Engine.start(name, hicache(str(storage), about or {}) | shared, {}))

    def asked(self, given: list[list[int]]) -> Found:
        """Answers, and what of each prompt came from storage."""
        names = [new_name() for _ in given]
        for name, prompt in zip(names, given, strict=True):
            self.engine.add(name, prompt, vl.MOST)
        found = []
        for tokens, said in map(self.engine.result, names):
            found.append((tokens, (said.get("cached_tokens_details") or {}).get("storage", 0)))
        return found


class _Reference:
    """The reference engine in torch over the same storage, in this process."""

    PAGE, PAGES = 16, 128

    def __init__(self, folder: Path, storage: Path) -> None:
        from kvproto_reference import checkpoint
        from kvproto_reference.cache import KVPool, Shard
        from kvproto_reference.cache.memory import shareable
        from kvproto_reference.engine.build import torch_runner
        from kvproto_reference.engine.description import TARGET, Layout, cache, hand_over

        loaded = checkpoint.load(folder)
        rope = rope_of(SimpleNamespace(**json.loads((folder / checkpoint.CONFIG_FILE).read_text())))
        facts = {"weights.target": WEIGHTS, "rope.target": rope}
        geometry = lay_out([cache(0, loaded.config, Layout(), self.PAGE)], facts=facts)
        cached = KVPool.allocate(loaded.config, self.PAGES, self.PAGE, memory=shareable)
        self.pool = hand_over(geometry, {TARGET: cached}, 0)
        self.runner = torch_runner(loaded, cached, Shard(geometry.groups[0], 0))
        self.tiers = Tiers(self.pool, names_of(geometry), page=self.PAGE, host=self.PAGES, storage=storage)

    def asked(self, given: list[list[int]]) -> Found:
        """One prompt after the other."""
        return [self._answer(prompt) for prompt in given]

    def _answer(self, prompt: list[int]) -> tuple[list[int], int]:
        from kvproto_reference.engine.runner import Chunk

        chain = self.tiers.chain(prompt[:-1])
        fetch = self.tiers.fetch(chain, float("inf"))
        while not fetch.over(0.0):
            time.sleep(0.002)
        fetch.take()
        lease = self.tiers.open(chain, -(-(len(prompt) + vl.MOST) // self.PAGE))
        assert lease is not None
        self.tiers.step()
        found = rows = lease.pages * self.PAGE
        tokens, given = list[int](), prompt[rows:]
        for _ in range(vl.MOST):
            logits = self.runner.run([Chunk(given, rows, lease.slots)])
            rows += len(given)
            given = [int(logits.best()[0])]
            tokens += given
        chain.extend([prompt[-1], *tokens[:-1]])
        lease.leave(rows)
        self.tiers.drain()
        return tokens, found


class _VLLM:
    """A vLLM that keeps pages in a folder."""

    def __init__(self, name: str, storage: Path, **settings: Any) -> None:
        self.engine = vl.keeping(name, storage, {"weights": WEIGHTS}, **settings)

    def asked(self, given: list[list[int]]) -> Found:
        return vl.asked(self.engine, given)


def right(alone: sg.Alone, given: list[list[int]], found: Found, page: int) -> Iterator[str]:
    """Tokens are those of the model alone; whole pages of so many tokens were found of all prompts, or with 0 none."""
    yield from vl.same([(alone.run(prompt)[0], 0) for prompt in given], found)
    yield from vl.hits(given, found, page) if page else vl.misses(found)


def settle(storage: Path, pages: int) -> Iterator[str]:
    """All pages that an engine has computed are stored, within a minute."""
    until = time.monotonic() + 60
    while (count := _count(storage)) < pages and time.monotonic() < until:
        time.sleep(0.05)
    if count < pages:
        yield f"{count} pages are stored, not {pages}"


def _count(storage: Path) -> int:
    with suppress(OSError):
        return sum(each.is_file() for each in (storage / "m").rglob("*"))
    return 0


def tried(models: Path, model: str, folder: str) -> int:
    """The number of cases that differ."""
    storage, wrong = Path(folder) / f"storage-{model}", 0
    shared, own = sg.settings_of(models, model), dict(MODELS[model])
    own.pop("speculative_config", None)
    path, block = shared["model_path"], own["block_size"]
    told = partial(_told, model)
    sets = [prompts(3, 100, 300, 200 + seed) for seed in range(3)]
    alone, reference = sg.Alone(path), _Reference(Path(path), storage)  # which others know before they look
    first = _SGLang.start("s32", storage, shared | {"page_size": 32, "chunked_prefill_size": 128})
    other = _VLLM("other", storage, model=path, **own, enable_prefix_caching=True)
    engines: list[Any] = [first.engine, other.engine]
    try:
        other.engine.start()
        for engine in engines:
            engine.ready()
        found = first.asked(sets[0])
        pages = sum((len(prompt) + vl.MOST - 1) // 32 for prompt in sets[0])
        title = "SGLang, page 32, finds nothing in an empty folder, and stores what it computes"
        wrong += told(title, [*right(alone, sets[0], found, 0), *settle(storage, pages)])
        found = other.asked(sets[0])
        wrong += told(f"SGLang's pages are found by vLLM, block {block}", right(alone, sets[0], found, 32))
        found = other.asked(sets[1])
        wrong += told(f"vLLM, block {block}, computes what nobody has", right(alone, sets[1], found, 0))
        other.engine.stop()  # all of it is stored now
        found = first.asked(sets[1])
        wrong += told("vLLM's pages are found by SGLang, page 32", right(alone, sets[1], found, 32))
        for title, given, page in (("SGLang's", sets[0], 32), ("vLLM's", sets[1], block)):
            found = reference.asked(given)
            wrong += told(f"{title} pages are found by the reference engine, page 16", right(alone, given, found, page))
        found = reference.asked(sets[2])
        wrong += told("the reference engine, page 16, computes what nobody has", right(alone, sets[2], found, 0))
        found = first.asked(sets[2])
        wrong += told("the reference engine's pages are found by SGLang, page 32", right(alone, sets[2], found, 32))
        first.engine.kill()
        wrong += _fresh(alone, storage, shared, sets, engines, told)
    finally:
        first.engine.kill()
        for engine in engines[2:]:
            engine.kill()
        other.engine.stop()
    return wrong


def _fresh(
    alone: sg.Alone, storage: Path, shared: dict[str, Any], sets: list[list[list[int]]], engines: list[Any], told: Any
) -> int:  # fmt: skip
    """Fresh engines of SGLang over what is stored: as it is, of other weights, and damaged."""
    wrong = 0
    for title, about, page, layout, ranks in (
        ("a fresh SGLang, page 64 in another layout of the host", {}, 64, "page_first_direct", 1),
        ("a fresh SGLang, TP 2", {}, 32, "layer_first", 2),
        ("an SGLang of other weights finds nothing", {"weights": "of another revision"}, 0, "layer_first", 1),
        ("a bit of each object is flipped: none is served", {}, 0, "layer_first", 1),
    ):
        if "flipped" in title:
            vl.flip(storage)
        settings = shared | {"page_size": page or 32, "hicache_mem_layout": layout, "tp_size": ranks}
        engine = _SGLang.start("fresh", storage, settings, about)
        engines.append(engine.engine)
        engine.engine.ready()
        for given in sets[: 3 if page else 1]:
            wrong += told(title, right(alone, given, engine.asked(given), page))
        engine.engine.kill()
    return wrong


def _told(model: str, title: str, found: Any) -> bool:
    return sg.told(f"{model}: {title}", list(found))


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    return sg.run(Path(argv[0]), argv[1:] or ["llama", "mla"], tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
