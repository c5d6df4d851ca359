"""Checks of addresses: their form, their need of CURVE, and whether hosts resolve (KVP-NET-CURVE, KVP-NET-INSECURE)."""

import os
import re
import socket
import stat
import threading
from pathlib import Path

import attrs

from kvproto.errors import LocalError, bad, check_type, check_whole
from kvproto.net.keys import check_public, read_tables

_LONGEST_PATH = 107
"""The most bytes in the path of a Unix socket."""
_HOST = re.compile(r"[A-Za-z0-9_.*-]+|\[[0-9A-Fa-f:.%\w]+\]")


@attrs.frozen
class Seed:
    """The address of one rank of a source replica, and the public key that all ranks of the source must have.

    Fields:
        address: The address of any rank; the others come with its Welcome.
        key: The 40 characters in the source's public.key; None if the address needs no key.
    """

    address: str
    key: str | None = None


def read_sources(path: str | Path, insecure: bool = False) -> dict[tuple[str, int], Seed]:
    """Read seeds, by engine and replica, from a TOML file with one [[source]] each: engine, replica, address, key.

    With `insecure`, as in Options, TCP addresses need no key (KVP-NET-KEY). Raises LocalError(OUT_OF_RANGE), which
    names the file and the wrong entry, also for a file that another user may write to.
    """
    seeds = dict[tuple[str, int], Seed]()
    fields = ("engine", "replica", "address", "key")
    for at, source in read_tables(Path(path), "a file of sources", "list them, each as [[source]]", "source", fields):
        for name in ("engine", "address"):
            check_type(f"{at}.{name}", source.get(name), str, "text")
        place = source["engine"], check_whole(f"{at}.replica", source.get("replica", 0), 0)
        if place in seeds:
            raise bad(at, "each engine and replica once", f"{place[0]} replica {place[1]} again", "remove one")
        if "key" in source:
            check_public(f"{at}.key", source["key"])
        elif encrypted(source["address"]) and not insecure:
            advice = "add it, the line of its public.key; read_sources(..., insecure=True) goes without"
            raise bad(f"{at}.key", f"the public key of the source at {source['address']}", "none", advice)
        seeds[place] = Seed(source["address"], source.get("key"))
    return seeds


def private_address(directory: str | Path, name: str) -> str:
    """The ipc address of a socket in a directory, which should be one that only this user can enter."""
    return f"ipc://{Path(directory) / name}"


def encrypted(address: str) -> bool:
    """Whether an address needs keys: every address but ipc does."""
    return not address.startswith("ipc://")


def is_wildcard(address: str) -> bool:
    """Whether an address stands for all interfaces, so that it cannot be dialled."""
    return address.partition("://")[2].rpartition(":")[0] in ("*", "0.0.0.0", "[::]")


def check_address(address: str, keyed: bool, insecure: bool) -> None:
    """Raise LocalError(OUT_OF_RANGE) for an address that may not be used; `keyed` if there are CURVE keys for it."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        _check_path(rest)
    elif scheme == "tcp":
        _check_host(address, rest)
        if not (keyed or insecure):
            advice = "`kvproto keygen` makes keys for Options(keys=...); Options(insecure=True), --insecure, needs none"
            raise _unusable("ipc, or TCP with CURVE keys", address, advice)
    else:
        raise _unusable("ipc:// or tcp://", address, "give a ZeroMQ address")


def _check_path(path: str) -> None:
    folder = Path(path).parent
    if path.startswith("@"):
        advice = "any user of this host can connect to an abstract socket: name a file, as in ipc:///run/kv/prefill-0"
        raise _unusable("a socket that is a file in a private directory", f"ipc://{path}, an abstract socket", advice)
    if not path or len(os.fsencode(path)) > _LONGEST_PATH:
        advice = "choose a directory with a shorter name"
        raise _unusable(f"ipc:// and the path of a file, of at most {_LONGEST_PATH} bytes", f"ipc://{path}", advice)
    if not folder.is_dir():
        raise _unusable("an existing directory", str(folder), "make it with mode 0700")
    mode = folder.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        advice = "make one for the sockets alone: mkdir -m 700"
        raise _unusable("a directory of this user with mode 0700", str(folder), advice)


def _check_host(address: str, rest: str) -> None:
    host, _, port = rest.rpartition(":")
    if _HOST.fullmatch(rest):
        raise _unusable("a host and a port", f"{address}, without a port", f"add it, such as {address}:7100")
    if not _HOST.fullmatch(host):
        raise _unusable("a host name, an IPv4 address, or an IPv6 address in brackets", address, "correct it")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise _unusable("a port, 0 to 65535 or *", address, "give a number")


def _unusable(mine: str, yours: str, advice: str) -> LocalError:
    return bad("address", mine, yours, advice)


_MOST_LOOKUPS = 8
"""The most names that are looked up at once; further ones are skipped."""


def is_named(address: str) -> bool:
    """Whether the host of an address is a name, not a number."""
    host = _host_of(address)
    return encrypted(address) and host != "*" and host[:1] != "[" and not host.replace(".", "").isdigit()


def resolved(host: str) -> str:
    """The IPv4 address of a host, or its IPv6 address in brackets if it has no other; raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    numbers = sorted((family == socket.AF_INET6, n, str(place[0])) for n, (family, *_, place) in enumerate(found))
    ipv6, _, number = numbers[0]
    return f"[{number}]" if ipv6 else number


def numbered(address: str) -> str:
    """An address with a number in place of its host's name, unless that is not known; it may be that of an interface.

    ZeroMQ looks up no names that it binds to.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        return f"{scheme}://{resolved(host)}:{port}" if is_named(address) else address
    except (OSError, UnicodeError):
        return address


class HostNames:
    """Host names that were dialled, which ZeroMQ looks up as IPv4 or as IPv6, and for ever without reporting it."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._unknown: dict[str, str] = {}
        self._ipv6: set[str] = set()

    def is_ipv6(self, address: str) -> bool:
        """Whether an address is reached by IPv6 alone, as far as is known."""
        host = _host_of(address)
        return host[:1] == "[" or host in self._ipv6

    def look_up(self, address: str) -> None:
        """Look up the host name of an address in a new thread, as a name server may take long to answer."""
        host = _host_of(address)
        if not is_named(address) or host in self._asking or len(self._asking) >= _MOST_LOOKUPS:
            return
        self._asking.add(host)
        try:
            threading.Thread(target=self._ask, args=(host,), name="kvproto names", daemon=True).start()
        except RuntimeError:  # no memory for a thread; ZeroMQ still looks the name up
            self._asking.discard(host)

    def _ask(self, host: str) -> None:
        try:
            (self._ipv6.add if resolved(host)[:1] == "[" else self._ipv6.discard)(host)
            self._unknown.pop(host, None)
        except (OSError, UnicodeError) as error:
            self._unknown[host] = getattr(error, "strerror", None) or str(error)
        self._asking.discard(host)

    def advice(self, address: str) -> str:
        """The advice about an address that does not answer."""
        if why := self._unknown.get(_host_of(address)):
            return f"its host name cannot be resolved here: {why}; correct the address, or the name service"
        return "check that it runs at this address"


def _host_of(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0]
