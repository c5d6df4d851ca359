"""How the memory of a peer is reached: by its first transport that works here."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.copying.lowering import Pair
from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.events import RegisterAsked
from kvproto.transport.base import Connection, Mapped, Memory, Move, Transport
from kvproto.wire.enums import ErrorCode
from kvproto.wire.enums import Transport as TransportCode

__all__ = ["Way", "reach"]


@attrs.define(eq=False)
class Way:
    """What one session has registered, as mapped here."""

    asked: RegisterAsked
    mover: Transport
    pair: Pair
    """Of the plan."""
    connection: Connection = attrs.Factory(Connection)

    @property
    def staged(self) -> bool:
        """Whether the pages are behind staging slots."""
        return self.connection.link is not None

    def close(self) -> None:
        """Unmap all of it."""
        self.connection.close()


def reach(
    asked: RegisterAsked,
    movers: Mapping[TransportCode, Transport],
    pair: Pair,
    own: Mapping[int, Memory],
    writes: bool,
    staged: bool = False,
) -> Way:
    """Reach every region that a column names, by the first transport of the owner's order that works here.

    `own`: the regions of this side. `staged`: whether staging slots may be used. Raises why the last transport did not
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
            way.connection = mover.connect(register.regions, named, writes, staged)
            sides: tuple[Mapping[int, Memory | Mapped], Mapping[int, Memory | Mapped]] = own, way.connection.mapped
            mover.prepare(Move(pair.nothing, *(sides if writes else sides[::-1])))
        except KvprotoError as e:
            error = e
            way.close()
            continue
        return way
    raise error
