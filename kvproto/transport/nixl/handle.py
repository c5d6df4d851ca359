"""Memory as transport `nixl` names it, and the handle that lets a peer write it (spec/v1/registration.md).

A handle is a frame with magic and SHA-256, then msgpack whose types, ranges and names are checked, then NIXL's
metadata, which must name the same agent. The digest finds accidents, not malice: the metadata holds UCX addresses and
keys that only UCX can read, and UCX ends the process on some that it did not make. So connect handles only from peers
that passed the session's authentication. Once NIXL has refused an agent's metadata half-way, it refuses that agent for
good, and the peer has to make a new one. A peer with a handle may write the memory that it names and nothing else: in
packed mode name staging memory only.
"""

import hashlib
import re
from typing import Any

import attrs
import msgpack
import numpy as np

from kvproto.errors import bad
from kvproto.wire.enums import MemoryKind

_MAGIC = b"KVNX\x01"
_HEAD = len(_MAGIC) + 32
_MOST_METADATA = 1 << 16
_NAME = re.compile(r"kvproto-[0-9a-f]{32}")


@attrs.frozen
class ByteRange:
    """Bytes of a process, on the host or on a device."""

    address: int = attrs.field(repr=False)
    length: int
    kind: MemoryKind = MemoryKind.HOST
    device: int = 0
    """CUDA ordinal in this process; 0 on the host."""
    buffer: memoryview | None = attrs.field(default=None, repr=False, eq=False)
    """The same bytes, if they are this process's on the host."""
    owner: object = attrs.field(default=None, repr=False, eq=False)
    """The memory whose staging slot begins with them."""

    @classmethod
    def of(cls, buffer: Any) -> "ByteRange":
        """A contiguous buffer of the host."""
        view = memoryview(buffer).cast("B")
        address = np.ndarray(view.nbytes, np.uint8, view).ctypes.data
        return cls(address, view.nbytes, buffer=view)

    def part(self, offset: int, length: int) -> "ByteRange":
        """Bytes [offset, offset + length); raises OUT_OF_RANGE beyond."""
        if not 0 <= offset <= offset + length <= self.length:
            raise bad("", f"{self.length} bytes", f"{offset} to {offset + length}")
        buffer = None if self.buffer is None else self.buffer[offset : offset + length]
        return ByteRange(self.address + offset, length, self.kind, self.device, buffer)

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Address, bytes and device, as NIXL wants them."""
        return self.address, self.length, self.device


@attrs.frozen
class HandleContents:
    """The contents of a handle."""

    name: str
    memory: ByteRange
    slot_bytes: int
    metadata: bytes = attrs.field(repr=False)

    @property
    def connection(self) -> bytes:
        """The part of the metadata that is the same for all memory of an agent."""
        return self.metadata.split(b"MemSection", 1)[0]

    def encode(self) -> bytes:
        """The bytes of a handle."""
        memory = self.memory
        fields = [self.name, *memory.descriptor, int(memory.kind), self.slot_bytes, self.metadata]
        body: bytes = msgpack.packb(fields)
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def decode(cls, data: bytes) -> "HandleContents":
        """Decode a handle; raises ValueError with the reason."""
        if data[: len(_MAGIC)] != _MAGIC or len(data) > _MOST_METADATA:
            raise ValueError("not a handle of NIXL")
        if hashlib.sha256(data[_HEAD:]).digest() != data[len(_MAGIC) : _HEAD]:
            raise ValueError("its digest differs")
        fields = msgpack.unpackb(data[_HEAD:])
        if not isinstance(fields, list) or [type(f) for f in fields] != [str, int, int, int, int, int, bytes]:
            raise ValueError("its fields have the wrong types")
        name, address, length, device, kind, slot_bytes, metadata = fields
        if not _NAME.fullmatch(name):
            raise ValueError("its agent's name is not one that kvproto gives")
        if address <= 0 or length <= 0 or address + length >= 1 << 63 or not 0 <= device < 1 << 16:
            raise ValueError("its memory is out of range")
        if not 0 <= slot_bytes <= length:
            raise ValueError("its slots are out of range")
        tagged = b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"
        if not metadata.startswith(tagged):
            raise ValueError("its metadata is another agent's")
        return cls(name, ByteRange(address, length, MemoryKind(kind), device), slot_bytes, metadata)
