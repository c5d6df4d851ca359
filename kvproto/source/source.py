"""The Source, which a prefill rank opens: it listens, and hands requests over to sinks that have their tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.copying.window_start import items_before
from kvproto.errors import KvprotoError, LocalError, bad, check_type, check_whole
from kvproto.events import Declined, Event, Expired, Freed, Over, Sent, Undelivered, Unwanted
from kvproto.net import AllowList, Listener, encrypted, is_wildcard, read_keys
from kvproto.options import Options
from kvproto.planning.axes import NO_AXES, length_of
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.prompt import Prompt, Ticket
from kvproto.rank.base import Handle, TicketHandle, check_request, options_of, party_of, transports_of
from kvproto.rank.events import Copied, PoolReturned, RequestDeclined, RequestOver, RequestUnwanted
from kvproto.rank.lent import Lent
from kvproto.rank.page_tables import IntArray, PageTables, Since, check_distinct, since_of, tables_of
from kvproto.rank.pool import Pool
from kvproto.rank.withdrawal import Sleeper
from kvproto.session.catalogue import Catalogue, Changes
from kvproto.source.node import SourceNode
from kvproto.source.prefill import Computed, Finished
from kvproto.wire.enums import ErrorCode, Outcome

if TYPE_CHECKING:
    from kvproto.tiers import Tiers

__all__ = ["Request", "Source"]

_AT_ONCE = 1 << 20
"""Bytes that `finish` may copy in the thread that calls it."""


class Request(TicketHandle[Over]):
    """The handle of a request at a source, from its ticket until its pages are free.

    It ends with Freed, with Undelivered if a sink rank may not have the request, or with Expired after its deadline.
    """

    def __init__(self, source: Source, ticket: Ticket, prompt: Prompt) -> None:
        super().__init__(source, ticket)
        self.prompt = prompt
        """The prompt to compute."""
        self._source, self._pool = source, source.pool
        self.computed_at: float | None = None
        """When `finish` was called, in seconds of `time.monotonic`."""
        self._finished = False
        self._tables: dict[int, IntArray] = {}
        """The page table so far, by group id."""
        self._since: dict[int, int] = {}
        """The first token that is still held, by group id."""
        self._ends: dict[tuple[int, int], int] = {}
        """The number of tokens computed so far, by model and layer."""

    def computed(
        self, pages: PageTables, tokens: int, *, layers: tuple[int, int] | None = None, model: int = 0,
        after: int | None = None, since: Since | None = None,
    ) -> None:  # fmt: skip
        """Report that tokens [0, `tokens`) of layers [lo, hi) of a model (None: of all its layers) are in the pages.

        `pages` is the page table by group name: page ids, [pages], from the page of token 0 on, or the id of a slot.
        Rows on other axes are due at `finish`; until then the table of such a group may be empty. The I/O thread, or
        the next `step`, copies the rows while prefill goes on, so that this never holds up a forward pass. `after` is
        the handle of a CUDA event after which the rows are written. `since` is the first token whose rows are still
        held, for all groups of tokens or by group name (None: as before): earlier pages may be in use again, their
        entries are ignored, and a sink that asks for them is refused (KVP-GRANT-HELD). Harmless once the request has
        ended, by its deadline for example. Raises LocalError: OUT_OF_RANGE for a number outside its range; BAD_GRANT
        for tables that do not fit or contradict earlier calls, and for fewer tokens of a layer than before;
        OUT_OF_REGION; ITEM_ALIAS for a page named twice; UNEXPECTED_MESSAGE after `finish`.
        """
        if self._pool is not self._source.pool:  # the pool was taken back, which ended the request
            return
        tokens, model = self._checked(tokens), check_whole("model", model, 0)
        _check_after(after, self._pool)
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
            raise LocalError(ErrorCode.BAD_GRANT, "tokens", f"{before} or more, as before", str(tokens), advice)
        self._record(items, tokens, axes, held)
        self._ends |= dict.fromkeys(named, tokens)
        computed = Computed(items, tokens, span, model, after, held)
        self._post(lambda: self._source._node.computed(self._key, computed), wait=False)

    def finish(
        self, pages: PageTables, *, tokens: int | None = None, handoff: Mapping[str, Mapping[str, bytes]] | None = None,
        finished: bool = False, after: int | None = None, since: Since | None = None,
    ) -> None:  # fmt: skip
        """Report that prefill is over: tokens [0, `tokens`) (None: all) and all other axes are in the pages.

        `pages`, `after` and `since` are as for `computed`. `handoff` holds the bytes of the hand-off groups that this
        rank owns, by group and part name; `finished` states that the first token ends the text. Leave the pages from
        `since` on unchanged until this handle is done. Harmless once the request has ended. Raises LocalError as
        `computed` does, and OUT_OF_RANGE for a `handoff` that the geometry does not state.
        """
        if self._pool is not self._source.pool:
            return
        layout, axes = self._source.pool.layout, self.prompt.axes
        number = self._checked(len(self.prompt) if tokens is None else tokens)
        held = since_of(layout, since, self._since, number, axes)
        items = tables_of(layout, pages, number, axes, held)
        data = _handoff(self._source.geometry, self._source.pool.rank, {} if handoff is None else handoff)
        check_type("finished", finished, bool, "True or False")
        _check_after(after, self._pool)
        outcome = Outcome.FINISHED if finished else Outcome.CONTINUE
        self._check_open("finish")
        self._record(items, number, axes, held)
        self._finished, self.computed_at = True, time.monotonic()
        finished_ = Finished(items, number, outcome, data, after, held)
        # a large request is left to the I/O thread, so that its copy does not hold up the engine
        small = number * self._source._token_bytes <= _AT_ONCE
        self._post(lambda: self._source._node.finish(self._key, finished_), wait=small)

    def fail(self, reason: str | KvprotoError) -> None:
        """Report that this request cannot be produced; sinks that wait for it receive the reason."""
        check_type("reason", reason, (str, KvprotoError), "a str or a KvprotoError")
        error = reason if isinstance(reason, KvprotoError) else LocalError(ErrorCode.ABORTED, "", advice=reason)
        self._post(lambda: self._source._node.refuse(self._key, error))

    def release(self) -> None:
        """End the request on a rank that takes part in no transfer, without handing anything over.

        Its pages are free when this handle is done. The ranks in `Freed.routed` decide the outcome (KVP-TRN-DUMMY).
        """
        self.fail("released by its engine")

    def _give_up(self, error: KvprotoError) -> None:
        self._source._node.refuse(self._key, error)

    def _record(
        self, items: Mapping[int, IntArray], tokens: int, axes: Mapping[str, int], since: dict[int, int]
    ) -> None:  # fmt: skip
        """Record the pages of the tokens computed so far.

        Raises LocalError: BAD_GRANT where an earlier call named other pages, ITEM_ALIAS for a page named twice.
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
                    advice = "the rows of an earlier call of computed are in the page it named; name the same one"
                    raise LocalError(
                        ErrorCode.BAD_GRANT, f'pages["{group.name}"][{i}]', f"page {before[i]}, as before",
                        f"page {now[i]}", advice,
                    )  # fmt: skip
            if before is None or now.size > before.size:
                check_distinct(group, now[skip:], skip)
                tables[id] = now
        self._tables, self._since = tables, since

    def _check_open(self, call: str) -> None:
        if self._finished and not self.done:
            mine, advice = "nothing more after finish", "finish a request once"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, call, mine, "another call", advice)

    def _checked(self, tokens: int) -> int:
        return check_whole("tokens", tokens, 0, len(self.prompt), f"0 to {len(self.prompt)}, the prompt's")


