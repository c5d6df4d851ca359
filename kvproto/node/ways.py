"""How the memory of a peer is reached: by its first transport that works here."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.copying.lowering import Pair
from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.events import RegisterAsked
from kvproto.transport.base import Mapped, Memory, Move, Mover
from kvproto.transport.nixl.mover import NixlMover
from kvproto.transport.staging.staged import Link
from kvproto.wire.enums import ErrorCode, Transport

__all__ = ["Way", "reach"]


@attrs.define(eq=False)
class Way:
    """What one session has registered, as mapped here."""

    asked: RegisterAsked
    mover: Mover
    pair: Pair
    """Of the plan."""
    mapped: dict[int, Mapped] = attrs.Factory(dict)
    link: Link | None = None
    """To the pages that are behind staging."""

    def close(self) -> None:
        """Unmap all of it."""
        for mapping in self.mapped.values():
            mapping.close()


def reach(
    asked: RegisterAsked, movers: Mapping[Transport, Mover], pair: Pair, own: Memory, writes: bool, staged: bool = False
) -> Way:
    """Map every region that a column names; who `writes` maps those with a handle of the transport too, for staging.

    `own`: region 0 of this side. `staged`: whether staging slots may be used. Raises why the last transport did not
    work, or NO_TRANSPORT.
    """
    register = asked.register
    error: KvprotoError = RemoteError(
        ErrorCode.NO_TRANSPORT, "regions[0].handles", str([t.name for t in movers]), "none of them",
        "use a common transport",
    )  # fmt: skip
    named = {i for columns in register.columns for i in columns.region.tolist()}
    for handle in register.regions[0].handles if register.regions else ():
        mover = next((m for t, m in movers.items() if t == handle.transport), None)
        if mover is None:
            continue
        way = Way(asked, mover, pair)
        try:
            for i, region in enumerate(register.regions):
                if region.id in named or (writes and any(h.transport == mover.transport for h in region.handles)):
                    way.mapped[region.id] = mover.connect(region, f"regions[{i}]")
            if writes and isinstance(mover, NixlMover):
                way.link = mover.stage(way.mapped.values(), staged)
            sides: tuple[Mapping[int, Memory | Mapped], Mapping[int, Memory | Mapped]] = {0: own}, way.mapped
            mover.prepare(Move(pair.nothing, *(sides if writes else sides[::-1])))
        except KvprotoError as e:
            error = e
            way.close()
            continue
        return way
    raise error
