"""Ping and Pong: a side that has received nothing for a while sends Ping, and an open session always answers.

Silence proves nothing (KVP-END-REUSE). A peer that has not answered within a second `ping_silence` is suspect: nothing
new is sent to it, and nothing is released. A Ping that is not answered for `patience` ends the session, like any
request that is given up, and frees no page.
"""

from kvproto.events import Suspected
from kvproto.session import limits
from kvproto.session.core import Extension, Session
from kvproto.session.timers import Timer
from kvproto.wire import messages as m


class PingPart(Extension):
    """The same half of Ping in both roles, from Welcome to the end of the session (KVP-SES-PING)."""

    def __init__(self, session: Session, now: float) -> None:
        super().__init__(session)
        self._asked = 0
        session.received_at = now
        self._timer: Timer = session.host.timers.at(now + limits.PING_SILENCE, self._silent)

    def closed(self) -> None:
        self._timer.cancel()

    def _silent(self, now: float) -> None:
        """Send Ping if nothing has come for `PING_SILENCE`, and set the timer for the next check."""
        session = self._session
        quiet = now - session.received_at >= limits.PING_SILENCE
        since = now if quiet else session.received_at
        self._timer = session.host.timers.at(since + limits.PING_SILENCE, self._silent)
        if quiet and session.asks(self._asked) and not session.suspect:
            session.suspect = True
            session.tell(Suspected(session.name))
        elif quiet:
            self.ask(now)

    def ask(self, now: float) -> None:
        """Send Ping, unless one is under way."""
        if not self._session.asks(self._asked):
            self._session.step("Ping")
            # an Error is a sign of life too
            self._asked = self._session.request(m.Ping, now, on_error=lambda error, now: None)

    def _ping(self, message: m.Ping, now: float) -> None:
        self._session.step("Ping")
        self._session.step("Pong")
        self._session.reply(m.Pong, message)

    def _pong(self, message: m.Pong, now: float) -> None:
        self._session.step("Pong")
        self._session.answered(message.request)

    handlers = ((m.Ping, _ping), (m.Pong, _pong))
