"""The cost of one hand-over in calls, in moves from file to file and in CPU time, with both sides in one thread.

`python benchmarks/trips.py [PART ...] [--out [FILE]] [--json]`: calls and CPU time do not depend on what else the machine does.

    trips    calls, files and moves of a warm hand-over: a fetch, the source's turn, `finish`, the sink's turn; idle turns
    cpu      CPU time of a warm hand-over of 8 and of 512 pages in host memory, both sides
    peers    --peers N ...: CPU time until a sink is connected to N sources, of an idle turn, and of a hand-over beside them
    verify   the longest turn while 1 GiB is copied and summed, by Options.verify

Moves count how often the running code changes its file; comprehensions and lambdas do not move.
"""

from __future__ import annotations

import gc
import json
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from harness import arguments, facts, keep, rounded
from pair import PATIENCE, Pair, due, readable

import kvproto
from kvproto import Cache, DType, Geometry, Options, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket

PARTS = ("trips", "cpu", "peers", "verify")
GEOMETRY = lay_out([Cache.gqa("kv", layers=2, kv_heads=2, head_dim=16, page=4, dtype=DType.F32)], Parallel(tp=1))
"""A page is 2 KiB: 4 tokens of 2 layers, K and V."""
LARGE = lay_out([Cache.gqa("kv", layers=8, kv_heads=8, head_dim=128, page=16, dtype=DType.F16)], Parallel(tp=1))
"""A page is 512 KiB."""
GIBIBYTE = 2048
"""Pages of LARGE."""


class Trace:
    """The calls of kvproto's functions while the context lasts, each by its file."""

    def __init__(self) -> None:
        self._root = str(Path(kvproto.__file__).parent) + "/"
        self.files: list[str] = []
        self._stays: list[str] = []

    def __enter__(self) -> Trace:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._root):
            file = code.co_filename.removeprefix(self._root)
            self.files.append(file)
            if not code.co_qualname.endswith(">") and self._stays[-1:] != [file]:
                self._stays.append(file)

    def figures(self) -> dict[str, Any]:
        """Calls, files, moves, and the files that were entered most often."""
        entered = Counter(self._stays)
        return {
            "calls": len(self.files),
            "files": len(entered),
            "moves": len(self._stays),
            "most entered": dict(entered.most_common(8)),
        }


def pair_of(stack: ExitStack, geometry: Geometry, pages: int, **options: Any) -> Pair:
    """Pools of so many pages in host memory, and both sides without I/O threads."""
    pools = Pool.allocate(geometry, pages), Pool.allocate(geometry, pages)
    return Pair(stack, pools, Options(thread=False, **options))


STEPS = 20
"""Of a sink that has heard of Done; more, and what came was another message, after which the source has a turn again."""


def came(side: Source | Sink) -> None:
    """Wait until a side has something to do."""
    if not readable([side], PATIENCE):
        raise RuntimeError(f"nothing came to {side!r} in {PATIENCE:.0f} s")


def traced(pair: Pair, prompt: Prompt, pages: dict[str, list[int]]) -> dict[str, Trace]:
    """The calls of an idle turn of both sides, and of each step of one hand-over."""
    source, sink = pair.source, pair.sink
    parts: dict[str, Trace] = {}

    def part(name: str) -> Trace:
        return parts.setdefault(name, Trace())

    pair.settle()
    with part("idle turn, source"):
        source.step()
    with part("idle turn, sink"):
        sink.step()
    ticket = new_ticket("prefill")
    with part("Source.request"):
        request = source.request(ticket, prompt)
    pair.settle()
    with part("Sink.fetch, to the Transfer on the socket"):
        fetch = sink.fetch(ticket, prompt, pages)
    came(source)
    with part("source's turn: Transfer in, Accepted out"):
        source.step()
    pair.settle()
    with part("Request.finish, to copied bytes and Done on the socket"):
        request.finish(pages)
    came(sink)
    with part("sink's turn: Done in, Arrived out"):
        for _ in range(STEPS):
            if fetch.done:
                break
            sink.step()
    pair.until(lambda: fetch.done and request.done)
    return parts


