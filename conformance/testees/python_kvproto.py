"""Testee: the kvproto package itself."""

import json
import sys

from kvproto.errors import KvprotoError
from kvproto.wire import decode, encode, from_json, messages, to_json

for line in sys.stdin:
    question = json.loads(line)
    try:
        if question["op"] == "decode":
            message = decode(bytes.fromhex(question["frame"]))
            answer = {"message": type(message).__name__, "fields": to_json(message)}
        else:
            made = from_json(getattr(messages, question["message"]), question["fields"])
            answer = {"frame": encode(made).hex()}
    except KvprotoError as error:
        answer = {"error": error.code.name, "path": error.path}
    print(json.dumps(answer), flush=True)
