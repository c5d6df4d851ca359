"""What keeps a sink from a source replica: ranks that do not answer, and ranks that contradict each other."""

from __future__ import annotations

from collections.abc import Collection

from kvproto.errors import RemoteError
from kvproto.planning.compare import first_difference
from kvproto.session.sink import SinkSession
from kvproto.session.table import SessionState
from kvproto.wire.enums import ErrorCode

__all__ = ["disagreement", "gone", "hindrances", "located"]

_AWAITED = {SessionState.GREETED: "Hello", SessionState.DESCRIBING: "Describe", SessionState.REGISTERING: "Register"}
"""The request that a session waits to have answered, by its state."""


def located(session: SinkSession) -> str:
    """A source rank and its address, for display."""
    return f"{session.name} at {session.conn}" if session.known else session.name


def gone(rank: str) -> RemoteError:
    """The error for a transfer from a source rank that is gone."""
    mine, advice = "a source that stays until the transfer is over", "compute the prompt again, under a new ticket"
    return RemoteError(ErrorCode.PEER_LOST, "", mine, f"{rank}, which is gone", advice)


def disagreement(
    session: SinkSession, sessions: Collection[SinkSession], unchanged: bool = False
) -> RemoteError | None:  # fmt: skip
    """The error for a source rank whose Description is not that of another rank, if there is one.

    With `unchanged`, ranks are compared only while both state version 1: a change reaches the ranks of a replica one
    after another, and until it has reached all of them they differ rightly (KVP-DSC-RANKS).
    """
    if not session.planned:
        return None
    stated = session.described.of_source
    for other in sessions:
        if not (other.open and other.planned):
            continue
        known = other.described.of_source
        if unchanged and (known.version, stated.version) != (1, 1):
            continue
        if known.digest != stated.digest:
            path, one, another = first_difference(known.geometry, stated.geometry)
            mine, yours = f"{one} at {other.name}", f"{another} at {session.name}"
            advice = "ranks of one replica state different Descriptions: give all of them the same geometry"
            return RemoteError(ErrorCode.DESCRIPTION_MISMATCH, path, mine, yours, advice)
    return None


def hindrances(sessions: Collection[SinkSession]) -> list[str]:
    """Why transfers with a source replica cannot begin yet, by source rank, for display."""
    found, error = [], None
    for session in sessions:
        if (awaited := _AWAITED.get(session.state)) is not None:
            found.append(f"no answer to {awaited} from {located(session)}")
        elif session.suspect and session.open:
            found.append(f"nothing heard from {located(session)}, which is suspect")
        elif error is None and (error := disagreement(session, sessions)) is not None:
            found.append(f"{error.path} is {error.mine} and {error.yours}")
    return found