class Source(Sleeper):
    """One rank of an engine that computes prompts."""

    def __init__(self, name: str, pool: Pool, listen: str | Mapping[int, str], options: Options | None = None) -> None:
        """Listen for sinks.

        `name` is the engine's name, the same on all ranks and in tickets. `listen` is the address of this rank, with
        "{rank}" where those of other ranks differ ("ipc:///run/kv/prefill-{rank}"), or the addresses of all ranks of
        the replica by rank. Raises LocalError: OUT_OF_RANGE for an argument or an address that cannot be used,
        NO_TRANSPORT, and UNEXPECTED_MESSAGE for a pool that is closed or serves another Source.
        """
        check_type("pool", pool, Pool, "a kvproto.Pool")
        check_type("listen", listen, (str, Mapping), "an address, or a mapping of rank to address")
        chosen = options_of(options)
        endpoints = _endpoints(listen, pool)
        self._requests: dict[bytes, Request] = {}
        self._token_bytes = _token_bytes(pool)
        """Bytes of one token in all caches of this rank, on average."""
        party = party_of(name, pool)
        for address in endpoints.values():
            check_type("listen", address, str, "addresses, each a str")
            if len(endpoints) > 1 and is_wildcard(address):
                advice = "sinks dial the addresses in Welcome: name the host, or the address of an interface"
                raise LocalError(ErrorCode.OUT_OF_RANGE, "listen", "addresses that can be dialled", address, advice)
        try:
            listener = _listener(endpoints[pool.rank], chosen)
        except LocalError as error:
            raise error.at("listen" if error.path == "address" else error.path) from error
        endpoints[pool.rank] = self._address = listener.address
        self._listen = listen
        try:
            self._node = SourceNode(
                party, pool, listener, endpoints, verify=chosen.verify,
                transports=transports_of(chosen, pool), pull=chosen.pull, part_bytes=chosen.part_bytes,
                lease=chosen.lease, first_part_ratio=chosen.first_part_ratio, spread=chosen.spread,
                cold_draft=chosen.cold_draft, ticket_wait=chosen.ticket_wait,
            )  # fmt: skip
            super().__init__(name, pool, self._node, chosen)
        except BaseException:
            listener.close()
            raise

    def request(self, ticket: Ticket, prompt: Prompt, on_free: Callable[[Request], object] | None = None) -> Request:
        """Accept a request: from now on sinks with its ticket are answered, and are served once it is computed.

        `on_free` is called with the handle when its pages are free. Raises LocalError: OUT_OF_RANGE for an argument of
        the wrong type or a prompt without one of the geometry's axes, WRONG_PEER for a ticket of another engine or
        replica, TICKET_USED for one that was used before, DRAINING after `drain`, POOL_MOVED while asleep.
        """
        self._check_draining()
        self._check_awake("request")
        check_request(ticket, prompt, on_free, self.geometry)
        digest, tokens, axes = prompt.digest, len(prompt), prompt.axes
        if (ticket.engine, ticket.replica) != (self.name, self.geometry.replica):
            mine, yours = f"{self.name} replica {self.geometry.replica}", f"{ticket.engine} replica {ticket.replica}"
            advice = "send the request to the engine of its ticket"
            raise LocalError(ErrorCode.WRONG_PEER, "ticket", mine, yours, advice)
        made = Request(self, ticket, prompt)
        self._take(made, ticket)
        if on_free is not None:
            made.add_done_callback(on_free)
        made._post(lambda: self._node.expect(ticket, digest, tokens, axes))
        return made

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

    def _take(self, made: Request, ticket: Ticket) -> None:
        """Add a request; raises LocalError(TICKET_USED) while its ticket's first use is not past its deadline."""
        key, now = bytes(ticket.key), time.monotonic()
        with self._handles_lock:
            if key in self._requests or self._node.endpoint.used(key, now):
                advice = "make a new ticket for each try of a request"
                raise LocalError(ErrorCode.TICKET_USED, "ticket", "a new one", "one that was used here before", advice)
            self._requests[key] = made

    def _layers(self, model: int) -> tuple[int, int]:
        """The layers [lo, hi) of a model from the first to the last that this rank owns."""
        models = {g.id: g.model for g in self.geometry.groups if kind_of(g).has_memory}
        layout = self.pool.layout
        owned = [int(n) for id in layout.columns if models[id] == model for n in layout.owns(id).layers]
        if not owned and model not in models.values():
            raise bad("model", f"one of {sorted(set(models.values()))}", model)
        return (min(owned), max(owned) + 1) if owned else (0, 0)

    def _depth(self, model: int) -> int:
        """The number of layers of a model, up to the highest that any rank owns."""
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

    def _translate(self, event: Any) -> Event:
        match event:
            case Copied():
                made = self._requests[event.key]
                return Sent(made, event.sink, event.bytes, event.seconds, event.left, event.peer, event.epoch)
            case RequestDeclined():
                return Declined(self._requests[event.key], event.peer, event.error)
            case RequestUnwanted():
                return Unwanted(self._requests[event.key])
            case PoolReturned():
                return self._returned(event)
            case RequestOver():
                request = self._requests.pop(event.key)
                over: Over = Freed(request, event.routed or ())
                if event.routed is None:
                    over = Expired(request)
                elif event.lost:
                    over = Undelivered(request, event.routed, event.lost)
                request._end(over)
                return over
        translated: Event = event  # about a peer
        return translated

    def _handles(self) -> Iterable[Handle[Any]]:
        return self._requests.values()


