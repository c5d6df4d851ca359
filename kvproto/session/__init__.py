"""The lifecycle of a rank pair as a table, without sockets, threads or clocks."""

from kvproto.session.endpoint import SinkEndpoint, SourceEndpoint
from kvproto.session.peer import Party

__all__ = ["Party", "SinkEndpoint", "SourceEndpoint"]
