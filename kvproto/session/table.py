"""Which message is legal when: a look into the transition tables, which come from `spec/v1/registry/states.toml`.

Theory. A session and each of its transfers are two small machines. An event is the name of a message, whoever sends
it: both sides walk the same table, the sender when it queues the message, the receiver when it reads it, so they cannot
disagree about the state without one of them raising UNEXPECTED_MESSAGE. A pair that is not in the table is illegal.
"""

from __future__ import annotations

from kvproto.errors import RemoteError
from kvproto.session.transitions import SESSION, TRANSFER, SessionState, TransferState
from kvproto.wire.enums import ErrorCode

__all__ = ["SESSION", "TRANSFER", "SessionState", "TransferState", "next_session", "next_transfer"]


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
