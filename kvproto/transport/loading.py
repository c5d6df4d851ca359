"""Finds transports by the entry-point group `kvproto.transports`."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from kvproto.errors import LocalError
from kvproto.transport.base import Pager, Provider, Regions, Transport
from kvproto.transport.bench import Measured
from kvproto.wire.enums import ErrorCode

GROUP = "kvproto.transports"


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def names() -> tuple[str, ...]:
    """The transports that installed packages provide, in alphabetical order; their libraries may be missing."""
    return tuple(_entries())


@cache
def find(name: str) -> Provider:
    """The provider of a transport, whether or not its libraries are installed; raises LocalError(NO_TRANSPORT)."""
    entry = _entries().get(name)
    if entry is None:
        advice = f"install a package with the entry point {name!r} in the group {GROUP}"
        wanted = f"one of {', '.join(names()) or 'none'}"
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", wanted, name, advice if names() else _INSTALL)
    try:
        provider = entry.load()
    except (ImportError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", entry.value, said, "reinstall its package") from error
    if not isinstance(provider, Provider):
        kind = type(provider).__name__
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", f"a Provider at {entry.value}", kind, "fix its package")
    return provider


def load(name: str) -> Provider:
    """The provider of a transport whose libraries are installed; raises LocalError(NO_TRANSPORT), saying what to do."""
    provider = find(name)
    missing = provider.missing()
    if missing is not None:
        wanted = f"{name}, which needs {missing}"
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", wanted, "not installed", provider.install)
    return provider


def opened(name: str, memory: Regions, measured: Sequence[Measured] = ()) -> Transport:
    """The transport of this name for a pool of these regions; raises LocalError(NO_TRANSPORT), saying what to do."""
    provider = find(name)
    if provider.missing() is not None and not any(map(provider.preference, memory.values())):
        # installing its library would not help
        fitting = ", ".join(repr(provider.name) for provider in _suited(memory)) or "none that is installed"
        wanted = f"a transport for {_kinds(memory)}: {fitting}"
        advice = "name one of these, none for the best, or allocate the pool where this one reaches it"
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", wanted, repr(name), advice)
    return load(name).open(memory, measured)


def usable() -> Iterator[Provider]:
    """The transports whose libraries are installed; raises LocalError(NO_TRANSPORT) if none is known at all."""
    if not names():
        raise LocalError(ErrorCode.NO_TRANSPORT, "transport", "kvproto's own", "no transport at all", _INSTALL)
    return (provider for provider in map(find, names()) if provider.missing() is None)


_INSTALL = "install kvproto itself (pip install -e . in a checkout): its metadata lists the transports"


def default(memory: Regions) -> Transport:
    """The transport that suits the memory of a pool best; raises LocalError(NO_TRANSPORT) if none suits all."""
    best = next(_suited(memory), None)
    if best is None:
        advice = "allocate it with kvproto.transport.memory, or install a transport for it"
        wanted = f"memory for one of {', '.join(names())}"
        raise LocalError(ErrorCode.NO_TRANSPORT, "pool", wanted, _kinds(memory), advice)
    return best.open(memory)


def pager(memory: Regions, stream: int = 0) -> Pager:
    """The best pager between a pool and the host after the engine's `stream`; raises LocalError(NO_TRANSPORT)."""
    devices = {region.device for region in memory.values()}
    for provider in _suited(memory) if len(devices) == 1 else ():
        if (pager := provider.pager(memory, stream)) is not None:
            return pager
    advice = "allocate it with kvproto.transport.memory, one GPU's or the host's"
    raise LocalError(ErrorCode.NO_TRANSPORT, "pool", "memory of one GPU, or of the host", _kinds(memory), advice)


def _suited(memory: Regions) -> Iterator[Provider]:
    """The transports that suit all regions, the best first."""
    ranked = [(min((p.preference(m) for m in memory.values()), default=0), p) for p in usable()]
    return (p for rank, p in sorted(ranked, key=lambda pair: -pair[0]) if rank)


def _kinds(memory: Regions) -> str:
    return ", ".join(sorted({f"{type(m).__name__} on {m.kind.name}" for m in memory.values()})) or "no memory"
