"""A Finder: which engines have most of a prompt's cache, for whoever routes prompts (draft)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import attrs
import numpy.typing as npt

from kvproto.door import options_of
from kvproto.errors import LocalError
from kvproto.net import Seed
from kvproto.node.driver import Driver
from kvproto.node.watching import WatchNode
from kvproto.options import Options
from kvproto.prompt import check_name
from kvproto.session import Party, new_incarnation
from kvproto.session.catalogue import SinkCatalogue
from kvproto.session.watching import WatchEndpoint
from kvproto.sink import check_seed, dialer_of
from kvproto.tiers.identity import Chain, namespace
from kvproto.wire.enums import ErrorCode, KeyForm, Tier

__all__ = ["Finder", "Held"]

_PATIENCE = 5.0
"""Seconds that `find` waits for a turn to end."""


@attrs.frozen
class Held:
    """What an engine has of a prompt."""

    address: str
    """As it was watched."""
    engine: str
    replica: int
    tokens: int
    """With which it can go on, from any tier, on all ranks."""
    device: int
    """The same of what lies on the device."""
    pages: int
    """Pages that its ranks have told of, of any prompt."""


class Finder:
    """Watches source engines, and finds those that hold the longest prefix of a prompt."""

    def __init__(
        self, sources: Mapping[str, str | None] | list[str], name: str | None = None, options: Options | None = None
    ) -> None:
        """`sources`: the address of one rank of each replica, and its public key, which a TCP address needs.

        `name` is what allow-lists know it by, None: one that nobody has; a later Finder of the same name takes the
        place of this one. Of the options count `keys`, `insecure` and `thread`. Raises LocalError for an address, a key
        or a name that may not be used.
        """
        chosen, seeds = options_of(options), dict(sources) if isinstance(sources, Mapping) else dict.fromkeys(sources)
        named = f"router-{secrets.token_hex(4)}" if name is None else name
        check_name("name", named)
        servers = {address: check_seed("sources", Seed(address, key), chosen) for address, key in seeds.items()}
        self._changed = threading.Condition()
        party = Party(named, 0, 0, new_incarnation(time.time(), secrets.randbits(20)))
        self._node = WatchNode(party, dialer_of(chosen))
        for address, server in servers.items():
            self._node.watch(address, server)
        self._driver = Driver(self._node, f"Finder {named!r}", self._deliver, chosen.thread, chosen.callbacks)
        self._threaded = chosen.thread

    def find(self, tokens: npt.ArrayLike, names: Mapping[str, str] | None = None) -> list[Held]:
        """What each engine has of a prompt that begins so, the longest first; one that is not known yet is left out.

        `names` are those of KVP-TIER-NAMESPACE, None: the engine's own. An engine may have given a page up since it
        told of it: then it computes it.
        """
        self._driver.check()
        space = None if names is None else namespace(names)
        chains: dict[tuple[bytes, int], Chain] = {}

        def ids(known: SinkCatalogue) -> tuple[int, list[bytes]]:
            head = known.head
            assert head is not None
            key = space or bytes(head.namespace), head.page
            if key not in chains:
                chains[key] = Chain(*key)
                chains[key].extend(tokens)
            return head.page, chains[key].ids(KeyForm(head.form))

        def ask() -> list[Held]:
            found = []
            for address, endpoint in self._node.endpoints.items():
                party, known = endpoint.party(), endpoint.known()
                if party is not None and known is not None:
                    told = [_lengths(each, *ids(each)) for each in known.values()]
                    both = {n: max(of[n] for of in told) for n in told[0] if all(n in of for of in told)}
                    near = max((n for n, tier in both.items() if tier == Tier.DEVICE), default=0)
                    pages = sum(len(each.pages) for each in known.values())
                    found.append(Held(address, party.engine, party.replica, max(both, default=0), near, pages))
            return sorted(found, key=lambda held: (-held.tokens, -held.device))

        made = self._driver.look(ask, _PATIENCE)
        if made is None:
            raise LocalError(ErrorCode.BUSY, "find", f"an answer within {_PATIENCE:.0f} s", "none", "ask again")
        return made

    def wait(self, timeout: float) -> bool:
        """Wait until all engines are known; whether they are. `why` says what is wrong with the others."""
        until = time.monotonic() + timeout
        while self.why():
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._threaded:
                with self._changed:
                    self._changed.wait(min(left, 0.1))
            else:
                self._driver.step(min(left, 0.1))
        return True

    def why(self) -> dict[str, str]:
        """Engines that are not known, by address, and why."""

        def said(endpoint: WatchEndpoint) -> str:
            return "no answer yet" if endpoint.refused is None else str(endpoint.refused)

        self._driver.check()
        unknown = self._driver.look(
            lambda: {a: said(e) for a, e in self._node.endpoints.items() if e.known() is None}, _PATIENCE
        )
        return dict.fromkeys(self._node.endpoints, "busy") if unknown is None else unknown

    def step(self, timeout: float = 0.0) -> None:
        """One turn, with Options(thread=False)."""
        self._driver.step(timeout)

    def close(self) -> None:
        """Say Goodbye to all."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _deliver(self, event: Any) -> None:
        with self._changed:
            self._changed.notify_all()


def _lengths(known: SinkCatalogue, page: int, ids: list[bytes]) -> dict[int, int]:
    """Tokens after which a rank can go on, and the tier of each."""
    found = {n * page: known.pages[id] for n, id in enumerate(ids, 1) if id in known.pages}
    return found | {0: int(Tier.DEVICE)}
