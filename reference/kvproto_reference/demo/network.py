"""Keys, addresses and network namespaces for engines that connect over TCP, set up as an operator would."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvproto.net import make_keys

from ..errors import EngineError
from .options import rank_address

LOOPBACK = "127.0.0.1"
_HOSTS = {"prefill": "10.213.78.1", "decode": "10.213.78.2"}
_TRIES = 100
_NEWNET, _NEWNS, _SLAVE, _RECURSIVE = 0x40000000, 0x00020000, 1 << 19, 1 << 14
"""Linux flags of setns, unshare and mount: network namespace, mount namespace, and keeping mounts to the latter."""


def key_folders(folder: Path) -> tuple[Path, Path]:
    """Make a folder of keys for each engine, and allow decode's at prefill; returns both folders, prefill's first."""
    prefill, decode = folder / "prefill-keys", folder / "decode-keys"
    make_keys(prefill)
    public = make_keys(decode).public.decode()
    (prefill / "allow.toml").touch(0o600)  # whatever the umask
    (prefill / "allow.toml").write_text(f'[[client]]\nkey = "{public}"\nengine = "decode"\n')
    return prefill, decode


def free_address(replicas: int, ranks: int) -> str:
    """A loopback address with free ports for all replicas and ranks, counted from it; raises EngineError."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind((LOOPBACK, 0))
            address = f"tcp://{LOOPBACK}:{first.getsockname()[1]}"
            try:
                for place in range(1, replicas * ranks):
                    other = rank_address(address, *divmod(place, ranks))
                    stack.enter_context(socket.socket()).bind((LOOPBACK, int(other.rpartition(":")[2])))
            except (OSError, EngineError):
                continue
            return address
    raise EngineError(f"no {replicas * ranks} free ports at {LOOPBACK}")


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[dict[str, str], str]]:
    """Make two linked network namespaces: their names by engine, and prefill's address; raises EngineError."""
    if shutil.which("ip") is None:
        raise EngineError("no network namespaces here (ip of iproute2 is not installed); --tcp is over loopback")
    names = {role: f"kvproto-{role}-{os.getpid()}" for role in _HOSTS}
    try:
        for name in names.values():
            _ip("netns", "add", name)
            _ip("netns", "exec", name, "true")  # which mounts a /sys, as `enter` does
        here, there = names["prefill"], names["decode"]
        _ip("-n", here, "link", "add", "kv", "type", "veth", "peer", "name", "kv", "netns", there)
        for role, name in names.items():
            _ip("-n", name, "address", "add", f"{_HOSTS[role]}/30", "dev", "kv")
            for device in ("kv", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield names, f"tcp://{_HOSTS['prefill']}:7100"
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        said = f"ip {' '.join(words)}: {done.stderr.strip()}"
        raise EngineError(f"no network namespaces here ({said}); --tcp is over loopback")


def enter(namespace: str) -> None:
    """Move this process and its children into a network namespace, with a /sys that shows its devices.

    `ip netns exec` does the same, and UCX finds its network devices in /sys. UCX is limited to TCP, so that it uses the
    link, as between two hosts, instead of memory that only one host shares. Raises EngineError.
    """
    os.environ.setdefault("UCX_TLS", "tcp")
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        failed = (
            libc.setns(file.fileno(), _NEWNET)
            or libc.unshare(_NEWNS)
            or libc.mount(b"", b"/", b"none", _SLAVE | _RECURSIVE, None)
            or libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None)
        )
        if failed:
            raise EngineError(f"network namespace {namespace}: {os.strerror(ctypes.get_errno())}")
