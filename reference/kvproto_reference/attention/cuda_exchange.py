"""Exchange of queries and merge of attention among the ranks of a DCP group on GPUs, with the kernels of merge.cu.

`PackedAllToAll` goes through NCCL, between a kernel that packs and one that merges. `PeerMapped` is one kernel that
packs, scatters to the peers' mapped memory and merges, and one that gathers queries, for ranks of one host with a GPU
each. Ranks choose together: what one of them cannot do, all refuse.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from ..errors import EngineError
from .exchange import _Group
from .lse import Base2, Found, Partial
from .merge_kernels import BLOCKS, MergeKernels, base2, call

__all__ = ["PackedAllToAll", "PeerMapped"]

STRIDE, PAIR_STRIDE = 16 << 20, 1 << 20
"""Bytes that a rank may send another at once, and in pairs; larger steps go through NCCL."""
PATIENCE = 10.0
"""Seconds that a rank waits for the others in a step, before the step fails on all of them."""


@attrs.frozen
class PackedAllToAll(_Group):
    """One all-to-all of packed outputs and log-sum-exps; the kernels change the base and select neutral elements."""

    _kernels: dict[Any, MergeKernels] = attrs.field(init=False, factory=dict)

    def merge(self, part: Found) -> Partial:
        found = base2(part)
        kernels, (tokens, heads) = self._of(found), (found.out.shape[0], found.out.shape[1] // self.size)
        length = kernels.chunk(tokens * heads)
        sent = torch.empty((self.size, length), dtype=torch.uint8, device=found.out.device)
        kernels.pack(found, sent)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return kernels.merge(kernels.unpack(received, tokens, heads))

    def _of(self, found: Base2) -> MergeKernels:
        key = found.out.dtype, found.out.shape[2]
        if key not in self._kernels:
            self._kernels[key] = MergeKernels(found.out.device, *key, self.size)
        return self._kernels[key]


@attrs.frozen
class PeerMapped(PackedAllToAll):
    """Kernels that write to the memory of the other ranks, and wait for what these write."""

    _peers: Peers = attrs.field(init=False, default=attrs.Factory(lambda self: Peers(self.group), takes_self=True))

    def queries(self, q: Tensor) -> Tensor:
        if self.replicated or q.nbytes > STRIDE or q[0].nbytes % 16:
            return super().queries(q)
        mine, (tokens, heads, width) = q.contiguous(), q.shape
        together = torch.empty((tokens, heads * self.size, width), dtype=q.dtype, device=q.device)
        arguments = mine.data_ptr(), together.data_ptr(), tokens, q[0].nbytes // 16, int(2 * q.nbytes <= PAIR_STRIDE)
        self._any(q).launch("gather", (BLOCKS, 1), (*self._peers.group, *arguments))
        return together

    def merge(self, part: Found) -> Partial:
        found = base2(part)
        kernels, (tokens, heads) = self._of(found), (found.out.shape[0], found.out.shape[1] // self.size)
        if kernels.chunk(tokens * heads) > STRIDE:
            return super().merge(found)
        out = torch.empty((tokens, heads, kernels.width), dtype=found.out.dtype, device=found.out.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=found.out.device)
        small = int(kernels.pairs(tokens * heads) <= PAIR_STRIDE)
        arguments = *kernels.found(found), out.data_ptr(), lse.data_ptr(), small
        kernels.launch("exchange", (BLOCKS, 1), (*self._peers.group, *arguments))
        return Partial(out, lse)

    def check(self) -> None:
        self._peers.check()

    def close(self) -> None:
        """Unmap the memory of the others; no rank may be in a step."""
        self._peers.close()

    def _any(self, q: Tensor) -> MergeKernels:
        """Kernels for moving bytes, which may be those of any width."""
        return next(iter(self._kernels.values()), None) or self._of(Base2(q, q, q))


class Peers:
    """Memory of all ranks of a group, mapped into this one; a collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Raises EngineError, on all ranks, unless they are on one host with a GPU each."""
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        pairs = 2 * self._ranks * STRIDE
        flags = pairs + 2 * self._ranks * PAIR_STRIDE
        epochs = flags + 4 * (self._ranks * BLOCKS + 64)
        size = epochs + 4 * BLOCKS
        self._bases: dict[int, int] = {}
        self._base, self._told = 0, 0
        mine: Any = ""
        device = torch.cuda.current_device()
        torch.cuda.current_stream().synchronize()  # so that torch's context is current
        try:
            self._base = self._bases[self._rank] = int(call(driver.cuMemAlloc(size), "mapped memory"))
            call(driver.cuMemsetD8(self._base, 0, size), "mapped memory")
            call(driver.cuCtxSynchronize(), "mapped memory")
            self._told = int(call(driver.cuMemHostAlloc(4096, 0), "pinned memory"))
            ctypes.memset(self._told, 0, 4096)
            handle = bytes(call(driver.cuIpcGetMemHandle(self._base), "handle of memory").reserved)
            mine = Path("/proc/sys/kernel/random/boot_id").read_text(), str(_uuid(device)), handle
        except (EngineError, OSError) as error:
            mine = str(error)
        self._agree(group, mine)
        opened: Any = ""
        try:
            for rank, (_, _, handle) in enumerate(self._all):
                if rank != self._rank:
                    self._bases[rank] = _open(handle)
        except EngineError as error:
            opened = str(error)
        if reasons := [reason for reason in _gathered(group, opened) if reason]:
            self.close()
            raise EngineError(f"exchange over mapped memory: {reasons[0]}")
        bases = [self._bases[rank] for rank in range(self._ranks)]
        mapped = (base + place for place in (0, pairs, flags) for base in bases)
        sizes = STRIDE, PAIR_STRIDE, int(PATIENCE * 1e9)
        self.group = (*mapped, self._base + epochs, self._told, self._rank, *sizes)
        """The parameter of the kernels."""

    def _agree(self, group: dist.ProcessGroup, mine: Any) -> None:
        self._all = _gathered(group, mine)
        refused = next((each for each in self._all if isinstance(each, str)), "")
        if not refused and len({host for host, _, _ in self._all}) > 1:
            refused = "the ranks are on several hosts"
        if not refused and len({gpu for _, gpu, _ in self._all}) < self._ranks:
            refused = "several ranks share a GPU, where none may wait for another"
        if refused:
            self.close()
            raise EngineError(f"exchange over mapped memory: {refused}")

    def check(self) -> None:
        """Raise EngineError if a rank waited in vain; neither the step's results nor the group may be used then."""
        if epoch := ctypes.c_uint32.from_address(self._told).value:
            raise EngineError(f"a rank of the DCP group did not come to exchange {epoch} within {PATIENCE:g} s")

    def close(self) -> None:
        """Unmap and free."""
        for rank, base in self._bases.items():
            if rank == self._rank:
                driver.cuMemFree(base)
            else:
                driver.cuIpcCloseMemHandle(base)
        self._bases.clear()


def _gathered(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _uuid(device: int) -> object:
    return torch.cuda.get_device_properties(device).uuid


def _open(handle: bytes) -> int:
    ipc = driver.CUipcMemHandle()
    ipc.reserved = handle
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(call(driver.cuIpcOpenMemHandle(ipc, lazy.value), "memory of a peer"))
