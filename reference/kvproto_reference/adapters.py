"""LoRA adapters in the form of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors."""

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from kvproto import LocalError, adapter_digest
from kvproto.errors import ErrorCode

from .checkpoint import CHECKPOINTS, load_config
from .errors import EngineError
from .models import Decoder, Lora, ModelConfig, TensorParallel, cut
from .models.config import json_object
from .models.hf import source
from .models.lora import PROJECTIONS
from .weights import Weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices"), (None,)),
    "alora_invocation_tokens": (None,),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
}
"""Settings beside rank and scale, and their values that are understood: others give other outputs."""

_DRAWN = 4
"""The rank of an adapter with random weights."""


@attrs.frozen
class Adapter:
    """An adapter that requests may name."""

    name: str
    folder: Path
    digest: bytes = attrs.field(repr=False)
    """The digest that tells it from others of its name."""


Adapters = Mapping[str, Adapter]
"""By name."""
NO_ADAPTERS: Adapters = MappingProxyType({})


def adapters_of(folders: Mapping[str, Path]) -> Adapters:
    """The adapters in these folders, by name; raises LocalError where a file is missing."""
    return {name: Adapter(name, folder, adapter_digest(folder)) for name, folder in folders.items()}


def digest_of(adapters: Adapters) -> str:
    """The fact `adapters` of an engine that has loaded these."""
    said = sorted(f"{name} {each.digest.hex()}" for name, each in adapters.items())
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def chosen(adapters: Adapters, name: str) -> Adapter | None:
    """The adapter that a request names, None if it names none; raises LocalError(CONTENT_MISMATCH) if it is unknown."""
    if not name:
        return None
    if name not in adapters:
        has = f"the adapters {', '.join(adapters)}" if adapters else "no adapter"
        advice = f"start this engine with --adapter {name}=DIR, of the same folder as the other engine"
        raise LocalError(ErrorCode.CONTENT_MISMATCH, "adapter", has, repr(name), advice)
    return adapters[name]


def save_adapter(folder: Path, rank: int, alpha: float, halves: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Write an adapter as PEFT does: down [rank, in] and up [out, rank] of each tensor of a model, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = {name.removesuffix(".weight"): each for name, each in halves.items()}
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in modules})}  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(said, indent=2) + "\n")
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": tensor.detach().contiguous()
        for module, each in modules.items()
        for half, tensor in zip("AB", each, strict=True)
    }
    (folder / WEIGHTS_FILE).write_bytes(to_bytes(tensors))


def draw_adapter(folder: Path, target: Path, seed: int) -> Path:
    """Save an adapter with random weights of a target in a folder: it changes what is said from the first tokens on."""
    config, random = load_config(target), torch.Generator().manual_seed(seed)
    halves = {
        source(name, config): (
            torch.randn(_DRAWN, width, generator=random) * width**-0.5,
            torch.randn(out, _DRAWN, generator=random) * 0.6,
        )
        for name, (out, width) in changeable(config).items()
    }
    save_adapter(folder, _DRAWN, 2.0 * _DRAWN, halves)
    return folder


def load_adapters(
    adapters: Adapters, config: ModelConfig, tp: TensorParallel, device: torch.device | str = "cpu"
) -> dict[str, Lora]:
    """A rank's part of each adapter of a target, by name, in the target's element type.

    Raises EngineError for settings that are not understood, and for weights of another target or of other projections
    than PROJECTIONS.
    """
    return {name: _load(each, config, tp, device) for name, each in adapters.items()}


def changeable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes of the weights of a whole model that an adapter may change, by our names."""
    with torch.device("meta"):
        named = Decoder(config).state_dict()
    ends = tuple(f".attn.{projection}" for projection in PROJECTIONS[config.kind])
    return {name: (each.shape[0], each.shape[1]) for name, each in named.items() if name.endswith(ends)}


def _load(adapter: Adapter, config: ModelConfig, tp: TensorParallel, device: torch.device | str) -> Lora:
    rank, scale = _rank_and_scale(adapter)
    weights, known, pairs = Weights(adapter.folder, WEIGHTS_FILE), set[str](), {}
    kept = {"dtype": getattr(torch, config.dtype), "device": device}
    with torch.device("meta"):
        mine = Decoder(config, tp).state_dict()
    for name, (out, width) in changeable(config).items():
        module = "base_model.model." + source(name, config).removesuffix(".weight")
        down, up = (f"{module}.lora_{half}.weight" for half in "AB")
        known |= {down, up}
        if name not in mine or not weights.names & {down, up}:
            continue
        own = cut(config, tp, name, (out, width))[0], slice(None)
        _, layer, _, projection = name.split(".")
        pairs[int(layer), projection] = (
            weights.read(down, (rank, width)).to(**kept),
            (weights.read(up, (out, rank), own).float() * scale).to(**kept),
        )
    if left := sorted(weights.names - known):
        raise EngineError(
            f"adapter {adapter.name}: {left[0]} is no change of {', '.join(PROJECTIONS[config.kind])} of this target:"
            " give one that was trained for this target, with no other target_modules"
        )
    return Lora(pairs)


def _rank_and_scale(adapter: Adapter) -> tuple[int, float]:
    said = json_object((adapter.folder / CONFIG_FILE).read_text())
    for key, allowed in _ONLY.items():
        if said.get(key) not in allowed:
            raise EngineError(f"adapter {adapter.name}: {CONFIG_FILE} has {key} {said.get(key)!r}, not {allowed[0]!r}")
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise EngineError(f"adapter {adapter.name}: {CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}, not numbers")
    return rank, alpha / (rank**0.5 if said.get("use_rslora") else rank)


def main() -> None:
    """Draw an adapter from the command line."""
    parser = argparse.ArgumentParser(description="Save a LoRA adapter with random weights, to try adapters with.")
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target-mla", metavar="DIR", help="its target")
    parser.add_argument("--seed", type=int, default=1, help="from which its weights are drawn (default 1)")
    parser.add_argument("folder", type=Path, help="where it goes")
    args = parser.parse_args()
    print(f"adapter {draw_adapter(args.folder, args.target, args.seed)}")


if __name__ == "__main__":
    main()
