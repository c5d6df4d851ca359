"""The decode rank: a Sink fetches requests by ticket from any number of source replicas into its pages.

It reads from the public class down to its copies: `sink`, `fetch` (the record), `node`
(a turn), `link` (to a source replica), `registered_pools`, `registered_pool`, `reads` (of offers), `verification`
(of checksums).
"""

from kvproto.sink.fetch import Fetch
from kvproto.sink.sink import Sink, check_seed, dialer_of

__all__ = ["Fetch", "Sink", "check_seed", "dialer_of"]
