"""Testee: a reader of DoneAck and of no other message, to begin with. Put your own codec in place of `read`.

    kvproto-conformance run -- python testee.py

It answers the questions of spec/v1/testee.md, and reads as framing.md and messages.md say, but less strictly, so that
the first report has something to mend.
"""

import json
import sys

HELLO = {"driver": 1, "name": "mine", "version": "0", "language": "python",
         "role": "reader", "level": "L1", "messages": ["DoneAck"]}  # fmt: skip
FIELDS = {1: "session", 2: "request", 3: "sequence"}


class Refused(Exception):
    """A code of errors.md, and a path."""


def read(frame: bytes) -> dict:
    """Name and fields of one frame, or Refused."""
    if frame[:4] != b"KVPW"[: len(frame)]:
        raise Refused("BAD_MAGIC", "@magic")
    if len(frame) < 16:
        raise Refused("TRUNCATED", "@length")
    if int.from_bytes(frame[12:16], "little") > len(frame) - 16:
        raise Refused("TRUNCATED", "@length")
    fields, at = {}, 17
    while at + 1 < len(frame):
        number, at = integer(frame, at)
        value, at = integer(frame, at)
        fields[FIELDS.get(number, str(number))] = str(value)
    return {"message": "DoneAck", "fields": fields}


def integer(frame: bytes, at: int) -> tuple:
    """An unsigned integer of msgpack, and where the next value begins."""
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(frame[at], 0)
    return int.from_bytes(frame[at + 1 : at + 1 + width], "big") if width else frame[at], at + 1 + width


def answer(question: dict) -> dict:
    """The answer to one question, without its number."""
    try:
        return {"hello": lambda: HELLO, "decode": lambda: read(bytes.fromhex(question["frame"]))}[question["op"]]()
    except Refused as refused:
        return dict(zip(("error", "path"), refused.args, strict=True))
    except KeyError:
        return {"unsupported": True}


for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "stop":
        break
    print(json.dumps({"seq": asked["seq"], **answer(asked)}), flush=True)
