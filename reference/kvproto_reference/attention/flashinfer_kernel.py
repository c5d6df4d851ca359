"""Back end `flashinfer`: paged attention by FlashInfer's kernels, for bfloat16 and float16 on CUDA.

GQA decodes on the tensor-core path, as the other one supports few group sizes; MLA reads latents in place, as strided
views of the pool's rows. Outputs are as the kernels return them, with log-sum-exps in base 2 (`Base2`): the merge
changes the base and selects neutral elements, which saves passes here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cache.forms import MODEL
from ..cache.pool import KVPool
from ..errors import EngineError
from ..models import Rows
from .base import Kernel
from .batch import Batch
from .lse import Base2, Found, Partial
from .torch_kernel import TorchKernel

__all__ = ["KERNELS", "FlashInferKernel", "kernel_of"]

Int32s = npt.NDArray[np.int32]
WORKSPACE = 512 << 20
"""Bytes for FlashInfer's partial sums: 64-row tiles of two blocks per multiprocessor, 16 heads of 128."""
GQA_DIMS, MLA_DIMS = (64, 128, 256), (512, 64)


class FlashInferKernel(Kernel):
    """Attention by page table over one rank's pool.

    With `fixed`, the arrays of a step in which every span is one token are where those of the last such step with as
    many spans were, so that a captured step can be replayed after `plan`. The last step must be over by then.
    """

    def __init__(self, pool: KVPool, group_heads: Sequence[int], own_heads: Sequence[int], fixed: bool = False) -> None:
        """The index in the pool of the KV head that each query head reads, of the DCP group and of this rank.

        Raises EngineError if heads do not map evenly, or FlashInfer cannot run (see `lacks`).
        """
        if missing := lacks(pool):
            raise EngineError(missing)
        config = pool.config
        kv_heads = next(iter(pool.tensors.values())).shape[2]
        for heads in (group_heads, own_heads):
            each, rest = divmod(len(heads), kv_heads)
            if rest or list(heads) != [head // each for head in range(len(heads))]:
                raise EngineError(
                    f"FlashInfer shares {kv_heads} KV heads evenly; query heads read {list(heads)}: choose back end"
                    " torch, or DCP groups of no more ranks than have the same KV head without DCP"
                )
        self._pool, self._fixed, self._mla = pool, fixed, config.kind == "mla"
        self._kv_heads, self._heads, self._own = kv_heads, len(group_heads), len(own_heads)
        self._dtype = getattr(torch, config.dtype)
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=pool.device)
        self._merging = None
        if find_spec("cuda") and find_spec("cuda.core"):
            from .merge_kernels import MergeKernels  # cuda-core is not FlashInfer's own need

            self._merging = MergeKernels(pool.device, self._dtype, config.value_dim, 2)
        self._made: dict[tuple[str, int], tuple[Any, Tensor]] = {}
        self._most = 4 * pool.pages
        """Entries of the page tables of a fixed step, as pages may be in several sequences."""
        self._prefix: tuple[Any, Tensor] | None = None
        self._new: tuple[Any, Tensor] | None = None

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        counts = np.diff(batch.starts)
        if batch.whole:
            self._prefix = self._decode(batch.bounds, batch.page_starts, batch.pages, self._fixed)
        else:
            self._prefix = self._over_pool(batch, counts) if batch.prefix else None
            self._new = self._over_new(batch)

    def repeats(self, batch: Batch) -> Hashable | None:
        return "decode" if self._fixed and batch.whole else None

    def pool(self, layer: int, q: Tensor) -> Base2:
        assert self._prefix is not None
        return self._run(self._prefix, layer, q)

    def pool_by_token(self, layer: int, q: Tensor) -> Base2:
        batch, size = self._batch, self._pool.page_size
        spans = np.repeat(np.arange(len(batch.spans)), np.diff(batch.starts))
        held = -(-batch.token_bounds // size)
        tables = [np.asarray(batch.spans[s].pages[:n], np.int32) for s, n in zip(spans, held, strict=True)]
        starts = np.concatenate([[0], np.cumsum(held)]).astype(np.int32)
        return self._run(self._decode(batch.token_bounds, starts, np.concatenate(tables), False), layer, q)

    def new(self, q: Tensor, rows: Rows) -> Base2:
        assert self._new is not None
        wrapper, read = self._new
        if self._mla:
            return self._latent(wrapper, q, rows["latent"], read)
        out, log2 = wrapper.run(q.contiguous(), rows["k"].contiguous(), rows["v"].contiguous(), return_lse=True)
        return Base2(out, log2, read)

    def merge(self, parts: Sequence[Found]) -> Partial:
        return self._merging.merge(parts) if self._merging and len(parts) == 2 else super().merge(parts)

    def _run(self, planned: tuple[Any, Tensor], layer: int, q: Tensor) -> Base2:
        wrapper, read = planned
        if self._mla:
            return self._latent(wrapper, q, self._pool.tensors[layer, "latent"].squeeze(2), read)
        cache = self._pool.tensors[layer, "k"], self._pool.tensors[layer, "v"]
        out, log2 = wrapper.run(q.contiguous(), cache, return_lse=True)
        return Base2(out, log2, read)

    def _latent(self, wrapper: Any, q: Tensor, rows: Tensor, read: Tensor) -> Base2:
        """rows [pages, rows of a page, row_dim]; new rows are pages of one row."""
        width = self._pool.config.latent
        out = torch.empty((*q.shape[:2], width), dtype=q.dtype, device=q.device)
        parts = q[..., :width], q[..., width:], rows[..., :width], rows[..., width:]
        _, log2 = wrapper.run(*parts, out=out, return_lse=True)
        return Base2(out, log2, read)

    def _decode(self, bounds: Int32s, starts: Int32s, pages: Int32s, fixed: bool) -> tuple[Any, Tensor]:
        """A plan for one token in each span."""
        spans = len(bounds)
        if self._mla:
            made = self._made_once("mla", spans if fixed else 0, self._make_mla)
            self._plan_mla(made[0], np.arange(spans + 1, dtype=np.int32), starts, pages, bounds, self._heads, False)
            return self._reads(made, bounds)
        made = self._made_once("decode", spans if fixed else 0, self._make_decode)
        made[0].plan(
            _host(starts),
            self._indices(pages),
            _host(_last(bounds, self._pool.page_size)),
            self._heads,
            self._kv_heads,
            self._pool.config.head_dim,
            self._pool.page_size,
            sm_scale=self._pool.config.score_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._reads(made, bounds)

    def _over_pool(self, batch: Batch, counts: npt.NDArray[Any]) -> tuple[Any, Tensor]:
        """A plan for several tokens in a span, all of them over the first `bounds` rows."""
        read = np.repeat(batch.bounds, counts)
        if self._mla:
            made = self._made_once("mla", 0, self._make_mla)
            self._plan_mla(made[0], batch.starts, batch.page_starts, batch.pages, batch.bounds, self._heads, False)
            return self._reads(made, read)
        made = self._made_once("paged", 0, self._make_paged)
        made[0].plan(
            _host(batch.starts),
            _host(batch.page_starts),
            _host(batch.pages),
            _host(_last(batch.bounds, self._pool.page_size)),
            self._heads,
            self._kv_heads,
            self._pool.config.head_dim,
            self._pool.page_size,
            causal=False,
            sm_scale=self._pool.config.score_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._reads(made, read)

    def _over_new(self, batch: Batch) -> tuple[Any, Tensor]:
        """A plan for causal attention of the new tokens of a span among themselves."""
        read = np.ones(batch.tokens, np.int32)
        if self._mla:
            made = self._made_once("new mla", 0, self._make_mla)
            counts, rows = np.diff(batch.starts), np.arange(batch.tokens, dtype=np.int32)
            self._plan_mla(made[0], batch.starts, batch.starts, rows, counts, self._own, True)
            return self._reads(made, read)
        made = self._made_once("ragged", 0, self._make_ragged)
        made[0].plan(
            _host(batch.starts),
            _host(batch.starts),
            self._own,
            self._kv_heads,
            self._pool.config.head_dim,
            causal=True,
            sm_scale=self._pool.config.score_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._reads(made, read)

    def _plan_mla(
        self, wrapper: Any, q: Int32s, starts: Int32s, pages: Int32s, bounds: Int32s, heads: int, new: bool
    ) -> None:
        config, size = self._pool.config, 1 if new else self._pool.page_size
        wrapper.plan(
            _host(q),
            _host(starts),
            self._indices(pages),
            _host(bounds),
            heads,
            config.latent,
            config.rope_dim,
            size,
            new,
            config.score_scale,
            self._dtype,
            self._dtype,
        )

    def _made_once(self, kind: str, spans: int, make: Callable[[int], Any]) -> tuple[Any, Tensor]:
        """A wrapper, and where the rows that a token reads are stated; one for each number of spans of fixed steps."""
        if (kind, spans) not in self._made:
            read = torch.empty(spans, dtype=torch.int32, device=self._pool.device)
            self._made[kind, spans] = make(spans), read
        return self._made[kind, spans]

    def _reads(self, made: tuple[Any, Tensor], read: npt.NDArray[Any]) -> tuple[Any, Tensor]:
        wrapper, place = made
        if len(place):
            place.copy_(_host(read))
            return wrapper, place
        return wrapper, _host(read).to(self._pool.device)

    def _indices(self, pages: Int32s) -> Tensor:
        if self._fixed and len(pages) > self._most:
            raise EngineError(f"page tables of {len(pages)} entries in one step, where there is room for {self._most}")
        return _host(pages)

    def _empty(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self._pool.device)

    def _make_mla(self, spans: int) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        if not spans:
            return BatchMLAPagedAttentionWrapper(self._workspace)
        place = self._empty(spans + 1), self._empty(spans + 1), self._empty(self._most), self._empty(spans)
        return BatchMLAPagedAttentionWrapper(self._workspace, True, *place)

    def _make_decode(self, spans: int) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if not spans:
            return BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", False, True, backend="fa2")
        place = self._empty(spans + 1), self._empty(self._most), self._empty(spans)
        return BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", True, True, *place, backend="fa2")

    def _make_paged(self, _: int) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")

    def _make_ragged(self, _: int) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        return BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend="fa2")


def _host(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))


def _last(bounds: Int32s, size: int) -> Int32s:
    """Rows of the last page; 0 if there is none."""
    return np.where(bounds > 0, (bounds - 1) % size + 1, 0).astype(np.int32)


def lacks(pool: KVPool) -> str:
    """The reason that FlashInfer cannot attend over this pool; empty if it can."""
    config = pool.config
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'kvproto-reference[flashinfer]'"
    if pool.device.type != "cuda":
        return f"FlashInfer runs on CUDA, and the pool is on {pool.device}"
    if config.dtype not in ("bfloat16", "float16"):
        return f"FlashInfer supports bfloat16 and float16, not {config.dtype}"
    if pool.form != MODEL:
        return f"FlashInfer reads rows as the model makes them here, not {pool.form}"
    if config.kind == "mla" and (config.latent, config.rope_dim) != MLA_DIMS:
        return f"FlashInfer's MLA has rows of {MLA_DIMS}, not {(config.latent, config.rope_dim)}"
    if config.kind == "gqa" and config.head_dim not in GQA_DIMS:
        return f"FlashInfer supports heads of {GQA_DIMS}, not {config.head_dim}"
    return ""


KERNELS = ("torch", "flashinfer")
"""Back ends by name."""


def kernel_of(
    name: str, pool: KVPool, group_heads: Sequence[int], own_heads: Sequence[int], fixed: bool = False
) -> Kernel:
    """The back end of that name; `torch`, with a warning, if FlashInfer is requested but cannot run."""
    if name == "flashinfer":
        if not (missing := lacks(pool)):
            return FlashInferKernel(pool, group_heads, own_heads, fixed)
        warnings.warn(f"{missing}; attention runs on back end torch", RuntimeWarning, stacklevel=2)
    elif name != "torch":
        raise EngineError(f"attention back end must be one of {KERNELS}, not {name!r}")
    return TorchKernel(pool, group_heads, own_heads, fixed=fixed)
