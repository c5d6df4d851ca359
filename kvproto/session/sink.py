"""One session at the sink: it dials, describes itself, registers its memory, and asks for transfers."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import check_grants
from kvproto.errors import KvprotoError, PlanError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, decode_geometry, digest
from kvproto.planning.plan import Plan, differences, plan
from kvproto.session.events import Planned, RegisterAsked, SessionClosed, SessionRefused
from kvproto.session.leases import Lease
from kvproto.session.negotiation import Terms, check_welcome, greased
from kvproto.session.peer import Attempt, Party, Peer, refusal, refused
from kvproto.session.registering import DYING, agrees, check_register
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
    Welcome,
)

__all__ = ["SinkSession"]


def _closed(region: Region) -> Region:
    """The same, for a peer that may not write it."""
    return attrs.evolve(region, handles=tuple(attrs.evolve(h, data=b"") for h in region.handles))


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
        self.process: Process | None = None
        """That writes, where its end is proof (KVP-REG-DEATH)."""
        self.dead = False
        """Whether it has ended."""
        self.readable = False
        """Whether the source's memory is mapped here."""
        self.source_columns: dict[int, Columns] = {}
        self.leases: dict[tuple[int, int], Lease] = {}
        self._exposed: Register | None = None
        self._source_epoch = 0
        self._asked_at: dict[tuple[int, int], float] = {}
        self._unproven: set[tuple[int, int]] = set()
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

    @property
    def pulls(self) -> bool:
        """Whether this side reads."""
        return Feature.PULL in self.features

    def receive(self, message: Any, now: float) -> None:
        """Take one message."""
        match message:
            case Register() | Offer() | Renewed() | Released() if not self.pulls:
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", "a session without PULL", type(message).__name__)
            case Register():
                if message != self._exposed and not self.repeated(message.request):
                    self._expose(message)
            case Offer():
                if not self.repeated(message.request):
                    self._offer(message)
            case Renewed():
                self._renewed(message)
            case Released():
                attempt = self.attempts.get((message.sequence, message.attempt))
                if attempt is not None:
                    self.move(attempt, "Released")
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
                if about is not None and self.answered(about) and not self._not_renewed(about, message):
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
                try:
                    agrees(message, self.plan, (self.peer.rank, self.me.rank))
                except RemoteError as error:
                    self._give_up(error)
                else:
                    self.process = message.process if message.transport in DYING and not self.pulls else None
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
        """Grant the source access to this rank's memory; in pull it has no use for handles, and gets none."""
        assert self.plan is not None
        assert self.peer is not None
        self.step("Register")
        regions = tuple(map(_closed, self.regions)) if self.pulls else self.regions
        self.request(
            Register, now, source=digest(self._source_encoded), sink=digest(self._encoded), epoch=1,
            access=Access.WRITE,
            regions=regions, columns=self._columns, plan=self.plan.digest,
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
        self._asked_at[attempt.key] = now
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
            lease = self.leases.pop(key, None)
            if lease is not None and lease.renewal is not None:
                self.answered(lease.renewal)
            self.request(Abort, now, sequence=attempt.sequence, attempt=attempt.attempt, reason=reason[:1000])

    def unpacked(self, key: tuple[int, int]) -> bool:
        """Whether a transfer that is Done is here to its last byte; raises what went wrong."""
        return self.staging is None or self.staging.finish(*key)

    def let_go(self, key: tuple[int, int]) -> bool:
        """Expect no more bytes of a transfer: whether this side has stopped writing them."""
        return self.staging is None or self.staging.close(*key)

    def proven(self, key: tuple[int, int]) -> bool:
        """Whether no write of the transfer can arrive any more: only this side writes what it pulls or unpacks."""
        if self.pulls:
            return key not in self._unproven
        return self.dead or self.staging is not None or key in self.done or self.proofs.get(key) == Proof.PROVEN

    def settle(self, key: tuple[int, int]) -> None:
        """The endpoint has taken the outcome of this attempt."""
        for kept in (self.done, self.failures, self.proofs, self.leases, self._asked_at):
            kept.pop(key, None)
        self._unproven.discard(key)
        self.forget()

    def _expose(self, message: Register) -> None:
        """A source's memory, to be read."""
        before = self.state
        self.step("Register")  # one that overtook Registered comes again
        assert self.plan is not None
        assert self.source is not None
        assert self.peer is not None
        try:
            if self.readable or self._exposed is not None:
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "epoch", str(self._source_epoch), str(message.epoch))
            digests = digest(self._source_encoded), digest(self._encoded)
            pair = (self.peer.rank, self.me.rank)
            check_register(message, Access.READ, digests, self.plan, pair, self.source)
        except KvprotoError as error:
            self.state = before
            self._refuse(message.request, error)
            return
        self._exposed = message
        self.events.append(RegisterAsked(self.session, message))

    def _refuse(self, request: int, error: KvprotoError) -> None:
        self.reply(Refused(session=self.session, request=request, **refusal(error)), request)
        self.events.append(SessionRefused(self.name, error, by_us=True))

    def accept_register(self, transport: Transport) -> None:
        """The source's memory is mapped here."""
        asked, self._exposed = self._exposed, None
        if asked is None or self.plan is None or self.peer is None or self.state != SessionState.READY:
            return
        self.step("Registered")
        self.readable, self._source_epoch = True, asked.epoch
        self.source_columns = {c.group: c for c in asked.columns}
        routes = tuple(r.ref for r in self.plan.between(self.peer.rank, self.me.rank))
        self.reply(
            Registered(
                session=self.session, request=asked.request, epoch=asked.epoch, transport=transport, routes=routes,
                plan=self.plan.digest,
            ),
            asked.request,
        )  # fmt: skip

    def refuse_register(self, error: KvprotoError) -> None:
        """The source's memory cannot be mapped here."""
        asked, self._exposed = self._exposed, None
        if asked is not None and self.state == SessionState.READY:
            self.step("Refused")
            self._refuse(asked.request, error)

    def _offer(self, message: Offer) -> None:
        key = (message.sequence, message.attempt)
        attempt = self.attempts.get(key)
        if attempt is None and message.sequence > self.low_water:
            self._attempt(message)
        if attempt is None or attempt.state == TransferState.ENDED:
            self._say_pulled(message, 0)
            return
        if key in self.leases and self.leases[key].offer == message:
            return
        if attempt.state == TransferState.ASKED:
            self.move(attempt, "Accepted")  # the reply was overtaken
        self.move(attempt, "Offer")
        if attempt.state == TransferState.OFFERED:
            self._check_offer(message)
            self.leases[key] = Lease.of(message, self._asked_at[key])

    def _check_offer(self, message: Offer) -> None:
        assert self.plan is not None
        assert self.source is not None
        assert self.peer is not None
        if message.writer != self.peer.rank:
            raise RemoteError(ErrorCode.WRONG_PEER, "writer", f"rank {self.peer.rank}", f"rank {message.writer}")
        if message.epoch != self._source_epoch:
            raise RemoteError(ErrorCode.BAD_GRANT, "epoch", str(self._source_epoch), str(message.epoch))
        routes = self.plan.between(self.peer.rank, self.me.rank)
        drawn = tuple(sorted({box.source_group for route in routes for box in route.boxes}))
        check_grants(self.source, self.peer.rank, self.source_columns, drawn, message.grants)
        routed = {r.group for r in routes}
        if not {h.group for h in message.handoff} <= routed:
            came = [h.group for h in message.handoff]
            raise RemoteError(ErrorCode.WRONG_PEER, "handoff", f"of groups {sorted(routed)}", f"of groups {came}")

    def _say_pulled(self, offer: Offer, count: int) -> None:
        self.reply(
            Pulled(
                session=self.session, request=offer.request, sequence=offer.sequence, attempt=offer.attempt, bytes=count
            ),
            offer.request,
        )

    def pulled(self, key: tuple[int, int], count: int) -> None:
        """Every byte of the offer is here; from now on it stands as Done."""
        assert self.plan is not None
        assert self.peer is not None
        offer = self.leases.pop(key).offer
        self.move(self.attempts[key], "Pulled")
        self._say_pulled(offer, count)
        groups = np.array(self.plan.send_flags(self.peer.rank, self.me.rank), np.uint32)
        self.done[key] = Done(
            session=self.session, request=offer.request, sequence=offer.sequence, attempt=offer.attempt,
            writer=offer.writer, groups=groups, bytes=count, outcome=offer.outcome, handoff=offer.handoff,
            checksums=offer.checksums,
        )  # fmt: skip

    def reading(self, key: tuple[int, int]) -> bool:
        """Whether a copy of the offer is under way."""
        return key in self.leases and self.leases[key].reading

    def unread(self, key: tuple[int, int], proof: Proof) -> None:
        """A copy of the offer is over, and of no use; UNPROVABLE: its writes may still arrive."""
        if key in self.leases:
            self.leases[key].reading = False
        if proof != Proof.PROVEN:
            self._unproven.add(key)

    def renew(self, now: float) -> None:
        """Ask for more time where a lease is close to its end."""
        for (sequence, attempt), lease in self.leases.items():
            if self.state == SessionState.READY and lease.due(now):
                self.move(self.attempts[sequence, attempt], "Renew")
                lease.sent = now
                lease.renewal = self.request(Renew, now, sequence=sequence, attempt=attempt, lease=lease.offer.lease)

    def _renewed(self, message: Renewed) -> None:
        lease = self.leases.get((message.sequence, message.attempt))
        if self.answered(message.request) and lease is not None and lease.renewal == message.request:
            self.move(self._attempt(message), "Renewed")
            lease.renewed(message.lease)

    def _not_renewed(self, request: int, message: Error) -> bool:
        """Whether it was a Renew that this Error is about: then the lease is over."""
        key = next((k for k, lease in self.leases.items() if lease.renewal == request), None)
        if key is not None:
            self.failures[key] = refused(message)
        return key is not None

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
            if isinstance(message, Done) and self.pulls:
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", "Offer", "Done", "in this session the sink reads")
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
