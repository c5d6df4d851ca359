"""Pages of a GPU's pool on the host and back: rates beside the copy engine's, a load-back behind compute, first tokens.

`python benchmarks/tiers_gpu.py [--out] [--tokens N]` on a machine with a GPU. 32,768 tokens in scattered pages of 64, of MLA
(61 layers, rows of 1,152 bytes, a draft of one layer) and of GQA (32 layers, runs of 64 KB, a draft of one layer): every byte is
compared before anything is timed, and medians of rounds are taken in which all contenders run in turn. --out keeps all samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from gpu import POISON, gpu_facts
from harness import arguments, in_turn, keep
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from kvproto import Cache, Pool, lay_out
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_layout import page_layout
from kvproto.transport.cuda import pager as pagers
from kvproto.transport.cuda.copier import _Kernels
from kvproto.transport.cuda.driver import call
from kvproto.transport.cuda.kernel import LONG
from kvproto.transport.cuda.pager import CudaPager

PAGE = 64
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
        self.seen.fill_(POISON)
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
    ways: dict[str, Callable[[], Any]], rounds: int, before: Callable[[str], Any] = lambda name: None
) -> dict[str, list[float]]:
    """Seconds of each contender, in turn in each round but the first; `before` is called with its name, untimed."""

    def run(name: str) -> float:
        before(name)
        return seconds(ways[name])

    return in_turn({name: lambda name=name: run(name) for name in ways}, rounds)


def one_form(label: str, side: Side, rounds: int) -> dict[str, list[float]]:
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
    return {key: [side.bytes / took / 1e9 for took in some] for key, some in timed(each, rounds).items()}


def rates(name: str, pages: int, rounds: int) -> dict[str, Any]:
    """GB/s of each direction, as it is and for numbers of thread blocks, and of one plain copy."""
    figures: dict[str, list[float]] = {}
    forms = {"as it is": (pagers._BLOCKS, pagers._LONG)}
    forms |= {f"kernel of {blocks} blocks": (blocks, LONG) for blocks in (2, 4, 8, 16, 32)}
    for label, (blocks, long) in forms.items():
        side = Side(CACHES[name], pages, blocks, long)
        figures |= one_form(label, side, rounds)
        side.close()
    middle = {key: median(some) for key, some in figures.items()}
    ratio = {key: round(rate / middle[f"{key}: one plain copy"], 3) for key, rate in middle.items() if ":" not in key}
    return {
        "gb": round(size_of(CACHES[name], pages) / 1e9, 2), "of_copy_engine": ratio, "gb_s": {k: round(v, 1) for k, v in middle.items()},
        "samples": {key: [round(x, 2) for x in some] for key, some in figures.items()},
    }  # fmt: skip


def size_of(caches: list[Cache], pages: int) -> int:
    return pages * sum(page_layout(lay_out(caches), 0, PAGE).lengths.values())


class Counted:
    """Kernels that copiers launch meanwhile."""

    def __enter__(self) -> list[int]:
        self._launch, count = _Kernels._launch, [0]

        def launch(kernels: _Kernels, *args: Any) -> None:
            count[0] += 1
            self._launch(kernels, *args)

        _Kernels._launch = launch  # type: ignore[method-assign]
        return count

    def __exit__(self, *_: object) -> None:
        _Kernels._launch = self._launch  # type: ignore[method-assign]


def launches(pages: int) -> dict[str, int]:
    """Kernels of one save of 1 to 4 components."""
    figures = {}
    for count in range(1, 5):
        caches = [Cache.mla(f"g{i}", 2, latent=512, rope=64, page=PAGE, model=i) for i in range(count)]
        side = Side(caches, pages, 8)
        side.check()
        with Counted() as kernels:
            side.copies.to_host(side.near, side.far).wait()
        figures[f"{count} components"] = kernels[0]
        side.close()
    return figures


def compared(
    side: Side, ways: dict[str, Callable[[], Any]], rounds: int, right: torch.Tensor, kept: tuple[str, ...]
) -> dict[str, list[float]]:
    """Milliseconds of each way. What a way returns must be `right`; before all but `kept` ways the pool is emptied."""
    outputs: list[torch.Tensor] = []

    def run(name: str) -> None:
        if (output := ways[name]()) is not None:
            outputs.append(output)

    def before(name: str) -> None:
        assert all(torch.equal(output, right) for output in outputs), "computed from rows that were not there yet"
        outputs.clear()
        if name not in kept:
            side.seen.fill_(0)

    took = timed({name: lambda name=name: run(name) for name in ways}, rounds, before)
    before(kept[0])
    return {name: [round(1e3 * seconds_, 3) for seconds_ in of] for name, of in took.items()}


class LatentLayers:
    """61 MLA layers of 16 heads (a rank of TP 8), random weights: a prefill of `more` tokens behind the pool's pages."""

    def __init__(self, side: Side, pages: int, more: int) -> None:
        self.heads, self.width, self.rank, self.more = 16, 7168, 512, more
        make = torch.Generator(device="cuda").manual_seed(1)
        side.seen.view(BF16).normal_(generator=make)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=BF16, generator=make) * scale

        self.x = random(more, self.width, scale=0.02)
        self.wq = random(self.width, self.heads * 192, scale=0.01)
        self.wkv = random(self.rank, self.heads * 256, scale=0.02)
        self.wo = random(self.heads * 128, self.width, scale=0.01)
        self.up, self.down = random(self.width, 2304, scale=0.01), random(2304, self.width, scale=0.01)
        self.new = random(more, 576, scale=1)
        self.side, self.near = side, torch.tensor(side.near, device="cuda")
        self.mask = causal_lower_right(more, pages * PAGE + more)

    def layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        _, offset, shape, strides = self.side.pool.place("target", i, "latent")
        paged = self.side.seen.as_strided(shape, strides, offset).view(BF16)
        rows = torch.cat([paged[self.near].reshape(-1, 576), self.new])
        kv = (rows[:, : self.rank] @ self.wkv).view(-1, self.heads, 256)
        k = torch.cat([kv[..., :128], rows[:, None, self.rank :].expand(-1, self.heads, -1)], -1)
        v = functional.pad(kv[..., 128:], (0, 64))
        q = (x @ self.wq).view(-1, self.heads, 192)
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads, attn_mask=self.mask)
        x = x + out[0].transpose(0, 1)[..., :128].reshape(self.more, -1) @ self.wo
        return x + functional.silu(x @ self.up) @ self.down

    def prefill(self, paging: Any = None) -> torch.Tensor:
        """All layers, each after its pages if they are coming."""
        x = self.x
        for i in range(61):
            if paging is not None:
                paging.hold(i)
            x = self.layer(i, x)
        return x


