"""Pages in files that NIXL's POSIX plug-in writes and reads; `pip install 'kvproto[nixl]'`.

NIXL moves the bytes. Names, renames and syncs are those of `FileStore`, and so is the layout on the disk: either reads
what the other wrote. NIXL is given descriptors of open files, so that a file gets the name that readers look for once
it is whole.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from kvproto.errors import LocalError
from kvproto.tiers.manifest import Data
from kvproto.tiers.store import FileStore
from kvproto.wire.enums import ErrorCode

__all__ = ["NixlFileStore"]

_SOON, _LATE = 20e-6, 1e-3
"""Seconds between looks at a transfer: the pause doubles up to the latter."""


class NixlFileStore(FileStore):
    """A folder as of `FileStore`, with an agent of NIXL for each thread."""

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError, and LocalError where NIXL or its plug-in is missing."""
        try:
            self._api = import_module("nixl._bindings")
        except ImportError as error:
            wants = "pip install 'kvproto[nixl]'"
            raise LocalError(ErrorCode.NO_TRANSPORT, "storage", wants, f"{error}") from error
        self._mine = local()
        try:
            self._agent()
        except Exception as error:  # NIXL's own classes have no other base
            wants, advice = "NIXL's plug-in POSIX", "use a plain folder: what is stored is the same"
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "storage", wants, f"{error}", advice) from error
        super().__init__(root, durable)

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                self._move(self._api.NIXL_READ, data, file.fileno())
                return bytes(data)
        except FileNotFoundError:
            return None

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `Filling`."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size <= len(room):
                    self._move(self._api.NIXL_READ, room[:size], file.fileno())
                return size
        except FileNotFoundError:
            return None

    def _fill(self, file: int, data: Data) -> None:
        self._move(self._api.NIXL_WRITE, data, file)

    def _agent(self) -> tuple[str, Any, list[int]]:
        """This thread's, with its name and its back end."""
        if not hasattr(self._mine, "agent"):
            name, config = f"kvproto-{secrets.token_hex(16)}", self._api.nixlAgentConfig()
            config.useProgThread = config.useListenThread = False
            agent = self._api.nixlAgent(name, config)
            self._mine.agent = name, agent, [agent.createBackend("POSIX", {})]
        made: tuple[str, Any, list[int]] = self._mine.agent
        return made

    def _move(self, way: Any, data: Data, file: int) -> None:
        """All bytes of a file, from its beginning; raises OSError."""
        size = memoryview(data).nbytes
        if not size:
            return
        api, (name, agent, posix) = self._api, self._agent()
        address = np.frombuffer(data, np.uint8).ctypes.data
        places = [(api.DRAM_SEG, (address, size, 0)), (api.FILE_SEG, (0, size, file))]
        with ExitStack() as stack:
            try:
                for segment, place in places:
                    held = api.nixlRegDList(segment, [(*place, "")])
                    agent.registerMem(held, posix)
                    stack.callback(agent.deregisterMem, held, posix)
                here, there = (api.nixlXferDList(segment, [place]) for segment, place in places)
                handle = agent.createXferReq(way, here, there, name, b"", posix)
                stack.callback(agent.releaseXferReq, handle)
                status, pause = agent.postXferReq(handle, b""), _SOON
                while status == api.NIXL_IN_PROG:
                    time.sleep(pause)
                    pause = min(2 * pause, _LATE)
                    status = agent.getXferStatus(handle)
            except Exception as error:
                raise OSError(errno.EIO, f"NIXL: {error}") from error
            if status != api.NIXL_SUCCESS:
                raise OSError(errno.EIO, f"NIXL: {status}")
