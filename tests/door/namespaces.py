"""Two network namespaces, and between them a link that delays and loses packets, which needs nothing of the kernel but TUN."""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs

from tests.processes import FORKED

ADDRESSES = "10.213.77.1", "10.213.77.2"
DEVICE = "kv"
_NEWNET, _NEWNS, _SLAVE, _RECURSIVE = 0x40000000, 0x00020000, 1 << 19, 1 << 14
_SETIFF, _TUN, _BARE = 0x400454CA, 0x0001, 0x1000
_LONGEST = 2048


class NotHere(Exception):
    """This machine does not allow it; says why."""


@attrs.frozen
class Weather:
    """What a link does to packets, each way: seconds of delay, more of them at random, and the share that is lost."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


def enter(name: str) -> None:
    """Go on in a network namespace, with a /sys that shows its devices, where UCX looks for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        failed = (
            libc.setns(file.fileno(), _NEWNET)
            or libc.unshare(_NEWNS)
            or libc.mount(b"", b"/", b"none", _SLAVE | _RECURSIVE, None)
            or libc.mount(name.encode(), b"/sys", b"sysfs", 0, None)
        )
        if failed:
            raise OSError(ctypes.get_errno(), f"network namespace {name}")


def sent() -> int:
    """Bytes that this namespace has sent over the link."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


@contextlib.contextmanager
def linked(weather: Weather) -> Iterator[tuple[str, str]]:
    """Two namespaces that have the ADDRESSES, in their order; raises NotHere."""
    names = f"kvp{os.getpid()}", f"kvd{os.getpid()}"
    if shutil.which("ip") is None:
        raise NotHere("ip of iproute2 is not installed")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise NotHere("/dev/net/tun cannot be opened")
    relay = None
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "true")  # which mounts a /sys, as `enter` does
        here, there = FORKED.Pipe()
        relay = FORKED.Process(target=_relay, args=(names, weather, there), daemon=True)
        relay.start()
        there.close()
        if not here.poll(60):
            raise NotHere("no TUN device came up")
        if trouble := here.recv():
            raise NotHere(trouble)
        for name, address, other in zip(names, ADDRESSES, reversed(ADDRESSES), strict=True):
            _run("ip", "-n", name, "address", "add", address, "peer", other, "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        if relay is not None:
            relay.kill()
            relay.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"{' '.join(command)}: {done.stderr.strip()}")


def _relay(names: tuple[str, str], weather: Weather, line: Connection) -> None:
    """Carry packets from one namespace's device to the other's, until this process is killed."""
    try:
        ends = [_device(name) for name in names]
    except OSError as error:
        line.send(f"TUN: {error}")
        return
    line.send("")
    other, chance = {ends[0]: ends[1], ends[1]: ends[0]}, random.Random(1)
    held: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait = max(held[0][0] - time.monotonic(), 0) if held else None
        for end in select.select(ends, [], [], wait)[0]:
            packet = os.read(end, _LONGEST)
            if chance.random() >= weather.loss:
                count += 1
                due = time.monotonic() + weather.delay + chance.random() * weather.jitter
                heapq.heappush(held, (due, count, other[end], packet))
        while held and held[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(end, packet)


def _device(name: str) -> int:
    enter(name)
    made = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(made, _SETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN | _BARE))
    return made
