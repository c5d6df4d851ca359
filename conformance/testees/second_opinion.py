"""Testee: the suite's own codec, negotiation, deal, merge, planner and lowering, made from the prose alone."""

import json
import sys
from collections.abc import Callable
from typing import Any

from kvproto_conformance import conversion, dcp, inline, late, lowering, negotiation, planner
from kvproto_conformance.checking import check
from kvproto_conformance.codec import Refusal, read_frame, read_stream, read_struct, write_frame, write_struct
from kvproto_conformance.codec.facts import MAJOR, MESSAGES, MINOR, STRUCTS

Json = dict[str, Any]


def decode(frame: bytes) -> Json:
    try:
        message, fields = read_frame(frame)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}
    return {"message": message, "fields": fields}


def planned(q: Json) -> Json:
    for side in (q["source"], q["sink"]):
        write_struct("Geometry", side)
        check(side)
    return planner.plan(q["source"], q["sink"], q["features"])


OPS: dict[str, Callable[[Json], Json]] = {
    "decode": lambda q: decode(bytes.fromhex(q["frame"])),
    "decode_struct": lambda q: {"fields": read_struct(q["struct"], bytes.fromhex(q["bytes"]))},
    "decode_stream": lambda q: {"frames": [decode(frame) for frame in read_stream(map(bytes.fromhex, q["chunks"]))]},
    "encode": lambda q: {"frame": write_frame(q["message"], q["fields"], MINOR).hex()},
    "encode_struct": lambda q: {"bytes": write_struct(q["struct"], q["fields"]).hex()},
    "negotiate": lambda q: negotiation.negotiated(q["sink"], q["source"]),
    "plan": planned,
    "lower": lambda q: {"copies": lowering.copies(q["source"], q["sink"])},
    "checksums": lambda q: {"checksums": lowering.sums(q["source"], q["sink"])},
    "stream": lambda q: {"stream": lowering.stream(q["source"], q["sink"])},
    "inline": lambda q: inline.taken(int(q["length"]), int(q["total"]), q["data"]),
    "convert": conversion.convert,
    "late": lambda q: late.served(q["group"], q["cp_rank"], q["grant"], [int(token) for token in q["since"]]),
    **dict.fromkeys(("owner", "length", "pages", "slots", "merge"), dcp.answer),
}
EXTENSIONS = ["json", "streams", "deals", "sections", "conversion", "spread", "cold", "merge", "verify", "staged",
              "inline", "epochs", "intent", "pull", "catalogue", "storage"]  # fmt: skip
HELLO = {
    "driver": 1,
    "spec": f"{MAJOR}.{MINOR}",
    "name": "second opinion",
    "language": "python",
    "role": "both",
    "level": "L2",
    "extensions": EXTENSIONS,
}


def answer(question: Json) -> Json:
    if question["op"] == "hello":
        return HELLO
    name = question.get("message") or question.get("struct") or "Hello"
    if question["op"] not in OPS or name not in STRUCTS | MESSAGES:
        return {"unsupported": True}
    try:
        return OPS[question["op"]](question)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}


for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "stop":
        break
    print(json.dumps({"seq": asked["seq"], **answer(asked)}), flush=True)
