"""The lifecycle of a rank pair as a table, without sockets, threads or clocks.

`core` handles Hello to Goodbye; `push`, `pull`, `staged`, `inline` and `ping` each add one feature; an endpoint holds
all sessions of one rank.
"""

from kvproto.session.descriptions import Party, new_incarnation
from kvproto.session.sink_endpoint import Exposed, SinkEndpoint
from kvproto.session.source_endpoint import SourceEndpoint
from kvproto.session.stream import Registration

__all__ = ["Exposed", "Party", "Registration", "SinkEndpoint", "SourceEndpoint", "new_incarnation"]
