"""Describe and Description, the sink's first: each side states its geometry, and with EPOCHS every change of it."""

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.core import Extension, Session
from kvproto.session.descriptions import check_digest
from kvproto.session.error_fields import refusal
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode


class Describing(Extension):
    """One side's half of Describe and Description."""

    def __init__(self, session: Session, source: bool) -> None:
        super().__init__(session)
        self._source = source
        self._asked = 0
        """The request id of this side's last Describe."""
        self._planning: int | None = None
        """The request id of the peer's Describe that a plan is being made for."""
        self._answered = 0
        """The request id of this side's Describe whose answer a plan is being made for; 0 if there is none."""

    @property
    def pending(self) -> bool:
        """Whether the plan is about to change."""
        return self._planning is not None or self._answered != 0 or self._session.asks(self._asked)

    def describe(self, now: float, endpoints: tuple[m.Endpoint, ...] | None = None) -> None:
        """Send this side's Description, and the `endpoints` at which its ranks listen if they have changed."""
        session = self._session
        session.step("Describe")
        session.answered(self._asked)  # stop resending the earlier one
        self._asked = session.request(m.Describe, now, **session.host.stated.fields, endpoints=endpoints)

    def refuse(self, error: KvprotoError) -> None:
        """Refuse the Description that answered this side's Describe, which ends the session (KVP-DSC-RANKS)."""
        session = self._session
        session.notice(
            m.Error(session=session.session, request=self._asked, about=m.Description.TYPE, **refusal(error))
        )
        session.give_up(error)

    def _describe(self, message: m.Describe, now: float) -> None:
        session, before = self._session, self._session.state
        if session.described_by == message.request:
            self._answer(message)
            return
        if self._planning == message.request:
            return  # its plan is being made; it is answered once

        def finish(error: KvprotoError | None) -> None:
            if self._planning != message.request:  # a later one has replaced it, and is answered instead
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
            current = session.theirs.version if before == SessionState.READY else 0
            if message.version <= current:  # KVP-DSC-RISE
                mine, yours = f"above {current}", str(message.version)
                raise RemoteError(ErrorCode.OUT_OF_RANGE, "version", mine, yours, "raise it with every change")
            check_digest(message)
        except KvprotoError as error:
            session.state = before
            session.refuse(message, error, ends=before != SessionState.READY)
            return
        self._planning = message.request
        session.host.unsettled()
        session.reachable(message.endpoints)
        session.describe(message, not self._source, finish)

    def _answer(self, to: m.Describe) -> None:
        self._session.reply(m.Description, to, **self._session.host.stated.fields)

    def _description(self, message: m.Description, now: float) -> None:
        session = self._session
        if not session.answered(message.request, m.Describe) or message.request != self._asked:
            return
        try:
            check_digest(message)
        except RemoteError as error:
            session.give_up(error)
            return

        def finish(error: KvprotoError | None) -> None:
            if self._answered == message.request:
                self._answered = 0
            if error is not None:
                session.give_up(error)

        self._answered = message.request
        session.describe(message, not self._source, finish)

    handlers = ((m.Describe, _describe), (m.Description, _description))
