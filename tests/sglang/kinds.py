"""The kinds of pools that the back end states, as engines of any page size and number of ranks.

`classes` makes the pools: `Standins`, or SGLang's own classes (tools/engines/sglang_handover.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from tests.sglang import standins
from tests.sglang.handover import SLOT, TOKENS, Model, Side, model_of

HEADS, DIM, LATENT, ROPE = 2, 16, 512, 64
BF16, FP8, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
WINDOW = 37
"""Tokens of a window."""


class Standins:
    """Makes stand-ins of SGLang's pools on a device."""

    def __init__(self, device: str = "cpu", layout: str = "nhd") -> None:
        self.device, self.layout = device, layout

    def mha(self, **given: Any) -> Any:
        return standins.MHATokenToKVPool(device=self.device, layout=self.layout, **given)

    def mla(self, **given: Any) -> Any:
        return standins.MLATokenToKVPool(device=self.device, **given)

    def dsa(self, **given: Any) -> Any:
        return standins.DSATokenToKVPool(device=self.device, **given)

    def swa(self, **given: Any) -> Any:
        return standins.SWAKVPool(device=self.device, layout=self.layout, **given)

    def hybrid(self, full: Any, ids: list[int], layers: list[int], shape: Any) -> Any:
        """`shape` is one of SGLang's, of a rank."""
        groups, axis = getattr(shape, "conv_shard_groups", None), getattr(shape, "conv_slice_axis", 0)
        mamba = standins.MambaPool(
            size=SLOT + 4, mamba_layer_ids=layers, conv=shape.conv[0], temporal=shape.temporal, groups=groups,
            axis=axis, device=self.device,
        )  # fmt: skip
        return standins.HybridLinearKVPool(full, ids, mamba)

    def hybrid_of(self, full: Any, ids: list[int], mamba: Any) -> Any:
        return standins.HybridLinearKVPool(full, ids, mamba)

    def mamba(
        self, layers: Any, conv: tuple[int, int], temporal: tuple[int, int, int], groups: list[int] | None, ple: bool = False
    ) -> Any:  # fmt: skip
        """States of a rank: a convolution, a matrix, and perhaps what embeddings per layer keep."""
        made = standins.MambaPool(
            size=SLOT + 4, mamba_layer_ids=list(layers), conv=conv, temporal=temporal, groups=groups, device=self.device
        )
        if ple:
            made._slot_siblings = (
                standins.ShortConvPool(SLOT + 4, self.device),
                standins.NGramPool(SLOT + 4, self.device),
            )
        return made

    def streams(self, layers: Any, shapes: list[tuple[int, int]]) -> Any:
        """States of several convolutions, [input, channel] each."""
        made = self.mamba(layers, shapes[0], (0, 0, 0), None)
        made.mamba_cache.conv = [
            standins.zeros((len(layers), SLOT + 5, *shape), torch.bfloat16, self.device) for shape in shapes
        ]
        return made

    def minimax(self, **given: Any) -> Any:
        return standins.MiniMaxSparseKVPool(device=self.device, **given)

    def mxfp8(self, **given: Any) -> Any:
        return standins.MHATokenToKVPoolMXFP8(device=self.device, **given)

    def swa_mxfp8(self, **given: Any) -> Any:
        return standins.SWAKVPool(
            device=self.device, token_to_kv_pool_class=standins.MHATokenToKVPoolMXFP8, dtype=FP8, **given
        )

    def fp4(self, **given: Any) -> Any:
        return standins.MHATokenToKVPoolFP4(device=self.device, **given)

    def mla_fp4(self, **given: Any) -> Any:
        return standins.MLATokenToKVPoolFP4(device=self.device, **given)

    def v4(self, *given: Any) -> Any:
        return standins.DeepSeekV4TokenToKVPool(*given, device=self.device)

    def qsa(
        self, *, full_attention_layer_ids: list[int], mamba_pool: Any, qsa_index_kv_heads: int, qsa_index_head_dim: int,
        qsa_compress_ratio: int, num_request_slots: int, **given: Any,
    ) -> Any:  # fmt: skip
        full = self.mha(layer_num=len(full_attention_layer_ids), **given)
        return standins.QSATokenToKVPool(
            full, full_attention_layer_ids, mamba_pool, qsa_compress_ratio, qsa_index_head_dim, num_request_slots
        )

    def shape(self, model: Model, ranks: int) -> Any:
        """The shapes that SGLang's configs make of the states of a rank."""
        channels, heads = sum(max(1, n // ranks) for n in model.conv[0]), model.matrix
        if model.named == "mamba2":
            channels = sum(
                max(width, n // ranks) for n, width in zip(model.conv[0], (heads[1], heads[2], heads[2]), strict=True)
            )
        conv = (channels, model.conv[1])
        temporal = (max(1, heads[0] // ranks), *heads[1:])
        return _Shape(
            [conv[::-1] if model.rows_first else conv],
            temporal,
            list(model.conv[0]) if model.said else None,
            int(model.rows_first),
        )


@attrs.frozen
class _Shape:
    conv: list[tuple[int, int]]
    temporal: tuple[int, int, int]
    conv_shard_groups: list[int] | None
    conv_slice_axis: int


Pools = Callable[[Any, int, int], tuple[Any, ...]]
"""The pools of a rank: of classes, a page size, and a number of ranks."""


@attrs.frozen
class Kind:
    """Models, and their pools.

    Fields:
        states: Types of the components of SGLang's state.
        page: The only page size, where there is one.
        text: Of the target's config.
    """

    models: tuple[Model, ...]
    pools: Pools
    states: tuple[str, ...] = ()
    page: int = 0
    text: Mapping[str, Any] = attrs.field(factory=dict)
    scales: tuple[Any, ...] = ({}, {})

    def flip(self, pools: tuple[Any, ...], side: Side) -> None:
        """One bit of what the kind is named after, in the last token or in the state."""
        pool = pools[-1]
        if hasattr(pool, "mamba_pool"):
            at = pool.mamba_pool.mamba_cache.conv[0][0, SLOT]
            at.view(torch.int16)[0, 0] ^= 1
            return
        if hasattr(pool, "index_k_with_scale_buffer"):
            row, dim = (TOKENS - 1) % side.page, pool.index_head_dim
            page = pool.index_k_with_scale_buffer[0][side.pages[(TOKENS - 1) // side.page]]
            page[side.page * dim + row * 4] ^= 1  # of its scale
            return
        window = hasattr(pool, "swa_kv_pool")
        inner = pool.swa_kv_pool if window else pool
        buffer = inner.kv_buffer[0] if hasattr(inner, "kv_buffer") else inner.k_buffer[0]
        slot = int(side.slots(window)[-1])
        at = buffer[slot] if buffer.dim() == 3 else buffer[slot // side.page, :, slot % side.page]
        at.view(torch.uint8)[0, 0] ^= 1


def _size(page: int) -> int:
    """Room for two prompts."""
    return 2 * -(-TOKENS // page) * page + 2 * page


def _kv(dtype: torch.dtype, v_dim: int = DIM) -> tuple[tuple[str, torch.dtype, int], ...]:
    return ("k", dtype, DIM), ("v", dtype, v_dim)


def _mha(dtype: torch.dtype, layers: int, heads: int = HEADS, **more: Any) -> Callable[[Any, int, int], Any]:
    def make(classes: Any, page: int, ranks: int) -> Any:
        held = max(1, heads // ranks)
        return classes.mha(
            size=_size(page), page_size=page, dtype=dtype, head_num=held, head_dim=DIM, layer_num=layers, **more
        )

    return make


def _mla(
    dtype: torch.dtype, layers: int, name: str = "mla", width: int = LATENT + ROPE
) -> Callable[[Any, int, int], Any]:
    index = {"index_head_dim": 128} if name == "dsa" else {}

    def make(classes: Any, page: int, ranks: int) -> Any:
        return getattr(classes, name)(
            size=_size(page), page_size=page, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=layers,
            kv_cache_dim=width, **index,
        )  # fmt: skip

    return make


def _swa(classes: Any, page: int, ranks: int) -> Any:
    return classes.swa(
        size=_size(page), size_swa=_size(page), page_size=page, dtype=BF16, head_num=max(1, HEADS // ranks), head_dim=DIM,
        swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3],
    )  # fmt: skip


def _hybrid(model: Model, full: Callable[[Any, int, int], Any]) -> Callable[[Any, int, int], Any]:
    def make(classes: Any, page: int, ranks: int) -> Any:
        return classes.hybrid(
            full(classes, page, ranks), list(model.full), list(model.states), classes.shape(model, ranks)
        )

    return make


def _one(
    model: Model, make: Callable[[Any, int, int], Any], states: tuple[str, ...] = (), page: int = 0, **text: Any
) -> Kind:
    return Kind((model,), lambda *given: (make(*given),), states, page, text)


def _with_draft(target: Kind, model: Model, make: Callable[[Any, int, int], Any]) -> Kind:
    """The same, and a draft whose pages are those of the target."""
    return attrs.evolve(
        target, models=(*target.models, model), pools=lambda *given: (*target.pools(*given), make(*given))
    )


_GQA = Model(HEADS, range(2), _kv(BF16))
_LATENT = Model(1, range(2), (("latent", BF16, LATENT + ROPE),))
_MAMBA2 = Model(HEADS, (1, 3), _kv(BF16), states=(0, 2), conv=((32, 12, 12), 3), matrix=(4, 8, 6), named="mamba2")
_GDN = Model(HEADS, (1, 3), _kv(BF16), states=(0, 2), conv=((12, 12, 32), 3), matrix=(4, 8, 6), said=True)
_KDA = Model(
    1, (1, 3), _LATENT.parts, states=(0, 2), conv=((32, 32, 32), 3), matrix=(4, 8, 8), said=True, rows_first=True
)
_SHORT = Model(HEADS, (1, 3), _kv(BF16), states=(0, 2), conv=((64,), 2), matrix=(1, 64, 0))
_SPARSE = Model(1, range(2), _LATENT.parts, index=range(2))
_PACKED = Model(1, range(2), (("latent", torch.uint8, 656),), index=range(2))
_GQA_KIND, _MLA_KIND = _one(_GQA, _mha(BF16, 2)), _one(_LATENT, _mla(BF16, 2))
_DSA_KIND = _one(_SPARSE, _mla(BF16, 2, "dsa"), ("dsa",), 64)
KINDS: dict[str, Kind] = {
    "MHA": _GQA_KIND,
    "MHA, values of another size": _one(Model(HEADS, range(2), _kv(BF16, 8)), _mha(BF16, 2, v_head_dim=8)),
    "MHA in FP8": attrs.evolve(
        _one(Model(HEADS, range(2), _kv(FP8)), _mha(FP8, 2)), scales=({0: (0.5, 0.25), 1: (1.0, 2.0)}, {})
    ),
    "MHA in FP8 of five bits": _one(Model(HEADS, range(2), _kv(E5M2)), _mha(E5M2, 2)),
    "MLA": _MLA_KIND,
    "MLA in FP8": _one(Model(1, range(2), (("latent", FP8, LATENT + ROPE),)), _mla(FP8, 2)),
    "sparse MLA": _DSA_KIND,
    "sparse MLA in FP8": _one(_PACKED, _mla(FP8, 2, "dsa", 656), ("dsa",), 64),
    "sliding windows": _one(Model(HEADS, (1, 3), _kv(BF16), window=(0, 2), tokens=WINDOW), _swa, ("swa",)),
    "Mamba 2": _one(
        _MAMBA2, _hybrid(_MAMBA2, _mha(BF16, 2)), ("mamba",), model_type="granitemoehybrid", mamba_n_groups=2
    ),
    "gated delta nets": _one(_GDN, _hybrid(_GDN, _mha(BF16, 2)), ("mamba",)),
    "Kimi's delta nets": _one(_KDA, _hybrid(_KDA, _mla(BF16, 2)), ("mamba",)),
    "short convolutions": _one(_SHORT, _hybrid(_SHORT, _mha(BF16, 2)), ("mamba",)),
    "EAGLE": _with_draft(_GQA_KIND, Model(4, range(1), _kv(BF16)), _mha(BF16, 1, 4)),
    "EAGLE beside MLA": _with_draft(_MLA_KIND, Model(HEADS, range(1), _kv(BF16)), _mha(BF16, 1)),
    "MTP of sparse MLA": _with_draft(
        _DSA_KIND, Model(1, range(1), _LATENT.parts, index=range(1)), _mla(BF16, 1, "dsa")
    ),
}


def side(kind: str, page: int, ranks: int, classes: Any = None) -> Side:
    """An engine of this kind, with pages of the only size where there is but one."""
    chosen, maker = KINDS[kind], classes or Standins()
    page = chosen.page or page
    configs = tuple(model_of(model.heads, **chosen.text if not n else {}) for n, model in enumerate(chosen.models))
    pools = [chosen.pools(maker, page, ranks) for _ in range(ranks)]
    return Side(chosen.models, configs, pools, page, chosen.states, scales=chosen.scales)