def hidden(pages: int, rounds: int, more: int = 4096) -> dict[str, Any]:
    """A prefill of `more` tokens behind a prefix that comes from the host."""
    side = Side(CACHES["mla"], pages, pagers._BLOCKS)
    side.check()
    model = LatentLayers(side, pages, more)
    side.copies.to_host(side.near, side.far).wait()
    right, started = model.prefill(), list[float]()

    def load() -> Any:
        begun = time.perf_counter()
        paging = side.copies.to_pool(side.far, side.near)
        started.append(1e3 * (time.perf_counter() - begun))
        return paging

    def one_after_the_other() -> torch.Tensor:
        load().hold()
        return model.prefill()

    ways = {
        "load alone": lambda: load().wait(),
        "compute alone": model.prefill,
        "both": lambda: model.prefill(load()),
        "one after the other": one_after_the_other,
    }
    samples = compared(side, ways, rounds, right, ("compute alone",))
    side.close()
    medians = {name: round(median(ms), 2) for name, ms in samples.items()}
    return {
        "prefix_tokens": pages * PAGE,
        "new_tokens": more,
        "gb": round(side.bytes / 1e9, 2),
        "ms": medians,
        "not_hidden_ms": round(medians["both"] - medians["compute alone"], 2),
        "last_layer_ms": round(medians["load alone"] / 61, 2),
        "host_starts_ms": round(median(started), 2),
        "samples": samples,
    }


