"""Holds `kvproto describe` against the caches that transformers allocates: `python -m tools.models`, `make models`.

Every causal type of the installed transformers is built with the defaults of its config, on the meta device, which
allocates nothing, and reads eight tokens; so is every file of examples/configs that transformers can load, as
`save_pretrained` writes it, which leaves out what is a default: without any field, `describe` says the same of a type,
or refuses it. The cache that it then has says how many elements each layer holds for a token and for a
request. `describe` has to say the same of the same config, or refuse it by name. A type that it describes otherwise is
a fault, and so is one that it accepts although nothing can be compared, unless models.toml has it with its reason.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.cache import BITS
from kvproto.wire.enums import DType, ItemKind
from kvproto_catalog.models import describe
from tools.classes import saved

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples/configs"
_KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
WITH: dict[str, dict[str, Any]] = _KNOWN["with"]
"""Fields by type, without which it cannot run."""
WITHOUT: dict[str, str] = _KNOWN["without"]
"""Types that `describe` accepts and that nothing can be compared with, each with the reason."""
TOKENS = 8
LARGEST = 1_500_000_000
"""Parameters of a model that may be built on the CPU, where its code reads data and cannot run on the meta device."""
PATIENCE = 120
"""Seconds for one type."""

Held = dict[int, dict[str, float]]
"""By layer: elements for each token, of `kv` and `index`, and for each request, of `conv` and `state`."""


@attrs.frozen
class Verdict:
    """The verdict on one config."""

    name: str
    word: str
    """equal, refused, DIFFERS, not compared, or not loaded: transformers has no config for `describe` to read."""
    why: str = ""


def stated(config: Mapping[str, Any]) -> Held:
    """The caches that `describe` says a model holds; raises KvprotoError."""
    made = describe(config)
    groups = {group.id: group for group in made.groups}
    held: Held = defaultdict(lambda: defaultdict(float))
    for share in made.ranks[0].owns:
        group = groups[share.group]
        for part in group.parts:
            if (name := _NAMES.get(part.name, part.name)) == "":
                continue
            elements = part.lanes * part.lane_bytes * 8 / BITS.get(DType(part.dtype), 16)
            elements = (
                elements * (group.live_rows or group.rows)
                if group.kind == ItemKind.SLOT
                else elements / group.tokens_per_row
            )
            for layer in share.layers.tolist():
                held[layer][name] += elements
    return {layer: dict(parts) for layer, parts in held.items()}


_NAMES = {
    "k": "kv", "v": "kv", "kv": "kv", "latent": "kv", "window_latent": "kv", "rope": "kv",
    "conv": "conv", "ssm": "state", "recurrent": "state", "index": "index",
    "index_scale": "", "compress_state": "", "index_compress_state": "",
}  # fmt: skip
"""Names of `Held` for parts; "": transformers has no such tensor, as it keeps keys whole and pending rows unsummed."""


def allocated(config: Any, device: str | None = None) -> Held:
    """The caches that transformers itself allocates, on this device alone if named; raises what its code does."""
    import torch

    try:
        return _after_a_pass(config, "meta")
    except (NotImplementedError, RuntimeError) as error:
        if device or "meta" not in str(error) or _parameters(config) > LARGEST:
            raise
    with torch.inference_mode():
        return _after_a_pass(config, "cpu")


def _model(config: Any, device: str) -> Any:
    import torch
    from transformers.initialization import no_init_weights

    auto: Any = import_module("transformers").AutoModelForCausalLM

    with torch.device(device), no_init_weights():
        return auto.from_config(config, dtype=torch.bfloat16).eval()


def _parameters(config: Any) -> int:
    return sum(parameter.numel() for parameter in _model(config, "meta").parameters())


def _after_a_pass(config: Any, device: str) -> Held:
    import torch

    with torch.device(device), torch.no_grad():
        out = _model(config, device)(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = getattr(out.past_key_values, "self_attention_cache", out.past_key_values)
    held = {n: of_layer(layer, one=config.model_type in _ONE) for n, layer in enumerate(cache.layers)}
    for n, state in enumerate(getattr(cache, "linear_cache", ())):  # of MiniMax-Text-01, beside its layers
        if len(state):
            held[n] = {"state": math.prod(state.shape[1:])}
    return {n: parts for n, parts in held.items() if parts}


_ONE = ("deepseek_v4",)
"""Types whose K is V, in layers that do not compress too."""


def of_layer(layer: Any, one: bool = False) -> dict[str, float]:
    """The elements of one layer of a transformers Cache; raises ValueError for a tensor that is not known."""
    import torch

    held: dict[str, float] = defaultdict(float)
    rates = getattr(layer, "compress_rate", 1)
    for name, value in vars(layer).items():
        tensors = list(value.values()) if isinstance(value, dict) else [value]
        for tensor, of in zip(tensors, value if isinstance(value, dict) else ("",), strict=True):
            if not isinstance(tensor, torch.Tensor) or not tensor.dim() or name in _PENDING:
                continue
            shape = tensor.shape
            match name:
                case "keys":
                    held["kv"] += shape[1] * shape[3]
                case "values" if not one and not hasattr(layer, "compressed_kv"):  # there K is V
                    held["kv"] += shape[1] * shape[3]
                case "values":
                    pass
                case "indexer_keys":
                    held["index"] += shape[-1]
                case "compressed_kv":
                    held["index" if of == "indexer" else "kv"] += shape[-1] / rates
                case "conv_states":  # of the kernel's width, one more than has to be kept
                    held["conv"] += math.prod(shape[1:-1]) * (shape[-1] - 1)
                case "recurrent_states":
                    held["state"] += math.prod(shape[1:])
                case _:
                    raise ValueError(f"{type(layer).__name__}.{name} is not known here")
    return dict(held)


_PENDING = {"buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"}
"""Rows that a compressor has not summed yet; engines keep their sums."""


def judged(case: tuple[str, str]) -> Verdict:
    """The verdict on a type, or on a file of examples/configs."""
    warnings.filterwarnings("ignore")
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    kind, name = case
    text = json.loads((CONFIGS / name).read_text()) if kind == "file" else None
    try:
        config = (
            transformers.CONFIG_MAPPING[name]()
            if kind == "type"
            else transformers.AutoConfig.from_pretrained(CONFIGS / name)
        )
        for field, value in WITH.get(name, {}).items():
            setattr(config, field, value)
        if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
            config.is_decoder = True
        text = json.loads(config.to_json_string(use_diff=kind == "file"))
    except Exception as error:
        if text is None:
            return Verdict(name, "not loaded", _short(error))
        config = None
    try:
        mine = stated(text)
    except KvprotoError as error:
        return Verdict(name, "refused", _short(error))
    if kind == "type" and (left_out := guessed(name, text, mine)):
        return Verdict(name, "DIFFERS", f"{left_out} is guessed where it is left out: the class has another default")
    try:
        if config is None:
            return Verdict(name, "not compared", "transformers does not load it")
        theirs = allocated(config)
    except Exception as error:
        return Verdict(name, "not compared", _short(error))
    return compared(name, mine, theirs)


def guessed(name: str, text: Mapping[str, Any], mine: Held) -> str | None:
    """A field without which `describe` says something else than before, and than of what its class makes of it."""
    outer = dict(text)
    inner = outer.get("text_config")
    fields: set[str] = {*outer, *(inner or {})}
    for field in sorted(fields - {"model_type", "text_config", *WITH.get(name, {})}):
        left = {key: value for key, value in outer.items() if key != field}
        if inner:
            left["text_config"] = {key: value for key, value in inner.items() if key != field}
        try:
            if (found := stated(left)) == mine:
                continue
        except KvprotoError:
            continue
        try:
            theirs = saved(name, left)
        except Exception:  # transformers has nothing to say of it either
            continue
        if found != stated(theirs):
            return field
    return None


def compared(name: str, mine: Held, theirs: Held) -> Verdict:
    """The verdict on what `describe` says, beside what transformers allocates."""
    if mine == theirs:
        return Verdict(name, "equal")
    layer = next(n for n in sorted({*mine, *theirs}) if mine.get(n) != theirs.get(n))
    return Verdict(name, "DIFFERS", f"layer {layer}: describe {mine.get(layer)}, transformers {theirs.get(layer)}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def cases() -> Iterator[tuple[str, str]]:
    """All types and files."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield from (("type", name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    yield from (("file", path.name) for path in sorted(CONFIGS.glob("*.json")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="types, or files of examples/configs (all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (%(default)s)")
    args = parser.parse_args()
    chosen = [case for case in cases() if not args.names or case[1] in args.names]
    began, tally, faults = time.monotonic(), Counter[str](), 0
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=40) as pool:
        for (kind, _), verdict in zip(chosen, pool.imap(judged, chosen), strict=True):
            reason = WITHOUT.get(verdict.name)
            bad = verdict.word == "DIFFERS" or (verdict.word == "not compared") != (reason is not None)
            faults += bad
            tally[f"{kind}s {verdict.word}"] += 1
            if bad or args.names or verdict.word != "equal":
                print(
                    f"{'FAULT ' if bad else ''}{kind} {verdict.name}: {verdict.word} {reason or verdict.why}",
                    flush=True,
                )
    print(f"{dict(sorted(tally.items()))}, {faults} faults, {time.monotonic() - began:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
