"""A plug-in of SGLang for the tests of the back end: one bit that is flipped, what its allocator counts, and what MLA and
data-parallel attention need to run on a CPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CORRUPT = 1 << 62
"""Bit of a room whose first page is changed after it has arrived."""
CORRUPT_STATE = 1 << 61
"""Bit of a room whose state, or last page of a window, is changed after it has arrived."""
RATES = "KVPROTO_BENCH_RATES"
"""Of the environment: a file for the pages that HiCache reads and writes, and the seconds that its threads wait."""
_LARGE = 0x40
"""The bit that makes a small number a large one."""


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tools.engines.sglang_kernels import supply

    supply()
    _without_pinning()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _deal_tokens()
    for target, hook, kind in _HOOKS:
        HookRegistry.register(target, hook, getattr(HookType, kind))
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _one_token


def _deal_tokens() -> None:
    """Ranks on a CPU may deal tokens, which SGLang allows on devices that have kernels for it: Triton interprets them."""
    from sglang.srt.distributed import parallel_state

    parallel_state.is_cuda = lambda: True  # asked nowhere else in that module


class _Unpinned:
    """Torch, but that it pins no memory."""

    def __getattr__(self, name: str) -> Any:
        import torch

        made = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return made
        return lambda *args, pin_memory=False, **named: made(*args, **named)


def _without_pinning() -> None:
    """SGLang's LoRA pins memory for a GPU on every machine: where there is none, it takes memory as it is."""
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
    layers.torch = torch_backend.torch = _Unpinned()


def _one_token(backend: Any) -> int:
    """Length of requests that fill up a batch, where ranks of data-parallel attention have fewer than others: the CPU's
    attention is asked for it and has none.
    """
    return 1


def _fetched(
    original: Callable[..., Any], receiver: Any, pages: Any, row: Any = None, states: Any = None, **named: Any
) -> Any:  # fmt: skip
    wrong = {"kv": int(pages[0])} if receiver._room & CORRUPT and len(pages) else {}
    if receiver._room & CORRUPT_STATE:
        tables = receiver.kv_mgr.opened.tables.items()
        named = {name: states[each.component] for name, each in tables if each.component is not None}
        wrong |= {name: int(np.concatenate([np.ravel(each) for each in found])[-1]) for name, found in named.items()}
    receiver.wrong = wrong
    return original(receiver, pages, row, states, **named)


def _arrived(poll: Any, receiver: Any) -> None:
    """Flip one bit of what arrived, in each group where that is wanted, once."""
    if poll == 4 and getattr(receiver, "wrong", None):
        pool, wrong, receiver.wrong = receiver.kv_mgr.opened.pool, receiver.wrong, {}
        for name, item in wrong.items():
            group = pool.group(name)
            part = group.parts[-1].name  # values count, whatever is asked
            values = pool.array(name, int(pool.layout.shares[group.id].layers[0]), part)[item]
            upper = values[..., 3::4]  # of each float32, its byte with the sign
            upper[tuple(np.argwhere(upper & _LARGE == 0)[0])] ^= _LARGE


def _counted(answer: Any, controller: Any, *args: Any) -> None:
    """Tokens that SGLang's allocator may give away, and the requests that its queues have."""
    scheduler = controller.scheduler
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    load = scheduler.load_inquirer.get_loads()
    requests = load.num_running_reqs + load.num_waiting_reqs + load.disaggregation.prefill_inflight_queue_reqs
    answer.internal_state["counted"] = [free, requests]


def _rope(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The wrapper for a CPU knows one kind of rotary embedding; this one is another."""
    if named.get("device") == "cpu" and not named.get("rope_scaling"):
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        named.pop("device")
        return get_rope(*args, **named)
    return original(*args, **named)


def _handler(original: Callable[..., Any], cls: Any, name: str) -> Any:
    """The CPU's attention has no path for an expanded prefill: keep the absorbed one."""
    if name == "torch_native":
        from sglang.srt.models.deepseek_common.attention_backend_handler import _dispatch_mla_subtype

        return _dispatch_mla_subtype
    return original(cls, name)


def _unpadded(original: Callable[..., Any], model: Any, load: Any, ranks: int) -> Any:
    """Ranks that are more than the KV heads hold copies of them, as on a GPU: a CPU's SGLang adds heads of zeros."""
    heads = model.get_total_num_kv_heads()
    return model if heads < ranks and ranks % heads == 0 else original(model, load, ranks)


def _timed(way: str) -> Callable[..., Any]:
    """A hook of what moves pages between HiCache's host pool and its storage."""

    def call(original: Callable[..., Any], controller: Any, *args: Any, **named: Any) -> Any:
        if not (file := os.environ.get(RATES)):
            return original(controller, *args, **named)
        pool = controller.storage_host_pool
        pool.pin_memory = False  # a page that its own files are read into would be pinned
        began = time.perf_counter()
        done = original(controller, *args, **named)
        seconds, pages = time.perf_counter() - began, done if way == "read" else len(args[0])
        with open(file, "a") as lines:
            lines.write(json.dumps([way, pages, seconds]) + "\n")
        return done

    return call


_MOVES = {"read": ("_page_get_zero_copy", "_generic_page_get"), "write": ("_page_set_zero_copy", "_generic_page_set")}
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HOOKS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    (
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _counted,
        "AFTER",
    ),
    ("kvproto_sglang.conn.Receiver.send_metadata", _fetched, "AROUND"),
    ("kvproto_sglang.conn.Receiver.poll", _arrived, "AFTER"),
    ("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _rope, "AROUND"),
    (
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        _handler,
        "AROUND",
    ),
    ("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _unpadded, "AROUND"),
    *((f"{_CONTROLLER}.{name}", _timed(way), "AROUND") for way, names in _MOVES.items() for name in names),
)
