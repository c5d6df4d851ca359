"""A testee that is the suite's own codec by the tables of the kept version in KVPROTO_REGISTRY."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kvproto_conformance import negotiation
from kvproto_conformance.codec import Refusal, read_frame, read_stream, read_struct, write_frame, write_struct
from kvproto_conformance.codec.facts import MAJOR, MESSAGES, MINOR, STRUCTS
from kvproto_conformance.data import spec

Json = dict[str, Any]


def _decode(frame: bytes) -> Json:
    try:
        name, fields = read_frame(frame)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}
    return {"message": name, "fields": fields}


_OPS: dict[str, Callable[[Json], Json]] = {
    "decode": lambda q: _decode(bytes.fromhex(q["frame"])),
    "decode_struct": lambda q: {"fields": read_struct(q["struct"], bytes.fromhex(q["bytes"]))},
    "decode_stream": lambda q: {"frames": [_decode(frame) for frame in read_stream(map(bytes.fromhex, q["chunks"]))]},
    "encode": lambda q: {"frame": write_frame(q["message"], q["fields"], MINOR).hex()},
    "encode_struct": lambda q: {"bytes": write_struct(q["struct"], q["fields"]).hex()},
    "negotiate": lambda q: negotiation.negotiated(q["sink"], q["source"]),
}


def _answer(question: Json) -> Json:
    if question["op"] == "hello":
        name = f"kvproto {spec()}"
        return {"driver": 1, "spec": f"{MAJOR}.{MINOR}", "name": name, "version": spec(), "language": "python"}
    name = question.get("message") or question.get("struct") or "Hello"
    if question["op"] not in _OPS or name not in STRUCTS | MESSAGES:
        return {"unsupported": True}
    try:
        return _OPS[question["op"]](question)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}


def main() -> None:
    """Answer questions until there is none, or `stop`."""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "stop":
            break
        print(json.dumps({"seq": asked["seq"], **_answer(asked)}), flush=True)


if __name__ == "__main__":
    main()
