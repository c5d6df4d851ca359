"""Errors as messages carry them, in both directions."""

from typing import Any

from kvproto.errors import KvprotoError, RemoteError, ReportedError
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import TOKENS, axis_of
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode

_SHORT = 12
"""Digits of a digest in a message."""


def refused(message: Any, peer: str) -> RemoteError:
    """The error in a Refused, Failed or Error of `peer`; an unknown code counts as INTERNAL (KVP-ERR-UNKNOWN)."""
    code = ErrorCode(message.code) if message.code in set(ErrorCode) else ErrorCode.INTERNAL
    error = RemoteError(code, message.path, message.mine, message.yours, message.advice or "")
    return ReportedError.of(peer, error)


def refusal(error: KvprotoError) -> dict[str, Any]:
    """The fields of an error that every refusal carries (KVP-ERR-REPORT)."""
    texts = {name: getattr(error, name)[:1000] for name in ("path", "mine", "yours", "advice")}
    return {"code": error.code, **texts, "advice": texts["advice"] or None}


def mismatch(content: bytes, tokens: int | None, transfer: m.Transfer, sink: Geometry) -> RemoteError:
    """The error for a Transfer with another prompt's digest, of `tokens` if known (KVP-TKT-CONTENT)."""
    token_groups = {group.id for group in sink.groups if axis_of(group) == TOKENS}
    end = max((grant.valid for grant in transfer.grants if grant.group in token_groups), default=0)
    prompt = "a prompt" if tokens is None else f"a prompt of {tokens} tokens"
    mine = f"{prompt}, digest {content.hex()[:_SHORT]}"
    yours = f"one fetched up to token {end}, digest {bytes(transfer.content).hex()[:_SHORT]}"
    advice = "tokens, adapter, salts or lengths of axes differ: state the same Prompt on both sides"
    return RemoteError(ErrorCode.CONTENT_MISMATCH, "content", mine, yours, advice)
