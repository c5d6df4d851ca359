"""Register and Unregister, for both the owner and the holder of memory (spec/v1/registration.md).

The owner registers its memory; the holder maps it, and may then write it (push) or read it (pull). Each Register opens
an epoch, and Unregister takes one back: the holder accepts no new transfer of it, waits for those under way, unmaps the
memory, and only then answers. More than one epoch needs the feature EPOCHS.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import attrs
import msgpack

from kvproto.copying.columns import Overlaps, check_columns
from kvproto.copying.streams import Receiver
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import ProtocolError
from kvproto.session import limits
from kvproto.session.core import Extension, Session
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Described, Epoch, Owned
from kvproto.session.error_fields import refused
from kvproto.session.limits import MAX_EPOCHS
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, ErrorCode, Feature, Proof, Transport


def attestation_of(session: Session, access: Access) -> bytes:
    """The digest by which a process attests that its memory is registered in a session (KVP-REG-ATTEST)."""
    source, sink = session.me.place, session.peer.place
    if session.role == "sink":
        source, sink = sink, source
    return sha256(msgpack.packb([session.session, access, *source, *sink])).digest()


# The owner


@attrs.frozen
class Registration:
    """The memory that a sink registers with one source rank."""

    regions: tuple[m.Region, ...] = attrs.field(repr=False)
    readers: Mapping[int, Receiver] = {}
    """The readers of the source's streams, by transport, for transports that do not write the pages themselves."""


