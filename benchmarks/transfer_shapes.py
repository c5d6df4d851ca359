"""Hand-overs of real shapes between two GPUs: time and share of the ceiling; latency; the share of a GPU that copies take.

`python benchmarks/transfer_shapes.py [--write]` on a machine with two GPUs that are peers. Programs come from `plan` and
`lower` over described engines, for one rank pair's share; pages are in no order. The ceiling is one peer copy of 1 GB in the
same round. Latency is from `submit` (or from the engine's `finish`) until the reader knows. --write keeps raw samples in
benchmarks/results/transfer_shapes.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, EventOptions
from facts import facts

from kvproto.catalog.models import PRESETS, Parallel, describe
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.rank.rank_pool import pack
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier, CopyJob
from kvproto.transport.cuda.driver import call, current, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory

RESULTS = Path(__file__).parent / "results/transfer_shapes.json"
TOKENS = (1024, 8192, 32768, 131072)
ROUNDS, WARM_UP = 21, 1.0
GB = 1 << 30


def cases() -> dict[str, tuple[Geometry, Geometry, bool]]:
    """Source, sink, and whether the sink is HND."""

    def engine(preset: str, page: int = 64, **sizes: int) -> Geometry:
        configs = PRESETS[preset]
        return describe(configs[0], configs[1:], Parallel(**sizes), page)

    llama, deepseek = "llama-3-70b", "deepseek-v3-eagle3"
    return {
        "Llama-3-70B TP 8 to 4, NHD to HND": (engine(llama, tp=8), engine(llama, tp=4), True),
        "Llama-3-70B TP 4 to 8, NHD to HND": (engine(llama, tp=4), engine(llama, tp=8), True),
        "DeepSeek-V3 + EAGLE3 draft, TP 8 to 4": (engine(deepseek, tp=8), engine(deepseek, tp=4), False),
        "DeepSeek-V3, page 64 to DCP 4, interleave 1": (
            engine("deepseek-v3", tp=4),
            engine("deepseek-v3", tp=4, dcp=4, page=16),
            False,
        ),
    }


def half(
    geometry: Geometry, rank: int, tokens: int, heads_first: bool, device: int
) -> tuple[RankLayout, dict[int, Window], DeviceMemory]:
    """One rank's pool, twice as large as the request, and the request's items in no order."""
    groups, dice = {g.id: g for g in geometry.groups}, np.random.default_rng(rank)
    windows, counts = {}, {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        need = items_needed(groups[share.group], share.cp_rank, 0, tokens)
        counts[share.group] = 2 * need
        windows[share.group] = Window(0, tokens, dice.permutation(2 * need)[:need])
    columns, length = pack(geometry, rank, counts, heads_first)
    return RankLayout(geometry, rank, columns), windows, DeviceMemory(length, device)


class Ceiling:
    def __init__(self) -> None:
        self.memory = [DeviceMemory(GB, d) for d in (0, 1)]
        current(1)
        self.stream = Device(1).create_stream()

    def rate(self) -> float:
        """Bytes a second of one peer copy."""
        current(1)
        timing = EventOptions(timing_enabled=True)
        began = self.stream.record(options=timing)
        call(driver.cuMemcpyDtoDAsync(self.memory[1].address, self.memory[0].address, GB, self.stream.handle), "copy")
        ended = self.stream.record(options=timing)
        ended.sync()
        return GB / float(ended - began) * 1000


def shapes(ceiling: Ceiling, rounds: int) -> list[dict[str, Any]]:
    copier = Copier(1, timed=True)
    found = []
    for name, (source, sink, heads_first) in cases().items():
        made = plan(source, sink)
        a, b = max(((r.source, r.sink) for r in made.routes), key=lambda p: len(made.between(*p)))
        for tokens in TOKENS:
            here, from_, mine = half(source, a, tokens, False, 0)
            there, to, theirs = half(sink, b, tokens, heads_first, 1)
            torch.from_dlpack(mine).view(torch.uint8).random_(256)
            torch.from_dlpack(theirs).view(torch.uint8).fill_(0xEE)
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            began = time.perf_counter()
            program = Pair(made.between(a, b), here, there).lower(from_, to)
            lowering = time.perf_counter() - began
            prepared = copier.prepare(program, {0: mine.address}, {0: theirs.address})
            copier.submit([CopyJob(prepared, program.maps)]).wait()
            if copier.checksums(program, {0: theirs.address}, sink=True) != Copier(0).checksums(
                program, {0: mine.address}, sink=False
            ):
                raise SystemExit(f"{name}: checksums differ")
            until = time.perf_counter() + WARM_UP
            while time.perf_counter() < until:
                copier.submit([CopyJob(prepared, program.maps)]).wait()
            samples, walls, ceilings = [], [], []
            for _ in range(rounds):
                ceilings.append(ceiling.rate())
                began = time.perf_counter()
                copy = copier.submit([CopyJob(prepared, program.maps)])
                while not copy.done:
                    pass
                walls.append(time.perf_counter() - began)
                samples.append(copy.seconds)
            runs = program.runs()
            found.append({"shape": name, "tokens": tokens, "pair": [a, b], "bytes": program.bytes, "runs": runs.count, "mean_run": runs.mean, "lowering": lowering,
                          "seconds": samples, "submit_to_done": walls, "ceiling": ceilings})  # fmt: skip
            rate = program.bytes / median(samples)
            print(f"{name:46}{tokens:8,} tokens {program.bytes / 1e6:9.1f} MB {runs.mean:9.0f} B/run {median(samples) * 1e6:9.0f} us {rate / 1e9:6.1f} GB/s "
                  f"{rate / median(ceilings):6.3f} of the ceiling; submit to done +{(median(walls) - median(samples)) * 1e6:5.0f} us", flush=True)  # fmt: skip
            mine.close(), theirs.close()
    return found


def mla_request() -> tuple[Copier, CopyJob]:
    """1 page of 64 tokens, 61 layers of MLA."""
    copier = Copier(1)
    made = plan(geometry := describe(PRESETS["deepseek-v3"][0]), geometry)
    (here, from_, mine), (there, to, theirs) = (half(geometry, 0, 64, False, d) for d in (0, 1))
    program = Pair(made.routes, here, there).lower(from_, to)
    job = CopyJob(copier.prepare(program, {0: mine.address}, {0: theirs.address}), program.maps)
    KEEP.append((mine, theirs))
    return copier, job


KEEP: list[Any] = []


def latency() -> dict[str, list[float]]:
    """Seconds from submit until the reader knows."""
    copier, job = mla_request()

    def once() -> float:
        fresh = attrs.evolve(
            job, maps=[attrs.evolve(m) for m in job.maps]
        )  # as of a new request: nothing is known of it
        began = time.perf_counter()
        copy = copier.submit([fresh])
        while not copy.done:
            pass
        return time.perf_counter() - began

    for _ in range(200):
        once()
    found = {"back to back": [once() for _ in range(1000)]}
    spaced = []
    for _ in range(200):
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        spaced.append(once())
    found["every 10 ms"] = spaced
    busy, stop = [0], threading.Event()

    def engine() -> None:
        while not stop.is_set():
            busy[0] += sum(range(200))

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    found["engine thread busy"] = [once() for _ in range(100)]
    stop.set()
    thread.join()
    return found


def wire_latency() -> dict[str, list[float]]:
    """Seconds of one small message over ZeroMQ, which a push's Done is, every 10 ms: mostly that its threads wake."""
    from kvproto.net import Dialer, Listener

    address = f"ipc://{tempfile.mkdtemp(prefix='kvproto-')}/kv"
    listener, dialer = Listener(address), Dialer()
    dialer.send((address,), b"first")
    while not (found := list(listener.receive())):
        pass
    samples = []
    for _ in range(200):
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            dialer.receive()
        began = time.perf_counter()
        listener.send(found[0][0], bytes(80))
        while not dialer.receive():
            pass
        samples.append(time.perf_counter() - began)
    dialer.close(), listener.close()
    return {"a message over ZeroMQ, every 10 ms": samples}


