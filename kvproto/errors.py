"""Errors that say what is wrong, where, what each side has, and what to do."""

from __future__ import annotations

from kvproto.wire.enums import ErrorCode


class KvprotoError(Exception):
    """A refusal: code, path in registry names, mine, yours and advice."""

    def __init__(self, code: ErrorCode, path: str, mine: str = "", yours: str = "", advice: str = "") -> None:
        self.code, self.path, self.mine, self.yours, self.advice = code, path, mine, yours, advice
        super().__init__(code, path, mine, yours, advice)

    def __str__(self) -> str:
        return self.between("mine", "yours", " ")

    def between(self, mine: str, yours: str, verb: str = " has ") -> str:
        """The sentence with the names of the two sides, that of the refusing one first."""
        where = f" at {self.path}" if self.path else ""
        sides = f": {mine}{verb}{self.mine}, {yours}{verb}{self.yours}" if self.mine or self.yours else ""
        return f"{self.code.name}{where}{sides}" + (f" ({self.advice})" if self.advice else "")


class RemoteError(KvprotoError):
    """The peer sent something that is refused."""


class LocalError(KvprotoError):
    """The caller passed something that cannot be; `path` names the argument."""

    def __str__(self) -> str:
        where = f" at {self.path}" if self.path else ""
        sides = f": expected {self.mine}, got {self.yours}" if self.mine or self.yours else ""
        return f"{self.code.name}{where}{sides}" + (f" ({self.advice})" if self.advice else "")


class DeviceFault(RuntimeError):
    """A GPU's context is lost: each call fails from now on, so this process has to end, and that is its peers' proof.

    No KvprotoError, so that nothing takes it for a refusal and goes on; `error` says it in the same words.
    """

    def __init__(self, error: LocalError) -> None:
        self.error = error
        super().__init__(str(error))


class WireError(RemoteError):
    """Bytes or fields that the spec refuses."""


class PlanError(RemoteError):
    """Two Descriptions that cannot be paired, or one that contradicts itself."""
