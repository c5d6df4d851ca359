"""Register and Registered, whoever owns the memory (spec/v1/registration.md).

The owner registers its memory; the holder maps it, and so may write it (push) or read it (pull).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from kvproto.copying.aliasing import Overlaps
from kvproto.copying.columns import check_columns
from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.core import Part, Session
from kvproto.session.events import RegisterAsked
from kvproto.session.phases import Described, Epoch
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, ErrorCode, Transport

__all__ = ["EPOCH", "Holder", "register", "registered"]

EPOCH = 1
"""Of all memory that this package registers: without the feature EPOCHS there is no other."""


def register(
    session: Session, access: Access, regions: tuple[m.Region, ...], columns: tuple[m.Columns, ...], now: float
) -> None:  # fmt: skip
    """Grant the peer access to this rank's memory."""
    described = session.described
    session.step("Register")
    session.request(
        m.Register, now, source=described.of_source.digest, sink=described.of_sink.digest, epoch=EPOCH, access=access,
        regions=regions, columns=columns, plan=described.plan.digest, routes=described.refs,
    )  # fmt: skip


def registered(session: Session, message: m.Registered, take: Callable[[], None] = lambda: None) -> None:
    """Go on with what the holder has mapped; give the session up where its routes differ (KVP-REG-CHECK)."""
    if not session.answered(message.request, m.Register):
        return
    session.step("Registered")
    try:
        _check_routes(message, session.described)
        take()
    except RemoteError as error:
        session.give_up(error)


class Holder(Part):
    """The side that maps the peer's memory: the engine is asked to, and then Register is answered."""

    def __init__(self, session: Session, access: Access) -> None:
        super().__init__(session)
        self._access = access
        self.epoch: Epoch | None = None
        """What is mapped."""
        self._asked: tuple[m.Register, Overlaps] | None = None
        """What is being mapped."""
        self._answer: m.Registered | None = None

    def _register(self, message: m.Register, now: float) -> None:
        session, before = self._session, self._session.state
        if self._asked is not None and self._asked[0].request == message.request:
            return  # it is being mapped, and answered once
        if self._answer is not None and self._answer.request == message.request:
            session.notice(self._answer)
            return
        if self._access == Access.READ and before == SessionState.REGISTERING:
            return  # it has overtaken the Registered of this side, and comes again
        try:
            if self._answer is not None or self._asked is not None:
                mine = "one Register, without the feature EPOCHS"
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "epoch", mine, str(message.epoch), "open a new session")
            session.step("Register")
            overlaps = _check(message, self._access, session.described)
        except KvprotoError as error:
            session.state = before
            session.refuse(message, error)
            return
        self._asked = message, overlaps
        session.tell(RegisterAsked(session.session, message))

    def accept(self, transport: Transport, process: m.Process | None) -> bool:
        """The peer's memory is mapped: whether the peer still wants that."""
        asked, self._asked = self._asked, None
        if asked is None or not self._session.open:
            return False
        self._session.step("Registered")
        register, overlaps = asked
        self.epoch = Epoch(register.epoch, {c.group: c for c in register.columns}, overlaps)
        described = self._session.described
        self._answer = m.Registered(
            session=self._session.session, request=register.request, epoch=register.epoch, transport=transport,
            routes=described.refs, plan=described.plan.digest, process=process,
        )  # fmt: skip
        self._session.notice(self._answer)
        return True

    def refuse(self, error: KvprotoError) -> None:
        """The peer's memory cannot be mapped."""
        asked, self._asked = self._asked, None
        if asked is not None and self._session.open:
            self._session.step("Refused")
            self._session.refuse(asked[0], error)

    hears = ((m.Register, _register),)


def _check(message: m.Register, access: Access, described: Described) -> Overlaps:
    """Raise what speaks against a Register; returns which of its columns overlap.

    Clauses KVP-REG-DIGESTS, KVP-REG-ACCESS, KVP-REG-ROUTES, KVP-REG-COLUMNS.
    """
    digests = described.of_source.digest, described.of_sink.digest
    for field, ours, theirs in zip(("source", "sink"), digests, (message.source, message.sink), strict=True):
        if ours != theirs:
            raise RemoteError(ErrorCode.DESCRIPTION_MISMATCH, field, ours.hex(), bytes(theirs).hex(), "describe again")
    if message.access != access:
        raise RemoteError(
            ErrorCode.NO_TRANSPORT, "access", access.name, Access(message.access).name, "register the other access"
        )
    _check_routes(message, described)
    regions = {r.id: r for r in message.regions}
    if len(regions) != len(message.regions):
        raise RemoteError(ErrorCode.BAD_COLUMNS, "regions", "each id once", str([r.id for r in message.regions][:8]))
    owner, rank = described.sink, described.ranks[1]
    if access == Access.READ:
        owner, rank = described.source, described.ranks[0]
    return check_columns(owner, rank, regions, message.columns)


def _check_routes(message: m.Register | m.Registered, described: Described) -> None:
    """Raise ROUTE_MISMATCH at the first route that differs, or that one side lacks."""
    names = {g.id: g.name for g in described.sink.groups}
    for i, (ours, theirs) in enumerate(zip_longest(described.refs, message.routes)):
        if ours != theirs:
            mine, yours = (
                f"group {ref.group} ({names.get(ref.group, 'unknown')}), digest {bytes(ref.digest).hex()}"
                if ref is not None else "no further route"
                for ref in (ours, theirs)
            )  # fmt: skip
            raise RemoteError(ErrorCode.ROUTE_MISMATCH, f"routes[{i}]", mine, yours, "plan by spec/v1/planning.md")
    if message.plan != described.plan.digest:
        mine, yours = described.plan.digest.hex(), bytes(message.plan).hex()
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", mine, yours, "plan by spec/v1/planning.md")
