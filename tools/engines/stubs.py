"""Stand-ins for what an engine's package imports besides the code that is run: CUDA, servers, its own models.

`install(tree, owner, real)` puts `tree`, an unpacked wheel, first on the path. Of its package `owner` only what is named
in `real` is imported; the rest, and other libraries, become `Stub`s.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Stub:
    """Stands for anything: its attributes are Stubs, a call returns what it decorates, a base class disappears."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args: Any, **named: Any) -> Any:
        alone = len(args) == 1 and not named and (callable(args[0]) and not isinstance(args[0], Stub))
        return args[0] if alone else Stub()

    def __getitem__(self, key: Any) -> Stub:
        return Stub()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, owner: str, real: Sequence[str]) -> None:
        self.owner, self.real = owner, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == r or name.startswith(f"{r}.") or r.startswith(f"{name}.") for r in self.real):
            return None
        root = name.partition(".")[0]
        if root != self.owner and (root in sys.stdlib_module_names or root in _KEPT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


_KEPT = ("numpy", "msgpack", "msgspec", "nixl", "nixl_cu12", "typing_extensions")


def install(tree: Path, owner: str, real: Sequence[str]) -> None:
    """Import packages `real` of `owner` from `tree`, and stand-ins for the rest; parents of `real` are bare packages."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    sys.meta_path.insert(0, _Finder(owner, real))
    for name in sorted({".".join(r.split(".")[:n]) for r in real for n in range(1, len(r.split(".")))}):
        bare = ModuleType(name)
        bare.__path__ = [str(tree / name.replace(".", "/"))]
        sys.modules[name] = bare
