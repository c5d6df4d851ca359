"""Times of one hand-over inside vLLM and kvproto: methods are wrapped while a benchmark asks for it, and cost nothing else.

A mark is (begin, end, name, detail, thread, process), nanoseconds of the monotonic clock, which all processes of a machine
share. `WRAPPED` names the methods. Meanwhile kvproto's I/O threads poll by a function in C that notes when the kernel has
returned: what passes from then until Python goes on is the wait for the interpreter's lock. Without gcc nothing says it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from kvproto.rank import driver

__all__ = ["WRAPPED", "begin", "budgets", "stop", "table", "take", "write"]

Mark = tuple[int, int, str, str, str, int]

WRAPPED = {
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "add_request": "request in scheduler", "schedule": "schedule", "update_from_output": "update scheduler",
    },
    "vllm.v1.engine.core:EngineCore": {"preprocess_add_request": "read request", "post_step": "step over"},
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": {"execute_model": "execute", "sample_tokens": "sample"},
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": {"execute_model": "execute", "sample_tokens": "sample"},
    "vllm_connectors:Ours": {
        "on_new_request": "connector, new request", "update_state_after_alloc": "connector, blocks",
        "build_connector_meta": "connector, orders", "start_load_kv": "connector, start loads",
        "wait_for_save": "connector, computed", "get_transfer_results": "connector, results",
    },
    "kvproto.sink.sink:Sink": {"fetch": "Sink.fetch"},
    "kvproto.sink.node:SinkNode": {"turn": "sink turn", "fetch": "sink fetch"},
    "kvproto.sink.registered_pool:RegisteredPool": {"sums": "sink's rows lowered"},
    "kvproto.source.node:SourceNode": {"turn": "source turn"},
    "kvproto.session.sink_endpoint:SinkEndpoint": {"receive": "sink receives"},
    "kvproto.session.source_endpoint:SourceEndpoint": {
        "receive": "source receives", "done": "source says Done",
    },
    "kvproto.source.copies:Copies": {"start": "copy launch", "advance": "copy poll"},
    "kvproto.source.schedule:Scheduler": {"steps": "copy plan"},
    "kvproto.copying.lowering:Pair": {"lower": "lowered"},
    "kvproto.rank.checksums:Checksums": {"advance": "source checksums"},
    "kvproto.transport.cuda.copier:Copier": {"submit": "copy submitted", "begin_checksums": "sums submitted"},
    "kvproto.transport.cuda.kernel:SumTable": {"write": "image of sums written"},
    "kvproto.sink.verification:Verification": {"add": "sink checksums begun", "advance": "sink checksums"},
    "kvproto.sink.link:SourceLink": {"verified": "sink arrived"},
    "kvproto.net:Dialer": {"send": "sink sends"},
    "kvproto.net:Listener": {"send": "source sends"},
}  # fmt: skip
"""By module and class: names of marks by method. Those that a release lacks are left out."""

_C = """
#include <sys/epoll.h>
#include <time.h>
int polled(int fd, struct epoll_event *events, int most, int milliseconds, long long *when) {
    int n = epoll_wait(fd, events, most, milliseconds);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *when = now.tv_sec * 1000000000LL + now.tv_nsec;
    return n;
}
"""
_GCC = shutil.which("gcc") is not None
_marks: list[Mark] = []
_wrapped = _noting = False


class _Event(ctypes.Structure):
    _pack_ = 1  # as on x86-64
    _fields_ = (("events", ctypes.c_uint32), ("fd", ctypes.c_int32), ("more", ctypes.c_int32))


class _Polling:
    """An epoll that notes when the kernel returned, and when this thread had the interpreter again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        for name in ("register", "unregister", "fileno", "close"):
            setattr(self, name, getattr(self._epoll, name))
        self._events, self._when = (_Event * 64)(), ctypes.c_longlong()

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        if not _noting or not _GCC:
            return self._epoll.poll(timeout)
        began = time.monotonic_ns()
        n = _polled()(self._epoll.fileno(), self._events, 64, int(timeout * 1000), ctypes.byref(self._when))
        now, woken = time.monotonic_ns(), self._when.value
        if n:
            _note(began, woken, "asleep")
            _note(woken, now, "interpreter's lock")
        return [(self._events[i].fd, self._events[i].events) for i in range(max(n, 0))]


driver.select = SimpleNamespace(epoll=_Polling, EPOLLIN=select.EPOLLIN)  # type: ignore[attr-defined]


@functools.cache
def _polled() -> Callable[..., int]:
    folder = Path(tempfile.mkdtemp())
    (folder / "polled.c").write_text(_C)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", folder / "polled.so", folder / "polled.c"], check=True)
    function = ctypes.CDLL(str(folder / "polled.so")).polled
    function.restype = ctypes.c_int
    return function


def _note(began: int, ended: int, name: str, detail: str = "") -> None:
    _marks.append((began, ended, name, detail, threading.current_thread().name, os.getpid()))


