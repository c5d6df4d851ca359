"""The lifecycle of a rank pair as a table, without sockets, threads or clocks.

* `source_endpoint`, `sink_endpoint`, `endpoint`: sessions of one rank that share a Description; `tickets` of a source.
* `source`, `sink`, `watching`: each side of one session, from extensions of `core`, which handles Hello to Goodbye.
* `describing`, `registering`, `transfers`, `ping`: extensions of every session that moves bytes.
* `push` or `pull`, `stream` with `staged` or `inline`, `intent`, `catalogue`: installed as the chosen features say.
* `negotiation`, `descriptions`, `plan_cache`, `records`: terms, parties, plans, and the transfers of a session.
* `table`, `transitions`, `timers`, `limits`, `error_fields`: which message is legal when, and what it carries if not.
"""

from kvproto.session.descriptions import Party, new_incarnation
from kvproto.session.registering import Registration
from kvproto.session.sink_endpoint import Exposed, SinkEndpoint
from kvproto.session.source_endpoint import SourceEndpoint

__all__ = ["Exposed", "Party", "Registration", "SinkEndpoint", "SourceEndpoint", "new_incarnation"]
