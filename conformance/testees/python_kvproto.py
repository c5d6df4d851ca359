"""Testee: the kvproto package itself. kvproto attends to nothing, so the merge is a few lines of numpy."""

import json
import sys
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

from kvproto import KvprotoError, local_row, most_before, owned_before, owner
from kvproto.copying.converting import convert
from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import begins_of, check_grants, cut_to_begins, held_from
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window, windows
from kvproto.planning.conversion import Made
from kvproto.planning.geometry import decode_geometry, encode_geometry, owns, validate
from kvproto.planning.plan import Box, Route, plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.session.inline import Came
from kvproto.session.negotiation import Terms, negotiate
from kvproto.session.tickets import check_held
from kvproto.transport.inline.transport import InlineReceiver
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire import Decoder, decode, decode_struct, encode, encode_struct, from_json, messages, tables, to_json
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Columns, Geometry, Grants, Group, Rank, VersionRange

Json = dict[str, Any]


def codec(question: Json) -> Json:
    """Messages and bare structs, read and written."""
    op, kind = question["op"], getattr(messages, question.get("message") or question.get("struct", ""), None)
    if op == "decode":
        return read(decode(bytes.fromhex(question["frame"])))
    if kind is None or op not in ("encode", "decode_struct", "encode_struct"):
        return {"unsupported": True}
    if op == "decode_struct":
        return {"fields": to_json(decode_struct(kind, bytes.fromhex(question["bytes"])))}
    if op == "encode":
        return {"frame": encode(from_json(kind, question["fields"])).hex()}
    return {"bytes": encode_struct(from_json(kind, question["fields"])).hex()}


def read(message: Any) -> Json:
    """A message as an answer."""
    return {"message": type(message).__name__, "fields": to_json(message)}


def streamed(question: Json) -> Json:
    """Frames out of a stream."""
    reader, frames = Decoder(), []
    for chunk in question["chunks"]:
        for found in reader.feed(bytes.fromhex(chunk)):
            if not isinstance(found, KvprotoError):
                frames.append(read(found))
                continue
            frames.append({"error": found.code.name, "path": found.path})
            if found.code.name == "BAD_MAGIC":
                return {"frames": frames}
    return {"frames": frames}


def negotiated(question: Json) -> Json:
    """The version and features that Welcome chooses."""
    version, features = negotiate(*(terms(**question[side]) for side in ("sink", "source")))
    return {"version": f"{version.major}.{version.minor}", "features": [str(feature) for feature in features]}


def terms(versions: list[str], offered: list[str], needed: list[str]) -> Terms:
    """The Terms of one side."""
    spoken = [map(int, version.replace("-", ".").split(".")) for version in versions]
    ranges = [VersionRange(major=major, min_minor=low, max_minor=high) for major, low, high in spoken]
    return Terms(tuple(map(int, offered)), tuple(map(int, needed)), tuple(ranges))


