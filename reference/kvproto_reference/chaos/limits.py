"""Shortages and oddities that an engine of chaos causes itself: they are real, and affect only its process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproto import KvprotoError
from kvproto.transport.shm import memory as memory_of_kvproto

__all__ = ["descriptors", "fill_shm", "fork", "lift", "memory", "opened", "seal_nothing", "shorten"]

_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 16384, 1 << 18
_UNLIMITED = {each: resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)}
_LINGER = 2.0
"""The most seconds for which a child lives."""


def opened() -> Counter[str]:
    """Descriptors of this process, by what they are."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return found


def descriptors(left: int) -> None:
    """Let this process open only `left` more descriptors."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    _set(resource.RLIMIT_NOFILE, highest + left)


def memory(left: int) -> None:
    """Let this process map only `left` more MiB."""
    _set(resource.RLIMIT_AS, int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (left << 20))


def _set(which: int, soft: int) -> None:
    resource.setrlimit(which, (soft, _UNLIMITED[which][1]))


def lift() -> None:
    """Restore all limits."""
    for which, both in _UNLIMITED.items():
        resource.setrlimit(which, both)


def fill_shm() -> bool:
    """Give this process a separate /dev/shm that is full; returns False if the machine does not allow that."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
        return False
    try:
        Path("/dev/shm/full").write_bytes(bytes(1 << 20))
    except OSError:
        return True
    return False


def shorten() -> str:
    """Try to shorten all memory that peers may have mapped: "shorter", "refused", or "nothing" without a descriptor."""
    done, names = [], list[str]()
    with contextlib.suppress(OSError):
        names = os.listdir("/proc/self/fd")
    for name in names:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:kvproto"):
                continue
            if not os.fstat(int(name)).st_size:
                continue
            os.ftruncate(int(name), 0)
            done.append("shorter")
        except PermissionError:
            done.append("refused")
        except OSError:
            continue
    return "shorter" if "shorter" in done else "refused" if done else "nothing"


def seal_nothing() -> None:
    """Make this process neither seal its memory nor require seals of peers, a fault that the checker has to find."""
    changed = vars(fcntl) | {"fcntl": lambda *_: fcntl.F_SEAL_SHRINK}
    vars(memory_of_kvproto)["fcntl"] = types.SimpleNamespace(**changed)


def fork(door: Any, seconds: float) -> Callable[[], None]:
    """Fork a child that calls the door and lingers; returns what reaps it, and raises if the door did not refuse."""
    child = os.fork()
    if not child:
        refused = False
        try:
            door.fileno()
        except KvprotoError:
            refused = True
        time.sleep(min(seconds, _LINGER))
        os._exit(0 if refused and "memfd:kvproto" not in Path("/proc/self/maps").read_text() else 1)

    def reap() -> None:
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status):
            raise AssertionError("a forked child could use the door, or has the memory")

    return reap
