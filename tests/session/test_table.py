"""Rows of the tables of states that both sides follow, against what the chapters on sessions and transfers say."""

import pytest

from kvproto.errors import RemoteError
from kvproto.session.table import SESSION, TRANSFER, SessionState, TransferState, next_session, next_transfer
from kvproto.wire.enums import ErrorCode, Feature

ALL = frozenset(Feature)
BEHIND: dict[str, set[Feature]] = {
    "Unregister": {Feature.EPOCHS},
    "Unregistered": {Feature.EPOCHS},
    "Grant": {Feature.INTENT},
    "Progress": {Feature.INTENT},
    "Chunk": {Feature.STAGED},
    "Credit": {Feature.STAGED, Feature.INLINE},
    "Data": {Feature.INLINE},
    "Offer": {Feature.PULL},
    "Renew": {Feature.PULL},
    "Renewed": {Feature.PULL},
    "Pulled": {Feature.PULL},
    "Released": {Feature.PULL},
    "Watch": {Feature.CATALOGUE},
    "Watched": {Feature.CATALOGUE},
    "Kept": {Feature.CATALOGUE},
}
"""Messages that need a feature in whatever state they come, and any one of which is enough."""
CROSSING = ["Accepted", "Done", "Failed", "DoneAck", "Abort", "Progress", "Chunk", "Data", "Offer", "Renewed"]
"""What may be on its way when a sink sends Abort, and what a second Abort is."""


def legal(state: SessionState | TransferState, message: str, features: frozenset[Feature]) -> bool:
    try:
        if isinstance(state, SessionState):
            next_session(state, message, features)
        else:
            next_transfer(state, message, features)
    except RemoteError as error:
        return error.code is not ErrorCode.UNEXPECTED_MESSAGE
    return True


@pytest.mark.parametrize(("message", "features"), BEHIND.items(), ids=str)
def test_a_message_behind_features_needs_one_of_them(message: str, features: set[Feature]) -> None:
    """KVP-SES-STATE: in every state that has a row for it; with each of the features alone it is legal somewhere."""
    rows: list[tuple[SessionState | TransferState, str]] = [*SESSION, *TRANSFER]
    states = [state for state, event in rows if event == message]
    assert not any(legal(state, message, ALL - features) for state in states)
    assert all(any(legal(state, message, frozenset({one})) for state in states) for one in features)


@pytest.mark.parametrize(
    ("state", "message"),
    [row for row in (*SESSION, *TRANSFER) if row[1] in ("Ping", "Pong", "Transfer", "Done", "DoneAck")]
    + [(TransferState.DONE, "Error"), (TransferState.ASKED, "Abort"), (TransferState.ABORTING, "Drained")],
    ids=str,
)
def test_a_message_of_every_session_needs_no_feature(state: SessionState | TransferState, message: str) -> None:
    """KVP-SES-STATE."""
    assert legal(state, message, frozenset())


@pytest.mark.parametrize("message", CROSSING)
def test_what_crosses_an_abort_changes_nothing(message: str) -> None:
    """KVP-SES-STATE: the transfer goes on waiting for Drained."""
    assert next_transfer(TransferState.ABORTING, message, ALL) is TransferState.ABORTING


def test_goodbye_closes_every_session_that_is_open() -> None:
    """KVP-SES-STATE."""
    for state in SessionState:
        if state not in (SessionState.IDLE, SessionState.GREETED, SessionState.CLOSED):
            assert next_session(state, "Goodbye", ()) is SessionState.CLOSED


def test_what_ends_an_attempt() -> None:
    """KVP-SES-STATE: an answer to Done or Failed, what ends an offer, and proof after Abort."""
    ends = {(state.value, event) for (state, event), after in TRANSFER.items() if after is TransferState.ENDED}
    assert ends == {
        ("done", "DoneAck"), ("done", "Error"), ("failed", "DoneAck"), ("aborting", "Drained"),
        ("offered", "Pulled"), ("offered", "Error"), ("ended", "Released"),
    }  # fmt: skip
