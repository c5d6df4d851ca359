"""One member of etcd for each test."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .members import Member


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    made = Member(tmp_path / "etcd")
    made.start()
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.signal(signal.SIGKILL)
