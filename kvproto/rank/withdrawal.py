"""Taking the pool of a Source or Sink back and replacing it: sleep, wake, move, and when the memory may be freed.

Engines lend their memory to something else for a while, such as a trainer between rollouts: `sleep` and `wake_up` of
vLLM, `release_memory_occupation` and `resume_memory_occupation` of SGLang. Sessions with peers outlive that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvproto.errors import KvprotoError, LocalError, RemoteError, check_type, listed
from kvproto.events import PoolFree
from kvproto.options import Options
from kvproto.rank.base import Door, Handle, RankNode
from kvproto.rank.events import PoolReturned
from kvproto.rank.lent import Lent
from kvproto.rank.pool import Pool
from kvproto.wire.enums import ErrorCode

__all__ = ["Sleeper", "Withdrawal"]


class Withdrawal(Handle[PoolFree]):
    """The handle of a pool that is taken back from peers; it ends with PoolFree, when nothing uses the memory any more.

    Only then may the memory be freed. A peer that is stopped, or gone without proof, holds it until it answers or its
    process has ended.
    """

    def __init__(self, door: Door, pool: Pool, epoch: int) -> None:
        super().__init__(door)
        self.pool, self.epoch = pool, epoch
        self._lent: Lent | None = None

    def __repr__(self) -> str:
        held = f", held by {listed(self.holders)}" if self.holders else ""
        return f"{super().__repr__()[:-1]}{held}>"

    @property
    def holders(self) -> tuple[str, ...]:
        """Who may still read or write the memory, for display; may be called from any thread."""
        return self._lent.holders if self._lent is not None and not self.done else ()

    def _give_up(self, error: KvprotoError) -> None:
        """There is nothing to cancel: whoever holds the memory still holds it."""


class Sleeper(Door):
    """A Source or Sink whose pool may be taken back and replaced."""

    def __init__(self, name: str, pool: Pool, node: RankNode, options: Options) -> None:
        self._asleep, self._epoch = False, 1
        self._withdrawals: dict[int, Withdrawal] = {}
        """Withdrawals by the epoch of their pool."""
        super().__init__(name, pool, node, options)

    @property
    def asleep(self) -> bool:
        """Whether it has no pool: true from `sleep` to `wake`."""
        return self._asleep

    def sleep(self, reason: str = "asleep") -> Withdrawal:
        """End what is under way with POOL_MOVED, and take the pool back from all peers until `wake`.

        The memory may be freed once the returned handle is done. New requests raise POOL_MOVED until `wake`. Raises
        LocalError(UNEXPECTED_MESSAGE) while asleep.
        """
        check_type("reason", reason, str, "a str")
        error = RemoteError(ErrorCode.POOL_MOVED, "", "memory for it", reason, "make a new ticket once it is awake")
        with self._handles_lock:
            self._check_awake("sleep")
            self._asleep = True
            made = self._withdrawals[self._epoch] = Withdrawal(self, self.pool, self._epoch)
        self._post_withdrawal(made, lambda: self._sleep(error))
        return made

    def wake(self, pool: Pool) -> None:
        """Go on with a pool of the same rank on the same device: the old one, or another.

        Its caches may differ: a draft that was loaded or dropped, more layers, ranks that came or went. Sessions go on
        with peers that support it (feature EPOCHS), and are opened again with others. Raises LocalError:
        UNEXPECTED_MESSAGE while awake, FIELD_CONFLICT for a pool of another rank or replica, NO_TRANSPORT for another
        device.
        """
        self._check_pool(pool)
        with self._handles_lock:
            if not self._asleep:
                mine, advice = "a sleeping Source or Sink", "call sleep first, or move, of a Sink"
                raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "wake", mine, f"{self._who} is awake", advice)
            self._replace(pool)
            self._asleep, epoch = False, self._epoch
        self._driver.post(lambda: self._wake(pool, epoch))

    def _sleep(self, error: KvprotoError) -> Lent | None:
        """On the node: end what is under way and ask for the pool back."""
        raise NotImplementedError

    def _wake(self, pool: Pool, epoch: int) -> None:
        """On the node: go on with this pool."""
        raise NotImplementedError

    def _post_withdrawal(self, made: Withdrawal, work: Callable[[], Lent | None]) -> None:
        def run() -> None:
            made._lent = work()

        self._driver.post(run, made._failed)

    def _replace(self, pool: Pool) -> None:
        """With the lock held: make this the current pool."""
        pool._use(self._who)
        self._pools.append(pool)
        self.pool, self._epoch = pool, self._epoch + 1

    def _check_awake(self, call: str) -> None:
        if self._asleep:
            advice = "wake it with a pool first"
            code = ErrorCode.POOL_MOVED if call in ("fetch", "request") else ErrorCode.UNEXPECTED_MESSAGE
            raise LocalError(code, call, "a pool", f"{self._who} is asleep", advice)

    def _check_pool(self, pool: Pool) -> None:
        """Raise LocalError for a pool that cannot replace the current one."""
        check_type("pool", pool, Pool, "a kvproto.Pool")
        self._driver.check()
        for what, mine, yours in (
            ("rank", self.pool.rank, pool.rank),
            ("replica", self.geometry.replica, pool.geometry.replica),
        ):
            if mine != yours:
                advice = "open another Source or Sink"
                raise LocalError(ErrorCode.FIELD_CONFLICT, f"pool.{what}", str(mine), str(yours), advice)
        mine_, yours_ = (sorted({str(m.device) for m in each.memories.values()}) for each in (self.pool, pool))
        if mine_ != yours_:
            advice = "open another Source or Sink for memory of another device"
            raise LocalError(ErrorCode.NO_TRANSPORT, "pool", f"memory of device {mine_}", str(yours_), advice)

    def _returned(self, event: PoolReturned) -> PoolFree:
        """On the node: nothing can read or write a pool any more, so its withdrawal ends."""
        made = self._withdrawals.pop(event.epoch)
        self._drop(made.pool)
        free = PoolFree(made)
        made._end(free)
        return free

    def _all_handles(self) -> Iterator[Handle[Any]]:
        yield from super()._all_handles()
        yield from list(self._withdrawals.values())
