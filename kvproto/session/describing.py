"""Describe and Description: what each side owns, at first and whenever that changes (registration.md, Descriptions).

The sink describes itself first. In a session with EPOCHS either side does so again once its own Description has
changed. Both then plan anew; epochs that were registered before keep the plan that they were registered by.
"""

from __future__ import annotations

from typing import Any

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.core import Part, Session
from kvproto.session.phases import check_digest
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode

__all__ = ["Describing"]


class Describing(Part):
    """Either side's half of both messages."""

    def __init__(self, session: Session, source: bool) -> None:
        super().__init__(session)
        self._source = source
        self._asked = 0
        """Request id of this side's last Describe."""
        self._planning: int | None = None
        """Request id of the peer's Describe whose plan is being made."""
        self._answered = 0
        """Request id of this side's Describe by whose answer a plan is being made."""

    @property
    def pending(self) -> bool:
        """Whether the plan is about to change."""
        return self._planning is not None or self._answered != 0 or self._session.asks(self._asked)

    def describe(self, now: float, endpoints: tuple[m.Endpoint, ...] | None = None) -> None:
        """State what this side owns; `endpoints`: where its ranks listen, where that has changed."""
        session = self._session
        session.step("Describe")
        session.answered(self._asked)  # what it stated has changed since
        self._asked = session.request(m.Describe, now, **session.host.stated.fields, endpoints=endpoints)

    def _describe(self, message: m.Describe, now: float) -> None:
        session, before = self._session, self._session.state
        if session.described_by == message.request:
            self._answer(message)
            return
        if self._planning == message.request:
            return  # it is being planned, and answered once

        def made(error: KvprotoError | None) -> None:
            if self._planning != message.request:  # a later one has taken its place, and is answered in place of it
                return
            self._planning = None
            if error is None:
                session.described_by = message.request
                self._answer(message)
            else:
                session.state = before
                session.refuse(message, error)

        try:
            session.step("Describe")
            self._check_version(message, before)
            check_digest(message)
        except KvprotoError as error:
            session.state = before
            session.refuse(message, error, ends=before != SessionState.READY)
            return
        self._planning = message.request
        session.host.unsettled()
        session.reachable(message.endpoints)
        session.describe(message, not self._source, made)

    def _answer(self, to: m.Describe) -> None:
        self._session.reply(m.Description, to, **self._session.host.stated.fields)

    def _check_version(self, message: m.Describe, state: SessionState) -> None:
        """Raise where a Description that is to replace another is not a later one (KVP-DSC-RISE)."""
        known: Any = self._session.theirs.version if state == SessionState.READY else 0
        if message.version <= known:
            advice = "raise it with every change"
            raise RemoteError(ErrorCode.OUT_OF_RANGE, "version", f"above {known}", str(message.version), advice)

    def _description(self, message: m.Description, now: float) -> None:
        session = self._session
        if not session.answered(message.request, m.Describe) or message.request != self._asked:
            return
        try:
            check_digest(message)
        except RemoteError as error:
            session.give_up(error)
            return

        def made(error: KvprotoError | None) -> None:
            if self._answered == message.request:
                self._answered = 0
            if error is not None:
                session.give_up(error)

        self._answered = message.request
        session.describe(message, not self._source, made)

    hears = ((m.Describe, _describe), (m.Description, _description))