def session_latency(pull: bool) -> dict[str, list[float]]:
    """Seconds from `finish` at the source's node, and from the copy's submission by who copies, until the sink's node reports it: one page of 61 layers."""
    from kvproto import Pool
    from kvproto.events import Connected
    from kvproto.net import Dialer, Listener
    from kvproto.rank.base import party_of
    from kvproto.rank.events import Received
    from kvproto.rank.page_tables import grants_of
    from kvproto.sink.node import SinkNode
    from kvproto.source.node import SourceNode
    from kvproto.source.prefill import Finished
    from kvproto.transport.cuda.transport import CudaTransport
    from kvproto.wire.enums import Outcome
    from kvproto.wire.messages import Ticket

    submitted = [0.0]

    class Marked(CudaTransport):
        def start(self, moves: Any) -> Any:
            submitted[0] = time.perf_counter()
            return super().start(moves)

    geometry = describe(PRESETS["deepseek-v3"][0])
    folder = tempfile.mkdtemp(prefix="kvproto-")
    address = f"ipc://{folder}/kv"
    listener, dialer = Listener(address), Dialer()
    pools = [Pool.allocate(geometry, 8, device=d) for d in (0, 1)]
    source = SourceNode(
        party_of("prefill", pools[0]), pools[0], listener, {0: address}, verify=False, transports=[Marked(0)], pull=pull
    )
    sink = SinkNode(party_of("decode", pools[1]), pools[1], dialer, verify=False, transports=[Marked(1)], pull=pull)
    sink.connect(("prefill", 0), address)
    side = pools[1].layout
    while not any(isinstance(e, Connected) for e in sink.turn()):
        source.turn()
    found: list[tuple[float, float]] = []
    for n in range(300):
        ticket = Ticket(key=n.to_bytes(16, "little"), engine="prefill", replica=0, deadline=60000)
        source.expect(ticket, bytes(32), 64)
        grants = grants_of(side, {side.group(0).name: [n % 8]}, 0, 64)
        sink.fetch(n, ("prefill", 0), bytes(ticket.key), bytes(32), grants)
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until or not source.endpoint.asking(bytes(ticket.key)):
            source.turn(), sink.turn()
        began = time.perf_counter()
        source.finish(bytes(ticket.key), Finished({0: np.array([(3 * n) % 8])}, 64, Outcome.CONTINUE, {}))
        source.turn()
        while not any(isinstance(e, Received) for e in sink.turn()):
            if not pull:  # else only the sink has something to do
                source.turn()
        over = time.perf_counter()
        found.append((over - submitted[0], over - began))
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            source.turn(), sink.turn()
    source.close("over"), sink.close("over")
    way = "pull" if pull else "push"
    names = f"{way}, submit to the sink's node", f"{way}, finish to the sink's node"
    return dict(zip(names, (list(x) for x in zip(*found[50:], strict=True)), strict=True))


