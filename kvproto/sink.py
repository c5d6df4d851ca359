"""A Sink: what a decode rank needs of kvproto. It fetches requests by ticket into pages that the engine names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvproto.door import Door, Handle, party_of, transports_of
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Arrived, Event, Lost, PagesFree
from kvproto.net import Dialer, check_address
from kvproto.node.pages import PageTables, grants_of
from kvproto.node.sink import SinkNode
from kvproto.node.told import Received, TransferLost, TransferProven, shared_event
from kvproto.options import Options
from kvproto.pool import Pool
from kvproto.prompt import Prompt, Ticket
from kvproto.wire.enums import ErrorCode, Outcome

__all__ = ["Fetch", "Sink"]


class Fetch(Handle[Arrived]):
    """One request that is being fetched; its result is Arrived, and `wait` raises the error where it is lost."""

    def __init__(self, sink: Sink, ticket: Ticket) -> None:
        super().__init__(sink, ticket)
        self.pages_free = False
        """Whether the pages of a lost request may be used again; PagesFree says so too."""
        self.number = 0
        """Names the transfer in logs."""

    def abort(self, reason: str = "aborted") -> None:
        """Stop it. `wait` raises ABORTED once it is over; the pages are free when `pages_free` says so. Harmless once
        done.
        """
        sink = self._door
        if not self.done and isinstance(sink, Sink):
            error = RemoteError(ErrorCode.ABORTED, "", advice=reason)
            self._post(lambda: sink._node.abort(self.number, error))


class Sink(Door):
    """One rank of an engine that fetches prompts from any number of Sources into one pool."""

    def __init__(
        self, name: str, pool: Pool, sources: Mapping[str, str] | Mapping[tuple[str, int], str] | None = None,
        options: Options | None = None,
    ) -> None:  # fmt: skip
        """Connect to sources.

        `sources` is where each of them listens: engine name (replica 0), or (name, replica), to the address of any of
        its ranks; the others follow from its Welcome. `connect` adds more. Raises LocalError for a pool or options that
        cannot be used.
        """
        self._fetches: dict[int, Fetch] = {}
        self._sources: set[tuple[str, int]] = set()
        self._last = 0
        chosen = options or Options()
        for address in (sources or {}).values():
            check_address(address, chosen.insecure)
        self._node = SinkNode(
            party_of(name, pool), pool, Dialer(chosen.insecure), verify=chosen.verify,
            transports=transports_of(chosen, pool), pull=chosen.pull, quarantine=chosen.quarantine,
        )  # fmt: skip
        super().__init__(name, pool, self._node, chosen)
        for key, address in (sources or {}).items():
            self.connect(*(key if isinstance(key, tuple) else (key, 0)), address=address)

    def connect(self, engine: str, replica: int = 0, *, address: str) -> None:
        """Add a source replica, or say where it listens now; whoever routes requests knows.

        Connected tells when it is ready; `fetch` may be called before. Raises LocalError for an address that may not be
        used.
        """
        check_address(address, self.options.insecure)
        self._sources.add((engine, replica))
        self._driver.post(lambda: self._node.connect((engine, replica), address))

    def disconnect(self, engine: str, replica: int = 0) -> None:
        """Say Goodbye to a source replica; fetches under way from it are lost."""
        self._sources.discard((engine, replica))
        self._driver.post(lambda: self._node.disconnect((engine, replica), "disconnected"))

    def fetch(
        self, ticket: Ticket, prompt: Prompt, pages: PageTables, *, cached: int | Mapping[str, int] = 0,
        tokens: int | None = None, on_done: Callable[[Fetch], object] | None = None,
    ) -> Fetch:  # fmt: skip
        """Have tokens [cached, tokens) of a request written into these pages.

        `pages` is the request's page table by group name, from the page of token 0 on, as long as the engine likes;
        what is not needed is left alone. `cached` is the number of tokens that the pages hold already, of all groups or
        by name; `tokens` is where the fetch ends (None: with the prompt). Name a page only when all device work that
        used it has completed, and leave it alone until the handle is done and, if it is lost, `pages_free`. `on_done`
        is called when it is over.

        Raises LocalError: WRONG_PEER for a source that is not connected; BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS for
        pages that cannot be; BUSY while too many pages are in quarantine.
        """
        end = len(prompt) if tokens is None else tokens
        if not 0 < end <= len(prompt):
            raise LocalError(ErrorCode.OUT_OF_RANGE, "tokens", f"1 to {len(prompt)}, the prompt's", str(end))
        grants = grants_of(self.pool.layout, pages, cached, end)
        source = (ticket.engine, ticket.replica)
        if source not in self._sources:
            known = ", ".join(f"{engine} replica {replica}" for engine, replica in self._sources) or "none"
            yours = f"{ticket.engine} replica {ticket.replica}"
            raise LocalError(ErrorCode.WRONG_PEER, "ticket", f"a source of {known}", yours, "connect it first")
        self._node.check_quarantine()
        made = Fetch(self, ticket)
        with self._handles_lock:
            self._last += 1
            made.number = self._last
            self._fetches[made.number] = made
        if on_done is not None:
            made.add_done_callback(on_done)
        try:
            self._driver.post(lambda: self._node.fetch(made.number, source, bytes(ticket.key), prompt.digest, grants))
        except KvprotoError:
            self._fetches.pop(made.number, None)
            raise
        return made

    @property
    def quarantined(self) -> dict[str, int]:
        """Pages by group name that may still be written by a peer, so that nobody may use them yet."""
        names = {g.id: g.name for g in self.geometry.groups}
        return {names[group]: count for group, count in self._node.quarantined.items()}

    def _tell(self, event: Any) -> Event:
        match event:
            case Received():
                fetch = self._fetches.pop(event.number)
                names = {g.id: g.name for g in self.geometry.groups}
                handoff: dict[str, dict[str, bytes]] = {}
                for (group, part), data in event.handoff.items():
                    handoff.setdefault(names[group], {})[part] = data
                sums = {(writer, names[group]): value for (writer, group), value in event.checksums.items()}
                arrived = Arrived(
                    fetch, event.outcome == Outcome.FINISHED, handoff, sums, event.bytes, event.seconds
                )  # fmt: skip
                fetch._end(arrived)
                return arrived
            case TransferLost():
                fetch = self._fetches[event.number]
                fetch.pages_free = event.proven
                if event.proven:
                    del self._fetches[event.number]
                fetch._end(None, event.error)
                return Lost(fetch, event.error, event.proven)
            case TransferProven():
                fetch = self._fetches.pop(event.number)
                fetch.pages_free = True
                return PagesFree(fetch)
        return shared_event(event)

    def _handles(self) -> Iterable[Handle[Any]]:
        return self._fetches.values()
