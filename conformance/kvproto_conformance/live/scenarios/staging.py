"""Extension STAGED, in both roles: packed bytes in staging slots, under credit, written by NIXL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.scenarios.decode_hostile import given_up
from kvproto_conformance.live.scenarios.decode_streams import refused_early
from kvproto_conformance.live.source import Asked
from kvproto_conformance.live.staged import SLOTS, StagedSink, StagedSource

Json = dict[str, Any]
_PACKED = "A packed stream is unpacked one piece off, or a slot is written while its bytes are still read."
_SLOT = "A slot that the other side still reads, or does not have, is written."
_SILENT = "Pages behind staging memory that is not there: the first transfer ends a session that seemed good."


def _sink(run: PrefillRun) -> StagedSink:
    sink = run.ready(offered=["VERIFY"])
    assert isinstance(sink, StagedSink)
    run.chosen(sink)
    return sink


def _source(run: DecodeRun) -> StagedSource:
    source = run.one(offered=["VERIFY"])
    assert isinstance(source, StagedSource)
    run.chosen(source)
    return source


def _read(run: PrefillRun) -> None:
    """Two requests over one session, whose slots come back."""
    sink = _sink(run)
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(17))
    run.check("every slot is granted again", len(sink.open_slots) == SLOTS, str(sink.open_slots), "KVP-STG-BEYOND")


def _written(run: DecodeRun) -> None:
    """Two fetches over one session, whose slots come back."""
    source = _source(run)
    assert source.there is not None
    for prompt in (run.prompt(), run.prompt(17)):
        run.hand_over([source], prompt)
        source.take_slots(source.there.slots)
        run.check("every slot is granted again", len(source.slots) == source.there.slots, clause="KVP-STG-RETURN")


for _number, _world in enumerate(("gqa", "mla", "hybrid")):
    scenario(f"LIVE-{1201 + _number}", f"two requests of {_world} in staging slots, every byte by coordinate",
             "KVP-STG-FIRST", guards=_PACKED, world=_world, transport="NIXL",
             extensions=("STAGED",))(_read)  # fmt: skip
    scenario(f"LIVE-{1251 + _number}", f"two fetches of {_world} in staging slots, every byte as attention reads it",
             "KVP-STG-END", guards=_PACKED, role="sink", world=_world, transport="NIXL",
             extensions=("STAGED",))(_written)  # fmt: skip


@scenario("LIVE-1204", "slots are granted one at a time", "KVP-STG-BEYOND", guards=_SLOT, transport="NIXL",
          extensions=("STAGED",))  # fmt: skip
def _slowly(run: PrefillRun) -> None:
    sink = run.sink()
    assert isinstance(sink, StagedSink)
    sink.eager = False
    sink.ready()
    prompt = run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    early = sink.silence(0.1)
    if not run.check("nothing without credit", not early, str([frame.name for frame in early]), "KVP-STG-BEYOND"):
        return
    size = sum(piece.hi - piece.lo for piece in sink.pieces(made))
    slot = SLOTS - 1
    while len(made.stream) < size:
        sink.grant_slots(slot)
        sink.take_chunk(made, sink.expect("Chunk", where=sink.of(made), clause="KVP-STG-FIRST"))
        slot = (slot + 1) % SLOTS
    run.delivered(sink, made, prompt)


def _overcredited(slots: Callable[[StagedSink], list[int]], kind: str, code: str, path: str, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """The Credit is refused, and the session goes on."""
        sink = _sink(run)
        said: Json = {"slots": [str(slot) for slot in slots(sink)]} if kind == "STAGING" else {"total": "1000"}
        sink.misstate("Credit", kind=kind, **said)
        found = sink.expect("Error", seconds=6.0, clause=clause).fields
        run.check("code", found["code"] == code, f"{found['code']} at {found['path']!r}", clause)
        if path:
            run.check("path", found["path"] == path, found["path"], "KVP-ERR-REPORT")
        run.hand_over(sink)

    return script


for _id, _what, _slots, _kind, _code, _path, _clause in (
    ("1211", "a slot that is not there", lambda sink: [SLOTS], "STAGING", "CREDIT", "slots[0]", "KVP-STG-TWICE"),
    ("1212", "a slot that may be written already", lambda sink: [2], "STAGING", "CREDIT", "slots[0]", "KVP-STG-TWICE"),
    ("1213", "bytes, which are of another transport", lambda sink: [], "INLINE", "UNEXPECTED_MESSAGE", "",
     "KVP-STG-KIND"),
):  # fmt: skip
    scenario(f"LIVE-{_id}", f"a Credit of {_what}", _clause, guards=_SLOT, level="L4", transport="NIXL",
             extensions=("STAGED",))(_overcredited(_slots, _kind, _code, _path, _clause))  # fmt: skip


def _unreachable(change: Callable[[Json], Json], offered: bool, codes: tuple[str, ...], clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """Register is refused, and after it a good one is heard."""
        sink = run.sink()
        sink.greet(**({} if offered else {"offered": []}))
        sink.describe(sink.geometry or {})
        sink.allocate()
        id = sink.misstate("Register", **(good := sink.registration()) | change(good))
        run.refused(sink, id, "Refused", codes, None, clause)
        if offered:
            sink.register()
            run.hand_over(sink)

    return script


def _damaged(good: Json) -> Json:
    """The staging memory's handle with a byte that its digest does not cover any more."""
    pages, staging = good["regions"]
    data = staging["handles"][0]["data"]
    broken = data[:-2] + f"{int(data[-2:], 16) ^ 1:02x}"
    return {"regions": [pages, staging | {"handles": [{"transport": "NIXL", "data": broken}]}]}


