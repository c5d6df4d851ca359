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
from types import SimpleNamespace
from typing import Any

from kvproto.rank import driver

__all__ = ["WRAPPED", "begin", "take", "write"]

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
_begun = False


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
        if not _begun:
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
        began = time.monotonic_ns()
        try:
            return before(*args, **named)
        finally:
            _note(began, time.monotonic_ns(), name)

    setattr(owner, method, marked)


def begin() -> None:
    """Wrap the methods in this process, once, and forget what was noted."""
    global _begun
    if not _begun:
        for place, methods in WRAPPED.items():
            module, _, name = place.partition(":")
            try:
                owner = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
            for method, title in methods.items():
                _wrap(owner, method, title)
        _polled()
        _begun = True
    _marks.clear()


def take() -> list[Mark]:
    """What was noted since the last call."""
    found, _marks[:] = list(_marks), []
    return found


def write(path: str) -> None:
    """Write what was noted since the last call."""
    Path(path).write_text(json.dumps(take()))