class Owner(Extension):
    """The half of the side that owns the memory."""

    def __init__(self, session: Session, access: Access) -> None:
        super().__init__(session)
        self._access = access
        self.epochs: dict[int, Owned] = {}
        """The epochs that the peer is not proven to have returned, by number."""
        self.first = self._last = 0
        """The first epoch that the peer mapped, and the last that was registered."""
        self._attestation: bytes | None = None

    @property
    def newest(self) -> Owned | None:
        """The epoch that was registered last, unless it was returned."""
        return self.epochs.get(self._last)

    @property
    def registering(self) -> bool:
        """Whether a Register is not answered yet, before which another may not be sent (KVP-EPO-ONE)."""
        return any(self._session.asks(owned.request) for owned in self.epochs.values() if not owned.mapped)

    @property
    def current(self) -> Owned | None:
        """The newest epoch, if new transfers may use it."""
        owned = self.newest
        return owned if owned is not None and owned.mapped and owned.back is None else None

    def register(
        self,
        number: int,
        memory: object,
        regions: tuple[m.Region, ...],
        columns: tuple[m.Columns, ...],
        now: float,
        take: Callable[[Owned, m.Registered], Any] | None = None,
    ) -> Owned:
        """Grant the peer access to this rank's memory, as epoch `number` or the next unused one (KVP-EPO-RISE)."""
        session, described = self._session, self._session.described
        session.step("Register")
        if self._attestation is None:
            self._attestation = attestation_of(session, self._access)
            session.host.calls.attest(self._attestation, True)
        number = max(number, self._last + 1)
        request = session.request(
            m.Register,
            now,
            source=described.of_source.digest,
            sink=described.of_sink.digest,
            epoch=number,
            access=self._access,
            regions=regions,
            columns=columns,
            plan=described.plan.digest,
            routes=described.refs,
        )
        self._last = number
        owned = self.epochs[number] = Owned(number, described, request, take, memory)
        return owned

    def unregister(self, owned: Owned, at_once: bool, now: float) -> None:
        """Take an epoch back, as soon as the peer has mapped it; with `at_once`, its transfers end with POOL_MOVED."""
        if owned.back is None:
            owned.back = at_once
            if owned.mapped:
                self._ask_back(owned, now)

    def _ask_back(self, owned: Owned, now: float) -> None:
        self._session.step("Unregister")
        owned.asking = self._session.request(
            m.Unregister, now, epoch=owned.number, at_once=owned.back or None, on_error=partial(self._ask_again, owned)
        )

    def _ask_again(self, owned: Owned, error: RemoteError, now: float) -> None:
        """Ask again later, as the peer answered Unregister with Error, which had no effect."""
        self._kept(error)
        again = now + limits.RESEND
        self._session.host.timers.at(again, lambda at: self._ask_back(owned, at) if self._session.open else None)

    def _kept(self, error: RemoteError) -> None:
        """Report that the peer did not return an epoch, which it holds until the session ends (KVP-EPO-FREE)."""
        self._session.tell(ProtocolError(self._session.name, error))

    def closed(self) -> None:
        if self._attestation is not None:
            self._session.host.calls.attest(self._attestation, False)

    def reconnected(self) -> None:
        for owned in self.epochs.values():
            if owned.delivery is not None:
                owned.delivery.reconnected()

    def _registered(self, message: m.Registered, now: float) -> None:
        """Use the memory that the holder has mapped, or give up the session if its routes differ (KVP-REG-CHECK)."""
        owned = self._of(message.request, lambda epoch: epoch.request)
        if owned is None:
            return
        self._session.step("Registered")
        try:
            if message.epoch != owned.number:
                mine, yours = str(owned.number), str(message.epoch)
                raise RemoteError(ErrorCode.OUT_OF_RANGE, "epoch", mine, yours, "answer the epoch of the Register")
            delivery = owned.take(owned, message) if owned.take is not None else None
            _check_routes(message, owned.described)
            owned.delivery = delivery
        except RemoteError as error:
            self._session.give_up(error)
            return
        owned.mapped, self.first = True, self.first or owned.number
        if owned.back is not None:
            self._ask_back(owned, now)

    def _unregistered(self, message: m.Unregistered, now: float) -> None:
        owned = self._of(message.request, lambda epoch: epoch.asking)
        if owned is not None:
            self._session.step("Unregistered")
            owned.unprovable = message.proof != Proof.PROVEN
            if not owned.unprovable:
                del self.epochs[owned.number]
                if owned.delivery is not None:
                    owned.delivery.given_back()

    def _refused(self, message: m.Refused, now: float) -> None:
        asked_back = self._of(message.request, lambda epoch: epoch.asking)
        if asked_back is not None:
            self._session.step("Refused")
            self._kept(refused(message, self._session.name))
            return
        owned = next((epoch for epoch in self.epochs.values() if epoch.request == message.request), None)
        if owned is not None and not owned.mapped:  # otherwise it was answered before (KVP-SES-ANSWERED)
            del self.epochs[owned.number]
            if self._overtaken(owned, message) and self._session.answered(message.request):
                self._session.step("Refused")
                return
        self._session.refused(message, now)

    def _overtaken(self, owned: Owned, message: m.Refused) -> bool:
        """Whether a Register was refused because a Description changed in the meantime, so that another follows."""
        changed = owned.described is not self._session.described or self._session.part(Describing).pending
        return message.code == ErrorCode.DESCRIPTION_MISMATCH and changed

    def _of(self, request: int, request_of: Callable[[Owned], int]) -> Owned | None:
        """The epoch that a request under way is about; ends the request."""
        owned = next((epoch for epoch in self.epochs.values() if request_of(epoch) == request), None)
        return owned if owned is not None and self._session.answered(request) else None

    handlers = ((m.Registered, _registered), (m.Unregistered, _unregistered), (m.Refused, _refused))


# The holder


@attrs.frozen
class _Asked:
    """A Register whose memory is being mapped."""

    register: m.Register
    described: Described
    overlaps: Overlaps


