"""The source's side of a session: it answers Hello and Describe, and maps the sink's memory when it registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from kvproto.errors import KvprotoError
from kvproto.session.catalogue import Catalogue, SourceCatalogue
from kvproto.session.core import Session
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party
from kvproto.session.endpoint import Endpoint
from kvproto.session.inline import SourceInline
from kvproto.session.intent import SourceIntent
from kvproto.session.negotiation import Chosen
from kvproto.session.ping import PingPart
from kvproto.session.pull import SourcePull
from kvproto.session.push import SourcePush
from kvproto.session.records import SourceAttempt
from kvproto.session.registering import Holder, Owner
from kvproto.session.staged import SourceStaged
from kvproto.session.stream import Credits, StreamWriter
from kvproto.session.transfers import SourceTransfers
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, CreditKind, Feature, Transport

__all__ = ["SourceSession"]

_STREAMS: dict[CreditKind, Any] = {CreditKind.STAGING: SourceStaged, CreditKind.INLINE: SourceInline}
"""The class that sends a stream, by what its credit counts."""


class SourceSession(Session):
    """Source side of a rank pair, from Welcome on."""

    role = "source"

    def __init__(
        self, host: Endpoint, conn: Hashable, number: int, hello: m.Hello, chosen: Chosen, now: float,
        seek: Callable[[SourceSession, SourceAttempt, m.Transfer, float], None], draining: Callable[[bytes], bool],
        granted: Callable[[SourceAttempt], None], catalogue: Catalogue | None = None,
    ) -> None:  # fmt: skip
        """`number` is the session id for Welcome, and `catalogue` is announced to a sink that has chosen CATALOGUE.

        See SourceTransfers for `seek` and `draining`, and SourceIntent for `granted`.
        """
        super().__init__(host, conn)
        self.session, self.greeting, self.limits = number, hello.request, hello.limits
        self.features, self.minor = chosen.features, chosen.minor
        self._peer = Party(hello.engine, hello.replica, hello.rank, hello.incarnation)
        self.claims = 0
        """The number of claims with a transfer of this session."""
        self.step("Hello")
        self.step("Welcome")
        transfers = SourceTransfers(self, partial(seek, self), draining)
        self.install(Holder(self, Access.WRITE, transfers.uses, transfers.end_epoch))
        self.install(transfers)
        features = chosen.features
        if not {Feature.STAGED, Feature.INLINE}.isdisjoint(features):
            self.install(Credits(self))
        self.install(Describing(self, source=True))
        self.install(PingPart(self, now))
        self.install(SourcePull(self) if self.pulls else SourcePush(self))
        if Feature.INTENT in features and not self.pulls:
            self.install(SourceIntent(self, granted))
        if Feature.CATALOGUE in features and catalogue is not None:
            self.install(SourceCatalogue(self, catalogue))

    def resumes(self, peer: Party, chosen: Chosen) -> bool:
        """Whether a Hello that names the session may resume it (KVP-SES-RESUME)."""
        return self.open and self.peer == peer and (self.features, self.minor) == (chosen.features, chosen.minor)

    @property
    def forgettable(self) -> bool:
        """Whether a session that has ended is not needed any more: by no claim, and by no copy."""
        return not self.claims and not any(attempt.copying for attempt in self.attempts.values())

    @property
    def pulls(self) -> bool:
        """Whether the sink reads (feature PULL)."""
        return Feature.PULL in self.features

    def accept_register(
        self, transport: Transport, writer: StreamWriter | None = None, process: m.Process | None = None
    ) -> None:
        """Report that the sink's memory is mapped with this transport.

        `writer` is for a transport that packs bytes, which needs Credit. `process` is the one that writes, if its end
        is proof that none of its writes can arrive any more (KVP-REG-PROCESS).
        """
        epoch = self.part(Holder).accept(transport, process if not self.pulls else None)
        if epoch is not None and writer is not None:
            epoch.stream = _STREAMS[writer.kind](self, writer)

    def refuse_register(self, error: KvprotoError) -> None:
        """Report that the sink's memory cannot be mapped."""
        self.part(Holder).refuse(error)

    def unmapped(self, epoch: int) -> None:
        """Report that the memory of an UnmapAsked is unmapped."""
        self.part(Holder).unmapped(epoch)

    def expose(
        self, number: int, memory: object, regions: tuple[m.Region, ...], columns: tuple[m.Columns, ...], now: float
    ) -> None:  # fmt: skip
        """Register this rank's memory with the sink, which reads it (feature PULL)."""
        self.part(Owner).register(number, memory, regions, columns, now)
