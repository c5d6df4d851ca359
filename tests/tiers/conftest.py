"""Folders in memory: killed writers and lost power are simulated, so most tests need no disk."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ON_DISK = {"test_stores", "test_packs_shared"}
"""Modules whose tests use the file system of the machine: its syncs and its holes."""


@pytest.fixture
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder, in memory if the machine has such a folder."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path_factory.mktemp("disk")
        return
    with TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, in memory if the module allows."""
    if request.module.__name__.rpartition(".")[2] in ON_DISK:
        return tmp_path_factory.mktemp("disk")
    return request.getfixturevalue("in_memory")  # type: ignore[no-any-return]
