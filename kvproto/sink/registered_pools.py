"""The pools that a sink rank registers with one source replica, the current one and those on their way back."""

from collections.abc import Sequence

from kvproto.rank.machine import machine
from kvproto.session import SinkEndpoint
from kvproto.sink.registered_pool import LentSinkPool, RegisteredPool
from kvproto.sink.verification import Verification
from kvproto.transport.base import Transport


class RegisteredPools:
    """The pools of a sink rank that one source replica may write: registered, taken back, and released by proof."""

    def __init__(
        self,
        endpoint: SinkEndpoint,
        transports: Sequence[Transport],
        verification: Verification,
        lent: LentSinkPool,
    ) -> None:
        """Register `lent` at once."""
        self._endpoint, self._transports, self._verification = endpoint, transports, verification
        self.current: RegisteredPool | None = None
        """The pool of new fetches; None while the sink is asleep."""
        self._former: list[RegisteredPool] = []
        """Earlier pools, or earlier plans of the same one, that a source may still write."""
        self.expose(lent)

    def expose(self, lent: LentSinkPool) -> None:
        """Register a pool under the current plan; fetches under way end under the earlier one."""
        self.withdraw(at_once=False)
        self.pool, self.current = lent.pool, RegisteredPool(self._endpoint, lent, self._transports)
        self._endpoint.expose(self.current.exposed, machine.monotonic(), lent.pool.layout.geometry)

    def planned(self) -> None:
        """Register the pool again if it was registered under a plan that has been replaced."""
        current = self.current
        if current is None:
            return
        if current.digests not in (None, self._endpoint.digests) or self._endpoint.outdated(current.exposed):
            self.expose(current.lent)

    def withdraw(self, at_once: bool) -> None:
        """Take the pool back from sources that can return it; with `at_once`, fetches into it end."""
        current, self.current = self.current, None
        if current is not None:
            self._former.append(current)
            self._endpoint.give_back(current.exposed, at_once, machine.monotonic())

    def holders(self, lent: LentSinkPool) -> list[str]:
        """Parties that may still read or write a pool, for display."""
        holders: list[str] = []
        for registered in (*self._former, self.current):
            if registered is not None and registered.lent is lent:
                holders += self._endpoint.holders(registered.exposed)
                holders += ["checksums under way"] * self._verification.reads(registered)
        return holders

    def release(self) -> None:
        """Release former pools that nothing holds any more."""
        for former in list(self._former):
            if self._endpoint.holders(former.exposed) or self._verification.reads(former):
                continue
            if self._endpoint.given_back(former.exposed):
                former.close()
            self._former.remove(former)

    @property
    def leaving(self) -> bool:
        """Whether a pool was taken back that a source may still write."""
        return bool(self._former)

    @property
    def unpacking(self) -> bool:
        """Whether anything is being unpacked into one of the pools."""
        if self.current is not None and self.current.unpacking:
            return True
        return bool(self._former) and any(former.unpacking for former in self._former)
