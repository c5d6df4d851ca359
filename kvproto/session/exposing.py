"""The pools of a sink rank that its sources hold: registered one after another, taken back, and freed by proof.

A pool is free when no source rank holds it. A rank holds it from Register until it answers Unregistered as PROVEN,
until its process is dead, or until its session has ended and its transfers are proven to write no more (KVP-EPO-FREE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party, Stated
from kvproto.session.endpoint import Endpoint
from kvproto.session.push import SinkPush
from kvproto.session.records import SinkTransfer
from kvproto.session.sink import SinkSession
from kvproto.session.stream import Registration
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import Feature

__all__ = ["OURS", "Exposed", "Exposing"]

OURS = 0
"""A session number that no session has; it stands for this side's own copies, which no peer's death ends."""


@attrs.frozen(eq=False)
class Exposed:
    """A pool of this rank, as it is registered with source ranks."""

    epoch: int
    """The epoch of its first registration."""
    columns: tuple[m.Columns, ...]
    registration: Callable[[int], Registration]
    """Makes the registration for one source rank."""


class Exposing(Endpoint):
    """The part of a sink endpoint that registers pools."""

    def __init__(self, me: Party, geometry: Geometry) -> None:
        super().__init__(me, geometry)
        self.exposed: Exposed | None = None
        """The pool that new transfers go into, if any."""
        self.plan: Plan | None = None
        self.digests = b"", b""
        """Digests of the Descriptions that the plan is made from, the source's first."""
        self.ready = False
        self.refused: KvprotoError | None = None
        self.sessions: dict[Any, SinkSession] = {}
        """Sessions by address."""
        self._ranks: dict[int, SinkSession] = {}
        """Sessions whose plan is known, by source rank."""
        self._wants: dict[int, SinkTransfer] = {}
        self._unproven: dict[int, tuple[object, set[tuple[int, int]]]] = {}
        """By transfer that was Lost as UNPROVABLE: its pool, and the session and sequence of each unproven part."""

    def unsettled(self) -> None:
        self.ready = False

    def adaptable(self, geometry: Geometry) -> bool:
        """Whether its sessions can go on with another pool of this geometry (feature EPOCHS)."""
        routed: list[SinkSession | None] = self._routed()
        if geometry != self.geometry:
            routed += self.sessions.values()
        return bool(routed) and all(each is not None and _adaptable(each) for each in routed)

    def expose(self, exposed: Exposed, now: float, geometry: Geometry | None = None) -> None:
        """Register another pool, which new transfers go into once every routed rank has mapped it.

        `geometry` is the rank's from now on; if it has changed, every session plans again first.
        """
        self.exposed, self.ready = exposed, False
        if geometry is not None and geometry != self.geometry:
            self.geometry, self.stated = geometry, Stated.of(geometry, self.stated.version + 1)
            for session in [each for each in self.sessions.values() if _adaptable(each)]:
                session.part(Describing).describe(now)
        self._after(now)

    def give_back(self, exposed: Exposed, at_once: bool, now: float) -> None:
        """Take a pool back from sources that can return it; with `at_once`, transfers into it end with POOL_MOVED."""
        if exposed is self.exposed:
            self.exposed, self.ready = None, False
        for session in [each for each in self.sessions.values() if _adaptable(each)]:
            for owned in list(session.owner.epochs.values()):
                if owned.memory is exposed:
                    session.owner.unregister(owned, at_once, now)
        self._after(now)

    def holders(self, exposed: Exposed) -> list[str]:
        """Who may still read or write a pool, for display; it is free when the list is empty (KVP-EPO-FREE)."""
        found = [session.name for session in self.sessions.values() if self._holds(session, exposed)]
        ours = any(want.into is exposed for want in self._wants.values())
        unproven = {part[0] for into, missing in self._unproven.values() if into is exposed for part in missing}
        return found + ["transfers that are not over"] * (ours or OURS in unproven)

    def given_back(self, exposed: Exposed) -> bool:
        """Whether every source rank that mapped a pool has reported that it is unmapped."""
        return all(o.memory is not exposed for s in self.sessions.values() for o in s.owner.epochs.values())

    def outdated(self, exposed: Exposed) -> bool:
        """Whether a source rank mapped a pool under an earlier version of its Description, even one with equal content.

        It accepts no more transfers of such an epoch.
        """
        return any(
            owned.memory is exposed and owned.described.of_source.version != session.described.of_source.version
            for session in self._routed() if session is not None
            for owned in session.owner.epochs.values()
        )  # fmt: skip

    def _holds(self, session: SinkSession, exposed: Exposed) -> bool:
        held = [owned for owned in session.owner.epochs.values() if owned.memory is exposed]
        if not held or any(isinstance(each, SinkPush) and each.dead for each in session.deliveries):
            return False
        unproven = {part[0] for _, missing in self._unproven.values() for part in missing}
        return session.open or session.session in unproven or any(owned.unprovable for owned in held)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the source ranks' Descriptions that new transfers are planned by."""
        return tuple(each.described.of_source.version for each in self._routed() if each is not None)

    def _routed(self) -> list[SinkSession | None]:
        """The sessions of routed ranks, None for a rank without one."""
        return [self._ranks.get(rank) for rank in self.plan.required(self.me.rank)] if self.plan is not None else []

    def _register(self, now: float) -> bool:
        """Register the current pool with routed ranks that lack it, one Register at a time; whether there were any."""
        exposed = self.exposed
        if exposed is None or self.ready or self.refused is not None:
            return False
        due = [each for each in self._routed() if each is not None and self._due(each, exposed)]
        for session in due:
            try:
                session.register(exposed.epoch, exposed, exposed.columns, exposed.registration(session.peer.rank), now)
            except KvprotoError as error:  # the memory cannot be exposed to this source
                session.give_up(error.kept())
        return bool(due)

    def _all_ready(self) -> bool:
        """Whether every routed rank has mapped the current pool."""
        current = [each.owner.current if each is not None and each.ready else None for each in self._routed()]
        known = bool(current) and all(owned is not None and owned.memory is self.exposed for owned in current)
        agreed = known and all(each is not None and self._agrees(each) for each in self._routed())
        return agreed and self.exposed is not None and not self.outdated(self.exposed)

    def _due(self, session: SinkSession, exposed: Exposed) -> bool:
        """Whether to register this pool with this session now."""
        newest = session.owner.newest
        known = newest is not None and newest.memory is exposed
        may = session.state == SessionState.DESCRIBED or _adaptable(session)
        return may and self._agrees(session) and not known and not session.owner.registering

    def _agrees(self, session: SinkSession) -> bool:
        """Whether a session's plan is made from the current Descriptions."""
        pending = session.part(Describing).pending
        return not pending and session.described.digests == self.digests == (self.digests[0], self.stated.digest)


def _adaptable(session: SinkSession) -> bool:
    return session.state == SessionState.READY and Feature.EPOCHS in session.features
