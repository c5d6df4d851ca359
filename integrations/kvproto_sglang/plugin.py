"""Registration of the back end in SGLang: a name among its choices, and hooks of its own plug-in framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.disaggregation.utils import TransferBackend, all_reduce_flags
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg
from torch.distributed import ReduceOp

from kvproto_engines.memory import ShareableMemory
from kvproto_sglang.settings import check_release
from kvproto_sglang.tiers.hooks import HOOKS

__all__ = ["NAME", "install"]

NAME = "kvproto"
"""The value of `--disaggregation-transfer-backend`."""


def install() -> None:
    """Raises LocalError for a release of SGLang that is not known."""
    check_release(sglang.__version__)
    for target, hook, kind in (*_HOOKS, *HOOKS):
        HookRegistry.register(f"sglang.srt.{target}", hook, getattr(HookType, kind))
    add_disagg_transfer_backend_choices([NAME])
    member: Any = object.__new__(TransferBackend)  # SGLang looks the name up in this enum, which is closed
    member._name_, member._value_ = NAME.upper(), NAME
    TransferBackend._value2member_map_[NAME] = member


def _dealt(original: Callable[..., Any], server_args: Any) -> Any:
    """Pass the check by which SGLang lets back ends of its own alone hand over to ranks that deal the tokens."""
    view = resolving_view(server_args)
    if view.disaggregation_transfer_backend != NAME or view.disaggregation_mode != "decode" or view.dcp_size == 1:
        return original(server_args)
    declare_resolution(server_args, NAME, disaggregation_transfer_backend="nixl")
    original(server_args)
    return declare_resolution(server_args, NAME, disaggregation_transfer_backend=NAME)


def _class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from kvproto_sglang.conn import CLASSES

    return CLASSES[class_type.value]


def _manager_made(manager: Any, queue: Any, *args: Any, **named: Any) -> None:
    if _ours(manager):
        manager.open(queue)


def _sender_made(made: Any, queue: Any, request: Any, *args: Any, **named: Any) -> None:
    if made and _ours(request.disagg_kv_sender):
        request.disagg_kv_sender.begin(request)


def _receiver_made(made: Any, queue: Any, request: Any, *args: Any, **named: Any) -> None:
    if _ours(made.kv_receiver):
        made.kv_receiver.begin(request)


def _released(original: Callable[..., Any], request: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Keep the row of a request that was given up, whose pages may still be read, from a release at once."""
    sender = request.disagg_kv_sender
    if not _ours(sender) or not sender.hold(request, lambda: original(request, tree_cache, checkpoint=False)):
        original(request, tree_cache, checkpoint=checkpoint)


def _retired(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """A request that is held was retired already, though it owns its row."""
    return False if request in _holding(scheduler) else original(scheduler, request)


def _polled(scheduler: Any, *args: Any, **named: Any) -> None:
    """Each pass of a prefill engine's loop releases what nobody reads any more, on all ranks together."""
    if holding := _holding(scheduler):
        group = scheduler.attn_tp_cpu_group
        holding.settle(lambda flags: all_reduce_flags(flags=flags, group=group, op=ReduceOp.MIN))


def _idled(idle: bool, scheduler: Any, for_health_check: bool = False, **named: Any) -> bool:
    """An engine whose pages are read is not idle: SGLang would count them as lost, or flush them."""
    return idle and (for_health_check or not _holding(scheduler))


def _holding(scheduler: Any) -> Any:
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    return getattr(getattr(queue, "kv_manager", None), "holding", ())


def _transfers_queued(made: Any, queue: Any, *args: Any, **named: Any) -> None:
    """SGLang would reuse pages that may still be written after some seconds, or at once."""
    if get_disagg().disaggregation_transfer_backend == NAME:
        queue.enable_deferred_kv_release, queue.deferred_kv_release_timeout = True, math.inf


def _allocated(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    chosen = get_disagg()
    if chosen.disaggregation_mode == "null" or chosen.disaggregation_transfer_backend != NAME:
        return original(*args, **named)
    with ShareableMemory():
        return original(*args, **named)


def _placed(original: Callable[..., Any], pool: Any) -> Any:
    """SGLang's back ends move pages of tokens of heads alone, and say so; this one states heads of tokens too."""
    if not pool.use_hnd or get_disagg().disaggregation_transfer_backend != NAME:
        return original(pool)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    return tuple(map(list, zip(*((each.data_ptr(), each.nbytes, each[0].nbytes) for each in buffers), strict=True)))


def _ours(made: Any) -> bool:
    return type(made).__module__ == "kvproto_sglang.conn"


_ALLOCATING = (
    "memory_pool.MHATokenToKVPool._create_buffers_normal",
    "memory_pool.MHATokenToKVPoolFP4._create_buffers",
    "memory_pool.MHATokenToKVPoolMXFP8._create_buffers",
    "memory_pool.MLATokenToKVPool._create_buffers",
    "memory_pool.MLATokenToKVPoolFP4._create_buffers",
    "memory_pool.DSATokenToKVPool._create_index_key_cache",
    "memory_pool.DSATokenToKVPool._init_kpool_compress_tail_buffers",
    "memory_pool.MHATokenToKOnlyPool.__init__",
    "memory_pool.MambaPool.__init__",
    "ple_state_pool.ShortConvPool.__init__",
    "ple_state_pool.NGramPool.__init__",
    "qsa_kv_pool.QSATokenToKVPool.__init__",
    "deepseek_v4_memory_pool.DeepSeekV4SingleKVPool._create_buffers",
    "deepseek_v4_memory_pool.DeepSeekV4IndexerPool._create_buffer",
    "deepseek_v4_compress_state.CompressStatePool._alloc_kv_score_buffer",
)
"""Methods of SGLang's pools that allocate what is stated."""
_HOOKS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("arg_groups.pd_disaggregation_hook.handle_pd_disaggregation", _dealt, "AROUND"),
    ("disaggregation.utils.get_kv_class", _class_of, "AROUND"),
    ("disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager", _manager_made, "AFTER"),
    ("disaggregation.decode.DecodePreallocQueue._init_kv_manager", _manager_made, "AFTER"),
    ("disaggregation.prefill.PrefillBootstrapQueue.create_sender", _sender_made, "AFTER"),
    ("disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue", _receiver_made, "AFTER"),
    ("mem_cache.common.release_kv_cache", _released, "AROUND"),
    ("disaggregation.prefill.SchedulerDisaggregationPrefillMixin._retire_aborted_prefill_result", _retired, "AROUND"),
    (
        "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        _polled,
        "BEFORE",
    ),
    ("managers.scheduler.Scheduler.is_fully_idle", _idled, "AFTER"),
    ("disaggregation.decode.DecodeTransferQueue.__init__", _transfers_queued, "AFTER"),
    *((f"mem_cache.{name}", _allocated, "AROUND") for name in _ALLOCATING),
    ("mem_cache.memory_pool.MHATokenToKVPool.get_contiguous_buf_infos", _placed, "AROUND"),
)
"""Functions of SGLang that are hooked, by their names below sglang.srt."""
