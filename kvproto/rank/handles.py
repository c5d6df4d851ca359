"""Handles of a Source or Sink: an operation that ends, a request by its ticket, and a pool that is taken back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import attrs

from kvproto.errors import KvprotoError, LocalError, check_type, listed
from kvproto.events import PoolFree
from kvproto.rank.machine import machine
from kvproto.wire.enums import ErrorCode

if TYPE_CHECKING:
    from kvproto.rank.base import EngineRank
    from kvproto.rank.pool import Pool
    from kvproto.transport.base import Transport

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """An operation of a Source or Sink: wait for its end, poll it, or add a callback."""

    def __init__(self, rank: EngineRank) -> None:
        self._rank = rank
        self.began = machine.monotonic()
        """The time at which the operation was requested, in seconds of `machine.monotonic`."""
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []
        self._result: Result | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "waiting" if not self.done else f"lost: {self._error}" if self._error is not None else "done"
        return f"<{type(self).__name__} of {self._rank.name}, {state}>"  # the ticket's key is a secret

    @property
    def done(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self._ended.is_set()

    @property
    def result(self) -> Result | None:
        """The event that ended the operation, or None while it is under way; raises its error if it failed."""
        if self._error is not None:
            raise self._error.again() if isinstance(self._error, KvprotoError) else self._error
        return self._result

    def wait(self, timeout: float | None = None) -> Result:
        """Wait up to `timeout` seconds (None: without limit) until the operation has ended, and return its event.

        Without an I/O thread this steps the Source or Sink. Raises the operation's error if it failed, TimeoutError,
        or LocalError(UNEXPECTED_MESSAGE) where it can never end: in a callback, after `close`, or in a forked process.
        """
        check_type("timeout", timeout, (int, float, NoneType), "seconds, or None")
        if not self.done:
            self._rank._wait(self._ended, timeout)
        if not self.done:
            raise TimeoutError(f"{self!r} after {timeout} s")
        found = self.result
        assert found is not None
        return found

    def add_done_callback(self, call: Callable[[Self], object]) -> None:
        """Call `call` with this handle when it has ended, or at once if it has, where `Options.callbacks` says."""
        with self._rank._handles_lock:
            if not self.done:
                self._callbacks.append(call)
                return
        self._rank._driver.later(lambda: call(self), wake=True)

    def _post(self, work: Callable[[], None], *, at_once: bool = True) -> None:
        """Run `work` on the node unless the request has ended; `at_once` in this thread if the node is free."""
        post = self._rank._driver.post if at_once else self._rank._driver.leave
        post(lambda: None if self.done else work(), self._failed)

    def _failed(self, error: Exception) -> None:
        """On the node: a posted call raised. End this handle with the error, and stop the node's work for it."""
        self._end(None, error)
        wrapped = error if isinstance(error, KvprotoError) else LocalError(ErrorCode.ABORTED, "", advice=repr(error))
        with contextlib.suppress(Exception):
            self._give_up(wrapped)

    def _give_up(self, error: KvprotoError) -> None:
        raise NotImplementedError

    def _end(self, result: Result | None, error: BaseException | None = None) -> None:
        if isinstance(error, KvprotoError):
            error.kept()  # its frames would keep the pool's memory as long as the handle
        with self._rank._handles_lock:
            if self.done:
                return
            self._result, self._error = result, error
            self._ended.set()
            calls, self._callbacks = self._callbacks, []
        for call in calls:
            self._rank._driver.later(lambda call=call: call(self))  # type: ignore[misc]


class Withdrawal(Handle[PoolFree]):
    """The handle of a pool that is taken back from peers; it ends with PoolFree, when nothing uses the memory any more.

    Only then may the memory be freed. A peer that is stopped, or gone without proof, holds it until it answers or its
    process has ended.
    """

    def __init__(self, rank: EngineRank, pool: Pool, epoch: int) -> None:
        super().__init__(rank)
        self.pool, self.epoch = pool, epoch
        self.lent: LentPool | None = None
        """The pool as the rank has lent it to peers; None until the rank has asked for it back."""

    def __repr__(self) -> str:
        held = f", held by {listed(self.holders)}" if self.holders else ""
        return f"{super().__repr__()[:-1]}{held}>"

    @property
    def holders(self) -> tuple[str, ...]:
        """Parties that may still read or write the memory, for display; may be called from any thread."""
        return self.lent.holders if self.lent is not None and not self.done else ()

    def _give_up(self, error: KvprotoError) -> None:
        """There is nothing to cancel: whoever holds the memory still holds it."""


@attrs.define(eq=False)
class LentPool:
    """A pool that is lent to peers, from its registration until it is proven that nothing uses it any more."""

    number: int
    """The epoch of its first registrations."""
    pool: Pool
    withdrawal: Withdrawal | None = None
    """The handle by which the engine waits for it; None unless it was taken back."""
    holders: tuple[str, ...] = ()
    """Parties that may still use it after it was taken back, for display; never modified, so any thread may read it."""


L = TypeVar("L", bound=LentPool)


def free_pools(
    leaving: list[L], holders: Callable[[L], Iterable[str]], transports: Iterable[Transport], pool: Pool
) -> list[PoolFree]:
    """Remove the pools that nothing can use any more, and end their withdrawals; transports forget all but `pool`."""
    events = []
    for lent in leaving:
        lent.holders = tuple(holders(lent))
        if lent.holders:
            continue
        for transport in transports if lent.pool is not pool else ():
            transport.forget(lent.pool.memories)
        if lent.withdrawal is not None:
            events.append(PoolFree(lent.withdrawal))
            lent.withdrawal._end(events[-1])
    leaving[:] = [lent for lent in leaving if lent.holders]
    return events
