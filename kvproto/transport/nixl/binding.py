"""The calls of NIXL; nothing else imports nixl."""

import contextlib
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.transport.nixl.handle import ByteRange, HandleContents
from kvproto.wire.enums import ErrorCode, MemoryKind

Descriptors = npt.NDArray[np.uint64]
"""Rows (address, bytes, device) [n, 3]."""
Located = tuple[Descriptors, MemoryKind]


class Nixl:
    """The calls of NIXL that kvproto uses, by its bindings; raises what NIXL raises, and NO_TRANSPORT without NIXL.

    NIXL's Python wrapper sets the progress thread's delay to 0, which keeps a core busy all the time. With a delay the
    thread sleeps until UCX has work or the delay is over.
    """

    def __init__(self, name: str) -> None:
        try:
            importlib.import_module("nixl")
        except ImportError as e:
            raise LocalError(ErrorCode.NO_TRANSPORT, "", "NIXL", "not installed", "pip install 'kvproto[nixl]'") from e
        self._api = api = importlib.import_module("nixl._bindings")
        config = api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, 1000  # microseconds
        config.useListenThread, config.syncMode = False, api.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixlAgent(name, config)
        self._ucx = [self._agent.createBackend("UCX", {})]
        self._segment = {MemoryKind.HOST: api.DRAM_SEG, MemoryKind.CUDA: api.VRAM_SEG}

    def register(self, memory: ByteRange) -> tuple[Any, bytes]:
        """Register memory; returns the registration and the metadata that names this memory alone."""
        registration = self._api.nixlRegDList(self._segment[memory.kind], [(*memory.descriptor, "")])
        self._agent.registerMem(registration, self._ucx)
        return registration, self._agent.getLocalPartialMD(registration, True, self._ucx)

    def deregister(self, registration: Any) -> None:
        self._agent.deregisterMem(registration, self._ucx)

    def load(self, peer: HandleContents) -> None:
        """Learn of a peer's memory, and connect."""
        if self._agent.loadRemoteMD(peer.metadata) not in (peer.name, peer.name.encode()):
            raise ValueError("its metadata is another agent's")
        self._agent.makeConnection(peer.name, self._ucx)

    def forget(self, name: str) -> None:
        """End the connection to a peer, which may be gone already."""
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(name)

    def make(self, here: Located, there: Located, peer: str) -> int:
        """Make a transfer without starting it."""
        local, remote = (self._api.nixlXferDList(self._segment[kind], rows) for rows, kind in (here, there))
        handle: int = self._agent.createXferReq(self._api.NIXL_WRITE, local, remote, peer, b"", self._ucx)
        return handle

    def post(self, handle: int) -> bool:
        """Start a transfer; returns whether it is complete already."""
        return self._complete(self._agent.postXferReq(handle, b""))

    def ask(self, handle: int) -> bool:
        """Whether a transfer is complete."""
        return self._complete(self._agent.getXferStatus(handle))

    def _complete(self, status: Any) -> bool:
        if status not in (self._api.NIXL_SUCCESS, self._api.NIXL_IN_PROG):
            raise RuntimeError(str(status))
        return bool(status == self._api.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """End UCX now, even if a traceback keeps this object alive; it reads none of our memory from then on."""
        del self._agent, self._ucx
