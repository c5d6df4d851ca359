"""Everything that a Source or a Sink tells its engine, beside what its handles say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvproto.errors import KvprotoError

if TYPE_CHECKING:
    from kvproto.planning.plan import Plan
    from kvproto.sink import Fetch
    from kvproto.source import Request
    from kvproto.withdrawal import Withdrawal

__all__ = [
    "Arrived",
    "Connected",
    "Disconnected",
    "Event",
    "Expired",
    "Freed",
    "Lost",
    "PagesFree",
    "PagesWanted",
    "PoolFree",
    "ProtocolError",
    "Recovered",
    "Refused",
    "Sent",
    "Suspected",
    "Undelivered",
    "Unwanted",
]


# of a Sink


@attrs.frozen
class Arrived:
    """Every byte of a request is in the pages that were named.

    Fields:
        finished: Whether the first token ends the text, so that there is nothing to decode.
        handoff: Bytes of each hand-off group, by group name and part name.
        checksums: By source rank and group name: 64 bits, equal on both sides; empty without VERIFY.
        bytes: Written by each source rank.
        seconds: From `fetch` to the last byte.
        since: By group name: the first token that is here, of groups that were fetched `late` and begin later than was
            asked for. Rows below it are not those of the prompt.
    """

    fetch: Fetch
    finished: bool
    handoff: Mapping[str, Mapping[str, bytes]] = attrs.field(repr=False)
    checksums: Mapping[tuple[int, str], int]
    bytes: Mapping[int, int]
    seconds: float
    since: Mapping[str, int] = {}


@attrs.frozen
class Lost:
    """A request did not arrive; its pages may be used again if `pages_free`, else once PagesFree tells of the fetch."""

    fetch: Fetch
    error: KvprotoError
    pages_free: bool


@attrs.frozen
class PagesFree:
    """It is proven that nothing writes the pages of a lost request any more (KVP-END-REUSE)."""

    fetch: Fetch


@attrs.frozen
class PagesWanted:
    """The source could write pages that a fetch has not named yet: name them by `Fetch.grant`.

    Fields:
        tokens: Up to which token pages are of use: all of the fetch, or with `spans` what is computed so far.
        pages: By group name: how many entries the page table needs for that, from the page of token 0 on; for a slot 1,
            and 0 for what is wanted with the last tokens alone.
    """

    fetch: Fetch
    tokens: int
    pages: Mapping[str, int]


# of both


@attrs.frozen
class PoolFree:
    """Nobody writes or reads a pool any more that was taken back by `sleep` or `move`: its memory may be freed."""

    withdrawal: Withdrawal


# of a Source


@attrs.frozen
class Sent:
    """One sink rank has all of a request's bytes.

    Fields:
        sink: Its rank.
        bytes: By the name of the sink's group.
        seconds: For what was left to copy when prefill was over.
        left: Bytes of that.
        peer: The sink rank's engine and rank, for people.
        epoch: Of the sink's registration.
    """

    request: Request
    sink: int
    bytes: Mapping[str, int]
    seconds: float
    left: int
    peer: str = ""
    epoch: int = 0


@attrs.frozen
class Unwanted:
    """Every sink that asked for `request` has aborted it or is gone, and prefill is not finished.

    The engine may stop computing and call `Request.fail` or `release`.
    """

    request: Request


@attrs.frozen
class Freed:
    """No sink needs a request any more: its pages may be used again.

    Fields:
        routed: Source ranks that take part in such transfers; the pages of the other ranks are free when theirs all
            are. Empty after `Request.fail` or `release`.
    """

    request: Request
    routed: tuple[int, ...]


@attrs.frozen
class Undelivered:
    """A request is over as Freed says, but some sink ranks have not acknowledged it: they refused it, or are gone.

    Fields:
        routed: As in Freed.
        lost: By sink rank: why it may not have the request.
    """

    request: Request
    routed: tuple[int, ...]
    lost: Mapping[int, KvprotoError]


@attrs.frozen
class Expired:
    """The deadline of a request's ticket has passed: its pages may be used again."""

    request: Request


# of both


@attrs.frozen
class Connected:
    """Both sides computed this plan from each other's geometry; at a Sink, all ranks of the source are ready too.

    Fields:
        warnings: Facts that differ and may: name, the source's value, the sink's.
    """

    peer: str
    plan: Plan = attrs.field(repr=False)
    warnings: tuple[tuple[str, str, str], ...] = ()


@attrs.frozen
class Disconnected:
    """A session has ended, by Goodbye or because the peer is lost."""

    peer: str
    reason: str


@attrs.frozen
class Refused:
    """A side refused the other's Hello, Describe or Register."""

    peer: str
    error: KvprotoError
    by_us: bool


@attrs.frozen
class Suspected:
    """A peer has been silent for so long that it may be gone: nothing new is asked of it, and nothing is released.

    A fetch from a suspected source waits, up to its ticket's deadline.
    """

    peer: str


@attrs.frozen
class Recovered:
    """A suspected peer has said something, so that all goes on."""

    peer: str


@attrs.frozen
class ProtocolError:
    """A peer sent a frame that was refused; nothing else is touched by it."""

    peer: str
    error: KvprotoError


Over = Freed | Undelivered | Expired
"""How a request ends at a Source; its pages may be used again."""
Event = (
    Arrived | Lost | PagesFree | PagesWanted | PoolFree | Sent | Unwanted | Over | Connected | Disconnected | Suspected
    | Recovered | Refused | ProtocolError
)  # fmt: skip
