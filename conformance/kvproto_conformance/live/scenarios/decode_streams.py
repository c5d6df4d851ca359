"""A sink's inline streams: many bytes; Data that are not the next, not wanted, or come while the session is resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.codec.facts import LIMITS, MESSAGES
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.scenarios.decode_hostile import given_up
from kvproto_conformance.live.source import Asked, Source
from kvproto_conformance.live.watch import Frame

_FLOOD = "A source floods a sink that reads slowly, until its memory is gone."
_STREAM = "A packed stream is unpacked one piece off: every row behind it is wrong."
_STALLS = "Bytes that nobody wants are not counted: credit shrinks by each of them, until streams stall for ever."
_PIECE = MESSAGES["Data"].names["data"].type.high
"""The most bytes that one Data may have."""

# id, what, (offset, bytes kept, last) of the second piece of a stream in two, code, path, clause
STREAMS: list[tuple[str, str, Callable[[int, int], tuple[int, int, bool]], str, str, str]] = [
    ("LIVE-821", "bytes that are not the next", lambda at, end: (at + 1, end - at - 1, True),
     "OUT_OF_RANGE", "offset", "KVP-INL-NEXT"),
    ("LIVE-822", "bytes that came before", lambda at, end: (0, end, True), "OUT_OF_RANGE", "offset", "KVP-INL-NEXT"),
    ("LIVE-823", "`last` before the end", lambda at, end: (at, 16, True), "FIELD_CONFLICT", "last", "KVP-INL-LAST"),
    ("LIVE-824", "no `last` at the end", lambda at, end: (at, end - at, False), "FIELD_CONFLICT", "last",
     "KVP-INL-LAST"),
    ("LIVE-825", "bytes beyond the end", lambda at, end: (at, end - at + 8, True), "OUT_OF_RANGE", "data",
     "KVP-INL-NEXT"),
]  # fmt: skip


def _stream(piece: Callable[[int, int], tuple[int, int, bool]], code: str, path: str, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        """The piece is refused and its transfer given up; the next one is served."""
        source, prompt, asked = run.begun()
        raw = source.packed(asked, prompt.seed)
        source.take_credit(len(raw) + 64)
        half = len(raw) // 2
        source.data(asked, 0, raw[:half], False)
        offset, size, last = piece(half, len(raw))
        source.data(asked, offset, (raw + bytes(16))[offset : offset + size], last)
        found = source.expect("Error", seconds=6.0, clause=clause)
        run.check("code", found.fields["code"] == code, str(found.fields), clause)
        run.check("path", found.fields["path"] in (path, "offset"), found.fields["path"], "KVP-ERR-REPORT")
        given_up(run, source, prompt, (code,))

    return script


for _id, _what, _piece, _code, _at, _clause in STREAMS:
    scenario(_id, f"Data with {_what}", _clause, "KVP-INL-COUNT", role="sink", guards=_STREAM, level="L4",
             transport="INLINE", extensions=("INLINE",))(_stream(_piece, _code, _at, _clause))  # fmt: skip


@scenario("LIVE-826", "Data beyond the stream, and beyond the total", "KVP-INL-NEXT", role="sink", guards=_FLOOD,
          level="L4", transport="INLINE", extensions=("INLINE",))  # fmt: skip
def _beyond(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.take_credit(1)
    for offset in range(0, source.total + _PIECE, _PIECE):
        source.data(asked, offset, bytes(_PIECE), False)
    code = source.expect("Error", seconds=6.0, clause="KVP-INL-BEYOND").fields["code"]
    run.check("refused", code in ("CREDIT", "OUT_OF_RANGE"), code, "KVP-INL-BEYOND")
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "CREDIT", "OUT_OF_RANGE")


@scenario("LIVE-827", "Done before the stream is at its end", "KVP-STG-EARLY", "KVP-STG-END", role="sink",
          guards=_STREAM, level="L4", transport="INLINE", extensions=("INLINE",))  # fmt: skip
def _early_done(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    raw = source.packed(asked, prompt.seed)
    source.take_credit(len(raw))
    source.data(asked, 0, raw[: len(raw) // 2], False)
    done = source.done(asked, run.handed(source, prompt), prompt.seed)
    refused_early(source, done)
    given_up(run, source, prompt, ("UNEXPECTED_MESSAGE",))


def refused_early(source: Source, done: Frame) -> None:
    """A Done that comes before the end of its stream is answered with Error."""
    mine = done.fields["request"]
    found = source.expect("Error", "DoneAck", where=lambda f: f.get("request") == mine, clause="KVP-STG-EARLY")
    said = found.name, found.fields.get("code"), found.fields.get("path")
    if said != ("Error", "UNEXPECTED_MESSAGE", "sequence"):
        raise Missed(f"an early Done is answered by {said}", "KVP-STG-EARLY")
    source.watch.transfers[done.fields["sequence"]] = "done"


@scenario("LIVE-828", "Data that come while the session is resumed: no Credit before Welcome, and then from 0",
          "KVP-INL-PAUSE", "KVP-INL-RESUMED", role="sink", level="L4", transport="INLINE",
          extensions=("INLINE", "RESUME"),
          guards="After a connection broke the two sides count from different bytes: a later request is lost.",
          must=False, slow=True)  # fmt: skip
def _resumed(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.take_credit(1)
    window = source.total
    run.engine.ask("abort", id=prompt.id)
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    unknown = {"code": "UNKNOWN_SESSION", "path": "session", "mine": "no such session", "yours": source.session}
    source.send("Error", request=abort.fields["request"], **unknown)
    hello = source.expect("Hello", clause="KVP-SES-HELLO")
    run.check("resumes", hello.fields.get("resume") == source.session, str(hello.fields), "KVP-SES-HELLO")
    for offset in range(0, window // 2, _PIECE):
        source.data(asked, offset, bytes(_PIECE), False)
    source.silence(0.3, but=("Abort",))
    early = [frame.fields["total"] for frame in source.heard if frame.name == "Credit"]
    run.check("no Credit", not early, f"a total of {', '.join(early)}", "KVP-INL-PAUSE")
    source.reply(hello, "Welcome", **source.welcomed)
    source.begin_credit()
    source.reply(source.expect("Abort", clause="KVP-SES-RESEND"), "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    source.take_credit(1)
    run.check("from 0", source.total <= window, f"{source.total} after {window}", "KVP-INL-RESUMED")
    run.hand_over([source])


@scenario("LIVE-829", "Data that are refused, dropped, or of a request that is over: all of them are counted",
          "KVP-INL-COUNT", "KVP-INL-NEXT", role="sink", guards=_STALLS, level="L4", transport="INLINE",
          extensions=("INLINE",))  # fmt: skip
def _counted(run: DecodeRun) -> None:
    source = run.one()
    source.take_credit(1)
    window = source.total

    def lost(asked: Asked) -> None:
        source.take_credit(_PIECE)
        source.misstate("Data", **asked.of, offset="1", data=bytes(_PIECE).hex(), last=False)
        source.sent += _PIECE
        left = source.total - source.sent
        run.check("no more than the window", left <= window, f"{left} bytes may come, not {window}", "KVP-INL-COUNT")

    def over() -> None:
        said = source.expect("Error", clause="KVP-SES-STATE").fields
        run.check("refused", said["code"] in ("UNEXPECTED_MESSAGE", "STALE_TRANSFER"), str(said), "KVP-SES-STATE")

    for _ in range(min(window // _PIECE + 2, 20)):  # enough that the window is used up by each kind
        prompt = run.fetched(source)
        asked = run.asked(source, prompt)
        lost(asked)
        said = source.expect("Error", clause="KVP-INL-NEXT").fields
        run.check("refused", said["code"] == "OUT_OF_RANGE", str(said), "KVP-INL-NEXT")
        abort = source.expect("Abort", clause="KVP-END-FAILED")
        lost(asked)
        source.reply(abort, "Drained", proof="PROVEN")
        run.lost(prompt, "OUT_OF_RANGE")
        lost(asked)
        over()
    prompt = run.fetched(source)
    asked = run.asked(source, prompt)
    run.deliver(source, asked, prompt)
    lost(asked)
    over()
    run.arrived(prompt)
    run.hand_over([source])


@scenario("LIVE-356", "a stream in pieces of the greatest length, and more bytes than one window", "KVP-INL-COUNT",
          "KVP-INL-HALF", role="sink", transport="INLINE",
          guards="Credit is given once: the first hundred requests are well, and then streams stall.",
          extensions=("INLINE",), world="long")  # fmt: skip
def _windows(run: DecodeRun) -> None:
    source = run.one()
    source.take_credit(1)
    window = source.total
    upto = min(2 * window, LIMITS["max_credit"] + 1)
    while source.sent < upto:
        prompt = run.prompt(300)
        run.fetch(source, prompt)
        asked = run.asked(source, prompt)
        source.stream(asked, prompt.seed, _PIECE)
        source.acknowledged(source.done(asked, run.handed(source, prompt), prompt.seed))
        run.arrived(prompt)
        source.take_credit(window // 2, "KVP-INL-HALF")
        left = source.total - source.sent
        run.check("within max_credit", left <= LIMITS["max_credit"], f"{left} bytes may come", "KVP-INL-CREDIT")