class Holder(Extension):
    """The half of the side that maps the peer's memory; it answers once the rank has mapped or unmapped it."""

    def __init__(
        self, session: Session, access: Access, busy: Callable[[Epoch], bool], end: Callable[[Epoch, float], None]
    ) -> None:
        """`busy` returns whether a transfer of an epoch is under way; `end` ends all of them with POOL_MOVED."""
        super().__init__(session)
        self._access, self._busy, self._end = access, busy, end
        self.epochs: dict[int, Epoch] = {}
        """The epochs that are mapped, by number."""
        self.unregisters = False
        """Whether the peer has ever taken an epoch back."""
        self.first = self._last = 0
        """The first epoch that was mapped, 0 if the peer has never registered memory; and the last that it named."""
        self._asked: _Asked | None = None
        self._early: tuple[m.Register, float] | None = None
        """A Register that came while the plan that it names is being made, and the time at which it came."""
        self._gone: OrderedDict[int, m.Unregistered] = OrderedDict()
        """The answers for the epochs that were returned last, by number."""

    @property
    def open(self) -> list[int]:
        """The numbers of the epochs that new transfers may name."""
        return [number for number, epoch in self.epochs.items() if epoch.back is None]

    def mapping(self, number: int) -> bool:
        """Whether a Register of this epoch has come but is not answered yet."""
        early = self._early[0] if self._early is not None else None
        register = self._asked.register if self._asked is not None else early
        return register is not None and register.epoch == number

    def reconnected(self) -> None:
        for epoch in self.epochs.values():
            if epoch.stream is not None:
                epoch.stream.reconnected()

    def _register(self, message: m.Register, now: float) -> None:
        session, before = self._session, self._session.state
        if self._asked is not None and self._asked.register.request == message.request:
            return  # its memory is being mapped; it is answered once
        answer = next((epoch.answer for epoch in self.epochs.values() if epoch.answer.request == message.request), None)
        if answer is not None:
            session.notice(answer)
            return
        if self._access == Access.READ and before == SessionState.REGISTERING:
            return  # it has overtaken the Registered of this side, and will be sent again
        if (self.first or self._asked is not None) and not self._may_follow(message):
            return
        if before == SessionState.READY and session.part(Describing).pending:
            self._early = message, now
            return
        try:
            session.step("Register")
            overlaps = _check(message, self._access, session.described)
        except KvprotoError as error:
            session.state = before
            session.refuse(message, error)
            return
        self._last = message.epoch
        self._asked = _Asked(message, session.described, overlaps)
        session.host.calls.map_memory(session, message, session.described)

    def planned(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            self._register(*early)

    def _may_follow(self, message: m.Register) -> bool:
        """Whether a Register is legal after the epochs that were opened before; refuses it if not."""
        name, advice = "epoch", "take an earlier one back first"
        error = None
        if Feature.EPOCHS not in self._session.features:
            mine, advice = "one Register, without the feature EPOCHS", "open a new session"
            error = RemoteError(ErrorCode.UNEXPECTED_MESSAGE, name, mine, str(message.epoch), advice)
        elif message.epoch <= self._last:
            mine, advice = f"above {self._last}", "raise it with every Register"
            error = RemoteError(ErrorCode.OUT_OF_RANGE, name, mine, str(message.epoch), advice)
        elif self._asked is not None:
            mine, advice = f"epoch {self._asked.register.epoch} is being mapped", "wait for its Registered"
            error = RemoteError(ErrorCode.BUSY, name, mine, str(message.epoch), advice)
        elif len(self.epochs) >= MAX_EPOCHS:
            error = RemoteError(ErrorCode.BUSY, name, f"{MAX_EPOCHS} epochs at once", str(message.epoch), advice)
        if error is not None:
            self._session.refuse(message, error, ends=False)
        return error is None

    def accept(self, transport: Transport, process: m.Process | None) -> Epoch | None:
        """Answer Registered, as the peer's memory is mapped; returns the epoch, unless the session has ended."""
        asked, self._asked = self._asked, None
        if asked is None or not self._session.open:
            return None
        self._session.step("Registered")
        register, described = asked.register, asked.described
        answer = m.Registered(
            session=self._session.session,
            request=register.request,
            epoch=register.epoch,
            transport=transport,
            routes=described.refs,
            plan=described.plan.digest,
            process=process,
        )
        columns, self.first = {c.group: c for c in register.columns}, self.first or register.epoch
        epoch = self.epochs[register.epoch] = Epoch(register.epoch, described, columns, asked.overlaps, answer)
        self._session.notice(answer)
        return epoch

    def refuse(self, error: KvprotoError) -> None:
        """Answer Refused, as the peer's memory cannot be mapped."""
        asked, self._asked = self._asked, None
        if asked is not None and self._session.open:
            self._session.step("Refused")
            self._session.refuse(asked.register, error)

    def _unregister(self, message: m.Unregister, now: float) -> None:
        session, epoch, answer = self._session, self.epochs.get(message.epoch), self._gone.get(message.epoch)
        session.step("Unregister")
        if answer is not None and answer.request == message.request:
            session.notice(answer)
        elif epoch is None or epoch.back is not None:
            if epoch is None or epoch.back is None or epoch.back.request != message.request:
                mine = f"one of {self.open}, which have not been taken back"
                error = RemoteError(ErrorCode.OUT_OF_RANGE, "epoch", mine, str(message.epoch), "name an epoch once")
                session.refuse(message, error, ends=False)
        else:
            epoch.back, self.unregisters = message, True
            session.host.unsettled()
            if message.at_once:
                self._end(epoch, now)
            self.unmap_unused()

    def unmap_unused(self) -> None:
        """Have epochs unmapped that were taken back and that no transfer uses any more (KVP-EPO-UNMAP)."""
        for epoch in self.epochs.values():
            if epoch.back is not None and not epoch.unmapping and not self._busy(epoch):
                epoch.unmapping = True
                self._session.host.calls.unmap_memory(self._session, epoch.number)

    def unmapped(self, number: int) -> None:
        """Answer Unregistered, as the memory that `unmap_memory` named is unmapped."""
        epoch = self.epochs.pop(number, None)
        if epoch is None or epoch.back is None or not self._session.open:
            return
        answer = m.Unregistered(
            session=self._session.session, request=epoch.back.request, epoch=number, proof=epoch.proof
        )
        self._gone[number] = answer
        if len(self._gone) > MAX_EPOCHS:
            self._gone.popitem(last=False)
        self._session.step("Unregistered")
        self._session.notice(answer)

    handlers = ((m.Register, _register), (m.Unregister, _unregister))


def _check(message: m.Register, access: Access, described: Described) -> Overlaps:
    """Check a Register (KVP-REG-*); returns which of its columns overlap. Raises RemoteError."""
    for field, ours, theirs in zip(("source", "sink"), described.digests, (message.source, message.sink), strict=True):
        if ours != theirs:
            raise RemoteError(ErrorCode.DESCRIPTION_MISMATCH, field, ours.hex(), bytes(theirs).hex(), "describe again")
    if message.access != access:
        mine, yours, advice = access.name, Access(message.access).name, "register the other access"
        raise RemoteError(ErrorCode.NO_TRANSPORT, "access", mine, yours, advice)
    _check_routes(message, described)
    if len(message.regions) > limits.MAX_REGIONS:
        advice = "allocate layers together: each region is a mapping of ours"
        mine, yours = f"at most {limits.MAX_REGIONS} regions", str(len(message.regions))
        raise RemoteError(ErrorCode.TOO_LARGE, "regions", mine, yours, advice)
    regions = {region.id: region for region in message.regions}
    owner, rank = described.sink, described.ranks[1]
    if access == Access.READ:
        owner, rank = described.source, described.ranks[0]
    return check_columns(owner, rank, regions, message.columns)


def _check_routes(message: m.Register | m.Registered, described: Described) -> None:
    """Raise ROUTE_MISMATCH for the first route that differs, or that one side lacks."""
    names = {group.id: group.name for group in described.sink.groups}
    for number, (ours, theirs) in enumerate(zip_longest(described.refs, message.routes)):
        if ours is None or theirs is None or (ours.group, ours.digest) != (theirs.group, theirs.digest):
            mine, yours = (
                f"group {ref.group} ({names.get(ref.group, 'unknown')}), digest {bytes(ref.digest).hex()}"
                if ref is not None
                else "no further route"
                for ref in (ours, theirs)
            )
            raise RemoteError(ErrorCode.ROUTE_MISMATCH, f"routes[{number}]", mine, yours, "plan by spec/v1/planning.md")
    if message.plan != described.plan.digest:
        mine, yours = described.plan.digest.hex(), bytes(message.plan).hex()
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", mine, yours, "plan by spec/v1/planning.md")
