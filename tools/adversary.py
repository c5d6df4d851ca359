"""Configs that a hostile stranger would write: `python -m tools.adversary` describes them beside transformers.

Each begins with a type's defaults, of which some fields are left out, changed, or joined by fields of other types.
`describe` has to refuse the file, or to say what transformers makes of it: the caches of the file that it saves, with
all that its class adds, and those that its model allocates on the meta device.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from importlib import import_module
from random import Random
from typing import Any

from kvproto.errors import KvprotoError
from kvproto_catalog.config import GEOMETRY
from kvproto_catalog.types import CLASSES
from tools.classes import described, saved
from tools.models import WITH, Verdict, allocated, compared, stated

_LAYERS = 4
"""Layers of most of these models, which is enough for each kind of layer that a type has."""
_LARGEST = 1 << 31
"""Parameters of a model that is built here."""
KINDS = tuple(kind for kind, row in sorted(CLASSES.items()) if not row.text)


def hostile(kind: str, seed: int) -> dict[str, Any] | None:
    """A file of this type that a seed decides; None if transformers itself refuses its beginning."""
    random = Random(f"{kind} {seed}")
    row = CLASSES[kind]
    sizes = {"num_hidden_layers": random.choice((_LAYERS, 8))} if "num_hidden_layers" in row.fields else {}
    try:
        config = saved(kind, {**sizes, **WITH.get(kind, {})})
    except Exception:
        return None
    if "is_decoder" in config:
        config["is_decoder"] = True
    foreign = sorted(GEOMETRY - row.fields)
    for _ in range(random.randint(1, 4)):
        mine = sorted(GEOMETRY & config.keys()) or ["num_hidden_layers"]
        match random.choice(("drop", "drop layers", "sparse", "add", "change", "change", "change")):
            case "drop":
                config.pop(random.choice(mine), None)
            case "drop layers":
                config.pop("layer_types", None)
            case "sparse":
                kept = {*random.sample(mine, random.randint(1, len(mine))), "num_hidden_layers"}
                config = {name: value for name, value in config.items() if name in kept or name not in GEOMETRY}
            case "add":
                name = random.choice(foreign)
                config[name] = random.choice(_VALUES[name])
            case "change":
                name = random.choice(sorted(row.fields))
                config[name] = random.choice([*_VALUES[name], _another(config.get(name), random)])
    return config


def _values() -> dict[str, list[Any]]:
    """By field: values that some type has, and others."""
    plain = {name: [None, 2, 4, 64] for name in GEOMETRY}
    for row in CLASSES.values():
        for name, value in row.defaults.items():
            if value not in plain[name]:
                plain[name].append(value)
    booleans = "attention_k_eq_v", "multi_query", "new_decoder_architecture", "use_cla", "use_sliding_window"
    plain |= {name: [True, False, None] for name in booleans}
    return plain


_VALUES = _values()


def _another(value: Any, random: Random) -> Any:
    """A value of the same type."""
    if type(value) is bool:
        return not value
    if type(value) is int:
        return random.choice((max(2, value // 2), value * 2, 2, 4))
    if isinstance(value, list) and value:
        return [*value[1:], value[0]] if random.random() < 0.5 else [*value[:-1], value[0]]
    return None


def judged(kind: str, seed: int, allocate: bool = True) -> Verdict:
    """The verdict on one hostile file; "skipped" if transformers makes nothing of it."""
    name = f"{kind} {seed}"
    if (config := hostile(kind, seed)) is None:
        return Verdict(name, "skipped")
    try:
        mine = stated(config)
    except KvprotoError as error:
        return Verdict(name, "refused", str(error)[:120])
    try:
        whole = saved(kind, config)
    except Exception as error:
        return Verdict(name, "skipped", str(error)[:80])
    if (theirs := described(whole)) is not None and theirs != described(config):
        return compared(name, mine, stated(whole))
    if not allocate:
        return Verdict(name, "refused when saved" if theirs is None else "equal")
    try:
        loaded: Any = import_module("transformers").CONFIG_MAPPING[kind].from_dict(config)
        held = allocated(loaded, "meta")
    except Exception as error:
        return Verdict(name, "not compared", str(error)[:80])
    return compared(name, mine, held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="types (all)")
    parser.add_argument("--seeds", type=int, default=20, help="files of each type (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--saved", action="store_true", help="compare with saved files alone, which is faster")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    import_module("transformers").logging.set_verbosity_error()
    began, tally, faults = time.process_time(), Counter[str](), 0
    for kind in args.kinds or KINDS:
        for seed in range(args.first, args.first + args.seeds):
            verdict = judged(kind, seed, not args.saved)
            tally[verdict.word] += 1
            if verdict.word == "DIFFERS":
                faults += 1
                print(f"FAULT {verdict.name}: {verdict.why}", flush=True)
    print(f"{dict(sorted(tally.items()))}, {time.process_time() - began:.0f} s of CPU")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
