"""Modules and code that every child would load and compile again: loaded once, before the first fork. No kvproto."""

from __future__ import annotations

import gc
import importlib
import json
from types import CodeType
from typing import Any

from attr import _make

from tools.prove.children import in_children
from tools.prove.judging import within

_LIBRARIES = (
    "numpy",
    "numpy.ma",
    "numpy.typing",
    "msgpack",
    "zmq",
    "hypothesis",
    "psutil",
    "ctypes",
    "uuid",
    "asyncio",
)
_LIMIT = 60.0
_compiled: dict[tuple[str, str], CodeType] = {}


def warm() -> None:
    """Load the libraries of kvproto and of its tests, and compile what attrs writes for its classes."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    ((_, text, _),) = in_children([("what attrs writes", _written)], 1, _LIMIT)
    for script, filename in json.loads(text):
        _compiled[script, filename] = compile(script, filename, "exec")
    vars(_make)["compile"] = _compile
    gc.collect()
    gc.freeze()  # what is here stays, and is nothing to look at in a child


def _compile(script: str, filename: str, mode: str) -> CodeType:
    return _compiled.get((script, filename)) or compile(script, filename, mode)


def _written() -> str:
    """The sources that attrs compiles while kvproto is imported, as JSON."""
    found: list[tuple[str, str]] = []

    def noting(script: str, filename: str, mode: str) -> Any:
        found.append((script, filename))
        return compile(script, filename, mode)

    vars(_make)["compile"] = noting
    within()
    return json.dumps(found)
