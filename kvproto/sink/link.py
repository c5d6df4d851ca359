"""A sink rank's link to one source replica: its sessions, what it reads from it, and the state of each transfer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvproto.copying.program import windows
from kvproto.errors import KvprotoError, LocalError, RemoteError, listed
from kvproto.events import Connected
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.rank.background import Background
from kvproto.rank.events import PagesNeeded, Received, TransferLost, TransferProven
from kvproto.rank.pool import RankPool
from kvproto.session import Party, SinkEndpoint, limits
from kvproto.session.events import Arrived, Lost, Offered, Proven, Ready, RegisterAsked, UnmapAsked, Useful
from kvproto.session.sink_endpoint import gone
from kvproto.session.timers import Timer
from kvproto.sink.fetch import Claimed
from kvproto.sink.reads import Puller
from kvproto.sink.registered_pool import Filled, RegisteredPool, begins_of, prepared
from kvproto.sink.verification import Taken, Verification, received
from kvproto.transport.base import Transport
from kvproto.wire.enums import ErrorCode, Feature, Proof
from kvproto.wire.messages import Grants

__all__ = ["LinkContext", "SourceLink"]


@attrs.frozen
class LinkContext:
    """What all links of a sink rank share."""

    party: Party
    transports: tuple[Transport, ...]
    readers: tuple[Transport, ...]
    """Transports that can read a source's memory; empty without PULL."""
    features: tuple[Feature, ...]
    backstage: Background
    ticket_wait: float | None = None
    """Seconds that a source waits for the prompt of a ticket; None: what `limits` says."""
    runs: dict[tuple[str, int, int], int] = attrs.Factory(dict)
    """The latest incarnation of each source rank that any link has met."""


@attrs.define(eq=False)
class _Transfer:
    """A transfer, from the engine's fetch until nothing can write its pages any more."""

    number: int
    ticket: bytes = attrs.field(repr=False)
    content: bytes
    asks: Mapping[int, Grants]
    """What the engine asks for, by group id."""
    axes: Collection[str]
    claim: Claimed | None
    """Which items are named so far, if they are named late."""
    deadline: Timer | None = None
    """The timer for the source to accept, and later to serve it."""
    inner: int | None = None
    """The endpoint's number of it; None while it waits for the link to be ready."""
    by: tuple[int, ...] = ()
    """Versions of the Descriptions by which it was last requested (KVP-TRN-CHANGED)."""
    terms: RegisteredPool = attrs.field(init=False)
    """The terms by which it was last requested."""
    grants: Mapping[int, Grants] = {}
    """What is granted so far, once it was requested."""


