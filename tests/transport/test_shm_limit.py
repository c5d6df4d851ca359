"""How much host memory could be allocated at most, by what the kernel says."""

from pathlib import Path

import pytest

from kvproto.transport.shm.memory import allocatable_bytes

MEMORY = """\
MemTotal:       1000 kB
MemFree:         100 kB
MemAvailable:    150 kB
Buffers:          10 kB
Cached:          200 kB
Shmem:            50 kB
SwapFree:          7 kB
SReclaimable:      5 kB
"""
FREE = (100 + 10 + 200 + 5 - 50 + 7) * 1024
"""What is free, and what is once caches are dropped and swap is full; shared memory is none of these caches."""


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "pod/engine").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMORY)
    (proc / "self/cgroup").write_text("0::/pod/engine\n")
    return proc, groups


def test_a_machine(machine: tuple[Path, Path]) -> None:
    assert allocatable_bytes(*machine) == FREE


def test_what_the_kernel_counts_as_available_is(machine: tuple[Path, Path]) -> None:
    (machine[0] / "meminfo").write_text(MEMORY.replace("150", "900"))
    assert allocatable_bytes(*machine) == (900 + 7) * 1024


@pytest.mark.parametrize("folder", ["pod/engine", "pod", ""])
def test_a_limit_of_a_group_or_of_one_above_it(machine: tuple[Path, Path], folder: str) -> None:
    place = machine[1] / folder
    (place / "memory.max").write_text("30000\n")
    (place / "memory.stat").write_text("anon 9000\nfile 12000\nshmem 1000\n")
    assert allocatable_bytes(*machine) == 20000 + 7 * 1024
    (place / "memory.stat").write_text("anon 90000\n")
    assert allocatable_bytes(*machine) == 7 * 1024
    (place / "memory.max").write_text("max\n")
    assert allocatable_bytes(*machine) == FREE


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert allocatable_bytes(tmp_path, tmp_path) is None
