"""Delivery of bytes to the sink: its interface, and push, where the source writes the pages itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproto.errors import RemoteError
from kvproto.session.core import Extension, Handlers, Session
from kvproto.session.descriptions import Described
from kvproto.session.records import Answer, SinkAttempt, SourceAttempt
from kvproto.session.table import TransferState
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof

if TYPE_CHECKING:
    from kvproto.session.sink import SinkSession
    from kvproto.session.source import SourceSession

Unpacker = Callable[[Mapping[int, int]], Any]
"""Makes the unpacker of a stream; its argument states where late windows begin, by group id."""


class SourcePush(Extension):
    """The source's half: Done and its acknowledgement."""

    _session: SourceSession

    def done(self, attempt: SourceAttempt, written: int, answer: Answer, now: float) -> None:
        """Send Done, as every byte of the transfer is at its destination (KVP-TRN-ORDER)."""
        session = self._session
        session.move(attempt, "Done")
        session.request(
            m.Done,
            now,
            sequence=attempt.sequence,
            writer=session.me.rank,
            groups=np.array(attempt.described.groups, np.uint32),
            bytes=written,
            **answer.fields,
            on_error=lambda error, now: session.transfers.refused(attempt, error),
        )


class Delivery(Extension):
    """The way of bytes into one epoch of the sink's memory; the base class of SinkPush, SinkStream and SinkPull."""

    _session: SinkSession
    ready = True
    """Whether transfers may run, once the session is READY."""
    process: m.Process | None = None
    """The process that writes, if its end is proof that none of its writes can arrive any more (KVP-REG-DEATH)."""
    streamed_by: int | None = None
    """The transport by which the source packs bytes, unless it writes the pages itself."""
    provable = False
    """Whether the source can prove that no write can arrive any more; False if this side's own copies write."""

    def begin(self, attempt: SinkAttempt, unpacker: Unpacker | None) -> None:
        """Called before the Transfer of an attempt is sent."""

    def check_end(self, attempt: SinkAttempt) -> None:
        """Raise UNEXPECTED_MESSAGE if Done comes before the end of a stream (KVP-STG-EARLY)."""

    def finish(self, attempt: SinkAttempt) -> bool:
        """Whether every byte of an attempt that is Done is here; raises KvprotoError if something went wrong."""
        return True

    def stop(self, attempt: SinkAttempt) -> bool:
        """Expect no more bytes of an attempt; whether this side has stopped writing them."""
        return True

    def free(self, attempt: SinkAttempt) -> bool:
        """Whether no write of an attempt can arrive any more (KVP-END-REUSE)."""
        raise NotImplementedError

    def given_back(self) -> None:
        """Called when the source has reported the memory as unmapped and PROVEN (KVP-EPO-PROOF)."""

    def advance(self) -> None:
        """Send what has become due since the last frame, as copies of this side end without notice."""


class DoneHandler(Extension):
    """The sink's half of Done, for transfers into any epoch."""

    _session: SinkSession

    def _done(self, message: m.Done, now: float) -> None:
        transfers = self._session.transfers
        attempt = transfers.find(message)
        if attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED):
            check_whole(attempt)
            check_outcome(attempt.owned.described, self._session.features, message)
            delivery = attempt.owned.delivery
            delivery.begin_at(attempt, check_begins(attempt, message.begins))
            delivery.check_end(attempt)
            transfers.settled(attempt)
            attempt.done = message
            self._session.move(attempt, "Done")
            self._session.move(attempt, "DoneAck")
        elif attempt is not None and attempt.state == TransferState.ABORTING:
            check_outcome(attempt.owned.described, self._session.features, message)
            attempt.proof = Proof.PROVEN
        self._session.reply(m.DoneAck, message)

    handlers: Handlers = ((m.Done, _done),)


class SinkPush(Delivery):
    """The delivery into one epoch of the sink's memory that the source writes itself."""

    provable = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.dead = self._unmapped = False
        """Whether the writer's process has ended, or has given the memory back."""

    def registered(self, message: m.Registered, proving: Collection[int]) -> None:
        """Note how the source has mapped this side's memory; with a transport in `proving`, its death is proof."""
        self.process = message.process if message.transport in proving else None

    def begin_at(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        """Handle where late windows begin, as Done states it."""

    def given_back(self) -> None:
        self._unmapped = True

    def free(self, attempt: SinkAttempt) -> bool:
        return self.dead or self._unmapped or attempt.done is not None or attempt.proof == Proof.PROVEN


def check_whole(attempt: SinkAttempt) -> None:
    """Raise UNEXPECTED_MESSAGE if the source cannot have written all of an attempt (KVP-INT-DONE)."""
    if not attempt.whole:
        mine, yours = "a transfer whose items are all granted", f"sequence {attempt.sequence}"
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours, "wait for Grant")


def check_outcome(described: Described, features: Collection[int], message: m.Done | m.Offer) -> None:
    """Raise RemoteError if a Done or an Offer is not what the routes of the pair promise.

    WRONG_PEER for another writer or other groups (KVP-TRN-WRITER), or for hand-off groups that are not the routed ones
    (KVP-HND-GROUPS); OUT_OF_RANGE for hand-off data of another length (KVP-HND-BYTES); VERIFY_FAILED for a lack of
    checksums in a session with VERIFY (KVP-VERIFY-SINK).
    """
    if message.writer != described.ranks[0]:
        mine, yours = f"rank {described.ranks[0]}", f"rank {message.writer}"
        raise RemoteError(ErrorCode.WRONG_PEER, "writer", mine, yours, "state your rank")
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
    """Beginnings of late windows, by group id; raises BAD_GRANT for what was not asked for (KVP-GRANT-BEGINS)."""
    for i, begin in enumerate(begins or ()):
        if begin.group not in attempt.late:
            mine, yours = f"late windows of groups {sorted(attempt.late)}", str(begin.group)
            raise RemoteError(ErrorCode.BAD_GRANT, f"begins[{i}].group", mine, yours, "state late windows alone")
        first, end = attempt.late[begin.group]
        if not first < begin.first <= end:
            mine, advice = f"above {first}, up to {end}", "state a token of the window that was asked for"
            raise RemoteError(ErrorCode.BAD_GRANT, f"begins[{i}].first", mine, str(begin.first), advice)
    return {begin.group: begin.first for begin in begins or ()}
