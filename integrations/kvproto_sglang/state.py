"""The state of a transfer, in SGLang's terms."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["State"]


class State(IntEnum):
    """The values of SGLang's KVPoll; ranks take the least of theirs."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    """For SGLang to go on."""
    TRANSFERRING = 3
    SUCCESS = 4
