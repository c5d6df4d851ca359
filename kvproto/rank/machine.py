"""The services of the machine that a rank uses: clocks, randomness, sockets, threads and processes."""

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Condition, Thread
from typing import Any

import attrs

from kvproto.net import Dialer, Listener
from kvproto.transport.process import Watch, attest, this_process
from kvproto.wire.messages import Process


def _serve(calls: Any, count: int) -> None:
    for i in range(count):
        Thread(target=calls.serve, name=f"tiers-{i}", daemon=True).start()


@attrs.define
class Machine:
    """The real services; a simulation assigns others before it opens a Source or Sink."""

    getpid: Callable[[], int] = os.getpid
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back, by which all timers run."""
    time: Callable[[], float] = time.time
    """Seconds since 1970, from which incarnations are made."""
    randbelow: Callable[[int], int] = secrets.randbelow
    """A number from 0 on, below a bound, that nobody can guess."""
    executor: Callable[[], Executor] = lambda: ThreadPoolExecutor(1, "kvproto background")
    """Makes a thread for long work."""
    serve: Callable[[Any, int], None] = _serve
    """Has so many threads do the calls of a `CallQueue` of tiers."""
    wait_for: Callable[[Condition, Callable[[], bool], float], bool] = Condition.wait_for
    listener: Callable[..., Listener] = Listener
    dialer: Callable[..., Dialer] = Dialer
    process: Callable[[], Process] = this_process
    attest: Callable[[bytes, bool], None] = attest
    watch: Callable[[Process], Watch | None] = Watch.of


machine = Machine()
