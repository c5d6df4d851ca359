"""The suite's own strict reader and writer, written from the specification alone by someone who had not seen kvproto.

It shares no code with kvproto and serves as a second opinion: a vector counts only if both agree on it.
"""

from kvproto_conformance.codec.facts import Refusal
from kvproto_conformance.codec.reader import read_frame, read_stream, read_struct
from kvproto_conformance.codec.writer import write_frame, write_struct

__all__ = ["Refusal", "read_frame", "read_stream", "read_struct", "write_frame", "write_struct"]