def budget(ceiling: Ceiling) -> tuple[dict[int, list[float]], dict[str, list[float]]]:
    """Share of the ceiling by number of multiprocessors, 2 KB runs, pull; and a matrix product beside a copy with the fewest that reach 0.9."""
    pools = [DeviceMemory(16 << 30, d) for d in (0, 1)]
    program = scattered(2048, 8192, 64, (16 << 30) // 64 // 2048)
    shares: dict[int, list[float]] = {}
    for blocks in (8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 132):
        copier = Copier(1, blocks, timed=True)
        job = CopyJob(copier.prepare(program, {0: pools[0].address}, {0: pools[1].address}), program.maps)
        shares[blocks] = []
        for _ in range(9):
            copy = copier.submit([job])
            copy.wait()
            shares[blocks].append(copy.bytes / copy.seconds / ceiling.rate())
    fewest = next((b for b, s in shares.items() if median(s) >= 0.9), 132)
    copier = Copier(1, fewest, slots=64)
    job = CopyJob(copier.prepare(program, {0: pools[0].address}, {0: pools[1].address}), program.maps)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda:1")
    y = torch.randn_like(x)
    products: dict[str, list[float]] = {"alone": [], f"beside a copy on {fewest} SMs": []}
    for _ in range(21):
        for name, samples in products.items():
            copies = [copier.submit([job]) for _ in range(12)] if name != "alone" else []
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            with torch.cuda.device(1):
                events[0].record()
                for _ in range(10):
                    x @ y
                events[1].record()
                events[1].synchronize()
            samples.append(events[0].elapsed_time(events[1]) / 1e4)
            for copy in copies:
                copy.wait()
    for pool in pools:
        pool.close()
    return shares, products


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--out", type=Path, default=RESULTS)
    args = options.parse_args()
    enable_peer(1, 0), enable_peer(0, 1)
    ceiling = Ceiling()
    for _ in range(200):
        ceiling.rate()
    made: dict[str, Any] = {"shapes": shapes(ceiling, args.rounds), "latency": latency()}
    made["latency"] |= session_latency(pull=False) | session_latency(pull=True) | wire_latency()
    for name, samples in made["latency"].items():
        ordered = sorted(samples)
        print(
            f"latency, 1 page of 64 tokens, 61 layers MLA, {name:30} p50 {median(samples) * 1e6:7.1f} us  p99 {ordered[len(ordered) * 99 // 100] * 1e6:8.1f} us"
        )
    made["share_by_multiprocessors"], made["product_seconds"] = budget(ceiling)
    print(
        "share of the ceiling at 2 KB runs, pull, by multiprocessors: "
        + "  ".join(f"{b}: {median(s):.3f}" for b, s in made["share_by_multiprocessors"].items())
    )
    print(
        "bf16 product of 8,192 x 8,192: "
        + "  ".join(f"{n}: {median(s) * 1e3:.3f} ms" for n, s in made["product_seconds"].items())
    )
    if args.write:
        args.out.write_text(json.dumps(facts() | made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
