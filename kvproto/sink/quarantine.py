"""Pages of lost transfers that a peer may still write: counted, limited, and freed only by proof (KVP-END-REUSE)."""

from collections import Counter
from collections.abc import Hashable, Mapping

from kvproto.copying.grants import size_of
from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants


class Quarantine:
    """The quarantine of one pool, for all sources that write it."""

    def __init__(self, layout: RankLayout, share: float) -> None:
        """`share` of a group's items, 0 to 1, may be in quarantine before `check` raises."""
        self._layout, self._share = layout, share
        self._held: dict[Hashable, Counter[int]] = {}
        self.counts: dict[int, int] = {}
        """The number of items by group id; never modified in place, so that any thread may read it."""

    def hold(self, fetch: Hashable, grants: Mapping[int, Grants]) -> None:
        """Add the pages of a fetch that was lost while its writes may still arrive."""
        self._held[fetch] = Counter({id: size_of(grant) for id, grant in grants.items()})
        self._count()

    def free(self, fetch: Hashable) -> None:
        """Remove the pages of a fetch, as nothing can write them any more."""
        if self._held.pop(fetch, None) is not None:
            self._count()

    def check(self) -> None:
        """Raise LocalError(BUSY) if too many items are in quarantine."""
        for group, count in self.counts.items():
            whole = self._layout.columns[group].items
            if count > self._share * whole:
                raise LocalError(
                    ErrorCode.BUSY,
                    f"quarantine[{self._layout.groups[group].name}]",
                    f"at most {self._share:.0%} of {whole} pages",
                    str(count),
                    "end the engines that may still write them, or restart this one",
                )

    def _count(self) -> None:
        self.counts = dict(sum(self._held.values(), Counter()))
