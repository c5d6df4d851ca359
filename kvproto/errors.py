"""Errors with a code, a place, the values of both sides, and advice."""

import operator
from collections.abc import Iterable
from copy import copy
from typing import Any, Self

from kvproto.wire.enums import ErrorCode as ErrorCode

U32 = 0xFFFF_FFFF
"""The greatest value of a 32-bit field."""


class KvprotoError(Exception):
    """A refusal: its code, where (`path`, in registry names), what each side has (`mine`, `yours`), and `advice`."""

    def __init__(self, code: ErrorCode, path: str, mine: str = "", yours: str = "", advice: str = "") -> None:
        self.code, self.path, self.mine, self.yours, self.advice = code, path, mine, yours, advice
        super().__init__(code, path, mine, yours, advice)

    def kept(self) -> Self:
        """Drop the frames of this error and of its causes, which would keep pools alive; for errors that are stored."""
        error: BaseException | None = self
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        return self

    def again(self) -> Self:
        """A copy to raise in place of a stored error, which would otherwise collect the frames that it passes."""
        error = copy(self)
        error.__cause__ = self.__cause__
        return error

    def at(self, path: str) -> Self:
        """A copy with another path."""
        return type(self)(self.code, path, self.mine, self.yours, self.advice)

    def __str__(self) -> str:
        return self.between("expected", "got", " ")

    def between(self, mine: str, yours: str, verb: str = " has ") -> str:
        """The message, with these names for the refusing side and the other one, as `printable` text."""
        where = f" at {self.path}" if self.path else ""
        sides = f": {mine}{verb}{self.mine}, {yours}{verb}{self.yours}" if self.mine or self.yours else ""
        return printable(f"{self.code.name}{where}{sides}" + (f" ({self.advice})" if self.advice else ""))


class RemoteError(KvprotoError):
    """The peer sent something that this side refuses."""


class ReportedError(RemoteError):
    """A refusal that the peer reported: `mine` is what it has, `yours` what it got from us, and `peer` names it."""

    peer = "the peer"

    @classmethod
    def of(cls, peer: str, error: KvprotoError) -> "ReportedError":
        """`error` as reported by `peer`."""
        reported = cls(error.code, error.path, error.mine, error.yours, error.advice)
        reported.peer = peer
        return reported

    def __str__(self) -> str:
        return f"{self.between('the peer expected', 'from this side it got', ' ')}, reported by {self.peer}"


class LocalError(KvprotoError):
    """This side cannot do what its caller wants; `path` names the argument or the part at fault."""


def check_type(path: str, value: object, kinds: type | tuple[type, ...], mine: str, advice: str = "") -> None:
    """Raise LocalError(OUT_OF_RANGE) naming the argument and both types, unless `value` is one of `kinds`."""
    if not isinstance(value, kinds):
        raise wrong_type(path, value, mine, advice)


def wrong_type(path: str, value: object, mine: str, advice: str = "") -> LocalError:
    """A LocalError(OUT_OF_RANGE) for an argument of another type than `mine`."""
    return bad(path, mine, type_name(value), advice)


def check_whole(path: str, value: Any, low: int, high: int = U32, mine: str = "") -> int:
    """Return `value` as an int; raises LocalError(OUT_OF_RANGE) unless it is a whole number in [low, high]."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        what = value if isinstance(value, int | float) else type_name(value)
        limit = f"{low} or more" if high >= U32 and number < low else f"{low} to {high}"
        whole = "" if type(value) is int else "a whole number, "
        raise bad(path, mine or whole + limit, what)
    return number


def bad(path: str, mine: str, yours: object, advice: str = "") -> LocalError:
    """A LocalError(OUT_OF_RANGE) for an argument: its name, what it may be, what it was, and what to do."""
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, str(yours), advice)


def type_name(value: object) -> str:
    """The type of an argument as its users call it, such as "torch.Tensor"; never its value, which may be secret."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" else f"{package}.{kind.__qualname__}"


def listed(names: Iterable[object], most: int = 3, between: str = ", ") -> str:
    """A list of names for a message: the first `most` of them, and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def quoted(text: str) -> str:
    """Text of a caller in quotes, without its end if it is long."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def printable(text: str) -> str:
    """Text of a peer or a file on one line, with escapes in place of control characters (KVP-SEE-TEXT)."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def check_text(path: str, text: str) -> bytes:
    """The UTF-8 of a text; raises LocalError(OUT_OF_RANGE) for a lone surrogate, which JSON may contain."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise bad(path, "UTF-8", "a lone surrogate", "correct what made this text") from None


class DeviceFault(RuntimeError):
    """A GPU context is lost, and every later call fails: the process has to end, and peers take its end as proof."""

    def __init__(self, error: LocalError) -> None:
        self.error = error
        super().__init__(str(error))


class WireError(RemoteError):
    """Bytes or fields that break the specification."""


class PlanError(RemoteError):
    """Two Descriptions cannot be paired, or one contradicts itself."""
