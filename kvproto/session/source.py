"""One session at the source: it listens, describes itself, maps the sink's memory, and answers transfers."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import check_grants
from kvproto.errors import KvprotoError, PlanError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, decode_geometry, digest
from kvproto.planning.plan import Plan, differences, plan
from kvproto.session.events import Fetched, Planned, RegisterAsked, SessionClosed, SessionRefused
from kvproto.session.peer import PATIENCE, Attempt, Party, Peer, refusal, refused
from kvproto.session.registering import DYING, agrees, check_register
from kvproto.session.staging import Granted, Piece
from kvproto.session.table import SessionState, TransferState
from kvproto.wire.enums import Access, CreditKind, ErrorCode, Feature, Outcome, Proof, RequestState, Transport
from kvproto.wire.messages import (
    Abort,
    Accepted,
    Checksum,
    Columns,
    Credit,
    Describe,
    Description,
    Done,
    DoneAck,
    Drained,
    Failed,
    Goodbye,
    Grants,
    HandOff,
    Offer,
    Process,
    Pulled,
    Refused,
    Region,
    Register,
    Registered,
    Released,
    Renew,
    Renewed,
    Transfer,
)

__all__ = ["SourceSession"]


_MOST_TRANSFERS = 1024
"""Sequences above the low-water mark that a session may use."""


_EPOCH = 1


@attrs.define
class _Lent:
    """An offer that the sink may read."""

    request: int
    end: float
    """Of the lease."""
    latest: float
    """The ticket's deadline: no lease goes on after it."""


