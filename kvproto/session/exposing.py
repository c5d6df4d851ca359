"""Which pools of a sink rank its sources hold: registered one after the other, asked back, and free again by proof.

A pool is free when no source rank holds it. A rank holds it from Register until Unregistered as PROVEN, until its
process is dead, or until its session is over and every transfer of it is proven to write no more (KVP-EPO-FREE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.session.describing import Describing
from kvproto.session.endpoint import Endpoint
from kvproto.session.phases import Party, Stated
from kvproto.session.push import SinkPush
from kvproto.session.records import Want
from kvproto.session.sink import SinkSession
from kvproto.session.stream import Registration
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import Feature

__all__ = ["OURS", "Exposed", "Exposing"]

OURS = 0
"""Stands for our own copies, which no death of a peer proves; no session has that number."""


@attrs.frozen(eq=False)
class Exposed:
    """A pool of this rank, as it is registered with source ranks."""

    epoch: int
    """Of its first registration."""
    columns: tuple[m.Columns, ...]
    registration: Callable[[int], Registration]
    """What one source rank is told of it."""


class Exposing(Endpoint):
    """What a sink endpoint knows of its pools."""

    def __init__(self, me: Party, geometry: Geometry) -> None:
        super().__init__(me, geometry)
        self.exposed: Exposed | None = None
        """What new transfers go into; None: nothing."""
        self.plan: Plan | None = None
        self.digests = b"", b""
        """Of the Descriptions that the plan is made of, the source's first."""
        self.ready = False
        self.refused: KvprotoError | None = None
        self.sessions: dict[Any, SinkSession] = {}
        """By address."""
        self._ranks: dict[int, SinkSession] = {}
        """Sessions whose plan is known, by source rank."""
        self._wants: dict[int, Want] = {}
        self._unproven: dict[int, tuple[object, set[tuple[int, int]]]] = {}
        """Session and sequence of each part that no proof has come of, by transfers that were Lost as UNPROVABLE."""

    def unsettled(self) -> None:
        self.ready = False

    def adaptable(self, geometry: Geometry) -> bool:
        """Whether its sessions can go on with another pool, of this geometry (feature EPOCHS)."""
        routed: list[SinkSession | None] = self._routed()
        if geometry != self.geometry:
            routed += self.sessions.values()
        return bool(routed) and all(each is not None and _adaptable(each) for each in routed)

    def expose(self, exposed: Exposed, now: float, geometry: Geometry | None = None) -> None:
        """Register another pool: new transfers go into it once every routed rank has mapped it.

        `geometry`: of the rank from now on, where that is another; every session plans anew first.
        """
        self.exposed, self.ready = exposed, False
        if geometry is not None and geometry != self.geometry:
            self.geometry, self.stated = geometry, Stated.of(geometry, self.stated.version + 1)
            for session in [each for each in self.sessions.values() if _adaptable(each)]:
                session.part(Describing).describe(now)
        self._after(now)

    def give_back(self, exposed: Exposed, at_once: bool, now: float) -> None:
        """Ask a pool back from who can give it back; `at_once`: transfers into it end with POOL_MOVED."""
        if exposed is self.exposed:
            self.exposed, self.ready = None, False
        for session in [each for each in self.sessions.values() if _adaptable(each)]:
            for owned in list(session.owner.epochs.values()):
                if owned.memory is exposed:
                    session.owner.unregister(owned, at_once, now)
        self._after(now)

    def holders(self, exposed: Exposed) -> list[str]:
        """Who may still touch a pool, for people; nobody: its memory is free (KVP-EPO-FREE)."""
        found = [session.name for session in self.sessions.values() if self._holds(session, exposed)]
        ours = any(want.into is exposed for want in self._wants.values())
        unproven = {part[0] for into, missing in self._unproven.values() if into is exposed for part in missing}
        return found + ["transfers that are not over"] * (ours or OURS in unproven)

    def given_back(self, exposed: Exposed) -> bool:
        """Whether every source rank that has mapped a pool has unmapped it, and says so."""
        return all(o.memory is not exposed for s in self.sessions.values() for o in s.owner.epochs.values())

    def outdated(self, exposed: Exposed) -> bool:
        """Whether a source rank has mapped a pool by a Description that it has changed since, be it to the same again:
        it takes no more transfers of that epoch.
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
        """Of the Descriptions of the source ranks that new transfers are planned by."""
        return tuple(each.described.of_source.version for each in self._routed() if each is not None)

    def _routed(self) -> list[SinkSession | None]:
        """The sessions of routed ranks; None: there is none yet."""
        return [self._ranks.get(rank) for rank in self.plan.required(self.me.rank)] if self.plan is not None else []

    def _register(self, now: float) -> bool:
        """Register what is exposed with routed ranks that do not know it, one Register at a time: whether with any."""
        exposed = self.exposed
        if exposed is None or self.ready or self.refused is not None:
            return False
        due = [each for each in self._routed() if each is not None and self._due(each, exposed)]
        for session in due:
            try:
                session.register(exposed.epoch, exposed, exposed.columns, exposed.registration(session.peer.rank), now)
            except KvprotoError as error:  # no memory can be exposed to this source
                session.give_up(error.kept())
        return bool(due)

    def _all_ready(self) -> bool:
        """Whether every routed rank has mapped what is exposed."""
        current = [each.owner.current if each is not None and each.ready else None for each in self._routed()]
        known = bool(current) and all(owned is not None and owned.memory is self.exposed for owned in current)
        agreed = known and all(each is not None and self._agrees(each) for each in self._routed())
        return agreed and self.exposed is not None and not self.outdated(self.exposed)

    def _due(self, session: SinkSession, exposed: Exposed) -> bool:
        """Whether this is to be registered now."""
        newest = session.owner.newest
        known = newest is not None and newest.memory is exposed
        may = session.state == SessionState.DESCRIBED or _adaptable(session)
        return may and self._agrees(session) and not known and not session.owner.registering

    def _agrees(self, session: SinkSession) -> bool:
        """Whether a session is planned by the Descriptions that hold now."""
        pending = session.part(Describing).pending
        return not pending and session.described.digests == self.digests == (self.digests[0], self.stated.digest)


def _adaptable(session: SinkSession) -> bool:
    return session.state == SessionState.READY and Feature.EPOCHS in session.features
