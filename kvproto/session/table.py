"""The legality of messages, by the transition tables, which are generated from `spec/v1/registry/states.toml`.

A session and each of its transfers are small state machines. An event is the name of a message of either side. Both
sides follow the same table, the sender when it queues the message and the receiver when it reads it, so they cannot
disagree about the state without one of them raising UNEXPECTED_MESSAGE. A pair that is not in the table is illegal,
and so is a row whose features the session has not chosen (KVP-SES-STATE).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from kvproto.errors import RemoteError
from kvproto.session.transitions import SESSION_MOVES, TRANSFER_MOVES, SessionState, TransferState
from kvproto.wire.enums import ErrorCode, Feature

__all__ = ["SESSION", "TRANSFER", "TRANSFER_FEATURES", "SessionState", "TransferState", "next_session", "next_transfer"]

State = TypeVar("State", SessionState, TransferState)
_Rows = Mapping[tuple[State, str], State]
_Needed = Mapping[tuple[State, str], frozenset[Feature]]


def _rows(states: type[State], moves: Iterable[tuple[str, str, str, str]]) -> tuple[_Rows[State], _Needed[State]]:
    """The state after each row (state, message); and the features of rows that sessions without one of them lack."""
    after_of, features_of = dict[tuple[State, str], State](), dict[tuple[State, str], frozenset[Feature]]()
    for befores, message, after, features in moves:
        for before in befores.split():
            row = states(before), message
            after_of[row] = states(after or before)
            if features:
                features_of[row] = frozenset(Feature[name] for name in features.split())
    return after_of, features_of


SESSION, SESSION_FEATURES = _rows(SessionState, SESSION_MOVES)
TRANSFER, TRANSFER_FEATURES = _rows(TransferState, TRANSFER_MOVES)


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
