"""Numbers, ids and turns of a sink: windows of sequences, answers under another id, resends, runs, and Errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvproto_conformance.codec import read_frame
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.lax import raw_frame
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.scenarios.decode_ends import aborted, is_free
from kvproto_conformance.live.scenarios.decode_hostile import leave
from kvproto_conformance.live.source import Source
from kvproto_conformance.live.watch import ENGINE
from kvproto_conformance.live.wire import Router

Json = dict[str, Any]
_BUSY = "Prefill refuses what is beyond its limit, and the requests are lost."
_ANOTHER = "An answer to another question is taken for one to this."
_OLDER = "A clock that was ahead yesterday keeps a source out today."
_ALONE = "What befalls one session or engine costs another its requests."


def _few(run: DecodeRun, most: int) -> Source:
    """A source that takes so many transfers at once."""
    source = run.connected()
    source.welcome(limits={"max_body": str(1 << 24), "max_transfers": str(most)})
    source.describe()
    source.registered()
    return source


def _held_back(run: DecodeRun, source: Source, prompt: Prompt) -> None:
    """Let the engine fetch what the source has no room for yet."""
    run.fetch(source, prompt)
    heard = [frame.name for frame in source.silence(0.3, but=("Abort",))]
    run.check("no Transfer", "Transfer" not in heard, str(heard), "KVP-TRN-SEQUENCE")


def _goes_on(run: DecodeRun, source: Source, prompt: Prompt) -> None:
    """Serve it, now that there is room, unless the engine has given it up at once."""
    if run.state(prompt, 0.0)["state"] == "lost":
        run.lost(prompt, "BUSY")
    else:
        run.delivered(source, run.asked(source, prompt), prompt)


@scenario("LIVE-919", "of two transfers that a source takes at once the second is over first", "KVP-TRN-SEQUENCE",
          role="sink", guards=_BUSY, level="L4")  # fmt: skip
def _out_of_order(run: DecodeRun) -> None:
    """The low-water mark stays where it is, so that there is no room for a third."""
    source = _few(run, 2)
    prompts = [run.prompt() for _ in range(3)]
    for prompt in prompts[:2]:
        run.fetch(source, prompt)
    came = [source.asked() for _ in range(2)]
    first, second = sorted(came, key=lambda asked: int(asked.of["sequence"]))
    by_key = {prompt.key: prompt for prompt in prompts}
    for asked in (first, second):
        source.accept(asked)
    run.delivered(source, second, by_key[second.key])
    _held_back(run, source, prompts[2])
    run.delivered(source, first, by_key[first.key])
    _goes_on(run, source, prompts[2])


@scenario("LIVE-920", "a transfer whose Abort is not answered is not over", "KVP-TRN-SEQUENCE", role="sink",
          guards=_BUSY, level="L4")  # fmt: skip
def _unanswered(run: DecodeRun) -> None:
    source = _few(run, 1)
    first, second = run.fetched(source), run.prompt()
    run.asked(source, first)
    abort = aborted(run, source, first)
    _held_back(run, source, second)
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(first, "ABORTED")
    _goes_on(run, source, second)


@scenario("LIVE-921", "one of two ranks comes back: its sequences begin anew", "KVP-TRN-SEQUENCE", role="sink",
          guards="Ranks share a counter: each sees gaps, and refuses what comes after many.", level="L4")  # fmt: skip
def _one_comes_back(run: DecodeRun) -> None:
    """Whether the session with the other rank goes on is the engine's affair."""
    first, second = run.ready(2)
    for _ in range(2):
        run.hand_over([first, second])
    prompt = run.prompt()
    run.fetch(first, prompt)
    for source in (first, second):
        run.asked(source, prompt)
    second.goodbye()
    first.reply(first.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
    run.lost(prompt, "PEER_LOST", free=False)
    for frame in second.silence(0.2):
        if frame.name == "Abort":  # KVP-END-LATE
            second.reply(frame, "Drained", proof="PROVEN")
    second.over()
    after = run.prompt()
    run.fetch(first, after)
    fresh = [first, second] if _begins_anew(first) else [second]
    for source in fresh:
        source.welcome()
        source.describe()
    for source in fresh:
        source.registered()
    asked = {source: run.asked(source, after) for source in (first, second)}
    said = [each.of["sequence"] for each in asked.values()]
    wanted = ["1" if source in fresh else "4" for source in asked]
    run.check("begins anew", said == wanted, f"{said}, not {wanted}", "KVP-TRN-SEQUENCE")
    for source, each in asked.items():
        run.deliver(source, each, after)
    run.arrived(after)


def _begins_anew(source: Source) -> bool:
    """Whether the engine ends its session, and perhaps greets over another connection before that has come."""
    assert isinstance(source.wire, Router)
    end, came = time.monotonic() + 0.2, list[bytes]()
    while (raw := source.wire.receive(end - time.monotonic())) is not None:
        came.append(raw)
    names = [read_frame(raw)[0] for raw in came]
    over = "Goodbye" in names
    if over:
        source.over()
        came = [raw for raw, name in zip(came, names, strict=True) if name == "Hello"]
        if came and names[-1] == "Goodbye":
            source.wire.turn_back()
    source.heard += [source.watch.see(raw, ENGINE) for raw in came]
    return over


@scenario("LIVE-922", "Description and Registered under ids that are no request's", "KVP-SES-ECHO", role="sink",
          guards=_ANOTHER, level="L4")  # fmt: skip
def _stray_answers(run: DecodeRun) -> None:
    """They are refused or ignored; the session goes on with the right ones."""
    (source,), prompt = run.source(), run.prompt()
    run.connect(source)
    run.fetch(source, prompt)
    source.welcome()
    for name, answer, following in (
        ("Describe", source.describe, "Register"), ("Register", source.registered, "Transfer")
    ):  # fmt: skip
        asked = source.expect(name)
        source.heard.insert(0, asked)
        said = _answer_of(source, answer)
        source.misstate(asked.name.replace("Describe", "Description").replace("Register", "Registered"),
                        **(said | {"request": str(int(asked.fields["request"]) + 1000)}))  # fmt: skip
        heard = source.silence(0.2, but=(name, following))
        came = [frame.name for frame in [*heard, *source.heard]]
        run.check(f"no {following}", following not in came, str(came), "KVP-SES-ECHO")
        source.heard[:] = [asked]
        answer()
    run.delivered(source, run.asked(source, prompt), prompt)


def _answer_of(source: Source, answer: Callable[[], Any]) -> Json:
    """The fields that an answer would have, without sending it."""
    said: Json = {}
    source.reply, kept = (lambda to, name, **fields: said.update(fields)), source.reply  # type: ignore[method-assign]
    epochs = dict(source.epochs)
    try:
        answer()
    finally:
        source.reply = kept  # type: ignore[method-assign]
        source.epochs = epochs
    return said | {"session": source.session}


@scenario("LIVE-923", "Accepted under an id that is no request's", "KVP-SES-ECHO", role="sink", guards=_ANOTHER,
          level="L4", slow=True)  # fmt: skip
def _stray_accepted(run: DecodeRun) -> None:
    """The Transfer was not answered, so it comes again."""
    source, prompt = run.fetching()
    asked = source.asked()
    source.misstate("Accepted", request=str(int(asked.frame.fields["request"]) + 1000), **asked.of, state="READY")
    again = source.asked()
    run.check("the same Transfer", again.frame.fields == asked.frame.fields, str(again.frame.fields), "KVP-ERR-ALONE")
    run.delivered(source, run.accepted(source, again, prompt), prompt)


@scenario("LIVE-924", "a Transfer that is not answered comes again and again", "KVP-SES-RESEND", role="sink",
          guards="Two frames are lost, and a request waits for ever.", level="L4", slow=True)  # fmt: skip
def _again_and_again(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = [source.asked() for _ in range(4)]
    run.check("the same", all(each.frame.fields == asked[0].frame.fields for each in asked), "", "KVP-SES-RESEND")
    run.delivered(source, run.accepted(source, asked[-1], prompt), prompt)


@scenario("LIVE-925", "an earlier run of a source, again and again", "KVP-SES-OLDER", role="sink", guards=_OLDER,
          level="L4")  # fmt: skip
def _older_again(run: DecodeRun) -> None:
    source = run.one()
    run.hand_over([source])
    for _ in range(3):
        leave(run, source)
        source.incarnation -= 1 << 20
        run.engine.ask("disconnect", engine=source.name)
        run.connect(source)
        source.ready(clause="KVP-SES-OLDER")
        run.hand_over([source])


@scenario("LIVE-926", "Errors that name another session", "KVP-SES-OTHER", "KVP-ERR-ALONE", role="sink",
          guards=_ALONE, level="L4")  # fmt: skip
def _errors_of_another(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    other = str(int(source.session) ^ 1)
    for code in ("UNKNOWN_SESSION", "SUPERSEDED", "NOT_ALLOWED"):
        for request in (None, asked.frame.fields["request"]):
            source.send("Error", session=other, request=request, code=code, path="session", mine="none", yours=other)
    heard = [frame.name for frame in source.silence(0.2)]
    run.check("not ended", not {"Goodbye", "Hello", "Abort"} & {*heard}, str(heard), "KVP-SES-OTHER")
    run.delivered(source, asked, prompt)


@scenario("LIVE-927", "one source refuses its session, and a fetch waits for another", "KVP-ERR-ALONE", role="sink",
          guards=_ALONE, level="L4")  # fmt: skip
def _another_source(run: DecodeRun) -> None:
    (good,), (bad,) = run.source(), run.source()
    waits, fails = run.prompt(), run.prompt()
    for source, prompt in ((good, waits), (bad, fails)):
        run.connect(source)
        run.fetch(source, prompt)
    bad.reply(bad.expect("Hello"), "Refused", code="BUSY", path="", mine="4096", yours="one more")
    run.lost(fails, "BUSY", "PEER_LOST")
    found = run.state(waits, 0.1)
    run.check("the other waits", found["state"] == "waiting", str(found), "KVP-ERR-ALONE")
    good.ready()
    run.delivered(good, run.asked(good, waits), waits)


@scenario("LIVE-928", "a request whose session id is not in its shortest form", "KVP-ERR-ANSWER", role="sink",
          guards="An answer under an id that was guessed ends the wait of another request.", level="L4")  # fmt: skip
def _beyond(run: DecodeRun) -> None:
    """Nothing is taken from a body beyond what cannot be read."""
    source = run.one()
    session = b"\x82\x01\xcf" + (5).to_bytes(8, "big")
    source.misbehave("a long form", raw_frame("Ping", session + b"\x02\xcd\x03\x84"))
    found = source.expect("Error", clause="KVP-ERR-ANSWER").fields
    run.check("code", (found["code"], found["path"]) == ("NOT_CANONICAL", "session"), str(found), "KVP-BODY-FORM")
    run.check("no request id", "request" not in found, str(found), "KVP-ERR-ANSWER")
    run.hand_over([source])


@scenario("LIVE-939", "a Transfer is answered by Error NOT_ALLOWED, and another one goes on", "KVP-END-FAILED",
          "KVP-ERR-ALONE", role="sink", guards=_ALONE, level="L4")  # fmt: skip
def _one_not_allowed(run: DecodeRun) -> None:
    source, prompt, going_on = run.begun()
    refused = run.fetched(source)
    asked = source.asked()
    said = {"code": "NOT_ALLOWED", "path": "ticket", "mine": "another tenant's", "yours": "this one"}
    source.send("Error", request=asked.frame.fields["request"], **said)
    found = source.expect("Abort", "Goodbye", clause="KVP-END-FAILED")
    if not run.check("the session goes on", found.name == "Abort", found.name, "KVP-ERR-ALONE"):
        source.session = ""
        return
    source.reply(found, "Drained", proof="PROVEN")
    run.lost(refused, "NOT_ALLOWED", "PEER_LOST")
    run.delivered(source, going_on, prompt)


@scenario("LIVE-940", "Failed by codes after which something else might be tried: nothing is", "KVP-END-FAILED",
          role="sink", guards="Decode tries again by itself, with a ticket that is used.", level="L4")  # fmt: skip
def _not_again(run: DecodeRun) -> None:
    source = run.one()
    source.ids = 1 << 20  # a Failed under the id of a Transfer would answer that
    for code in ("BUSY", "DRAINING", "NOT_HELD", "UNKNOWN_TICKET"):
        prompt = run.fetched(source)
        source.acknowledged(source.fail(run.asked(source, prompt), code))
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, code)
    heard = [frame.name for frame in source.silence(0.1)]
    run.check("no Transfer", "Transfer" not in heard, str(heard), "KVP-END-FAILED")
    run.hand_over([source])


@scenario("LIVE-941", "nothing is proven, and then the session ends: Abort goes on", "KVP-END-LATE", role="sink",
          guards="Pages that nobody writes any more are never used again.", level="L4", must=False, slow=True,
          maps=True)  # fmt: skip
def _asks_on(run: DecodeRun) -> None:
    source, prompt, _ = run.begun()
    source.reply(aborted(run, source, prompt), "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    source.goodbye()
    source.reply(source.expect("Abort", clause="KVP-END-LATE"), "Drained", proof="PROVEN")
    is_free(run, source, prompt, "KVP-SES-OTHER")
    source.over()
