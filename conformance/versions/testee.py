"""Testee: a frozen version of the wire, as spec/v1/testee.md describes it; it needs only the files beside it."""

import json
import sys
from pathlib import Path

import negotiation
from codec.facts import MESSAGES, STRUCTS, Refusal
from codec.reader import read_frame, read_stream, read_struct
from codec.writer import write_frame, write_struct


def decode(frame):
    try:
        name, fields = read_frame(frame)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}
    return {"message": name, "fields": fields}


OPS = {
    "decode": lambda q: decode(bytes.fromhex(q["frame"])),
    "decode_struct": lambda q: {"fields": read_struct(q["struct"], bytes.fromhex(q["bytes"]))},
    "decode_stream": lambda q: {"frames": [decode(frame) for frame in read_stream(map(bytes.fromhex, q["chunks"]))]},
    "encode": lambda q: {"frame": write_frame(q["message"], q["fields"]).hex()},
    "encode_struct": lambda q: {"bytes": write_struct(q["struct"], q["fields"]).hex()},
    "negotiate": lambda q: negotiation.negotiated(q["sink"], q["source"]),
}
HELLO = {"driver": 1, "name": f"kvproto {Path(__file__).parent.name}", "version": Path(__file__).parent.name,
         "language": "python", "role": "codec", "level": "L1", "extensions": ["json", "streams"]}  # fmt: skip


def answer(question):
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
