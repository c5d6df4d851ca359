"""Testee: the suite's own codec, deal, merge, planner and lowering, made from the prose alone."""

import json
import sys
from collections.abc import Callable
from typing import Any

from kvproto_conformance import dcp, inline, late, lowering, negotiation, planner
from kvproto_conformance.codec import Refusal, read_frame, read_struct, write_frame, write_struct

Json = dict[str, Any]


def decode(q: Json) -> Json:
    message, fields = read_frame(bytes.fromhex(q["frame"]))
    return {"message": message, "fields": fields}


OPS: dict[str, Callable[[Json], Json]] = {
    "decode": decode,
    "decode_struct": lambda q: {"fields": read_struct(q["struct"], bytes.fromhex(q["bytes"]))},
    "encode": lambda q: {"frame": write_frame(q["message"], q["fields"]).hex()},
    "encode_struct": lambda q: {"bytes": write_struct(q["struct"], q["fields"]).hex()},
    "negotiate": lambda q: negotiation.negotiated(q["sink"], q["source"]),
    "plan": lambda q: planner.plan(q["source"], q["sink"], q["features"]),
    "lower": lambda q: {"copies": lowering.copies(q["source"], q["sink"])},
    "checksums": lambda q: {"checksums": lowering.sums(q["source"], q["sink"])},
    "stream": lambda q: {"stream": lowering.stream(q["source"], q["sink"])},
    "inline": lambda q: inline.taken(int(q["length"]), int(q["total"]), q["data"]),
    "late": lambda q: late.served(q["group"], q["cp_rank"], q["grant"], [int(token) for token in q["since"]]),
}

for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = OPS.get(question["op"], dcp.answer)(question)
    except Refusal as refusal:
        answer = {"error": refusal.code, "path": refusal.path}
    print(json.dumps(answer), flush=True)
