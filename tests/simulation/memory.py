"""Labelled memory: what every page should hold, who may write it, and a transport whose writes land when the seed says.

A label is 16 bytes and fills one head of one token. It names request, layer, part, head and token, so that whatever is
found where it should not be says where it comes from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto import Cache, DType, Geometry, Parallel, Pool, allocate, lay_out
from kvproto.copying.execute import checksums, execute
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import RemoteError
from kvproto.transport import base
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region
from tests.simulation.simulated import Process, Simulation, Violation

GROUP, LAYERS, HEADS, PARTS, DIM, PAGES = "kv", 2, 6, ("k", "v"), 16, 24
_FREE = 0xFFFFFF
"""The request that labels of free pages name; their token counts the pages that were freed."""
Labels = npt.NDArray[np.uint32]


@cache
def geometry_of(tp: int, page: int) -> Geometry:
    """The geometry of an engine of `tp` ranks with pages of `page` tokens."""
    cache_ = Cache.gqa(GROUP, LAYERS, kv_heads=HEADS, head_dim=DIM, page=page, dtype=DType.U8)
    return lay_out([cache_], Parallel(tp=tp))


def labels(request: int, tokens: npt.NDArray[np.int64], heads: range) -> Labels:
    """The labels of these tokens: [layers, parts, tokens, heads, 4]."""
    made = np.empty((LAYERS, len(PARTS), len(tokens), len(heads), 4), np.uint32)
    made[..., 0] = request
    made[..., 1] = np.arange(LAYERS)[:, None, None, None] << 16 | np.arange(len(PARTS))[None, :, None, None] << 8
    made[..., 1] |= np.asarray(heads, np.uint32)
    made[..., 2] = tokens[None, None, :, None]
    made[..., 3] = made[..., 0] * np.uint32(0x9E3779B1) ^ made[..., 1] * np.uint32(0x85EBCA77)
    made[..., 3] ^= made[..., 2] * np.uint32(0xC2B2AE3D)
    return made


def named(label: Labels) -> str:
    """The name of a label, for people."""
    request, _, token, _ = label.tolist()
    return f"what free page {token} held" if request == _FREE else f"request {request} token {token}"


_spare: dict[int, list[Any]] = {}
"""Memory of earlier runs, by length: to make it takes longer than to use it."""


def spare() -> int:
    """The regions of memory that are kept for other runs."""
    return sum(map(len, _spare.values()))


_MEMCMP = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class GhostPool:
    """A rank's pool, with the owner of each page; free pages hold what nobody may ever see, and are used first."""

    def __init__(
        self, simulation: Simulation, role: str, tp: int, rank: int, page: int, whose: int, pages: int = PAGES
    ) -> None:
        self._simulation, self._role, self.page, self.whose = simulation, role, page, whose
        heads = HEADS // tp
        self.heads = range(rank * heads, (rank + 1) * heads)
        shape = (LAYERS, len(PARTS), pages, page, heads, 4)
        length = int(np.prod(shape)) * 4
        spare = _spare.setdefault(length, [])
        self.memory = spare.pop() if spare else allocate(length)
        bytes_ = np.from_dlpack(self.memory).reshape(*shape[:-1], DIM)
        self.pool = Pool(geometry_of(tp, page), {GROUP: bytes_}, rank=rank, axes="layer part page token head dim")
        self.labels: Labels = bytes_.view(np.uint32).reshape(shape)
        self._seen = np.empty_like(self.labels)
        self._compared = bytes_.ctypes.data, self._seen.ctypes.data, length
        self.owner: dict[int, int] = {}
        """The request that may have each page written by peers, or that this side wrote there."""
        self._granted = np.zeros(pages, bool)
        self._freed, self.free_pages = 0, list(range(pages))
        self._blank(self.free_pages)

    def _blank(self, pages: Sequence[int]) -> None:
        freed = np.arange(self._freed + 1, self._freed + len(pages) + 1)
        self._freed += len(pages)
        made = labels(_FREE, np.repeat(self.whose << 16 | freed, self.page), self.heads)
        self.labels[:, :, list(pages)] = made.reshape(LAYERS, len(PARTS), len(pages), self.page, len(self.heads), 4)
        self._settle(pages)

    def settle_all(self) -> None:
        """Take what is here for right: whoever may have made it wrong is gone."""
        self._seen[:] = self.labels

    def _settle(self, pages: Sequence[int]) -> None:
        where = list(pages)
        self._seen[:, :, where] = self.labels[:, :, where]
        self._granted[where] = False

    def take(self, request: int, tokens: int, granted: bool) -> list[int] | None:
        """Pages for these tokens of a request, which peers may write if `granted`; None while there are too few."""
        count = -(-tokens // self.page)
        if count > len(self.free_pages):
            return None
        taken = [self.free_pages.pop() for _ in range(count)]
        self.owner |= dict.fromkeys(taken, request)
        self._granted[taken] = granted
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Free pages: overwrite them, and use them before others."""
        self.check()
        for page in pages:
            self.owner.pop(page, None)
        self._blank(pages)
        self.free_pages += pages

    # of pages that tiers hand out

    def fill(self, slots: Sequence[int]) -> None:
        """Let tiers write pages, as they load them."""
        self._granted[list(slots)] = True

    def find(self, request: int, content: int, slots: Sequence[int], count: int) -> None:
        """Hand pages to a request, whose first `count` tokens tiers have found; raises Violation for other rows."""
        if count:
            self.check_rows(content, slots, 0, count, "tiers have found")
        self.owner |= dict.fromkeys(slots, request)
        self._settle(slots)
        self._blank(slots[count // self.page :])

    def release(self, slots: Sequence[int]) -> None:
        """Have pages back, which tiers may keep as they are."""
        for slot in slots:
            self.owner.pop(slot, None)

    def _rows(self, pages: Sequence[int], first: int, end: int) -> tuple[npt.NDArray[np.int64], Any, Any]:
        tokens = np.arange(first, end)
        return tokens, np.asarray(pages, np.int64)[tokens // self.page], tokens % self.page

    def write(self, request: int, pages: Sequence[int], first: int, end: int) -> None:
        """Compute tokens [first, end) of a request."""
        tokens, at, rows = self._rows(pages, first, end)
        self.labels[:, :, at, rows] = self._seen[:, :, at, rows] = labels(request, tokens, self.heads)

    def check_arrived(self, request: int, pages: Sequence[int], first: int, end: int) -> None:
        """Raise Violation unless the pages hold these tokens of the request; nobody may write them any more."""
        self.check_rows(request, pages, first, end, "arrived")
        self._settle(pages)

    def check_rows(self, request: int, pages: Sequence[int], first: int, end: int, how: str) -> None:
        """Raise Violation unless the pages hold these tokens of what a request is made from."""
        tokens, at, rows = self._rows(pages, first, end)
        here, wanted = self.labels[:, :, at, rows], labels(request, tokens, self.heads)
        differ = np.argwhere((here != wanted).any(-1))
        if differ.size and self._role not in self._simulation.misled:
            layer, part, token, head = differ[0]
            what = named(here[layer, part, token, head])
            where = f"layer {layer} part {part} token {first + token} head {self.heads[head]}"
            raise Violation("wrong byte", f"request {request} {how} with {what} at {where}, {len(differ)} differ")

    def check(self) -> None:
        """Raise Violation if a page has changed that no peer may write."""
        if self._role in self._simulation.misled or not _MEMCMP(*self._compared):
            return
        differ = (self.labels != self._seen).any((0, 1, 3, 4, 5)) & ~self._granted
        for page in np.flatnonzero(differ).tolist():
            layer, part, row, head = np.argwhere((self.labels[:, :, page] != self._seen[:, :, page]).any(-1))[0]
            what, owner = named(self.labels[layer, part, page, row, head]), self.owner.get(page)
            whose = "which is free" if owner is None else f"which request {owner} has and nobody may write"
            raise Violation("stray write", f"{what} was written into page {page}, {whose}")

    def close(self) -> None:
        """Close the pool, and keep its memory for another run; peers that have mapped it may still read it in this one."""
        self.pool.close()
        del self.labels, self.pool
        self._simulation.after_all.append(lambda: _spare[self.memory.length].append(self.memory))


# the transport


@attrs.frozen(kw_only=True)
class Way:
    """The kind of a simulated transport."""

    code: TransportCode
    asynchronous: bool
    """Whether a device copies, also while its process stands still."""
    dies: bool
    """Whether nothing of a dead process lands, which its peers can see."""
    incremental: bool = True
    reads: bool = False


WAYS = {
    "host": Way(code=TransportCode.SHM, asynchronous=False, dies=True, reads=True),
    "device": Way(code=TransportCode.CUDA, asynchronous=True, dies=True, reads=True),
    "remote": Way(code=TransportCode.NIXL, asynchronous=True, dies=False, incremental=False),
}


@attrs.define(eq=False)
class Place:
    """Memory that a process has exposed, as its peers name it."""

    owner: Process
    memory: Any
    free: bool = False
    """Whether its owner was told that nobody uses it any more."""


@attrs.define(eq=False)
class MappedPlace:
    """A peer's memory as a process reaches it."""

    place: Place
    open: bool = True

    def close(self) -> None:
        self.open = False


class SimulatedCopy:
    """A copy in small parts: each is read at once and lands later, at its own time."""

    stream = None

    def __init__(self, transport: SimulatedTransport, moves: Sequence[base.Move]) -> None:
        self._transport, self.bytes = transport, 0
        self._parts: list[tuple[CopyProgram, Any, Any]] = []
        for move in moves:
            program = move.program if move.layers is None else move.program.select(layers=range(*move.layers))
            self.bytes += program.bytes
            self._parts += [(part, move.sources, move.sinks) for part in program.slices(transport.part)]
        self._flying, self._stopped, self._error = 0, False, None
        if transport.way.asynchronous:
            self._post()

    _error: RemoteError | None

    def _post(self) -> None:
        """Read the next part, and let it land."""
        if self._stopped or not self._parts or not self._transport.owner.alive:
            return
        part, sources, sinks = self._parts.pop(0)
        self._transport.check_use(sources, "reads")
        read = {id: bytes(_buffer(memory)) for id, memory in sources.items()}
        self._flying += 1
        simulation, delay = self._transport.simulation, self._transport.delay()
        simulation.hardware(delay, lambda: self._land(part, read, sinks))
        simulation.after(delay * 0.4, self._post)

    def _land(self, part: CopyProgram, read: Mapping[int, Any], sinks: Mapping[int, Any]) -> None:
        self._flying -= 1
        owner = self._transport.owner
        if not owner.alive and self._transport.way.dies:
            return
        if not owner.alive:
            owner.simulation.reached["write of the dead"] += 1
        if self._stopped:
            owner.simulation.reached["write lands after a stop"] += 1
        self._transport.write(part, read, sinks, self)
        owner.wake()

    def fail(self, error: RemoteError) -> None:
        self._error, self._parts = error, []

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; a host's copy goes on with each call."""
        if not self._transport.way.asynchronous and self._parts and self._transport.owner.alive:
            part, sources, sinks = self._parts.pop(0)
            self._transport.check_use(sources, "reads")
            self._transport.write(part, {id: _buffer(m) for id, m in sources.items()}, sinks, self)
        if self._error is not None:
            raise self._error.again()
        return not self._parts and not self._flying

    def stop(self) -> Proof | None:
        """Post nothing more; None until what was posted has landed."""
        self._stopped, self._parts = True, []
        if self._flying:
            return None
        return Proof.PROVEN


def _buffer(memory: Any) -> Any:
    return memory.place.memory.buffer if isinstance(memory, MappedPlace) else memory.buffer


class SimulatedTransport(base.Transport):
    """A transport of one process, between memories of the simulation."""

    def __init__(self, owner: Process, way: Way, part: int, pace: float, places: dict[bytes, Place]) -> None:
        """Parts have `part` bytes; each takes about `pace` seconds. `places` holds all memory of all processes."""
        self.owner, self.way, self.part, self.pace, self._places = owner, way, part, pace, places
        self.simulation, self._copies = owner.simulation, 0
        self.landed: Callable[[Process], None] = lambda process: None
        """Called with the process whose memory was written."""
        self.capabilities = base.Capabilities(
            code=way.code,
            reads=way.reads,
            death_is_proof=way.dies,
            batches=False,
            incremental=way.incremental,
            poll_interval=pace,
            summed_at_once=4 * part,
        )

    def delay(self) -> float:
        """Seconds until the next part lands."""
        self._copies += 1
        chance = self.simulation.draw("land", self.owner.name, self._copies)
        return self.pace * (0.3 + chance + (40 if chance > 0.98 else 0))

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        handles = {}
        for id, region in memory.items():
            key = f"{self.owner.number}.{len(self._places)}".encode()
            self._places[key] = Place(self.owner, region)
            handles[id] = (Handle(transport=self.way.code, data=key),)
        return base.Exposure(handles)

    def connect(self, peer: base.PeerRegions) -> base.Connection:
        owners = list[Process]()

        def connect(region: Region, path: str) -> MappedPlace:
            if self.owner.lacks("memory to map"):
                advice = "raise the memory limits"
                raise RemoteError(ErrorCode.TRANSPORT_FAILED, path, "bytes mapped", "none", advice)
            place = self._places.get(bytes(base.handle_of(region, path, self.way.code).data))
            if place is None or not place.owner.alive:
                advice = "connect to its successor"
                raise RemoteError(ErrorCode.TRANSPORT_FAILED, path, "memory that is there", "none", advice)
            if place.memory.length < region.length:
                raise RemoteError(
                    ErrorCode.TRANSPORT_FAILED, path, f"{region.length} bytes", "fewer", "send the handle again"
                )
            if peer.attestation not in place.owner.attestations:
                self.simulation.reached["memory of another refused"] += 1
                raise RemoteError(ErrorCode.TRANSPORT_FAILED, path, "the peer's memory", "another's", "name your own")
            owners.append(place.owner)
            return MappedPlace(place)

        connection = base.connect_each(peer.regions, peer.used, connect)
        if peer.writes and self.way.dies and owners:
            connection.ended = lambda: not owners[0].alive
        return connection

    def start(self, moves: Sequence[base.Move]) -> SimulatedCopy:
        self.simulation.say(self.owner, f"starts a copy of {sum(move.program.bytes for move in moves)} bytes")
        return SimulatedCopy(self, moves)

    def write(self, part: CopyProgram, read: Mapping[int, Any], sinks: Mapping[int, Any], copy: SimulatedCopy) -> None:
        """Land a part, whether or not anybody still wants it."""
        self.check_use(sinks, "writes")
        if any(isinstance(mapped, MappedPlace) and not mapped.place.owner.alive for mapped in sinks.values()):
            self.simulation.reached["write to the dead"] += 1
            if not self.way.dies:
                copy.fail(RemoteError(ErrorCode.TRANSPORT_FAILED, "", "memory", "none", "it has ended"))
            return
        execute(part, read, {id: _buffer(memory) for id, memory in sinks.items()})
        for mapped in sinks.values():
            self.landed(mapped.place.owner if isinstance(mapped, MappedPlace) else self.owner)

    def check_use(self, memories: Mapping[int, Any], uses: str) -> None:
        """Raise Violation for memory that is unmapped, or that its owner was told is free."""
        for mapped in memories.values():
            if not isinstance(mapped, MappedPlace):
                continue
            if not mapped.open:
                raise Violation("unmapped", f"{self.owner} {uses} memory that it has unmapped")
            roles = {self.owner.role, mapped.place.owner.role}
            if mapped.place.free and mapped.place.owner.alive and not roles & self.simulation.misled:
                raise Violation("freed too early", f"{self.owner} {uses} a pool of {mapped.place.owner} that is free")

    def begin_checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return partial(checksums, program, {id: _buffer(m) for id, m in memory.items()}, sink)
