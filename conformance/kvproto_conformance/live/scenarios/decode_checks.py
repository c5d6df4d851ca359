"""Refusals by a sink of sources that do not keep to the specification: one thing is wrong, and the rest is right."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from kvproto_conformance.claims import extensions_with
from kvproto_conformance.codec import write_frame
from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.live import world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.lax import lax_frame, raw_frame
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.scenarios.decode_hostile import leave, not_offered
from kvproto_conformance.live.source import Source

Json = dict[str, Any]
_PART = "Only a part of a number or digest is compared: what differs in the rest is believed."
_BELIEVED = "A session that only one side believes in: requests wait in it for ever."
_PARSER = "A parser of bytes from the network ends the engine, or starts an exchange of errors without an end."
_TOKEN = "The first token is lost, or another's; or memory beside it is written."
_BYTES = "Bytes that were damaged on their way are decoded on, and nothing says so."
_ANOTHER = "A word about another transfer is taken for one about this."


def _under(id: str) -> Callable[[Json], bool]:
    """Whether a message is about the request of this id."""
    return lambda fields: fields.get("request") == id


def _flipped(digest: str) -> str:
    """Another one, by its last bit."""
    return digest[:-1] + f"{int(digest[-1], 16) ^ 1:x}"


@scenario("LIVE-861", "a Ping of another session, by one of its upper bits", "KVP-SES-OTHER", role="sink", guards=_PART,
          level="L4")  # fmt: skip
def _other_sessions(run: DecodeRun) -> None:
    source = run.one()
    for flip in (1 << 32, 1 << 40, 1 << 63):
        id = source.misstate("Ping", session=str(int(source.session) ^ flip))
        found = source.expect("Error", where=_under(id), clause="KVP-SES-OTHER").fields
        run.check("code", found["code"] == "UNKNOWN_SESSION", found["code"], "KVP-SES-OTHER")
        stated = found.get("session", str(int(source.session) ^ flip))
        run.check("session as received", stated == str(int(source.session) ^ flip), stated, "KVP-SES-OTHER")
    run.hand_over([source])


@scenario("LIVE-862", "Ping and Goodbye before Welcome", "KVP-SES-OTHER", role="sink", level="L4",
          guards="What an earlier run of prefill still had to say ends the session with the next one.")  # fmt: skip
def _before_welcome(run: DecodeRun) -> None:
    source = run.connected()
    hello = source.expect("Hello", clause="KVP-NEG-VERSION")
    source.misstate("Ping", session="77")
    source.misstate("Goodbye", session="77", reason="over")
    heard = [frame.name for frame in source.silence(0.2)]
    run.check("ignored", not heard, str(heard), "KVP-SES-OTHER")
    source.heard.insert(0, hello)
    source.ready()
    run.hand_over([source])


@scenario("LIVE-863", "a second Welcome, to another session", "KVP-SES-ANSWERED", role="sink", guards=_ANOTHER,
          level="L4")  # fmt: skip
def _second_welcome(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome()
    source.wire.send(write_frame("Welcome", source.last["Welcome"].fields | {"session": "12345"}))
    source.describe()
    source.registered()
    run.hand_over([source])


@scenario("LIVE-864", "Refused of what was not asked, and of what was answered", "KVP-SES-ANSWERED", role="sink",
          guards=_ANOTHER, level="L4")  # fmt: skip
def _stray_refusals(run: DecodeRun) -> None:
    source = run.one()
    for request in ("999", source.last["Description"].fields["request"]):
        source.misstate("Refused", session=source.session, request=request, code="BUSY", path="", mine="", yours="")
    run.hand_over([source])


def _ended(wrong: Callable[[Source], Any], *codes: str) -> Any:
    """A fetch waits while its session is opened, and is lost when that fails."""

    def script(run: DecodeRun) -> None:
        (source,) = run.source()
        prompt = run.prompt()
        run.connect(source)
        run.fetch(source, prompt)
        wrong(source)
        run.lost(prompt, *codes)
        heard = [frame.name for frame in source.silence(0.05)]
        run.check("nothing is requested", "Transfer" not in heard, str(heard), "KVP-NEG-CHECK")
        source.session = ""

    return script


def _version(source: Source) -> None:
    source.welcome(version={"major": "2", "minor": "0"})


def _unasked(source: Source) -> None:
    def of(hello: Json) -> list[str]:
        ways = (feature for feature in ("INLINE", "PULL", "STAGED") if feature not in hello["offered"])
        return [next(ways, *not_offered(hello))]

    source.welcome(features=of)


def _digest(source: Source) -> None:
    source.welcome()
    source.describe(digest=_flipped(world.digest_of(source.geometry)[1]))


def _plan(source: Source) -> None:
    source.welcome()
    source.describe()
    source.registered(plan=_flipped(source.planned["plan"]))


def _route(source: Source) -> None:
    source.welcome()
    source.describe()
    first, *others = source.routes()
    source.registered(routes=[first | {"digest": _flipped(first["digest"])}, *others])


for _id, _title, _wrong, _codes, _clause in (
    ("LIVE-865", "a Welcome of major 2", _version, ("FEATURE_MISSING", "NO_VERSION"), "KVP-NEG-CHECK"),
    ("LIVE-866", "a Welcome with a feature of another transport", _unasked, ("FEATURE_MISSING",), "KVP-NEG-CHECK"),
    ("LIVE-867", "a Description whose digest differs by a bit", _digest, ("BAD_DIGEST",), "KVP-DSC-DIGEST"),
    ("LIVE-868", "a Registered whose plan differs by a bit", _plan, ("ROUTE_MISMATCH",), "KVP-REG-CHECK"),
    ("LIVE-869", "a Registered with a route that differs by a bit", _route, ("ROUTE_MISMATCH",), "KVP-REG-CHECK"),
):  # fmt: skip
    scenario(_id, f"{_title}: what waits is lost", _clause, role="sink", level="L4", must=_id != "LIVE-866",
             guards=_BELIEVED)(_ended(_wrong, "PEER_LOST", *_codes))  # fmt: skip


@scenario("LIVE-906", "a Description whose geometry ends early", "KVP-DSC-PATH", role="sink", level="L4",
          guards="A parser of Descriptions ends the engine, or names the wrong bytes.")  # fmt: skip
def _cut_short(run: DecodeRun) -> None:
    (source,), prompt = run.source(), run.prompt()
    run.connect(source)
    run.fetch(source, prompt)
    source.welcome()
    data = bytes.fromhex(world.digest_of(source.geometry)[0])[:-1]
    source.describe(geometry=data.hex(), digest=sha256(data).hexdigest())
    run.lost(prompt, "PEER_LOST", "TRUNCATED")
    paths = [frame.fields["path"] for frame in source.silence(0.1) if frame.name == "Error"]  # or Goodbye alone
    run.check("inside the geometry", all(path.startswith("geometry") for path in paths), str(paths), "KVP-DSC-PATH")
    source.session = ""


@scenario("LIVE-870", "a Done that is refused is not acknowledged", "KVP-TRN-REFUSE", role="sink", level="L4",
          guards="Prefill frees what decode has refused.")  # fmt: skip
def _not_acknowledged(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.move(asked, prompt.seed)
    good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    id = source.misstate("Done", **(good | asked.of | {"writer": "5"}))
    first = source.expect("Error", "DoneAck", where=_under(id), clause="KVP-TRN-REFUSE")
    run.check("Error", first.name == "Error", first.name, "KVP-TRN-REFUSE")
    source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
    run.lost(prompt, "WRONG_PEER")
    heard = [frame.name for frame in source.silence(0.05)]
    run.check("no DoneAck", "DoneAck" not in heard, str(heard), "KVP-TRN-REFUSE")


@scenario("LIVE-871", "Done of a sequence that differs above 32 bits", "KVP-SES-STATE",
          role="sink", guards=_ANOTHER, level="L4")  # fmt: skip
def _another(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    sequence = asked.of["sequence"]
    id = source.misstate("Done", **(good | {"sequence": str(int(sequence) + 2**32)}))
    source.expect("Error", where=_under(id), clause="KVP-SES-STATE")
    waiting = run.state(prompt, 0.1)
    run.check("still waiting", waiting["state"] == "waiting", str(waiting), "KVP-ERR-ALONE")
    run.delivered(source, asked, prompt)


def _done(change: Callable[[Json], Json], code: str, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        source, prompt, asked = run.begun()
        source.move(asked, prompt.seed)
        good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
        id = source.misstate("Done", **(good | asked.of | change(good)))
        found = source.expect("Error", where=_under(id), clause=clause).fields
        run.check("code", found["code"] == code, f"{found['code']} at {found['path']!r}", clause)
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, code)
        run.hand_over([source])

    return script


scenario("LIVE-872", "a Done with hand-off data of one group more", "KVP-HND-GROUPS", role="sink", guards=_TOKEN,
         level="L4")(
    _done(lambda good: {"handoff": [*good["handoff"], {"group": "900000", "data": "00" * 64}]}, "WRONG_PEER",
          "KVP-HND-GROUPS")
)  # fmt: skip
scenario("LIVE-873", "a Done with hand-off data of one byte more", "KVP-HND-BYTES", role="sink", guards=_TOKEN,
         level="L4")(
    _done(lambda good: {"handoff": [good["handoff"][0] | {"data": good["handoff"][0]["data"] + "00"}]}, "OUT_OF_RANGE",
          "KVP-HND-BYTES")
)  # fmt: skip


def _sums(run: DecodeRun) -> None:
    """One sum is wrong at a time, in its lowest bit or in its upper half."""
    source = run.one(offered=["VERIFY"])
    run.chosen(source)
    number, upto = 0, 1
    while number < upto:
        prompt = run.fetched(source)
        asked = run.asked(source, prompt)
        source.move(asked, prompt.seed)
        good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
        upto = 2 * len(good["checksums"])
        sums = [dict(each) for each in good["checksums"]]
        wrong = sums[number // 2]
        wrong["value"] = str(int(wrong["value"]) ^ (1 << 40 if number % 2 else 1))
        done = source.send("Done", request=source.next_id(), **asked.of, **(good | {"checksums": sums}))
        source.acknowledged(done)
        run.lost(prompt, "VERIFY_FAILED")
        number += 1
    run.hand_over([source])


for _id, _world in (("LIVE-874", "gqa"), ("LIVE-875", "mla"), ("LIVE-876", "hybrid")):
    scenario(_id, f"a checksum that is wrong, each in turn ({_world})", "KVP-VERIFY-SINK", role="sink", guards=_BYTES,
             level="L4", world=_world, extensions=("VERIFY",))(_sums)  # fmt: skip


@scenario("LIVE-877", "replies, notices and Errors that cannot be read are not answered", "KVP-ERR-SILENT", role="sink",
          guards=_PARSER, level="L4")  # fmt: skip
def _silent(run: DecodeRun) -> None:
    source = run.one()
    for name in ("Accepted", "Pong", "Welcome", "Goodbye", "Drained", "Error"):
        source.misbehave(f"{name} of junk", raw_frame(name, b"\x81\x01\xc0"))
    source.ask("Ping", "Pong")
    said = [frame.name for frame in source.heard if frame.name != "Credit"]
    run.check("silence", not said, str(said), "KVP-ERR-SILENT")
    run.hand_over([source])


@scenario("LIVE-878", "requests that cannot be read are answered under their ids", "KVP-ERR-ANSWER", role="sink",
          guards=_PARSER, level="L4")  # fmt: skip
def _answered(run: DecodeRun) -> None:
    source = run.one()
    some = {"session": source.session, "request": "900", "sequence": "1"}
    ping = b"\x82\x01\xcf" + int(source.session).to_bytes(8, "big") + b"\x02\xce\0\0\x03\x84"
    for frame, of, code, path in (
        (lax_frame("Done", some), ("900",), "MISSING_FIELD", "writer"),
        (raw_frame("Ping", ping), ("900", None), "NOT_CANONICAL", "request"),  # its id is in the field that is refused
    ):
        source.misbehave(code, frame)
        found = source.expect("Error", clause="KVP-ERR-ANSWER").fields
        good = found.get("request") in of and (found["code"], found["path"]) == (code, path)
        run.check("what", good, str(found), "KVP-ERR-ANSWER")
    run.hand_over([source])


@scenario("LIVE-879", "messages of several parts, of which the last or all are good", "KVP-NET-ONE", role="sink",
          guards=_PARSER, level="L4")  # fmt: skip
def _parts(run: DecodeRun) -> None:
    source = run.one()
    ping = write_frame("Ping", {"session": source.session, "request": "900"})
    for parts in ((b"more", ping), (ping, ping), (ping[:12], ping[12:])):
        source.misbehave(f"{len(parts)} parts", *parts)
    source.ask("Ping", "Pong")
    said = [frame.name for frame in source.heard if frame.name != "Credit"]
    run.check("none is heard", not said, str(said), "KVP-NET-ONE")
    run.hand_over([source])


@scenario("LIVE-880", "messages that have no row in this state", "KVP-SES-STATE", "KVP-VER-EXTENSION", role="sink",
          guards=_PARSER, level="L4")  # fmt: skip
def _no_row(run: DecodeRun) -> None:
    source = run.one()
    geometry, digest = world.digest_of(source.geometry)
    of: Json = {"sequence": "1"}
    for name, fields in (
        ("Describe", {"version": "2", "geometry": geometry, "digest": digest}), ("Unregister", {"epoch": "1"}),
        ("Renew", of | {"lease": "1000"}), ("Progress", of | {"state": "READY"}), ("Abort", of | {"reason": "over"}),
    ):  # fmt: skip
        found = source.misplaced(name, "Error", "Refused", clause="KVP-SES-STATE", **fields)
        codes = {"UNEXPECTED_MESSAGE"} | ({"UNKNOWN_MESSAGE"} if extensions_with(name) else set())
        run.check(name, found is None or found.fields["code"] in codes, str(found), "KVP-SES-STATE")
    run.hand_over([source])


@scenario("LIVE-881", "a source that takes short bodies alone", "KVP-FRAME-W-LENGTH", role="sink", level="L4",
          guards="A message that its reader has not the room for ends the connection.")  # fmt: skip
def _short_bodies(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome(limits={"max_body": "100", "max_transfers": "64"})
    heard = [frame.name for frame in source.silence(0.2)]
    run.check("no longer body", "Describe" not in heard, str(heard), "KVP-FRAME-W-LENGTH")
    source.session = ""


def _stream(offset: int, late: bool, code: str, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        source, prompt, asked = run.begun()
        begins = [{"group": source.routes()[0]["group"], "first": "16"}] if late else None
        raw = source.packed(asked, prompt.seed)
        source.take_credit(len(raw))
        if offset:
            source.data(asked, 0, raw[:100], False)
        said = {"offset": str(100 + offset if offset else 0), "data": raw[:64].hex(), "last": False, "begins": begins}
        source.misstate("Data", **asked.of, **{k: v for k, v in said.items() if v is not None})
        source.sent += 64
        found = source.expect("Error", clause=clause).fields
        run.check("code", found["code"] == code, str(found), clause)
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, code)
        run.hand_over([source])

    return script


scenario("LIVE-882", "Data whose offset differs above 32 bits", "KVP-INL-NEXT", role="sink", guards=_PART, level="L4",
         transport="INLINE", extensions=("INLINE",))(
    _stream(1 << 32, False, "OUT_OF_RANGE", "KVP-INL-NEXT")
)  # fmt: skip
scenario("LIVE-883", "Data that begins late where no late window was asked for", "KVP-GRANT-BEGINS", role="sink",
         guards="Rows that never came are read as if they had.", level="L4", transport="INLINE",
         extensions=("INLINE",))(_stream(0, True, "BAD_GRANT", "KVP-GRANT-BEGINS"))  # fmt: skip


@scenario("LIVE-884", "runs of a source that are met in the order 1, 3, 2", "KVP-SES-OLDER", role="sink", level="L4",
          guards="A clock that was ahead yesterday keeps a source out today.")  # fmt: skip
def _runs(run: DecodeRun) -> None:
    (source,) = run.source()
    first = source.incarnation
    run.connect(source)
    for later in (0, 4 << 20, 2 << 20):
        source.incarnation = first + later
        prompt = run.fetched(source)
        source.ready(clause="KVP-SES-OLDER")
        run.deliver(source, run.asked(source, prompt), prompt)
        run.arrived(prompt)
        leave(run, source)


@scenario("LIVE-887", "a frame longer than any that may be sent", "KVP-NET-FRAME", role="sink", level="L4",
          guards="A source fills the memory of decode with one message.")  # fmt: skip
def _too_long(run: DecodeRun) -> None:
    source = run.one()
    size = LIMITS["max_body"] + 1
    source.misbehave("too long", raw_frame("Ping", b"\x82\x01\x05\x02\x07" + bytes(size - 5)))
    heard = [frame.name for frame in source.silence(0.5)]
    run.check("not read", "Error" not in heard, str(heard), "KVP-NET-FRAME")
    source.session = ""
