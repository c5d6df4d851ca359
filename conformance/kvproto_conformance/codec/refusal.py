"""What a strict codec says no with."""

from __future__ import annotations


class Refusal(Exception):
    """An error code of the registry, and the path of what is wrong."""

    def __init__(self, code: str, path: str) -> None:
        super().__init__(f"{code} at {path!r}")
        self.code, self.path = code, path
