"""Proof that a process has ended, and what is none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import attrs
import pytest

from kvproto.transport.process import Watch, boot_id, pid_namespace, start_time, this_process
from kvproto.wire.messages import Process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.communicate()


def name(pid: int) -> Process:
    start = start_time(pid)
    assert start is not None
    return attrs.evolve(this_process(), pid=pid, start=start)


def ended(watch: Watch) -> bool:
    deadline = time.monotonic() + 20
    while not watch.ended and time.monotonic() < deadline:
        time.sleep(0.001)
    return watch.ended


def test_this_process_has_a_name() -> None:
    mine = this_process()
    assert (mine.boot, mine.namespace, mine.pid) == (boot_id(), pid_namespace(), os.getpid())
    assert mine.start == start_time(os.getpid())


def test_a_killed_process_has_ended_also_before_it_is_reaped(other: subprocess.Popen[bytes]) -> None:
    watch = Watch.of(name(other.pid))
    assert watch is not None
    assert not watch.ended
    os.kill(other.pid, signal.SIGKILL)
    assert ended(watch)
    assert other.returncode is None  # nobody has waited for it


def test_a_stopped_process_has_not_ended(other: subprocess.Popen[bytes]) -> None:
    watch = Watch.of(name(other.pid))
    assert watch is not None
    os.kill(other.pid, signal.SIGSTOP)
    assert not watch.ended
    watch.close()


def test_a_process_that_is_gone_has_ended(other: subprocess.Popen[bytes]) -> None:
    gone = name(other.pid)
    other.kill()
    other.wait()
    watch = Watch.of(gone)
    assert watch is not None
    assert watch.ended


@pytest.mark.parametrize("change", [{"start": 1}, {"namespace": 1}, {"boot": bytes(16)}, {"pid": 2**32 - 1}])
def test_what_cannot_be_told_from_here_is_no_proof(other: subprocess.Popen[bytes], change: dict[str, int]) -> None:
    """KVP-REG-DEATH"""
    assert Watch.of(attrs.evolve(name(other.pid), **change)) is None
