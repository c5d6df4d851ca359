"""The results of measuring a machine's transports, and the file that keeps them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attrs

from kvproto.errors import LocalError, WireError
from kvproto.transport import find, names
from kvproto.transport.bench import Absent, Floor, Measured
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_json

__all__ = ["Host", "Probe", "Slow", "floors", "load", "save"]

_VERSION = 1


@cache
def floors() -> tuple[Floor, ...]:
    """The floors of all transports, with which `Probe.slow` compares."""
    return tuple(floor for name in names() for floor in find(name).floors)


@attrs.frozen
class Slow:
    """A path that is slower than it should be; rates are in bytes a second, and None if there is no path at all."""

    what: str
    rate: float | None
    floor: float | None
    advice: str
    """What to look at; if there is no path, also what went wrong."""


@attrs.frozen
class Host:
    """The machine that the figures depend on."""

    cpus: int
    machine: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None


@attrs.frozen
class Probe:
    """The results of one `kvproto probe`."""

    date: str
    """ISO 8601, UTC."""
    quick: bool
    memory: int
    """Bytes that it was allowed to use."""
    host: Host
    measured: tuple[Measured, ...]
    absent: tuple[Absent, ...] = ()

    def slow(self) -> tuple[Slow, ...]:
        """Paths below their floor, and missing paths that should be there."""
        below = [
            Slow(m.name, m.rate, f.floor, f.advice)
            for m in self.measured
            for f in floors()
            if f.transport == m.transport and m.way in f.ways and f.gpus == m.gpus
            and not (m.gpus and m.source == m.sink) and m.rate < f.floor
        ]  # fmt: skip
        missing = [
            Slow(a.what, None, None, "; ".join(filter(None, (a.reason, a.advice)))) for a in self.absent if a.slow
        ]
        return (*below, *missing)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file; its `slow` is for readers, as it follows from the rest."""
        made: dict[str, Any] = {"kvproto_probe": _VERSION, **attrs.asdict(self)}
        return made | {"slow": [attrs.asdict(s) for s in self.slow()]}

    @classmethod
    def from_dict(cls, data: Any) -> Probe:
        """The inverse of `to_dict`; unknown fields are ignored.

        Raises LocalError: UNSUPPORTED_VERSION, or MISSING_FIELD, BAD_TYPE, OUT_OF_RANGE with the path of what is wrong.
        """
        _check(data, (dict,), "an object", "")
        version = _field(data, "", "kvproto_probe", int)
        if version != _VERSION:
            said = str(_VERSION), str(version), "probe with this kvproto"
            raise LocalError(ErrorCode.UNSUPPORTED_VERSION, "kvproto_probe", *said)
        made: Probe = _read(cls, data, "")
        for i, measured in enumerate(made.measured):
            if not measured.samples:
                raise LocalError(ErrorCode.OUT_OF_RANGE, f"measured[{i}].samples", "a sample", "none")
        return made


def save(found: Probe, path: Path) -> None:
    """Write the file; raises OSError."""
    path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def load(path: Path) -> Probe:
    """Read the file; raises LocalError with the path of the file and of what is wrong in it."""
    advice = "write one with `kvproto probe --out FILE`"
    try:
        data = read_json(path.read_bytes(), str(path), finite=False)  # from_dict refuses these, with a path
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise LocalError(ErrorCode.OUT_OF_RANGE, str(path), "a file of `kvproto probe`", said, advice) from None
    except WireError as error:
        raise LocalError(error.code, error.path, error.mine, error.yours, advice) from None
    try:
        return Probe.from_dict(data)
    except LocalError as error:
        where = f"{path}: {error.path}" if error.path else str(path)
        raise LocalError(error.code, where, error.mine, error.yours, error.advice or advice) from None


_SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"), str: ((str,), "a string"),
    bool: ((bool,), "true or false"),
}  # fmt: skip
"""The types that JSON may have for each of ours, and their names in errors."""


def _read(kind: Any, data: Any, path: str, least: float | None = None) -> Any:
    """A value of type `kind` from what `attrs.asdict` and JSON made of it; numbers are positive, or equal `least`."""
    if attrs.has(kind):
        _check(data, (dict,), "an object", path)
        types = get_type_hints(kind)
        return kind(**{f.name: _field(data, path, f.name, types[f.name], f.default) for f in attrs.fields(kind)})
    if get_origin(kind) is tuple:
        _check(data, (list, tuple), "a list", path)
        return tuple(_read(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if get_origin(kind) is UnionType:
        return None if data is None else _read(get_args(kind)[0], data, path)
    _check(data, *_SCALARS[kind], path)
    if kind in (int, float):
        if not 0 < data < 1e300 and data != least:
            raise LocalError(ErrorCode.OUT_OF_RANGE, path, "a positive number", str(data)[:40])
        return kind(data)
    return data


def _field(data: dict[str, Any], path: str, name: str, kind: Any, least: float | None = None) -> Any:
    where = f"{path}.{name}" if path else name
    if name not in data:
        raise LocalError(ErrorCode.MISSING_FIELD, where, _SCALARS.get(kind, (None, "a value"))[1], "nothing")
    return _read(kind, data[name], where, least)


def _check(value: Any, types: tuple[type, ...], wanted: str, path: str) -> None:
    if type(value) not in types:
        raise LocalError(ErrorCode.BAD_TYPE, path, wanted, type(value).__name__)
