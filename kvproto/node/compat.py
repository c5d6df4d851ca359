"""Temporary, until the new session is merged: its API over the old one."""

# mypy: ignore-errors
from types import SimpleNamespace

from kvproto.session.sink_endpoint import SinkEndpoint
from kvproto.session.source import SourceSession
from kvproto.session.source_endpoint import SourceEndpoint
from kvproto.session.table import SessionState

_e = SourceEndpoint.expect
SourceEndpoint.expect = lambda self, t, c, n, now: _e(self, t, c, now)


def registering(self, number):
    s = self.sessions.get(number)
    return s if s is not None and s.state == SessionState.REGISTERING else None


SourceEndpoint.registering = registering
SourceSession.described = property(
    lambda s: SimpleNamespace(
        sink=s.sink, ranks=(s.me.rank, s.peer.rank), routes=s.plan.between(s.me.rank, s.peer.rank)
    )
)
_a = SourceSession.accept_register
SourceSession.accept_register = lambda s, c, d, l=None: _a(s, c, l)


def nd(self):
    return min((d for s in self._peers() if (d := s.next_deadline()) is not None), default=None)


SourceEndpoint.next_deadline = nd
SinkEndpoint.next_deadline = nd
SinkEndpoint.closed = property(
    lambda self: bool(self._sessions) and any(s.state == SessionState.CLOSED for s in self._sessions.values())
)
import kvproto.session.events as ev

for a, b in (("TransferRequested", "Serve"), ("ProtocolError", "Troubled")):
    if not hasattr(ev, a):
        setattr(ev, a, getattr(ev, b))
