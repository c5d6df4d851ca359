"""The cost of a session, alone and beside others: `python benchmarks/session.py [PART ...] [--out]`.

    latency    the four messages of a transfer, one transfer after the other: bare sockets, sessions alone, Source and Sink; CURVE and ipc
    many       2,000 transfers at once of 500 sinks of one source
    held       a transfer beside 4,096 that wait, and beside none
    floods     a transfer beside a peer that sends garbage, or requests, as fast as the source takes them
    frames     the greatest frame of every message, in every state that hears it, by every way in which bytes move
    messages   1,000,000 transfers of sessions alone: do memory and descriptors grow?
    transfers  100,000 small ones of a Source and a Sink: likewise
    sessions   10,000 sinks that come, fetch and go: likewise
    recovery   a source that is stopped, and one that is killed and started again

Sources and sinks are processes of one host, over loopback. --out keeps the samples of each part that was run, with its date
and the load of the machine; the others stay. What ZeroMQ does not bound is in floods.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from harness import arguments, child, facts, keep, rounded
from session_sides import PAGES, PROMPT, Bare, Far, Place, Tap, far, state, ticket

from kvproto import KvprotoError, Sink
from kvproto.events import Recovered, Suspected
from kvproto.net import read_keys
from kvproto.session.negotiation import LIMITS, Terms
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import Role

WAYS = {"thread": True, "step": False}
_SENT, _BACK = ("Transfer", "DoneAck"), ("Accepted", "Done")
_HELD, _AT_ONCE = 4096, 1024
_BATCH, _SAMPLES = 256, 100
_ROOM = 4 << 20
"""By how many bytes resident memory may differ: what the allocator keeps for itself."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


# one transfer after the other


class Transfers:
    """Transfers of one sink."""

    def __init__(self, sink: Sink, source: Far, thread: bool, first: int = 1) -> None:
        self._sink, self._source, self._thread, self._number = sink, source, thread, first

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """Seconds of so many: from Transfer to DoneAck, and from `fetch` to the callback."""
        sink, seconds = self._sink, []
        self._source.ask("finish", self._number, count)
        with Tap() as tap:
            for number in range(self._number, self._number + count):
                told: list[float] = []
                call = lambda _, told=told: told.append(time.perf_counter())  # noqa: E731
                begin = time.perf_counter()
                handle = sink.fetch(ticket(number), PROMPT, {"kv": [number % PAGES]}, on_done=call)
                handle.wait(60)
                while not told:
                    time.sleep(0) if self._thread else sink.step()
                seconds.append((tap.sent["DoneAck"] - tap.sent["Transfer"], told[0] - begin))
        self._source.ask("wait", self._number, count)
        self._number += count
        sink.events()
        return seconds


