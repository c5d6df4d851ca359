"""What the adapter says of each class of cache that a vLLM has: `ENGINE/python -m tools.engines.vllm_specs`.

Every class of specification, wherever the package defines it, and every kind of state is stated, or refused with a reason.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import vllm
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvproto_vllm.specs import REFUSED, STATED
from kvproto_vllm.states import KINDS

_ROOT = "KVCacheSpec"
_NO_CACHES = {"AttentionSpec", "UniformTypeKVCacheSpecs"}
"""What others derive from, and a case for specifications of several layers."""
_OTHERS = {"CUSTOM"}
"""Kinds of states that a plugin registers."""


def classes() -> set[str]:
    """Names of the classes that derive from the root, in all files of the package."""
    bases: dict[str, set[str]] = {}
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "Spec)" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    found = {_ROOT}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - {_ROOT} - _NO_CACHES


def main() -> int:
    """Print what is counted and what is missing; the exit status."""
    found, kinds = classes(), {each.name for each in MambaAttentionBackendEnum} - _OTHERS
    said = {*STATED, *REFUSED}
    missing = sorted(found - said) + sorted(kinds - {each.upper() for each in KINDS})
    newest = vllm.__version__.startswith("0.33")
    missing += [f"no {name}" for name in sorted(said - found) if newest]
    stated = len(found & {*STATED})
    print(
        f"{'DIFFERS' if missing else 'same   '} vllm {vllm.__version__}: {stated} classes of caches are stated and "
        f"{len(found) - stated} refused by name, {len(kinds)} kinds of states are stated",
        *missing,
        sep="\n        ",
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
