"""How bytes reach the sink in one session, as far as the endpoints above must know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto.session.core import Part, Session
from kvproto.session.phases import Registration
from kvproto.session.transfers import SinkAttempt, SourceAttempt
from kvproto.wire.messages import Process, Registered

__all__ = ["Delivery", "SourceDelivery"]


class SourceDelivery(Part):
    """Base of SourcePush and SourcePull."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def released(self, attempt: SourceAttempt) -> None:
        """The engine is told to free the request of an attempt."""


class Delivery(Part):
    """Base of SinkPush, SinkStaged and SinkPull: the answers of a sink whose pages the source writes itself."""

    process: Process | None = None
    """That writes, where its end is proof that no write of it can arrive any more (KVP-REG-DEATH)."""
    prover: int | None = None
    """The session whose writer's death is proof; None: our own copies write, and nobody's death proves those."""

    def expose(self, exposure: Callable[[], Registration]) -> Registration:
        """What is registered with the source."""
        return exposure()

    def registered(self, message: Registered) -> None:
        """The source has mapped this side's memory."""

    @property
    def ready(self) -> bool:
        """Whether transfers may run, once the session is READY."""
        return True

    def begin(self, attempt: SinkAttempt, packer: Any) -> None:
        """A Transfer is about to be sent."""

    def finish(self, attempt: SinkAttempt) -> bool:
        """Whether an attempt that is Done is here to its last byte; raises KvprotoError for what went wrong."""
        return True

    def stop(self, attempt: SinkAttempt) -> bool:
        """Expect no more bytes of an attempt: whether this side has stopped writing them."""
        return True

    def free(self, attempt: SinkAttempt) -> bool:
        """Whether no write of an attempt can arrive any more (KVP-END-REUSE)."""
        raise NotImplementedError

    def advance(self, now: float) -> None:
        """Send what the passing of time has made due."""

    @property
    def polled(self) -> bool:
        """Whether copies of this side may have ended without a word."""
        return False
