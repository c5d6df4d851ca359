"""Errors that the reference engines raise."""

from kvproto.errors import KvprotoError


class EngineError(ValueError):
    """Bad configuration, missing file or misuse of the engine; the message says which."""


class OutOfPages(EngineError):
    """The pool has fewer free pages than were requested."""


def code_of(error: Exception) -> str | None:
    """The name of kvproto's error code, by which a router decides; None for the engine's own errors."""
    return error.code.name if isinstance(error, KvprotoError) else None


class RankEnded(EngineError):
    """The end of another rank of this engine. The first rank says so; the others end with it."""

    def __init__(self) -> None:
        super().__init__("another rank of this engine has ended")
