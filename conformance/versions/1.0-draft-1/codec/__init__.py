"""The suite's own strict reader and writer, written from the specification alone by somebody who had not seen kvproto.

It shares no code with kvproto and exists to be another opinion: vectors count only where both agree.
"""

from codec.facts import Refusal
from codec.reader import read_frame, read_stream, read_struct
from codec.writer import write_frame, write_struct

__all__ = ["Refusal", "read_frame", "read_stream", "read_struct", "write_frame", "write_struct"]
