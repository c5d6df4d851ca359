"""Descriptions and registrations that a source must refuse, and that a good one is taken after each."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np

from kvproto_conformance.live import world
from kvproto_conformance.live.memory import Shared, attestation
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

Json = dict[str, Any]
Codes = str | tuple[str, ...]
Change = Callable[[Json, Sink], Json]

_STRAY = "Writes leave the pages: somebody else's memory is changed in silence."
_THEIRS = "Whoever was told of an engine's memory has another engine write there."
_ROUTES = "The two sides have computed different routes, and each believes its own."
_OTHER = "Engines of another model, dtype or tokenizer are joined, and the answer is noise."


def _column(name: str, value: Callable[[int, Json], int]) -> Change:
    def change(good: Json, sink: Sink) -> Json:
        columns = copy.deepcopy(good["columns"])
        columns[0][name][0] = str(value(int(columns[0][name][0]), good))
        return {"columns": columns}

    return change


def _region(**wrong: Any) -> Change:
    return lambda good, sink: {"regions": [{k: v for k, v in (good["regions"][0] | wrong).items() if v is not None}]}


def _handle(make: Callable[[Shared], tuple[str, str]]) -> Change:
    def change(good: Json, sink: Sink) -> Json:
        assert sink.memory is not None
        transport, data = make(sink.memory)
        return {"regions": [good["regions"][0] | {"handles": [{"transport": transport, "data": data}]}]}

    return change


def _unsealed(good: Json, sink: Sink) -> Json:
    assert sink.memory is not None
    sink.spare = Shared(sink.memory.bytes.size, sealed=False)
    sink.spare.attest(sink.attestation())
    return _spare(good, sink.spare.handle())


def _unattested(good: Json, sink: Sink) -> Json:
    """Memory of an owner that has written the attestations of other sessions, one in each way."""
    assert sink.memory is not None
    sink.spare = Shared(sink.memory.bytes.size)
    (engine, replica, rank), mine = sink.peer_place, (sink.name, 0, sink.rank)
    theirs, session = (engine, replica, rank), int(sink.session)
    for wrong in (
        (session ^ 1, "WRITE", theirs, mine),
        (session, "READ", theirs, mine),
        (session, "WRITE", mine, theirs),
        (session, "WRITE", (engine + "2", replica, rank), mine),
        (session, "WRITE", (engine, replica + 1, rank), mine),
        (session, "WRITE", (engine, replica, rank + 1), mine),
        (session, "WRITE", theirs, (sink.name + "2", 0, sink.rank)),
        (session, "WRITE", theirs, (sink.name, 1, sink.rank)),
        (session, "WRITE", theirs, (sink.name, 0, sink.rank + 1)),
    ):
        sink.spare.attest(attestation(str(wrong[0]), *wrong[1:]))
    return _spare(good, sink.spare.handle())


def _attested_by_a_cache(good: Json, sink: Sink) -> Json:
    """Memory whose own bytes, which peers write, are those of an attestation."""
    assert sink.memory is not None
    sink.spare = Shared(sink.memory.bytes.size)
    sink.spare.bytes[:32] = np.frombuffer(sink.attestation(), np.uint8)
    return _spare(good, sink.spare.handle(attestations=sink.spare.fd))


def _spare(good: Json, data: str) -> Json:
    return {"regions": [good["regions"][0] | {"handles": [{"transport": "SHM", "data": data}]}]}


def _not_memory(memory: Shared) -> tuple[str, str]:
    return "SHM", memory.handle(fd=0)


def _last_item(good: Json, sink: Sink) -> Json:
    columns = copy.deepcopy(good["columns"])
    columns[0]["offset"][0] = str(int(good["regions"][0]["length"]) - int(columns[0]["item_stride"][0]))
    return {"columns": columns}


def _more_columns(good: Json, sink: Sink) -> Json:
    return {"columns": [*good["columns"], good["columns"][0] | {"group": "99"}]}


def _second_region(good: Json, sink: Sink) -> Json:
    assert sink.memory is not None
    handle = {"transport": "SHM", "data": sink.memory.handle(nonce="0" * 32)}
    columns = copy.deepcopy(good["columns"])
    columns[0]["region"][-1] = "1"
    return {"columns": columns, "regions": [good["regions"][0], good["regions"][0] | {"id": "1", "handles": [handle]}]}


def _shorter(good: Json, sink: Sink) -> Json:
    columns = copy.deepcopy(good["columns"])
    for name in ("region", "offset", "item_stride", "row_stride", "lane_stride"):
        columns[0][name].pop()
    return {"columns": columns}


def _longer(good: Json, sink: Sink) -> Json:
    return {"regions": [good["regions"][0] | {"length": str(int(good["regions"][0]["length"]) + 8192)}]}


REGISTERS: list[tuple[str, str, Change, str, Codes, str | None, str, str]] = [
    ("LIVE-501", "the digest of another source Description", lambda g, s: {"source": "11" * 32},
     "Refused", "DESCRIPTION_MISMATCH", "source", "KVP-REG-DIGESTS", _ROUTES),
    ("LIVE-502", "the digest of another sink Description", lambda g, s: {"sink": "11" * 32},
     "Refused", "DESCRIPTION_MISMATCH", "sink", "KVP-REG-DIGESTS", _ROUTES),
    ("LIVE-503", "another route digest",
     lambda g, s: {"routes": [g["routes"][0] | {"digest": "22" * 32}, *g["routes"][1:]]},
     "Refused", "ROUTE_MISMATCH", None, "KVP-REG-ROUTES", _ROUTES),
    ("LIVE-504", "a route too few", lambda g, s: {"routes": g["routes"][:-1]},
     "Refused", "ROUTE_MISMATCH", None, "KVP-REG-ROUTES", _ROUTES),
    ("LIVE-505", "another plan digest", lambda g, s: {"plan": "33" * 32},
     "Refused", "ROUTE_MISMATCH", "plan", "KVP-REG-ROUTES", _ROUTES),
    ("LIVE-506", "columns without the last layer", _shorter,
     "Refused", "BAD_COLUMNS", None, "KVP-REG-COLUMNS", _STRAY),
    ("LIVE-507", "no columns", lambda g, s: {"columns": []},
     "Refused", "BAD_COLUMNS", None, "KVP-REG-COLUMNS", _STRAY),
    ("LIVE-508", "a column in a region that is not there", _column("region", lambda v, g: 5),
     "Refused", "BAD_COLUMNS", None, "KVP-REG-COLUMNS", _STRAY),
    ("LIVE-509", "an offset at the end of the region", _column("offset", lambda v, g: int(g["regions"][0]["length"])),
     "Refused", "OUT_OF_REGION", None, "KVP-REG-REGION", _STRAY),
    ("LIVE-510", "an item stride that leaves the region", _column("item_stride", lambda v, g: v * 1000),
     "Refused", "OUT_OF_REGION", None, "KVP-REG-REGION", _STRAY),
    ("LIVE-511", "strides whose sum is beyond 64 bits", _column("item_stride", lambda v, g: 2**64 - 1),
     "Refused", ("OUT_OF_REGION", "BAD_COLUMNS"), None, "KVP-REG-REGION", _STRAY),
    ("LIVE-512", "rows that overlap", _column("row_stride", lambda v, g: 1),
     "Refused", "BAD_COLUMNS", None, "KVP-REG-OVERLAP", _STRAY),
    ("LIVE-513", "items that overlap", _column("item_stride", lambda v, g: v - 16),
     "Refused", "BAD_COLUMNS", None, "KVP-REG-OVERLAP", _STRAY),
    ("LIVE-514", "a region that ends above 2^63", _region(base=str(2**63)),
     "Error", "OUT_OF_RANGE", None, "KVP-RULE-BREAK", _STRAY),
    ("LIVE-515", "memory of the host that names a device", _region(device="GPU-0"),
     "Error", "FIELD_CONFLICT", "regions[0].device", "KVP-RULE-BREAK", _STRAY),
    ("LIVE-516", "CUDA memory without a device", _region(kind="CUDA"),
     "Error", "FIELD_CONFLICT", "regions[0].device", "KVP-RULE-BREAK", _STRAY),
    ("LIVE-517", "access READ, and no PULL", lambda g, s: {"access": "READ"},
     "Refused", "NO_TRANSPORT", None, "KVP-REG-ACCESS", "A sink that pulls and a source that pushes wait for ever."),
    ("LIVE-518", "a handle of a transport that nobody knows", _handle(lambda m: ("999", "00")),
     "Refused", "NO_TRANSPORT", None, "KVP-REG-ACCESS", "A new transport ends old engines."),
    ("LIVE-519", "memory of another host", _region(boot="44" * 16),
     "Refused", ("NO_TRANSPORT", "TRANSPORT_FAILED"), None, "KVP-REG-ACCESS",
     "A PID of another host is taken for one of this host: strange memory is mapped."),
    ("LIVE-520", "another nonce", _handle(lambda m: ("SHM", m.handle(nonce="0" * 32))),
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "A descriptor that was used again is mapped."),
    ("LIVE-521", "a process that is none", _handle(lambda m: ("SHM", m.handle(pid=2**22 + 1))),
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "A peer that died between two messages ends the engine."),
    ("LIVE-522", "a descriptor that is no memory", _handle(_not_memory),
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "A pipe or a file of the peer is mapped."),
    ("LIVE-523", "a handle of other bytes", _handle(lambda m: ("SHM", "c0ffee")),
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "A parser of handles ends the engine."),
    ("LIVE-524", "memory that may be made shorter", _unsealed,
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "A file that is made shorter kills its readers (SIGBUS)."),
    ("LIVE-525", "a region longer than its file", _longer,
     "Refused", "TRANSPORT_FAILED", None, "KVP-REG-FAIL", "The end of a mapping kills its readers (SIGBUS)."),
    ("LIVE-527", "an offset far beyond the region", _column("offset", lambda v, g: 2**63),
     "Refused", "OUT_OF_REGION", "columns[0].offset[0]", "KVP-REG-REGION", _STRAY),
    ("LIVE-530", "an offset from which the first item alone is within the region", _last_item,
     "Refused", "OUT_OF_REGION", "columns[0].item_stride[0]", "KVP-REG-REGION", _STRAY),
    ("LIVE-528", "columns of a group that nobody has", _more_columns,
     "Refused", "BAD_COLUMNS", "columns", "KVP-REG-COLUMNS", _STRAY),
    ("LIVE-531", "memory of an owner that attests other sessions", _unattested,
     "Refused", "TRANSPORT_FAILED", "regions[0].handles", "KVP-REG-ATTEST", _THEIRS),
    ("LIVE-532", "memory whose own bytes attest the session", _attested_by_a_cache,
     "Refused", "TRANSPORT_FAILED", "regions[0].handles", "KVP-REG-ATTEST", _THEIRS),
    ("LIVE-529", "a second region that cannot be mapped", _second_region,
     "Refused", "TRANSPORT_FAILED", "regions[1].handles", "KVP-REG-FAIL", "Half of a memory stays mapped for ever."),
    ("LIVE-526", "epoch 0", lambda g, s: {"epoch": "0"},
     "Error", "OUT_OF_RANGE", "epoch", "KVP-BODY-RANGE", _ROUTES),
]  # fmt: skip


def _register(change: Change, by: str, codes: Codes, path: str | None, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """The lie is refused, and the same session takes the good Register that follows."""
        sink = run.sink()
        sink.greet()
        sink.describe(sink.geometry or {})
        sink.allocate()
        run.keep(sink)
        good = sink.registration()
        id = sink.misstate("Register", **(good | change(good, sink)))
        run.refused(sink, id, by, codes, path, clause)
        if by == "Error":
            sink.watch.state = "described"
        sink.register()
        run.hand_over(sink)

    return script


def _geometry(change: Callable[[Json], None]) -> Change:
    def changed(good: Json, sink: Sink) -> Json:
        geometry = copy.deepcopy(sink.geometry or {})
        change(geometry)
        data, digest = world.digest_of(geometry)
        return {"geometry": data, "digest": digest}

    return changed


def _fact(geometry: Json) -> None:
    geometry["facts"] = [{"name": "weights.target", "value": os.urandom(4).hex(), "rule": "EQUAL"}]


def _quoted(geometry: Json) -> None:
    geometry["facts"] = [{"name": 'a"b\\c', "value": "00", "rule": "EQUAL"}]


def _group(**wrong: str) -> Change:
    return _geometry(lambda geometry: geometry["groups"][0].update(wrong))


def _part(**wrong: str) -> Change:
    return _geometry(lambda geometry: geometry["groups"][0]["parts"][0].update(wrong))


def _layers(geometry: Json) -> None:
    geometry["ranks"][0]["owns"][0]["layers"].append("77")


def _lanes(geometry: Json) -> None:
    geometry["groups"][0]["parts"][0]["lanes"] = "4"
    geometry["ranks"][0]["owns"][0]["lanes"][0]["hi"] = "4"


DESCRIBES: list[tuple[str, str, Change, str, Codes, str | None, str, str]] = [
    ("LIVE-601", "a digest that is not that of the geometry", lambda g, s: {"digest": "55" * 32},
     "Refused", "BAD_DIGEST", "digest", "KVP-DSC-DIGEST", _ROUTES),
    ("LIVE-602", "a geometry that ends early",
     lambda g, s: {"geometry": g["geometry"][:-2], "digest": _digest(g["geometry"][:-2])},
     "Refused", "TRUNCATED", None, "KVP-DSC-PATH", "A parser of Descriptions ends the engine."),
    ("LIVE-603", "a fact that the source does not state", _geometry(_fact),
     "Refused", "IDENTITY_MISMATCH", "facts[weights.target]", "KVP-GEO-FACT", _OTHER),
    ("LIVE-604", "a layer that the source lacks", _geometry(_layers),
     "Refused", "LAYER_MISSING", None, "KVP-PLAN-FIT", "Layers are paired by their place in a list, not by id."),
    ("LIVE-605", "a part that the source lacks", _part(name="acme.k"),
     "Refused", "PART_MISSING", None, "KVP-PLAN-FIT", _OTHER),
    ("LIVE-606", "another dtype", _part(dtype="F8E4M3"),
     "Refused", "DTYPE_MISMATCH", None, "KVP-PLAN-FIT", _OTHER),
    ("LIVE-607", "more lanes than the source has", _geometry(_lanes),
     "Refused", "LANE_MISMATCH", None, "KVP-PLAN-FIT", _OTHER),
    ("LIVE-608", "rows of other tokens", _group(tokens_per_row="2"),
     "Refused", "ROW_MISMATCH", None, "KVP-PLAN-FIT", _OTHER),
    ("LIVE-609", "pages of another axis", _group(axis="image"),
     "Refused", "AXIS_MISMATCH", None, "KVP-PLAN-FIT", _OTHER),
    ("LIVE-610", "another model", _group(model="3"),
     "Refused", "PART_MISSING", None, "KVP-PLAN-FIT", "Layers of a draft are taken for those of the target."),
    ("LIVE-613", "a fact whose name has quotes", _geometry(_quoted),
     "Refused", "IDENTITY_MISMATCH", None, "KVP-GEO-FACT", "A name ends the text that quotes it, or the engine."),
    ("LIVE-611", "version 0", lambda g, s: {"version": "0"},
     "Error", "OUT_OF_RANGE", "version", "KVP-BODY-RANGE", _ROUTES),
    ("LIVE-612", "an alias in place of the name of a part", _part(name="key"),
     "Refused", "PART_MISSING", None, "KVP-PART-ALIAS", "Two names of one thing are guessed to be the same."),
]  # fmt: skip


def _digest(data: str) -> str:
    return sha256(bytes.fromhex(data)).hexdigest()


def _describe(change: Change, by: str, codes: Codes, path: str | None, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """The lie is refused, and the same session takes the good Describe that follows."""
        sink = run.sink()
        sink.greet()
        data, digest = world.digest_of(sink.geometry or {})
        good = {"version": "1", "geometry": data, "digest": digest}
        id = sink.misstate("Describe", **(good | change(good, sink)))
        found = run.refused(sink, id, by, codes, path, clause).fields["path"]
        if clause == "KVP-DSC-PATH":
            run.check("inside the geometry", found.startswith("geometry"), found, clause)
        sink.describe(sink.geometry or {})
        sink.allocate()
        run.keep(sink)
        sink.register()
        run.hand_over(sink)

    return script


for _made, _rows, _name in ((_register, REGISTERS, "Register"), (_describe, DESCRIBES, "Describe")):
    for _id, _what, _change, _by, _codes, _path, _clause, _guards in _rows:
        scenario(
            _id,
            f"a {_name} with {_what}",
            _clause,
            "KVP-ERR-ALONE",
            guards=_guards,
            level="L4",
            maps=_clause in ("KVP-REG-FAIL", "KVP-REG-ATTEST") or "another host" in _what,
        )(_made(_change, _by, _codes, _path, _clause))
