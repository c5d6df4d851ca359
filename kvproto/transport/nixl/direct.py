"""Descriptor lists, for programs whose runs are long, and the choice between them and packed streams."""

import time
from collections.abc import Callable, Mapping
from enum import Enum

import attrs
import numpy as np

from kvproto.copying.program import CopyProgram, IntArray, Runs
from kvproto.errors import LocalError, RemoteError, bad
from kvproto.transport.nixl.agent import Agent, Peer, Posting, Registered, Write
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof


def descriptors(
    program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]
) -> dict[tuple[int, int], tuple[IntArray, IntArray, IntArray]]:
    """Source addresses, sink addresses and bytes [runs] of all runs, by pair of regions at these addresses."""
    pieces: dict[tuple[int, int], list[tuple[IntArray, IntArray, IntArray]]] = {}
    for op in program.ops:
        rows = program.maps[op["map"]]
        if not rows.size:
            continue
        size, lanes = int(op["lane_bytes"]), int(op["lanes"])
        width = size * lanes
        solid = lanes == 1 or op["source_lane_stride"] == op["sink_lane_stride"] == size
        merged = solid and op["source_row_stride"] == op["sink_row_stride"] == width
        if not merged:
            nth = np.arange(rows.size) - np.repeat(rows.ends - rows.rows, rows.rows)
        ends = []
        for side, item, row, bases in (
            ("source", rows.source_item, rows.source_row, sources),
            ("sink", rows.sink_item, rows.sink_row, sinks),
        ):
            base = bases[int(op[f"{side}_region"])] + int(op[f"{side}_offset"])
            at = base + item * op[f"{side}_item_stride"] + row * op[f"{side}_row_stride"]
            if not merged:
                at = np.repeat(at, rows.rows) + nth * op[f"{side}_row_stride"]
            if not solid:
                at = (at[:, None] + np.arange(lanes) * op[f"{side}_lane_stride"]).ravel()
            ends.append(at)
        length = rows.rows * width if merged else np.full(ends[0].size, width if solid else size)
        key = int(op["source_region"]), int(op["sink_region"])
        pieces.setdefault(key, []).append((ends[0], ends[1], length))
    return {key: tuple(map(np.concatenate, zip(*parts, strict=True))) for key, parts in pieces.items()}  # type: ignore[misc]


class DirectWrite:
    """A copy program as descriptor lists, posted once its rows are there; memory and peers by region id."""

    stream = None

    def __init__(
        self,
        agent: Agent,
        program: CopyProgram,
        sources: Mapping[int, Registered],
        sinks: Mapping[int, Peer],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`ready` says whether the rows are there."""
        self._agent, self.bytes, self._postings = agent, program.bytes, list[Posting]()
        self._ready = ready
        self._write: Write | None = None
        bases = ({i: region.memory.address for i, region in side.items()} for side in (sources, sinks))
        for (from_, to), (here, there, length) in descriptors(program, *bases).items():
            source, peer = sources[from_].memory, sinks[to]
            local, remote = (
                np.stack([a, length, np.full(a.size, m.device)], axis=1).astype(np.uint64)
                for a, m in ((here, source), (there, peer.memory))
            )
            self._postings.append((local, source.kind, remote, peer))

    def post(self) -> Write:
        """Begin to write; ready when every byte is at its destination."""
        write = Write(self._agent, self.bytes, tuple(peer for *_, peer in self._postings))
        return self._agent.begin(write, lambda: self._postings)

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises PEER_LOST, TRANSPORT_FAILED."""
        if self._write is None and self._ready():
            self._write = self.post()
        return self._write is not None and self._write.ready()

    def stop(self) -> Proof | None:
        """The write's proof once it is over; PROVEN if it was never posted."""
        return Proof.PROVEN if self._write is None else self._write.proof


class WriteMode(Enum):
    """The way in which the bytes of a program reach the sink."""

    DIRECT = "direct"
    """One descriptor for each run, into the peer's pages."""
    PACKED = "packed"
    """Gathered into chunks, into the peer's staging slots."""


@attrs.frozen
class Costs:
    """The measured costs that the choice of a mode depends on."""

    descriptor: float
    """Seconds that a descriptor costs in addition to its bytes: 6.5e-6 on a pair of H200."""
    link: float
    """Bytes a second of one long write."""
    packed: float = 0.85
    """The share of the link's rate that packing reaches."""


def threshold(costs: Costs) -> float:
    """Bytes of a run from which descriptors are no slower than packing."""
    return costs.descriptor * costs.link * costs.packed / (1 - costs.packed)


def choose(runs: Runs, costs: Costs) -> WriteMode:
    """DIRECT if the mean run is long enough, else PACKED."""
    return WriteMode.DIRECT if runs.mean >= threshold(costs) else WriteMode.PACKED


DEVICE_FLOOR = 8e9
"""Bytes a second: cuda_ipc gives 300e9, RDMA of 100 Gbit/s 11e9; sockets and copies through the host stay below 5e9."""


def probe(source: Registered, peer: Peer, bytes_: int = 64 << 20, timeout: float = 30.0) -> float:
    """The best rate of three writes to staging slots, in bytes a second; raises OUT_OF_RANGE, DEADLINE, as a write."""
    if not peer.slots:
        raise bad(peer.path, "staging slots", "none", "probe staging memory only")
    size = min(peer.memory.length, source.memory.length, bytes_)
    best = 0.0
    for _ in range(4):  # the first one connects
        begin = time.perf_counter()
        for _ in range(-(-bytes_ // size)):
            if not peer.write(source.memory.part(0, size), peer.memory.part(0, size)).wait(timeout):
                raise LocalError(ErrorCode.DEADLINE, peer.path, f"{timeout} s", "a write under way", "look at the link")
        best = max(best, -(-bytes_ // size) * size / (time.perf_counter() - begin))
    return best


def require_fast(rate: float, peer: Peer, floor: float = DEVICE_FLOOR) -> None:
    """Refuse device memory that is reached neither by cuda_ipc nor by RDMA: raises TRANSPORT_FAILED below the floor."""
    if peer.memory.kind == MemoryKind.CUDA and rate < floor:
        mine, yours = f"at least {floor / 1e9:g} GB/s", f"{rate / 1e9:.2f} GB/s"
        advice = "UCX goes by sockets or through the host: see UCX_TLS, UCX_NET_DEVICES, and GPUDirect on both hosts"
        raise RemoteError(ErrorCode.TRANSPORT_FAILED, peer.path, mine, yours, advice)
