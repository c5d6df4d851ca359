"""The `with` statement of what is closed at its end."""

from typing import Self


class Closing:
    """Closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what it holds."""
        raise NotImplementedError
