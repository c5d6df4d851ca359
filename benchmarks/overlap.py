"""Hand-over behind compute: what is left to copy after a prefill's last layer, and what copies cost the prefill.

`python benchmarks/overlap.py [--write]` on a machine with two GPUs that are peers. A decoder of Llama-3-8B's shapes (random
bf16 weights, no rotary embedding) prefills 8,192 tokens on one GPU into pages in no order and hands layers to a sink on the
other once they are enqueued, after the last one's event: as soon as there are 16 MB, or when little is to come; or all of them
after the prefill, which is what the others are compared with. Ways take turns in an order by chance. The tail is from the event of the last layer to the last byte
(device events), and to the sink's node (the host's clock). It may take the last part's bytes at the rate of a hand-over of
the same pages when nothing computes, and 100 us. Every byte is compared.

Prefills are measured in time and in cycles of the GPU: products hold an H200 at its power limit, where its clock moves with
whatever else draws power, and has drawn it in the last seconds. --write keeps raw samples in benchmarks/results/overlap.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cuda.core import LaunchConfig, Program, ProgramOptions, Stream, launch
from facts import facts
from tables import prefills, slower
from torch.nn.attention.bias import causal_lower_right

from kvproto import Pool
from kvproto.catalog.models import describe
from kvproto.events import Connected
from kvproto.net import Dialer, Listener
from kvproto.rank.base import party_of
from kvproto.rank.events import Copied, Received
from kvproto.rank.page_tables import grants_of
from kvproto.sink.node import SinkNode
from kvproto.source.node import SourceNode
from kvproto.source.prefill import Computed, Finished
from kvproto.transport.base import Move
from kvproto.transport.cuda.copier import DeviceCopy
from kvproto.transport.cuda.driver import call, current, driver, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.transport import CudaTransport
from kvproto.wire.enums import DType, Outcome
from kvproto.wire.messages import Ticket

RESULTS = Path(__file__).parent / "results/overlap.json"
CONFIG = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 32, 4096, 32, 8, 128, 14336
PAGE, TOKENS = 64, 8192
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
        bytes_ = torch.from_dlpack(pool.memories[0]).view(torch.uint8)
        self.pages = []
        for layer in range(LAYERS):
            views = []
            for part in pool.layout.group(0).parts:
                _, offset, (n, rows, lanes, width), _ = pool.place(pool.layout.group(0).name, layer, part.name)
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


class Pair:
    """A source and a sink, ready."""

    def __init__(self, pools: Sequence[Pool], way: str) -> None:
        address = f"ipc://{tempfile.mkdtemp(prefix='kvproto-')}/kv"
        options, ratio = WAYS[way]
        self.behind = way not in (AFTER, POKED)
        self.poke = [DeviceMemory(POKE, d) for d in (0, 1)] if way == POKED else []
        self.side = torch.cuda.Stream(0)
        self.mover = Marked(0, **options)
        self.source = SourceNode(
            party_of("prefill", pools[0]), pools[0], Listener(address), {0: address}, verify=False,
            transports=[self.mover], first_part_ratio=ratio,
        )  # fmt: skip
        self.sink = SinkNode(party_of("decode", pools[1]), pools[1], Dialer(), verify=False)
        self.sink.connect(("prefill", 0), address)
        while not any(isinstance(e, Connected) for e in self.sink.turn()):
            self.source.turn()
        self.number = 0

    def ask(self, items: list[int]) -> bytes:
        """The sink asks for the next request."""
        self.number += 1
        ticket = Ticket(key=self.number.to_bytes(16, "little"), engine="prefill", replica=0, deadline=60000)
        self.source.expect(ticket, bytes(32), TOKENS)
        side = self.sink.pool.layout
        grants = grants_of(side, {side.group(0).name: items}, 0, TOKENS)
        self.sink.fetch(self.number, ("prefill", 0), bytes(ticket.key), bytes(32), grants)
        while not self.source.endpoint.asking(bytes(ticket.key)):
            self.source.turn(), self.sink.turn()
        return bytes(ticket.key)

    def close(self) -> None:
        self.source.close("over"), self.sink.close("over")


@torch.inference_mode()
def prefill(model: Model, chunk: int, items: list[int], clock: Clock, pair: Pair, to: list[int]) -> dict[str, float]:
    """Seconds and clock of compute, the tail in two measures, and the bytes of the last part.

    Another prefill runs before it, without a pause: a GPU that has rested is faster for a while, then slower.
    """
    key, tables = pair.ask(to), {0: np.array(items)}
    sent: list[Any] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    events, stream = [], torch.cuda.current_stream(0)  # by name: a sink in this process makes the other GPU current
    torch.cuda.synchronize(0)
    for _ in model.prefill(chunk):
        pass
    clock.read(0)
    begin.record(stream)
    for tokens, layers in model.prefill(chunk):
        if pair.poke:
            pair.side.wait_stream(stream)
            call(
                driver.cuMemcpyDtoDAsync(pair.poke[1].address, pair.poke[0].address, POKE, pair.side.cuda_stream),
                "poke",
            )
        if pair.behind and (tokens, layers) != (TOKENS, LAYERS):
            events.append(torch.cuda.Event())
            events[-1].record(stream)
            pair.source.computed(key, Computed(tables, tokens, (layers - 1, layers), after=events[-1].cuda_event))
            sent += pair.source.turn()
    end.record(stream)
    pair.source.finish(key, Finished({0: np.array(items)}, TOKENS, Outcome.CONTINUE, {}, after=end.cuda_event))
    clock.read(1)
    while not end.query():
        sent += pair.source.turn()
    over = time.perf_counter()
    while not any(isinstance(e, Received) for e in pair.sink.turn()):
        sent += pair.source.turn()
    known = time.perf_counter()
    while not (last := next((e for e in sent if isinstance(e, Copied)), None)):
        sent += pair.source.turn()
    pair.source.turn()
    pair.mover.landed.synchronize()
    return {
        "compute": begin.elapsed_time(end) / 1000,
        "mhz": clock.mhz(),
        "tail": end.elapsed_time(pair.mover.landed) / 1000,
        "told": known - over,
        "left": last.left,
    }


@torch.inference_mode()
def idle_rate(model: Model, pair: Pair, items: list[int], to: list[int]) -> float:
    """Bytes a second of a hand-over of everything when nothing computes, from an event to the last byte."""
    key = pair.ask(to)
    start = torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(0):
        torch.cuda._sleep(20_000_000)  # so that what the host does lies before it
        start.record()
    pair.source.finish(key, Finished({0: np.array(items)}, TOKENS, Outcome.CONTINUE, {}, after=start.cuda_event))
    sent: list[Any] = []
    while not any(isinstance(e, Copied) for e in sent):
        sent += pair.source.turn()
    while not any(isinstance(e, Received) for e in pair.sink.turn()):
        pass
    pair.source.turn()
    return float(
        sum(next(e for e in sent if isinstance(e, Copied)).bytes.values())
        / start.elapsed_time(pair.mover.landed)
        * 1000
    )


def compare(pools: Sequence[Pool], items: list[int], to: list[int]) -> None:
    """Every page is where it must be, and pages that nobody asked for are as they were."""
    a, b = (torch.from_dlpack(p.memories[0]).view(torch.uint8) for p in pools)
    asked = set(to)
    for layer in range(LAYERS):
        for part in pools[0].layout.group(0).parts:
            sides = []
            for pool, seen in zip(pools, (a, b), strict=True):
                _, offset, (n, rows, lanes, width), _ = pool.place(pool.layout.group(0).name, layer, part.name)
                sides.append(seen[offset : offset + n * rows * lanes * width].view(n, -1))
            if not torch.equal(sides[0][items].to(b.device), sides[1][to]):
                raise SystemExit(f"layer {layer}: bytes differ")
            if not (sides[1][[i for i in range(len(sides[1])) if i not in asked]] == 0xEE).all():
                raise SystemExit(f"layer {layer}: a page was written that nobody asked for")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--rounds", type=int, default=16)
    options.add_argument("--out", type=Path, default=RESULTS)
    args = options.parse_args()
    enable_peer(0, 1), enable_peer(1, 0)
    geometry = describe(CONFIG, (), page=PAGE, kv_dtype=DType.BF16)
    pages, dice = TOKENS // PAGE, np.random.default_rng(1)
    pools = [Pool.allocate(geometry, 2 * pages, device=d) for d in (0, 1)]
    items, to = (dice.permutation(2 * pages)[:pages].tolist() for _ in range(2))
    model, clock = Model(pools[0], items), Clock()
    pairs = {way: Pair(pools, way) for way in WAYS}
    found: list[dict[str, Any]] = []
    for chunk, ways in RUNS.items():
        for way in ways:
            print(f"\r{way}, chunks of {chunk} ...   ", end="", file=sys.stderr, flush=True)
            torch.from_dlpack(pools[1].memories[0]).view(torch.uint8).fill_(0xEE)
            torch.cuda.synchronize(1)
            prefill(model, chunk, items, clock, pairs[way], to)
            compare(pools, items, to)
        samples: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for n in range(args.rounds):
            print(f"\rchunks of {chunk}, round {n + 1} of {args.rounds} ...   ", end="", file=sys.stderr, flush=True)
            for k in dice.permutation(len(ways)).tolist():
                samples[ways[k]].append(prefill(model, chunk, items, clock, pairs[ways[k]], to))
        for way in ways:
            rates = [idle_rate(model, pairs[way], items, to) for _ in range(args.rounds)]
            found.append({"way": way, "chunk": chunk, "prefills": samples[way], "rate": rates})
            of, than = prefills(found[-1]), prefills(next(r for r in found if (r["way"], r["chunk"]) == (AFTER, chunk)))
            in_time, in_cycles = slower(of, than)
            print(f"\rchunks of {chunk:,}, {way:36} prefill {of['compute'] * 1e3:.2f} ms at {of['mhz']:.0f} MHz: {in_time:+5.2f} % in time, {in_cycles:+5.2f} % in cycles; "
                  f"last part {of['left'] / 1e6:6.1f} MB at {median(rates) / 1e9:5.1f} GB/s; tail {of['tail'] * 1e6:4.0f} us of {of['allowed'] * 1e6:4.0f} allowed, "
                  f"to the sink's node {of['told'] * 1e6:.0f} us", flush=True)  # fmt: skip
    for pair in pairs.values():
        pair.close()
    if args.write:
        args.out.write_text(json.dumps(facts() | {"runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
