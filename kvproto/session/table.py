"""The legality of messages, by the transition tables, which are generated from `spec/v1/registry/states.toml`.

A session and each of its transfers are small state machines. An event is the name of a message of either side. Both
sides follow the same table, the sender when it queues the message and the receiver when it reads it, so they cannot
disagree about the state without one of them raising UNEXPECTED_MESSAGE. A pair that is not in the table is illegal,
and so is a row whose features the session has not chosen (KVP-SES-STATE).
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

from kvproto.errors import RemoteError
from kvproto.session.transitions import (
    SESSION,
    SESSION_FEATURES,
    TRANSFER,
    TRANSFER_FEATURES,
    SessionState,
    TransferState,
)
from kvproto.wire.enums import ErrorCode, Feature

__all__ = ["SESSION", "TRANSFER", "TRANSFER_FEATURES", "SessionState", "TransferState", "next_session", "next_transfer"]

State = TypeVar("State", SessionState, TransferState)
_Rows = Mapping[tuple[State, str], State]
_Needed = Mapping[tuple[State, str], frozenset[Feature]]


def next_session(state: SessionState, event: str, features: Collection[int]) -> SessionState:
    """The state of a session with these features after a message; raises RemoteError(UNEXPECTED_MESSAGE)."""
    return _next(SESSION, SESSION_FEATURES, state, event, features, "")


def next_transfer(state: TransferState, event: str, features: Collection[int]) -> TransferState:
    """The state of a transfer in a session with these features after a message; raises UNEXPECTED_MESSAGE."""
    return _next(TRANSFER, TRANSFER_FEATURES, state, event, features, "sequence")


def _next(
    rows: _Rows[State], needed: _Needed[State], state: State, event: str, features: Collection[int], path: str
) -> State:
    key = state, event
    after, names = rows.get(key), needed.get(key)
    if after is None:
        mine = f"{'transfer' if path else 'session'} {state.value}"
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, path, mine, event)
    if names is not None and names.isdisjoint(features):
        either = " or ".join(sorted(f.name for f in names))
        mine = f"a session without {either}"
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, path, mine, event, f"negotiate {either}")
    return after
