"""The most host memory that could be allocated: Linux grants shared memory that it lacks, and then kills a process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["room"]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def room(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """The bytes that would be free if every cache were dropped and swap were full; None if the kernel does not say.

    It is never less than what can be allocated, unless others free memory meanwhile. The limits of the memory cgroups
    that this process is in count too.
    """
    memory = _table(proc / "meminfo", 1024)
    swap = memory.get("SwapFree", 0)
    found = []
    if "MemFree" in memory:
        dropped = sum(memory.get(name, 0) for name in ("Buffers", "Cached", "SwapCached", "SReclaimable"))
        found.append(max(memory["MemFree"] + dropped - memory.get("Shmem", 0), memory.get("MemAvailable", 0)) + swap)
    for folder in _folders(proc, groups):
        limit, use = _limit(folder / "memory.max"), _table(folder / "memory.stat", 1)
        if limit is not None:
            found.append(max(limit - use.get("anon", 0) - use.get("shmem", 0), 0) + swap)
    return min(found, default=None)


def _folders(proc: Path, groups: Path) -> list[Path]:
    """The folder of this process's cgroup (v2) and of each above it, as far as they can be seen here."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in own:
        return []
    inner = groups / own.lstrip("/")
    return [each for each in (inner, *inner.parents) if each == groups or groups in each.parents]


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _table(file: Path, unit: int) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line, in bytes; empty if it cannot be read."""
    try:
        rows = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}
