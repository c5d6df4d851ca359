"""Sources by the names of their pods: one name for each replica, looked up again and again."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Mapping

from kvproto import LocalError
from kvproto.errors import ErrorCode, bad
from kvproto_discovery.rows import Replica, Row

__all__ = ["Dns"]

_RANGE = re.compile(r"\{(\d{1,4})-(\d{1,4})\}")
_MOST = 256
"""The most names of one engine."""
_ENOUGH = 3
"""Names that cannot be looked up, one after the other, after which no more are tried."""
_GONE = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Errors by which a resolver says that a name has no address; others say that it does not know."""


class Dns:
    """A directory of names such as those that a headless service gives the pods of a StatefulSet.

    Each replica has a name with A or AAAA records. A name whose address changes is dialled at the new one; a name
    without records has left; one that cannot be looked up keeps the address that it had.
    """

    def __init__(self, engines: Mapping[str, str], key: str | None = None, every: float = 2.0) -> None:
        """`engines` are the hosts of each, "HOST:PORT" (replica 0), or with a range: "prefill-{0-3}.prefill:7100".

        `key` is the public key of all of them. They are looked up `every` so many seconds. Raises
        LocalError(OUT_OF_RANGE).
        """
        self._key, self._every = key, every
        self._names = {(engine, n): name for engine, names in engines.items() for n, name in _names(names).items()}
        self._replicas = {engine: max(n for name, n in self._names if name == engine) + 1 for engine in engines}
        self._known: dict[Replica, str] = {}
        """The address of each replica that has one."""

    def watch(self, stop: threading.Event) -> Iterator[Mapping[Replica, Row]]:
        """All sources, at first and after each change; raises LocalError while nothing can be looked up."""
        told: dict[Replica, str] | None = None
        while not stop.is_set():
            found = self._look_all()
            self._known = {n: place for n in self._names if (place := self._now(n, found.get(n))) is not None}
            if self._known != told:
                told = dict(self._known)
                yield {replica: self._row(replica, address) for replica, address in told.items()}
            stop.wait(self._every)

    def _look_all(self) -> dict[Replica, list[str] | OSError]:
        """The addresses of all names, or of few if the first cannot be looked up; raises LocalError if none can."""
        found: dict[Replica, list[str] | OSError] = {}
        for replica in self._names:
            found[replica] = self._look(replica)
            if len(found) >= _ENOUGH and all(isinstance(each, OSError) for each in found.values()):
                break
        if all(isinstance(each, OSError) for each in found.values()):
            first = next(iter(found))
            mine, advice = "an answer of the resolver", "see resolv.conf; the sources known so far stay"
            raise LocalError(ErrorCode.ABORTED, f"dns {self._names[first][0]}", mine, str(found[first]), advice)
        return found

    def _row(self, replica: Replica, address: str) -> Row:
        engine, number = replica
        place = f"{f'[{address}]' if ':' in address else address}:{self._names[replica][1]}"
        return Row(
            engine=engine, replica=number, address=f"tcp://{place}", key=self._key, replicas=self._replicas[engine]
        )

    def _look(self, replica: Replica) -> list[str] | OSError:
        """The addresses of a replica's name, or the error for which they are not known."""
        try:
            found = socket.getaddrinfo(*self._names[replica], type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            return [] if error.errno in _GONE else error
        except (OSError, UnicodeError) as error:
            return OSError(str(error))
        return [str(place[0]) for *_, place in found]

    def _now(self, replica: Replica, found: list[str] | OSError | None) -> str | None:
        """The address of a replica: the one it had, if it has it still or nobody knows, else the first."""
        known = self._known.get(replica)
        if found is None or isinstance(found, OSError) or known in found:
            return known
        return found[0] if found else None


def _names(names: str) -> dict[int, tuple[str, int]]:
    """The host and port of each replica that a text with a range stands for; raises LocalError(OUT_OF_RANGE)."""
    host, _, port = names.rpartition(":")
    found = _RANGE.findall(host)
    low, high = (int(n) for n in found[0]) if found else (0, 0)
    plain = host and port.isdecimal() and 0 < int(port) < 65536 and len(found) < 2 and "{" not in _RANGE.sub("", host)
    if not plain:
        raise bad("dns", "HOST:PORT, with one range such as {0-3} at most", repr(names), "correct it")
    if not low <= high < low + _MOST:
        raise bad("dns", f"a range that rises, of {_MOST} at most", f"{{{low}-{high}}}", "correct it")
    return {n: (_RANGE.sub(str(n), host.strip("[]")), int(port)) for n in range(low, high + 1)}
