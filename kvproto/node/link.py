"""A sink rank's link to one source replica: its sessions, what it reads of it, and what has become of each transfer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import attrs

from kvproto.copying.program import windows
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.node.arrivals import Arrivals, Taken, received
from kvproto.node.backstage import Backstage
from kvproto.node.claiming import Claimed
from kvproto.node.lending import Lending
from kvproto.node.lent import Filled
from kvproto.node.pool import RankPool
from kvproto.node.pulling import Puller
from kvproto.node.terms import Terms, begins_of, prepared
from kvproto.node.told import PagesNeeded, Received, TransferLost, TransferProven
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.session import Party, SinkEndpoint, limits
from kvproto.session.events import Arrived, Lost, Offered, Planned, Proven, Ready, RegisterAsked, UnmapAsked, Useful
from kvproto.session.timers import Timer
from kvproto.transport.base import Transport
from kvproto.wire.enums import ErrorCode, Feature, Proof
from kvproto.wire.messages import Grants

__all__ = ["Here", "SourceLink"]


@attrs.frozen
class Here:
    """What all links of a sink rank share."""

    party: Party
    transports: tuple[Transport, ...]
    readers: tuple[Transport, ...]
    """Those that read a source's memory; empty without PULL."""
    features: tuple[Feature, ...]
    backstage: Backstage
    runs: dict[tuple[str, int, int], int] = attrs.Factory(dict)
    """The latest run of each source rank, whichever link has met it."""


@attrs.frozen
class _Wanted:
    """A transfer that waits for the link to be ready."""

    ticket: bytes = attrs.field(repr=False)
    content: bytes
    grants: Mapping[int, Grants]
    axes: Collection[str]
    claimed: bool
    """Whether `grants` names no items yet."""
    by: tuple[int, ...] = ()
    """Versions of the Descriptions by which it was asked for already, in vain (KVP-TRN-CHANGED)."""


