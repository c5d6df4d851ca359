"""What was found when a machine's transports were measured, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.transport import find, names
from kvproto.transport.bench import Absent, Constants, Floor, Measured, Sample
from kvproto.wire.enums import ErrorCode

__all__ = ["Host", "Probe", "Slow", "floors", "load", "save"]

_VERSION = 1


@cache
def floors() -> tuple[Floor, ...]:
    """What `Probe.slow` compares with: the floors of all transports that kvproto knows."""
    return tuple(floor for name in names() for floor in find(name).floors)


@attrs.frozen
class Slow:
    """A path that is not what it should be; rates in bytes a second, None where there is no path at all."""

    what: str
    rate: float | None
    floor: float | None
    advice: str
    """What to look at; where there is no path, what went wrong too."""


@attrs.frozen
class Host:
    """What of a machine the figures depend on."""

    cpus: int
    machine: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None


@attrs.frozen
class Probe:
    """All that was found in one go."""

    date: str
    """ISO 8601, UTC."""
    quick: bool
    memory: int
    """Bytes that it was allowed."""
    host: Host
    measured: tuple[Measured, ...]
    absent: tuple[Absent, ...] = ()

    def slow(self) -> tuple[Slow, ...]:
        """Paths below their floor, and those that should be there."""
        found = [
            Slow(m.name, m.rate, f.floor, f.advice)
            for m in self.measured
            for f in floors()
            if f.transport == m.transport and m.way in f.ways and f.gpus == m.gpus
            and not (m.gpus and m.source == m.sink) and m.rate < f.floor
        ]  # fmt: skip
        for a in self.absent:
            if a.slow:
                found.append(Slow(a.what, None, None, "; ".join(filter(None, (a.reason, a.advice)))))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds; `slow` is for readers, and follows from the rest."""
        made: dict[str, Any] = {"kvproto_probe": _VERSION, **attrs.asdict(self)}
        return made | {"slow": [attrs.asdict(s) for s in self.slow()]}

    @classmethod
    def from_dict(cls, data: Any) -> Probe:
        """The inverse; fields that are not known are passed over.

        Raises LocalError: UNSUPPORTED_VERSION, or MISSING_FIELD, BAD_TYPE, OUT_OF_RANGE with the path of what is wrong.
        """
        top = _Reader(data, "")
        version = top.number("kvproto_probe", whole=True)
        if version != _VERSION:
            raise LocalError(
                ErrorCode.UNSUPPORTED_VERSION, "kvproto_probe", str(_VERSION), str(version), "probe with this kvproto"
            )
        host = top.inner("host")
        return cls(
            top.text("date"), top.flag("quick"), int(top.number("memory", whole=True)),
            Host(
                int(host.number("cpus", whole=True)), host.text("machine"),
                host.texts("gpus"), host.text("driver", none=True) or None,
            ),
            tuple(_measured(m) for m in top.each("measured")),
            tuple(_absent(a) for a in top.each("absent")),
        )  # fmt: skip


def save(found: Probe, path: Path) -> None:
    """Write the file; raises OSError."""
    path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def load(path: Path) -> Probe:
    """Read the file; raises LocalError with the path of the file and of what is wrong in it."""
    advice = "write one with `kvproto probe --out FILE`"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise LocalError(ErrorCode.OUT_OF_RANGE, str(path), "a file of `kvproto probe`", said, advice) from None
    except (ValueError, RecursionError) as error:
        raise LocalError(ErrorCode.BAD_TYPE, str(path), "JSON", str(error), advice) from None
    try:
        return Probe.from_dict(data)
    except LocalError as error:
        where = f"{path}: {error.path}" if error.path else str(path)
        raise LocalError(error.code, where, error.mine, error.yours, error.advice or advice) from None


def _absent(data: _Reader) -> Absent:
    return Absent(data.text("what"), data.text("reason"), data.text("advice"), data.flag("slow"))


def _measured(data: _Reader) -> Measured:
    inner = data.inner("constants")
    link, run, start = (inner.number(n) for n in ("link", "run", "start"))
    constants = Constants(link, run, start, inner.number("error", least=0))
    samples = tuple(
        Sample(int(s.number("run", whole=True)), int(s.number("runs", whole=True)), s.number("seconds"))
        for s in data.each("samples")
    )
    if not samples:
        raise LocalError(ErrorCode.OUT_OF_RANGE, f"{data.path}.samples", "a sample", "none")
    transport, way, source, sink = (data.text(n) for n in ("transport", "way", "source", "sink"))
    return Measured(transport, way, source, sink, samples, constants)


@attrs.frozen
class _Reader:
    """An object of JSON, its fields by name and type."""

    data: Any
    path: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.data, dict):
            raise LocalError(ErrorCode.BAD_TYPE, self.path, "an object", type(self.data).__name__)

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def _take(self, name: str, kinds: tuple[type, ...], wanted: str) -> Any:
        if name not in self.data:
            raise LocalError(ErrorCode.MISSING_FIELD, self.at(name), wanted, "nothing")
        value = self.data[name]
        if type(value) not in kinds:
            raise LocalError(ErrorCode.BAD_TYPE, self.at(name), wanted, type(value).__name__)
        return value

    def number(self, name: str, whole: bool = False, least: float | None = None) -> float:
        """A positive one, or one of at least `least`."""
        wanted = "a whole number" if whole else "a number"
        value = self._take(name, (int,) if whole else (int, float), wanted)
        if not 0 < value < 1e300 and not (least is not None and least <= value < 1e300):
            raise LocalError(ErrorCode.OUT_OF_RANGE, self.at(name), "a positive number", f"{value:.6g}"[:40])
        return value if whole else float(value)

    def text(self, name: str, none: bool = False) -> str:
        """A string; with `none` an empty one for null."""
        return self._take(name, (str, type(None)) if none else (str,), "a string") or ""

    def flag(self, name: str) -> bool:
        """True or false."""
        return bool(self._take(name, (bool,), "true or false"))

    def inner(self, name: str) -> _Reader:
        """An object within."""
        return _Reader(self._take(name, (dict,), "an object"), self.at(name))

    def each(self, name: str) -> Iterator[_Reader]:
        """A list of objects."""
        for i, item in enumerate(self._take(name, (list, tuple), "a list")):
            yield _Reader(item, f"{self.at(name)}[{i}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        made: Sequence[Any] = self._take(name, (list, tuple), "a list")
        for i, item in enumerate(made):
            if type(item) is not str:
                raise LocalError(ErrorCode.BAD_TYPE, f"{self.at(name)}[{i}]", "a string", type(item).__name__)
        return tuple(made)
