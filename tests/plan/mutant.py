"""Runs code under a changed copy of kvproto, in this process: one source file is rewritten as it is imported."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kvproto

PACKAGE = Path(kvproto.__file__).parent
_BELOW = ("kvproto.errors", "kvproto.wire")
"""Import nothing of what is changed here, so that they need not be imported again."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the file with its rule replaced; nothing is cached on disk."""

    def __init__(self, name: str, path: str, rule: str, faulty: str) -> None:
        super().__init__(name, path)
        self._rule, self._faulty = rule.encode(), faulty.encode()

    def get_code(self, fullname: str) -> object:
        return compile(self.get_data(self.path).replace(self._rule, self._faulty), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, loader: _Loader) -> None:
        self._name, self._loader, self.used = name, loader, False

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        self.used = True
        return importlib.machinery.ModuleSpec(name, self._loader, origin=self._loader.path)


def _fresh(name: str, module: str) -> bool:
    """Whether the module of this name is imported again with the mutant."""
    return name == module or (name.split(".")[0] == "kvproto" and not name.startswith(_BELOW))


@contextlib.contextmanager
def mutant(file: str, rule: str, faulty: str, module: str) -> Iterator[ModuleType]:
    """Gives `module`, imported afresh with kvproto above the codec; in kvproto/`file`, `faulty` stands in place of `rule`.

    The modules of before are put back at the end, so no other test sees the mutant.
    """
    path = PACKAGE / file
    assert path.read_text().count(rule) == 1, f"{file} holds {rule!r} {path.read_text().count(rule)} times, not once"
    name = ".".join(("kvproto", *Path(file).with_suffix("").parts))
    finder = _Finder(name, _Loader(name, str(path), rule, faulty))
    assert not name.startswith(_BELOW)
    before = {key: sys.modules.pop(key) for key in [*sys.modules] if _fresh(key, module)}
    parent, _, leaf = module.rpartition(".")
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(module)
        assert finder.used, f"{module} does not import {name}"
    finally:
        sys.meta_path.remove(finder)
        for key in [*sys.modules]:
            if _fresh(key, module):
                del sys.modules[key]
        sys.modules.update(before)
        if module in before:
            setattr(sys.modules[parent], leaf, before[module])
