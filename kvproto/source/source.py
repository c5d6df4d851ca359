"""The Source, which a prefill rank opens: it listens, and hands requests over to sinks that have their tickets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproto.errors import LocalError, check_type
from kvproto.events import Event, Over
from kvproto.net import AllowList, Listener, check_address, encrypted, is_wildcard, read_keys
from kvproto.options import Options
from kvproto.prompt import Prompt, Ticket
from kvproto.rank.base import EngineRank, check_request, options_of, party_of, transports_of
from kvproto.rank.handles import Handle
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.session.catalogue import Catalogue, Changes
from kvproto.source.node import SourceNode
from kvproto.source.request import Request
from kvproto.wire.enums import ErrorCode

if TYPE_CHECKING:
    from kvproto.tiers import Tiers


class Source(EngineRank):
    """One rank of an engine that computes prompts."""

    _node: SourceNode

    def __init__(
        self,
        name: str,
        pool: Pool,
        listen: str | Mapping[int, str],
        options: Options | None = None,
        *,
        advertise: str | Mapping[int, str] | None = None,
    ) -> None:
        """Listen for sinks.

        `name` is the engine's name, the same on all ranks and in tickets. `listen` is the address of this rank, with
        "{rank}" in the place of its number ("ipc:///run/kv/prefill-{rank}"), or the addresses of all ranks of the
        replica by rank. `advertise`, likewise, is where sinks reach the ranks if they do not at `listen`: behind NAT,
        or if that is a wildcard. Raises LocalError: OUT_OF_RANGE for an argument or an address that cannot be used,
        NO_TRANSPORT, and UNEXPECTED_MESSAGE for a pool that is closed or serves another Source.
        """
        check_type("pool", pool, Pool, "a kvproto.Pool")
        chosen = options_of(options)
        self._requests: dict[bytes, Request] = {}
        party = party_of(name, pool)
        endpoints = _endpoints("listen", listen, pool)
        self._listen, self._advertise, place = listen, advertise, endpoints[pool.rank]
        if advertise is not None:
            endpoints = _endpoints("advertise", advertise, pool)
        for address in endpoints.values() if advertise is not None or len(endpoints) > 1 else ():
            _check_dialled("listen" if advertise is None else "advertise", address, chosen)
        try:
            listener = _listener(place, chosen)
        except LocalError as error:
            raise error.at("listen" if error.path == "address" else error.path) from error
        self._address = listener.address if advertise is None else endpoints[pool.rank]
        endpoints[pool.rank] = self._address
        try:
            self._node = SourceNode(party, pool, listener, endpoints, chosen, transports_of(chosen, pool))
            super().__init__(name, pool, self._node, chosen, party.incarnation)
            self._start()
        except BaseException:
            listener.close()
            raise

    @property
    def address(self) -> str:
        """The address at which sinks reach this rank, with the port that the system chose if it was 0."""
        return self._address

    def request(self, ticket: Ticket, prompt: Prompt, on_free: Callable[[Request], object] | None = None) -> Request:
        """Accept a request: answer sinks with its ticket from now on, and serve them once it is computed.

        `on_free` is called with the handle when its pages are free. Raises LocalError: OUT_OF_RANGE for an argument of
        the wrong type or a prompt without one of the geometry's axes, WRONG_PEER for a ticket of another engine or
        replica, TICKET_USED for one that was used before, DRAINING after `drain`, POOL_MOVED while asleep.
        """
        self._driver.check()
        self._check_draining()
        self._check_awake("request")
        check_request(ticket, prompt, on_free, self.geometry)
        if (ticket.engine, ticket.replica) != (self.name, self.geometry.replica):
            mine, yours = f"{self.name} replica {self.geometry.replica}", f"{ticket.engine} replica {ticket.replica}"
            advice = "send the request to the engine of its ticket"
            raise LocalError(ErrorCode.WRONG_PEER, "ticket", mine, yours, advice)
        request = Request(self, self._node, ticket, prompt)
        self._take(request, ticket)
        if on_free is not None:
            request.add_done_callback(on_free)
        request.accept()
        return request

    def tell(self, tiers: Tiers) -> None:
        """Announce the pages that `tiers` keeps to routers that watch with a `kvproto.Finder` (feature CATALOGUE).

        Changes are announced with each step of the tiers.
        """
        layout = tiers.device.layout
        catalogue = Catalogue(tiers.space, layout.page, layout.form)
        self._driver.post(lambda: self._node.endpoint.keep_catalogue(catalogue))
        tiers.subscribe(self._announce)

    def _announce(self, pages: Changes) -> None:
        """Have the I/O thread announce pages, unless this Source is closed."""
        if not self._driver.closed:
            with suppress(LocalError):
                self._driver.leave(lambda: self._node.endpoint.kept(pages), lambda error: None)

    def _take(self, request: Request, ticket: Ticket) -> None:
        """Add a request; raises LocalError(TICKET_USED) while its ticket's first use is not past its deadline."""
        key, now = bytes(ticket.key), machine.monotonic()
        with self._handles_lock:
            if key in self._requests or self._node.tickets.used(key, now):
                advice = "make a new ticket for each try of a request"
                raise LocalError(ErrorCode.TICKET_USED, "ticket", "a new one", "one that was used here before", advice)
            self._requests[key] = request

    def _drain(self) -> None:
        self._node.drain()

    def _check_pool(self, pool: Pool) -> None:
        super()._check_pool(pool)
        self._endpoints_of(pool)

    def _wake(self, pool: Pool, epoch: int) -> None:
        self._node.wake(pool, epoch, self._endpoints_of(pool) | {pool.rank: self._address})

    def _endpoints_of(self, pool: Pool) -> dict[int, str]:
        if self._advertise is not None:
            return _endpoints("advertise", self._advertise, pool)
        return _endpoints("listen", self._listen, pool)

    def _forget(self, event: Event) -> None:
        if isinstance(event, Over):
            del self._requests[bytes(event.request.ticket.key)]

    def _handles(self) -> Iterable[Handle[Any]]:
        return self._requests.values()


