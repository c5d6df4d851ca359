"""`python -m tools.freeze NAME`: freeze today's wire format as a version that the suite meets from now on.

The version is self-contained: registry, vectors, and a testee with the suite's own strict codec.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import sys
from pathlib import Path

from kvproto_conformance.data import VECTORS
from tools.specgen.registry import ROOT, SPEC

__all__ = ["freeze", "main"]

KEPT = ROOT / "conformance/versions"
SUITE = ROOT / "conformance/kvproto_conformance"
_MODULES = (
    "codec/__init__.py",
    "codec/facts.py",
    "codec/reader.py",
    "codec/rules.py",
    "codec/writer.py",
    "negotiation.py",
)
_FOLDERS = ("codec", "plan")
"""Folders of vectors that are frozen; those of layouts and tiers are not about bytes between two sides."""
_FILES = ("json", "streams", "negotiation", "dcp", "lowering", "late", "inline")


def main(argv: list[str] | None = None) -> int:
    """Write the folder of a version; an existing version is never overwritten."""
    parser = argparse.ArgumentParser(prog="python -m tools.freeze", description=__doc__)
    parser.add_argument("name", help="the version's name, such as 1.0-rc-1")
    folder = KEPT / parser.parse_args(argv).name
    if folder.exists():
        print(f"error: {folder.relative_to(ROOT)} is frozen already, and does not change")
        return 1
    freeze(folder)
    print(f"frozen: {folder.relative_to(ROOT)}")
    return 0


def freeze(folder: Path) -> None:
    """Write today's registry, vectors, strict codec and testee to a new folder."""
    (folder / "codec").mkdir(parents=True)
    for module in _MODULES:
        (folder / module).write_text(_alone((SUITE / module).read_text()))
    shutil.copy(KEPT / "testee.py", folder)
    shutil.copy(SPEC / "registry.json", folder)
    paths = [p for name in _FOLDERS for p in sorted((VECTORS / name).glob("*.json"))]
    paths += [VECTORS / f"{name}.json" for name in _FILES]
    held = {path.relative_to(VECTORS).as_posix(): json.loads(path.read_text()) for path in paths}
    packed = json.dumps(held, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    (folder / "vectors.json.xz").write_bytes(lzma.compress(packed))


def _alone(text: str) -> str:
    """A module's text, changed so that it finds its neighbours and the registry in its own folder."""
    text = re.sub(r"from kvproto_conformance\.data import REGISTRY\n", "from pathlib import Path\n", text)
    text = text.replace("REGISTRY.read_text", 'Path(__file__).parents[1].joinpath("registry.json").read_text')
    return text.replace("from kvproto_conformance.codec", "from codec")


if __name__ == "__main__":
    sys.exit(main())
