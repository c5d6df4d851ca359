"""Hand-over behind compute: what is left to copy after a prefill's last layer, and what copies cost the prefill.

`python benchmarks/overlap.py [--out]` on a machine with two GPUs that are peers. A decoder of Llama-3-8B's shapes (random
bf16 weights, no rotary embedding) prefills 8,192 tokens on one GPU into pages in no order and hands layers to a sink on the
other once they are enqueued, after the last one's event: as soon as there are 16 MB, or when little is to come; or all of them
after the prefill, which is what the others are compared with. Ways take turns in an order by chance. The tail is from the event of the last layer to the last byte
(device events), and to the sink's node (the host's clock). It may take the last part's bytes at the rate of a hand-over of
the same pages when nothing computes, and 100 us. Every byte is compared.

Prefills are measured in time and in cycles of the GPU: products hold an H200 at its power limit, where its clock moves with
whatever else draws power, and has drawn it in the last seconds. --out keeps all samples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cuda.core import LaunchConfig, Program, ProgramOptions, Stream, launch
from gpu import POISON, bytes_of, gpu_facts, poison
from harness import arguments, keep
from pair import Pair
from tables import prefills, slower
from torch.nn.attention.bias import causal_lower_right

from kvproto import Fetch, Options, Pool, Prompt, Request
from kvproto.events import Event, Sent
from kvproto.transport.base import Move
from kvproto.transport.cuda.copier import DeviceCopy
from kvproto.transport.cuda.driver import call, current, driver, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.transport import CudaTransport
from kvproto.wire.enums import DType
from kvproto_catalog.models import describe

CONFIG = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 32, 4096, 32, 8, 128, 14336
PAGE, TOKENS = 64, 8192
PROMPT = Prompt(range(TOKENS))
AFTER = "after the prefill"
POKE = 4096
POKED = "after the prefill, 4 KB a layer"
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    AFTER: ({}, None),
    POKED: ({}, None),
    "as a node does it": ({}, None),
    "what is left halved": ({}, 1),
    "layer by layer": ({}, 0),
    "layer by layer, all multiprocessors": ({"background": 132}, 0),
    "layer by layer, copy engine": ({"long": 64 << 10}, 0),
}
"""Options of the mover, and how late the first part goes. POKED tells what a link costs that is in use: 4 KB with each layer."""
RUNS = {TOKENS: list(WAYS), 2048: [AFTER, POKED, "as a node does it", "layer by layer"]}
"""Ways by tokens of a chunk."""


class Model:
    """A decoder without its embedding: one layer at a time, keys and values into pages."""

    def __init__(self, pool: Pool, items: Sequence[int]) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda:0") / shape[-1] ** 0.5

        kv = KV_HEADS * HEAD
        self.layers = [
            (random(WIDTH + 2 * kv, WIDTH), random(WIDTH, WIDTH), random(2 * INNER, WIDTH), random(WIDTH, INNER))
            for _ in range(LAYERS)
        ]
        self.prompt = random(TOKENS, WIDTH) * WIDTH**0.5
        bytes_ = bytes_of(pool.memories[0])
        self.pages = []
        for layer in range(LAYERS):
            views = []
            for part in pool.layout.groups[0].parts:
                _, offset, (n, rows, lanes, width), _ = pool.place(pool.layout.groups[0].name, layer, part.name)
                views.append(bytes_[offset : offset + n * rows * lanes * width].view(torch.bfloat16).view(n, rows, kv))
            self.pages.append(views)
        self.items = torch.tensor(items, device="cuda:0")
        self.cache = [
            torch.empty(2, KV_HEADS, TOKENS, HEAD, dtype=torch.bfloat16, device="cuda:0") for _ in range(LAYERS)
        ]

    def prefill(self, chunk: int) -> Iterator[tuple[int, int]]:
        """After each layer of each chunk: tokens and layers of them that are enqueued."""
        for first in range(0, TOKENS, chunk):
            x = self.prompt[first : first + chunk]
            for layer in range(LAYERS):
                x = self.layer(layer, x, first)
                yield first + chunk, layer + 1

    def layer(self, number: int, x: torch.Tensor, first: int) -> torch.Tensor:
        """Positions [first, first + len(x)) of one layer."""
        into, out, up, down = self.layers[number]
        end, kv = first + len(x), KV_HEADS * HEAD
        q, k, v = (F.rms_norm(x, (WIDTH,)) @ into.T).split((WIDTH, kv, kv), dim=-1)
        some = self.items[first // PAGE : end // PAGE]
        for pages, rows in zip(self.pages[number], (k, v), strict=True):
            pages[some] = rows.view(-1, PAGE, kv)
        cache = self.cache[number]
        for held, rows in zip(cache, (k, v), strict=True):
            held[:, first:end] = rows.view(-1, KV_HEADS, HEAD).transpose(0, 1)
        keys, values = (held[None, :, :end].repeat_interleave(HEADS // KV_HEADS, dim=1) for held in cache)
        mask = causal_lower_right(len(x), end)
        seen = F.scaled_dot_product_attention(q.view(1, -1, HEADS, HEAD).transpose(1, 2), keys, values, attn_mask=mask)
        x = x + seen.transpose(1, 2).reshape(-1, WIDTH) @ out.T
        gate, value = (F.rms_norm(x, (WIDTH,)) @ up.T).chunk(2, dim=-1)
        return x + (F.silu(gate) * value) @ down.T


class Clock:
    """The GPU's clock over a span of its work, from its own counters; power limits move it."""

    SOURCE = """extern "C" __global__ void read(unsigned long long *to)
    {
        unsigned sm;
        asm("mov.u32 %0, %%smid;" : "=r"(sm));
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to[2 * sm]));
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(to[2 * sm + 1]));
    }"""

    def __init__(self) -> None:
        device = current(0)
        arch = "".join(map(str, device.compute_capability))
        self._read = Program(self.SOURCE, "c++", ProgramOptions(arch=f"sm_{arch}")).compile("cubin").get_kernel("read")
        self._config = LaunchConfig(grid=device.properties.multiprocessor_count, block=1)
        self._at = torch.zeros(2, 1024, 2, dtype=torch.int64, device="cuda:0")

    def read(self, which: int) -> None:
        """Reads the counters in the order of torch's stream."""
        current(0)
        stream = torch.cuda.current_stream(0)
        launch(Stream.from_handle(stream.cuda_stream), self._config, self._read, self._at[which].data_ptr())

    def mhz(self) -> float:
        """Of the span between the two reads, the median of multiprocessors that did both."""
        torch.cuda.synchronize(0)
        spans = (self._at[1] - self._at[0])[(self._at != 0).all(dim=(0, 2))].double()
        self._at.zero_()
        return float((spans[:, 1] / spans[:, 0]).median()) * 1000


