"""A Source: what a prefill rank needs of kvproto. It listens, and hands requests over to whoever has their tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.copying.late import items_before
from kvproto.door import Handle, OfTicket, check_request, options_of, party_of, transports_of
from kvproto.errors import KvprotoError, LocalError, check_type, check_whole
from kvproto.events import Event, Expired, Freed, Over, Sent, Undelivered, Unwanted
from kvproto.net import AllowList, Listener, encrypted, is_wildcard, read_keys
from kvproto.node.lent import Lent
from kvproto.node.pages import IntArray, PageTables, Since, check_distinct, since_of, tables_of
from kvproto.node.request import Computed, Finished
from kvproto.node.source import SourceNode
from kvproto.node.told import Copied, PoolReturned, RequestOver, RequestUnwanted, shared_event
from kvproto.options import Options
from kvproto.planning.axes import NO_AXES, length_of
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.pool import Pool
from kvproto.prompt import Prompt, Ticket
from kvproto.session.catalogue import Catalogue, Changes
from kvproto.wire.enums import ErrorCode, Outcome
from kvproto.withdrawal import Sleeper

if TYPE_CHECKING:
    from kvproto.tiered import Tiers

__all__ = ["Request", "Source"]

_AT_ONCE = 1 << 20
"""Bytes that `finish` may copy in the thread that calls it."""


class Request(OfTicket[Over]):
    """One request at a source, from its ticket until its pages are free.

    Its result is Freed, Undelivered where a sink rank may not have it, or Expired where the deadline passed first.
    """

    def __init__(self, source: Source, ticket: Ticket, prompt: Prompt) -> None:
        super().__init__(source, ticket)
        self.prompt = prompt
        """What is computed."""
        self._source, self._pool = source, source.pool
        self.computed_at: float | None = None
        """When prefill was over, by time.monotonic."""
        self._finished = False
        self._tables: dict[int, IntArray] = {}
        """Pages that rows were said to be in, by group id."""
        self._since: dict[int, int] = {}
        """First tokens whose pages are there, by group id."""
        self._ends: dict[tuple[int, int], int] = {}
        """Tokens computed so far, by model and layer."""

    def computed(
        self, pages: PageTables, tokens: int, *, layers: tuple[int, int] | None = None, model: int = 0,
        after: int | None = None, since: Since | None = None,
    ) -> None:  # fmt: skip
        """Say that tokens [0, `tokens`) of layers [lo, hi) of a model (None: all of its layers) are in the pages.

        Rows on other axes are there at `finish`; the table of such a group may still be empty before.
        What is there is copied while prefill goes on: by the I/O thread or the next `step`, so that a forward is not
        held up. `after` is the handle of a CUDA event after which the rows are there. `since` is the first token whose
        rows are still there, of all groups that hold rows of tokens or by name (None: as said before): pages before it
        may be in use again, what the table names there means nothing, and a sink that asks for them is refused
        (KVP-GRANT-HELD). Harmless once the request is over, as it is when its deadline passes. Raises LocalError for
        pages or tokens that cannot be, and for fewer tokens than before of one of the layers.
        """
        if self._pool is not self._source.pool:  # it was taken back, and the request ended by that
            return
        tokens, model = self._checked(tokens), check_whole("model", model, 0)
        _check_after(after)
        layout, axes = self._source.pool.layout, NO_AXES
        held = since_of(layout, since, self._since, tokens, axes)
        items = tables_of(layout, pages, tokens, axes, held)
        self._check_open("computed")
        span = self._source._layers(model)
        if layers is not None:
            depth = self._source._depth(model)
            if not _is_span(layers) or not 0 <= layers[0] <= layers[1] <= depth:
                raise LocalError(ErrorCode.OUT_OF_RANGE, "layers", f"(lo, hi) of {depth} layers", str(layers))
            span = int(layers[0]), int(layers[1])
        named = [(model, layer) for layer in range(*span)]
        before = max((self._ends.get(layer, 0) for layer in named), default=0)
        if tokens < before:
            advice = "tokens counts from the start of the prompt, those of earlier calls included"
            raise LocalError(ErrorCode.BAD_GRANT, "tokens", f"{before} or more, as said before", str(tokens), advice)
        self._agree(items, tokens, axes, held)
        self._ends |= dict.fromkeys(named, tokens)
        computed = Computed(items, tokens, span, model, after, held)
        self._post(lambda: self._source._node.computed(self._key, computed), wait=False)

    def finish(
        self, pages: PageTables, *, tokens: int | None = None, handoff: Mapping[str, Mapping[str, bytes]] | None = None,
        finished: bool = False, after: int | None = None, since: Since | None = None,
    ) -> None:  # fmt: skip
        """Say that prefill is over: tokens [0, `tokens`) are in the pages (None: the whole prompt), other axes whole.

        `handoff` holds the bytes of the hand-off groups that this rank owns, by group and part name; `finished` says
        that the first token ends the text; `since` is as for `computed`. The pages from there on stay as they are until
        this handle is done. Harmless once the request is over. Raises LocalError.
        """
        if self._pool is not self._source.pool:
            return
        layout, axes = self._source.pool.layout, self.prompt.axes
        number = self._checked(len(self.prompt) if tokens is None else tokens)
        held = since_of(layout, since, self._since, number, axes)
        items = tables_of(layout, pages, number, axes, held)
        data = _handoff(self._source.geometry, self._source.pool.rank, {} if handoff is None else handoff)
        check_type("finished", finished, bool, "True or False")
        _check_after(after)
        outcome = Outcome.FINISHED if finished else Outcome.CONTINUE
        self._check_open("finish")
        self._agree(items, number, axes, held)
        self._finished, self.computed_at = True, time.monotonic()
        finished_ = Finished(items, number, outcome, data, after, held)
        # a large request is left to the I/O thread, so that its copy does not hold the engine up
        small = number * self._source._token_bytes <= _AT_ONCE
        self._post(lambda: self._source._node.finish(self._key, finished_), wait=small)

    def fail(self, reason: str | KvprotoError) -> None:
        """Say that this request cannot be produced: whoever waits for it is told why."""
        check_type("reason", reason, (str, KvprotoError), "a str or a KvprotoError")
        error = reason if isinstance(reason, KvprotoError) else LocalError(ErrorCode.ABORTED, "", advice=reason)
        self._post(lambda: self._source._node.refuse(self._key, error))

    def release(self) -> None:
        """End the request on this rank without handing it over, as a rank does that takes part in no transfer.

        Its pages are free when this handle is done. The verdict is that of the ranks in `Freed.routed` (KVP-TRN-DUMMY).
        """
        self.fail("released by its engine")

    def _give_up(self, error: KvprotoError) -> None:
        self._source._node.refuse(self._key, error)

    def _agree(
        self, items: Mapping[int, IntArray], tokens: int, axes: Mapping[str, int], since: dict[int, int]
    ) -> None:  # fmt: skip
        """Keep the pages of the tokens computed so far; raises BAD_GRANT where an earlier call named other pages, and
        ITEM_ALIAS for a page that is named twice.
        """
        layout, tables = self._source.pool.layout, dict(self._tables)
        for id, table in items.items():
            group, cp_rank = layout.group(id), layout.owns(id).cp_rank
            need = items_needed(group, cp_rank, 0, length_of(group, tokens, axes))
            before, now = tables.get(id), table[:need]
            skip = items_before(group, cp_rank, since.get(id, 0))
            if before is not None:
                both = slice(skip, min(before.size, now.size))
                differ = np.flatnonzero(before[both] != now[both])
                if differ.size:
                    i = skip + int(differ[0])
                    advice = "the rows of an earlier computed are in the page it named; name the same one"
                    raise LocalError(
                        ErrorCode.BAD_GRANT, f'pages["{group.name}"][{i}]', f"page {before[i]}, as said before",
                        f"page {now[i]}", advice,
                    )  # fmt: skip
            if before is None or now.size > before.size:
                check_distinct(group, now[skip:], skip)
                tables[id] = now
        self._tables, self._since = tables, since

    def _check_open(self, call: str) -> None:
        if self._finished and not self.done:
            raise LocalError(
                ErrorCode.UNEXPECTED_MESSAGE, call, "nothing more after finish", "another call", "finish a request once"
            )

    def _checked(self, tokens: int) -> int:
        return check_whole("tokens", tokens, 0, len(self.prompt), f"0 to {len(self.prompt)}, the prompt's")


class Source(Sleeper):
    """One rank of an engine that computes prompts."""

    def __init__(self, name: str, pool: Pool, listen: str | Mapping[int, str], options: Options | None = None) -> None:
        """Listen for sinks.

        `name` is the engine's, the same on all ranks and in tickets. `listen` is where this rank listens, with "{rank}"
        where ranks differ ("ipc:///run/kv/prefill-{rank}"), or the addresses of all ranks of the replica. Raises
        LocalError for an address, a pool or options that cannot be used.
        """
        check_type("pool", pool, Pool, "a kvproto.Pool")
        check_type("listen", listen, (str, Mapping), "an address, or a mapping of rank to address")
        chosen = options_of(options)
        endpoints = _endpoints(listen, pool)
        self._requests: dict[bytes, Request] = {}
        self._token_bytes = _token_bytes(pool)
        """Bytes of one token of every cache of this rank, on average."""
        party = party_of(name, pool)
        for address in endpoints.values():
            check_type("listen", address, str, "addresses, each a str")
            if len(endpoints) > 1 and is_wildcard(address):
                advice = "sinks dial what Welcome says: name the host, or the address of an interface"
                raise LocalError(ErrorCode.OUT_OF_RANGE, "listen", "addresses that can be dialled", address, advice)
        try:
            listener = _listener(endpoints[pool.rank], chosen)
        except LocalError as error:
            path = "listen" if error.path == "address" else error.path
            raise LocalError(error.code, path, error.mine, error.yours, error.advice) from error
        endpoints[pool.rank] = self._address = listener.address
        self._listen = listen
        try:
            self._node = SourceNode(
                party, pool, listener, endpoints, verify=chosen.verify,
                transports=transports_of(chosen, pool), pull=chosen.pull, part_bytes=chosen.part_bytes,
                lease=chosen.lease, first_part_ratio=chosen.first_part_ratio, spread=chosen.spread,
                cold_draft=chosen.cold_draft,
            )  # fmt: skip
            super().__init__(name, pool, self._node, chosen)
        except BaseException:
            listener.close()
            raise

    def request(self, ticket: Ticket, prompt: Prompt, on_free: Callable[[Request], object] | None = None) -> Request:
        """Take a request: from now on sinks with its ticket are answered, and served once it is computed.

        `on_free` is called when its pages are free. Raises LocalError: WRONG_PEER for a ticket of another engine or
        replica, TICKET_USED for one that came before, DRAINING after `drain`, POOL_MOVED while asleep.
        """
        self._check_draining()
        self._check_awake("request")
        check_request(ticket, prompt, on_free, self.geometry)
        digest, tokens, axes = prompt.digest, len(prompt), prompt.axes
        if (ticket.engine, ticket.replica) != (self.name, self.geometry.replica):
            mine, yours = f"{self.name} replica {self.geometry.replica}", f"{ticket.engine} replica {ticket.replica}"
            raise LocalError(
                ErrorCode.WRONG_PEER, "ticket", mine, yours, "send the request to the engine of its ticket"
            )
        made = Request(self, ticket, prompt)
        self._take(made, ticket)
        if on_free is not None:
            made.add_done_callback(on_free)
        made._post(lambda: self._node.expect(ticket, digest, tokens, axes))
        return made

    def tell(self, tiers: Tiers) -> None:
        """Let routers watch which pages `tiers` keeps, by a `kvproto.Finder` (feature CATALOGUE).

        They hear of changes with each step of the tiers.
        """
        layout = tiers.device.layout
        catalogue = Catalogue(tiers.space, layout.page, layout.form)
        self._driver.post(lambda: self._node.endpoint.keep_catalogue(catalogue))
        tiers.tell(self._kept)

    def _kept(self, pages: Changes) -> None:
        """Leave to the I/O thread to tell of pages; a Source that is closed tells nobody."""
        if not self._driver.closed:
            with suppress(LocalError):
                self._driver.leave(lambda: self._node.endpoint.kept(pages), lambda error: None)

    def _take(self, made: Request, ticket: Ticket) -> None:
        """Keep a request; raises TICKET_USED, until the deadline of its first use."""
        key, now = bytes(ticket.key), time.monotonic()
        with self._handles_lock:
            if key in self._requests or self._node.endpoint.used(key, now):
                advice = "make a new ticket for each try of a request"
                raise LocalError(ErrorCode.TICKET_USED, "ticket", "a new one", "one that was used here before", advice)
            self._requests[key] = made

    def _layers(self, model: int) -> tuple[int, int]:
        """Layers [lo, hi) of a model of which this rank owns some."""
        models = {g.id: g.model for g in self.geometry.groups if kind_of(g).has_memory}
        mine = next(r for r in self.geometry.ranks if r.rank == self.pool.rank)
        owned = [int(n) for share in mine.owns if models.get(share.group) == model for n in share.layers]
        if not owned and model not in models.values():
            known = sorted(set(models.values()))
            raise LocalError(ErrorCode.OUT_OF_RANGE, "model", f"one of {known}", str(model))
        return (min(owned), max(owned) + 1) if owned else (0, 0)

    def _depth(self, model: int) -> int:
        """One more than the highest layer of a model that any rank owns."""
        models = {g.id: g.model for g in self.geometry.groups}
        shares = [s for r in self.geometry.ranks for s in r.owns if models[s.group] == model]
        return max((int(n) + 1 for share in shares for n in share.layers), default=0)

    def _drain(self) -> None:
        self._node.drain()

    def _sleep(self, error: KvprotoError) -> Lent:
        return self._node.sleep(error)

    def _check_pool(self, pool: Pool) -> None:
        super()._check_pool(pool)
        _endpoints(self._listen, pool)

    def _wake(self, pool: Pool, epoch: int) -> None:
        self._token_bytes = _token_bytes(pool)
        self._node.wake(pool, epoch, _endpoints(self._listen, pool) | {pool.rank: self._address})

    def _tell(self, event: Any) -> Event:
        match event:
            case Copied():
                return Sent(
                    self._requests[event.key], event.sink, event.bytes, event.seconds, event.left, event.peer,
                    event.epoch,
                )  # fmt: skip
            case RequestUnwanted():
                return Unwanted(self._requests[event.key])
            case PoolReturned():
                return self._returned(event)
            case RequestOver():
                request = self._requests.pop(event.key)
                told: Over = Freed(request, event.routed or ())
                if event.routed is None:
                    told = Expired(request)
                elif event.lost:
                    told = Undelivered(request, event.routed, event.lost)
                request._end(told)
                return told
        return shared_event(event)

    def _handles(self) -> Iterable[Handle[Any]]:
        return self._requests.values()


def _endpoints(listen: str | Mapping[int, str], pool: Pool) -> dict[int, str]:
    """Where each rank of a pool's replica listens; raises LocalError where that is not said."""
    ranks = [r.rank for r in pool.geometry.ranks]
    found = dict(listen) if isinstance(listen, Mapping) else {r: listen.replace("{rank}", str(r)) for r in ranks}
    if sorted(found) != sorted(ranks) or len(set(found.values())) < len(ranks):
        mine, advice = f"an address for each of the ranks {ranks}", 'put "{rank}" where the addresses of ranks differ'
        raise LocalError(ErrorCode.OUT_OF_RANGE, "listen", mine, str(listen), advice)
    return found


