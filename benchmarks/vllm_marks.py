"""Times of one hand-over inside vLLM and kvproto: methods are wrapped while a benchmark asks for it, and cost nothing else.

A mark is (begin, end, name, detail, thread, process), nanoseconds of the monotonic clock, which all processes of a machine
share. `WRAPPED` names the methods. Meanwhile kvproto's I/O threads poll by a function in C that notes when the kernel has
returned: what passes from then until Python goes on is the wait for the interpreter's lock. So gcc has to be there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import select
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

__all__ = ["PATH", "WRAPPED", "begin", "budgets", "stop", "table", "take", "write"]

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
    "kvproto.sink.node:SinkNode": {"turn": "sink turn", "fetch": "sink fetch"},
    "kvproto.source.node:SourceNode": {"turn": "source turn"},
    "kvproto.session.sink_endpoint:SinkEndpoint": {"receive": "sink receives"},
    "kvproto.session.source_endpoint:SourceEndpoint": {
        "receive": "source receives", "done": "source says Done",
    },
    "kvproto.source.copies:Copies": {"start": "copy launch", "advance": "copy poll"},
    "kvproto.source.schedule:Scheduler": {"steps": "copy plan"},
    "kvproto.rank.checksums:Checksums": {"advance": "source checksums"},
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
        if not _noting:
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
        _polled()
        _wrapped = True
    _noting = True
    _marks.clear()


def stop() -> None:
    """Note nothing any more."""
    global _noting
    _noting = False


def take() -> list[Mark]:
    """What was noted since the last call."""
    found, _marks[:] = list(_marks), []
    return found


def write(path: str) -> None:
    """Write what was noted since the last call."""
    Path(path).write_text(json.dumps(take()))


PATH = (
    ("queue to decode's scheduler", "decode", "request in scheduler", 1),
    ("decode's scheduler step", "decode", "connector, orders", 1),
    ("queue to decode's worker", "decode", "connector, start loads", 0),
    ("pages named, Transfer sent", "decode", "sink sends", 1),
    ("socket, and wake-up of prefill's I/O thread", "prefill", "asleep", 1),
    ("prefill's interpreter lock", "prefill", "interpreter's lock", 1),
    ("Transfer read, planned", "prefill", "copy launch", 0),
    ("launch", "prefill", "copy launch", 1),
    ("copy, and poll of its event", "prefill", "source checksums", 0),
    ("prefill's checksums", "prefill", "source says Done", 0),
    ("Done sent", "prefill", "source sends", 1),
    ("socket, and wake-up of decode's I/O thread", "decode", "asleep", 1),
    ("decode's interpreter lock", "decode", "interpreter's lock", 1),
    ("Done read", "decode", "sink checksums begun", 0),
    ("decode's checksums", "decode", "sink arrived", 1),
    ("until decode's worker asks", "decode", "connector, results", 1),
    ("queue to decode's scheduler, again", "decode", "update scheduler", 1),
    ("vLLM's sleep", "decode", "schedule", 0),
    ("decode's scheduler step, again", "decode", "schedule", 1),
    ("forward and sampling", "decode", "update scheduler", 1),
)
"""The way of one prompt: what passes until the next mark of this name, on this side, begins (0) or ends (1)."""


def budget(sample: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each part of the hand-over of one prompt, from the call until the answer; of several ranks the last."""
    now = int(sample["asked"] * 1e9)
    parts = {}
    for part, role, name, edge in PATH:
        next_by_process: dict[int, int] = {}
        for side, began, ended, title, _, _, process in sample["marks"]:
            when = (began, ended)[edge]
            if (side, title) == (role, name) and when >= now:
                next_by_process[process] = min(when, next_by_process.get(process, when))
        then = max(next_by_process.values(), default=now)
        parts[part], now = (then - now) / 1e6, then
    return parts | {"answer to the client": sample["answered"] * 1e3 - now / 1e6}


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