def _endpoints(listen: str | Mapping[int, str], pool: Pool) -> dict[int, str]:
    """The address of each rank of a pool's replica; raises LocalError(OUT_OF_RANGE) if any is missing or shared."""
    ranks = [r.rank for r in pool.geometry.ranks]
    found = dict(listen) if isinstance(listen, Mapping) else {r: listen.replace("{rank}", str(r)) for r in ranks}
    if sorted(found) != sorted(ranks) or len(set(found.values())) < len(ranks):
        mine, advice = f"an address for each of the ranks {ranks}", 'put "{rank}" where the addresses of ranks differ'
        raise LocalError(ErrorCode.OUT_OF_RANGE, "listen", mine, str(listen), advice)
    return found


def _listener(address: str, options: Options) -> Listener:
    """A listener at `address`, with the keys and the allow-list of the options if the address needs them."""
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


def _check_after(after: Any, pool: Pool) -> None:
    if after is not None:
        check_type("after", after, int, "the handle of a CUDA event, an int", "torch: event.cuda_event")
        if all(each.device is None for each in pool.memories.values()):
            raise bad("after", "None, as the pool is in host memory", after, "call once the rows are written")


def _handoff(geometry: Geometry, rank: int, given: Mapping[str, Mapping[str, bytes]]) -> dict[tuple[int, str], bytes]:
    """Hand-off data by group id and part name; raises LocalError(OUT_OF_RANGE) where the geometry states other data."""
    check_type("handoff", given, Mapping, "a mapping of group name to a mapping of part name to bytes")
    owned = {s.group for r in geometry.ranks if r.rank == rank for s in r.owns}
    every = {g.name: g for g in geometry.groups if not kind_of(g).has_memory}
    groups = {name: group for name, group in every.items() if group.id in owned}
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
                advice = "pass what the geometry states"
                raise LocalError(ErrorCode.OUT_OF_RANGE, path, f"{part.lane_bytes} bytes", came, advice)
            found[group.id, part.name] = data
    if unknown := [name for name in given if name not in every]:
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
