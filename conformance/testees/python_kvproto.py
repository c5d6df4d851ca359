"""Testee: the kvproto package itself."""

import json
import sys

from kvproto.errors import KvprotoError
from kvproto.wire import decode, decode_struct, encode, encode_struct, from_json, messages, to_json

for line in sys.stdin:
    question = json.loads(line)
    name = question.get("message") or question.get("struct")
    try:
        match question["op"]:
            case "decode":
                message = decode(bytes.fromhex(question["frame"]))
                answer = {"message": type(message).__name__, "fields": to_json(message)}
            case "decode_struct":
                answer = {"fields": to_json(decode_struct(getattr(messages, name), bytes.fromhex(question["bytes"])))}
            case "encode":
                answer = {"frame": encode(from_json(getattr(messages, name), question["fields"])).hex()}
            case "encode_struct":
                answer = {"bytes": encode_struct(from_json(getattr(messages, name), question["fields"])).hex()}
            case other:
                answer = {"unsupported": other}
    except KvprotoError as error:
        answer = {"error": error.code.name, "path": error.path}
    print(json.dumps(answer), flush=True)
