"""A Finder tells a router which engines hold most of a prompt's cache (draft)."""

import secrets
import threading
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.closing import Closing
from kvproto.errors import KvprotoError, LocalError
from kvproto.net import RECEIVE_TIME, Dialer, Seed
from kvproto.options import Options
from kvproto.prompt import check_name
from kvproto.rank.base import options_of
from kvproto.rank.driver import Driver
from kvproto.rank.machine import machine
from kvproto.session import Party, new_incarnation
from kvproto.session.catalogue import SinkCatalogue
from kvproto.session.watching import WatchEndpoint
from kvproto.sink import check_seed, dialer_of
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.wire.enums import ErrorCode, KeyForm, Tier

_MOST_PAGES, _MOST_LOOKS = 1 << 17, 1 << 20
"""The first pages of a prompt that `find` names, and how many of these it looks for at all ranks of an engine."""
_PATIENCE = 5.0
"""Seconds for which `find` waits for a turn to end."""


@attrs.frozen
class Held:
    """The part of a prompt that an engine holds."""

    address: str
    """The address that the Finder watches."""
    engine: str
    replica: int
    tokens: int
    """Tokens of the longest prefix after which every rank can continue, from any tier."""
    device: int
    """Tokens of the longest such prefix that lies on the device."""
    pages: int
    """Pages of any prompt that its ranks have announced."""


