"""Packed streams, as a transport moves them and as a session, which knows no transport, announces and reads them."""

from typing import Any, ClassVar, Protocol

from kvproto.wire.enums import CreditKind
from kvproto.wire.messages import Chunk, Data


class Piece(Protocol):
    """At the source: bytes of a stream that a message carries or announces."""

    def notice(self, session: int, sequence: int) -> Chunk | Data:
        """Make the Data that carries it, or the Chunk that announces it."""


class Receiver(Protocol):
    """At the sink: streams from one source, named by the sequence of their transfers."""

    kind: ClassVar[CreditKind]
    """The unit of their credit."""

    @property
    def busy(self) -> bool:
        """Whether anything is being unpacked."""

    def open(self, sequence: int, packer: Any) -> None:
        """Expect the stream of a transfer, which `packer` unpacks into its pages."""

    def check_end(self, sequence: int) -> None:
        """Raise UNEXPECTED_MESSAGE if some of a stream has not come yet (KVP-STG-EARLY)."""

    def finish(self, sequence: int) -> bool:
        """Whether all of a stream is unpacked (KVP-STG-END); raises KvprotoError if something went wrong."""

    def close(self, sequence: int) -> bool:
        """Discard a stream; whether nothing of it is being unpacked any more."""