def _wrap(owner: type, method: str, name: str) -> None:
    before = getattr(owner, method, None)
    if before is None:
        return

    @functools.wraps(before)
    def marked(*args: Any, **named: Any) -> Any:
        if not _noting:
            return before(*args, **named)
        began = time.monotonic_ns()
        try:
            return before(*args, **named)
        finally:
            _note(began, time.monotonic_ns(), name)

    setattr(owner, method, marked)


def begin() -> None:
    """Wrap the methods in this process, once, and note times from now on."""
    global _noting, _wrapped
    if not _wrapped:
        for place, methods in WRAPPED.items():
            module, _, name = place.partition(":")
            try:
                owner = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
            for method, title in methods.items():
                _wrap(owner, method, title)
        if _GCC:
            _polled()
        _wrapped = True
    _noting = True
    _marks.clear()


def stop() -> None:
    """Note nothing any more."""
    global _noting
    _noting = False


def take() -> list[Mark]:
    """Marks since the last call."""
    found, _marks[:] = list(_marks), []
    return found


def write(path: str) -> None:
    """Write the marks since the last call."""
    Path(path).write_text(json.dumps(take()))


_BEFORE = (
    ("queue to decode's scheduler", "decode", "request in scheduler", 1),
    ("decode's scheduler step", "decode", "connector, orders", 1),
    ("queue to decode's worker", "decode", "connector, start loads", 0),
    ("pages named, Transfer sent", "decode", "sink sends", 0),
    ("socket, and wake-up of prefill's I/O thread", "prefill", "asleep", 1),
    ("prefill's interpreter lock", "prefill", "interpreter's lock", 1),
    ("Transfer read, copy planned", "prefill", "copy launch", 0),
    ("launch", "prefill", "copy launch", 1),
    ("copy, and poll of its event", "prefill", "source checksums", 0),
    ("prefill's checksums", "prefill", "source says Done", 0),
    ("Done sent", "prefill", "source sends", 0),
    ("socket, and wake-up of decode's I/O thread", "decode", "asleep", 1),
    ("decode's interpreter lock", "decode", "interpreter's lock", 1),
    ("Done read", "decode", "sink checksums begun", 0),
    ("decode's checksums", "decode", "sink arrived", 1),
)
"""Parts of the way of one prompt until it has arrived: each ends when a mark of this name, on this side, begins (0) or
ends (1).
"""
_WOKEN = ("asleep", "interpreter's lock")
"""Marks that are not there if a thread did not sleep."""


def budget(sample: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each part of the hand-over of one prompt, from the call until its first token.

    They are found from the end: of several ranks those count that were the last.
    """
    asked, answered = int(sample["asked"] * 1e9), int(sample["answered"] * 1e9)
    times: dict[tuple[str, str, int], list[int]] = {}
    for side, began, ended, title, _, _, _ in sample["marks"]:
        times.setdefault((side, title, 0), []).append(began)
        times.setdefault((side, title, 1), []).append(ended)

    def latest(side: str, name: str, edge: int, until: int) -> int:
        return max((when for when in times.get((side, name, edge), ()) if asked <= when <= until), default=asked)

    def next_(name: str, edge: int, since: int) -> int:
        return min((when for when in times.get(("decode", name, edge), ()) if since <= when), default=since)

    sampled = next_("sample", 0, asked)
    arrived = now = latest("decode", "sink arrived", 1, sampled)
    ends = [arrived]
    for (_, side, name, edge), before in zip(_BEFORE[-2::-1], _BEFORE[-3::-1] + _BEFORE[:1], strict=True):
        then = latest(side, name, edge, now)
        if name in _WOKEN:
            sent = next(each for each in _BEFORE[_BEFORE.index(before) :: -1] if each[2] not in _WOKEN)
            then = max(then, latest(sent[1], sent[2], sent[3], now))
        ends.append(then)
        now = then
    seen = next_("connector, results", 1, arrived)
    scheduled = latest("decode", "schedule", 0, sampled), latest("decode", "schedule", 1, sampled)
    updated = next_("update scheduler", 1, sampled)
    names = [part for part, _, _, _ in _BEFORE] + [
        "until decode's worker asks", "vLLM's next steps, with their sleep", "decode's scheduler step, again",
        "forward and sampling", "answer to the client",
    ]  # fmt: skip
    all_ = [asked, *reversed(ends), seen, *scheduled, updated, answered]
    return {name: (b - a) / 1e6 for name, a, b in zip(names, all_, all_[1:], strict=False)}


def budgets(samples: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By the length of single prompts: milliseconds of each part, of each time."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        if len(sample["lengths"]) == 1:
            for part, milliseconds in budget(sample).items():
                found.setdefault(str(sample["lengths"][0]), {}).setdefault(part, []).append(round(milliseconds, 4))
    return found


def table(parts: dict[str, list[float]]) -> str:
    """Lines of the parts of a hand-over: median, least and most."""
    lines = [
        f"  {median(values):8.3f}  ({min(values):.3f} to {max(values):.3f})  {part}" for part, values in parts.items()
    ]
    return "\n".join([*lines, f"  {median(map(sum, zip(*parts.values(), strict=True))):8.3f}  in all"])
