"""Modules that are otherwise than their files: a change is a module's name and the text that stands in its place."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

from tools.specgen.registry import ROOT

Changes = Mapping[str, str]


_BESIDE = "reference"
"""The folder of modules that are not named by the way from the root."""


def module_of(file: str) -> str:
    """Name of the module of a file of the repository."""
    return file.removesuffix(".py").removeprefix(f"{_BESIDE}/").replace("/", ".")


def _file_of(module: str) -> str:
    path = module.replace(".", "/") + ".py"
    return str(next(file for file in (ROOT / path, ROOT / _BESIDE / path) if file.is_file()))


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, text: str, path: str) -> None:
        self._text, self._path = text, path

    def get_source(self, fullname: str) -> str:
        return self._text

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, self._path, "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        file = _file_of(name)
        spec = importlib.util.spec_from_loader(name, _Loader(self._changes[name], file), origin=file)
        assert spec is not None
        spec.has_location = True
        return spec


def change(changes: Changes) -> None:
    """Let the modules be these from now on; kvproto must not be imported before."""
    assert not any(name.split(".")[0] == "kvproto" for name in sys.modules), "kvproto is imported already"
    sys.meta_path.insert(0, _Finder(changes))
