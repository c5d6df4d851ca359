"""The Sink, which a decode rank opens: it fetches requests by ticket into pages that the engine names."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any

from kvproto.errors import KvprotoError, LocalError, check_type, check_whole, listed, wrong_type
from kvproto.events import Arrived, Event, Lost, PagesFree, PagesWanted
from kvproto.net import Dialer, Seed, check_address, check_public, encrypted, read_keys
from kvproto.options import Options
from kvproto.prompt import Prompt, Ticket
from kvproto.rank.base import EngineRank, check_request, ends_of, options_of, party_of, transports_of
from kvproto.rank.handles import Handle, Withdrawal
from kvproto.rank.machine import machine
from kvproto.rank.page_tables import PageTables, grants_of
from kvproto.rank.pool import Pool
from kvproto.sink.fetch import Fetch
from kvproto.sink.node import UNCONNECTED, SinkNode
from kvproto.wire.enums import ErrorCode


class Sink(EngineRank):
    """One rank of an engine that fetches prompts from any number of Sources into one pool."""

    _node: SinkNode

    def __init__(
        self,
        name: str,
        pool: Pool,
        sources: Mapping[str, str | Seed] | Mapping[tuple[str, int], str | Seed] | None = None,
        options: Options | None = None,
    ) -> None:
        """Connect to sources.

        `sources` maps each engine name (replica 0), or (name, replica), to the address of any of its ranks, or to a
        Seed, which also holds its public key; the other ranks' addresses come with its Welcome. `read_sources` reads
        such a mapping from a file, and `connect` adds to it. Raises LocalError: OUT_OF_RANGE for an argument or an
        address that cannot be used, NO_TRANSPORT, UNEXPECTED_MESSAGE for a closed pool, and ITEM_ALIAS for a `shared`
        one.
        """
        self._fetches: dict[Fetch, None] = {}
        """Fetches whose pages may still be written."""
        self._sources: set[tuple[str, int]] = set()
        self._leaving: set[tuple[str, int]] = set()
        """Sources to be disconnected once no fetch from them is under way; used on the node."""
        self._last = 0
        chosen, party = options_of(options), party_of(name, pool)
        advice = 'such as {"prefill": "ipc:///run/kv/prefill-0"}'
        check_type("sources", sources, (Mapping, NoneType), "a mapping of engine name to address", advice)
        seeds = {key: seed if isinstance(seed, Seed) else Seed(seed) for key, seed in (sources or {}).items()}
        named = [(_replica(key), key, seed) for key, seed in seeds.items()]
        for _, key, seed in named:
            check_seed(f'sources["{key}"]' if isinstance(key, str) else f"sources[{key!r}]", seed, chosen)
        self._node = SinkNode(party, pool, dialer_of(chosen), chosen, transports_of(chosen, pool))
        super().__init__(name, pool, self._node, chosen, party.incarnation)
        self._start()
        for (engine, replica), _, seed in named:
            self.connect(engine, replica, address=seed.address, key=seed.key)

    def connect(self, engine: str, replica: int = 0, *, address: str, key: str | None = None) -> None:
        """Add a source replica, or change its address; both are known to the router.

        `key` is its public key, which a TCP address needs (KVP-NET-KEY). Connected reports when the source is ready;
        `fetch` may be called before. Raises LocalError(OUT_OF_RANGE) for an address or a key that cannot be used.
        """
        source = _replica((engine, replica))
        server = check_seed("address", Seed(address, key), self.options)
        self._sources.add(source)

        def connect() -> None:
            self._leaving.discard(source)
            self._node.connect(source, address, server)

        self._driver.post(connect)

    def disconnect(self, engine: str, replica: int = 0, *, idle: bool = False) -> None:
        """Say Goodbye to a source replica, which gets no new fetches from now on.

        Fetches under way from it are lost; with `idle`, Goodbye waits until none is left.
        """
        source = _replica((engine, replica))
        self._sources.discard(source)

        def leave() -> None:
            self._leaving.add(source)
            self._leave(source, idle)

        self._driver.post(leave)

    def _leave(self, source: tuple[str, int], idle: bool = True) -> None:
        """On the node: disconnect a source that is to be left, unless a fetch from it is still under way."""
        under_way = idle and any(source == (f.ticket.engine, f.ticket.replica) for f in list(self._fetches))
        if source in self._leaving and not under_way:
            self._leaving.discard(source)
            self._node.disconnect(source, "disconnected")

    def fetch(
        self,
        ticket: Ticket,
        prompt: Prompt,
        pages: PageTables | None = None,
        *,
        cached: int | Mapping[str, int] = 0,
        tokens: int | Mapping[str, int] | None = None,
        late: bool | Collection[str] = False,
        claim: Callable[[PagesWanted], PageTables | None] | None = None,
        spans: bool = False,
        on_done: Callable[[Fetch], object] | None = None,
    ) -> Fetch:
        """Have tokens [cached, tokens) of a request written into `pages`.

        `pages` is the request's page table by group name: page ids, [pages], from the page of token 0 on, or the id of
        a slot. A table may be longer than needed. `cached` is the first token to fetch, for all groups of tokens or by
        group name: the pages hold the tokens before it, or a window has no pages for them. A row of several tokens is
        fetched whole. `tokens` is the end of the fetch (None: the whole prompt), in tokens or by axis name. Name a page
        only when all device work that used it has completed, and leave it alone until `Fetch.pages_free`.

        Without `pages`, the request waits for prefill and ties up no page here: PagesWanted reports when pages are of
        use, and `Fetch.grant` names them. `claim` is called with that event, where `Options.callbacks` says, and
        returns page tables, or None for not yet. With `spans` pages are wanted piece by piece while prefill runs, if
        the source supports it (feature SPANS); otherwise all at once, when prefill is over, or at the beginning if the
        source does not support INTENT.

        Where the source no longer holds the first tokens, a group in `late` (True: any) begins with a later one, which
        `Arrived.since` states; otherwise the fetch is lost with NOT_HELD. It is lost with PEER_LOST if the source ends
        or restarts, which voids its tickets, or is silent for 35 s; and with OUT_OF_RANGE if the prompt states an axis
        that no cache of either side has. If this side was stopped for so long that the source has given it up, a fetch
        that the source had not accepted is requested again. `on_done` is called with the handle when it has ended,
        which the ticket's deadline bounds (see Fetch).

        Raises LocalError: OUT_OF_RANGE for an argument of the wrong type or range; WRONG_PEER for a source that is not
        connected; BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS for pages that cannot be used; BUSY while too many pages are
        in quarantine; DRAINING after `drain`; POOL_MOVED while asleep.
        """
        self._driver.check()
        self._check_draining()
        check_request(ticket, prompt, on_done, self.geometry)
        with self._handles_lock:
            self._check_awake("fetch")
            pool, epoch = self.pool, self._epoch
        end, axes = ends_of(prompt, tokens, 1)
        grants = grants_of(pool.page_rules, pages, cached, end, axes, late)
        _check_claim(pages, claim, spans)
        self._check_source(ticket)
        self._node.check_quarantine()
        if pages is not None:
            pool._pages.take(grants, pages)
        fetch = Fetch(
            self,
            ticket,
            prompt.digest,
            pool,
            epoch,
            grants,
            end,
            axes=prompt.axes,
            seconds=ticket.deadline / 1000,
            deferred=pages is None,
            spans=spans,
            on_wanted=claim,
        )
        if on_done is not None:
            fetch.add_done_callback(on_done)
        self._request(fetch)
        return fetch

    def _check_source(self, ticket: Ticket) -> None:
        """Raise LocalError(WRONG_PEER) for the ticket of a source that is not connected."""
        if (ticket.engine, ticket.replica) not in self._sources:
            known = listed(f"{engine} replica {replica}" for engine, replica in sorted(self._sources)) or "none"
            yours = f"{ticket.engine} replica {ticket.replica}"
            raise LocalError(ErrorCode.WRONG_PEER, "ticket", f"a source of {known}", yours, UNCONNECTED)

    def _request(self, fetch: Fetch) -> None:
        """Number a fetch, and have the node request it."""
        with self._handles_lock:
            self._last += 1
            fetch.number = self._last
            self._fetches[fetch] = None
        try:
            fetch._post(lambda: self._node.fetch(fetch))
        except KvprotoError:
            self._fetches.pop(fetch, None)
            fetch.release()
            raise

    @property
    def ready(self) -> frozenset[tuple[str, int]]:
        """Source replicas that are ready, by engine name and replica: a fetch from one begins at once.

        A source that is lost or refused, or that has never answered, is greeted again for as long as it is connected:
        after 1 s at first, and later every 15 s (`Options.eager`). Empty after `close`, and after an error that has
        ended the I/O thread or `step`.
        """
        return frozenset() if self._driver.closed or self._driver.failure is not None else self._node.ready

    @property
    def sources(self) -> dict[tuple[str, int], str]:
        """The reason that a connected source replica is not ready, by engine name and replica; empty if it is ready.

        The reason is the last refusal or loss, which may contain what the peer has said.
        """
        ready, reasons = self.ready, self._node.reasons
        silent = "it has not answered yet" if self.options.eager else "it is greeted with the first fetch"
        return {each: "" if each in ready else reasons.get(each, silent) for each in list(self._node.sources)}

    @property
    def unready(self) -> str:
        """The reason that this rank should be sent no requests, such as no ready source; empty if it may be."""
        reasons = self.sources
        if (why := super().unready) or not self.options.eager or not all(reasons.values()):
            return why
        if not reasons:
            return "it is connected to no source"
        return "; ".join(f"{engine}/{replica}: {reason}" for (engine, replica), reason in sorted(reasons.items()))

    def move(self, pool: Pool) -> Withdrawal:
        """Use this pool from now on; fetches that are under way end in the old one.

        The old memory may be freed once the returned handle is done. The pool must be of the same rank on the same
        device; its caches may differ. Raises LocalError: UNEXPECTED_MESSAGE while asleep, and otherwise as `wake` does.
        """
        self._check_pool(pool)
        with self._handles_lock:
            self._check_awake("move", ErrorCode.UNEXPECTED_MESSAGE)
            withdrawal = self._withdrawals[self._epoch] = Withdrawal(self, self.pool, self._epoch)
            self._replace(pool)
            epoch = self._epoch
        self._post_withdrawal(withdrawal, lambda: self._node.move(pool, epoch))
        return withdrawal

    def _wake(self, pool: Pool, epoch: int) -> None:
        self._node.move(pool, epoch)

    def _forget(self, event: Event) -> None:
        if isinstance(event, Arrived | PagesFree) or (isinstance(event, Lost) and event.pages_free):
            self._fetches.pop(event.fetch, None)
            ticket = event.fetch.ticket
            if (source := (ticket.engine, ticket.replica)) in self._leaving:
                self._driver.leave(lambda: self._leave(source), lambda error: None)

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye to all sources and end what is under way; open handles end with LocalError(ABORTED).

        The pages of a fetch whose `pages_free` is False may still be written until its source hears of it or ends.
        """
        super().close(reason)
        for fetch in list(self._fetches):
            fetch.release()
        self._fetches.clear()

    def _handles(self) -> Iterable[Handle[Any]]:
        return self._fetches


