"""The lifecycle of a rank pair as a table, without sockets, threads or clocks."""

from kvproto.session.peer import Party
from kvproto.session.sink_endpoint import SinkEndpoint
from kvproto.session.source_endpoint import SourceEndpoint

__all__ = ["Party", "SinkEndpoint", "SourceEndpoint"]
