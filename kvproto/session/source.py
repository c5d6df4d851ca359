"""The source's side of a session: it answers Hello and Describe, and maps the sink's memory when it registers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvproto.session.catalogue import SourceCatalogue
from kvproto.session.core import Extension, Session
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party
from kvproto.session.inline import SourceInline
from kvproto.session.intent import SourceIntent
from kvproto.session.negotiation import Chosen
from kvproto.session.ping import PingPart
from kvproto.session.pull import SourcePull
from kvproto.session.push import SourcePush
from kvproto.session.registering import Holder, Owner
from kvproto.session.staged import SourceStaged
from kvproto.session.stream import Credits, StreamWriter
from kvproto.session.transfers import SourceTransfers
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, CreditKind, Feature, Transport

if TYPE_CHECKING:
    from kvproto.session.source_endpoint import SourceEndpoint

_STREAMS: dict[CreditKind, Any] = {CreditKind.STAGING: SourceStaged, CreditKind.INLINE: SourceInline}
"""The class that sends a stream, by what its credit counts."""


class SourceSession(Session):
    """Source side of a rank pair, from Welcome on."""

    role = "source"
    host: SourceEndpoint

    def __init__(
        self, host: SourceEndpoint, conn: Hashable, number: int, hello: m.Hello, chosen: Chosen, now: float
    ) -> None:
        """`number` is the session id for Welcome."""
        super().__init__(host, conn)
        self.session, self.greeting, self.limits = number, hello.request, hello.limits
        version, features = chosen
        self.features, self.minor, self.pulls = features, version.minor, Feature.PULL in features
        """`pulls`: whether the sink reads (feature PULL)."""
        self._met(Party(hello.engine, hello.replica, hello.rank, hello.incarnation))
        self.tickets_of_rank, self.refuses = host.tickets, host.refuses
        self.tickets = 0
        """The number of tickets with a transfer of this session."""
        self.step("Hello")
        self.step("Welcome")
        self.transfers = SourceTransfers(self)
        self.holder = Holder(self, Access.WRITE, self.transfers.uses, self.transfers.end_epoch)
        self.pull = SourcePull(self) if self.pulls else None
        self.push = SourcePush(self) if self.pull is None else None
        may_lack_items = Feature.INTENT in features and self.push is not None
        self.intent = SourceIntent(self) if may_lack_items else None
        self.describing = Describing(self, source=True)
        extensions: list[Extension | None] = [self.holder, self.transfers, self.describing, PingPart(self, now)]
        extensions += [self.pull, self.push, self.intent]
        if not {Feature.STAGED, Feature.INLINE}.isdisjoint(features):
            extensions.append(Credits(self))
        if Feature.CATALOGUE in features and host.catalogue is not None:
            extensions.append(SourceCatalogue(self, host.catalogue))
        for extension in extensions:
            if extension is not None:
                self.install(extension)

    def resumes(self, peer: Party, chosen: Chosen) -> bool:
        """Whether a Hello that names the session may resume it (KVP-SES-RESUME)."""
        return self.open and self.peer == peer and (self.minor, self.features) == (chosen[0].minor, chosen[1])

    @property
    def forgettable(self) -> bool:
        """Whether a session that has ended is not needed any more: by no ticket, and by no copy."""
        return not self.tickets and not any(attempt.copying for attempt in self.attempts.values())

    def accept_register(
        self,
        transport: Transport,
        writer: StreamWriter | None = None,
        process: m.Process | None = None,
        mapping: Any = None,
    ) -> None:
        """Report that memory is mapped with a transport; `writer` is for one that packs, `process` for proof."""
        epoch = self.holder.accept(transport, process if not self.pulls else None)
        if epoch is not None:
            epoch.mapping = mapping
        if epoch is not None and writer is not None:
            epoch.stream = _STREAMS[writer.kind](self, writer)

    @property
    def owner(self) -> Owner:
        """The half that owns this rank's memory; only with PULL."""
        assert self.pull is not None
        return self.pull.owner
