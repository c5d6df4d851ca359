"""Items that are named late, when they are of use: Progress and Grant (features INTENT and SPANS).

A source sends Progress while an attempt lacks items that are of use, and repeats it every `resend`, so that a lost
frame costs nothing but time. A sink sends one Grant of an attempt at a time, each with items that no earlier Grant has
named, so that neither side sends or checks items twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvproto.copying.grants import (
    all_granted,
    check_grants,
    granted_until,
    lacks_items,
    newly_granted,
    no_items,
    with_grant,
)
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError, RemoteError
from kvproto.session import limits
from kvproto.session.core import Extension
from kvproto.session.error_fields import refusal
from kvproto.session.records import SinkAttempt, SourceAttempt
from kvproto.session.table import TransferState
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, RequestState

if TYPE_CHECKING:
    from kvproto.session.sink import SinkSession
    from kvproto.session.source import SourceSession

_OVER = (TransferState.FAILED, TransferState.ENDED)


class SourceIntent(Extension):
    """The source's half."""

    _session: SourceSession

    def progress(self, attempt: SourceAttempt, tokens: int | None, now: float) -> None:
        """Send Progress, repeatedly until they are granted, for items up to this token (None: for all)."""
        if attempt.useful is not None and (tokens is None or tokens > attempt.useful):
            attempt.useful = tokens
            self._say(attempt, now)

    def _say(self, attempt: SourceAttempt, now: float) -> None:
        """Send Progress if items are still lacking, and set the timer to repeat it (KVP-INT-AGAIN)."""
        session = self._session
        if attempt.saying is not None:
            attempt.saying.cancel()
        if not session.open or attempt.state != TransferState.ACCEPTED or not self._lacks(attempt):
            return
        session.move(attempt, "Progress")
        state = RequestState.READY if attempt.useful is None else RequestState.RUNNING
        number, tokens = attempt.sequence, attempt.useful
        session.notice(m.Progress(session=session.session, sequence=number, state=state, tokens=tokens))
        attempt.saying = session.host.timers.at(now + limits.RESEND, partial(self._say, attempt))

    def _lacks(self, attempt: SourceAttempt) -> bool:
        """Whether items that are of use are not granted."""
        if attempt.whole or attempt.useful is None:
            return not attempt.whole
        return attempt.end is not None and attempt.end < attempt.useful

    @staticmethod
    def _side(attempt: SourceAttempt) -> RankLayout:
        described, columns = attempt.described, attempt.epoch.columns if attempt.epoch is not None else {}
        return RankLayout(described.sink, described.ranks[1], columns)

    def _grant(self, message: m.Grant, now: float) -> None:
        session, attempt = self._session, self._session.transfers.find(message)
        try:
            if attempt is None or attempt.transfer is None or attempt.progress is None:
                mine, advice = "no such attempt, or one that is over", "send a Transfer first"
                raise RemoteError(ErrorCode.STALE_TRANSFER, "sequence", mine, str(message.sequence), advice)
            if attempt.aborted:
                advice = "use the next attempt"
                raise RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(message.sequence), advice)
            if attempt.lost is not None and attempt.state in _OVER:
                raise attempt.lost
        except KvprotoError as error:
            session.reply(m.Failed, message, **refusal(error))
            return
        if message.request > attempt.grant:
            try:
                granted = self._check(attempt, attempt.transfer, message)
                session.move(attempt, "Grant")
            except RemoteError as error:
                if attempt.state == TransferState.ACCEPTED:
                    session.transfers.fail(attempt, error, now, message)
                else:
                    session.reply(m.Failed, message, **refusal(error))
                return
            attempt.granted, attempt.grant = granted, message.request
            attempt.whole = all_granted(self._side(attempt), granted, attempt.transfer.grants)
            attempt.end = granted_until(self._side(attempt), granted, attempt.transfer.grants)
            session.move(attempt, "Accepted")
            self._session.tickets_of_rank.granted(attempt)
        session.reply(m.Accepted, message, state=attempt.progress())

    def _check(self, attempt: SourceAttempt, transfer: m.Transfer, message: m.Grant) -> tuple[m.Grants, ...]:
        """Everything that is granted with this Grant; raises the first check that fails (KVP-INT-CHECKS)."""
        side, spans = self._side(attempt), Feature.SPANS in self._session.features
        if attempt.whole:
            mine, yours = "an attempt whose items are all granted", "more of them"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, yours, "grant each item once")
        if not spans and attempt.progress is not None and attempt.progress() != RequestState.READY:
            mine = "a request whose prefill is not over, without SPANS"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, "Grant", "wait for Progress READY")
        granted = with_grant(side, attempt.granted, transfer.grants, message.grants, spans)
        described, overlaps = attempt.described, attempt.epoch.overlaps if attempt.epoch is not None else None
        check_grants(
            described.sink,
            described.ranks[1],
            side.columns,
            described.groups,
            granted,
            overlaps,
            asked=transfer.grants,
            before=attempt.granted,
        )
        return granted

    handlers = ((m.Grant, _grant),)


