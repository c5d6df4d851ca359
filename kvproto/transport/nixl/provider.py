"""Entry point of transport `nixl`."""

from collections.abc import Sequence

from kvproto.transport.base import Memory, Provider, Regions, Transport
from kvproto.transport.bench import Absent, BenchJob, Constants, CostedWay, Floor, Measured, same_path
from kvproto.transport.nixl.direct import DEVICE_FLOOR, Costs, WriteMode
from kvproto.transport.shm.memory import SharedMemory
from kvproto.wire.enums import MemoryKind

_SLOW = "UCX goes by sockets or through the host: see UCX_TLS, UCX_NET_DEVICES"


class _NixlProvider(Provider):
    name = "nixl"
    requires = ("nixl",)
    install = "pip install 'kvproto[nixl]'"

    def preference(self, memory: Memory) -> int:
        return int(isinstance(memory, SharedMemory) or memory.kind == MemoryKind.CUDA)

    def open(self, memory: Regions, measured: Sequence[Measured] = ()) -> Transport:
        device = self.device_of(memory)
        from kvproto.transport.nixl.transport import NixlTransport

        return NixlTransport(costs_of(measured, device is not None) or WriteMode.PACKED, device=device)

    floors = (
        Floor("nixl", ("direct",), False, 0.5e9, "UCX does not use shared memory: see UCX_TLS, and limits of /dev/shm"),
        Floor("nixl", ("direct",), True, DEVICE_FLOOR, f"{_SLOW}, and whether UCX knows CUDA"),
    )
    # packed: index_select, one peer copy, index_copy; direct: one descriptor for each run, as UCX takes them
    costs = (
        CostedWay("packed", "pack + copy + unpack", "packed", Constants(264e9, 1.0e-11, 60e-6)),
        CostedWay("direct", "descriptors", "direct", Constants(335e9, 6.5e-6, 50e-6)),
    )

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        from kvproto.transport.nixl.bench import job

        return [job(memory), *([job(memory, "gpu0", "gpu1")] if gpus > 1 else [])], []


def costs_of(measured: Sequence[Measured], gpus: bool) -> Costs | None:
    """Costs for `NixlTransport(mode=...)`, of the slowest pair of GPUs or the host; None if they were not measured."""
    candidates = []
    for direct in measured:
        within = gpus and direct.source == direct.sink
        if (direct.transport, direct.way, direct.gpus) == ("nixl", "direct", gpus) and not within:
            cost = direct.constants
            for packed in same_path(direct, measured, "packed"):
                candidates.append(Costs(cost.run, cost.link, min(packed.constants.link / cost.link, 0.99)))
    return min(candidates, key=lambda c: c.link, default=None)


PROVIDER = _NixlProvider()
