"""Entry point of transport `shm`."""

from __future__ import annotations

from collections.abc import Mapping

from kvproto.transport.base import Memory, Provider
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.shm.transport import ShmTransport

__all__ = ["PROVIDER"]


class _Shm(Provider):
    name = "shm"

    def preference(self, memory: Memory) -> int:
        return 2 if isinstance(memory, SharedMemory) else 0

    def open(self, memory: Mapping[int, Memory]) -> ShmTransport:
        return ShmTransport()


PROVIDER = _Shm()