def answer(pipe: Connection, keyed: tuple[bytes, bytes] | None, address: str) -> None:
    """The source's half of the floor: two frames back for each that comes, and one more is awaited."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if keyed is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keyed[1])
    router.bind(address)
    pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    back = [bytes(n) for n in pipe.recv()]
    while True:
        who, frame = router.recv_multipart()
        if not frame:
            break
        for reply in back:
            router.send_multipart([who, reply])
        router.recv_multipart()
    router.close(linger=0)
    context.term()


class Floor:
    """The same number of frames of the same lengths over bare sockets: a DEALER and a ROUTER that block."""

    def __init__(self, stack: ExitStack, keyed: bool, folder: str, frames: dict[str, int]) -> None:
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        address = "tcp://127.0.0.1:*" if keyed else f"ipc://{folder}/floor"
        pipe = stack.enter_context(child(answer, server if keyed else None, address))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = context.socket(zmq.DEALER)
        if keyed:
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, server[0])
            self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, client[0])
            self._dealer.setsockopt(zmq.CURVE_SECRETKEY, client[1])
        self._dealer.connect(pipe.recv())
        pipe.send([frames[name] for name in _BACK])
        self._frames = [bytes(frames[name]) for name in _SENT]
        stack.callback(context.term)
        stack.callback(self._dealer.close)
        stack.callback(self._dealer.send, b"")

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """As `Transfers`; there is no engine."""
        ask, acknowledge = self._frames
        dealer, seconds = self._dealer, []
        for _ in range(count):
            begin = time.perf_counter()
            dealer.send(ask)
            dealer.recv()
            dealer.recv()
            dealer.send(acknowledge)
            seconds.append(time.perf_counter() - begin)
        return [(took, took) for took in seconds]


def latency(kinds: int, rounds: int, count: int) -> dict[str, Any]:
    """Samples in seconds of every way over so many kinds of address; all ways are measured in turn in every round."""
    answers: dict[str, Any] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], list[tuple[float, float]]]] = {}
        for kind in ("curve", "ipc")[:kinds]:
            for name, thread in WAYS.items():
                source = far(stack, kind, thread=True)
                sink = stack.enter_context(source.place.sink(thread=thread))
                with Tap(frames=True) as tap:
                    Transfers(sink, source, thread, 1 << 40)(10)
                ways[f"{kind} {name}"] = Transfers(sink, source, thread)
            frames = {name: tap.lengths[name] for name in (*_SENT, *_BACK)}
            ways[f"{kind} messages"] = Bare(stack, Place.of(kind, stack.enter_context(tempfile.TemporaryDirectory())))
            ways[f"{kind} floor"] = Floor(
                stack, kind == "curve", stack.enter_context(tempfile.TemporaryDirectory()), frames
            )
            answers[f"{kind} frames"] = frames
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for way in ways.values():
            way(2 * count)
        for _ in range(rounds):
            for name, way in ways.items():
                samples[name] += way(count)
    for name, seconds in samples.items():
        messages_, whole = zip(*seconds, strict=True)
        bare = name.endswith(("floor", "messages"))
        answers[name] = {"messages": list(messages_)} | ({} if bare else {"door": list(whole)})
    return answers


# many peers, and transfers that wait


def many(peers: int, transfers: int) -> dict[str, Any]:
    """Seconds and what the source's process holds: so many sinks, then so many transfers of theirs at once."""
    answers: dict[str, Any] = {"peers": peers, "transfers": transfers}
    with ExitStack() as stack, Tap(frames=True) as tap:
        source = far(stack)
        answers["before"] = source.ask("state")
        began = time.monotonic()
        sinks = [stack.enter_context(source.place.sink(n, 64, thread=False)) for n in range(peers)]
        answers["opened_s"] = time.monotonic() - began
        _turns(sinks, lambda: all(sink.ready for sink in sinks))
        answers["registered_s"] = time.monotonic() - began
        answers["registered"] = source.ask("state")
        source.ask("expect", 1, transfers)
        began = time.monotonic()
        fetches = [sinks[n % peers].fetch(ticket(1 + n), PROMPT, {"kv": [n // peers]}) for n in range(transfers)]
        _turns(sinks, lambda: len(tap.accepted) == transfers)
        answers["accepted_s"] = time.monotonic() - began
        answers["in_flight"] = source.ask("state")
        began = time.monotonic()
        source.ask("finish", 1, transfers)
        _turns(sinks, lambda: all(fetch.done for fetch in fetches))
        answers["arrived_s"] = time.monotonic() - began
        source.ask("wait", 1, transfers)
        answers["over"] = source.ask("state")
        answers["sinks"] = state()
        for sink in sinks:
            sink.close()
        until(lambda: source.ask("state")["sessions"] == 0)
        answers["closed"] = source.ask("state")
    return answers


def _turns(sinks: list[Sink], over: Callable[[], bool]) -> None:
    """Give turns to the sinks that have something to do until it is over."""
    by_fd, epoll = {sink.fileno(): sink for sink in sinks}, select.epoll()
    for fd in by_fd:
        epoll.register(fd, select.EPOLLIN)
    with contextlib.closing(epoll):
        for sink in sinks:
            sink.step()
        while not over():
            for fd, _ in epoll.poll(0.05):
                by_fd[fd].step()
            for sink in sinks:
                if sink.next_timer() == 0.0:
                    sink.step()


def held(rounds: int, number: int) -> dict[str, Any]:
    """Seconds of a transfer, and CPU microseconds of it at the source, beside no waiting transfers and beside 4,096."""
    answers: dict[str, Any] = {"held": _HELD, "alone": [], "beside": [], "alone_cpu_us": 0, "beside_cpu_us": 0}
    with ExitStack() as stack:
        ways: dict[str, tuple[Far, Transfers]] = {}
        for way in ("alone", "beside"):
            source = far(stack)
            if way == "beside":
                first = 1 << 50
                source.ask("expect", first, _HELD)
                with Tap(frames=True) as tap:
                    for s in range(_HELD // _AT_ONCE):
                        sink = stack.enter_context(source.place.sink(1 + s))
                        for n in range(_AT_ONCE):
                            sink.fetch(ticket(first + s * _AT_ONCE + n), PROMPT, {"kv": [n]})
                    until(lambda tap=tap: len(tap.accepted) == _HELD)  # type: ignore[misc]
            transfers = Transfers(stack.enter_context(source.place.sink()), source, True)
            transfers(2 * number)
            ways[way] = source, transfers
        for _ in range(rounds):
            for way, (source, transfers) in ways.items():
                before = source.ask("state")["cpu_us"]
                answers[way] += [took for took, _ in transfers(number)]
                answers[f"{way}_cpu_us"] += (source.ask("state")["cpu_us"] - before) / (rounds * number)
    return answers


# floods


def garbage() -> Iterator[bytes]:
    """Frames that cannot be decoded."""
    while True:
        yield os.urandom(256)


def requests(session: int) -> Iterator[bytes]:
    """Valid requests, which are answered."""
    for n in itertools.count(1000):
        yield encode(m.Ping(session=session, request=n))


def flood(place: Place, kind: str, over: Any, sent: Any) -> None:
    """Send as fast as the source receives."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    keys, public = read_keys(Path(place.folder) / "decode"), place.public()
    assert public is not None
    dealer.setsockopt(zmq.CURVE_SERVERKEY, public.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    dealer.setsockopt(zmq.SNDTIMEO, 100)
    dealer.connect(place.address)
    frames = garbage()
    if kind == "requests":
        who = {"engine": "decode-400", "incarnation": 1, "rank": 0, "replica": 0, "role": Role.SINK}
        offer = {"versions": Terms(()).versions, "offered": (), "needed": (), "limits": LIMITS}
        dealer.send(encode(m.Hello(request=1, **who, **offer)))
        welcome = decode(dealer.recv())
        assert isinstance(welcome, m.Welcome)
        frames = requests(welcome.session)
    while not over.is_set():
        with contextlib.suppress(zmq.Again):
            dealer.send(next(frames))
            sent.value += 1
        while dealer.poll(0):
            dealer.recv()
    dealer.close(linger=0)
    context.term()


@contextmanager
def flooded(place: Place, kind: str) -> Iterator[Any]:
    """A flood at a place while the context lasts; gives the number of frames sent so far."""
    context = multiprocessing.get_context("spawn")
    over, sent = context.Event(), context.Value("q", 0)
    process = context.Process(target=flood, args=(place, kind, over, sent), daemon=True)
    process.start()
    try:
        until(lambda: sent.value > 100)
        yield sent
    finally:
        over.set()
        process.join(10)
        process.kill()


def floods(rounds: int, number: int) -> dict[str, Any]:
    """Seconds of a transfer alone, beside each flood at its own source, and beside the same flood at another source.

    The last says what the flood costs as a process that takes a core, so that the difference is the source's.
    """
    answers: dict[str, Any] = {}
    with ExitStack() as stack:
        mine, elsewhere = far(stack), far(stack)
        transfers = Transfers(stack.enter_context(mine.place.sink()), mine, True)
        transfers(number)
        for _ in range(rounds):
            answers.setdefault("alone", []).extend(took for took, _ in transfers(number))
            for kind in ("garbage", "requests"):
                for where, source in (("elsewhere", elsewhere), ("here", mine)):
                    with flooded(source.place, kind) as sent:
                        before, began = sent.value, time.monotonic()
                        seconds = [took for took, _ in transfers(number)]
                        rate = (sent.value - before) / (time.monotonic() - began)
                    answers.setdefault(f"{kind} {where}", []).extend(seconds)
                    answers.setdefault(f"{kind} {where} frames_s", []).append(round(rate))
    return answers


# what does not grow


def flat(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Whether memory and descriptors are the same in the last quarter as in the second one, the first being warm-up.

    The least of each counts: a sample may fall into the opening or closing of a sink, what leaks is there in all of them.
    """
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    rss, fds = (min(s[of] for s in late) - min(s[of] for s in early) for of in ("rss", "fds"))
    return {"rss_grown": rss, "fds_grown": fds, "flat": rss <= _ROOM and fds <= 0}


def _sampled(
    theirs: Callable[[], dict[str, int]], total: int, work: Callable[[int, int], None], batch: int
) -> dict[str, Any]:
    """Do `work` (first, count) until there was so much; samples of both processes on the way."""
    samples: dict[str, list[dict[str, int]]] = {"source": [], "sink": []}
    began, done = time.monotonic(), 0
    while done < total:
        count = min(batch, total - done)
        work(1 + done, count)
        done += count
        if len(samples["sink"]) < done * _SAMPLES // total:
            samples["source"].append({"done": done} | theirs())
            samples["sink"].append({"done": done} | state())
    verdicts = {side: flat(of) for side, of in samples.items()}
    return {"number": total, "seconds": time.monotonic() - began, "verdicts": verdicts, "samples": samples}


def messages(total: int) -> dict[str, Any]:
    """So many transfers of sessions alone, 256 at once."""
    with ExitStack() as stack:
        bare = Bare(stack, Place.of("curve", stack.enter_context(tempfile.TemporaryDirectory())))
        return _sampled(bare.state, total, lambda _, count: bare.at_once(count), _BATCH)


def transfers(total: int) -> dict[str, Any]:
    """So many small transfers of a Source and a Sink, 256 at once."""
    with ExitStack() as stack:
        source = far(stack)
        sink = stack.enter_context(source.place.sink())

        def work(first: int, count: int) -> None:
            source.ask("finish", first, count)
            fetches = [sink.fetch(ticket(n), PROMPT, {"kv": [n % PAGES]}) for n in range(first, first + count)]
            for fetch in fetches:
                fetch.wait(60)
            source.ask("wait", first, count)
            sink.events()

        return _sampled(lambda: source.ask("state"), total, work, _BATCH)


def sessions(total: int) -> dict[str, Any]:
    """So many sinks, each of which connects, fetches one request and goes."""
    with ExitStack() as stack:
        source = far(stack)

        def work(first: int, count: int) -> None:
            source.ask("finish", first, count)
            for n in range(first, first + count):
                with source.place.sink(n % 8, 4, thread=False) as sink:
                    sink.fetch(ticket(n), PROMPT, {"kv": [n % 4]}).wait(60)
            source.ask("wait", first, count)

        return _sampled(lambda: source.ask("state"), total, work, 10)


# a source that stops, and one that dies


@contextmanager
def _asking(sink: Sink, now: list[Far | None], numbers: Iterator[int]) -> Iterator[list[tuple[float, float]]]:
    """Requests one after the other, each asked again under a new ticket until it is here; when each began and ended."""
    over, served = threading.Event(), list[tuple[float, float]]()

    def ask() -> None:
        while not over.is_set():
            began, source, n = time.monotonic(), now[0], next(numbers)
            try:
                if source is None:
                    continue
                source.ask("finish", n, 1)
                sink.fetch(ticket(n), PROMPT, {"kv": [n % PAGES]}).wait(30)
                source.ask("wait", n, 1)
                served.append((began, time.monotonic()))
            except (KvprotoError, EOFError, OSError, TimeoutError):
                over.wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield served
    finally:
        over.set()
        thread.join()


def recovery(rounds: int) -> dict[str, Any]:
    """Seconds until a stopped source is suspect, and until a killed one that was started again serves."""
    answers: dict[str, list[float]] = {}
    for _ in range(rounds):
        with ExitStack() as stack:
            for name, seconds in _recovery(stack).items():
                answers.setdefault(name, []).append(seconds)
    return answers


def _recovery(stack: ExitStack) -> dict[str, float]:
    answers: dict[str, float] = {}

    def since(name: str, began: float) -> None:
        answers[name] = time.monotonic() - began

    first = far(stack)
    sink = stack.enter_context(first.place.sink())
    numbers = itertools.count(1)
    first.ask("finish", 1, 1)
    sink.fetch(ticket(next(numbers)), PROMPT, {"kv": [0]}).wait(30)
    first.ask("wait", 1, 1)
    sink.events()
    assert first.process.pid is not None
    for name, stop, kind in (("suspect", signal.SIGSTOP, Suspected), ("recovered", signal.SIGCONT, Recovered)):
        began = time.monotonic()
        os.kill(first.process.pid, stop)
        until(lambda kind=kind: any(isinstance(event, kind) for event in sink.events()))  # type: ignore[misc]
        since(name, began)
    now: list[Far | None] = [first]
    with _asking(sink, now, numbers) as served:
        until(lambda: bool(served))
        killed = time.monotonic()
        first.process.kill()
        now[0] = None
        with contextlib.suppress(KvprotoError):
            sink.fetch(ticket(next(numbers)), PROMPT, {"kv": [1]}).wait(30)
        since("heard", killed)
        first.process.join()
        began = time.monotonic()
        second = Far(first.place)
        since("started", began)
        stack.callback(second.close)
        began, before, now[0] = time.monotonic(), len(served), second
        until(lambda: len(served) > before)
        answers["served"] = served[before][1] - began
        answers["outage"] = served[before][1] - killed
    return answers


def frames(ways: int, kinds: int) -> dict[str, Any]:
    """The frames are made by the tests, which are imported for this part alone."""
    from session_frames import frames

    return frames(ways, kinds)


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[int, ...], tuple[int, ...]]] = {
    "latency": (latency, (2, 30, 100), (1, 1, 20)),
    "many": (many, (500, 2000), (8, 32)),
    "held": (held, (20, 100), (1, 20)),
    "floods": (floods, (10, 200), (1, 5)),
    "messages": (messages, (1_000_000,), (1_024,)),
    "transfers": (transfers, (100_000,), (2_000,)),
    "sessions": (sessions, (10_000,), (40,)),
    "recovery": (recovery, (3,), (1,)),
    "frames": (frames, (6, 64), (1, 4)),
}
"""The function of each part, with its numbers, and with those of a quick run, which only shows that it works."""


def ahead() -> bool:
    """Whether the scheduler gives this process, or its session, priority."""
    session = Path("/proc/self/autogroup")
    words = session.read_text().split() if session.exists() else []  # empty where the kernel keeps no groups
    return (bool(words) and int(words[-1]) < 0) or os.sched_getscheduler(0) != os.SCHED_OTHER


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    cuts = np.percentile(seconds, (50, 90, 99, 100)) * 1e6
    return {name: round(float(cut), 1) for name, cut in zip(("p50", "p90", "p99", "worst"), cuts, strict=True)}


def shown(answers: dict[str, Any], indent: str = "  ") -> None:
    """Print figures, and quantiles in microseconds in place of samples."""
    for name, value in answers.items():
        if name == "samples":
            continue
        if name == "worst":
            for row in value:
                figures = f"{row['bytes']:12,}{row['seconds'] * 1e3:8.1f} ms{row['memory'] / 2**20:7.1f} MiB"
                where = f"{row['to']}, {row['state']}, {row['way']}"
                print(f"{indent}{row['message']:14}{row['field']:32}{figures}  {where}")
        elif isinstance(value, dict) and not name.endswith("frames"):
            print(f"{indent}{name}")
            shown(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], float):
            print(f"{indent}{name:<24}{quantiles(value)} us, n {len(value)}")
        else:
            print(f"{indent}{name:<24}{value}")


def main() -> int:
    """Measure, print, keep; 1 if memory or descriptors have grown."""
    parser = arguments(__doc__, "session", quick="few of everything, to see that it works")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them by default")
    parser.add_argument("--number", type=int, help="of transfers or sessions, in place of the default")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {sorted(unknown)}")
    grown = []
    for name in args.parts or PARTS:
        measure, full, quick = PARTS[name]
        numbers = quick if args.quick else full if args.number is None else (*full[:-1], args.number)
        began, before = time.monotonic(), facts() | {"ahead": ahead()}
        answers = measure(*numbers)
        print(f"{name}: {time.monotonic() - began:.0f} s, load {before['load']} before")
        shown(answers)
        grown += [name] * any(not verdict["flat"] for verdict in answers.get("verdicts", {}).values())
        if args.out:
            earlier = json.loads(args.out.read_text()) if args.out.exists() else {}
            keep(args.out, earlier | {name: before | {"unit": "s", "found": rounded(answers)}})
    if grown and not args.quick:
        print(f"memory or descriptors have grown: {', '.join(grown)}")
    return int(bool(grown) and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