class SourceLink:
    """One source replica as a sink rank sees it; transfers carry the sink's own numbers."""

    def __init__(
        self, here: Here, lent: Filled, key: int, seed: str, replica: tuple[str, int] | None = None,
        server: bytes | None = None,
    ) -> None:  # fmt: skip
        """Greets the rank that listens at `seed`, where `replica` must answer; `key` tells links apart.

        `server` is the public key that every rank of the source must have, where addresses need one (KVP-NET-KEY).
        """
        self._here, self.key, self.seed, self.server = here, key, seed, server
        self.endpoint = SinkEndpoint(
            here.party, lent.pool.layout.geometry, here.features, seed,
            proving=[t.capabilities.code for t in here.transports if t.capabilities.death_is_proof],
            replica=replica,
        )  # fmt: skip
        self.endpoint.plans.defer, self.endpoint.runs = prepared(here.backstage, lambda: self._pools.terms), here.runs
        self._puller = Puller(self.endpoint, here.readers)
        self._arrivals = Arrivals()
        self._waiting: dict[int, _Wanted] = {}
        self._numbers: dict[int, int] = {}
        """The endpoint's number of a transfer to ours."""
        self._under: dict[int, Terms] = {}
        """By our number, until nothing can write its pages any more."""
        self._asked: dict[int, _Wanted] = {}
        """Those under way, by our number."""
        self._grants: dict[int, Mapping[int, Grants]] = {}
        self._deadlines: dict[int, Timer] = {}
        """By when the source must have accepted a transfer, by our number."""
        self._claims: dict[int, Claimed] = {}
        """Of transfers that name their items late, by our number."""
        self._told: list[TransferLost | PagesNeeded] = []
        """What is told in the next turn."""
        self._agreed: Planned | None = None
        self._pools = Lending(self.endpoint, here.transports, self._arrivals, lent)
        self.endpoint.dial(time.monotonic())

    # what the engine says

    def fetch(
        self, number: int, ticket: bytes, content: bytes, grants: Mapping[int, Grants], seconds: float | None = None,
        axes: Collection[str] = (), claimed: bool = False, spans: bool = False,
    ) -> None:  # fmt: skip
        """Ask for a request, at once or when the link is ready; `seconds`: how long the source may take to accept.

        `axes` are those whose lengths the prompt states: the request is lost where neither side has one of them.
        `claimed`: `grants` names no items. PagesNeeded says when they are of use, with `spans` piece by piece.
        """
        assert self._pools.terms is not None  # who is asleep fetches nothing
        if seconds is not None:
            deadline = time.monotonic() + seconds
            self._deadlines[number] = self.endpoint.timers.at(deadline, partial(self._check_accepted, number))
        self._waiting[number] = _Wanted(ticket, content, grants, axes, claimed)
        if claimed:
            self._claims[number] = Claimed(spans)
        self._ask()

    def grant(self, number: int, grants: Mapping[int, Grants], whole: bool) -> None:
        """Name items of a transfer: all that are granted by now; `whole`: everything that it asks for."""
        claim = self._claims.get(number)
        if claim is None or claim.whole:
            return
        claim.grants, claim.whole = grants, whole
        inner = self._inner(number)
        if inner is None:
            self._ask()
            return
        self._grants[number] = grants
        for offer in claim.offers if whole else ():
            self._read(offer)
        self._name(inner, claim)

    def _inner(self, number: int) -> int | None:
        """The endpoint's number of a transfer."""
        return next((n for n, ours in self._numbers.items() if ours == number), None)

    def _name(self, inner: int, claim: Claimed) -> None:
        """Tell the sources what is granted by now."""
        try:
            terms, grants = self._under[self._numbers[inner]], claim.grants
            unpackers = terms.unpackers(self.endpoint.streamed(inner), grants) if claim.whole else {}
            self.endpoint.grant(inner, grants, time.monotonic(), unpackers)
        except KvprotoError as error:
            self.endpoint.abort(inner, error, time.monotonic())

    def abort(self, number: int, error: KvprotoError) -> None:
        """Stop a transfer; TransferLost follows."""
        if self._waiting.pop(number, None) is not None:
            self._undo_deadline(number)
            self._claims.pop(number, None)
            self._told.append(TransferLost(number, error, True))
            return
        inner = self._inner(number)
        if inner is not None:
            self.endpoint.abort(inner, error, time.monotonic())

    # pools

    def adaptable(self, pool: RankPool) -> bool:
        """Whether its sessions go on with this pool."""
        return not self.over and self.endpoint.adaptable(pool.layout.geometry)

    def expose(self, lent: Filled) -> None:
        """Register another pool, for transfers from now on; those that wait with pages of another are lost."""
        self.drop_waiting()
        self._pools.expose(lent)

    def sleep(self, error: KvprotoError) -> None:
        """End all transfers, and ask the pool back from who can give it back."""
        for number in [*self._waiting, *self._grants]:
            self.abort(number, error)
        self._pools.withdraw(at_once=True)

    def drop_waiting(self) -> None:
        """The pool has moved: nothing more is asked for into its pages."""
        self.fail(RemoteError(ErrorCode.POOL_MOVED, "", "pages of another pool", "a fetch that waits", "fetch again"))

    def holders(self, lent: Filled) -> list[str]:
        """Who may still touch a pool, for people."""
        found, terms = self._pools.holders(lent), self._pools.terms
        if terms is not None and terms.lent is lent and not self.over:  # it may still be registered
            found.append(f"the link to {self.seed}")
        return found

    def refuse(self, error: KvprotoError) -> None:
        """The link cannot be used."""
        self.endpoint.refused = self.endpoint.refused or error
        self.fail(error)

    def fail(self, error: KvprotoError) -> None:
        """The link will never be ready: what waits for it is lost."""
        for number in list(self._waiting):
            self.abort(number, error)

    # turns

    @property
    def over(self) -> bool:
        """Whether it was refused or closed, so that only another link leads to the source."""
        return self.endpoint.refused is not None or self.endpoint.over

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way, and nothing of an earlier one waits for proof."""
        return not (self._under or self._waiting or self._told)

    def timeout(self) -> float | None:
        """Seconds until there is something to do."""
        found = [self._puller.poll_interval]
        if self._told or self._arrivals.busy:
            found.append(0.0)
        if self._pools.unpacking:
            found += [t.capabilities.poll_interval for t in self._here.transports]
        if (deadline := self.endpoint.next_deadline()) is not None:
            found.append(max(deadline - time.monotonic(), 0.0))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def take(self) -> list[Any]:
        """What has happened since the last call."""
        told: list[Any] = []
        more = True
        while more:
            events = self.endpoint.take_events()
            for event in events:
                told += self._hear(event)
            told += [self._received(*each) for each in self._arrivals.take()]
            more = self._puller.advance() or bool(events)
            self._ask()
        if self.over:
            self.fail(self.endpoint.refused or _gone(self.seed))
        self._pools.let_go()
        told = self._told + told  # pages are asked for before the fetch is lost
        self._told = []
        return told

    def close(self, reason: str) -> None:
        """Goodbye; stop reading, then unmap."""
        self._puller.close()
        self.endpoint.goodbye(reason)

    def _check_accepted(self, number: int, now: float) -> None:
        """Give up what the source has not accepted in time; once it has, it counts the deadline, and has until long
        after it (KVP-TRN-ENDLESS).
        """
        inner = self._inner(number)
        if number in self._waiting or (inner is not None and not self.endpoint.accepted(inner)):
            self._abort_late(_UNANSWERED, number, now)
        elif inner is not None:
            end = now + limits.TICKET_WAIT + limits.PATIENCE
            self._deadlines[number] = self.endpoint.timers.at(end, partial(self._abort_late, _ENDLESS, number))

    def _abort_late(self, why: str, number: int, now: float) -> None:
        self.abort(number, RemoteError(ErrorCode.DEADLINE, "ticket", advice=why.format(self.seed)))

    def _undo_deadline(self, number: int) -> None:
        if (timer := self._deadlines.pop(number, None)) is not None:
            timer.cancel()

    def _ask(self) -> None:
        """Send what waits, once the link is ready and no source rank is suspect."""
        terms = self._pools.terms
        if not self._waiting or not self.endpoint.ready or self.endpoint.suspect or terms is None:
            return
        waiting, self._waiting = self._waiting, {}
        versions = self.endpoint.versions
        for number, wanted in waiting.items():
            claim = self._claims.get(number)
            if wanted.by == versions:
                self._waiting[number] = wanted
                continue
            asked_by = attrs.evolve(wanted, by=versions)
            if claim is not None and Feature.INTENT not in self.endpoint.features():
                if not claim.whole:  # such a source is asked when the items are there
                    self._waiting[number] = wanted
                    self._need(number, claim, None)
                    continue
                wanted, claim = attrs.evolve(wanted, grants=claim.grants, claimed=False), None
            try:
                self._check_axes(terms, wanted.axes)
                unpackers = terms.unpackers(self.endpoint.streamed(), wanted.grants, wanted.claimed)
                asked = wanted.ticket, wanted.content, dict(wanted.grants)
                inner = self.endpoint.transfer(*asked, time.monotonic(), unpackers)
            except KvprotoError as error:
                self._claims.pop(number, None)
                self._told.append(TransferLost(number, error.kept(), True))
                continue
            self._numbers[inner], self._grants[number], self._asked[number] = number, wanted.grants, asked_by
            self._under[number] = terms
            if claim is not None and claim.grants:
                self._grants[number] = claim.grants
                self._name(inner, claim)

    def _need(self, number: int, claim: Claimed, tokens: int | None) -> None:
        """Tell the engine, once, that items are of use up to this token, None: all."""
        if not (claim.whole or (tokens is not None and not claim.spans) or claim.told == (tokens,)):
            claim.told = (tokens,)
            self._told.append(PagesNeeded(number, tokens))

    def _check_axes(self, terms: Terms, axes: Collection[str]) -> None:
        """Raise LocalError for an axis that no group of either side has."""
        sides = terms.lent.pool.layout.geometry, self.endpoint.source
        known = {axis_of(group) for side in sides if side is not None for group in side.groups} - {TOKENS}
        if unknown := sorted(set(axes) - known):
            mine = f"axes of {sorted(known)}" if known else "none, as all caches of both sides are of tokens"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, repr(unknown[0]))

    def _hear(self, event: Any) -> list[Any]:
        match event:
            case RegisterAsked():
                self._puller.map(event, self._pools.pool, asleep=self._pools.terms is None)
            case UnmapAsked():
                self._puller.unmap(event)
            case Offered():
                number = self._numbers[event.transfer]
                claim = self._claims.get(number)
                if claim is None or claim.whole:
                    self._read(event)
                else:  # its lease is renewed meanwhile
                    claim.offers.append(event)
                    if len(claim.offers) == len(self._under[number].expected.writers):
                        self._need(number, claim, None)
            case Useful():
                number = self._numbers[event.transfer]
                self._need(number, self._claims[number], event.tokens)
            case Arrived():
                number = self._numbers[event.transfer]
                self._arrivals.add(event, self._under[number], self._grants[number], self.endpoint.features())
            case Lost():
                number = self._numbers[event.transfer]
                grants, wanted = self._grants.pop(number), self._asked.pop(number)
                if self._asks_again(event, number):
                    del self._numbers[event.transfer], self._under[number]
                    self._waiting[number] = wanted
                    return []
                self._undo_deadline(number)
                self._claims.pop(number, None)
                proven = event.proof == Proof.PROVEN
                if proven:
                    del self._numbers[event.transfer], self._under[number]
                else:
                    self._under[number].lent.quarantine.hold(number, grants)
                return [TransferLost(number, event.error, proven)]
            case Proven():
                number = self._numbers.pop(event.transfer)
                self._under.pop(number).lent.quarantine.free(number)
                return [TransferProven(number)]
            case Planned():
                self._agreed = event
                self._pools.planned()
            case Ready():
                return [self._agreed]  # an engine hears of a plan when it can be used
            case _:
                return [event]
        return []

    def _asks_again(self, event: Lost, number: int) -> bool:
        """Whether a transfer is asked for again, as the source's Description has changed and nothing else is wrong."""
        changed = event.error.code == ErrorCode.DESCRIPTION_MISMATCH and event.proof == Proof.PROVEN
        terms = self._pools.terms
        if not changed or self.over or terms is None or terms.lent is not self._under[number].lent:
            return False
        if number in self._claims:
            self._claims[number].offers.clear()
        return True

    def _read(self, event: Offered) -> None:
        """Have an offer read into the pages of its transfer."""
        number = self._numbers[event.transfer]
        terms = self._under[number]
        grants = terms.begun(self._grants[number], begins_of(event.offer))
        routes = terms.expected.pair(event.offer.writer).routes
        self._puller.offered(event, windows(grants.values()), terms.lent.pool, routes)

    def _received(self, event: Arrived, taken: Taken) -> Received | TransferLost:
        number = self._numbers.pop(event.transfer)
        _, _, terms = self._grants.pop(number), self._asked.pop(number), self._under.pop(number)
        self._undo_deadline(number)
        self._claims.pop(number, None)
        return received(number, event, taken, terms)


_UNANSWERED = "the ticket's deadline passed, and the source at {} has not answered: see that it runs and is known"
_ENDLESS = "the source at {} has accepted it, and neither served it nor said that its deadline passed: see what it does"


def _gone(seed: str) -> RemoteError:
    return RemoteError(ErrorCode.PEER_LOST, "", "waiting", f"the source at {seed} is gone", "make a new ticket")