class SourceSession(Peer):
    """Source side of a rank pair, from Welcome on."""

    def __init__(
        self, me: Party, peer: Party, session: int, greeting: int, geometry: Geometry, encoded: bytes,
        features: tuple[int, ...], process: Process | None = None,
    ) -> None:  # fmt: skip
        super().__init__(me)
        self.features, self._process = features, process
        self.peer, self.session, self.greeting = peer, session, greeting
        self.geometry, self._encoded = geometry, encoded
        self.sink: Geometry | None = None
        self.plan: Plan | None = None
        self.columns: dict[int, Columns] = {}
        self.epoch = 0
        self._sink_encoded = b""
        self._asked: Register | None = None
        self._sink_version = 0
        self._copying: set[tuple[int, int]] = set()
        self._drains: dict[tuple[int, int], tuple[Attempt, int]] = {}
        """Aborts of attempts whose copy is under way: they are answered when no write can arrive any more.

        An attempt may have failed, and be forgotten, while parts of it are still under way.
        """
        self._unprovable: set[tuple[int, int]] = set()
        self._granted: Granted | None = None
        self._exposing = 0
        self._offers: dict[tuple[int, int], _Lent] = {}
        self._read: set[tuple[int, int]] = set()
        self.step("Hello")
        self.step("Welcome")

    def receive(self, message: Any, now: float) -> Transfer | None:
        """Take one message; returns a Transfer that is legal and new, for the endpoint to match with its ticket."""
        match message:
            case Describe() | Register():
                # a Register whose memory is being mapped is answered once, when that is done
                mapping = self._asked is not None and self._asked.request == message.request
                if not mapping and not self.repeated(message.request):
                    self._try(message)
            case Transfer():
                if not self.repeated(message.request):
                    return self._transfer(message)
            case DoneAck():
                self._ended(message)
            case Registered() | Refused():
                self._exposed(message)
            case Pulled():
                self._pulled(message)
            case Renew():
                if not self.repeated(message.request):
                    self._renew(message, now)
            case Credit():
                self._credit(message)
            case Abort():
                self._abort(message)
            case Goodbye():
                self.step("Goodbye")
                self._offers.clear()  # it reads nothing any more
                self.events.append(SessionClosed(self.session, self.name, message.reason))
            case _:
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", "source", type(message).__name__)
        return None

    def _try(self, message: Describe | Register) -> None:
        before = self.state
        try:
            self.step(type(message).__name__)
            if isinstance(message, Describe):
                self._describe(message)
            else:
                self._register(message)
        except KvprotoError as error:
            self.state = before
            self._refuse(message.request, error)

    def _refuse(self, request: int, error: KvprotoError) -> None:
        self.reply(Refused(session=self.session, request=request, **refusal(error)), request)
        self.events.append(SessionRefused(self.name, error, by_us=True))

    def _describe(self, message: Describe) -> None:
        data = bytes(message.geometry)
        if digest(data) != message.digest:
            raise RemoteError(ErrorCode.BAD_DIGEST, "digest", digest(data).hex(), bytes(message.digest).hex())
        try:
            sink = decode_geometry(data)
        except (WireError, PlanError) as e:
            raise type(e)(e.code, f"geometry.{e.path}", e.mine, e.yours, e.advice) from None
        self.plan = plan(self.geometry, sink, self.features)
        self.sink, self._sink_encoded, self._sink_version = sink, data, message.version
        self.step("Description")
        mine = Description(
            session=self.session,
            request=message.request,
            version=1,
            geometry=self._encoded,
            digest=digest(self._encoded),
        )
        self.reply(mine, message.request)
        self.events.append(Planned(self.session, self.name, self.plan, tuple(differences(self.geometry, sink))))

    @property
    def pulls(self) -> bool:
        """Whether the sink reads."""
        return Feature.PULL in self.features

    @property
    def _digests(self) -> tuple[bytes, bytes]:
        return digest(self._encoded), digest(self._sink_encoded)

    def _register(self, message: Register) -> None:
        if self.epoch:
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "epoch", str(self.epoch), str(message.epoch))
        assert self.plan is not None
        assert self.sink is not None
        assert self.peer is not None
        pair = (self.me.rank, self.peer.rank)
        check_register(message, Access.WRITE, self._digests, self.plan, pair, self.sink)
        self._asked = message
        self.events.append(RegisterAsked(self.session, message))

    def accept_register(self, transport: Transport, granted: Granted | None = None) -> None:
        """The memory is mapped; with `granted`, bytes are staged and Credit is heard."""
        self._granted = granted
        asked, self._asked = self._asked, None
        if asked is None or self.plan is None or self.peer is None:
            return
        self.columns, self.epoch = {c.group: c for c in asked.columns}, asked.epoch
        self.step("Registered")
        routes = tuple(r.ref for r in self.plan.between(self.me.rank, self.peer.rank))
        self.reply(
            Registered(
                session=self.session, request=asked.request, epoch=asked.epoch, transport=transport, routes=routes,
                plan=self.plan.digest, process=self._process if transport in DYING and not self.pulls else None,
            ),
            asked.request,
        )  # fmt: skip

    def expose(self, regions: tuple[Region, ...], columns: tuple[Columns, ...], now: float) -> None:
        """Grant the sink access to this rank's memory, to read it."""
        assert self.plan is not None
        assert self.peer is not None
        self.step("Register")
        source, sink = self._digests
        self._exposing = self.request(
            Register, now, source=source, sink=sink, epoch=_EPOCH, access=Access.READ, regions=regions,
            columns=columns, plan=self.plan.digest,
            routes=tuple(r.ref for r in self.plan.between(self.me.rank, self.peer.rank)),
        )  # fmt: skip

    def _exposed(self, message: Registered | Refused) -> None:
        if message.request != self._exposing or not self.answered(message.request):
            return
        assert self.plan is not None
        assert self.peer is not None
        self.step(type(message).__name__)
        try:
            if isinstance(message, Refused):
                self.events.append(SessionRefused(self.name, refused(message), by_us=False))
            else:
                agrees(message, self.plan, (self.me.rank, self.peer.rank))
        except RemoteError as error:
            self.events.append(SessionRefused(self.name, error, by_us=True))
            self.goodbye(str(error))

    def refuse_register(self, error: KvprotoError) -> None:
        """The memory cannot be mapped."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.step("Refused")
            self._refuse(asked.request, error)

    def _transfer(self, message: Transfer) -> Transfer | None:
        attempt = Attempt(message.sequence, message.attempt)
        known = self.attempts.get(attempt.key)
        try:
            if known is not None and known.state in (TransferState.ABORTING, TransferState.ENDED):
                raise RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(message.sequence))
            if message.sequence <= self.low_water or known is not None:
                raise RemoteError(
                    ErrorCode.STALE_TRANSFER, "sequence", f"above {self.low_water}", str(message.sequence)
                )
            if message.sequence > self.low_water + _MOST_TRANSFERS:
                raise RemoteError(
                    ErrorCode.BUSY, "sequence", f"{_MOST_TRANSFERS} transfers at once", str(message.sequence)
                )
            if self.state != SessionState.READY:
                raise RemoteError(
                    ErrorCode.UNEXPECTED_MESSAGE, "", f"session {self.state.value}", "Transfer", "register first"
                )
            self._check(message)
        except RemoteError as error:
            self.reply(Failed(**self._head(message), **refusal(error)), message.request)
            return None
        self.attempts[attempt.key] = attempt
        self.move(attempt, "Transfer")
        return message

    def _check(self, message: Transfer) -> None:
        assert self.plan is not None
        assert self.sink is not None
        assert self.peer is not None
        for field, ours, theirs in (
            ("source_version", 1, message.source_version),
            ("sink_version", self._sink_version, message.sink_version),
            ("epoch", self.epoch, message.epoch),
            ("writers", list(self.plan.required(self.peer.rank)), message.writers.tolist()),
        ):
            if ours != theirs:
                raise RemoteError(ErrorCode.BAD_GRANT, field, str(ours), str(theirs), "register again")
        wanted = self.plan.send_flags(self.me.rank, self.peer.rank)
        check_grants(self.sink, self.peer.rank, self.columns, wanted, message.grants)

    def _head(self, message: Transfer | Renew) -> dict[str, Any]:
        return {
            "session": self.session,
            "request": message.request,
            "sequence": message.sequence,
            "attempt": message.attempt,
        }

    def accept(self, message: Transfer, state: RequestState) -> None:
        """Answer a Transfer; Done or Failed will follow."""
        self.move(self.attempts[message.sequence, message.attempt], "Accepted")
        self.reply(Accepted(**self._head(message), state=state), message.request)

    def fail(self, message: Transfer, error: KvprotoError, now: float) -> None:
        """End a transfer without its bytes."""
        attempt = self.attempts[message.sequence, message.attempt]
        asked = attempt.state == TransferState.ASKED
        self.move(attempt, "Failed")
        if asked:
            self.reply(Failed(**self._head(message), **refusal(error)), message.request)
        else:
            self.request(Failed, now, sequence=message.sequence, attempt=message.attempt, **refusal(error))

    def done(
        self, message: Transfer, now: float, written: int, outcome: Outcome, handoff: tuple[HandOff, ...],
        checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """Every byte is at its destination."""
        assert self.plan is not None
        assert self.peer is not None
        self.move(self.attempts[message.sequence, message.attempt], "Done")
        self.request(
            Done, now, sequence=message.sequence, attempt=message.attempt, writer=self.me.rank,
            groups=np.array(self.plan.send_flags(self.me.rank, self.peer.rank), np.uint32),
            bytes=written, outcome=outcome, handoff=handoff, checksums=checksums,
        )  # fmt: skip

    def offer(
        self, message: Transfer, now: float, end: float, latest: float, grants: tuple[Grants, ...], outcome: Outcome,
        handoff: tuple[HandOff, ...], checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """The sink may read these items until `end`; Renew prolongs that up to `latest` (KVP-PUL-OFFER)."""
        attempt = self.attempts[message.sequence, message.attempt]
        self.move(attempt, "Offer")
        request = self.request(
            Offer, now, max(PATIENCE, latest - now), sequence=attempt.sequence, attempt=attempt.attempt,
            writer=self.me.rank, epoch=_EPOCH, grants=grants, lease=int((end - now) * 1000), outcome=outcome,
            handoff=handoff, checksums=checksums,
        )  # fmt: skip
        self._offers[attempt.key] = _Lent(request, end, latest)

    def lent(self, key: tuple[int, int], now: float) -> bool:
        """Whether the sink may still read what this attempt was offered."""
        return key in self._offers and now < self._offers[key].end

    def released(self, key: tuple[int, int]) -> None:
        """The engine is told to free the request; a sink that has read it hears of it."""
        if key in self._read and self.state == SessionState.READY:
            self.notice(Released(session=self.session, sequence=key[0], attempt=key[1]))
        self._read.discard(key)

    def _pulled(self, message: Pulled) -> None:
        key = (message.sequence, message.attempt)
        lent = self._offers.get(key)
        if lent is not None and lent.request == message.request and self.answered(message.request):
            self.move(self.attempts[key], "Pulled")
            del self._offers[key]
            self._read.add(key)
            self.events.append(Fetched(self.session, *key, message.bytes))

    def _renew(self, message: Renew, now: float) -> None:
        key = (message.sequence, message.attempt)
        lent = self._offers.get(key)
        lease = min(message.lease, int(1000 * (lent.latest - now))) if lent else 0
        if lent is None or now >= lent.end or lease < 1:
            raise RemoteError(ErrorCode.DEADLINE, "lease", "over", f"{message.lease} ms more", "make a new ticket")
        self.move(self.attempts[key], "Renew")
        lent.end = max(lent.end, now + lease / 1000)
        self.move(self.attempts[key], "Renewed")
        self.reply(Renewed(**self._head(message), lease=lease), message.request)

    def _credit(self, message: Credit) -> None:
        self.step("Credit")
        if self._granted is None or message.kind != CreditKind.STAGING:
            kind = CreditKind(message.kind).name
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "kind", "no such credit in this session", kind)
        self._granted.grant(message)

    def chunk(self, message: Transfer, piece: Piece) -> None:
        """Bytes of this transfer are in a slot of the sink."""
        attempt = self.attempts[message.sequence, message.attempt]
        self.move(attempt, "Chunk")
        self.notice(piece.chunk(self.session, attempt.sequence, attempt.attempt))

    def _ended(self, message: DoneAck) -> None:
        self.answered(message.request)
        attempt = self.attempts.get((message.sequence, message.attempt))
        if attempt is not None and attempt.state in (TransferState.DONE, TransferState.FAILED):
            self.move(attempt, "DoneAck")

    def _abort(self, message: Abort) -> None:
        key = (message.sequence, message.attempt)
        if message.sequence <= self.low_water or message.sequence > self.low_water + _MOST_TRANSFERS:
            attempt = Attempt(*key)  # over, or refused whenever it comes
        else:
            attempt = self.attempts.setdefault(key, Attempt(*key))
        self.move(attempt, "Abort")
        lent = self._offers.pop(key, None)
        if lent is not None:
            self.answered(lent.request)
        if key in self._copying:
            self._drains[key] = attempt, message.request
        else:
            self._drained(attempt, message.request)

    def _drained(self, attempt: Attempt, request: int) -> None:
        self.move(attempt, "Drained")
        self.reply(
            Drained(
                session=self.session, request=request, sequence=attempt.sequence, attempt=attempt.attempt,
                proof=Proof.UNPROVABLE if attempt.key in self._unprovable else Proof.PROVEN,
            ),
            request,
        )  # fmt: skip

    def copying(self, message: Transfer) -> None:
        """Writes of this transfer may arrive from now on."""
        self._copying.add((message.sequence, message.attempt))

    def copied(self, message: Transfer, proof: Proof = Proof.PROVEN) -> bool:
        """The copy of this transfer is over; whether an Abort waited for that: it is answered with the proof."""
        key = (message.sequence, message.attempt)
        if proof != Proof.PROVEN:
            self._unprovable.add(key)
        self._copying.discard(key)
        waiting = self._drains.pop(key, None)
        if waiting is not None:
            self._drained(*waiting)
        return waiting is not None
