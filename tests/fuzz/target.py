"""What a fuzzer does with one input: nothing but WireError comes out, both readers agree, what is taken is canonical.

The first byte picks a message or struct whose body follows; 0xff means a whole frame, 0xfe a stream.
"""

import contextlib
from typing import Any

import attrs
import numpy as np

from kvproto.errors import WireError
from kvproto.wire import Decoder, decode, decode_struct, encode, encode_struct, explain, from_json, to_json
from kvproto.wire.strict import read_whole
from kvproto.wire.tables import CLASSES

NAMES = tuple(CLASSES)


def one_input(data: bytes) -> None:
    """Raise AssertionError, or whatever slipped out, where the codec is wrong about the input."""
    kind, body = data[:1], data[1:]
    if kind == b"\xff":
        _frame(body)
    elif kind == b"\xfe":
        _stream(body)
    elif kind:
        _body(NAMES[kind[0] % len(NAMES)], body)


def exact(value: Any) -> Any:
    """The value with the class of each part: True is not 1, and a member of an enum no integer."""
    if isinstance(value, tuple):
        return [exact(element) for element in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.flags.writeable, value.tolist()
    if attrs.has(type(value)):
        return type(value), [exact(getattr(value, field.name)) for field in attrs.fields(type(value))]
    return type(value), value


def _verdict(read: Any, *args: Any) -> tuple[Any, Any]:
    try:
        return read(*args), None
    except WireError as error:
        return None, (error.code, error.path, error.mine, error.yours)


def _body(name: str, body: bytes) -> None:
    value, refused = _verdict(decode_struct, CLASSES[name], body)
    again, refused_again = _verdict(read_whole, name, memoryview(body))
    assert refused == refused_again
    assert exact(value) == exact(again)
    if value is not None:
        _canonical(name, value, body, encode_struct(value))


def _canonical(name: str, value: Any, body: bytes, written: bytes) -> None:
    # whatever is taken is written again byte by byte, but for fields that were skipped
    assert written == body or len(written) < len(body)
    assert decode_struct(CLASSES[name], written) == value
    assert from_json(CLASSES[name], to_json(value)) == value


def _frame(frame: bytes) -> None:
    value, refused = _verdict(decode, frame)
    text = explain(frame)
    assert text.splitlines()[-1].startswith("refused" if refused else type(value).__name__)
    if value is not None:
        name = type(value).__name__
        _canonical(name, value, frame[16:], encode(value)[16:])


def _stream(stream: bytes) -> None:
    """Cut in two places, and not at all."""
    outcomes = []
    for cut in (len(stream) // 3, 0):
        decoder = Decoder()
        items: list[Any] = []
        with contextlib.suppress(WireError):
            items += list(decoder.feed(stream[:cut]))
            items += list(decoder.feed(stream[cut:]))
        outcomes.append([(i.code, i.path) if isinstance(i, WireError) else i for i in items])
    assert outcomes[0] == outcomes[1]
