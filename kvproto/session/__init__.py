"""The lifecycle of a rank pair as a table, without sockets, threads or clocks.

`core` handles Hello to Goodbye. `describing`, `registering`, `transfers` and `ping` are in every session that moves
bytes; `push` or `pull`, `staged`, `inline`, `intent` and `catalogue` are installed as the chosen features say. An
endpoint holds the sessions of one rank that share a Description.
"""

from kvproto.session.descriptions import Party, new_incarnation
from kvproto.session.sink_endpoint import Exposed, SinkEndpoint
from kvproto.session.source_endpoint import SourceEndpoint
from kvproto.session.stream import Registration

__all__ = ["Exposed", "Party", "Registration", "SinkEndpoint", "SourceEndpoint", "new_incarnation"]