def _endpoints(name: str, listen: str | Mapping[int, str], pool: Pool) -> dict[int, str]:
    """The address of each rank of a pool's replica, as the argument of this name says.

    Raises LocalError(OUT_OF_RANGE) if any is missing, shared or no text.
    """
    check_type(name, listen, (str, Mapping), "an address, or a mapping of rank to address")
    ranks = [share.rank for share in pool.geometry.ranks]
    if isinstance(listen, Mapping):
        addresses = dict(listen)
    else:
        addresses = {rank: listen.replace("{rank}", str(rank)) for rank in ranks}
    if sorted(addresses) != sorted(ranks) or len(set(addresses.values())) < len(ranks):
        mine, advice = f"an address for each of the ranks {ranks}", 'put "{rank}" where the addresses of ranks differ'
        raise LocalError(ErrorCode.OUT_OF_RANGE, name, mine, str(listen), advice)
    for address in addresses.values():
        check_type(name, address, str, "addresses, each a str")
    return addresses


def _check_dialled(name: str, address: str, options: Options) -> None:
    """Raise LocalError(OUT_OF_RANGE) for an address that no sink can dial."""
    if is_wildcard(address):
        advice = "sinks dial the addresses in Welcome: name the host, or the address of an interface, in `advertise`"
        raise LocalError(ErrorCode.OUT_OF_RANGE, name, "addresses that can be dialled", address, advice)
    if name == "advertise" and encrypted(address):
        try:
            check_address(address, options.keys is not None, options.insecure)
        except LocalError as error:
            raise error.at(name) from error


def _listener(address: str, options: Options) -> Listener:
    """A listener at `address`, with the keys and the allow-list of the options if the address needs them."""
    if options.keys is None or not encrypted(address):
        return machine.listener(address, options.insecure)
    keys, allow = read_keys(options.keys), options.allow or Path(options.keys) / "allow.toml"
    return machine.listener(address, keys=keys, allow=AllowList(allow))
