"""Pages of a GPU's pool on the host and back: rates beside the copy engine's, a load-back behind compute, first tokens.

`python benchmarks/tiers_gpu.py [--write] [--tokens N]` on a machine with a GPU. 32,768 tokens in scattered pages of 64, of MLA
(61 layers, rows of 1,152 bytes, a draft of one layer) and of GQA (32 layers, runs of 64 KB, a draft of one layer): every byte is
compared before anything is timed, and medians of rounds are taken in which all contenders run in turn. --write keeps raw samples
in benchmarks/results/tiers_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from facts import facts
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from kvproto import Cache, Pool, lay_out
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_layout import page_layout
from kvproto.transport.cuda import pager as pagers
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import call
from kvproto.transport.cuda.kernel import LONG
from kvproto.transport.cuda.pager import CudaPager

RESULTS = Path(__file__).parent / "results/tiers_gpu.json"
PAGE = 64
ROUNDS = 7
CACHES: dict[str, list[Cache]] = {
    "mla": [Cache.mla("target", 61, latent=512, rope=64, page=PAGE), Cache.mla("draft", 1, latent=512, rope=64, page=PAGE, model=1)],
    "gqa": [
        Cache.gqa("target", 32, kv_heads=8, head_dim=128, page=32),
        Cache.gqa("draft", 1, kv_heads=8, head_dim=128, page=32, model=1),
    ],
}  # fmt: skip
BF16 = torch.bfloat16


class Side:
    """A pool of one model and its draft, and memory of the host for as many pages."""

    def __init__(self, caches: list[Cache], pages: int, blocks: int, long: int = pagers._LONG, spare: int = 0) -> None:
        self.geometry = lay_out(caches)
        rows = {group.name: group.rows for group in self.geometry.groups}
        self.pool = Pool.allocate(
            self.geometry, {name: (pages + spare) * PAGE // each for name, each in rows.items()}, device=0
        )
        layout = page_layout(self.geometry, 0, PAGE)
        self.pager = CudaPager(0, torch.cuda.current_stream().cuda_stream, blocks, long)
        self.copies = HostCopies(layout, self.pool.layout, self.pool.memories, pages, self.pager)
        self.bytes = pages * sum(part.length for part in layout.components)
        rng = np.random.default_rng(1)
        self.near, self.far = (rng.permutation(pages).tolist() for _ in range(2))

    @property
    def seen(self) -> torch.Tensor:
        return torch.from_dlpack(self.pool.memories[0]).view(torch.uint8)

    def check(self) -> None:
        """Bytes that go to the host and come back, into a pool that had others, are what they were."""
        right = self.seen.view(torch.int64).random_().clone()
        self.copies.to_host(self.near, self.far).wait()
        self.seen.fill_(0xEE)
        self.copies.to_pool(self.far, self.near).wait()
        torch.cuda.synchronize()
        assert torch.equal(self.seen.view(torch.int64), right), "bytes differ"

    def close(self) -> None:
        self.pager.close()
        self.pool.close()


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(
    each: dict[str, Callable[[], Any]], rounds: int, before: Callable[[str], Any] = lambda key: None
) -> dict[str, list[float]]:
    """Seconds of each contender, in turn in each round but the first."""
    found: dict[str, list[float]] = {key: [] for key in each}
    for n in range(rounds + 1):
        for key, work in each.items():
            before(key)
            took = seconds(work)
            if n:
                found[key].append(took)
    return found


def one_form(label: str, side: Side) -> dict[str, list[float]]:
    """GB/s both ways, beside one plain copy of as many bytes into the same kind of memory, and into that of torch."""
    side.check()
    whole = side.seen[: side.bytes]
    host = torch.from_dlpack(side.pager.allocate(side.bytes))
    each: dict[str, Callable[[], Any]] = {
        f"save, {label}": lambda: side.copies.to_host(side.near, side.far).wait(),
        f"load, {label}": lambda: side.copies.to_pool(side.far, side.near).wait(),
        f"save, {label}: one plain copy": lambda: host.copy_(whole, non_blocking=True),
        f"load, {label}: one plain copy": lambda: whole.copy_(host, non_blocking=True),
    }
    if label == "as it is":
        aside = torch.empty(side.bytes, dtype=torch.uint8, pin_memory=True)
        each["save, pinned by torch: one plain copy"] = lambda: aside.copy_(whole, non_blocking=True)
        each["load, pinned by torch: one plain copy"] = lambda: whole.copy_(aside, non_blocking=True)
    return {key: [side.bytes / took / 1e9 for took in some] for key, some in timed(each, ROUNDS).items()}


def rates(name: str, pages: int) -> dict[str, Any]:
    """GB/s of each direction, as it is and for numbers of thread blocks, and of one plain copy."""
    found: dict[str, list[float]] = {}
    forms = {"as it is": (pagers._BLOCKS, pagers._LONG)}
    forms |= {f"kernel of {blocks} blocks": (blocks, LONG) for blocks in (2, 4, 8, 16, 32)}
    for label, (blocks, long) in forms.items():
        side = Side(CACHES[name], pages, blocks, long)
        found |= one_form(label, side)
        side.close()
    middle = {key: median(some) for key, some in found.items()}
    ratio = {key: round(rate / middle[f"{key}: one plain copy"], 3) for key, rate in middle.items() if ":" not in key}
    return {
        "gb": round(size_of(CACHES[name], pages) / 1e9, 2), "of_copy_engine": ratio, "gb_s": {k: round(v, 1) for k, v in middle.items()},
        "samples": {key: [round(x, 2) for x in some] for key, some in found.items()},
    }  # fmt: skip


def size_of(caches: list[Cache], pages: int) -> int:
    return pages * sum(page_layout(lay_out(caches), 0, PAGE).lengths.values())


class Counted:
    """Kernels that copiers launch meanwhile."""

    def __enter__(self) -> list[int]:
        self._run, count = Copier._run, [0]

        def run(copier: Copier, *args: Any, **named: Any) -> None:
            count[0] += 1
            self._run(copier, *args, **named)

        Copier._run = run  # type: ignore[method-assign]
        return count

    def __exit__(self, *_: object) -> None:
        Copier._run = self._run  # type: ignore[method-assign]


def launches(pages: int) -> dict[str, int]:
    """Kernels of one save of 1 to 4 components."""
    found = {}
    for count in range(1, 5):
        caches = [Cache.mla(f"g{i}", 2, latent=512, rope=64, page=PAGE, model=i) for i in range(count)]
        side = Side(caches, pages, 8)
        side.check()
        with Counted() as kernels:
            side.copies.to_host(side.near, side.far).wait()
        found[f"{count} components"] = kernels[0]
        side.close()
    return found


def hidden(pages: int, more: int = 4096) -> dict[str, Any]:
    """61 MLA layers of 16 heads (a rank of TP 8): prefill of `more` tokens behind a prefix that comes from the host."""
    heads, width, rank = 16, 7168, 512
    side = Side(CACHES["mla"], pages, pagers._BLOCKS)
    side.check()
    make = torch.Generator(device="cuda").manual_seed(1)
    side.seen.view(BF16).normal_(generator=make)
    side.copies.to_host(side.near, side.far).wait()
    x0 = torch.randn(more, width, device="cuda", dtype=BF16, generator=make) * 0.02
    wq = torch.randn(width, heads * 192, device="cuda", dtype=BF16, generator=make) * 0.01
    wkv = torch.randn(rank, heads * 256, device="cuda", dtype=BF16, generator=make) * 0.02
    wo = torch.randn(heads * 128, width, device="cuda", dtype=BF16, generator=make) * 0.01
    up, down = (
        torch.randn(*s, device="cuda", dtype=BF16, generator=make) * 0.01 for s in ((width, 2304), (2304, width))
    )
    seen = side.seen
    near = torch.tensor(side.near, device="cuda")
    new = torch.randn(more, 576, device="cuda", dtype=BF16, generator=make)
    mask = causal_lower_right(more, pages * PAGE + more)

    def layer(i: int, x: torch.Tensor) -> torch.Tensor:
        _, offset, shape, strides = side.pool.place("target", i, "latent")
        paged = seen.as_strided(shape, strides, offset).view(BF16)
        rows = torch.cat([paged[near].reshape(-1, 576), new])
        kv = (rows[:, :rank] @ wkv).view(-1, heads, 256)
        k = torch.cat([kv[..., :128], rows[:, None, rank:].expand(-1, heads, -1)], -1)
        v = functional.pad(kv[..., 128:], (0, 64))
        q = (x @ wq).view(-1, heads, 192)
        out = functional.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask)
        x = x + out[0].transpose(0, 1)[..., :128].reshape(more, -1) @ wo
        return x + functional.silu(x @ up) @ down

    def prefill(paging: Any = None) -> torch.Tensor:
        x = x0
        for i in range(61):
            if paging is not None:
                paging.hold(i)
            x = layer(i, x)
        return x

    right = prefill()
    started: list[float] = []

    def load() -> Any:
        begun = time.perf_counter()
        paging = side.copies.to_pool(side.far, side.near)
        started.append(1e3 * (time.perf_counter() - begun))
        return paging

    got: list[torch.Tensor] = []
    each: dict[str, Callable[[], Any]] = {
        "load alone": lambda: load().wait(),
        "compute alone": lambda: got.append(prefill()),
        "both": lambda: got.append(prefill(load())),
        "one after the other": lambda: (load().hold(), got.append(prefill())),
    }

    def before(key: str) -> None:
        assert all(torch.equal(some, right) for some in got), "a layer was computed before its rows were there"
        got.clear()
        if key != "compute alone":
            side.seen.fill_(0)

    found = timed(each, ROUNDS, before)
    before("compute alone")
    samples = {key: [round(1e3 * took, 3) for took in some] for key, some in found.items()}
    side.close()
    medians = {key: round(median(some), 2) for key, some in samples.items()}
    return {
        "prefix_tokens": pages * PAGE, "new_tokens": more, "gb": round(side.bytes / 1e9, 2), "ms": medians,
        "not_hidden_ms": round(medians["both"] - medians["compute alone"], 2),
        "last_layer_ms": round(medians["load alone"] / 61, 2), "host_starts_ms": round(median(started), 2), "samples": samples,
    }  # fmt: skip


def first_token(pages: int) -> dict[str, Any]:
    """Llama-3-8B's shapes, random weights: a prompt whose prefix is on the host, beside computing all of it."""
    layers, width, heads, kv, dim, inner, vocabulary = 32, 4096, 32, 8, 128, 14336, 128256
    tokens, chunk, rest = pages * PAGE, 4096, 64
    side = Side(CACHES["gqa"], pages, pagers._BLOCKS, spare=2)
    make = torch.Generator(device="cuda").manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF16, generator=make) * 0.02

    model = [
        (
            weight(width, (heads + 2 * kv) * dim),
            weight(heads * dim, width),
            weight(width, 2 * inner),
            weight(inner, width),
        )
        for _ in range(layers)
    ]
    table, head = weight(vocabulary, width), weight(width, vocabulary)
    ids = torch.randint(vocabulary, (tokens + rest,), device="cuda", generator=make)
    slots = [*side.near, pages, pages + 1]
    items = torch.tensor([2 * s + half for s in slots for half in (0, 1)], device="cuda")
    seen = side.seen
    views = []
    for i in range(layers):
        pair = []
        for part in ("k", "v"):
            _, offset, shape, strides = side.pool.place("target", i, part)
            pair.append(seen.as_strided(shape, strides, offset).view(BF16))
        views.append(pair)
    angle = torch.outer(
        torch.arange(tokens + rest, device="cuda"), 1 / 500000 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rope(x: torch.Tensor, at: slice) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[at]).flatten(-2).to(BF16)

    def run(first: int, last: int, paging: Any = None) -> torch.Tensor:
        at = slice(first, last)
        x = table[ids[at]]
        mask = causal_lower_right(last - first, last)
        for i, (qkv, out, up, down) in enumerate(model):
            if paging is not None:
                paging.hold(i)
            norm = functional.rms_norm(x, (width,))
            q, k, v = (norm @ qkv).view(-1, heads + 2 * kv, dim).split((heads, kv, kv), 1)
            q, k = rope(q, at), rope(k, at)
            for view, new in zip(views[i], (k, v), strict=True):
                view[items[first // 32 : -(-last // 32)]] = new.reshape(-1, 32, kv, dim)
            keys, values = (view[items[: -(-last // 32)]].reshape(-1, kv, dim) for view in views[i])
            got = functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (q, keys, values)), attn_mask=mask, enable_gqa=True
            )
            x = x + got[0].transpose(0, 1).reshape(-1, heads * dim) @ out
            gate, value = (functional.rms_norm(x, (width,)) @ up).chunk(2, -1)
            x = x + (functional.silu(gate) * value) @ down
        return functional.rms_norm(x[-1:], (width,)) @ head

    def all_() -> torch.Tensor:
        for first in range(0, tokens, chunk):
            run(first, min(first + chunk, tokens))
        return run(tokens, tokens + rest)

    right = all_()
    side.copies.to_host(side.near, side.far).wait()
    got: list[torch.Tensor] = []
    each: dict[str, Callable[[], Any]] = {
        "computed": lambda: got.append(all_()),
        "from the host": lambda: got.append(run(tokens, tokens + rest, side.copies.to_pool(side.far, side.near))),
        "on the device": lambda: got.append(run(tokens, tokens + rest)),
    }

    def before(key: str) -> None:
        assert all(torch.equal(some, right) for some in got), "other logits"
        got.clear()
        if key == "from the host":
            side.seen.fill_(0)

    found = timed(each, 5, before)
    before("computed")
    samples = {key: [round(1e3 * took, 3) for took in some] for key, some in found.items()}
    side.close()
    medians = {key: round(median(some), 1) for key, some in samples.items()}
    return {
        "tokens": tokens, "last": rest, "gb": round(side.bytes / 1e9, 2), "ms": medians,
        "fraction": round(medians["from the host"] / medians["computed"], 4), "samples": samples,
    }  # fmt: skip


def parts(pages: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "hidden", lambda: hidden(pages)
    yield "first_token", lambda: first_token(pages)
    yield "launches", lambda: launches(pages)
    yield "mla", lambda: rates("mla", pages)
    yield "gqa", lambda: rates("gqa", pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    call(driver.cuInit(0), "driver")
    found: dict[str, Any] = {**facts(), "page": PAGE}
    with torch.inference_mode():
        for name, work in parts(asked.tokens // PAGE):
            if asked.only in ("", name):
                start = time.monotonic()
                found[name] = work()
                torch.cuda.empty_cache()
                shown = {k: v for k, v in found[name].items() if k != "samples"}
                print(f"{name} ({time.monotonic() - start:.0f} s): {json.dumps(shown, indent=1)}", flush=True)
                if asked.write:
                    asked.write.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
