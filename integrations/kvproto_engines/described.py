"""The Description of an engine, as a file that `kvproto check` and `kvproto plan` read."""

from __future__ import annotations

import os
from pathlib import Path

from kvproto import Pool
from kvproto_engines.settings import refuse

__all__ = ["write"]


def write(where: str, path: str | None, pool: Pool, replica: int) -> None:
    """Write the Description of an engine, as JSON, where its user asked for it: of all its ranks, by its first.

    `where` is what the user calls the settings. Raises LocalError where the file cannot be written.
    """
    if path is None or pool.rank:
        return
    file = Path(path.replace("{replica}", str(replica)))
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(pool.description + "\n")
        part.replace(file)  # whoever reads it sees all of it
    except OSError as error:
        raise refuse(where, "description", "a file that can be written", str(error), "correct its path") from None