for _id, _what, _change, _offered, _codes, _clause in (
    ("1221", "pages behind staging memory that is not there", lambda good: {"regions": good["regions"][:1]}, True,
     ("NO_TRANSPORT",), "KVP-REG-STAGING"),
    ("1222", "pages behind staging memory, without STAGED", lambda good: {}, False, ("NO_TRANSPORT",),
     "KVP-REG-STAGING"),
    ("1223", "a handle that was damaged on its way", _damaged, True, ("TRANSPORT_FAILED", "NO_TRANSPORT"),
     "KVP-REG-FAIL"),
):  # fmt: skip
    scenario(f"LIVE-{_id}", f"a Register of {_what}", _clause, guards=_SILENT, level="L4", transport="NIXL",
             extensions=("STAGED",))(_unreachable(_change, _offered, _codes, _clause))  # fmt: skip


@scenario("LIVE-1254", "pieces that do not fill their slots", "KVP-STG-NEXT", role="sink", guards=_PACKED, world="mla",
          transport="NIXL", extensions=("STAGED",))  # fmt: skip
def _short(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    source.stream(asked, prompt.seed, most=37)
    done = source.done(asked, run.handed(source, prompt), prompt.seed)
    source.acknowledged(done)
    run.arrived(prompt)


def _begun(run: DecodeRun) -> tuple[StagedSource, Prompt, Asked]:
    """A fetch that the source has accepted, and nothing of it is written."""
    source, prompt = _source(run), run.prompt()
    run.fetch(source, prompt)
    return source, prompt, run.asked(source, prompt)


Second = Callable[[StagedSource, int, int], Json]
"""The fields of a stream's second piece, by where it begins and where the stream ends."""


def _misnamed(second: Second, code: str, path: str, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        """The piece is refused and its transfer given up; the next one is served."""
        source, prompt, asked = _begun(run)
        assert source.there is not None
        raw = source.packed(asked, prompt.seed)
        first = min(len(raw) // 2, source.there.slot)
        source.put(asked, 0, raw[:first], False)
        source.take_slots()
        good: Json = {"slot": source.slots[0], "offset": first, "size": min(len(raw) - first, source.there.slot)}
        good["last"] = first + good["size"] == len(raw)
        lie = good | second(source, first, len(raw))
        if lie["slot"] in source.slots:
            source.slots.remove(lie["slot"])
        source.chunk(asked, **lie)
        found = source.expect("Error", seconds=6.0, clause=clause).fields
        run.check("code", found["code"] == code, f"{found['code']} at {found['path']!r}", clause)
        paths = (path, "offset") if code == "OUT_OF_RANGE" else (path,)
        run.check("path", found["path"] in paths, found["path"], "KVP-ERR-REPORT")
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, code)
        run.hand_over([source])

    return script


CHUNKS: list[tuple[str, str, Second, str, str, str]] = [
    ("1261", "a slot that was not granted", lambda s, at, end: {"slot": 1000}, "CREDIT", "slot", "KVP-STG-BEYOND"),
    ("1262", "bytes that are not the next", lambda s, at, end: {"offset": at + 1, "size": 8, "last": False},
     "OUT_OF_RANGE", "offset", "KVP-STG-NEXT"),
    ("1263", "bytes that came before", lambda s, at, end: {"offset": 0, "size": at, "last": False},
     "OUT_OF_RANGE", "offset", "KVP-STG-NEXT"),
    ("1264", "more bytes than a slot has", lambda s, at, end: {"size": s.there.slot + 1 if s.there else 0,
     "last": False}, "OUT_OF_RANGE", "bytes", "KVP-STG-NEXT"),
    ("1265", "bytes beyond the end", lambda s, at, end: {"size": end - at + 1, "last": True},
     "OUT_OF_RANGE", "bytes", "KVP-STG-NEXT"),
]  # fmt: skip
for _id, _what, _second, _code, _path, _clause in CHUNKS:
    scenario(f"LIVE-{_id}", f"a Chunk of {_what}", _clause, role="sink", guards=_PACKED, level="L4", transport="NIXL",
             extensions=("STAGED",))(_misnamed(_second, _code, _path, _clause))  # fmt: skip


@scenario("LIVE-1266", "Done before the last Chunk", "KVP-STG-EARLY", "KVP-STG-END", role="sink", guards=_PACKED,
          level="L4", transport="NIXL", extensions=("STAGED",))  # fmt: skip
def _early(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    assert source.there is not None
    raw = source.packed(asked, prompt.seed)
    source.put(asked, 0, raw[: min(len(raw) // 2, source.there.slot)], False)
    done = source.done(asked, run.handed(source, prompt), prompt.seed)
    refused_early(source, done)
    given_up(run, source, prompt, ("UNEXPECTED_MESSAGE",))
