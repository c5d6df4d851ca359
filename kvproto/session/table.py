"""The transition table: the only place that decides which message is legal when.

Theory. A session and each of its transfers are two small machines. An event is the name of a message, whoever sends
it: both sides walk the same table, the sender when it queues the message, the receiver when it reads it, so they cannot
disagree about the state without one of them raising UNEXPECTED_MESSAGE. A pair that is not in the table is illegal.
"""

from __future__ import annotations

from enum import Enum

from kvproto.errors import RemoteError
from kvproto.wire.enums import ErrorCode

__all__ = ["SESSION", "TRANSFER", "SessionState", "TransferState", "next_session", "next_transfer"]


class SessionState(Enum):
    """Of one rank pair."""

    IDLE = "idle"
    GREETED = "greeted"
    OPEN = "open"
    DESCRIBING = "describing"
    DESCRIBED = "described"
    REGISTERING = "registering"
    READY = "ready"
    CLOSED = "closed"


class TransferState(Enum):
    """Of one attempt of one transfer."""

    NEW = "new"
    ASKED = "asked"
    ACCEPTED = "accepted"
    DONE = "done"
    FAILED = "failed"
    ABORTING = "aborting"
    ENDED = "ended"


S, T = SessionState, TransferState

SESSION: dict[tuple[SessionState, str], SessionState] = {
    (S.IDLE, "Hello"): S.GREETED,
    (S.GREETED, "Welcome"): S.OPEN,
    (S.GREETED, "Refused"): S.CLOSED,
    (S.OPEN, "Describe"): S.DESCRIBING,
    (S.DESCRIBING, "Description"): S.DESCRIBED,
    (S.DESCRIBING, "Refused"): S.OPEN,
    (S.DESCRIBED, "Register"): S.REGISTERING,
    (S.REGISTERING, "Registered"): S.READY,
    (S.REGISTERING, "Refused"): S.DESCRIBED,
    **{(s, "Goodbye"): S.CLOSED for s in S if s not in (S.IDLE, S.CLOSED)},
}

TRANSFER: dict[tuple[TransferState, str], TransferState] = {
    (T.NEW, "Transfer"): T.ASKED,
    (T.ASKED, "Accepted"): T.ACCEPTED,
    (T.ASKED, "Failed"): T.FAILED,
    (T.ACCEPTED, "Done"): T.DONE,
    (T.ACCEPTED, "Failed"): T.FAILED,
    (T.DONE, "DoneAck"): T.ENDED,
    (T.FAILED, "DoneAck"): T.ENDED,
    # an Abort may cross any answer of the source
    **{(s, "Abort"): T.ABORTING for s in (T.NEW, T.ASKED, T.ACCEPTED, T.DONE, T.FAILED, T.ENDED)},
    **{(T.ABORTING, m): T.ABORTING for m in ("Accepted", "Done", "Failed", "DoneAck", "Abort")},
    (T.ABORTING, "Drained"): T.ENDED,
}


def next_session(state: SessionState, event: str) -> SessionState:
    """State after the message, or UNEXPECTED_MESSAGE."""
    try:
        return SESSION[state, event]
    except KeyError:
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", f"session {state.value}", event) from None


def next_transfer(state: TransferState, event: str) -> TransferState:
    """State after the message, or UNEXPECTED_MESSAGE."""
    try:
        return TRANSFER[state, event]
    except KeyError:
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", f"transfer {state.value}", event) from None
