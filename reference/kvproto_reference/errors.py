"""Errors that the reference engines raise."""


class EngineError(ValueError):
    """Bad configuration, missing file or misuse of the engine; the message says which."""


class OutOfPages(EngineError):
    """The pool has fewer free pages than were asked for."""
