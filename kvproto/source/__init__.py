"""The prefill rank: a Source accepts requests and copies their rows to the sinks that have their tickets.

It reads from the public class down to its copies: `source`, `request` (the record) with `prefill` (its computed rows),
`node` (a turn), `schedule` and `progress` (which rows are next), `copies`; `sink_memory` is what sinks have registered,
`page_guard` the option `debug_pages`.
"""

from kvproto.source.request import Request
from kvproto.source.source import Source

__all__ = ["Request", "Source"]
