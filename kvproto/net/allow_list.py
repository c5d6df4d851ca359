"""The allow-list: what the owner of a client key may claim to be (KVP-NET-UNKNOWN, KVP-NET-ALLOW, KVP-NET-REVOKE)."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import LocalError, RemoteError, bad, listed
from kvproto.net.keys import check_public, read_tables
from kvproto.net.limits import LIST_CHECK
from kvproto.session import Party
from kvproto.wire.enums import ErrorCode, Role, word

_log = logging.getLogger("kvproto")
_FIELDS = ("key", "engine", "replicas", "ranks", "roles")
_SHOWN = 8
"""The most numbers of an entry that messages show."""


@attrs.frozen
class Allowed:
    """One `[[client]]` of the list; None allows all numbers."""

    engine: str
    replicas: frozenset[int] | None
    ranks: frozenset[int] | None
    roles: frozenset[Role]

    def covers(self, party: Party, role: int) -> bool:
        """Whether the client may claim to be this party in this role."""
        return (
            self.engine == party.engine
            and (self.replicas is None or party.replica in self.replicas)
            and (self.ranks is None or party.rank in self.ranks)
            and role in self.roles
        )

    def __str__(self) -> str:
        numbers = {"replicas": self.replicas, "ranks": self.ranks}
        words = [f"{name} [{listed(sorted(only), _SHOWN)}]" for name, only in numbers.items() if only is not None]
        return " ".join([self.engine, *words, "as", ", ".join(sorted(role.name for role in self.roles))])


class AllowList:
    """An allow-list in a file."""

    def __init__(self, path: str | Path) -> None:
        """Read the list; raises LocalError(OUT_OF_RANGE), which names the file and the wrong entry."""
        self.path = Path(path)
        self._clients: Mapping[bytes, tuple[Allowed, ...]] = {}
        self._seen: object = None
        self._next_look = 0.0
        self._clients, self._seen = self._read(), self._state()

    def knows(self, key: bytes) -> bool:
        """Whether a client with this key may connect at all."""
        return key in self._clients

    def name(self, key: bytes) -> str:
        """A client's name for display: the engines that its key may be, and the key."""
        engines = sorted({client.engine for client in self._clients.get(key, ())})
        return f"{listed(engines) or 'unknown'} (key {key.decode(errors='replace')})"

    def check(self, key: bytes, party: Party, role: int) -> None:
        """Raise RemoteError(NOT_ALLOWED) if a client with this key may not claim to be this party (KVP-NET-ALLOW)."""
        mine = self._clients.get(key, ())
        if not any(client.covers(party, role) for client in mine):
            said = f"{party.engine} replica {party.replica} rank {party.rank} as {word(Role, role)}"
            advice = "the operator of the source adds it to the allow-list"
            known = listed(mine, between="; ") or "nothing for this key"
            raise RemoteError(ErrorCode.NOT_ALLOWED, "engine", known, said, advice)

    def renew(self, now: float) -> bool:
        """Read the file again if it has changed, checking every `LIST_CHECK` seconds; whether its content differs."""
        if now < self._next_look:
            return False
        self._next_look = now + LIST_CHECK
        state = self._state()
        if state == self._seen:
            return False
        self._seen, before = state, self._clients
        try:
            self._clients = self._read()
            _log.info("read the allow-list %s again: it has the keys of %d clients", self.path, len(self._clients))
        except LocalError as error:
            _log.error("cannot read the allow-list again, so its earlier content applies: %s", error)
        return self._clients != before

    def _state(self) -> object:
        try:
            stat = os.stat(self.path)
        except OSError as error:
            return error.errno
        return stat.st_ino, stat.st_ctime_ns, stat.st_size  # ctime also changes with mode and owner

    def _read(self) -> dict[bytes, tuple[Allowed, ...]]:
        allowed: dict[bytes, tuple[Allowed, ...]] = {}
        advice = "list the clients that may connect, each as [[client]]"
        for path, client in read_tables(self.path, "an allow-list", advice, "client", _FIELDS):
            key = check_public(f"{path}.key", client.get("key"))
            allowed[key] = (*allowed.get(key, ()), _allowed(path, client))
        return allowed


def _allowed(path: str, client: Mapping[str, Any]) -> Allowed:
    engine = client.get("engine")
    if not isinstance(engine, str) or not engine:
        raise bad(f"{path}.engine", "the engine's name", repr(engine), "name the engine that owns the key")
    roles = client.get("roles", ["sink"])
    known = {role.name.lower(): role for role in Role}
    if not isinstance(roles, list) or not roles or not all(isinstance(r, str) and r in known for r in roles):
        raise bad(f"{path}.roles", f"a list of {', '.join(known)}", repr(roles), "correct it")
    replicas, ranks = (_numbers(path, client, name) for name in ("replicas", "ranks"))
    return Allowed(engine, replicas, ranks, frozenset(known[role] for role in roles))


def _numbers(path: str, client: Mapping[str, Any], name: str) -> frozenset[int] | None:
    numbers = client.get(name)
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise bad(f"{path}.{name}", "a list of whole numbers", repr(numbers), f"leave {name} out to allow all")
    return frozenset(numbers)
