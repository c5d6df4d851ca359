"""The digest that binds a ticket to its prompt."""

import hashlib

import numpy as np

from kvproto.wire import encode_struct
from kvproto.wire.messages import Content


def content_digest(prompt: list[int]) -> bytes:
    """SHA-256 of canonical Content; no adapter, no salts."""
    return hashlib.sha256(encode_struct(Content(tokens=np.array(prompt, np.uint32), adapter="", salts=()))).digest()
