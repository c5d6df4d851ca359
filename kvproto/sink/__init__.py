"""The decode rank: a Sink fetches requests by ticket from any number of source replicas into its pages.

It reads from the public class down to its copies: `sink`, `fetch`, `node` (a turn), `link`, `registered_pool`, `reads`.
"""

from kvproto.sink.fetch import Fetch
from kvproto.sink.sink import Sink, check_seed, dialer_of

__all__ = ["Fetch", "Sink", "check_seed", "dialer_of"]
