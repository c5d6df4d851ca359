"""Announces each stage of the demo while it runs, and measures how long it took."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Clock:
    """Announces and times the stages of a demo."""

    def __init__(self, console: Console | None) -> None:
        """Announce each stage at `console`; None announces nothing."""
        self._console = console
        self.seconds: dict[str, float] = {}
        """The duration of each stage, by its name."""

    @contextlib.contextmanager
    def stage(self, name: str, says: str = "") -> Iterator[None]:
        """Time the block; a terminal shows `says` while it runs, any other console prints it as a line first."""
        begun = time.monotonic()
        if self._console is None or not says:
            yield
        elif self._console.is_terminal:
            with self._console.status(says):
                yield
        else:
            self._console.print(f"{says} ...")
            yield
        self.seconds[name] = time.monotonic() - begun
