"""What the demo is at, for those who wait, and how long it took."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Clock:
    """The stages of a demo."""

    def __init__(self, console: Console | None) -> None:
        """`console`: where each stage is announced; None: nowhere."""
        self._console = console
        self.seconds: dict[str, float] = {}
        """That each stage took."""

    @contextlib.contextmanager
    def stage(self, name: str, says: str = "") -> Iterator[None]:
        """Time what is done inside; what it says stands on a terminal as long as it lasts, and elsewhere in a line."""
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
