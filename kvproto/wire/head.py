"""The head of a refused frame: its type, and the ids at the start of its body."""

from typing import Any

import attrs

from kvproto.errors import WireError
from kvproto.wire import tables
from kvproto.wire.codec import Buffer, message_class
from kvproto.wire.strict import read_whole

_IDS = ("session", "request", "sequence")


@attrs.frozen
class Head:
    """Type and ids of a message; None where it lacks one or a reader cannot find it."""

    cls: type[Any] | None = None
    session: int | None = None
    request: int | None = None
    sequence: int | None = None

    @classmethod
    def of(cls, message: Any) -> "Head":
        """The head of a message that was decoded."""
        return cls(type(message), *(getattr(message, name, None) for name in _IDS))

    @property
    def delivery(self) -> str:
        """Delivery class of the type; "request" if the type is not known."""
        return tables.DELIVERY[self.cls.__name__] if self.cls is not None else "request"


def read_head(frame: Buffer) -> Head:
    """Read as much of the head as a malformed frame has; never raises."""
    ids: dict[str, int] = {}
    cls = None
    trace: list[tuple[int, str, Any]] = []
    try:
        cls = message_class(frame)
        read_whole(cls.__name__, memoryview(frame)[tables.HEADER_BYTES :], trace)
    except WireError:
        pass
    name = None
    for _, kind, note in trace:
        if kind == "id":
            if note not in (*_IDS, "resume"):
                break
            name = note
        elif kind == "value" and name in _IDS:
            ids[name] = note
    return Head(cls, **ids)