class Finder(Closing):
    """Watches source engines, and finds the engines that hold the longest prefix of a prompt."""

    def __init__(
        self, sources: Mapping[str, str | None] | list[str], name: str | None = None, options: Options | None = None
    ) -> None:
        """Watch `sources`: the address of one rank of each replica, with its public key, which a TCP address needs.

        `name` is the client's name in allow-lists (None: a random one); a later Finder of the same name replaces this
        one. Of the options, `keys`, `insecure`, `thread` and `callbacks` are used. Raises LocalError(OUT_OF_RANGE) for
        an address, a key or a name that cannot be used.
        """
        chosen, seeds = options_of(options), dict(sources) if isinstance(sources, Mapping) else dict.fromkeys(sources)
        named = f"router-{secrets.token_hex(4)}" if name is None else name
        check_name("name", named)
        servers = {address: check_seed("sources", Seed(address, key), chosen) for address, key in seeds.items()}
        self._changed = threading.Condition()
        party = Party(named, 0, 0, new_incarnation(machine.time(), machine.randbelow(1 << 20)))
        self._node = WatchNode(party, dialer_of(chosen), servers)
        self._driver = Driver(self._node, f"Finder {named!r}", self._deliver, chosen.thread, chosen.callbacks)
        self._driver.start()
        self._threaded = chosen.thread

    def find(self, tokens: npt.ArrayLike, names: Mapping[str, str] | None = None) -> list[Held]:
        """The share that each known engine holds of a prompt with these token ids, the longest first.

        `names` state what computes the pages, as KVP-TIER-NAMESPACE says (None: the engine's own). An engine may have
        dropped a page since it announced it, and then computes it. Of very many pages, the first 131,072 are looked
        for, or 1,048,576 at all ranks of an engine together. Raises LocalError(BUSY) if a turn takes longer than 5
        seconds.
        """
        self._driver.check()
        space = None if names is None else namespace(names)
        chains: dict[tuple[bytes, int], Chain] = {}
        prompt = np.asarray(tokens)

        def lengths(known: SinkCatalogue, ranks: int) -> dict[int, int]:
            """The tier of the page that ends each length, in tokens, at which one of `ranks` ranks can continue."""
            head = known.head
            assert head is not None
            key = space or bytes(head.namespace), head.page
            if key not in chains:
                chains[key] = Chain(*key, prompt[: _MOST_PAGES * head.page + 1])
            ids = enumerate(islice(chains[key].ids(KeyForm(head.form)), _MOST_LOOKS // ranks), 1)
            return {0: int(Tier.DEVICE)} | {n * head.page: known.pages[id] for n, id in ids if id in known.pages}

        def ask() -> list[Held]:
            engines = []
            for address, endpoint in self._node.endpoints.items():
                party, known = endpoint.party(), endpoint.known()
                if party is not None and known is not None:
                    ranks = [lengths(catalogue, len(known)) for catalogue in known.values()]
                    common = {n: max(rank[n] for rank in ranks) for n in ranks[0] if all(n in rank for rank in ranks)}
                    near = max((n for n, tier in common.items() if tier == Tier.DEVICE), default=0)
                    pages = sum(len(catalogue.pages) for catalogue in known.values())
                    engines.append(Held(address, party.engine, party.replica, max(common, default=0), near, pages))
            return sorted(engines, key=lambda held: (-held.tokens, -held.device))

        answer = self._driver.between_turns(ask, _PATIENCE)
        if answer is None:
            raise LocalError(ErrorCode.BUSY, "find", f"an answer within {_PATIENCE:.0f} s", "none", "try again")
        return answer

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all engines are known, and return whether they are; see also `why`."""
        until = machine.monotonic() + timeout
        while self.why():
            left = until - machine.monotonic()
            if left <= 0:
                return False
            if self._threaded:
                with self._changed:
                    self._changed.wait(min(left, 0.1))
            else:
                self._driver.step(min(left, 0.1))
        return True

    def why(self) -> dict[str, str]:
        """Reasons that engines are not known yet, by address."""

        def reason(endpoint: WatchEndpoint) -> str:
            return "no answer yet" if endpoint.refused is None else str(endpoint.refused)

        self._driver.check()
        unknown = self._driver.between_turns(
            lambda: {a: reason(e) for a, e in self._node.endpoints.items() if e.known() is None}, _PATIENCE
        )
        return dict.fromkeys(self._node.endpoints, "busy") if unknown is None else unknown

    def step(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for something to do and take one turn, with Options(thread=False)."""
        self._driver.step(timeout)

    def close(self) -> None:
        """Say Goodbye to all engines."""
        self._driver.close()

    def _deliver(self, event: Any) -> None:
        with self._changed:
            self._changed.notify_all()


class WatchNode:
    """The node of a Finder: sessions with any number of source replicas."""

    def __init__(self, party: Party, dialer: Dialer, servers: Mapping[str, bytes | None]) -> None:
        """Watch the replicas with a rank that listens at each address, by its public key."""
        self._dialer, self._servers = dialer, servers
        self.endpoints = {address: WatchEndpoint(party, address) for address in servers}
        for endpoint in self.endpoints.values():
            endpoint.advice = dialer.names.advice
            endpoint.dial(machine.monotonic())

    def turn(self, ready: Collection[int] | None = None) -> list[Any]:
        self._flush()
        now = machine.monotonic()
        for conn, frame in self._dialer.receive(ready):
            self.endpoints[conn[0]].receive(conn[1], frame, now)
            if machine.monotonic() - now > RECEIVE_TIME:
                break
        for conn, error in self._dialer.refusals(ready):
            self.endpoints[conn[0]].refused = error
        for conn in self._dialer.returned(ready):
            self.endpoints[conn[0]].returned(conn[1], now)
        events: list[Any] = []
        for endpoint in self.endpoints.values():
            endpoint.on_time(now)
            events += endpoint.take_events()
        self._flush()
        return events

    def filenos(self) -> Mapping[int, object]:
        return self._dialer.filenos()

    def timeout(self) -> float | None:
        if self._dialer.pending:
            return 0.0
        due = [at for endpoint in self.endpoints.values() if (at := endpoint.timers.next()) is not None]
        return max(min(due) - machine.monotonic(), 0.0) if due else None

    def _flush(self) -> None:
        now = machine.monotonic()
        for name, endpoint in self.endpoints.items():
            for address, frame in endpoint.to_send(now):
                try:
                    self._dialer.send((name, address), frame, self._servers[name])
                except KvprotoError as error:  # an address in Welcome that cannot be used
                    endpoint.refused = error

    def close(self, reason: str) -> None:
        for endpoint in self.endpoints.values():
            endpoint.goodbye(reason)
        self._flush()
        self._dialer.close()
