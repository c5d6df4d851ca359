"""The prefill rank: a Source accepts requests and copies their rows to the sinks that have their tickets.

It reads from the public class down to its copies: `source`, `request`, `node` (a turn), `schedule`, `copies`.
"""

from kvproto.source.request import Request
from kvproto.source.source import Source

__all__ = ["Request", "Source"]