def deal(question: Json) -> Json:
    """Tokens over ranks."""
    group = from_json(Group, question["group"])
    tokens = np.array(question["tokens"], np.int64)
    rows, alone = tokens // group.tokens_per_row, group.cp_size == 1
    if question["op"] == "length":
        lengths = np.stack([owned_before(group, rank, rows) for rank in range(group.cp_size)], axis=1)
        return {"rows": lengths.astype(str).tolist()}
    if question["op"] == "pages":
        return {"pages": [str(-(-most_before(group, row) // group.rows)) for row in rows.tolist()]}
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


@cache
def described(text: str, came: bool) -> Geometry:
    """A Description that is right, one's own or one that came; many cases share one."""
    geometry = from_json(Geometry, json.loads(text))
    if came:
        return decode_geometry(encode_geometry(geometry))
    validate(geometry)
    return geometry


def planned(question: Json) -> Json:
    """Routes of two Descriptions."""
    source, sink = (described(json.dumps(question[side]), side == "sink") for side in ("source", "sink"))
    made = plan(source, sink, [Feature[name] for name in question["features"]])
    return {
        "plan": made.digest.hex(),
        "routes": [
            {"source": str(r.source), "sink": str(r.sink), "group": str(r.group), "digest": r.digest.hex()}
            for r in made.routes
        ],
        "required": {str(r.rank): [str(a) for a in made.required(r.rank)] for r in sink.ranks},
        "cold": [str(model) for model in made.cold],
    }


def lowered(question: Json) -> CopyProgram:
    """The copies of one rank pair and request."""
    (here, from_), (there, to) = (side(question[name]) for name in ("source", "sink"))
    routes = plan(here.geometry, there.geometry).between(here.rank, there.rank)
    return Pair(routes, here, there).lower(from_, to)


def side(given: Json) -> tuple[RankLayout, dict[int, Window]]:
    """A rank's layout and windows."""
    columns = [from_json(Columns, columns) for columns in given["columns"]]
    grants = [from_json(Grants, grant) for grant in given["windows"]]
    layout = RankLayout(from_json(Geometry, given["geometry"]), int(given["rank"]), {c.group: c for c in columns})
    return layout, windows(grants)


def copies(question: Json) -> Json:
    """The runs that the program copies, found in memory in which each byte says where it is."""
    program = lowered(question)
    sources, sinks = ({int(op[f"{name}_region"]) for op in program.ops} for name in ("source", "sink"))
    marked = {region: marks(region) for region in sources}
    found = {region: np.zeros((4, _MEMORY), np.uint8) for region in sinks}
    for i in range(4):
        from_, to = ({r: memoryview(planes[i]) for r, planes in memory.items()} for memory in (marked, found))
        execute(program, from_, to)
    runs: list[list[int]] = []
    for sink in sorted(found):
        low, high, region, written = found[sink].astype(int)
        for to_ in np.flatnonzero(written).tolist():
            at = [int(region[to_]), int(low[to_] + 256 * high[to_]), sink, to_]
            if runs and at == [runs[-1][0], runs[-1][1] + runs[-1][4], runs[-1][2], runs[-1][3] + runs[-1][4]]:
                runs[-1][4] += 1
            else:
                runs.append([*at, 1])
    return {"copies": [[str(number) for number in run] for run in runs]}


_MEMORY = 1 << 16
"""Bytes of each region; those of the cases are smaller."""


def marks(region: int) -> Any:
    """Four fillings [4, bytes] of a region: low and high byte of the offset, the region's id, and 1."""
    at = np.arange(_MEMORY)
    return np.stack([at % 256, at // 256, np.full_like(at, region), np.ones_like(at)]).astype(np.uint8)


def sums(question: Json) -> Json:
    """Checksums that the source states."""
    program = lowered(question)
    regions = {int(op["source_region"]) for op in program.ops}
    memory = {r: memoryview(((7 * np.arange(_MEMORY) + r) % 256).astype(np.uint8)) for r in regions}
    return {"checksums": {str(g): str(n) for g, n in checksums(program, memory, sink=False).items()}}


def late(question: Json) -> Json:
    """Return what a source serves of a window."""
    group, grant = from_json(Group, question["group"]), from_json(Grants, question["grant"])
    share = owns(group, [0], None, int(question["cp_rank"]))
    sink = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(share,)),))
    columns, _ = columns_without_gaps(sink, 0, {group.id: _MEMORY})
    check_grants(sink, 0, columns, (group.id,), (grant,))
    since = [int(token) for token in question["since"]]
    at = {"model": 0, "part": 0, "lo": 0, "hi": 1, "source_class": 0, "sink_class": 0}
    boxes = tuple(Box(layer_lo=n, layer_hi=n + 1, source_group=n, **at) for n in range(len(since)))
    route = Route(source=0, sink=0, group=group.id, boxes=boxes, digest=bytes(32))
    held = held_from([route], {group.id: group}, dict(enumerate(since)))
    check_held(held, [grant])
    begins = begins_of(held, [grant])
    (window,) = cut_to_begins(RankLayout(sink, 0, {}), [grant], {begin.group: begin.first for begin in begins})
    return {"window": to_json(window), **({"begins": str(begins[0].first)} if begins else {})}


def packed(question: Json) -> Json:
    """The place of each byte of the stream at the source, and where the sink puts it."""
    program = lowered(question)
    sources, sinks = ({int(op[f"{name}_region"]) for op in program.ops} for name in ("source", "sink"))
    planes, streams = [{r: memoryview(marks(r)[i]) for r in sources} for i in range(3)], []
    for plane in planes:
        streams.append(bytearray(program.bytes))
        PackedStream(program, "source", plane).pack(0, streams[-1])
    at = np.arange(program.bytes)
    found = []
    for digit in (at % 255 + 1, at // 255 + 1):
        memory = {r: np.zeros(_MEMORY, np.uint8) for r in sinks}
        PackedStream(program, "sink", {r: m.data for r, m in memory.items()}).unpack(0, digit.astype(np.uint8))
        found.append(memory)
    to = {
        int(low[i]) - 1 + 255 * (int(high[i]) - 1): (region, i)
        for region, low, high in ((r, found[0][r], found[1][r]) for r in sinks)
        for i in np.flatnonzero(low).tolist()
    }
    runs: list[list[int]] = []
    for n in range(program.bytes):
        place = [streams[2][n], streams[0][n] + 256 * streams[1][n], *to[n]]
        if runs and place == [runs[-1][0], runs[-1][1] + runs[-1][4], runs[-1][2], runs[-1][3] + runs[-1][4]]:
            runs[-1][4] += 1
        else:
            runs.append([*place, 1])
    return {"stream": [[str(number) for number in run] for run in runs]}


class Counting:
    """Unpacks by counting."""

    def __init__(self, length: int) -> None:
        self.length, self.unpacked = length, 0

    def unpack(self, offset: int, data: bytes) -> None:
        self.unpacked += len(data)


def inline(question: Json) -> Json:
    """Receive Data as a sink does; return what becomes of it."""
    came, reader, into = Came(total=int(question["total"])), InlineReceiver(0), Counting(int(question["length"]))
    reader.open(1, into)
    refused: Json = {}
    for n, (offset, size, last) in enumerate(question["data"]):
        try:
            came.count(int(size))
            made = {"offset": int(offset), "data": bytes(int(size)), "last": last == "true"}
            reader.data(messages.Data(session=1, sequence=1, **made))
        except KvprotoError as error:
            reader.close(1)
            refused = refused or {"refused": [str(n), error.code.name, error.path]}
    return {"unpacked": str(into.unpacked), "counted": str(came.bytes), **refused}


def converted(question: Json) -> Json:
    """Convert one lane; say the scales too, if they are made of it."""
    data, scales = (np.frombuffer(bytes.fromhex(question[key]), np.uint8)[None] for key in ("data", "scales"))
    if question["conversion"] == "e4m3_tensor":
        blocks, read = 0, int(scales.view("<u4")[0, 0])
    else:
        blocks, read = int(question["blocks"]), scales if scales.size else 0
    if question["dtype"] == "F8E4M3":
        return {"data": convert(Made.WIDE, data, read, blocks).tobytes().hex()}
    found = {"data": convert(Made.NARROW, data, read, blocks).tobytes().hex()}
    made = {} if scales.size else {"scales": convert(Made.SCALES, data, 0, blocks).tobytes().hex()}
    return found | made


OPS = {
    "negotiate": negotiated,
    "owner": deal, "length": deal, "pages": deal, "slots": deal, "merge": merge,
    "plan": planned, "lower": copies, "checksums": sums, "late": late, "stream": packed,
    "inline": inline, "convert": converted, "decode_stream": streamed,
}  # fmt: skip

EXTENSIONS = ["json", "streams", "deals", "sections", "conversion", "spread", "cold", "merge", "verify", "staged",
              "inline", "epochs", "intent", "pull", "catalogue", "storage"]  # fmt: skip
HELLO = {"driver": 1, "spec": f"{tables.MAJOR}.{tables.MINOR}", "name": "kvproto", "version": version("kvproto"),
         "language": "python", "role": "both", "level": "L2", "extensions": EXTENSIONS}  # fmt: skip


def answer(question: Json) -> Json:
    """The answer to one question, without its number."""
    try:
        return OPS.get(question["op"], codec)(question)
    except KvprotoError as error:
        return {"error": error.code.name, "path": error.path}


for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "stop":
        break
    print(json.dumps({"seq": asked["seq"], **(HELLO if asked["op"] == "hello" else answer(asked))}), flush=True)
