"""Bytes to typed messages and back; nothing here knows what a message means."""

from typing import TYPE_CHECKING, Any

__all__ = ["Decoder", "decode", "decode_struct", "encode", "encode_struct", "explain", "from_json", "to_json"]

if TYPE_CHECKING:
    from kvproto.wire.codec import Decoder, decode, decode_struct, encode, encode_struct
    from kvproto.wire.dump import explain
    from kvproto.wire.json_form import from_json, to_json

_HOMES = dict.fromkeys(__all__, "codec") | {"explain": "dump", "from_json": "json_form", "to_json": "json_form"}


def __getattr__(name: str) -> Any:
    # late: the codec needs kvproto.errors, which needs kvproto.wire.enums, and the makers run without either
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"kvproto.wire.{_HOMES[name]}"), name)
