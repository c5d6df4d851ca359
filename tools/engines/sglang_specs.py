"""Statements of the back end about each class of pool that an SGLang has: `ENGINE/python -m tools.engines.sglang_specs`.

Every class that holds a model's cache, wherever the package defines it, is stated, is a part of one that is, or is refused
with what it holds; so is every type of component of a request's state. None is unknown, and none is named that is gone.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import sglang
from sglang.srt.disaggregation.base.conn import StateType

from kvproto_sglang.pools.classes import KINDS
from kvproto_sglang.pools.refusals import COMPONENTS, REFUSED
from kvproto_sglang.pools.states import SIBLINGS, STATES
from tests.sglang.families import FAMILIES
from tests.sglang.kinds import KINDS as TRIED
from tools.engines.sglang_engine import told

_ROOTS = {"KVCache", "MambaPool", "CompressStatePool", "ShortConvPool", "NGramPool", "DeepSeekV4UnifiedKVPool"}
"""Classes from which those with a model's cache derive, or that hold some themselves."""
_OTHER = {"CompressStatePool": "a part of DeepSeekV4TokenToKVPool"}
"""Roots that are parts of a pool that is stated."""


def classes() -> set[str]:
    """Names of the classes that derive from a root, in all files of the package."""
    bases: dict[str, set[str]] = {}
    for path in (Path(sglang.__file__).parent / "srt").rglob("*.py"):
        text = path.read_text()
        if "Pool" not in text and "KVCache" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                named = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases.setdefault(node.name, set()).update(named)
    found = _ROOTS & bases.keys()
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - {"KVCache"}


def unknown(found: set[str], stated: set[str], refused: set[str]) -> list[str]:
    """Names that are neither stated nor refused, that are both, or that the package does not have."""
    lines = [f"{name} is not known" for name in sorted(found - stated - refused)]
    lines += [f"{name} is stated and refused" for name in sorted(stated & refused)]
    return lines + [f"no {name}" for name in sorted((stated | refused) - found)]


def main() -> int:
    """Print what is counted, and what is unknown; the exit status."""
    found, stated = classes(), {*KINDS, *STATES, *SIBLINGS, *_OTHER}
    lines = unknown(found, stated, {*REFUSED})
    count = f"{len(found & stated)} classes of pools stated and {len(found - stated)} refused by name"
    wrong = told(f"sglang {sglang.__version__}, {count}", lines)
    types = {each.value for each in StateType}
    handed = {name for each in TRIED.values() for name in each.states}
    handed |= {name for each in FAMILIES.values() for name in each.states}
    count = f"{len(types & handed)} components of a state stated and {len(types - handed)} refused by name"
    wrong |= told(f"sglang {sglang.__version__}, {count}", unknown(types, handed, {*COMPONENTS}))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
