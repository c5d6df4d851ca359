"""Testee: the kvproto package itself. kvproto attends to nothing, so the merge is a few lines of numpy."""

import json
import sys
from typing import Any

import numpy as np

from kvproto import KvprotoError, local_row, owned_before, owner
from kvproto.wire import decode, decode_struct, encode, encode_struct, from_json, messages, to_json
from kvproto.wire.messages import Group

Json = dict[str, Any]


def codec(question: Json) -> Json:
    """Messages and bare structs, read and written."""
    kind = getattr(messages, question.get("message") or question.get("struct", ""), None)
    match question["op"]:
        case "decode":
            message = decode(bytes.fromhex(question["frame"]))
            return {"message": type(message).__name__, "fields": to_json(message)}
        case "decode_struct":
            return {"fields": to_json(decode_struct(kind, bytes.fromhex(question["bytes"])))}
        case "encode":
            return {"frame": encode(from_json(kind, question["fields"])).hex()}
        case "encode_struct":
            return {"bytes": encode_struct(from_json(kind, question["fields"])).hex()}
    return {"unsupported": question["op"]}


def deal(question: Json) -> Json:
    """Tokens over ranks."""
    group = from_json(Group, question["group"])
    tokens = np.array(question["tokens"], np.int64)
    rows, alone = tokens // group.tokens_per_row, group.cp_size == 1
    if question["op"] in ("length", "pages"):
        lengths = np.stack([owned_before(group, rank, rows) for rank in range(group.cp_size)], axis=1)
        if question["op"] == "length":
            return {"rows": lengths.astype(str).tolist()}
        return {"pages": (-(-lengths.max(axis=1) // group.rows)).astype(str).tolist()}
    ranks, local = owner(group, rows), rows if alone else local_row(group, rows)
    dealt = alone | (tokens >= group.origin)
    if question["op"] == "owner":
        return {"cp_rank": _some(ranks, dealt), "row": _some(local, dealt)}
    mine = dealt & (ranks == int(question["cp_rank"]))
    page, row = divmod(np.where(mine, local, 0), group.rows)
    return {"slots": _some(np.array(question["items"], np.int64)[page] * group.rows + row, mine)}


def _some(numbers: Any, there: Any) -> list[str | None]:
    return [str(n) if some else None for n, some in zip(numbers.tolist(), there.tolist(), strict=True)]


def merge(question: Json) -> Json:
    """Parts of attention made one, in float32."""
    parts = question["parts"]
    read = np.array([part["tokens"] for part in parts], np.int64) > 0
    bases = np.array([[np.log(2) if part["base"] == "2" else 1] for part in parts], np.float32)
    lse = np.where(read, np.array([part["lse"] for part in parts], np.float32) * bases, -np.inf)
    out = np.array([part["out"] for part in parts], np.float32)
    most = lse.max(axis=0)
    weights = np.exp(lse - np.where(np.isneginf(most), 0, most))
    total = weights.sum(axis=0)
    weights = weights / np.where(total > 0, total, 1)
    merged = (np.where(weights[..., None] > 0, out, 0) * weights[..., None]).sum(axis=0)
    found = most + np.log(np.where(total > 0, total, 1))
    return {"lse": [f"{x:.9g}" for x in found], "out": [[f"{x:.9g}" for x in row] for row in merged]}


OPS = {"owner": deal, "length": deal, "pages": deal, "slots": deal, "merge": merge}

for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = OPS.get(question["op"], codec)(question)
    except KvprotoError as error:
        answer = {"error": error.code.name, "path": error.path}
    print(json.dumps(answer), flush=True)