class Marked(CudaTransport):
    """Records an event after each launch."""

    def start(self, moves: Sequence[Move]) -> DeviceCopy:
        copy = super().start(moves)
        self.landed = torch.cuda.Event(enable_timing=True)
        self.landed.record(torch.cuda.ExternalStream(int(self.copier.stream.handle), device="cuda:0"))
        return copy


class Mover:
    """A source and a sink, ready, which hand over in one way."""

    def __init__(self, stack: ExitStack, pools: tuple[Pool, Pool], way: str) -> None:
        options, ratio = WAYS[way]
        self.behind = way not in (AFTER, POKED)
        self.poke = [DeviceMemory(POKE, d) for d in (0, 1)] if way == POKED else []
        self.side = torch.cuda.Stream(0)
        self.transport = Marked(0, **options)
        plain = Options(thread=False, verify=False)
        marked = Options(thread=False, verify=False, transports=[self.transport], first_part_ratio=ratio)
        self.pair = Pair(stack, pools, marked, plain)
        self.source, self.sink = self.pair.source, self.pair.sink
        self.group = pools[0].layout.groups[0].name

    def ask(self, items: list[int]) -> tuple[Request, Fetch]:
        """The sink asks for the next request, and the source has heard it."""
        asked = self.pair.ask(PROMPT, {self.group: items})
        self.pair.settle(0.002)
        return asked

    def end(self, request: Request, fetch: Fetch, events: list[Event]) -> Sent:
        """Step until both sides know that all has arrived; what the source says of it."""
        while not (fetch.done and request.done):
            events += self.source.step()
            self.sink.step()
        sent = next(event for event in events if isinstance(event, Sent) and event.request is request)
        self.transport.landed.synchronize()
        return sent


@torch.inference_mode()
def prefill(model: Model, chunk: int, items: list[int], clock: Clock, mover: Mover, to: list[int]) -> dict[str, float]:
    """Seconds and clock of compute, the tail in two measures, and the bytes of the last part.

    Another prefill runs before it, without a pause: a GPU that has rested is faster for a while, then slower.
    """
    request, fetch = mover.ask(to)
    tables, told = {mover.group: items}, list[Event]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    events, stream = [], torch.cuda.current_stream(0)  # by name: a sink in this process makes the other GPU current
    torch.cuda.synchronize(0)
    for _ in model.prefill(chunk):
        pass
    clock.read(0)
    begin.record(stream)
    for tokens, layers in model.prefill(chunk):
        if mover.poke:
            mover.side.wait_stream(stream)
            there, here = mover.poke[1].address, mover.poke[0].address
            call(driver.cuMemcpyDtoDAsync(there, here, POKE, mover.side.cuda_stream), "poke")
        if mover.behind and (tokens, layers) != (TOKENS, LAYERS):
            events.append(torch.cuda.Event())
            events[-1].record(stream)
            request.computed(tables, tokens, layers=(layers - 1, layers), after=events[-1].cuda_event)
            told += mover.source.step()
    end.record(stream)
    request.finish(tables, after=end.cuda_event)
    clock.read(1)
    while not end.query():
        told += mover.source.step()
    over = time.perf_counter()
    while not fetch.done:
        mover.sink.step()
        told += mover.source.step()
    known = time.perf_counter()
    sent = mover.end(request, fetch, told)
    return {
        "compute": begin.elapsed_time(end) / 1000,
        "mhz": clock.mhz(),
        "tail": end.elapsed_time(mover.transport.landed) / 1000,
        "told": known - over,
        "left": sent.left,
    }


