"""One session at the sink: it dials, describes itself, registers its memory, and asks for transfers."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvproto.errors import KvprotoError, PlanError, RemoteError, WireError
from kvproto.geometry import Geometry, decode_geometry, digest
from kvproto.plan import Plan, differences, plan
from kvproto.session.events import Planned, SessionClosed, SessionRefused
from kvproto.session.negotiation import Terms, check_welcome, greased
from kvproto.session.peer import Attempt, Party, Peer, refused
from kvproto.session.staging import Slots
from kvproto.session.table import SessionState, TransferState
from kvproto.wire.enums import Access, ErrorCode, Feature, Proof, Role, Transport
from kvproto.wire.messages import (
    Abort,
    Accepted,
    Chunk,
    Columns,
    Describe,
    Description,
    Done,
    DoneAck,
    Drained,
    Error,
    Failed,
    Goodbye,
    Grants,
    Hello,
    Limits,
    Refused,
    Region,
    Register,
    Registered,
    Transfer,
    Welcome,
)

__all__ = ["SinkSession"]

LIMITS = Limits(max_body=1 << 24, max_transfers=1024)


class SinkSession(Peer):
    """Sink side of a rank pair."""

    def __init__(
        self, me: Party, geometry: Geometry, encoded: bytes, regions: tuple[Region, ...], columns: tuple[Columns, ...],
        offered: tuple[Feature, ...],
    ) -> None:  # fmt: skip
        super().__init__(me)
        self.geometry, self._encoded = geometry, encoded
        self.regions, self._columns, self._terms = regions, columns, Terms(offered)
        self.staging: Slots | None = None
        """Of the regions, until Registered says that the source took another transport."""
        self.source: Geometry | None = None
        self.plan: Plan | None = None
        self.features: tuple[int, ...] = ()
        self.endpoints: dict[int, str] = {}
        self.done: dict[tuple[int, int], Done] = {}
        self.failures: dict[tuple[int, int], KvprotoError] = {}
        self.proofs: dict[tuple[int, int], Proof] = {}
        self._source_encoded = b""
        self._source_version = 0
        self._sequence = 0

    def hello(self, now: float) -> None:
        """Open the session."""
        self.step("Hello")
        said = greased(self._terms, self.me.incarnation)
        self.request(
            Hello, now, grease=True, versions=said.versions, engine=self.me.engine, incarnation=self.me.incarnation,
            rank=self.me.rank, replica=self.me.replica, role=Role.SINK, offered=said.offered, needed=said.needed,
            limits=LIMITS,
        )  # fmt: skip

    def receive(self, message: Any, now: float) -> None:
        """Take one message."""
        match message:
            case Welcome() | Description() | Registered() | Refused():
                if self.answered(message.request):
                    self._reply(message, now)
            case Accepted():
                self.answered(message.request)
                attempt = self._attempt(message)
                if attempt.state == TransferState.ASKED:
                    self.move(attempt, "Accepted")
            case Done() | Failed():
                self._outcome(message)
            case Chunk():
                self._chunk(message)
            case Drained():
                if self.answered(message.request):
                    attempt = self._attempt(message)
                    self.move(attempt, "Drained")
                    self.proofs[attempt.key] = message.proof
            case Error():
                # the request that it is about will not be answered otherwise
                about = message.request
                if about is not None and self.answered(about):
                    self.events.append(SessionRefused(self.name, refused(message), by_us=False))
            case Goodbye():
                self.step("Goodbye")
                self.events.append(SessionClosed(self.session, self.name, message.reason))
            case _:
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", "sink", type(message).__name__)

    def _reply(self, message: Welcome | Description | Registered | Refused, now: float) -> None:
        self.step(type(message).__name__)
        match message:
            case Refused():
                self.events.append(SessionRefused(self.name, refused(message), by_us=False))
            case Welcome():
                try:
                    check_welcome(self._terms, message)
                except RemoteError as error:
                    self.session = message.session
                    self._give_up(error)
                    return
                self.session = message.session
                self.peer = Party(message.engine, message.replica, message.rank, message.incarnation)
                self.features = tuple(message.features)
                self.endpoints = {e.rank: e.address for e in message.endpoints}
                self.step("Describe")
                self.request(Describe, now, version=1, geometry=self._encoded, digest=digest(self._encoded))
            case Description():
                self._described(message)
            case Registered():
                assert self.plan is not None
                assert self.peer is not None
                ours = tuple(r.ref for r in self.plan.between(self.peer.rank, self.me.rank))
                if message.routes != ours or message.plan != self.plan.digest:
                    self._give_up(
                        RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", self.plan.digest.hex(), bytes(message.plan).hex())
                    )
                else:
                    self._took(message.transport)

    def _took(self, transport: int) -> None:
        offered = {h.transport for region in self.regions for h in region.handles}
        if transport not in offered:
            self._give_up(RemoteError(ErrorCode.NO_TRANSPORT, "transport", str(sorted(offered)), str(transport)))
        elif transport != Transport.NIXL:
            self.staging = None
        elif self.staging is not None and Feature.STAGED not in self.features:
            self._give_up(RemoteError(ErrorCode.FEATURE_MISSING, "transport", "STAGED", "NIXL without it"))

    def credit(self) -> None:
        """Grant the slots that are free."""
        credit = self.staging.credit(self.session) if self.staging and self.state == SessionState.READY else None
        if credit is not None:
            self.step("Credit")
            self.notice(credit)

    def _described(self, message: Description) -> None:
        data = bytes(message.geometry)
        try:
            if digest(data) != message.digest:
                raise RemoteError(ErrorCode.BAD_DIGEST, "digest", digest(data).hex(), bytes(message.digest).hex())
            source = decode_geometry(data)
            self.plan = plan(source, self.geometry, self.features)
        except (WireError, PlanError, RemoteError) as error:
            self._give_up(error)
            return
        self.source, self._source_encoded, self._source_version = source, data, message.version
        self.events.append(Planned(self.session, self.name, self.plan, tuple(differences(source, self.geometry))))

    def _give_up(self, error: KvprotoError) -> None:
        self.events.append(SessionRefused(self.name, error, by_us=True))
        self.goodbye(str(error))

    def register(self, now: float) -> None:
        """Grant the source access to this rank's memory."""
        assert self.plan is not None
        assert self.peer is not None
        self.step("Register")
        self.request(
            Register, now, source=digest(self._source_encoded), sink=digest(self._encoded), epoch=1,
            access=Access.WRITE,
            regions=self.regions, columns=self._columns, plan=self.plan.digest,
            routes=tuple(r.ref for r in self.plan.between(self.peer.rank, self.me.rank)),
        )  # fmt: skip

    def transfer(
        self, now: float, key: bytes, content: bytes, grants: dict[int, Grants], packer: Any = None
    ) -> tuple[int, int]:
        """Ask for a request's cache; `grants` by group id, of which the routed ones are sent; `packer` if staged."""
        assert self.plan is not None
        assert self.peer is not None
        self._sequence += 1
        attempt = Attempt(self._sequence, 1)
        self.attempts[attempt.key] = attempt
        self.move(attempt, "Transfer")
        if self.staging is not None:
            self.staging.open(*attempt.key, packer)
        self.request(
            Transfer, now, sequence=attempt.sequence, attempt=attempt.attempt, ticket=key, content=content,
            source_version=self._source_version, sink_version=1, epoch=1,
            grants=tuple(grants[g] for g in self.plan.send_flags(self.peer.rank, self.me.rank)),
            writers=np.array(self.plan.required(self.me.rank), np.uint32),
        )  # fmt: skip
        return attempt.key

    def abort(self, key: tuple[int, int], now: float, reason: str) -> None:
        """Stop a transfer; Drained says what is known of its writes."""
        attempt = self.attempts[key]
        if attempt.state != TransferState.ABORTING:
            self.move(attempt, "Abort")
            self.let_go(key)
            self.request(Abort, now, sequence=attempt.sequence, attempt=attempt.attempt, reason=reason[:1000])

    def unpacked(self, key: tuple[int, int]) -> bool:
        """Whether a transfer that is Done is here to its last byte; raises what went wrong."""
        return self.staging is None or self.staging.finish(*key)

    def let_go(self, key: tuple[int, int]) -> bool:
        """Expect no more bytes of a transfer: whether this side has stopped writing them."""
        return self.staging is None or self.staging.close(*key)

    def proven(self, key: tuple[int, int]) -> bool:
        """Whether no write of the transfer can arrive any more: in a staged pair only this side writes pages."""
        return self.staging is not None or key in self.done or self.proofs.get(key) == Proof.PROVEN

    def settle(self, key: tuple[int, int]) -> None:
        """The endpoint has taken the outcome of this attempt."""
        for kept in (self.done, self.failures, self.proofs):
            kept.pop(key, None)
        self.forget()

    def _chunk(self, message: Chunk) -> None:
        attempt = self._attempt(message)
        if attempt.state == TransferState.ASKED:
            self.move(attempt, "Accepted")  # the reply was overtaken
        self.move(attempt, "Chunk")
        if self.staging is None:
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "slot", "no staging in this session", str(message.slot))
        self.staging.chunk(message)

    def _attempt(self, message: Any) -> Attempt:
        found = self.attempts.get((message.sequence, message.attempt))
        if found is None:
            raise RemoteError(
                ErrorCode.UNEXPECTED_MESSAGE, "sequence", "a transfer of this session", str(message.sequence)
            )
        return found

    def _outcome(self, message: Done | Failed) -> None:
        name = type(message).__name__
        attempt = self.attempts.get((message.sequence, message.attempt))
        if attempt is None and message.sequence > self.low_water:
            raise RemoteError(
                ErrorCode.UNEXPECTED_MESSAGE, "sequence", "a transfer of this session", str(message.sequence)
            )
        first = attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED)
        if attempt is not None and first:
            if attempt.state == TransferState.ASKED and name == "Done":
                self.move(attempt, "Accepted")  # the reply was overtaken
            self.move(attempt, name)
            if isinstance(message, Done):
                self._check_done(message)
                self.done[attempt.key] = message
            else:
                self.answered(message.request)
                self.failures[attempt.key] = refused(message)
            self.move(attempt, "DoneAck")
        self.notice(
            DoneAck(session=self.session, request=message.request, sequence=message.sequence, attempt=message.attempt)
        )

    def _check_done(self, message: Done) -> None:
        assert self.plan is not None
        assert self.peer is not None
        flags = self.plan.send_flags(self.peer.rank, self.me.rank)
        if message.writer != self.peer.rank or tuple(message.groups.tolist()) != flags:
            raise RemoteError(
                ErrorCode.WRONG_PEER,
                "groups",
                f"rank {self.peer.rank}, groups {flags}",
                f"rank {message.writer}, groups {message.groups.tolist()}",
            )