class SinkIntent(Extension):
    """The sink's half."""

    _session: SinkSession

    def take(self, attempt: SinkAttempt) -> None:
        """Note whether the Transfer of an attempt leaves out its items."""
        if True in [grant.items is None for grant in attempt.asks] and lacks_items(self._side(attempt), attempt.asks):
            attempt.granted, attempt.whole = no_items(self._side(attempt), attempt.asks), False

    def grant(
        self, attempt: SinkAttempt, grants: Mapping[int, m.Grants], now: float, begin: Callable[[], None], packed: bool
    ) -> None:
        """Name the items of an attempt, including earlier ones, as soon as a Grant may be sent.

        `begin` is called once all are named. With `packed` bytes, nothing is sent before that.
        """
        named = tuple(grants[g.group] for g in attempt.asks)
        if not attempt.whole and not attempt.begun and all_granted(self._side(attempt), named, attempt.asks):
            attempt.begun = True
            begin()
        if attempt.begun or not packed:
            attempt.named = named
            self._next(attempt, now)

    @staticmethod
    def _side(attempt: SinkAttempt) -> RankLayout:
        described = attempt.owned.described
        return RankLayout(described.sink, described.ranks[1], {})

    def _next(self, attempt: SinkAttempt, now: float) -> None:
        """Send a Grant, if there are new items and it may be sent now (KVP-SPN-TURN)."""
        session = self._session
        if not attempt.named or attempt.whole or attempt.grant or attempt.state != TransferState.ACCEPTED:
            return
        whole, spans = attempt.begun, Feature.SPANS in session.features
        said = newly_granted(attempt.granted, attempt.named)
        grows = any(g.count > old.count for g, old in zip(attempt.named, attempt.granted, strict=True))
        if not (whole or (spans and grows)) or not (spans or attempt.ready):
            return
        on_error = partial(session.transfers.lose, attempt)
        try:
            request = session.compose(
                m.Grant, now, sequence=attempt.sequence, grants=said, on_error=lambda error, now: on_error(error)
            )
        except KvprotoError as error:
            on_error(error)
            return
        session.move(attempt, "Grant")
        attempt.granted, attempt.whole = attempt.named, whole
        attempt.grant = session.ask(request, now)

    def _accepted(self, message: m.Accepted, now: float) -> None:
        transfers = self._session.transfers
        transfers.accepted(message, now)
        attempt = transfers.find(message)
        if attempt is None:
            return
        if message.request == attempt.grant and attempt.state == TransferState.ACCEPTED:
            attempt.grant = 0
            self._session.move(attempt, "Accepted")
        self._note(attempt, message.state, 0, now)

    def _progress(self, message: m.Progress, now: float) -> None:
        transfers = self._session.transfers
        attempt = transfers.find(message)
        if attempt is None or attempt.state == TransferState.ENDED:
            return  # the attempt is over
        transfers.mark_accepted(attempt)
        self._session.move(attempt, "Progress")
        self._note(attempt, message.state, message.tokens or 0, now)

    def _note(self, attempt: SinkAttempt, state: int, tokens: int, now: float) -> None:
        attempt.ready = attempt.ready or state == RequestState.READY
        attempt.useful = max(attempt.useful, tokens)
        self._next(attempt, now)
        self._session.host.ended(self._session, attempt)

    handlers = ((m.Progress, _progress), (m.Accepted, _accepted))


def useful(attempts: Iterable[SinkAttempt], reported: int | None) -> int | None:
    """The token up to which all source ranks can use items that are lacking, at least `reported`; None: all items."""
    lacking = [attempt for attempt in attempts if not attempt.whole]
    if not lacking or reported is None:
        return reported
    tokens = min((attempt.useful for attempt in lacking if not attempt.ready), default=None)
    return tokens if tokens is None else max(tokens, reported)
