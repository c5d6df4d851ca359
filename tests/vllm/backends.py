"""Caches as vLLM's back ends allocate them and store into them, in any memory: what the connector's statements meet."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from kvproto import Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto_engines.memory import ShareableMemory
from kvproto_engines.orders import Table
from kvproto_vllm.pools.caches import Layers, Stated, state

LAYERS, HEADS, DIM, LATENT, TOKENS = 3, 2, 16, 32, 75
QUANTIZED = {
    "fp8_e4m3": ("FP8_PER_TENSOR", torch.float8_e4m3fn), "fp8_e5m2": ("FP8_PER_TENSOR", torch.float8_e5m2),
    "fp8_per_token_head": ("FP8_PER_TOKEN_HEAD", torch.float8_e4m3fn),
    "int8_per_token_head": ("INT8_PER_TOKEN_HEAD", torch.int8), "nvfp4": ("NVFP4", torch.uint8),
    "fp8_ds_mla": ("FP8_PER_TENSOR", torch.uint8),
}  # fmt: skip
ROPE, KEY = 8, 128
"""Of a latent's row the rotary key, and bytes of an index's key."""
ROW = LATENT - ROPE + 4 + 2 * ROPE
"""Bytes of a row that holds its scale: FP8, F32, BF16."""


@attrs.frozen
class Backend:
    """One engine's attention back end and cache.

    Fields:
        order: Of layer, block, head, token and content in memory; without L each layer is an allocation of its own.
        block: Tokens of the engine's block.
        kernel: Tokens of a block of the kernels, which divides it.
        gap: Bytes between blocks that nothing uses, with blocks before heads and tokens.
        axes: Of a layer's tensor of MLA: 3 in release 0.26, 4 in later ones.
        planes: K of all heads, then V of all heads, under the same shape.
        index: Keys of an index instead of rows of MLA: of a kernel's block all keys, then their scales.
    """

    order: str = "BNHC"
    block: int = 16
    kernel: int = 16
    stored: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    mla: bool = False
    axes: int = 4
    gap: int = 0
    planes: bool = False
    index: bool = False
    name: str = "FLASH_ATTN"
    scales: tuple[float, float] = (1.0, 1.0)
    blocks: int = 7

    @property
    def mode(self) -> str:
        return QUANTIZED[self.stored][0] if self.stored in QUANTIZED else "NONE"

    @property
    def inline(self) -> bool:
        """Whether a scale lies behind each head's K, and behind its V."""
        return self.mode.endswith("PER_TOKEN_HEAD")

    @property
    def packed(self) -> bool:
        """Whether rows of MLA hold their scales."""
        return self.stored == "fp8_ds_mla"

    @property
    def element(self) -> torch.dtype:
        return QUANTIZED[self.stored][1] if self.stored in QUANTIZED else self.dtype

    def tensors(self, device: str) -> list[torch.Tensor]:
        """[block, head, token, content] of each layer, as vLLM views its allocation of bytes."""
        held = self.dtype if self.mode == "NONE" else torch.int8 if "int8" in self.stored else torch.uint8
        heads, dim = (1, LATENT) if self.mla else (HEADS, 2 * DIM + (8 if self.inline else 0))
        if self.packed or self.index:
            held, dim = torch.uint8, KEY + 4 if self.index else ROW
        sizes = dict(
            zip("LBHNC", (LAYERS, self.blocks * self.block // self.kernel, heads, self.kernel, dim), strict=True)
        )
        outer = LAYERS if "L" in self.order else 1
        strides, step = {}, held.itemsize
        for axis in reversed(self.order):
            strides[axis] = step
            step = step * sizes[axis] + (self.gap if axis == self.order[self.order.index("B") + 1] else 0)
        made = []
        for layer in range(LAYERS):
            if layer < LAYERS // outer:
                with ShareableMemory(torch.int8):
                    raw = torch.zeros(step, dtype=torch.int8, device=device)
            at = strides["L"] * layer if outer > 1 else 0
            words = [strides[x] // held.itemsize for x in "BHNC"]
            view = torch.as_strided(raw.view(held), [sizes[x] for x in "BHNC"], words, at // held.itemsize)
            made.append(view[:, 0] if self.mla and self.axes == 3 else view)
        return made

    # as vLLM's functions do it

    def do_kv_cache_update(self, *given: Any) -> None:
        if self.mla:
            latent, rope, cache, slots, _, _ = given
            if self.packed:
                data, scale = quantized(latent)
                row = [data, scale.view(torch.uint8), rope[:, 0].to(torch.bfloat16).view(torch.uint8)]
                cache[slots // self.kernel, slots % self.kernel] = torch.cat(row, -1)
                return
            cache[slots // self.kernel, slots % self.kernel] = self._quantized(torch.cat([latent, rope[:, 0]], -1), 0)
            return
        _, k, v, cache, slots = given
        for n, rows in enumerate((k, v)):
            into = cache.transpose(1, 2)
            if self.planes:
                both = into.unflatten(2, (HEADS, 1)).flatten(2).unflatten(-1, (2, HEADS, DIM))
                both[slots // self.kernel, slots % self.kernel, n] = rows
                continue
            half = into.split(into.shape[-1] // 2, -1)[n]
            if self.inline:
                most = 127 if self.element == torch.int8 else 448
                scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / most
                data = rows.float() / scale
                data = data.round() if self.element == torch.int8 else data
                row = torch.cat([data.to(self.element).view(torch.uint8), scale.view(torch.uint8)], -1)
                half[slots // self.kernel, slots % self.kernel] = row.view(half.dtype)
            else:
                half[slots // self.kernel, slots % self.kernel] = self._quantized(rows, n)

    def _quantized(self, rows: torch.Tensor, n: int) -> torch.Tensor:
        if self.mode == "NONE":
            return rows.to(self.dtype)
        return (rows.float() / self.scales[n]).to(self.element).view(torch.uint8)

    def layers(self, tensors: list[torch.Tensor], **other: Any) -> Layers:
        """As the connector gathers them from vLLM's configuration."""
        layer = SimpleNamespace(
            impl=self, kv_lora_rank=LATENT - ROPE, kv_cache_dtype=self.stored, _k_scale=None, **other,
        )  # fmt: skip
        kind = type("MLAAttentionSpec" if self.mla else "FullAttentionSpec", (), {})
        spec = kind()
        spec.__dict__ |= {
            "block_size": self.block, "num_kv_heads": 1 if self.mla else HEADS,
            "head_size": KEY + 4 if self.index else LATENT if self.mla else DIM, "head_size_v": DIM,
            "cache_dtype_str": self.stored, "cache_role": "indexer" if self.index else "sparse", "kv_quant_mode": SimpleNamespace(name=self.mode),
        }  # fmt: skip
        names = [f"model.layers.{i}.attn" for i in range(LAYERS)]
        return Layers(
            title=self.name.lower(), layer=layer, backend=self.name, spec=spec, names=names, ids=list(range(LAYERS)),
            tensors=tensors, heads=HEADS, ranks=1, blocks=self.blocks, computed=torch.bfloat16,
            stored=self.stored, scales=[self.scales] * LAYERS,
        )  # fmt: skip

    def open(self, device: str, rank: int = 0, ranks: int = 1) -> tuple[Pool, Stated, list[torch.Tensor]]:
        tensors = self.tensors(device)
        stated = state(self.layers(tensors), True)
        geometry = lay_out([stated.cache], Parallel(tp=ranks))
        pool = Pool(geometry, {self.name.lower(): stated.tensors}, rank=rank, axes="page head token dim")
        return pool, stated, tensors

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Each byte by its own coordinates, whatever lies where in memory."""
        for layer, tensor in enumerate(tensors):
            rows = tensor.view(torch.uint8) if tensor.stride(-1) == 1 else tensor
            rows.copy_(
                torch.randint(0, 120, rows.shape, generator=torch.Generator().manual_seed(layer)).to(torch.uint8)
            )

    def rows(self, tensors: list[torch.Tensor], table: list[int]) -> torch.Tensor:
        """Bytes of the tokens of a request: [layer, token, head, content], found by block and token alone."""
        made = []
        for tensor in tensors:
            bytes_ = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor).view(torch.uint8)
            if self.index:  # keys and scales side by side, as a row of others has them
                flat, keys = bytes_.flatten(1), self.kernel * KEY
                pair = flat[:, :keys].unflatten(1, (-1, KEY)), flat[:, keys:].unflatten(1, (-1, 4))
                bytes_ = torch.cat(pair, -1).unsqueeze(1)
            ratio = self.block // self.kernel
            at = [
                (table[t // self.block] * ratio + t % self.block // self.kernel, t % self.kernel) for t in range(TOKENS)
            ]
            made.append(torch.stack([bytes_[block, :, row] for block, row in at]))
        return torch.stack(made).cpu()


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 in bytes, and a scale for each row that is a power of two, as vLLM's kernels of sparse attention round it."""
    scale = torch.exp2(torch.ceil(torch.log2(rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


def indexer_k_quant_and_cache(
    k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, block: int, scale: str
) -> None:
    """Store keys [token, dim] in an index [block, token, byte], as vLLM's function of that name does."""
    assert (block, scale in ("ue8m0", "mxfp8")) == (KEY, True)
    page, keys = cache.shape[1], cache.shape[1] * KEY
    flat, (data, scales) = cache.view(len(cache), -1), quantized(k)
    for n, slot in enumerate(slots.tolist()):
        at = slot % page
        flat[slot // page, at * KEY : (at + 1) * KEY] = data[n]
        exponent = (torch.log2(scales[n]) + 127).to(torch.uint8).expand(4)
        row = scales[n].view(torch.uint8) if scale == "ue8m0" else exponent
        flat[slot // page, keys + 4 * at : keys + 4 * (at + 1)] = row


def hand_over(
    source: Backend, sink: Backend, place: str, device: str = "cpu", stream: Any = None, ranks: tuple[int, int] = (1, 1)
) -> None:
    """TOKENS tokens from scattered blocks of one engine into those of another: the rows are equal, byte by byte.

    With a stream of a GPU the blocks are written there, a while after they are said to be. Of several ranks, which have
    all rows, `place` names each.
    """
    ones, twos = ([each.open(device, n, of) for n in range(of)] for each, of in zip((source, sink), ranks, strict=True))
    for _, _, mine in ones:
        source.fill(mine)
    after = _later(ones[0][2], stream) if stream is not None else None
    tables = [[5, 2, 6, 0, 3][: -(-TOKENS // each.block)] for each in (source, sink)]
    (here, stated), (there, wanted) = (
        (each.name.lower(), opened[0][1]) for each, opened in ((source, ones), (sink, twos))
    )
    prompt, ticket = Prompt(range(TOKENS)), new_ticket("prefill")
    with ExitStack() as doors:
        sources = [doors.enter_context(Source("prefill", pool, place)) for pool, _, _ in ones]
        seeds = {"prefill": place.format(rank=0)}
        sinks = [doors.enter_context(Sink("decode", pool, seeds)) for pool, _, _ in twos]
        requests = [each.request(ticket, prompt) for each in sources]
        fetches = [each.fetch(ticket, prompt, {there: Table(0, wanted.pages).of((tables[1],))}) for each in sinks]
        for request in requests:
            request.finish({here: Table(0, stated.pages).of((tables[0],))}, after=after)
        for fetch in fetches:
            fetch.wait(20)
    sent = source.rows(ones[0][2], tables[0])
    assert sent.any()
    for _, _, theirs in twos:
        assert torch.equal(sent, sink.rows(theirs, tables[1]))


def _later(tensors: list[torch.Tensor], stream: Any) -> int:
    """The event after which the tensors have their bytes again; until then they have none."""
    made = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for tensor, before in zip(tensors, made, strict=True):
            tensor.copy_(before)
    event = stream.record_event()
    KEPT.append(event)
    return int(event.cuda_event)


KEPT: list[Any] = []
"""Events that copies may wait for."""
