"""Reads the configuration classes of the installed transformers: `python -m tools.classes` writes their table.

For each known type of `describe`, the table says which of the fields on which caches depend its class or its model's
code has, the value of each that a file leaves out, and the fields that the class then derives in a way that `describe`
does not know: it refuses a file that leaves these out. `--check` compares the table with transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto_catalog.config import GEOMETRY
from kvproto_catalog.models import describe
from kvproto_catalog.types import CLASSES, TYPES, ModelClass

TABLE = Path(__file__).resolve().parents[1] / "integrations/kvproto_catalog/classes.json"
_SIZES: tuple[dict[str, int], ...] = (
    {"num_hidden_layers": 8},
    {"num_hidden_layers": 12},
    {"num_attention_heads": 16},
    {"hidden_size": 1024},
    {},
)
"""Sizes under which a derived value is compared."""


_OF_EACH_FILE = frozenset(("hidden_size", "num_hidden_layers", "num_layers"))
"""Fields without which a file is no model's, although classes have defaults."""
_UNREAD = dict.fromkeys(
    ("bitnet", "falcon", "gpt_neox", "gpt_neox_japanese", "olmoe", "persimmon", "stablelm"), frozenset({"head_dim"})
)
"""By type: fields that its code mentions, and that its caches do not depend on, or that cannot have another value."""

_OF_CARDS = {
    "mimo_v2_flash": frozenset({"hybrid_layer_pattern", "swa_head_dim", "swa_num_key_value_heads", "swa_v_head_dim"})
}
"""By type: fields that its published code and engines read, although the class in transformers does not."""


def row_of(kind: str) -> ModelClass | None:
    """Row of a type in the table, but for fields that are derived; None if transformers has no class of it."""
    mapping: Any = import_module("transformers").CONFIG_MAPPING
    if kind not in mapping:
        return None
    found: type = mapping[kind]
    if text := getattr(found, "sub_configs", {}).get("text_config"):
        default = mapping[kind]().text_config
        return ModelClass(text=default.model_type if default is not None else getattr(text, "model_type", None))
    declared = {field.name: field.default for field in dataclasses.fields(found)}
    aliases: Mapping[str, str] = getattr(found, "attribute_map", {})
    own, model = _sources(found)
    read = {name for name in GEOMETRY if _mentions(name, own, model)}
    defaults = {}
    for name in GEOMETRY - _OF_EACH_FILE:
        value = declared.get(aliases.get(name, name))
        if value is not None and value is not dataclasses.MISSING:
            defaults[name] = value
    known = GEOMETRY & ({*declared, *aliases} | read | _OF_CARDS.get(kind, frozenset()))
    others = {name: of for name, of in aliases.items() if {name, of} <= GEOMETRY}
    return ModelClass(known - _UNREAD.get(kind, frozenset()), defaults, aliases=others)


def _mentions(name: str, own: str, model: str) -> bool:
    """Whether the code of a class, or that of its model, names a field of a config."""
    text = rf"[\"']{name}[\"']"
    return bool(re.search(rf"self\.{name}\b|{text}", own) or re.search(rf"config\.{name}\b|, {text}", model))


def _sources(found: type) -> tuple[str, str]:
    """The code of a configuration class with those that it extends, and that of the model."""
    bases = (base for base in found.__mro__ if base.__module__.startswith("transformers.models."))
    own = "".join(map(inspect.getsource, bases))
    try:
        return own, inspect.getsource(import_module(found.__module__.replace("configuration_", "modeling_")))
    except ImportError:
        return own, ""


def saved(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config of these fields as transformers saves it, with all that its class adds; raises as transformers does."""
    mapping: Any = import_module("transformers").CONFIG_MAPPING
    text: dict[str, Any] = json.loads(mapping[kind].from_dict(dict(fields)).to_json_string(use_diff=False))
    return text


def described(fields: Mapping[str, Any]) -> Geometry | None:
    """The Description without facts, None if it is refused."""
    import attrs

    try:
        return attrs.evolve(describe(fields), facts=())
    except KvprotoError:
        return None


def derived_of(kind: str) -> frozenset[str]:
    """The fields without which `describe` says something else than of what the class makes of their absence."""
    found = set()
    for sizes in _SIZES:
        try:
            whole = saved(kind, {"model_type": kind, **{n: v for n, v in sizes.items() if n in CLASSES[kind].fields}})
        except Exception:
            continue
        if (mine := described(whole)) is None:
            continue
        names = sorted(GEOMETRY & whole.keys())
        computed = {*names} - CLASSES[kind].defaults.keys() - _OF_EACH_FILE
        for left_out in [*({name} for name in names), computed]:
            without = {n: value for n, value in whole.items() if n not in left_out}
            if (other := described(without)) is None or other == mine:
                continue
            try:
                theirs = described(saved(kind, without))
            except Exception:
                continue
            if other != theirs:
                found |= left_out if len(left_out) == 1 else left_out & {"layer_types"} or left_out
    return frozenset(found)


def table() -> dict[str, dict[str, Any]]:
    """The rows of all types, as JSON data."""
    import_module("transformers").logging.set_verbosity_error()
    CLASSES.clear()
    CLASSES.update({kind: row for kind in sorted(TYPES) if (row := row_of(kind)) is not None})
    rows: dict[str, dict[str, Any]] = {}
    for kind, row in CLASSES.items():
        if row.text:
            rows[kind] = {"text": row.text}
            continue
        defaults = {name: row.defaults[name] for name in sorted(row.defaults)}
        rows[kind] = {"fields": sorted(row.fields), "defaults": defaults, "derived": sorted(derived_of(kind))}
        if row.aliases:
            rows[kind]["aliases"] = dict(sorted(row.aliases.items()))
    return rows


def main() -> int:
    lines = [f"{json.dumps(kind)}: {json.dumps(row)}" for kind, row in table().items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--check" in sys.argv[1:]:
        stale = text != TABLE.read_text()
        print(f"{TABLE.name} {'differs from' if stale else 'is what'} the installed transformers {'has' * stale}")
        return int(stale)
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