def _listener(address: str, options: Options) -> Listener:
    """With the keys and the allow-list of the options, where the address needs them."""
    if options.keys is None or not encrypted(address):
        return Listener(address, options.insecure)
    keys, allow = read_keys(options.keys), options.allow or Path(options.keys) / "allow.toml"
    return Listener(address, keys=keys, allow=AllowList(allow))


def _is_span(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and len(given) == 2
        and all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in given)
    )


def _check_after(after: Any) -> None:
    if after is not None:
        check_type("after", after, int, "the handle of a CUDA event, an int", "torch: event.cuda_event")


def _handoff(geometry: Geometry, rank: int, given: Mapping[str, Mapping[str, bytes]]) -> dict[tuple[int, str], bytes]:
    """Hand-off data by group id and part name; raises LocalError(OUT_OF_RANGE) where the geometry says otherwise."""
    check_type("handoff", given, Mapping, "a mapping of group name to a mapping of part name to bytes")
    owned = {s.group for r in geometry.ranks if r.rank == rank for s in r.owns}
    groups = {g.name: g for g in geometry.groups if not kind_of(g).has_memory and g.id in owned}
    found = {}
    for name, group in groups.items():
        parts = given.get(name, {})
        check_type(f'handoff["{name}"]', parts, Mapping, "a mapping of part name to bytes")
        if unknown := sorted(parts.keys() - {part.name for part in group.parts}):
            known = [part.name for part in group.parts]
            raise LocalError(ErrorCode.OUT_OF_RANGE, f'handoff["{name}"]', f"parts of {known}", repr(unknown[0]))
        for part in group.parts:
            data = parts.get(part.name)
            path = f'handoff["{name}"]["{part.name}"]'
            if data is not None:
                advice = "of an array, pass its tobytes()"
                check_type(path, data, (bytes, bytearray, memoryview), f"{part.lane_bytes} bytes", advice)
                data = bytes(data)
            if data is None or len(data) != part.lane_bytes:
                came = "nothing" if data is None else f"{len(data)} bytes"
                raise LocalError(
                    ErrorCode.OUT_OF_RANGE, path, f"{part.lane_bytes} bytes", came, "pass what the geometry states"
                )
            found[group.id, part.name] = data
    if unknown := [n for n in given if n not in {g.name for g in geometry.groups if not kind_of(g).has_memory}]:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "handoff", f"hand-off groups of {sorted(groups)}", repr(unknown[0]))
    return found


def _token_bytes(pool: Pool) -> int:
    groups = {g.id: g for g in pool.geometry.groups}
    total = 0
    for id in pool.layout.columns:
        share = pool.layout.owns(id)
        lanes = sum((s.hi - s.lo) * groups[id].parts[s.part].lane_bytes for s in share.lanes)
        total += lanes * share.layers.size // (groups[id].tokens_per_row * groups[id].cp_size)
    return total
