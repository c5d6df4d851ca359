"""Hand-overs of real shapes between two GPUs: time and share of the ceiling; latency; the share of a GPU that copies take.

`python benchmarks/transfer_shapes.py [--out]` on a machine with two GPUs that are peers. Programs come from `plan` and
`lower` over described engines, for one rank pair's share; pages are in no order. The ceiling is one peer copy of 1 GB in the
same round. Latency is from `submit` (or from the engine's `finish`) until the reader knows. --out keeps all samples.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import attrs
import torch
from gpu import GB, WARM_UP, PeerCopy, bytes_of, gpu_facts, half, poison
from harness import arguments, keep
from pair import Pair

from kvproto import Options, Pool, Prompt
from kvproto.copying.lowering import Pair as RankPair
from kvproto.net import Dialer, Listener
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.transport import CudaTransport
from kvproto_catalog.models import PRESETS, describe

TOKENS = (1024, 8192, 32768, 131072)


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


def shapes(ceiling: PeerCopy, rounds: int) -> list[dict[str, Any]]:
    copier = Copier(1, timed=True)
    rows = []
    for name, (source, sink, heads_first) in cases().items():
        made = plan(source, sink)
        a, b = max(((r.source, r.sink) for r in made.routes), key=lambda p: len(made.between(*p)))
        for tokens in TOKENS:
            here, from_, mine = half(source, a, tokens, False, 0)
            there, to, theirs = half(sink, b, tokens, heads_first, 1)
            bytes_of(mine).random_(256), poison(theirs)
            torch.cuda.synchronize(0)
            began = time.perf_counter()
            program = RankPair(made.between(a, b), here, there).lower(from_, to)
            lowering = time.perf_counter() - began
            prepared = copier.prepare(program, {0: mine.address}, {0: theirs.address})
            copier.submit([CopyJob(prepared, program.maps)]).wait()
            came = copier.begin_checksums(program, {0: theirs.address}, sink=True)
            if came() != Copier(0).begin_checksums(program, {0: mine.address}, sink=False)():
                raise SystemExit(f"{name}: checksums differ")
            until = time.perf_counter() + WARM_UP
            while time.perf_counter() < until:
                copier.submit([CopyJob(prepared, program.maps)]).wait()
            samples, walls, ceilings = [], [], []
            for _ in range(rounds):
                ceilings.append(GB / ceiling.seconds())
                began = time.perf_counter()
                copy = copier.submit([CopyJob(prepared, program.maps)])
                while not copy.done:
                    pass
                walls.append(time.perf_counter() - began)
                samples.append(copy.seconds)
            runs = program.runs()
            rows.append({"shape": name, "tokens": tokens, "pair": [a, b], "bytes": program.bytes, "runs": runs.count, "mean_run": runs.mean, "lowering": lowering,
                          "seconds": samples, "submit_to_done": walls, "ceiling": ceilings})  # fmt: skip
            rate = program.bytes / median(samples)
            print(
                f"{name:46}{tokens:8,} tokens {program.bytes / 1e6:9.1f} MB {runs.mean:9.0f} B/run {median(samples) * 1e6:9.0f} us {rate / 1e9:6.1f} GB/s "
                f"{rate / median(ceilings):6.3f} of the ceiling; submit to done +{(median(walls) - median(samples)) * 1e6:5.0f} us",
                flush=True,
            )
            mine.close(), theirs.close()
    return rows


def mla_request() -> tuple[Copier, CopyJob]:
    """1 page of 64 tokens, 61 layers of MLA."""
    copier = Copier(1)
    made = plan(geometry := describe(PRESETS["deepseek-v3"][0]), geometry)
    (here, from_, mine), (there, to, theirs) = (half(geometry, 0, 64, False, d) for d in (0, 1))
    program = RankPair(made.routes, here, there).lower(from_, to)
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
    rows = {"back to back": [once() for _ in range(1000)]}
    spaced = []
    for _ in range(200):
        spin(0.01)
        spaced.append(once())
    rows["every 10 ms"] = spaced
    busy, stop = [0], threading.Event()

    def engine() -> None:
        while not stop.is_set():
            busy[0] += sum(range(200))

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    rows["engine thread busy"] = [once() for _ in range(100)]
    stop.set()
    thread.join()
    return rows


def spin(seconds: float, work: Any = lambda: None) -> None:
    """Work, as often as it fits in."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work()


