"""The specification's version in files of which only this follows from the registry."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from tools.specgen.registry import ROOT, SPEC, Facts, version

_VECTORS = re.compile(r'(?<="version": ")[^"]+(?=")')
_TEXT = re.compile(r"((?<=`kvproto )|(?<=^Spec )|(?<=pecification is ))\d+\.\d+(-\w+)?(?=\W)", re.MULTILINE)
_PAGES = [ROOT / page for page in ("README.md", "conformance/README.md", "docs/index.md", "docs/faq.md")]


def stamped(facts: Facts, made: Container[Path]) -> dict[Path, str]:
    """Vectors that scripts and hands have made, and pages that show a verdict, with today's version."""
    now = version(facts)
    vectors = [path for path in sorted((SPEC / "vectors").rglob("*.json")) if path not in made]
    return {path: _VECTORS.sub(now, path.read_text(), count=1) for path in vectors} | {
        path: _TEXT.sub(now, path.read_text()) for path in _PAGES
    }
