"""Shared parts of the scripts for GPUs: the machine, random memory, comparisons, the peer copy, and shapes of pools."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, EventOptions
from harness import commit, in_turn, versions

from kvproto.copying.grants import items_needed
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.cuda.driver import call, current
from kvproto.transport.cuda.memory import DeviceMemory

PACKAGES = (
    *("torch", "cuda-core", "cuda-bindings", "numpy", "pyzmq", "jax", "nixl", "mooncake-transfer-engine-cuda13"),
    *("flashinfer-python", "nvidia-nccl-cu13"),
)
GB = 1 << 30
WARM_UP = 1.0
"""Seconds: a GPU that has rested has another clock."""
POISON = 0xEE
"""The byte that the sink's memory holds before a copy, so that bytes which nobody should write are seen."""


def gpu_facts() -> dict[str, Any]:
    """The head of a file of results."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0],
        "python": platform.python_version(),
        "versions": versions(*PACKAGES),
    }


def warm_in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """As `in_turn`, once all have run for WARM_UP seconds."""
    until = time.monotonic() + WARM_UP
    while time.monotonic() < until:
        for run in ways.values():
            run()
    return in_turn(ways, rounds, warm=0)


def bytes_of(memory: DeviceMemory) -> torch.Tensor:
    return torch.from_dlpack(memory).view(torch.uint8)


def poison(memory: DeviceMemory) -> torch.Tensor:
    """Fill memory before a copy whose bytes are compared."""
    filled = bytes_of(memory).fill_(POISON)
    torch.cuda.synchronize(filled.device)
    return filled


def random_bytes(memory: DeviceMemory, seed: int) -> torch.Tensor:
    words = torch.from_dlpack(memory).view(torch.int64)
    generator = torch.Generator(device=words.device).manual_seed(seed)
    for part in words.split(1 << 28):
        part.random_(generator=generator)
    return bytes_of(memory)


class PeerCopy:
    """The copy engine's ceiling: contiguous memory from GPU 0 to GPU 1, in seconds by device events."""

    def __init__(self, source: DeviceMemory, sink: DeviceMemory) -> None:
        self._source, self._sink = source, sink
        current(1)
        self.stream = Device(1).create_stream()

    def seconds(self, size: int = GB) -> float:
        addresses = self._sink.address, self._source.address
        return self.between(lambda: driver.cuMemcpyDtoDAsync(*addresses, size, self.stream.handle))

    def between(self, enqueue: Callable[[], Any]) -> float:
        """Seconds of what a call of the driver enqueues on the stream of GPU 1."""
        current(1)
        timing = EventOptions(timing_enabled=True)
        began = self.stream.record(options=timing)
        call(enqueue()[:1], "copy")
        ended = self.stream.record(options=timing)
        ended.sync()
        return float(ended - began) / 1000


def scattered_shape(run: int) -> tuple[int, int, int, int]:
    """(layers, runs of a layer, rows of a run, bytes of a row) for about 1 GB, as many layers as a model has."""
    layers = max(1, min(64, GB // run))
    width = min(run, 4096)
    return layers, max(GB // run // layers, 1), run // width, width


def places(program: CopyProgram, width: int, side: str) -> Iterator[np.ndarray]:
    """Row numbers in the pool, layer by layer."""
    m = program.maps[0]
    first = m.source_row if side == "source" else m.sink_row
    rows = (first[:, None] + np.arange(int(m.rows[0]))).reshape(-1)
    for op in program.ops:
        yield rows + int(op[f"{side}_offset"]) // width


def compare(program: CopyProgram, width: int, source: torch.Tensor, sink: torch.Tensor) -> None:
    """Check that every row is in its place and that no other byte of a poisoned sink was written."""
    total = 0
    source, sink = (t[: t.numel() // width * width] for t in (source, sink))
    for a, b in zip(places(program, width, "source"), places(program, width, "sink"), strict=True):
        here = source.view(-1, width)[torch.from_numpy(a).to(source.device)]
        there = sink.view(-1, width)[torch.from_numpy(b).to(sink.device)]
        if not torch.equal(here.to(sink.device), there):
            raise SystemExit("bytes differ")
        total += len(b)
    words = sink.view(torch.int64).view(-1, width // 8)
    untouched = torch.tensor(int.from_bytes(bytes([POISON]) * 8, signed=True), device=sink.device)
    changed = sum(int((part != untouched).any(dim=1).sum()) for part in words.split((1 << 31) // width))
    if changed != total:
        raise SystemExit(f"{changed} rows were written, {total} should be")


Half = tuple[RankLayout, dict[int, Window], DeviceMemory]


def half(geometry: Geometry, rank: int, tokens: int, heads_first: bool, device: int) -> Half:
    """One rank's pool, twice as large as the request, and the request's items in no order."""
    groups, dice = {g.id: g for g in geometry.groups}, np.random.default_rng(rank)
    windows, counts = {}, {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        need = items_needed(groups[share.group], share.cp_rank, 0, tokens)
        counts[share.group] = 2 * need
        windows[share.group] = Window(0, tokens, dice.permutation(2 * need)[:need])
    columns, length = columns_without_gaps(geometry, rank, counts, heads_first)
    return RankLayout(geometry, rank, columns), windows, DeviceMemory(length, device)
