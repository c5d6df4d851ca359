"""Facts that two engines must share for bytes to mean the same; each adapter makes them of its engine's config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["digest_of", "facts_of", "rope_of", "weights_of"]

_SAMPLE = 1 << 16
"""Bytes of the beginning and of the end of a file of weights that its digest covers."""
_ROPE = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "short_factor", "long_factor", "mrope_section",
    "partial_rotary_factor",
)  # fmt: skip
"""Settings that change a rotary embedding, beside its base and type; engines add names of their own."""


def digest_of(form: Any) -> str:
    """Of something that is JSON."""
    return hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:32]


def facts_of(of: str, weights: str, text: Any, scales: Any, order: str) -> dict[str, str]:
    """Of the target, or of a draft: its weights and rotary embedding, and where it has some its scales and an order."""
    more = {"kv_scales": digest_of(scales) if scales else "", "state_order": order}
    made = {"weights": weights, "rope": rope_of(text)} | {name: value for name, value in more.items() if value}
    return {f"{name}.{of}": value for name, value in made.items()}


def rope_of(text: Any) -> str:
    """A digest of the rotary embedding of a config, whichever of its two forms engines and releases keep it in."""
    named: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        named |= {key: value for key, value in (getattr(text, name, None) or {}).items() if value is not None}
    kinds = {key: value for key, value in named.items() if isinstance(value, Mapping)}  # of each kind of layer
    base, partial = getattr(text, "rope_theta", None), getattr(text, "partial_rotary_factor", None)
    return digest_of({key: _rope(value, base, partial) for key, value in (kinds or {"all": named}).items()})


def _rope(named: Mapping[str, Any], base: Any, partial: Any) -> dict[str, Any]:
    kind = named.get("rope_type") or named.get("type") or "default"
    found = {key: _plain(named[key]) for key in _ROPE if named.get(key) is not None}
    if partial is not None:
        found.setdefault("partial_rotary_factor", _plain(partial))
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    return found | {"base": _plain(named.get("rope_theta", base)), "type": str(kind)}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) else value


def weights_of(model: str, revision: str | None, words: list[str | None]) -> str:
    """A digest of the files of a folder, or the name and revision of a model; `words` say what was done to them."""
    suffix = "".join(f" {word}" for word in words if word)
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'main'}{suffix}"
    made = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")):
        size = path.stat().st_size
        made.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            made.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            made.update(file.read(_SAMPLE))
    return f"sha256 {made.hexdigest()[:32]}{suffix}"
