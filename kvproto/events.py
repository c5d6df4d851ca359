"""Every event that a Source or a Sink reports to its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvproto.errors import KvprotoError

if TYPE_CHECKING:
    from kvproto.planning.plan import Plan
    from kvproto.rank.handles import Withdrawal
    from kvproto.sink import Fetch
    from kvproto.source import Request

__all__ = [
    "Arrived", "Connected", "Declined", "Disconnected", "Event", "Expired", "Freed", "Lost", "PagesFree", "PagesWanted",
    "PoolFree", "ProtocolError", "Recovered", "Refused", "Sent", "Suspected", "Undelivered", "Unwanted",
]  # fmt: skip


# Events of a Sink


@attrs.frozen
class Arrived:
    """Every byte of a request is in the pages that `fetch` or `grant` named.

    Fields:
        finished: Whether the first token ends the text, so that there is nothing to decode.
        handoff: The bytes of each hand-off group, by group name and part name.
        checksums: Checksums of 64 bits by source rank and group name, equal on both sides; empty without VERIFY.
        bytes: Bytes written by each source rank, by rank.
        seconds: Seconds from the Transfer, which is sent once the source is ready, to the last Done.
        since: By group name, the first token that arrived, for groups fetched `late` that begin later than requested.
            Rows before it are not the prompt's.
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
    """A request did not arrive; its pages may be reused at once if `pages_free`, else after PagesFree."""

    fetch: Fetch
    error: KvprotoError
    pages_free: bool


@attrs.frozen
class PagesFree:
    """Proof that nothing writes to the pages of a lost request any more (KVP-END-REUSE)."""

    fetch: Fetch


@attrs.frozen
class PagesWanted:
    """The source could write to pages that a fetch has not named yet: name them with `Fetch.grant`.

    Fields:
        tokens: The number of tokens to grant pages for: all of the fetch, or with `spans` the tokens computed so far.
        pages: By group name, the number of entries that the page table needs for that, from the page of token 0 on: 1
            for a slot, and 0 for a group that is wanted only together with the last tokens.
    """

    fetch: Fetch
    tokens: int
    pages: Mapping[str, int]


# Events of a Source


@attrs.frozen
class Sent:
    """One sink rank has all bytes of a request.

    Fields:
        sink: The sink's rank.
        bytes: Bytes by the name of the sink's group.
        seconds: Seconds that it took to copy the rows that were left when prefill was over.
        left: The bytes of these rows.
        peer: The sink's engine and rank, for display.
        epoch: The epoch of the sink's registration.
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
class Declined:
    """A sink rank asked for `request` but may not have it, because it states another prompt, for example.

    The request goes on as before: it keeps its pages until the right sink has fetched it, or until its deadline. If no
    such sink will come, the engine may call `Request.fail`.

    Fields:
        peer: The sink's engine and rank, for display.
        error: CONTENT_MISMATCH, TICKET_BOUND or TICKET_USED.
    """

    request: Request = attrs.field(repr=False)
    peer: str
    error: KvprotoError


@attrs.frozen
class Freed:
    """The end of a request that no sink needs any more: its pages may be reused.

    Fields:
        routed: Source ranks that take part in the transfer; once the pages of all of them are free, so are those of
            the other ranks. Empty after `Request.fail` or `release`.
    """

    request: Request
    routed: tuple[int, ...]


@attrs.frozen
class Undelivered:
    """A request has ended and its pages may be reused, but some sink ranks refused it or are gone.

    Fields:
        routed: As in Freed.
        lost: By sink rank, the reason for which it may not have the request.
    """

    request: Request
    routed: tuple[int, ...]
    lost: Mapping[int, KvprotoError]


@attrs.frozen
class Expired:
    """The deadline of a request's ticket has passed: its pages may be reused."""

    request: Request


# Events of both


@attrs.frozen
class PoolFree:
    """The end of all use of a pool that `sleep` or `move` took back: its memory may be freed."""

    withdrawal: Withdrawal


@attrs.frozen
class Connected:
    """Both sides computed this plan from each other's geometry; at a Sink, all ranks of the source are ready as well.

    Fields:
        warnings: Facts that differ but are allowed to: name, the source's value, the sink's value.
        unstated: Facts of the registry that should be compared but that neither side states, such as "weights.target":
            if it is among them, two models that differ only in their weights are taken for one.
        version: Of the session's messages, such as "1.0".
        features: Of the session, by name.
        transports: At a Sink, by name, those through which bytes of the source reach it; empty at
            a Source, which agrees on a plan before memory is registered.
    """

    peer: str
    plan: Plan = attrs.field(repr=False)
    warnings: tuple[tuple[str, str, str], ...] = ()
    unstated: tuple[str, ...] = ()
    version: str = ""
    features: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()


@attrs.frozen
class Disconnected:
    """A session has ended, by Goodbye or because the peer was lost."""

    peer: str
    reason: str


@attrs.frozen
class Refused:
    """One side refused the other's Hello, Describe or Register; `by_us`: this side did."""

    peer: str
    error: KvprotoError
    by_us: bool


@attrs.frozen
class Suspected:
    """A peer has been silent for so long that it may be gone: nothing new is sent to it, and nothing is released.

    A fetch that a suspected source has not accepted waits, up to its ticket's deadline. A fetch that it has accepted
    waits until the source sends again, or is given up 35 s after its last message; then it ends with PEER_LOST.
    """

    peer: str


@attrs.frozen
class Recovered:
    """A suspected peer has sent a message again, and its work goes on."""

    peer: str


@attrs.frozen
class ProtocolError:
    """A peer sent a frame that was refused, with no effect on anything else."""

    peer: str
    error: KvprotoError


Over = Freed | Undelivered | Expired
"""The events that end a request at a Source; its pages may be reused."""
_SinkEvent = Arrived | Lost | PagesFree | PagesWanted
_SourceEvent = Sent | Unwanted | Declined | Over
_PeerEvent = Connected | Disconnected | Suspected | Recovered | Refused | ProtocolError
Event = _SinkEvent | _SourceEvent | _PeerEvent | PoolFree
