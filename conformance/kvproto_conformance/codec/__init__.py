"""The suite's own strict reader and writer: made from the prose of spec/v1 and its registry.json alone.

It shares no code with kvproto and exists to be another opinion: vectors count only where both agree. Plain, slow,
standard library.
"""

from kvproto_conformance.codec.reader import read_frame, read_struct
from kvproto_conformance.codec.refusal import Refusal
from kvproto_conformance.codec.writer import write_frame, write_struct

__all__ = ["Refusal", "read_frame", "read_struct", "write_frame", "write_struct"]
