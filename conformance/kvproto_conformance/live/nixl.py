"""NIXL as registration.md describes it, on host memory; imported when the first scenario of `staged` begins."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import secrets
import time
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvproto_conformance.live.memory import BadHandle, read_uint, write_uint
from kvproto_conformance.live.peer import Missed

_MAGIC = b"KVNX\x01"
_HOST = 1
"""Kind of memory (enum MemoryKind)."""
_PATIENCE = 10.0
"""Seconds that one write may take."""


class Staging(NamedTuple):
    """The fields of a handle of staging memory."""

    name: str
    """Of the agent."""
    address: int
    length: int
    ordinal: int
    kind: int
    slot: int
    """Bytes of a slot; 0 where there are none."""
    metadata: bytes

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.length // self.slot if self.slot else 0


def is_there() -> bool:
    """Whether NIXL is installed alongside the suite."""
    return importlib.util.find_spec("nixl") is not None


def write_handle(said: Staging) -> str:
    """The `data` of a handle, in hex."""
    name, size = said.name.encode(), len(said.metadata)
    numbers = b"".join(map(write_uint, said[1:6]))
    body = b"\x97\xd9" + bytes([len(name)]) + name + numbers
    body += (b"\xc4" + bytes([size]) if size < 256 else b"\xc5" + size.to_bytes(2, "big")) + said.metadata
    return (_MAGIC + hashlib.sha256(body).digest() + body).hex()


def read_handle(data: bytes) -> Staging:
    """Read what an engine states about its memory; raises BadHandle."""
    head = len(_MAGIC)
    body = data[head + 32 :]
    if data[:head] != _MAGIC or data[head : head + 32] != hashlib.sha256(body).digest():
        raise BadHandle("no KVNX 1 with the SHA-256 of what follows")
    try:
        if body[:2] != b"\x97\xd9":
            raise BadHandle("no msgpack array of seven that begins with a name")
        at = 3 + body[2]
        name, numbers = body[3:at].decode(), []
        for _ in range(5):
            number, at = read_uint(body, at)
            numbers.append(number)
        mark = body[at]
        width = {0xC4: 1, 0xC5: 2}.get(mark)
    except (IndexError, UnicodeDecodeError):
        raise BadHandle(f"a handle that ends after {len(data)} bytes, or a name that is no text") from None
    if width is None or int.from_bytes(body[at + 1 : at + 1 + width], "big") != len(body) - at - 1 - width:
        raise BadHandle("no metadata at the end of the handle")
    address, length, ordinal, kind, slot = numbers
    return Staging(name, address, length, ordinal, kind, slot, body[at + 1 + width :])


class Agent:
    """The suite's end of NIXL, over UCX."""

    def __init__(self) -> None:
        self.name = f"kvproto-{secrets.token_hex(16)}"
        api = self._api = importlib.import_module("nixl._bindings")
        config = api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.useListenThread = True, 1000, False
        config.syncMode = api.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixlAgent(self.name, config)
        self._ucx = [self._agent.createBackend("UCX", {})]

    def register(self, memory: npt.NDArray[np.uint8], slot: int) -> tuple[Any, Staging]:
        """Let others write memory in slots of this size; returns what `forget` accepts, and the handle for Register."""
        address = memory.ctypes.data
        made = self._api.nixlRegDList(self._api.DRAM_SEG, [(address, memory.size, 0, "")])
        self._agent.registerMem(made, self._ucx)
        metadata = bytes(self._agent.getLocalPartialMD(made, True, self._ucx))
        return made, Staging(self.name, address, memory.size, 0, _HOST, slot, metadata)

    def forget(self, made: Any) -> None:
        """Stop letting others write that memory."""
        self._agent.deregisterMem(made, self._ucx)

    def meet(self, there: Staging) -> None:
        """Connect to an engine's memory; raises BadHandle if it belongs to another agent."""
        if self._agent.loadRemoteMD(there.metadata) not in (there.name, there.name.encode()):
            raise BadHandle(f"metadata of another agent than {there.name}")
        self._agent.makeConnection(there.name, self._ucx)

    def leave(self, there: Staging) -> None:
        """Disconnect from an engine."""
        self._agent.invalidateRemoteMD(there.name)

    def write(self, memory: npt.NDArray[np.uint8], there: Staging, at: int) -> None:
        """Write registered memory, from a byte to its end, into an engine's; raises Missed if there is none."""
        api = self._api
        here = api.nixlXferDList(api.DRAM_SEG, [(memory.ctypes.data, memory.size, 0)])
        into = api.nixlXferDList(api.DRAM_SEG, [(there.address + at, memory.size, there.ordinal)])
        handle = self._agent.createXferReq(api.NIXL_WRITE, here, into, there.name, b"", self._ucx)
        try:
            status, end = self._agent.postXferReq(handle, b""), time.monotonic() + _PATIENCE
            while status == api.NIXL_IN_PROG:
                if time.monotonic() > end:
                    raise Missed(f"a write into staging memory does not end for {_PATIENCE:g} s", "KVP-REG-MAP")
                time.sleep(0.0002)
                status = self._agent.getXferStatus(handle)
            if status != api.NIXL_SUCCESS:
                raise Missed(f"staging memory cannot be written: {status}", "KVP-REG-MAP")
        finally:
            self._agent.releaseXferReq(handle)


@cache
def agent() -> Agent:
    """The one agent of this process, as UCX takes a while to start."""
    return Agent()
