"""One member of etcd for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .members import Member, running


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    with running(tmp_path / "etcd") as made:
        yield made