class SourceLink:
    """One source replica as a sink rank sees it; transfers have the sink's own numbers."""

    def __init__(
        self, context: LinkContext, lent: Filled, key: int, seed: str, replica: tuple[str, int] | None = None,
        server: bytes | None = None,
    ) -> None:  # fmt: skip
        """Greet the rank that listens at `seed`, where `replica` must answer; `key` tells links apart.

        `server` is the public key that every rank of the source must have, if addresses need one (KVP-NET-KEY).
        """
        self._context, self.key, self.seed, self.server = context, key, seed, server
        self.endpoint = SinkEndpoint(
            context.party, lent.pool.layout.geometry, context.features, seed,
            proving=[t.capabilities.code for t in context.transports if t.capabilities.death_is_proof],
            replica=replica,
        )  # fmt: skip
        self.endpoint.plans.defer = prepared(context.backstage, lambda: self._pools.terms)
        self.endpoint.runs = context.runs
        self._puller = Puller(self.endpoint, context.readers)
        self._arrivals = Verification()
        self._transfers: dict[int, _Transfer] = {}
        """All transfers, by the link's number."""
        self._waiting: dict[int, _Transfer] = {}
        """Transfers that wait for the link to be ready, by the link's number."""
        self._asked: dict[int, _Transfer] = {}
        """The other transfers, by the endpoint's number."""
        self._events: list[TransferLost | PagesNeeded] = []
        """Events for the next turn."""
        self._agreed: Connected | None = None
        self._pools = RegisteredPools(self.endpoint, context.transports, self._arrivals, lent)
        self.endpoint.dial(time.monotonic())

    # calls of the engine

    def fetch(
        self, number: int, ticket: bytes, content: bytes, grants: Mapping[int, Grants], seconds: float | None = None,
        axes: Collection[str] = (), claimed: bool = False, spans: bool = False,
    ) -> None:  # fmt: skip
        """Request a transfer, at once or when the link is ready; the source has `seconds` to accept it.

        `axes` are those whose lengths the prompt states; the transfer is lost if neither side has one of them. With
        `claimed`, `grants` names no items, and PagesNeeded reports when they are of use, with `spans` piece by piece.
        """
        assert self._pools.terms is not None  # a sink that is asleep fetches nothing
        made = _Transfer(number, ticket, content, grants, axes, Claimed(spans) if claimed else None)
        if seconds is not None:
            deadline = time.monotonic() + seconds
            made.deadline = self.endpoint.timers.at(deadline, partial(self._check_accepted, made))
        self._transfers[number] = self._waiting[number] = made
        self._ask()

    def grant(self, number: int, grants: Mapping[int, Grants], whole: bool) -> None:
        """Name items of a transfer: `grants` is everything granted so far, and `whole` if that is all it asks for."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.claim is None or transfer.claim.whole:
            return
        transfer.claim.grants, transfer.claim.whole = grants, whole
        if transfer.inner is None:
            self._ask()
            return
        transfer.grants = grants
        for offer in transfer.claim.offers if whole else ():
            self._read(offer)
        self._send_grants(transfer, transfer.inner, whole)

    def _send_grants(self, transfer: _Transfer, inner: int, whole: bool) -> None:
        """Send the sources what is granted so far."""
        try:
            unpackers = transfer.terms.unpackers(self.endpoint.streamed(inner), transfer.grants) if whole else {}
            self.endpoint.grant(inner, transfer.grants, time.monotonic(), unpackers)
        except KvprotoError as error:
            self.endpoint.abort(inner, error, time.monotonic())

    def abort(self, number: int, error: KvprotoError) -> None:
        """Stop a transfer; TransferLost follows."""
        transfer = self._transfers.get(number)
        if transfer is not None and transfer.inner is not None:
            self.endpoint.abort(transfer.inner, error, time.monotonic())
        elif transfer is not None:
            self._forget(transfer)
            self._events.append(TransferLost(number, error, True))

    @staticmethod
    def _end(transfer: _Transfer) -> None:
        """Expect nothing more of a transfer."""
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        transfer.deadline = transfer.claim = None

    def _forget(self, transfer: _Transfer) -> None:
        """Forget a transfer whose pages nothing can write any more."""
        self._end(transfer)
        del self._transfers[transfer.number]
        self._waiting.pop(transfer.number, None)
        if transfer.inner is not None:
            del self._asked[transfer.inner]

    # pools

    def adaptable(self, pool: RankPool) -> bool:
        """Whether its sessions can go on with this pool."""
        return not self.over and self.endpoint.adaptable(pool.layout.geometry)

    def expose(self, lent: Filled) -> None:
        """Register another pool for transfers from now on; transfers that wait with pages of the old one are lost."""
        self.drop_waiting()
        self._pools.expose(lent)

    def sleep(self, error: KvprotoError) -> None:
        """End all transfers, and take the pool back from source ranks that can return it."""
        for number in list(self._transfers):
            self.abort(number, error)
        self._pools.withdraw(at_once=True)

    def drop_waiting(self) -> None:
        """Lose the transfers that wait, as the pool of their pages has been replaced."""
        self.fail(RemoteError(ErrorCode.POOL_MOVED, "", "pages of another pool", "a fetch that waits", "fetch again"))

    def holders(self, lent: Filled) -> list[str]:
        """Who may still read or write a pool, for display."""
        found, terms = self._pools.holders(lent), self._pools.terms
        if terms is not None and terms.lent is lent and not self.over:  # it may still be registered
            found.append(f"the link to {self.seed}")
        return found

    def refuse(self, error: KvprotoError) -> None:
        """Record why the link cannot be used."""
        self.endpoint.refused = self.endpoint.refused or error
        self.fail(error)

    def fail(self, error: KvprotoError) -> None:
        """Lose the transfers that wait, as the link will never be ready for them."""
        for number in list(self._waiting):
            self.abort(number, error)

    # turns

    @property
    def over(self) -> bool:
        """Whether it was refused or closed, so that the source can only be reached over another link."""
        return self.endpoint.refused is not None or self.endpoint.over

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way, and nothing of an earlier one waits for proof."""
        return not (self._transfers or self._events)

    def timeout(self) -> float | None:
        """Seconds until a turn is due; None if no timer is set."""
        found = [self._puller.poll_interval]
        if self._events or self._arrivals.busy:
            found.append(0.0)
        if self._pools.unpacking:
            found += [t.capabilities.poll_interval for t in self._context.transports]
        if (deadline := self.endpoint.next_deadline()) is not None:
            found.append(max(deadline - time.monotonic(), 0.0))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def take(self) -> list[Any]:
        """The events since the last call."""
        found: list[Any] = []
        more = True
        while more:
            events = self.endpoint.take_events()
            for event in events:
                found += self._handle(event)
            found += [self._received(*each) for each in self._arrivals.take()]
            more = self._puller.advance() or bool(events)
            self._ask()
        if self.over:
            self.fail(self.endpoint.refused or gone(self.endpoint.gone))
        self._pools.release()
        found = self._events + found  # pages are requested before the fetch is lost
        self._events = []
        return found

    def close(self, reason: str) -> None:
        """Stop reading and unmap, then say Goodbye."""
        self._puller.close()
        self.endpoint.goodbye(reason)

    def _check_accepted(self, transfer: _Transfer, now: float) -> None:
        """Give up a transfer that the source has not accepted in time.

        Once accepted, the source watches the deadline, and the transfer is given up only long after (KVP-TRN-ENDLESS).
        """
        if transfer.inner is None or not self.endpoint.accepted(transfer.inner):
            found = self.endpoint.hindrances(transfer.inner) or [f"no answer from the source at {self.seed}"]
            self._abort_late(_UNANSWERED.format(listed(found, 2, "; ")), transfer.number, now)
        else:
            wait = self._context.ticket_wait
            end = now + (limits.TICKET_WAIT if wait is None else wait) + limits.PATIENCE
            why = _ENDLESS.format(self.seed)
            transfer.deadline = self.endpoint.timers.at(end, partial(self._abort_late, why, transfer.number))

    def _abort_late(self, why: str, number: int, now: float) -> None:
        self.abort(number, RemoteError(ErrorCode.DEADLINE, "ticket", advice=why))

    def _ask(self) -> None:
        """Request the transfers that wait, once the link is ready and no source rank is suspect."""
        terms = self._pools.terms
        if not self._waiting or not self.endpoint.ready or self.endpoint.suspect or terms is None:
            return
        waiting, self._waiting = self._waiting, {}
        versions = self.endpoint.versions
        for number, transfer in waiting.items():
            claim, asks = transfer.claim, transfer.asks
            if transfer.by == versions:
                self._waiting[number] = transfer
                continue
            if claim is not None and Feature.INTENT not in self.endpoint.features():
                if not claim.whole:  # such a source needs the items with the request
                    self._waiting[number] = transfer
                    self._need(transfer, None)
                    continue
                asks, claim = claim.grants, None
            try:
                self._check_axes(terms, transfer.axes)
                unpackers = terms.unpackers(self.endpoint.streamed(), asks, claim is not None)
                asked = transfer.ticket, transfer.content, dict(asks)
                inner = self.endpoint.transfer(*asked, time.monotonic(), unpackers)
            except KvprotoError as error:
                self._forget(transfer)
                self._events.append(TransferLost(number, error.kept(), True))
                continue
            transfer.inner, transfer.by, transfer.terms, transfer.grants = inner, versions, terms, asks
            self._asked[inner] = transfer
            if claim is not None and claim.grants:
                transfer.grants = claim.grants
                self._send_grants(transfer, inner, claim.whole)

    def _need(self, transfer: _Transfer, tokens: int | None) -> None:
        """Report to the engine, once, that items are of use up to this token (None: all of them)."""
        claim = transfer.claim
        if claim is None or claim.whole or (tokens is not None and not claim.spans) or claim.reported == (tokens,):
            return
        claim.reported = (tokens,)
        self._events.append(PagesNeeded(transfer.number, tokens))

    def _check_axes(self, terms: RegisteredPool, axes: Collection[str]) -> None:
        """Raise LocalError for an axis that no group of either side has."""
        sides = terms.lent.pool.layout.geometry, self.endpoint.source
        known = {axis_of(group) for side in sides if side is not None for group in side.groups} - {TOKENS}
        if unknown := sorted(set(axes) - known):
            mine = f"axes of {sorted(known)}" if known else "none, as all caches of both sides are of tokens"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, repr(unknown[0]))

    def _handle(self, event: Any) -> list[Any]:
        """Act on an event of the endpoint; return what the engine should know."""
        match event:
            case RegisterAsked():
                self._puller.map(event, self._pools.pool, asleep=self._pools.terms is None)
            case UnmapAsked():
                self._puller.unmap(event)
            case Offered():
                transfer = self._asked[event.transfer]
                if transfer.claim is None or transfer.claim.whole:
                    self._read(event)
                else:  # the endpoint renews its lease until then
                    transfer.claim.offers.append(event)
                    if len(transfer.claim.offers) == len(transfer.terms.expected.writers):
                        self._need(transfer, None)
            case Useful():
                self._need(self._asked[event.transfer], event.tokens)
            case Arrived():
                transfer = self._asked[event.transfer]
                self._arrivals.add(event, transfer.terms, transfer.grants, self.endpoint.features())
            case Lost():
                transfer, proven = self._asked[event.transfer], event.proof == Proof.PROVEN
                if proven and self._asks_again(event.error, transfer):
                    del self._asked[event.transfer]
                    transfer.inner = None
                    self._waiting[transfer.number] = transfer
                    return []
                if proven:
                    self._forget(transfer)
                else:
                    self._end(transfer)
                    transfer.terms.lent.quarantine.hold(transfer.number, transfer.grants)
                return [TransferLost(transfer.number, event.error, proven)]
            case Proven():
                transfer = self._asked[event.transfer]
                transfer.terms.lent.quarantine.free(transfer.number)
                self._forget(transfer)
                return [TransferProven(transfer.number)]
            case Connected():
                self._agreed = event
                self._pools.planned()
            case Ready():
                return [self._agreed]  # the engine learns of a plan when it can be used
            case _:
                return [event]
        return []

    def _asks_again(self, error: KvprotoError, transfer: _Transfer) -> bool:
        """Whether to request a transfer again, because only a changed Description of the source was in its way."""
        terms = self._pools.terms
        if error.code != ErrorCode.DESCRIPTION_MISMATCH or self.over or terms is None:
            return False
        if terms.lent is not transfer.terms.lent:
            return False
        if transfer.claim is not None:
            transfer.claim.offers.clear()
        return True

    def _read(self, event: Offered) -> None:
        """Have an offer read into the pages of its transfer."""
        transfer = self._asked[event.transfer]
        terms, grants = transfer.terms, transfer.terms.begun(transfer.grants, begins_of(event.offer))
        routes = terms.expected.pair(event.offer.writer).routes
        self._puller.offered(event, windows(grants.values()), terms.lent.pool, routes)

    def _received(self, event: Arrived, taken: Taken) -> Received | TransferLost:
        transfer = self._asked[event.transfer]
        self._forget(transfer)
        return received(transfer.number, event, taken, transfer.terms)


