"""Extensions of a source: items that are granted late, or piece by piece; memory that is registered again."""

from __future__ import annotations

import time
from typing import Any

from kvproto_conformance.live.memory import holds
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.wire import new_keys

Json = dict[str, Any]
_UNGRANTED = "Pages are written that nobody has granted: another request's cache is lost."
_POOL = "A pool that was given to training is still written by prefill."


def _intended(run: PrefillRun) -> tuple[Sink, Request, Prompt]:
    """A request that the engine has accepted without items, and knows."""
    sink, prompt = run.ready(offered=run.scenario.extensions), run.prompt()
    run.chosen(sink)
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    sink.intend(made)
    return sink, made, prompt


def _progress(sink: Sink, made: Request, state: str, clause: str) -> Json:
    """The Progress of a request that says a state."""

    def mine(fields: Json) -> bool:
        return bool(fields["sequence"] == made.sequence and fields["state"] == state)

    return sink.expect("Progress", where=mine, clause=clause).fields


@scenario("LIVE-1001", "a Transfer without items, which are granted when prefill is over", "KVP-INT-WRITE",
          "KVP-INT-AGAIN", guards=_UNGRANTED, extensions=("INTENT",), slow=True)  # fmt: skip
def _intent(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    run.fill(prompt)
    early = sink.silence(0.1, but=("Progress",))
    run.check("no Done before items", not early, str([frame.name for frame in early]), "KVP-INT-WRITE")
    run.finish(prompt)
    for _ in range(2):
        _progress(sink, made, "READY", "KVP-INT-AGAIN")
    run.untouched(sink)
    sink.grant(made)
    run.delivered(sink, made, prompt)
    run.hand_over(sink)


@scenario("LIVE-1002", "an intent is given up before any item is granted", "KVP-END-PROVEN", guards=_UNGRANTED,
          extensions=("INTENT",))  # fmt: skip
def _given_up(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    found = sink.ask("Abort", "Drained", **sink.named(made), reason="nobody waits")
    run.check("proof", found.fields["proof"] == "PROVEN", found.fields["proof"], "KVP-END-PROVEN")
    run.compute(prompt)
    run.untouched(sink)
    run.hand_over(sink)


def _misgranted(change: Any, over: bool, codes: str, path: str, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        sink, made, prompt = _intended(run)
        if over:
            run.compute(prompt)
            _progress(sink, made, "READY", "KVP-INT-AGAIN")
        id = sink.misstate("Grant", **sink.named(made), grants=change(sink.granted(made)))
        run.refused(sink, id, "Failed", codes, path, clause, made.sequence)
        run.untouched(sink)

    return script


def _first(**changes: Any) -> Any:
    """The grants with the first of them changed, by functions of the grant."""
    return lambda grants: [grants[0] | {name: of(grants[0]) for name, of in changes.items()}, *grants[1:]]


for _id, _title, _change, _over, _code, _path, _clause in (
    ("1003", "a window that is shorter", _first(count=lambda g: str(int(g["count"]) - 1)), True,
     "BAD_GRANT", "grants[0]", "KVP-INT-WINDOW"),
    ("1004", "an item too few", _first(items=lambda g: g["items"][1:]), True,
     "BAD_GRANT", "grants[0].items", "KVP-INT-CHECKS"),
    ("1005", "an item beyond the pool", _first(items=lambda g: ["64", *g["items"][1:]]), True,
     "OUT_OF_REGION", "grants[0].items", "KVP-INT-CHECKS"),
    ("1006", "an item twice", _first(items=lambda g: [g["items"][1], *g["items"][1:]]), True,
     "ITEM_ALIAS", "grants[0].items", "KVP-INT-CHECKS"),
    ("1007", "items before prefill is over", _first(), False, "UNEXPECTED_MESSAGE", "", "KVP-INT-CHECKS"),
):  # fmt: skip
    scenario(f"LIVE-{_id}", f"a Grant of {_title}", _clause, guards=_UNGRANTED, level="L4",
             extensions=("INTENT",))(_misgranted(_change, _over, _code, _path, _clause))  # fmt: skip


@scenario("LIVE-1008", "a Transfer of which some grants have items and some not", "KVP-INT-ITEMS", guards=_UNGRANTED,
          level="L4", world="mla", extensions=("INTENT",))  # fmt: skip
def _some(run: PrefillRun) -> None:
    sink, prompt = run.ready(offered=["INTENT"]), run.prompt()
    run.chosen(sink)
    run.serve(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    bare = {key: value for key, value in made.grants[0].items() if key != "items"}
    id = sink.misstate("Transfer", **(sink.transfer(made) | {"grants": [bare, *made.grants[1:]]}))
    run.refused(sink, id, "Failed", "BAD_GRANT", None, "KVP-INT-ITEMS", made.sequence)
    run.untouched(sink)


@scenario("LIVE-1021", "items are granted piece by piece while prefill runs", "KVP-SPN-APPEND", "KVP-SPN-WHOLE",
          guards=_UNGRANTED, extensions=("INTENT", "SPANS"))  # fmt: skip
def _spans(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    run.fill(prompt, 20)
    run.engine.ask("computed", id=prompt.id, tokens=20)
    sink.grant(made, 16)
    run.untouched_beyond(sink, made, prompt, 16)
    sink.grant(made, 32, since=16)
    run.compute(prompt)
    early = sink.silence(0.1, but=("Progress",))
    run.check("no Done of half a window", not early, str([frame.name for frame in early]), "KVP-SPN-WHOLE")
    sink.grant(made, since=32)
    run.delivered(sink, made, prompt)


@scenario("LIVE-1023", "rows are computed before prefill is over: Progress says up to where", "KVP-INT-AGAIN",
          guards="Pages of a long prompt are named when prefill is over, as if it had not been handed over in pieces.",
          extensions=("INTENT", "SPANS"), must=False, maps=True)  # fmt: skip
def _useful(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    run.fill(prompt)
    tokens = len(prompt.tokens)
    run.engine.ask("computed", id=prompt.id, tokens=tokens)
    found = _progress(sink, made, "RUNNING", "KVP-INT-AGAIN").get("tokens", "0")
    run.check("tokens", 0 < int(found) <= tokens, f"{found} of {tokens} that are computed", "KVP-INT-AGAIN")
    sink.grant(made, 32)
    run.untouched_beyond(sink, made, prompt, 32)
    run.finish(prompt)
    _progress(sink, made, "READY", "KVP-INT-AGAIN")
    sink.grant(made, since=32)
    run.delivered(sink, made, prompt)


@scenario("LIVE-1024", "rows that are computed and granted are written before prefill is over", "KVP-SPN-APPEND",
          guards="Pieces of a long prompt wait for its end, and then all of them are copied at once.",
          extensions=("INTENT", "SPANS"), must=False, maps=True)  # fmt: skip
def _meanwhile(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    run.fill(prompt)
    run.engine.ask("computed", id=prompt.id, tokens=len(prompt.tokens))
    for since, tokens in ((0, 16), (16, 40)):
        sink.grant(made, tokens, since)
        sink.expected(made, [piece for piece in sink.pieces(made) if piece.row < tokens], prompt.seed)
        end = time.monotonic() + 5.0
        while (text := sink.differs()) and time.monotonic() < end:
            time.sleep(0.005)
        run.check(f"{tokens} rows", not text, text, "KVP-SPN-APPEND")
    run.finish(prompt)
    sink.grant(made, since=40)
    run.delivered(sink, made, prompt)


@scenario("LIVE-1022", "a Grant that takes back what was granted", "KVP-SPN-GROW", guards=_UNGRANTED, level="L4",
          extensions=("INTENT", "SPANS"))  # fmt: skip
def _shrinks(run: PrefillRun) -> None:
    sink, made, prompt = _intended(run)
    run.fill(prompt, 20)
    run.engine.ask("computed", id=prompt.id, tokens=20)
    sink.grant(made, 16)
    grants = [g | ({"items": []} if "items" in g else {}) for g in sink.granted(made, 8)]
    id = sink.misstate("Grant", **sink.named(made), grants=grants)
    run.refused(sink, id, "Failed", "BAD_GRANT", "grants[0]", "KVP-SPN-GROW", made.sequence)
    run.untouched_beyond(sink, made, prompt, 16)


def _moving(run: PrefillRun) -> tuple[Sink, str]:
    """A sink whose sessions have EPOCHS, and the nonce of its first memory."""
    sink = run.ready(offered=["EPOCHS"])
    run.chosen(sink)
    assert sink.memory is not None
    return sink, sink.memory.nonce


@scenario("LIVE-1031", "memory is registered again, and asked back", "KVP-EPO-UNMAP", "KVP-EPO-RISE", guards=_POOL,
          extensions=("EPOCHS",))  # fmt: skip
def _again(run: PrefillRun) -> None:
    sink, nonce = _moving(run)
    run.hand_over(sink)
    sink.move()
    run.keep(sink)
    run.hand_over(sink)
    found = sink.give_back(sink.epoch - 1)
    run.check("proof", found.fields["proof"] == "PROVEN", found.fields["proof"], "KVP-EPO-UNMAP")
    run.check("unmapped", not holds(run.engine.pids, nonce), "PROVEN, and still mapped", "KVP-EPO-UNMAP")
    run.hand_over(sink)


@scenario("LIVE-1032", "all memory is asked back, and other memory registered later", "KVP-EPO-UNMAP", guards=_POOL,
          extensions=("EPOCHS",))  # fmt: skip
def _asleep(run: PrefillRun) -> None:
    sink, nonce = _moving(run)
    run.hand_over(sink)
    sink.give_back(sink.epoch)
    run.check("unmapped", not holds(run.engine.pids, nonce), "PROVEN, and still mapped", "KVP-EPO-UNMAP")
    sink.move()
    run.keep(sink)
    run.hand_over(sink)


@scenario("LIVE-1033", "memory is asked back at once while a request waits for it", "KVP-EPO-MOVED", guards=_POOL,
          level="L4", extensions=("EPOCHS",))  # fmt: skip
def _at_once(run: PrefillRun) -> None:
    sink, nonce = _moving(run)
    prompt = run.prompt()
    run.take(prompt)
    made = run.ask_for(sink, prompt)
    asked = sink.send("Unregister", request=sink.next_id(), epoch=str(sink.epoch), at_once=True)
    run.refused(sink, None, "Failed", "POOL_MOVED", None, "KVP-EPO-MOVED", made.sequence)
    found = sink.expect("Unregistered", again=asked, clause="KVP-EPO-UNMAP")
    run.check("proof", found.fields["proof"] == "PROVEN", found.fields["proof"], "KVP-EPO-UNMAP")
    run.check("unmapped", not holds(run.engine.pids, nonce), "PROVEN, and still mapped", "KVP-EPO-UNMAP")
    run.fill(prompt)
    run.untouched(sink)


@scenario("LIVE-1034", "Register of an epoch that does not rise, Unregister of one that there is not", "KVP-EPO-ORDER",
          "KVP-EPO-UNKNOWN", guards=_POOL, level="L4", extensions=("EPOCHS",))  # fmt: skip
def _order(run: PrefillRun) -> None:
    sink, _ = _moving(run)
    id = sink.misstate("Register", **sink.registration())
    run.refused(sink, id, "Refused", "OUT_OF_RANGE", "epoch", "KVP-EPO-ORDER")
    id = sink.misstate("Unregister", epoch="7")
    run.refused(sink, id, "Refused", "OUT_OF_RANGE", "epoch", "KVP-EPO-UNKNOWN")
    run.hand_over(sink)


@scenario("LIVE-1035", "Register again and Unregister, without EPOCHS", "KVP-SES-STATE", "KVP-ERR-ALONE", guards=_POOL,
          level="L4")  # fmt: skip
def _unchosen(run: PrefillRun) -> None:
    sink = run.ready()
    for epoch in (sink.epoch, sink.epoch + 1):
        id = sink.misstate("Register", **(sink.registration() | {"epoch": str(epoch)}))
        run.refused(sink, id, "Refused", "UNEXPECTED_MESSAGE", clause="KVP-SES-STATE")
    id = sink.misstate("Unregister", epoch=str(sink.epoch))
    run.refused(sink, id, "Error", "UNEXPECTED_MESSAGE", clause="KVP-SES-STATE")
    run.hand_over(sink)


_STRANGER = "Whoever reaches the port is served, or is served as somebody else."


@scenario("LIVE-1041", "over TCP with keys, every byte by coordinate", "KVP-NET-CURVE", guards=_STRANGER,
          extensions=("CURVE",))  # fmt: skip
def _keys(run: PrefillRun) -> None:
    sink = run.ready()
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(17))


def _unheard(keys: Any) -> Any:
    def script(run: PrefillRun) -> None:
        sink = run.sink(keys=keys(run))
        sink.send("Hello", **sink.hello())
        heard = sink.silence(0.5)
        run.check("no word", not heard, str([frame.name for frame in heard]), "KVP-NET-UNKNOWN")

    return script


scenario("LIVE-1042", "a client whose key nobody knows hears nothing", "KVP-NET-UNKNOWN", guards=_STRANGER, level="L4",
         extensions=("CURVE",))(_unheard(lambda run: new_keys(run.live.theirs.public)))  # fmt: skip
scenario("LIVE-1043", "a client without keys hears nothing", "KVP-NET-CURVE", guards=_STRANGER, level="L4",
         extensions=("CURVE",))(_unheard(lambda run: None))  # fmt: skip


@scenario("LIVE-1044", "a client that may not say that it is this engine", "KVP-NET-ALLOW", guards=_STRANGER,
          level="L4", extensions=("CURVE",))  # fmt: skip
def _another(run: PrefillRun) -> None:
    sink = run.sink(name="somebody-else")
    sink.send("Hello", **sink.hello())
    found = sink.expect("Refused", "Welcome", clause="KVP-NET-ALLOW")
    if found.name == "Welcome":
        raise Missed("a client is welcome as an engine that its key may not be", "KVP-NET-ALLOW")
    run.check("code", found.fields["code"] == "NOT_ALLOWED", found.fields["code"], "KVP-NET-ALLOW")
