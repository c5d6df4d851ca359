"""Differences between releases of vLLM for a connector; docs/vllm-reference.md has the table.

Release 0.26 asks a connector for `get_finished` and the blocks of failed loads, where later ones ask for
`get_transfer_results`. It has no cache manager for a connector to ask for block tables, and gives one tensor of all
layers to another hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvproto_engines.orders import Orders, Tables
from kvproto_engines.settings import refuse
from kvproto_vllm.settings import WHERE

__all__ = [
    "RELEASES", "BlockTables", "LostBlocks", "TransferResults", "check_release", "conv_rows_first", "layers_of",
    "scales_are_exponents",
]  # fmt: skip

RELEASES = ("0.26", "0.32", "0.33")
"""Releases of vLLM whose hooks this connector was tested with."""

_FAILS_BY_BLOCK = False
try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults as TransferResults
except ImportError:  # 0.26
    _FAILS_BY_BLOCK = True

    @dataclass
    class TransferResults:  # type: ignore[no-redef]
        """Requests whose blocks are free, whose blocks have arrived, and those of these that failed."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)


def conv_rows_first() -> bool:
    """Whether the inputs that a convolution keeps are [row, channel]; the releases that do not say have them so."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    except ImportError:
        return True
    return bool(get_conv_state_layout() == "SD")


def scales_are_exponents() -> bool:
    """Whether an index of sparse attention has UE8M0 scales, as 0.33 has on Blackwell, in place of an F32 one."""
    try:
        from vllm.utils.deep_gemm import mqa_logits_use_mx_scales
    except ImportError:
        return False
    return bool(mqa_logits_use_mx_scales())


def check_release(version: str, releases: tuple[str, ...] = RELEASES) -> None:
    """Raise LocalError for a release of vLLM whose hooks are not known."""
    if not any(version.startswith(f"{known}.") for known in releases):
        known = f"vLLM {', '.join(releases[:-1])} or {releases[-1]}"
        raise refuse(WHERE, "", known, version, "install one of them, or a newer kvproto")


class BlockTables:
    """Block tables of running requests, put together from what each step's schedule says of them."""

    def __init__(self) -> None:
        self._tables: dict[str, Tables] = {}

    def scheduled(self, step: Any) -> None:
        """Take in a step of vLLM's scheduler."""
        for name in step.finished_req_ids:
            self._tables.pop(name, None)
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(map(list, new.block_ids))
        cached = step.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = tuple(map(list, more))
            elif more is not None:
                for table, blocks in zip(self._tables[name], more, strict=True):
                    table += blocks

    def __call__(self, name: str) -> Tables:
        return tuple(map(list, self._tables[name]))


class LostBlocks:
    """The blocks of loads that failed, by which 0.26 knows the requests."""

    def __init__(self) -> None:
        self._loads: dict[str, Tables] = {}
        self._lost: set[int] = set()

    def begun(self, orders: Orders) -> None:
        """These are to be loaded in this step, or cannot be."""
        if _FAILS_BY_BLOCK:
            self._loads |= {load.request: load.tables for load in orders.loads}
            self._loads |= {name: tables for name, (_, tables) in orders.refused.items()}

    def over(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """Loads are over, and some of them failed."""
        tables = {name: self._loads.pop(name, ()) for name in done}
        self._lost |= {block for name in failed for table in tables[name] for block in table}

    def take(self) -> set[int]:
        """Blocks of loads that failed since the last call."""
        lost, self._lost = self._lost, set()
        return lost


def layers_of(tensor: torch.Tensor, backend: Any, kv_config: Any) -> dict[str, torch.Tensor]:
    """The layers of one tensor of all, whose axes are in the order in which they lie in memory."""
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    layers = tensor.permute(*(order.index(i) for i in range(len(order))))
    return {name: layers[i] for i, each in enumerate(kv_config.kv_cache_tensors) for name in each.shared_by}
