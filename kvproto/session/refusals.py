"""Errors as messages carry them, in both directions."""

from __future__ import annotations

from typing import Any

from kvproto.errors import KvprotoError, RemoteError, ReportedError
from kvproto.wire.enums import ErrorCode

__all__ = ["refusal", "refused"]


def refused(message: Any, peer: str) -> RemoteError:
    """The error in a Refused, Failed or Error of `peer`; an unknown code counts as INTERNAL (KVP-ERR-UNKNOWN)."""
    code = ErrorCode(message.code) if message.code in set(ErrorCode) else ErrorCode.INTERNAL
    error = RemoteError(code, message.path, message.mine, message.yours, message.advice or "")
    return ReportedError.of(peer, error)


def refusal(error: KvprotoError) -> dict[str, Any]:
    """The fields of an error that every refusal carries (KVP-ERR-REPORT)."""
    texts = {name: getattr(error, name)[:1000] for name in ("path", "mine", "yours", "advice")}
    return {"code": error.code, **texts, "advice": texts["advice"] or None}
