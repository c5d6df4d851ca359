"""The account of a scenario for people: its script, the helpers that it calls, and what each of its steps is."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Scenario
from kvproto_conformance.live.sink import Sink
from kvproto_conformance.live.source import Source

_SIDES: dict[str, tuple[type, type]] = {"source": (PrefillRun, Sink), "sink": (DecodeRun, Source)}
"""By the role of the engine: what runs the script, and what the suite's side is."""
_HELPERS = "kvproto_conformance.live.scenarios"
"""The package of functions that scripts call."""


def described(scenario: Scenario) -> str:
    """The engine that a scenario wants, then the script of the suite's side, its helpers and its steps."""
    over = scenario.transport
    if over == "SHM" and scenario.maps:
        over = "SHM; an engine without SHM is not asked this"
    elif over == "SHM":
        over = "SHM, or over INLINE where it has no SHM"
    functions = list(_reached(scenario.script))
    steps = dict(sorted(step for each in functions for step in _steps(each, _SIDES[scenario.role])))
    parts = [f"An engine of role {scenario.role}, world {scenario.world}, over {over}. The suite's side:"]
    parts += [_text(each) for each in functions]
    parts.append("where each step is:\n" + "\n".join(f"    {name}: {says}" for name, says in steps.items()))
    return "\n\n".join(parts) + "\n"


def _reached(script: Callable[..., Any]) -> Iterator[FunctionType]:
    """A script, and each function that it or one of these calls, once."""
    waiting: list[Any] = [getattr(script, "func", script)]
    met: set[Any] = set()
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, FunctionType) or each in met or not each.__module__.startswith(_HELPERS):
            continue
        met.add(each)
        yield each
        waiting += _held(each).values()
        waiting += [each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__]


def _held(function: FunctionType) -> dict[str, Any]:
    """The values that a function of a table was made with."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _steps(function: FunctionType, sides: tuple[type, type]) -> Iterator[tuple[str, str]]:
    """Methods that a function may call, with the first line of what each says of itself."""
    for name in _names(function.__code__):
        for side, who in zip(sides, ("run", "peer"), strict=True):
            doc = inspect.getdoc(getattr(side, name, None)) if not name.startswith("_") else None
            if doc and name in {each for base in side.__mro__[:-1] for each in vars(base)}:
                yield f"{who}.{name}", doc.partition("\n")[0]


def _text(function: FunctionType) -> str:
    """The source of a function, and what it was made with."""
    plain = {name: value for name, value in _held(function).items() if not callable(value)}
    made = "".join(f"# {name} = {value!r}\n" for name, value in plain.items())
    return made + textwrap.dedent(inspect.getsource(function)).rstrip()
