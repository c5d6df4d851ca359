"""Frames to a source that cannot be read, or that come when they may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.claims import extensions_with
from kvproto_conformance.codec import write_frame
from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.live.lax import lax_body, raw_frame
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

Json = dict[str, Any]
Frames = Callable[[Sink], bytes]
_PARSER = "A parser of bytes from the network ends the engine, or costs another peer its session."
_STATE = "A message at the wrong time moves the state of a session, and what follows is taken for something else."
_SECRET = "A session of one peer is driven by another."


def _ping(sink: Sink, **more: Any) -> Json:
    return {"session": sink.session, "request": "900", **more}


def _body(sink: Sink) -> bytes:
    return lax_body("Ping", _ping(sink))


def _changed(**envelope: int) -> Frames:
    return lambda sink: raw_frame("Ping", _body(sink), **envelope)


def _with(change: Callable[[bytes], bytes]) -> Frames:
    return lambda sink: raw_frame("Ping", change(_body(sink)))


def _more(field: bytes) -> Callable[[bytes], bytes]:
    """The body with an entry more."""
    return lambda body: bytes([body[0] + 1]) + body[1:] + field


DEEP = b"\xcd\x80\x1b" + b"\x91" * 12 + b"\xc0"

# id, what, frame, code, path, whether a request that cannot be read is answered with its id, clause
UNREADABLE: list[tuple[str, str, Frames, str | None, str | None, str]] = [
    ("LIVE-701", "another magic", lambda s: b"HTTP" + _changed()(s)[4:], None, None, "KVP-FRAME-MAGIC"),
    ("LIVE-702", "7 bytes", lambda s: _changed()(s)[:7], None, None, "KVP-FRAME-SHORT"),
    ("LIVE-703", "no bytes", lambda s: b"", None, None, "KVP-FRAME-SHORT"),
    ("LIVE-704", "major 9", _changed(major=9), None, None, "KVP-FRAME-MAJOR"),
    ("LIVE-705", "a message that nobody knows", _changed(type=0x3FFF), None, None, "KVP-FRAME-TYPE"),
    ("LIVE-706", "a message under the major of another", _changed(major=1), None, None, "KVP-FRAME-TYPE-MAJOR"),
    ("LIVE-707", "an unknown flag of the low byte", _changed(flags=1), None, None, "KVP-FRAME-FLAGS"),
    ("LIVE-708", "a body that is cut short", _changed(length=4096), None, None, "KVP-FRAME-LENGTH"),
    ("LIVE-709", "bytes after the body", lambda s: _changed()(s) + b"\0", None, None, "KVP-FRAME-TRAILING"),
    ("LIVE-710", "a length beyond max_body", _changed(length=2**32 - 1), None, None, "KVP-FRAME-LIMIT"),
    ("LIVE-711", "a field that must be understood", _with(_more(b"\x1e\x01")),
     "UNKNOWN_FIELD", "#001e", "KVP-BODY-UNKNOWN"),
    ("LIVE-712", "no session", lambda s: raw_frame("Ping", lax_body("Ping", {"request": "900"})),
     "MISSING_FIELD", "session", "KVP-BODY-REQUIRED"),
    ("LIVE-713", "a field twice", _with(lambda body: bytes([body[0] + 1]) + body[1:] + body[-4:]),
     "FIELD_ORDER", None, "KVP-BODY-ORDER"),
    ("LIVE-714", "values nested beyond max_depth", _with(_more(DEEP)), "TOO_DEEP", "#801b", "KVP-BODY-DEPTH"),
    ("LIVE-715", "text in place of a number", lambda s: raw_frame("Ping", b"\x82\x01\xa1x\x02\xcd\x03\x84"),
     "BAD_TYPE", "session", "KVP-BODY-TYPE"),
    ("LIVE-716", "nil in place of a number", lambda s: raw_frame("Ping", b"\x82\x01\xc0\x02\xcd\x03\x84"),
     "BAD_TYPE", "session", "KVP-BODY-TYPE"),
    ("LIVE-717", "a number that is not in its shortest form",
     lambda s: raw_frame("Ping", b"\x82\x01\xcf" + int(s.session).to_bytes(8, "big") + b"\x02\xce\0\0\x03\x84"),
     "NOT_CANONICAL", "request", "KVP-BODY-FORM"),
    ("LIVE-718", "bytes after the map", _with(lambda body: body + b"\xc0"), "TRAILING_BYTES", "", "KVP-BODY-TRAILING"),
    ("LIVE-719", "a map of more entries than there are bytes", _with(lambda body: b"\xdf\x7f\xff\xff\xff" + body[1:]),
     "TOO_LARGE", None, "KVP-BODY-LIMIT"),
    ("LIVE-720", "a body that is no map", _with(lambda body: b"\x93\x01\x02\x03"), "BAD_TYPE", "", "KVP-BODY-TYPE"),
]  # fmt: skip


def _unreadable(frame: Frames, code: str | None, path: str | None, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """The frame is refused by its code, or dropped, and the same session is served as if it had not come."""
        sink = run.ready()
        sink.misbehave("unreadable", frame(sink))
        if code is not None:
            run.refused(sink, None, "Error", code, path, clause)
        sink.ask("Ping", "Pong")
        sink.heard = [heard for heard in sink.heard if heard.name != "Error"]
        run.hand_over(sink)

    return script


for _id, _what, _frame, _code, _path, _clause in UNREADABLE:
    scenario(_id, f"a frame with {_what}", _clause, "KVP-ERR-ALONE", "KVP-ERR-ANSWER", guards=_PARSER, level="L4")(
        _unreadable(_frame, _code, _path, _clause)
    )


# id, what, message, fields, by (one of these messages), code, clause
EARLY: list[tuple[str, str, str, Json, str, str, str]] = [
    ("LIVE-731", "Register before the Descriptions", "Register", {"epoch": "1", "access": "WRITE", "regions": [],
     "columns": [], "routes": [], "source": "00" * 32, "sink": "00" * 32, "plan": "00" * 32},
     "Refused", "UNEXPECTED_MESSAGE", "KVP-DSC-BOTH"),
    ("LIVE-732", "Transfer before Register", "Transfer", {"sequence": "1", "ticket": "00" * 16,
     "content": "00" * 32, "source_version": "1", "sink_version": "1", "epoch": "1", "writers": ["0"],
     "grants": [{"group": "1", "first": "0", "count": "0", "valid": "0"}]},
     "Failed", "UNEXPECTED_MESSAGE", "KVP-TRN-CHECKS"),
    ("LIVE-733", "Unregister", "Unregister", {"epoch": "1"}, "Refused Error", "UNEXPECTED_MESSAGE", "KVP-SES-STATE"),
    ("LIVE-734", "Credit", "Credit", {"kind": "INLINE", "total": "100"}, "Error", "UNEXPECTED_MESSAGE",
     "KVP-SES-STATE"),
    ("LIVE-735", "Grant of a transfer that is none", "Grant", {"sequence": "1",
     "grants": [{"group": "1", "first": "0", "count": "0", "valid": "0"}]},
     "Failed Error", "", "KVP-SES-STATE"),
    ("LIVE-736", "Renew of a lease that is none", "Renew", {"sequence": "1", "lease": "1000"},
     "Error", "", "KVP-SES-STATE"),
]  # fmt: skip


def _early(message: str, fields: Json, by: str, code: str, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """It is refused, and the session goes on from where it was."""
        sink = run.sink()
        sink.greet()
        found = sink.misplaced(message, *by.split(), clause=clause, **fields)
        if found and code:
            unknown = {"UNKNOWN_MESSAGE"} if extensions_with(message) else set()
            run.check("code", found.fields["code"] in {code, *unknown}, str(found.fields), clause)
        if found and found.name == "Failed":
            sink.watch.transfers.clear()
            sink.misbehave("DoneAck", write_frame("DoneAck", {
                "session": sink.session, "request": found.fields["request"], "sequence": "1"}))  # fmt: skip
        sink.describe(sink.geometry or {})
        sink.allocate()
        run.keep(sink)
        sink.register()
        sink.sequences = 1
        run.hand_over(sink)

    return script


for _id, _what, _message, _fields, _by, _code, _clause in EARLY:
    scenario(_id, f"{_what}, in a session that is open", _clause, "KVP-VER-EXTENSION", guards=_STATE, level="L4")(
        _early(_message, _fields, _by, _code, _clause)
    )


@scenario("LIVE-741", "a message of two parts is ignored", "KVP-NET-ONE", guards=_PARSER, level="L4")
def _multipart(run: PrefillRun) -> None:
    sink = run.ready()
    frame = write_frame("Ping", _ping(sink))
    sink.misbehave("two parts", frame, b"more")
    sink.misbehave("halves", frame[:12], frame[12:])
    answer = sink.ask("Ping", "Pong")
    run.check(
        "nothing answers it", not sink.heard and answer.fields["request"] != "900", str(sink.heard), "KVP-NET-ONE"
    )
    run.hand_over(sink)


@scenario("LIVE-742", "replies and notices that cannot be read are not answered", "KVP-ERR-SILENT",
          guards="Two engines answer each other's errors for ever.", level="L4")  # fmt: skip
def _silent(run: PrefillRun) -> None:
    sink = run.ready()
    for name in ("DoneAck", "Pong", "Error", "Goodbye"):
        sink.misbehave(f"{name} of junk", raw_frame(name, b"\x81\x01\xc0"))
    sink.ask("Ping", "Pong")
    run.check("silence", not sink.heard, str([f.name for f in sink.heard]), "KVP-ERR-SILENT")
    run.hand_over(sink)


@scenario("LIVE-743", "an Error is not answered", "KVP-ERR-SILENT", "KVP-ERR-UNKNOWN",
          guards="Two engines answer each other's errors for ever.", level="L4")  # fmt: skip
def _error(run: PrefillRun) -> None:
    sink = run.ready()
    for code in ("0x0402", "0x7ABC"):
        sink.misstate("Error", session=sink.session, request="77", code=int(code, 16), path="", mine="", yours="")
    sink.ask("Ping", "Pong")
    run.check("silence", not sink.heard, str([f.name for f in sink.heard]), "KVP-ERR-SILENT")
    run.hand_over(sink)


@scenario("LIVE-744", "a frame of a session that is none", "KVP-SES-UNKNOWN", guards=_SECRET, level="L4")
def _no_session(run: PrefillRun) -> None:
    sink = run.ready()
    for session in ("0", "1", str(int(sink.session) ^ 1), str(2**64 - 1)):
        id = sink.misstate("Ping", session=session)
        run.refused(sink, id, "Error", "UNKNOWN_SESSION", clause="KVP-SES-UNKNOWN")
    run.hand_over(sink)


@scenario("LIVE-745", "a frame of another connection's session", "KVP-SES-UNKNOWN", guards=_SECRET, level="L4")
def _stolen(run: PrefillRun) -> None:
    mine, thief = run.ready(), run.ready()
    for name, fields in (
        ("Ping", {}), ("Abort", {"sequence": "1", "reason": "mine"}), ("Goodbye", {"reason": "theirs"}),
    ):  # fmt: skip
        id = thief.misstate(name, session=mine.session, **fields)
        found = thief.expect("Error", seconds=6.0, clause="KVP-SES-UNKNOWN")
        good = found.fields["code"] == "UNKNOWN_SESSION" and found.fields.get("request", id) == id
        run.check(f"{name} is refused", good or not id, str(found.fields), "KVP-SES-UNKNOWN")
    run.hand_over(mine)
    run.hand_over(thief)


@scenario("LIVE-746", "messages that only a source sends", "KVP-SES-STATE", guards=_STATE, level="L4")
def _roles(run: PrefillRun) -> None:
    sink = run.ready()
    at = {"sequence": "1"}
    for name, fields in (
        ("Accepted", {"request": "1", **at, "state": "READY"}), ("Drained", {"request": "1", **at, "proof": "PROVEN"}),
        ("Welcome", sink.hello() | {"version": {"major": "1", "minor": "0"}, "features": [], "request": "1",
                                    "endpoints": [{"rank": "0", "address": "ipc:///nowhere"}]}),
    ):  # fmt: skip
        sink.misstate(name, **{k: v for k, v in fields.items() if k not in ("versions", "role", "offered", "needed")})
    id = sink.misstate("Done", **at, writer="0", groups=["1"], bytes="0", outcome="CONTINUE", handoff=[])
    found = sink.expect("Error", where=lambda f: f.get("request") == id, seconds=6.0, clause="KVP-SES-STATE")
    run.check("code", found.fields["code"] == "UNEXPECTED_MESSAGE", str(found.fields), "KVP-SES-STATE")
    sink.ask("Ping", "Pong")
    sink.heard.clear()
    run.hand_over(sink)


@scenario("LIVE-747", "Goodbye, and then more of the session", "KVP-SES-UNKNOWN", guards=_STATE, level="L4")
def _after_goodbye(run: PrefillRun) -> None:
    sink = run.ready()
    sink.goodbye()
    id = sink.misstate("Ping")
    run.refused(sink, id, "Error", "UNKNOWN_SESSION", clause="KVP-SES-UNKNOWN")


@scenario("LIVE-748", "a body of max_body bytes of junk", "KVP-BODY-LIMIT", guards=_PARSER, level="L4")
def _large(run: PrefillRun) -> None:
    sink = run.ready()
    body = _body(sink)
    junk = b"\xcd\x80\x1b\xc6" + (LIMITS["max_bytes"] + 1).to_bytes(4, "big") + bytes(LIMITS["max_bytes"] + 1)
    sink.misbehave("junk", raw_frame("Ping", bytes([body[0] + 1]) + body[1:] + junk))
    run.refused(sink, None, "Error", "TOO_LARGE", "#801b", "KVP-BODY-LIMIT")
    run.hand_over(sink)


@scenario("LIVE-749", "a flood of 2,000 Pings beside a good peer", "KVP-NET-TURN", "KVP-SES-PONG",
          guards="One peer that does not stop keeps all others from being heard.", level="L4")  # fmt: skip
def _flood(run: PrefillRun) -> None:
    flooder, good = run.ready(), run.ready()
    frame = flooder.send("Ping", request="900")
    for _ in range(2000):
        flooder.wire.send(frame.raw)
    run.hand_over(good)
    end = flooder.ask("Ping", "Pong")
    run.check("the flooder is answered too", end.fields["session"] == flooder.session)


@scenario("LIVE-750", "300 Hellos that nobody goes on with, then a good peer", "KVP-SES-BARE",
          guards="Sessions that never describe themselves take all the room.", level="L4")  # fmt: skip
def _bare(run: PrefillRun) -> None:
    for number in range(300):
        sink = run.sink(name=f"bare-{number % 50}", geometry={})
        sink.greet()
    run.hand_over(run.ready())