def _check_claim(pages: Any, claim: Any, spans: Any) -> None:
    """Raise LocalError(OUT_OF_RANGE) for wrong types, and for `claim` or `spans` together with `pages`."""
    check_type("spans", spans, bool, "True or False")
    if claim is not None and not callable(claim):
        raise wrong_type("claim", claim, "something to call with PagesWanted")
    if pages is not None and (claim is not None or spans):
        argument = "claim" if claim is not None else "spans"
        raise LocalError(
            ErrorCode.OUT_OF_RANGE, argument, "pages, or a fetch that names them later", "both", "leave one"
        )


def _replica(source: Any) -> tuple[str, int]:
    """A source replica, as engine name and number; a name alone means replica 0."""
    engine, replica = source if isinstance(source, tuple) and len(source) == 2 else (source, 0)
    check_type("engine", engine, str, "the source engine's name, a str")
    return engine, check_whole("replica", replica, 0)


def dialer_of(options: Options) -> Dialer:
    """A dialer that connects to sources, with the keys of the options."""
    return machine.dialer(options.insecure, read_keys(options.keys) if options.keys is not None else None)


def check_seed(path: str, seed: Seed, options: Options) -> bytes | None:
    """The source's public key; raises LocalError, naming the argument `path`, for a seed that cannot be used."""
    address = seed.address
    check_type(path, address, str, "an address, a str")
    if "{rank}" in address:
        advice = "name one rank of the source, such as rank 0; the others follow from its Welcome"
        raise LocalError(ErrorCode.OUT_OF_RANGE, path, "the address of one rank", repr(address), advice)
    try:
        check_address(address, options.keys is not None, options.insecure)
    except LocalError as error:
        raise error.at(path) from error
    if seed.key is not None:
        return check_public("key", seed.key)
    if encrypted(address) and options.keys is not None:
        advice = "pass the line in its public.key as `key`, or in a Seed"
        raise LocalError(ErrorCode.OUT_OF_RANGE, "key", f"the public key of the source at {address}", "none", advice)
    return None
