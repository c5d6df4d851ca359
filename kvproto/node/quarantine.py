"""Pages of lost transfers that a peer may still write: counted, capped, and freed by proof alone (KVP-END-REUSE)."""

from __future__ import annotations

from collections.abc import Mapping

from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = ["Quarantine"]


class Quarantine:
    """One for a pool, whatever number of sources write it."""

    def __init__(self, layout: RankLayout, share: float) -> None:
        """`share` of a group's items may wait before `check` refuses."""
        self._layout, self._share = layout, share
        self._held: dict[int, dict[int, int]] = {}
        self.counts: dict[int, int] = {}
        """Items by group id; replaced, never changed, so that any thread may read it."""

    def hold(self, number: int, grants: Mapping[int, Grants]) -> None:
        """A transfer was lost, and its writes may still arrive."""
        self._held[number] = {g: 0 if some.items is None else len(some.items) for g, some in grants.items()}
        self._count()

    def free(self, number: int) -> None:
        """Nothing can write the pages of this transfer any more."""
        if self._held.pop(number, None) is not None:
            self._count()

    def check(self) -> None:
        """Raise LocalError(BUSY) where too many items wait."""
        for group, count in self.counts.items():
            whole = self._layout.columns[group].items
            if count > self._share * whole:
                raise LocalError(
                    ErrorCode.BUSY, f"quarantine[{self._layout.group(group).name}]",
                    f"at most {self._share:.0%} of {whole} pages", str(count),
                    "end the engines that may still write them, or start this one anew",
                )  # fmt: skip

    def _count(self) -> None:
        counts: dict[int, int] = {}
        for items in self._held.values():
            for group, count in items.items():
                counts[group] = counts.get(group, 0) + count
        self.counts = {group: count for group, count in counts.items() if count}