class RegisteredPools:
    """The pools that one link lends; its endpoint registers them."""

    def __init__(
        self, endpoint: SinkEndpoint, transports: Sequence[Transport], arrivals: Verification, lent: Filled
    ) -> None:  # fmt: skip
        """`lent` is registered at once; `arrivals` may still read the pools of transfers that have ended."""
        self._endpoint, self._transports, self._arrivals = endpoint, tuple(transports), arrivals
        self.terms: RegisteredPool | None = None
        """The terms of new transfers; None while the sink is asleep."""
        self._former: list[RegisteredPool] = []
        """Earlier terms whose pools a source may still write."""
        self.expose(lent)

    def expose(self, lent: Filled) -> None:
        """Register a pool under the current plan; transfers under way end under the earlier terms."""
        self.withdraw(at_once=False)
        self.pool, self.terms = lent.pool, RegisteredPool(self._endpoint, lent, self._transports)
        self._endpoint.expose(self.terms.exposed, time.monotonic(), lent.pool.layout.geometry)

    def planned(self) -> None:
        """Register the pool again if it was registered under a plan that has been replaced."""
        terms = self.terms
        if terms is None:
            return
        if terms.digests not in (None, self._endpoint.digests) or self._endpoint.outdated(terms.exposed):
            self.expose(terms.lent)

    def withdraw(self, at_once: bool) -> None:
        """Take the pool back from sources that can return it; with `at_once`, transfers into it end."""
        terms, self.terms = self.terms, None
        if terms is not None:
            self._former.append(terms)
            self._endpoint.give_back(terms.exposed, at_once, time.monotonic())

    def holders(self, lent: Filled) -> list[str]:
        """Who may still read or write a pool, for display."""
        found: list[str] = []
        for terms in [each for each in self._all() if each.lent is lent]:
            found += self._endpoint.holders(terms.exposed)
            found += ["checksums under way"] * self._arrivals.reads(terms)
        return found

    def release(self) -> None:
        """Release former pools that nothing holds any more."""
        for terms in [t for t in self._former if not self._endpoint.holders(t.exposed) and not self._arrivals.reads(t)]:
            if self._endpoint.given_back(terms.exposed):
                terms.close()
            self._former.remove(terms)

    @property
    def unpacking(self) -> bool:
        """Whether anything is being unpacked into one of the pools."""
        return any(each.unpacking for each in self._all())

    def _all(self) -> list[RegisteredPool]:
        return [*self._former, *([] if self.terms is None else [self.terms])]


_UNANSWERED = "the ticket's deadline passed: {}: check that all ranks of the source run and are known"
_ENDLESS = "the source at {} accepted it, but neither served it nor reported that its deadline passed: check the source"
