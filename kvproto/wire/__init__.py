"""Bytes to typed messages and back; nothing here knows what a message means."""

from typing import TYPE_CHECKING, Any

__all__ = ["decode", "decode_struct", "encode", "encode_struct", "from_json", "to_json"]

if TYPE_CHECKING:
    from kvproto.wire.codec import decode, decode_struct, encode, encode_struct
    from kvproto.wire.json_form import from_json, to_json


def __getattr__(name: str) -> Any:
    # late: the codec needs kvproto.errors, which needs kvproto.wire.enums, and the generator runs without either
    if name in ("decode", "decode_struct", "encode", "encode_struct"):
        from kvproto.wire import codec

        return getattr(codec, name)
    if name in ("from_json", "to_json"):
        from kvproto.wire import json_form

        return getattr(json_form, name)
    raise AttributeError(name)
