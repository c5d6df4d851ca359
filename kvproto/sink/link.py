"""A sink rank's link to one source replica: its sessions, the pools that it registers, and what it requests."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvproto.copying.program import windows
from kvproto.errors import KvprotoError, LocalError, RemoteError, ReportedError, listed
from kvproto.events import Connected, Event, Refused
from kvproto.planning.kinds import TOKENS, axis_of
from kvproto.rank.background import Background
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.session import Party, SinkEndpoint, limits
from kvproto.session.descriptions import Described
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.session.sink import SinkSession
from kvproto.session.sink_endpoint import gone
from kvproto.session.timers import Timers
from kvproto.sink.fetch import Fetch
from kvproto.sink.reads import Puller
from kvproto.sink.registered_pool import LentSinkPool, RegisteredPool, begins_stated, prepared
from kvproto.sink.registered_pools import RegisteredPools
from kvproto.sink.verification import Arrival, Verification
from kvproto.transport.base import Transport
from kvproto.wire.enums import ErrorCode, Feature, Proof
from kvproto.wire.messages import Done, Grants, Register

if TYPE_CHECKING:
    from kvproto.sink.node import SinkNode


@attrs.frozen
class LinkContext:
    """The objects that all links of a sink rank share."""

    host: "SinkNode"
    party: Party
    transports: tuple[Transport, ...]
    readers: tuple[Transport, ...]
    """Transports that can read a source's memory; empty without PULL."""
    features: tuple[Feature, ...]
    background: Background
    ticket_wait: float | None = None
    """Seconds that a source waits for the prompt of a ticket; None: what `limits` says."""
    timers: Timers = attrs.Factory(Timers)
    verification: Verification = attrs.Factory(Verification)
    unreached: Counter[tuple[str, int]] = attrs.Factory(Counter)
    """By source replica, fetches in a row that were lost because it cannot write this side's memory."""


