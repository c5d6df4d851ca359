"""Lets SGLang run on the CPU without the packages of kernels: what it imports of them are names that nothing calls, but one.

Python runs this file at its start where its folder is on PYTHONPATH; it acts only with SGLANG_USE_CPU_ENGINE=1.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = ("torchvision", "sgl_kernel")


def assign_req_to_token_pool_cpu(rows: Any, table: Any, start: Any, end: Any, places: Any, width: int) -> None:
    """The one kernel that an engine on the CPU does call: into which slots the new tokens of each request go."""
    at = 0
    for row, lo, hi in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, lo:hi] = places[at : at + hi - lo].to(table.dtype)
        at += hi - lo


def refused(name: str) -> Any:
    """A function that says that it is not here."""

    def call(*args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{name} is not on this machine")

    return call


class Absent(ModuleType):
    """A module in which every name is found."""

    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ != "sgl_kernel":
            return MagicMock(name=name)
        return assign_req_to_token_pool_cpu if name == "assign_req_to_token_pool_cpu" else refused(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are absent."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        absent = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names come as they are asked for."""


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, Finder())
