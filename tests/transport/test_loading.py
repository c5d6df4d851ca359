"""Transports are found by their entry points, and what cannot be used says what to do."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from kvproto.calibration import LEAST_MEMORY, probe
from kvproto.errors import LocalError
from kvproto.transport import default, find, load, loading, names
from kvproto.transport.base import Provider
from kvproto.transport.memory import allocate
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, MemoryKind
from tests.errors import raises


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, EntryPoint]]:
    """Entry points in place of those of this environment."""
    made: dict[str, EntryPoint] = {}
    monkeypatch.setattr(loading, "_entries", lambda: made)
    find.cache_clear()
    yield made
    find.cache_clear()


class Absent(Provider):
    """A transport whose library is not here."""

    name = "absent"
    requires = ("kvproto", "kvproto_no_such_library")
    install = "pip install 'kvproto[absent]'"

    def preference(self, memory: Any) -> int:
        return 9

    def open(self, memory: Any, measured: Any = ()) -> Any:
        raise AssertionError("it is not installed")

    def bench(self, memory: int, gpus: int) -> Any:
        raise AssertionError("it is not installed")


ABSENT = Absent()


def refused(name: str) -> LocalError:
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="transport") as caught:
        load(name)
    return caught.value


def test_kvproto_installs_its_transports() -> None:
    assert {"cuda", "inline", "nixl", "shm"} <= set(names())
    for name in names():
        assert find(name).name == name


def test_a_transport_without_its_library_says_what_to_install(entries: dict[str, EntryPoint]) -> None:
    entries["absent"] = EntryPoint("absent", f"{__name__}:ABSENT", loading.GROUP)
    error = refused("absent")
    assert error.mine == "absent, which needs kvproto_no_such_library"
    assert error.advice == "pip install 'kvproto[absent]'"


@pytest.mark.parametrize("value", ["no_such_module:X", "kvproto.errors:NO_SUCH_NAME", "kvproto.errors:KvprotoError"])
def test_an_entry_point_that_leads_nowhere_is_named(value: str, entries: dict[str, EntryPoint]) -> None:
    entries["broken"] = EntryPoint("broken", value, loading.GROUP)
    assert value in refused("broken").mine


def test_an_unknown_name_lists_those_there_are(entries: dict[str, EntryPoint]) -> None:
    assert "install kvproto itself" in refused("pigeon").advice
    entries["shm"] = EntryPoint("shm", "kvproto.transport.shm.provider:PROVIDER", loading.GROUP)
    assert refused("pigeon").mine == "one of shm"
    assert load("shm").name == "shm"


def test_a_pool_gets_the_transport_that_suits_its_memory(entries: dict[str, EntryPoint]) -> None:
    entries["absent"] = EntryPoint("absent", f"{__name__}:ABSENT", loading.GROUP)
    entries["shm"] = EntryPoint("shm", "kvproto.transport.shm.provider:PROVIDER", loading.GROUP)
    assert isinstance(default({0: SharedMemory(16), 3: SharedMemory(16)}), ShmTransport)


class Plain:
    """Host memory that no other process can map."""

    id, length, kind, device = 0, 16, MemoryKind.HOST, None

    def __init__(self) -> None:
        self.array = np.zeros(16, np.uint8)


@pytest.mark.parametrize("memory", [{}, {0: Plain()}, {0: SharedMemory(16), 1: Plain()}])
def test_memory_that_no_transport_suits_is_refused(memory: Any, entries: dict[str, EntryPoint]) -> None:
    entries["shm"] = EntryPoint("shm", "kvproto.transport.shm.provider:PROVIDER", loading.GROUP)
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="pool") as caught:
        default(memory)
    assert "kvproto.transport.memory" in caught.value.advice


def test_what_is_measured_and_what_is_absent_comes_from_the_provider(entries: dict[str, EntryPoint]) -> None:
    entries["absent"] = EntryPoint("absent", f"{__name__}:ABSENT", loading.GROUP)
    entries["shm"] = EntryPoint("shm", "kvproto.transport.shm.provider:PROVIDER", loading.GROUP)
    found = probe(quick=True, memory=LEAST_MEMORY)
    assert [(a.what, a.reason, a.advice) for a in found.absent] == [("absent", "not installed", ABSENT.install)]
    assert [m.transport for m in found.measured] == ["shm"]


def test_a_checkout_that_is_not_installed_says_so(entries: dict[str, EntryPoint]) -> None:
    """Transports are found by kvproto's metadata, which a checkout that is only on the path lacks."""
    for ask in (lambda: find("shm"), lambda: allocate(8)):
        with pytest.raises(LocalError, match="install kvproto itself") as refused:
            ask()
        assert refused.value.code is ErrorCode.NO_TRANSPORT