class SourceLink:
    """One source replica as a sink rank sees it."""

    def __init__(
        self,
        context: LinkContext,
        lent: LentSinkPool,
        seed: str,
        replica: tuple[str, int],
        server: bytes | None = None,
    ) -> None:
        """Greet the rank of `replica` at `seed`, whose ranks all have the public key `server` (KVP-NET-KEY)."""
        self._context, self.seed, self.replica, self.server = context, seed, replica, server
        self._fetches: dict[Fetch, None] = {}
        """Fetches from this source, in order, until nothing can write their pages any more."""
        self._waiting: dict[Fetch, None] = {}
        """Of these, the ones that wait for the link to be ready."""
        self._noted: list[Callable[[], None]] = []
        """Calls of the endpoint, to be done in the next turn."""
        self._turning = self._closed = False
        self.awaited = False
        """Whether it is over, and its source is to be greeted again."""
        self.former = False
        """Whether it is kept only until nothing of its fetches waits for proof."""
        self._agreed: Connected | None = None
        self.endpoint = SinkEndpoint(
            context.party,
            lent.pool.layout.geometry,
            context.features,
            seed,
            self,
            proving=[t.capabilities.code for t in context.transports if t.capabilities.death_is_proof],
            replica=replica,
            timers=context.timers,
        )
        self.endpoint.plans.defer = prepared(context.background, lambda: self._pools.current, self.needs_turn)
        self._puller = Puller(self.endpoint, context.readers)
        self._pools = RegisteredPools(self.endpoint, context.transports, context.verification, lent)
        self.endpoint.dial(machine.monotonic())

    # calls of the engine

    def fetch(self, fetch: Fetch) -> None:
        """Request a fetch, at once or when the link is ready; it is lost if neither side has one of its axes."""
        fetch.link = self
        self._fetches[fetch] = self._waiting[fetch] = None
        if fetch.seconds is not None and fetch.deadline is None:
            fetch.deadline = self._context.timers.at(
                machine.monotonic() + fetch.seconds, partial(_check_accepted, fetch)
            )
        self._request()
        if fetch.transfer is None:  # otherwise its Transfer waits to be sent, which asks for a turn
            self.needs_turn()

    def grant(self, fetch: Fetch, grants: Mapping[int, Grants], whole: bool) -> None:
        """Name items of a fetch: `grants` is everything granted so far, and `whole` if that is all it asks for."""
        if fetch not in self._fetches or fetch.whole:
            return
        fetch.grants, fetch.whole = grants, whole
        if fetch.transfer is None:
            self._request()
            return
        for attempt in fetch.offers if whole else ():
            if attempt.lease is not None:  # otherwise it has failed since, and the fetch is about to be lost
                self._read(attempt)
        self._send_grants(fetch, fetch.transfer)

    def _send_grants(self, fetch: Fetch, transfer: SinkTransfer) -> None:
        """Send the sources what is granted so far."""
        assert fetch.registered is not None
        try:
            streams = self.endpoint.streamed(transfer) if fetch.whole else {}
            unpackers = fetch.registered.unpackers(streams, fetch.grants)
            self.endpoint.grant(transfer, fetch.grants, machine.monotonic(), unpackers)
        except KvprotoError as error:
            self.endpoint.abort(transfer, error, machine.monotonic())

    def abort(self, fetch: Fetch, error: KvprotoError) -> None:
        """Stop a fetch; it is lost with this error."""
        if fetch.done or fetch not in self._fetches:
            return
        if fetch.transfer is None:
            self._lose(fetch, error)
        elif fetch.transfer in self.endpoint.transfers:
            self.endpoint.abort(fetch.transfer, error, machine.monotonic())
            self.needs_turn()
        elif not self._context.verification.stop(fetch, error):
            self._lose(fetch, error, proven=False)

    def _lose(self, fetch: Fetch, error: KvprotoError, proven: bool = True) -> None:
        """Report a lost fetch, and keep it only until it is proven that nothing can write its pages any more."""
        unwritten = error.code in (ErrorCode.TRANSPORT_FAILED, ErrorCode.PEER_LOST)  # as the source reports
        self._context.unreached[self.replica] += unwritten and isinstance(error, ReportedError)
        fetch.expect_nothing()
        if proven:
            self._forget(fetch)
        elif fetch.registered is not None:
            fetch.registered.lent.quarantine.hold(fetch, fetch.grants)
        self.report(fetch.lose(error, proven))

    def _forget(self, fetch: Fetch) -> None:
        """Forget a fetch whose pages nothing can write any more."""
        fetch.expect_nothing()
        fetch.transfer = None
        del self._fetches[fetch]
        self._waiting.pop(fetch, None)
        if self.former or self.over or self._pools.leaving:
            self.needs_turn()

    # pools

    def adaptable(self, pool: Pool) -> bool:
        """Whether its sessions can go on with this pool."""
        return not self.over and self.endpoint.adaptable(pool.layout.geometry)

    def expose(self, lent: LentSinkPool) -> None:
        """Register another pool for fetches from now on; fetches that wait with pages of the old one are lost."""
        self.drop_waiting()
        self._pools.expose(lent)

    def sleep(self, error: KvprotoError) -> None:
        """End all fetches, and take the pool back from source ranks that can return it."""
        for fetch in list(self._fetches):
            self.abort(fetch, error)
        self._pools.withdraw(at_once=True)

    def drop_waiting(self) -> None:
        """Lose the fetches that wait, as the pool of their pages has been replaced."""
        self.fail(RemoteError(ErrorCode.POOL_MOVED, "", "pages of another pool", "a fetch that waits", "fetch again"))

    def holders(self, lent: LentSinkPool) -> list[str]:
        """Parties that may still read or write a pool, for display."""
        holders, current = self._pools.holders(lent), self._pools.current
        if current is not None and current.lent is lent and not self.over:  # it may still be registered
            holders.append(f"the link to {self.seed}")
        return holders

    def refuse(self, address: str, error: KvprotoError, by_us: bool = True) -> None:
        """Record why the link cannot be used."""
        if not self.over:
            self.endpoint.refused = error
            self.fail(error)
            self.report(Refused(address, error, by_us))
            self.needs_turn()

    def fail(self, error: KvprotoError) -> None:
        """Lose the fetches that wait, as the link will never be ready for them."""
        for fetch in list(self._waiting):
            self.abort(fetch, error)

    # turns

    @property
    def over(self) -> bool:
        """Whether it was refused or closed, so that the source can only be reached over another link."""
        return self.endpoint.refused is not None or self.endpoint.over

    @property
    def usable(self) -> bool:
        """Whether a fetch begins at once: all ranks are ready, and none suspect."""
        return self.endpoint.ready and not self.endpoint.suspect

    @property
    def idle(self) -> bool:
        """Whether no fetch is under way, and nothing of an earlier one waits for proof."""
        return not self._fetches

    @property
    def copying(self) -> bool:
        """Whether copies are under way that end without notice, or with that of a transport."""
        return self._pools.unpacking or self._puller.busy

    @property
    def poll_interval(self) -> float | None:
        """Seconds until it needs a turn although nothing announces one; None if something does."""
        intervals = [self._puller.poll_interval]
        if self._pools.unpacking:
            intervals += [t.capabilities.poll_interval for t in self._context.transports]
        return min((seconds for seconds in intervals if seconds is not None), default=None)

    def turn(self, now: float) -> None:
        """Do what has become due, and send what follows from it."""
        self._turning, more = True, True
        while more:
            noted, self._noted = self._noted, []
            for call in noted:
                call()
            more = self._puller.advance()
            if self._waiting:
                self._request()
            self._flush(now)
            more = more or bool(self._noted)
        if self._waiting and self.over:
            self._leave_waiting()
        if self._pools.leaving:
            self._pools.release()
        self._turning = False

    def _leave_waiting(self) -> None:
        """Give up the fetches that wait, as the link is over; another link requests them if the source goes on."""
        if not self.endpoint.forgotten:
            self.fail(self.endpoint.refused or gone(self.endpoint.gone))
        for fetch in list(self._waiting):
            del self._fetches[fetch], self._waiting[fetch]
            fetch.link, fetch.versions = None, ()
            self._context.host.fetch(fetch)

    def _flush(self, now: float) -> None:
        for address, frame in self.endpoint.to_send(now):
            try:
                self._context.host.send(self, str(address), frame)
            except KvprotoError as error:  # an address in Welcome that cannot be used
                self.refuse(str(address), error)

    def close(self, reason: str) -> None:
        """Stop reading and unmap, then say Goodbye."""
        self._closed = True
        self._puller.close()
        self.endpoint.goodbye(reason)
        self._flush(machine.monotonic())

    def give_up_late(self, fetch: Fetch, now: float) -> None:
        """Give up a fetch past its deadline, long after if the source has accepted it (KVP-TRN-ENDLESS)."""
        if fetch.transfer is None or not fetch.transfer.accepted:
            hindrances = self.endpoint.hindrances(fetch.transfer) or [f"no answer from the source at {self.seed}"]
            self._abort_late(fetch, _UNANSWERED.format(listed(hindrances, 2, "; ")), now)
        else:
            wait = self._context.ticket_wait
            end = now + (limits.TICKET_WAIT if wait is None else wait) + limits.PATIENCE
            late = partial(self._abort_late, fetch, _ENDLESS.format(self.seed))
            fetch.deadline = self._context.timers.at(end, late)

    def _abort_late(self, fetch: Fetch, why: str, now: float) -> None:
        self.abort(fetch, RemoteError(ErrorCode.DEADLINE, "ticket", advice=why))

    def _request(self) -> None:
        """Request the fetches that wait, once the link is ready and no source rank is suspect."""
        registered = self._pools.current
        if registered is None or not self.usable:
            return
        versions = self.endpoint.versions
        for fetch in list(self._waiting):
            if fetch.versions == versions:
                continue
            bare = fetch.deferred
            if bare and Feature.INTENT not in self.endpoint.features():
                if not fetch.whole:  # such a source needs the items with the request
                    self._want(fetch, None)
                    continue
                bare = False
            del self._waiting[fetch]
            try:
                if fetch.axes:
                    self._check_axes(registered, fetch)
                asked = fetch.asked if bare else fetch.grants
                unpackers = registered.unpackers(self.endpoint.streamed(), asked, bare)
                told = bytes(fetch.ticket.key), fetch.content, dict(asked)
                transfer = self.endpoint.transfer(*told, machine.monotonic(), unpackers, fetch)
            except KvprotoError as error:
                self._lose(fetch, error.kept())
                continue
            fetch.transfer, fetch.versions, fetch.registered = transfer, versions, registered
            if bare and fetch.grants:
                self._send_grants(fetch, transfer)

    def _want(self, fetch: Fetch, tokens: int | None) -> None:
        """Report to the engine, once, that items are of use up to this token (None: all of them)."""
        if (event := fetch.want(tokens)) is not None:
            self.report(event)

    def _check_axes(self, registered: RegisteredPool, fetch: Fetch) -> None:
        """Raise LocalError for an axis of the prompt that no group of either side has."""
        sides = registered.lent.pool.layout.geometry, self.endpoint.source
        known = {axis_of(group) for side in sides if side is not None for group in side.groups} - {TOKENS}
        if unknown := sorted(set(fetch.axes) - known):
            mine = f"axes of {sorted(known)}" if known else "none, as all caches of both sides are of tokens"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, repr(unknown[0]))

    # calls of the endpoint

    def needs_turn(self) -> None:
        if not self._turning:
            self._context.host.needs_turn(self)

    def report(self, event: Event) -> None:
        self._context.host.report(self, event)

    def planned(self, event: Connected) -> None:
        self._agreed = event
        self._noted.append(self._pools.planned)

    def ready(self) -> None:
        if self._agreed is not None:
            # the engine learns of a plan when it can be used
            self.report(attrs.evolve(self._agreed, transports=self.endpoint.transports))

    def attest(self, attestation: bytes, holds: bool) -> None:
        machine.attest(attestation, holds)

    def map_memory(self, session: SinkSession, register: Register, described: Described) -> None:
        pools = self._pools
        self._noted.append(
            lambda: self._puller.map(session, register, described, pools.pool, asleep=pools.current is None)
        )

    def unmap_memory(self, session: SinkSession, epoch: int) -> None:
        self._puller.unmapping.add((session, epoch))

    def useful(self, transfer: SinkTransfer) -> None:
        self._want(transfer.fetch, transfer.useful)

    def offered(self, attempt: SinkAttempt) -> None:
        fetch: Fetch = attempt.transfer.fetch
        if fetch.whole:
            self._read(attempt)
            return
        fetch.offers.append(attempt)  # the endpoint renews its lease until then
        if len(fetch.offers) == len(attempt.transfer.parts):
            self._want(fetch, None)

    def arrived(self, transfer: SinkTransfer, done: tuple[Done, ...], seconds: float) -> None:
        """Queue a transfer whose bytes are all here for its checksums."""
        fetch: Fetch = transfer.fetch
        assert fetch.registered is not None
        fetch.expect_nothing()
        verify = all(Feature.VERIFY in attempt.session.features for attempt in transfer.parts.values())
        self._context.verification.add(Arrival(self, fetch, fetch.registered, done, seconds), verify)

    def verified(self, arrival: Arrival) -> None:
        """End a fetch whose checksums are all computed."""
        del self._context.unreached[self.replica]
        self._forget(arrival.fetch)
        self.report(arrival.outcome())

    def lost(self, transfer: SinkTransfer, proof: Proof) -> None:
        if self._closed:
            return
        fetch: Fetch = transfer.fetch
        error, proven = transfer.error, proof == Proof.PROVEN
        assert error is not None
        assert fetch.registered is not None
        if proven and self._asks_again(fetch, error):
            fetch.transfer = None
            self._waiting[fetch] = None
            return
        if not transfer.unheard:
            self._lose(fetch, error, proven)
        elif proven:
            self._request_again(fetch)

    def proven(self, transfer: SinkTransfer) -> None:
        fetch: Fetch = transfer.fetch
        assert fetch.registered is not None
        if not fetch.done:
            self._request_again(fetch)
            return
        fetch.registered.lent.quarantine.free(fetch)
        self._forget(fetch)
        self.report(fetch.free())

    def _request_again(self, fetch: Fetch) -> None:
        """Request a fetch over another link, as the source goes on but has forgotten this one."""
        del self._fetches[fetch]
        self._waiting.pop(fetch, None)
        fetch.link, fetch.transfer, fetch.versions = None, None, ()
        fetch.offers.clear()
        self._noted.append(partial(self._context.host.fetch, fetch))
        self.needs_turn()

    def _asks_again(self, fetch: Fetch, error: KvprotoError) -> bool:
        """Whether to request a fetch again, because only a changed Description of the source was in its way."""
        current = self._pools.current
        if error.code != ErrorCode.DESCRIPTION_MISMATCH or self.over or current is None or fetch.registered is None:
            return False
        if current.lent is not fetch.registered.lent:
            return False
        fetch.offers.clear()
        return True

    def _read(self, attempt: SinkAttempt) -> None:
        """Have an offer read into the pages of its fetch."""
        fetch: Fetch = attempt.transfer.fetch
        assert fetch.registered is not None
        assert attempt.lease is not None
        offer = attempt.lease.offer
        grants = fetch.registered.begun(fetch.grants, begins_stated(offer))
        routes = fetch.registered.programs.pair(offer.writer).routes
        self._puller.offered(attempt, windows(grants.values()), fetch.registered.lent.pool, routes)
        self.needs_turn()


def _check_accepted(fetch: Fetch, now: float) -> None:
    """Give up a fetch that its source has not accepted in time, over the link that has it now."""
    if fetch.link is not None:
        fetch.link.give_up_late(fetch, now)


_UNANSWERED = "the ticket's deadline passed: {}: check that all ranks of the source run and are known"
_ENDLESS = "the source at {} accepted it, but neither served it nor reported that its deadline passed: check the source"