def trips() -> dict[str, Any]:
    """Calls, files and moves of each part of a warm hand-over of 10 pages: of nine, the one with the median of calls."""
    with ExitStack() as stack:
        pair, prompt, pages = pair_of(stack, GEOMETRY, 64), Prompt(list(range(37))), {"kv": list(range(1, 11))}
        for _ in range(5):
            pair.hand_over(prompt, pages)
        rounds = [{name: trace.figures() for name, trace in traced(pair, prompt, pages).items()} for _ in range(9)]
    parts = {name: sorted((of[name] for of in rounds), key=lambda of: of["calls"])[4] for name in rounds[0]}
    steps = [figures for name, figures in parts.items() if not name.startswith(("idle", "Source.request"))]
    whole = {name: sum(figures[name] for figures in steps) for name in ("calls", "moves")}
    return {"parts": parts, "from fetch to Arrived": whole}


def cpu(rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU of the whole process, by the number of pages; both numbers in turn."""
    samples: dict[str, list[float]] = {"8": [], "512": []}
    with ExitStack() as stack:
        pairs = {name: pair_of(stack, GEOMETRY, int(name) + 1) for name in samples}
        prompts = {name: Prompt(list(range(4 * int(name)))) for name in samples}
        for n in range(rounds + 20):
            for name, pair in pairs.items():
                pages = {"kv": list(range(1, int(name) + 1))}
                began = time.process_time()
                pair.hand_over(prompts[name], pages)
                if n >= 20:
                    samples[name].append(time.process_time() - began)
            if n == 20:
                gc.collect()
    return samples


class Crowd:
    """One sink and many sources of other engines, all in this thread."""

    def __init__(self, stack: ExitStack, number: int) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = Options(thread=False)
        self.names = [f"prefill-{n}" for n in range(number)]
        self.sources = {
            name: stack.enter_context(Source(name, Pool.allocate(GEOMETRY, 16), f"ipc://{folder}/{name}", options))
            for name in self.names
        }
        self._poll = select.epoll()
        stack.callback(self._poll.close)
        self._of = {source.fileno(): source for source in self.sources.values()}
        for descriptor in self._of:
            self._poll.register(descriptor, select.EPOLLIN)
        self.cpu = 0.0
        """Seconds of CPU of the sink's steps."""
        self.began, began = time.process_time(), time.thread_time()
        seeds = {name: f"ipc://{folder}/{name}" for name in self.names}
        self.sink = stack.enter_context(Sink("decode", Pool.allocate(GEOMETRY, 16), seeds, options))
        self.cpu += time.thread_time() - began
        self._timers = 0.0

    def turn(self) -> None:
        """A step of each side that has something to do; the sources' timers are looked at every 20 ms."""
        began = time.thread_time()
        if readable([self.sink], 0) or due(self.sink):
            self.sink.step()
        self.cpu += time.thread_time() - began
        ready = {self._of[descriptor] for descriptor, _ in self._poll.poll(0)}
        if time.monotonic() > self._timers:
            ready |= {source for source in self.sources.values() if due(source)}
            self._timers = time.monotonic() + 0.02
        for source in ready:
            source.step()

    def settle(self, seconds: float = 0.2) -> None:
        """Turns until nothing has come for a while, or ten times as long: of 1,000 sources, one always has a message."""
        began = quiet = time.monotonic()
        while time.monotonic() < min(quiet + seconds, began + 10 * seconds):
            if self._poll.poll(0) or readable([self.sink], 0.005):
                quiet = time.monotonic()
            self.turn()


def peers(number: int, limit: float, rounds: int) -> dict[str, Any]:
    """Costs of `number` sources to their sink: `limit` bounds the seconds of CPU of this process until all are ready."""
    with ExitStack() as stack:
        crowd = Crowd(stack, number)
        start = time.monotonic()
        while len(crowd.sink.ready) < number and time.process_time() - crowd.began < limit:
            crowd.turn()
        answer: dict[str, Any] = {
            "ready": len(crowd.sink.ready),
            "seconds of CPU, sink": crowd.cpu,
            "seconds of CPU, all": time.process_time() - crowd.began,
            "seconds": time.monotonic() - start,
        }
        if answer["ready"] < number:
            return answer
        crowd.settle()
        idle, handed = [], []
        for _ in range(rounds):
            began = time.thread_time()
            crowd.sink.step()
            idle.append(time.thread_time() - began)
        crowd.settle()
        with Trace() as trace:
            crowd.sink.step()
        prompt, pages, source = Prompt(range(32)), list(range(1, 9)), crowd.sources[crowd.names[0]]
        for _ in range(rounds // 10):
            crowd.settle(0.01)
            ticket = new_ticket(crowd.names[0])
            request, before = source.request(ticket, prompt), crowd.cpu
            began = time.thread_time()
            fetch = crowd.sink.fetch(ticket, prompt, {"kv": pages})
            asked = time.thread_time() - began
            request.finish({"kv": pages})
            while not (fetch.done and request.done):
                readable((crowd.sink, source), 0.02)
                crowd.turn()
            handed.append(crowd.cpu - before + asked)
        return answer | {
            "idle turn": idle,
            "calls of an idle turn": trace.figures()["calls"],
            "hand-over of 8 pages": handed,
        }


def verify(pages: int) -> dict[str, Any]:
    """By Options.verify: the longest step of each side, in seconds of CPU, and the CPU of all in the hand-over."""
    answers = {}
    for mode in (False, True, "pages"):
        with ExitStack() as stack:
            pair = pair_of(stack, LARGE, pages + 1, verify=mode)
            prompt, table = Prompt(range(16 * pages)), {"kv": list(range(1, pages + 1))}
            pair.hand_over(prompt, table)  # touches the memory
            pair.longest = dict.fromkeys(pair.longest, 0.0)
            began = time.process_time()
            pair.hand_over(prompt, table)
            answers[str(mode)] = {
                **{f"longest step, {side}": seconds for side, seconds in pair.longest.items()},
                "seconds of CPU": time.process_time() - began,
            }
    return answers


def shown(results: dict[str, Any]) -> None:
    """Print tables."""
    if "trips" in results:
        print(f"{'':56}{'calls':>7}{'files':>7}{'moves':>7}")
        for name, of in results["trips"]["parts"].items():
            print(f"{name:56}{of['calls']:7}{of['files']:7}{of['moves']:7}")
        whole = results["trips"]["from fetch to Arrived"]
        print(f"{'from fetch to Arrived':56}{whole['calls']:7}{'':7}{whole['moves']:7}")
    for pages, samples in results.get("cpu", {}).items():
        print(f"{pages:>4} pages: {1e6 * min(samples):8.0f} us of CPU least, {1e6 * median(samples):8.0f} median")
    for number, of in results.get("peers", {}).items():
        ready = f"{of['ready']} ready after {of['seconds of CPU, sink']:.2f} s of CPU at the sink, {of['seconds of CPU, all']:.2f} at all"
        turns = f"; an idle turn has {of['calls of an idle turn']:,} calls" if "idle turn" in of else ""
        turns += "".join(
            f"; {name} {1e6 * min(of[name]):.0f} us least, {1e6 * median(of[name]):.0f} median"
            for name in ("idle turn", "hand-over of 8 pages")
            if of.get(name)
        )
        print(f"{number:>4} sources: {ready}{turns}")
    for mode, of in results.get("verify", {}).items():
        print(f"verify={mode}: " + ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in of.items()))


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "trips", rounds=400, quick="few of everything, to see that it works")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of a table")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 300], metavar="N", help="numbers of sources")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of CPU in which peers must be ready")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {sorted(unknown)}; there are {', '.join(PARTS)}")
    rounds = 20 if args.quick else args.rounds
    measures: dict[str, Callable[[], Any]] = {
        "trips": trips,
        "cpu": lambda: cpu(rounds),
        "peers": lambda: {str(n): peers(n, args.limit, rounds) for n in ([3] if args.quick else args.peers)},
        "verify": lambda: verify(64 if args.quick else GIBIBYTE),
    }
    results = {"benchmark": "trips"} | facts()
    results |= {name: rounded(measures[name]()) for name in args.parts or PARTS}
    print(json.dumps(results)) if args.json else shown(results)
    keep(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
