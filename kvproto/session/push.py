"""How bytes reach the sink: what every way of delivery answers, and push, where the source writes the pages itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from kvproto.errors import RemoteError
from kvproto.session.core import Hears, Part, Session
from kvproto.session.phases import Described
from kvproto.session.records import SinkAttempt, SourceAttempt
from kvproto.session.table import TransferState
from kvproto.session.transfers import SinkTransfers, SourceTransfers
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof

__all__ = [
    "Deliveries",
    "Delivery",
    "SinkPush",
    "SourcePush",
    "Unpacker",
    "check_begins",
    "check_outcome",
    "check_whole",
]

Unpacker = Callable[[Mapping[int, int]], Any]
"""Makes what unpacks a stream, from where its late windows begin, by group id."""


class SourcePush(Part):
    """The source's half: Done and its acknowledgement."""

    def done(
        self, attempt: SourceAttempt, now: float, written: int, outcome: Outcome, handoff: tuple[m.HandOff, ...],
        checksums: tuple[m.Checksum, ...] | None, begins: tuple[m.Begin, ...],
    ) -> None:  # fmt: skip
        """Every byte of the attempt is at its destination (KVP-TRN-ORDER)."""
        session = self._session
        session.move(attempt, "Done")
        session.request(
            m.Done, now, **attempt.ids, writer=session.me.rank, groups=np.array(attempt.described.groups, np.uint32),
            bytes=written, outcome=outcome, handoff=handoff, checksums=checksums, begins=begins or None,
            on_error=lambda error, now: session.part(SourceTransfers).refused(attempt, error),
        )  # fmt: skip


class Delivery(Part):
    """Base of SinkPush, SinkStaged, SinkInline and SinkPull: what the endpoint asks of any of them."""

    polled = False
    """Whether copies of this side may have ended without a word."""
    ready = True
    """Whether transfers may run, once the session is READY."""
    process: m.Process | None = None
    """That writes, where its end is proof that no write of it can arrive any more (KVP-REG-DEATH)."""
    prover: int | None = None
    """The session whose writer's death is proof; None: our own copies write, and nobody's death proves those."""

    @property
    def streamed_by(self) -> int | None:
        """The transport by which the source packs, where it does not write the pages itself."""
        return None

    def begin(self, attempt: SinkAttempt, unpacker: Unpacker | None) -> None:
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

    def given_back(self) -> None:
        """The source has unmapped the memory, by its word as PROVEN (KVP-EPO-PROOF)."""

    def advance(self) -> None:
        """Send what has become due since the last frame."""


class Deliveries(Part):
    """The sink's half: Done, whatever epoch it is of."""

    def _done(self, message: m.Done, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED):
            check_whole(attempt)
            check_outcome(attempt.described, self._session.features, message)
            attempt.delivery.begin_at(attempt, check_begins(attempt, message.begins))
            transfers.heard(attempt)
            transfers.settled(attempt)
            attempt.done = message
            self._session.move(attempt, "Done")
            self._session.move(attempt, "DoneAck")
        self._session.reply(m.DoneAck, message)

    hears: Hears = ((m.Done, _done),)


class SinkPush(Delivery):
    """How bytes reach one epoch of the sink's memory: the source writes it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.prover = session.session
        self.transport = 0
        """That the source took."""
        self.dead = self._unmapped = False
        """Whether the writer has ended, or has given the memory back."""

    def registered(self, message: m.Registered, proving: Collection[int]) -> None:
        """The source has mapped this side's memory; by the transports `proving` its death is proof."""
        self.transport = int(message.transport)
        self.process = message.process if message.transport in proving else None

    def begin_at(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        """Done says where late windows begin."""

    def given_back(self) -> None:
        self._unmapped = True

    def free(self, attempt: SinkAttempt) -> bool:
        return self.dead or self._unmapped or attempt.done is not None or attempt.proof == Proof.PROVEN


def check_whole(attempt: SinkAttempt) -> None:
    """Raise UNEXPECTED_MESSAGE where the source cannot have written all of an attempt (KVP-INT-DONE)."""
    if not attempt.whole:
        mine, yours = "a transfer whose items are all granted", f"sequence {attempt.sequence}"
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours, "wait for Grant")


def check_outcome(described: Described, features: Collection[int], message: m.Done | m.Offer) -> None:
    """Raise where Done or Offer is not what the routes of the pair promise.

    WRONG_PEER for another writer or other groups (KVP-TRN-WRITER) and for other hand-off groups than the routed ones
    (KVP-HND-GROUPS), OUT_OF_RANGE for hand-off data of another length (KVP-HND-BYTES), VERIFY_FAILED in a session with
    VERIFY for no checksums (KVP-VERIFY-SINK).
    """
    if message.writer != described.ranks[0]:
        raise RemoteError(
            ErrorCode.WRONG_PEER, "writer", f"rank {described.ranks[0]}", f"rank {message.writer}", "state your rank"
        )
    routed = described.groups
    if isinstance(message, m.Done) and (done := tuple(message.groups[: len(routed) + 1].tolist())) != routed:
        mine, yours = f"groups {routed}", f"groups {done}"
        raise RemoteError(ErrorCode.WRONG_PEER, "groups", mine, yours, "state every group that is routed")
    sizes = described.handoff_bytes
    groups = [h.group for h in message.handoff]
    if groups != sorted(sizes):
        advice = "state each routed hand-off group once, in ascending order"
        raise RemoteError(ErrorCode.WRONG_PEER, "handoff", f"groups {sorted(sizes)}", f"groups {groups}", advice)
    for i, handoff in enumerate(message.handoff):
        size, came = sizes[handoff.group], len(handoff.data)
        if came != size:
            mine, advice = f"{size} bytes of group {handoff.group}", "state the routed parts in order, unpadded"
            raise RemoteError(ErrorCode.OUT_OF_RANGE, f"handoff[{i}].data", mine, f"{came} bytes", advice)
    if Feature.VERIFY not in features:
        return
    if message.checksums is None:
        raise RemoteError(ErrorCode.VERIFY_FAILED, "checksums", "a session with VERIFY", "none", "state checksums")
    may, summed = set(described.groups) - sizes.keys(), [c.group for c in message.checksums]
    if not may.issuperset(summed):
        raise RemoteError(ErrorCode.WRONG_PEER, "checksums", f"of groups {sorted(may)}", f"of groups {summed}")


def check_begins(attempt: SinkAttempt, begins: tuple[m.Begin, ...] | None) -> dict[int, int]:
    """Where late windows begin, by group id; raises BAD_GRANT for one that was not asked for so (KVP-GRANT-BEGINS)."""
    for i, begin in enumerate(begins or ()):
        if begin.group not in attempt.late:
            mine, yours = f"late windows of groups {sorted(attempt.late)}", str(begin.group)
            raise RemoteError(ErrorCode.BAD_GRANT, f"begins[{i}].group", mine, yours, "state late windows alone")
        first, end = attempt.late[begin.group]
        if not first < begin.first <= end:
            mine, advice = f"above {first}, up to {end}", "state a token of the window that was asked for"
            raise RemoteError(ErrorCode.BAD_GRANT, f"begins[{i}].first", mine, str(begin.first), advice)
    return {begin.group: begin.first for begin in begins or ()}
