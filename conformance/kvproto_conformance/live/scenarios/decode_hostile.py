"""Wrong messages from a source to a sink, and what must come of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.codec import write_frame
from kvproto_conformance.codec.facts import ENUMS
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.lax import lax_body, raw_frame
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.source import Source

Json = dict[str, Any]
Change = Callable[[Json, Source], Json]

_TOKEN = "The first token is lost, or another's: decode begins with a wrong one."
_ANOTHER = "An answer about another rank, group or request is taken for this one: decode begins too early."
_BYTES = "Bytes that were damaged on their way are decoded on, and nothing says so."
_ROUTES = "The two sides have computed different routes, and each believes its own."
_PARSER = "A parser of bytes from the network ends the engine, or costs another peer its session."


def _fields(**wrong: Any) -> Change:
    return lambda good, source: wrong


def _sums(change: Callable[[int], int]) -> Change:
    return lambda good, source: {"checksums": [c | {"value": str(change(int(c["value"])))} for c in good["checksums"]]}


# id, what, change, code of the Error or "" where DoneAck may come, path, codes of the loss, clause, guards
DONES: list[tuple[str, str, Change, str, str | None, tuple[str, ...], str, str]] = [
    ("LIVE-801", "another writer", _fields(writer="5"), "WRONG_PEER", "writer", ("WRONG_PEER",), "KVP-TRN-WRITER",
     _ANOTHER),
    ("LIVE-802", "a group too few", lambda g, s: {"groups": g["groups"][:1]}, "WRONG_PEER", "groups", ("WRONG_PEER",),
     "KVP-TRN-WRITER", _ANOTHER),
    ("LIVE-803", "a group too many", lambda g, s: {"groups": [*g["groups"], "77"]}, "WRONG_PEER", "groups",
     ("WRONG_PEER",), "KVP-TRN-WRITER", _ANOTHER),
    ("LIVE-804", "no hand-off data", _fields(handoff=[]), "WRONG_PEER", None, ("WRONG_PEER",), "KVP-HND-GROUPS",
     _TOKEN),
    ("LIVE-805", "hand-off data of a group of pages",
     lambda g, s: {"handoff": [{"group": g["groups"][0], "data": "00000000"}]},
     "WRONG_PEER", None, ("WRONG_PEER",), "KVP-HND-GROUPS", _TOKEN),
    ("LIVE-806", "hand-off data that is short", lambda g, s: {"handoff": [g["handoff"][0] | {"data": "0000"}]},
     "OUT_OF_RANGE", None, ("OUT_OF_RANGE",), "KVP-HND-BYTES", _TOKEN),
    ("LIVE-807", "a late beginning that nobody asked for",
     lambda g, s: {"begins": [{"group": g["groups"][0], "first": "16"}]},
     "BAD_GRANT", None, ("BAD_GRANT",), "KVP-GRANT-BEGINS", "Rows that were not sent are decoded on."),
    ("LIVE-808", "another checksum", _sums(lambda v: v ^ 1), "", None, ("VERIFY_FAILED",), "KVP-VERIFY-SINK", _BYTES),
    ("LIVE-809", "no checksums, though VERIFY is chosen", _fields(checksums=None), "", None, ("VERIFY_FAILED",),
     "KVP-VERIFY-SINK", _BYTES),
    ("LIVE-810", "checksums of 0", _sums(lambda v: 0), "", None, ("VERIFY_FAILED",), "KVP-VERIFY-SINK", _BYTES),
]  # fmt: skip


def leave(run: DecodeRun, source: Source) -> None:
    """Say Goodbye amid a request, and wait until the engine has heard it."""
    prompt = run.fetched(source)
    run.asked(source, prompt)
    source.goodbye()
    run.lost(prompt, "PEER_LOST", free=False)
    for frame in source.silence(0.1):
        if frame.name == "Abort":  # KVP-END-LATE
            source.reply(frame, "Drained", proof="PROVEN")
    source.silence(0.1)
    if run.state(prompt, 0.1).get("free"):
        run.engine.ask("release", id=prompt.id)
    source.over()


def given_up(run: DecodeRun, source: Source, prompt: Prompt, codes: tuple[str, ...], proven: str = "PROVEN") -> None:
    """The engine aborts, hears that nothing is written any more, and tells its engine; the next fetch is good."""
    if proven:
        abort = source.expect("Abort", clause="KVP-END-FAILED")
        source.reply(abort, "Drained", proof=proven)
    run.lost(prompt, *codes)
    run.hand_over([source])


def _done(change: Change, code: str, path: str | None, codes: tuple[str, ...], clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        """The lie is refused, or found when bytes are compared; the request is lost, and the next is not."""
        source, prompt, asked = run.begun(offered=["VERIFY"])
        source.move(asked, prompt.seed)
        good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
        changed = {k: v for k, v in (good | change(good, source)).items() if v is not None}
        done = source.send("Done", request=source.next_id(), **asked.of, **changed)
        if code:
            found = source.expect(
                "Error", where=lambda f: f.get("request") == done.fields["request"], seconds=6.0, clause=clause
            )
            run.check("code", found.fields["code"] == code, str(found.fields), clause)
            if path is not None:
                run.check("path", found.fields["path"] == path, found.fields["path"], "KVP-ERR-REPORT")
        else:
            found = source.expect("DoneAck", "Error", seconds=6.0, clause=clause)
        if found.name == "Error":
            source.watch.transfers[asked.of["sequence"]] = "done"
        given_up(run, source, prompt, codes, "PROVEN" if found.name == "Error" else "")

    return script


for _id, _what, _change, _code, _path, _codes, _clause, _guards in DONES:
    _needs = ("VERIFY",) if _clause == "KVP-VERIFY-SINK" else ()
    scenario(
        _id,
        f"a Done with {_what}",
        _clause,
        "KVP-TRN-REFUSE",
        role="sink",
        guards=_guards,
        level="L4",
        extensions=_needs,
    )(_done(_change, _code, _path, _codes, _clause))


@scenario("LIVE-811", "a byte that changes before Done", "KVP-VERIFY-SINK", role="sink", guards=_BYTES, level="L4",
          extensions=("VERIFY",))  # fmt: skip
def _flipped(run: DecodeRun) -> None:
    source, prompt, asked = run.begun(offered=["VERIFY"])
    source.damages = True
    source.move(asked, prompt.seed)
    source.damages = False
    source.acknowledged(source.done(asked, run.handed(source, prompt), prompt.seed))
    run.lost(prompt, "VERIFY_FAILED")
    run.hand_over([source])


def _no_next(run: DecodeRun, source: Source, name: str, clause: str) -> None:
    """The engine does not go on with this session."""
    heard = [frame.name for frame in source.silence(0.4)]
    run.check(f"no {name}", name not in heard, str(heard), clause)
    source.session = ""


def not_offered(hello: Json) -> list[str]:
    """A feature that the registry has and this Hello does not offer."""
    return [next(name for name in ENUMS["Feature"].values if name not in hello["offered"])]


# id, what, changes of Welcome, clause
WELCOMES: list[tuple[str, str, Json, str]] = [
    ("LIVE-831", "a version that was not offered", {"version": {"major": "1", "minor": "9"}}, "KVP-NEG-CHECK"),
    ("LIVE-832", "a feature that was not offered", {"features": not_offered}, "KVP-NEG-CHECK"),
    ("LIVE-833", "a feature that nobody knows", {"features": [{"unknown": "28673"}]}, "KVP-NEG-CHECK"),
]


def _welcome(changes: Json, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        """The engine ends the session, and another source is served."""
        source = run.connected()
        source.welcome(**changes)
        _no_next(run, source, "Describe", clause)

    return script


for _id, _what, _welcomed, _clause in WELCOMES:
    scenario(_id, f"a Welcome with {_what}", _clause, role="sink", guards="A session that only one side believes in.",
             level="L4")(_welcome(_welcomed, _clause))  # fmt: skip


@scenario("LIVE-834", "a Description whose digest is another's", "KVP-DSC-DIGEST", role="sink", guards=_ROUTES,
          level="L4")  # fmt: skip
def _digest(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome()
    source.describe(digest="66" * 32)
    _no_next(run, source, "Register", "KVP-DSC-DIGEST")


@scenario("LIVE-835", "a Registered with another plan digest", "KVP-REG-CHECK", role="sink", guards=_ROUTES, level="L4")
def _plan(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome()
    source.describe()
    source.registered(plan="77" * 32)
    run.fetched(source)
    _no_next(run, source, "Transfer", "KVP-REG-CHECK")


@scenario("LIVE-836", "a Registered without a route", "KVP-REG-CHECK", role="sink", guards=_ROUTES, level="L4")
def _route(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome()
    source.describe()
    source.registered(routes=source.routes()[:1])
    run.fetched(source)
    _no_next(run, source, "Transfer", "KVP-REG-CHECK")


@scenario("LIVE-837", "frames of another session", "KVP-SES-OTHER", role="sink",
          guards="An answer of a process that is gone is taken for one of its successor.", level="L4")  # fmt: skip
def _other(run: DecodeRun) -> None:
    source = run.one()
    id = source.misstate("Ping", session=str(int(source.session) ^ 1))
    found = source.expect("Error", where=lambda f: f.get("request") == id, seconds=6.0, clause="KVP-SES-OTHER")
    run.check("code", found.fields["code"] == "UNKNOWN_SESSION", str(found.fields), "KVP-SES-OTHER")
    run.hand_over([source])


@scenario("LIVE-838", "frames that cannot be read, of one part and of two", "KVP-ERR-ALONE", "KVP-NET-ONE", role="sink",
          guards=_PARSER, level="L4")  # fmt: skip
def _junk(run: DecodeRun) -> None:
    source = run.one()
    ping = write_frame("Ping", {"session": source.session, "request": "900"})
    done, data = lax_body("Done", {"session": source.session}), b"\xdf\xff\xff\xff\xff"
    for junk in (b"", b"HTTP/1.1 200 OK", ping[:15], ping + b"\0", raw_frame("Ping", b"\xc1", major=9),
                 raw_frame("Done", done), raw_frame("Data", data)):  # fmt: skip
        source.misbehave("junk", junk)
    source.misbehave("two parts", ping, b"more")
    source.ask("Ping", "Pong")
    run.check("900 is not answered", all(f.name != "Pong" for f in source.heard), clause="KVP-NET-ONE")
    run.hand_over([source])


@scenario("LIVE-839", "addresses in Welcome that cannot be", "KVP-ERR-ALONE", role="sink",
          guards="An address goes to the socket library as it is, and ends the engine.", level="L4")  # fmt: skip
def _addresses(run: DecodeRun) -> None:
    for address in ("tcp://999.1.1.1:5", "tcp://127.0.0.1:http", "ipc://" + "x" * 200, "udp://1.2.3.4:5", ""):
        source = run.connected()
        endpoints = [{"rank": "0", "address": source.endpoints[0]}, {"rank": "1", "address": address}]
        source.welcome(endpoints=endpoints)
        source.silence(0.05)
        source.session = ""


@scenario("LIVE-840", "an Error NOT_ALLOWED that answers nothing", "KVP-SES-REVOKED", role="sink",
          guards="A key that was revoked goes on.", level="L4")  # fmt: skip
def _revoked(run: DecodeRun) -> None:
    source, prompt, _asked = run.begun()
    source.send("Error", code="NOT_ALLOWED", path="", mine="", yours="")
    run.lost(prompt, "NOT_ALLOWED", "PEER_LOST", free=False)
    source.session = ""


@scenario("LIVE-841", "a Failed with a code that nobody knows", "KVP-ERR-UNKNOWN", role="sink",
          guards="A later version's error ends an engine of today.", level="L4")  # fmt: skip
def _unknown_code(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    failed = source.send("Failed", request=source.next_id(), **asked.of, code={"unknown": "31000"}, path="", mine="",
                         yours="")  # fmt: skip
    source.acknowledged(failed)
    given_up(run, source, prompt, ("INTERNAL",))


@scenario("LIVE-842", "Done of a transfer that nobody asked for", "KVP-SES-STATE", role="sink", guards=_ANOTHER,
          level="L4")  # fmt: skip
def _unasked(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    id = source.misstate("Done", **(good | {"sequence": "99"}))
    found = source.expect("Error", where=lambda f: f.get("request") == id, seconds=6.0, clause="KVP-SES-STATE")
    run.check("code", found.fields["code"] in ("UNEXPECTED_MESSAGE", "STALE_TRANSFER"), str(found.fields))
    waiting = run.state(prompt, 0.1)
    run.check("still waiting", waiting["state"] == "waiting", str(waiting), "KVP-ERR-ALONE")
    run.delivered(source, asked, prompt)


@scenario("LIVE-843", "a source whose run is older than one that was met", "KVP-SES-OLDER", role="sink", level="L4",
          guards="A clock that was ahead yesterday keeps a source out today.")  # fmt: skip
def _older(run: DecodeRun) -> None:
    source = run.one()
    leave(run, source)
    source.incarnation -= 1 << 40
    prompt = run.fetched(source)
    source.ready(clause="KVP-SES-OLDER")
    run.delivered(source, run.asked(source, prompt), prompt)


def _unlike(run: DecodeRun, change: Callable[[Json], Json]) -> tuple[list[Source], Prompt, Json]:
    """Of two source ranks the second describes another replica; the Error that says so."""
    (first, second), prompt = run.source(2), run.prompt()
    second.geometry = second.geometry | change(second.geometry)
    run.connect(first)
    first.welcome()
    first.describe()
    second.welcome()
    run.fetch(first, prompt)
    id = second.describe().fields["request"]
    found = second.expect("Error", where=lambda f: f.get("request") == id, clause="KVP-DSC-RANKS").fields
    run.check("code", found["code"] == "DESCRIPTION_MISMATCH", found["code"], "KVP-DSC-RANKS")
    second.expect("Goodbye", clause="KVP-DSC-RANKS")
    second.session = ""
    return [first, second], prompt, found


@scenario("LIVE-844", "two source ranks whose Descriptions contradict each other", "KVP-DSC-RANKS", role="sink",
          guards="Ranks of one fleet have different page sizes, and every request waits until its deadline.",
          level="L4")  # fmt: skip
def _contradicting(run: DecodeRun) -> None:
    def longer(geometry: Json) -> Json:
        pages, *others = geometry["groups"]
        return {"groups": [pages | {"rows": str(2 * int(pages["rows"]))}, *others]}

    sources, prompt, _ = _unlike(run, longer)
    run.lost(prompt, "DESCRIPTION_MISMATCH")
    heard = [frame.name for each in sources for frame in each.silence(0.1)]
    run.check("nothing is requested", "Transfer" not in heard, str(heard), "KVP-DSC-RANKS")


@scenario("LIVE-845", "a source rank that has a draft which the other has not: the Error names it", "KVP-DSC-RANKS",
          "KVP-ERR-REPORT", role="sink", level="L4",
          guards="Ranks were started with other options, and all that is said is that hashes differ.")  # fmt: skip
def _draft_on_one(run: DecodeRun) -> None:
    def more(geometry: Json) -> Json:
        pages = geometry["groups"][0]
        draft = pages | {"id": "90", "name": "draft", "model": "1"}
        ranks = []
        for rank in geometry["ranks"]:
            (share,) = (share for share in rank["owns"] if share["group"] == pages["id"])
            ranks.append(rank | {"owns": [*rank["owns"], share | {"group": "90"}]})
        return {"groups": [*geometry["groups"], draft], "ranks": ranks}

    _, prompt, found = _unlike(run, more)
    path = found["path"]
    run.check("path", path.startswith("groups[draft]"), f"{path!r}, not 'groups[draft]'", "KVP-DSC-RANKS")
    run.lost(prompt, "DESCRIPTION_MISMATCH")