@torch.inference_mode()
def idle_rate(mover: Mover, items: list[int], to: list[int]) -> float:
    """Bytes a second of a hand-over of everything when nothing computes, from an event to the last byte."""
    request, fetch = mover.ask(to)
    start = torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(0):
        torch.cuda._sleep(20_000_000)  # so that what the host does lies before it
        start.record()
    request.finish({mover.group: items}, after=start.cuda_event)
    sent = mover.end(request, fetch, [])
    return float(sum(sent.bytes.values()) / start.elapsed_time(mover.transport.landed) * 1000)


def compare(pools: Sequence[Pool], items: list[int], to: list[int]) -> None:
    """Every page is where it must be, and pages that nobody asked for are as they were."""
    a, b = (bytes_of(p.memories[0]) for p in pools)
    asked = set(to)
    for layer in range(LAYERS):
        for part in pools[0].layout.groups[0].parts:
            sides = []
            for pool, seen in zip(pools, (a, b), strict=True):
                _, offset, (n, rows, lanes, width), _ = pool.place(pool.layout.groups[0].name, layer, part.name)
                sides.append(seen[offset : offset + n * rows * lanes * width].view(n, -1))
            if not torch.equal(sides[0][items].to(b.device), sides[1][to]):
                raise SystemExit(f"layer {layer}: bytes differ")
            if not (sides[1][[i for i in range(len(sides[1])) if i not in asked]] == POISON).all():
                raise SystemExit(f"layer {layer}: a page was written that nobody asked for")


def shown(run: dict[str, Any], base: dict[str, Any]) -> None:
    """Print one way beside the first."""
    of = prefills(run)
    in_time, in_cycles = slower(of, prefills(base))
    compute = f"prefill {of['compute'] * 1e3:.2f} ms at {of['mhz']:.0f} MHz: {in_time:+5.2f} % in time, {in_cycles:+5.2f} % in cycles"
    part = f"last part {of['left'] / 1e6:6.1f} MB at {median(run['rate']) / 1e9:5.1f} GB/s"
    tail = f"tail {of['tail'] * 1e6:4.0f} us of {of['allowed'] * 1e6:4.0f} allowed, to the sink's report {of['told'] * 1e6:.0f} us"
    print(f"\rchunks of {run['chunk']:,}, {run['way']:36} {compute}; {part}; {tail}", flush=True)


def main() -> int:
    args = arguments(__doc__, "overlap", rounds=16).parse_args()
    enable_peer(0, 1), enable_peer(1, 0)
    geometry = describe(CONFIG, (), page=PAGE, kv_dtype=DType.BF16)
    pages, dice = TOKENS // PAGE, np.random.default_rng(1)
    pools = Pool.allocate(geometry, 2 * pages, device=0), Pool.allocate(geometry, 2 * pages, device=1)
    items, to = (dice.permutation(2 * pages)[:pages].tolist() for _ in range(2))
    model, clock = Model(pools[0], items), Clock()
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        movers = {way: Mover(stack, pools, way) for way in WAYS}
        for chunk, ways in RUNS.items():
            for way in ways:
                print(f"\r{way}, chunks of {chunk} ...   ", end="", file=sys.stderr, flush=True)
                poison(pools[1].memories[0])
                prefill(model, chunk, items, clock, movers[way], to)
                compare(pools, items, to)
            samples: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for n in range(args.rounds):
                print(
                    f"\rchunks of {chunk}, round {n + 1} of {args.rounds} ...   ", end="", file=sys.stderr, flush=True
                )
                for k in dice.permutation(len(ways)).tolist():
                    samples[ways[k]].append(prefill(model, chunk, items, clock, movers[ways[k]], to))
            for way in ways:
                rates = [idle_rate(movers[way], items, to) for _ in range(args.rounds)]
                runs.append({"way": way, "chunk": chunk, "prefills": samples[way], "rate": rates})
                shown(runs[-1], next(run for run in runs if (run["way"], run["chunk"]) == (AFTER, chunk)))
    keep(args.out, gpu_facts() | {"runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