def wire_latency() -> dict[str, list[float]]:
    """Seconds of one small message over ZeroMQ, which a push's Done is, every 10 ms: mostly that its threads wake."""
    address = f"ipc://{tempfile.mkdtemp(prefix='kvproto-')}/kv"
    listener, dialer = Listener(address), Dialer()
    dialer.send((address,), b"first")
    while not (first := list(listener.receive())):
        pass
    samples = []
    for _ in range(200):
        spin(0.01, lambda: list(dialer.receive()))
        began = time.perf_counter()
        listener.send(first[0][0], bytes(80))
        while not list(dialer.receive()):
            pass
        samples.append(time.perf_counter() - began)
    dialer.close(), listener.close()
    return {"a message over ZeroMQ, every 10 ms": samples}


class Marked(CudaTransport):
    """Notes when a copy is submitted."""

    submitted = 0.0

    def start(self, moves: Any) -> Any:
        Marked.submitted = time.perf_counter()
        return super().start(moves)


def session_latency(pull: bool) -> dict[str, list[float]]:
    """Seconds from `finish` at the source, and from the copy's submission, until the sink reports: one page, 61 layers."""
    geometry = describe(PRESETS["deepseek-v3"][0])
    pools = Pool.allocate(geometry, 8, device=0), Pool.allocate(geometry, 8, device=1)
    options = [Options(thread=False, verify=False, pull=pull, transports=[Marked(device)]) for device in (0, 1)]
    name, prompt = geometry.groups[0].name, Prompt(range(64))
    samples: list[tuple[float, float]] = []
    with ExitStack() as stack:
        pair = Pair(stack, pools, *options)
        source, sink = pair.source, pair.sink
        for n in range(300):
            request, fetch = pair.ask(prompt, {name: [n % 8]})
            pair.settle(0.002)
            began = time.perf_counter()
            request.finish({name: [3 * n % 8]})
            source.step()  # a request of this size is left to the next step
            while not fetch.done:
                sink.step()
                if not pull:  # else only the sink has something to do
                    source.step()
            over = time.perf_counter()
            samples.append((over - Marked.submitted, over - began))
            pair.until(lambda request=request: request.done)
    way = "pull" if pull else "push"
    submit, finish = (list(seconds) for seconds in zip(*samples[50:], strict=True))
    return {f"{way}, submit to the sink's node": submit, f"{way}, finish to the sink's node": finish}


def budget(ceiling: PeerCopy) -> tuple[dict[int, list[float]], dict[str, list[float]]]:
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
            shares[blocks].append(copy.bytes / copy.seconds / (GB / ceiling.seconds()))
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
    args = arguments(__doc__, "transfer_shapes", rounds=21).parse_args()
    enable_peer(1, 0), enable_peer(0, 1)
    ceiling = PeerCopy(*(DeviceMemory(GB, device) for device in (0, 1)))
    for _ in range(200):
        ceiling.seconds()
    answers: dict[str, Any] = {"shapes": shapes(ceiling, args.rounds), "latency": latency()}
    answers["latency"] |= session_latency(pull=False) | session_latency(pull=True) | wire_latency()
    for name, samples in answers["latency"].items():
        p50, p99 = 1e6 * median(samples), 1e6 * sorted(samples)[len(samples) * 99 // 100]
        print(f"latency, 1 page of 64 tokens, 61 layers MLA, {name:30} p50 {p50:7.1f} us  p99 {p99:8.1f} us")
    answers["share_by_multiprocessors"], answers["product_seconds"] = budget(ceiling)
    shares = "  ".join(f"{b}: {median(s):.3f}" for b, s in answers["share_by_multiprocessors"].items())
    print(f"share of the ceiling at 2 KB runs, pull, by multiprocessors: {shares}")
    products = "  ".join(f"{name}: {1e3 * median(s):.3f} ms" for name, s in answers["product_seconds"].items())
    print(f"bf16 product of 8,192 x 8,192: {products}")
    keep(args.out, gpu_facts() | answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
