"""What measured costs say to transport `nixl`: from which length on runs are better written by descriptors."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.transport.bench import Measured, same_path
from kvproto.transport.nixl.direct import Costs

__all__ = ["costs_of"]


def costs_of(measured: Sequence[Measured], gpus: bool) -> Costs | None:
    """The costs of NIXL's descriptors and of packing, of the slowest pair of GPUs, or of the host.

    For `NixlTransport(mode=...)`. None where either was not measured.
    """
    made = []
    for direct in measured:
        within = gpus and direct.source == direct.sink
        if (direct.transport, direct.way, direct.gpus) == ("nixl", "direct", gpus) and not within:
            cost = direct.constants
            for packed in same_path(direct, measured, "packed"):
                made.append(Costs(cost.run, cost.link, min(packed.constants.link / cost.link, 0.99)))
    return min(made, key=lambda c: c.link, default=None)
