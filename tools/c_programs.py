"""Programs in C of `conformance/testees/c`, each compiled together with libkvproto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.specgen.registry import ROOT


def command(name: str, program: Path, flags: Sequence[str] = ("-std=c11", "-O2"), root: Path = ROOT) -> list[str]:
    """The command that compiles testee.c, source.c or sink.c, here or in a copy; the engines need libzmq."""
    library = root / "libkvproto"
    sources = [root / f"conformance/testees/c/{name}.c", library / "src/kvproto.c"]
    libraries = [] if name == "testee" else ["-lzmq"]
    return ["gcc", *flags, f"-I{library / 'include'}", "-o", str(program), *map(str, sources), *libraries]