class Llama:
    """Llama-3-8B's shapes, random weights, over the pool's pages; `tokens` of a prompt fill them, and `rest` follow."""

    def __init__(self, side: Side, pages: int, rest: int) -> None:
        self.layers, self.width, self.heads, self.kv, self.dim, inner, words = 32, 4096, 32, 8, 128, 14336, 128256
        self.tokens, self.rest = pages * PAGE, rest
        make = torch.Generator(device="cuda").manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=BF16, generator=make) * 0.02

        qkv, out = (self.width, (self.heads + 2 * self.kv) * self.dim), (self.heads * self.dim, self.width)
        shapes = qkv, out, (self.width, 2 * inner), (inner, self.width)
        self.weights = [[weight(*shape) for shape in shapes] for _ in range(self.layers)]
        self.table, self.head = weight(words, self.width), weight(self.width, words)
        self.ids = torch.randint(words, (self.tokens + rest,), device="cuda", generator=make)
        slots = [*side.near, pages, pages + 1]
        self.items = torch.tensor([2 * slot + half for slot in slots for half in (0, 1)], device="cuda")
        self.views = [[self.view(side, i, part) for part in ("k", "v")] for i in range(self.layers)]
        rates = 1 / 500000 ** (torch.arange(0, self.dim, 2, device="cuda") / self.dim)
        angle = torch.outer(torch.arange(self.tokens + rest, device="cuda"), rates)
        self.turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    @staticmethod
    def view(side: Side, layer: int, part: str) -> torch.Tensor:
        _, offset, shape, strides = side.pool.place("target", layer, part)
        return side.seen.as_strided(shape, strides, offset).view(BF16)

    def rope(self, x: torch.Tensor, at: slice) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turn[at]).flatten(-2).to(BF16)

    def run(self, first: int, last: int, paging: Any = None) -> torch.Tensor:
        """Logits after tokens [first, last); each layer waits for its pages if they are coming."""
        at, heads, kv, dim = slice(first, last), self.heads, self.kv, self.dim
        x = self.table[self.ids[at]]
        mask = causal_lower_right(last - first, last)
        for i, (qkv, out, up, down) in enumerate(self.weights):
            if paging is not None:
                paging.hold(i)
            norm = functional.rms_norm(x, (self.width,))
            q, k, v = (norm @ qkv).view(-1, heads + 2 * kv, dim).split((heads, kv, kv), 1)
            q, k = self.rope(q, at), self.rope(k, at)
            for view, new in zip(self.views[i], (k, v), strict=True):
                view[self.items[first // 32 : -(-last // 32)]] = new.reshape(-1, 32, kv, dim)
            keys, values = (view[self.items[: -(-last // 32)]].reshape(-1, kv, dim) for view in self.views[i])
            sides = (t.transpose(0, 1)[None] for t in (q, keys, values))
            seen = functional.scaled_dot_product_attention(*sides, attn_mask=mask, enable_gqa=True)
            x = x + seen[0].transpose(0, 1).reshape(-1, heads * dim) @ out
            gate, value = (functional.rms_norm(x, (self.width,)) @ up).chunk(2, -1)
            x = x + (functional.silu(gate) * value) @ down
        return functional.rms_norm(x[-1:], (self.width,)) @ self.head

    def last(self, paging: Any = None) -> torch.Tensor:
        """The logits after the tokens that follow the pages."""
        return self.run(self.tokens, self.tokens + self.rest, paging)

    def whole(self, chunk: int = 4096) -> torch.Tensor:
        for first in range(0, self.tokens, chunk):
            self.run(first, min(first + chunk, self.tokens))
        return self.last()


def first_token(pages: int, rounds: int) -> dict[str, Any]:
    """A prompt whose prefix is on the host, beside computing all of it."""
    side = Side(CACHES["gqa"], pages, pagers._BLOCKS, spare=2)
    model = Llama(side, pages, 64)
    right = model.whole()
    side.copies.to_host(side.near, side.far).wait()
    ways: dict[str, Callable[[], Any]] = {
        "computed": model.whole,
        "from the host": lambda: model.last(side.copies.to_pool(side.far, side.near)),
        "on the device": model.last,
    }
    samples = compared(side, ways, rounds, right, ("computed", "on the device"))
    side.close()
    medians = {name: round(median(ms), 1) for name, ms in samples.items()}
    return {
        "tokens": model.tokens,
        "last": model.rest,
        "gb": round(side.bytes / 1e9, 2),
        "ms": medians,
        "fraction": round(medians["from the host"] / medians["computed"], 4),
        "samples": samples,
    }


def parts(pages: int, rounds: int) -> dict[str, Callable[[], Any]]:
    return {
        "hidden": lambda: hidden(pages, rounds),
        "first_token": lambda: first_token(pages, rounds),
        "launches": lambda: launches(pages),
        "mla": lambda: rates("mla", pages, rounds),
        "gqa": lambda: rates("gqa", pages, rounds),
    }


def main() -> None:
    parser = arguments(__doc__, "tiers_gpu", rounds=7)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    call(driver.cuInit(0), "driver")
    figures: dict[str, Any] = gpu_facts() | {"page": PAGE}
    with torch.inference_mode():
        for name, work in parts(args.tokens // PAGE, args.rounds).items():
            if args.only in ("", name):
                start = time.monotonic()
                figures[name] = work()
                torch.cuda.empty_cache()
                shown = {k: v for k, v in figures[name].items() if k != "samples"}
                print(f"{name} ({time.monotonic() - start:.0f} s): {json.dumps(shown, indent=1)}", flush=True)
    keep(args.out, figures)


if __name__ == "__main__":
    main()
