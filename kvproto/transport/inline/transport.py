"""Transport `inline`: a source packs bytes into Data of the session, and the sink unpacks them into its own pages.

It maps nothing and needs no library, so it works between any two hosts, on host memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvproto.copying.execute import checksums
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import RemoteError
from kvproto.transport import base
from kvproto.transport.inline.receiver import InlineReceiver
from kvproto.transport.inline.sender import InlineLink, InlineStream
from kvproto.transport.shm.memory import SharedMemory, buffers
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

__all__ = ["WINDOW", "InlineTransport"]

WINDOW = 2 << 20
"""Bytes that may be on their way to a sink from one source rank."""


@attrs.frozen
class _Apart(base.Mapped):
    """A peer's region, which only the peer itself writes, from Data."""

    link: InlineLink

    def close(self) -> None:
        """There is nothing to unmap."""


class InlineTransport(base.Transport):
    """Moves bytes inside the session; `window` is what this side grants as a sink, at most `max_credit`."""

    capabilities = base.Capabilities(
        code=TransportCode.INLINE, features=(Feature.INLINE,), reads=False, death_is_proof=True, batches=False,
        incremental=False, poll_interval=None,
    )  # fmt: skip

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """Say that bytes of these regions come as Data; raises NO_TRANSPORT for memory that is not the host's."""
        buffers = _buffers(memory)
        handle = Handle(transport=TransportCode.INLINE, data=b"")
        return base.Exposure(
            dict.fromkeys(memory, (handle,)),
            packed=base.StreamDelivery(InlineReceiver(self.window), lambda made: PackedStream(made, "sink", buffers)),
        )

    def connect(
        self, regions: Sequence[Region], used: Collection[int], writes: bool, features: Collection[int]
    ) -> base.Connection:
        """Map nothing; raises NO_TRANSPORT without feature INLINE, or to read (KVP-REG-INLINE)."""
        if not writes or Feature.INLINE not in features:
            mine = "INLINE in this session" if writes else "a transport that reads"
            raise RemoteError(ErrorCode.NO_TRANSPORT, "regions[0].handles", mine, "INLINE", "use another transport")
        link = InlineLink()

        def connect(region: Region, path: str) -> _Apart:
            if all(handle.transport != TransportCode.INLINE for handle in region.handles):
                raise base.no_handle(path, TransportCode.INLINE)
            return _Apart(link)

        made = base.connect_each(regions, used, connect)
        made.link = link
        return made

    def start(self, moves: Sequence[base.Move]) -> InlineStream:
        """Start one move; raises OUT_OF_REGION."""
        (move,) = moves
        link = next((m.link for m in move.sinks.values() if isinstance(m, _Apart)), InlineLink())
        return InlineStream(link, PackedStream(move.program, "source", _buffers(move.sources)), move.grows)

    def checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> dict[int, int]:
        return checksums(program, _buffers(memory), sink)


def _buffers(side: Mapping[int, base.Memory | base.Mapped]) -> dict[int, memoryview]:
    return buffers(side, "memory of the host", SharedMemory)
