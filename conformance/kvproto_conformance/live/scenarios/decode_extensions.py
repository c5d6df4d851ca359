"""Extensions of a sink: pages that are named when they are of use, or piece by piece; a pool that moves."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.memory import holds
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.source import Asked, Source
from kvproto_conformance.live.wire import new_keys

Json = dict[str, Any]
_TIED = "Decode memory is tied up while a prompt waits in prefill, or is written before it was named."
_POOL = "A pool is given to training while prefill still writes it."


def _one(run: DecodeRun) -> Source:
    """A source whose session has what the scenario is about."""
    source = run.one(offered=run.scenario.extensions)
    run.chosen(source)
    return source


def _intended(run: DecodeRun, spans: bool = False) -> tuple[Source, Asked, Prompt]:
    """A Transfer without items, which is accepted."""
    source, prompt = _one(run), run.prompt()
    run.fetch(source, prompt, intent=True, spans=spans)
    asked = run.asked(source, prompt, "PENDING")
    named = [grant["group"] for grant in asked.frame.fields["grants"] if grant.get("items")]
    if named:
        raise Missed(f"items of groups {', '.join(named)} before they are of use", "KVP-INT-ITEMS")
    return source, asked, prompt


@scenario("LIVE-1101", "pages are named when prefill is over", "KVP-INT-ITEMS", role="sink", guards=_TIED,
          extensions=("INTENT",))  # fmt: skip
def _intent(run: DecodeRun) -> None:
    source, asked, prompt = _intended(run)
    early = source.silence(0.1)
    run.check("nothing said", not early, str([frame.name for frame in early]), "KVP-INT-ITEMS")
    source.progress(asked, "READY")
    source.granted(asked)
    run.delivered(source, asked, prompt)


@scenario("LIVE-1102", "Accepted says at once that prefill is over", "KVP-INT-ITEMS", role="sink", guards=_TIED,
          world="hybrid", extensions=("INTENT",))  # fmt: skip
def _at_once(run: DecodeRun) -> None:
    source, prompt = _one(run), run.prompt()
    run.fetch(source, prompt, intent=True)
    asked = run.asked(source, prompt)
    source.granted(asked)
    run.delivered(source, asked, prompt)


@scenario("LIVE-1103", "Done of a request of which no item was granted", "KVP-INT-DONE", role="sink", guards=_TIED,
          level="L4", extensions=("INTENT",))  # fmt: skip
def _ungranted(run: DecodeRun) -> None:
    source, asked, prompt = _intended(run)
    lie = {"writer": "0", "groups": [r["group"] for r in source.routes()], "bytes": "0", "outcome": "CONTINUE"}
    id = source.misstate("Done", **asked.of, **lie, handoff=[])
    found = source.expect("Error", where=lambda f: f.get("request") == id, clause="KVP-INT-DONE").fields
    said = found["code"], found["path"]
    run.check("refused", said == ("UNEXPECTED_MESSAGE", "sequence"), f"{said[0]} at {said[1]!r}", "KVP-INT-DONE")
    waiting = run.state(prompt, 0.2)
    run.check("not arrived", waiting["state"] != "arrived", str(waiting), "KVP-INT-DONE")
    run.engine.ask("abort", id=prompt.id)
    source.reply(source.expect("Abort"), "Drained", proof="PROVEN")


@scenario("LIVE-1104", "Data of a request of which no item was granted", "KVP-INT-DONE", role="sink", guards=_TIED,
          level="L4", transport="INLINE", extensions=("INTENT", "INLINE"))  # fmt: skip
def _early(run: DecodeRun) -> None:
    source, asked, prompt = _intended(run)
    source.take_credit(8)
    lie = {**asked.of, "offset": "0", "data": bytes(8).hex(), "last": False}
    source.misstate("Data", **lie)
    found = source.expect("Error", clause="KVP-INT-DONE")
    said = found.fields["code"], found.fields["path"]
    run.check("refused", said == ("UNEXPECTED_MESSAGE", "sequence"), f"{said[0]} at {said[1]!r}", "KVP-INT-DONE")
    source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
    run.lost(prompt, "UNEXPECTED_MESSAGE")


@scenario("LIVE-1105", "Done of a request whose Grant was not answered: the Grant does not come again",
          "KVP-SES-RESEND", role="sink", slow=True,
          guards="Decode asks for ever about what is over, and gives up a session that is well.",
          extensions=("INTENT",))  # fmt: skip
def _unanswered(run: DecodeRun) -> None:
    source, asked, prompt = _intended(run)
    source.progress(asked, "READY")
    grant = source.expect("Grant", clause="KVP-INT-ITEMS")
    source.place(asked, [given | {"items": given.get("items", [])} for given in grant.fields["grants"]])
    run.delivered(source, asked, prompt)
    late = source.silence(2.5)
    run.check("no Grant again", not late, str([frame.name for frame in late]), "KVP-SES-RESEND")
    run.hand_over([source])


@scenario("LIVE-1121", "pages are named piece by piece", "KVP-SPN-ID", "KVP-SPN-TURN", role="sink", guards=_TIED,
          extensions=("INTENT", "SPANS"), maps=True)  # fmt: skip
def _spans(run: DecodeRun) -> None:
    source, asked, prompt = _intended(run, spans=True)
    early = source.silence(0.1)
    run.check("nothing said", not early, str([frame.name for frame in early]), "KVP-INT-ITEMS")
    source.progress(asked, "RUNNING", 20)
    source.granted(asked, spans=True)
    run.delivered(source, asked, prompt)


@scenario("LIVE-1131", "the pool moves while a request is under way", "KVP-EPO-RISE", "KVP-EPO-FREE", role="sink",
          guards=_POOL, world="mla", extensions=("EPOCHS",))  # fmt: skip
def _moves(run: DecodeRun) -> None:
    source, prompt = _one(run), run.prompt()
    before = list(source.nonces)
    run.fetch(source, prompt)
    asked = run.asked(source, prompt)
    run.engine.ask("move")
    source.registered()
    back = source.expect("Unregister", clause="KVP-EPO-FREE")
    run.check("of the old epoch", back.fields["epoch"] == "1", back.fields["epoch"], "KVP-EPO-FREE")
    run.delivered(source, asked, prompt)
    held = run.engine.ask("returned", seconds=0.2)
    run.check("not free yet", not held["free"], "free before Unregistered", "KVP-EPO-FREE")
    run.check("still there", all(holds(run.engine.pids, n) for n in before), "the memory is gone", "KVP-EPO-FREE")
    source.returned(back)
    free = run.engine.ask("returned", seconds=5.0)
    run.check("free", free["free"], "not free after PROVEN", "KVP-EPO-FREE")
    run.hand_over([source])


@scenario("LIVE-1132", "nothing is known of memory that was asked back", "KVP-EPO-FREE", role="sink", guards=_POOL,
          level="L4", world="mla", spoils=True, extensions=("EPOCHS",))  # fmt: skip
def _unprovable(run: DecodeRun) -> None:
    source = _one(run)
    run.hand_over([source])
    run.engine.ask("move")
    source.registered()
    source.returned(source.expect("Unregister", clause="KVP-EPO-FREE"), "UNPROVABLE")
    held = run.engine.ask("returned", seconds=0.5)
    run.check("not free", not held["free"], "free without proof", "KVP-EPO-FREE")
    run.hand_over([source])


_STALE = "Prefill loads a draft model, and decode asks on by what it knew before: every request is refused, for ever."


@scenario("LIVE-1133", "a source describes itself again: its next request is of the new Description", "KVP-DSC-LAST",
          "KVP-TRN-CHANGED", role="sink", guards=_STALE, extensions=("EPOCHS",))  # fmt: skip
def _redescribed(run: DecodeRun) -> None:
    source = _one(run)
    run.hand_over([source])
    source.redescribe()
    source.registered()
    run.hand_over([source])


@scenario("LIVE-1134", "a Register that a change has overtaken is refused: another follows", "KVP-REG-DIGESTS",
          "KVP-EPO-RISE", role="sink", guards=_STALE, extensions=("EPOCHS",))  # fmt: skip
def _overtaken(run: DecodeRun) -> None:
    source = _one(run)
    run.hand_over([source])
    run.engine.ask("move")
    late = source.expect("Register", clause="KVP-REG-MAP")
    found = source.redescribe()
    source.reply(late, "Refused", code="DESCRIPTION_MISMATCH", path="source", mine=found.fields["digest"],
                 yours=late.fields["source"])  # fmt: skip
    again = source.registered()
    rises = int(again.fields["epoch"]) > int(late.fields["epoch"])
    run.check("a greater epoch", rises, f"{again.fields['epoch']} after {late.fields['epoch']}", "KVP-EPO-RISE")
    source.returned(source.expect("Unregister", clause="KVP-EPO-FREE"))
    run.hand_over([source])
    run.engine.ask("move")
    source.registered()
    source.returned(source.expect("Unregister", clause="KVP-EPO-FREE"))
    free = run.engine.ask("returned", seconds=5.0)["free"]
    run.check("free", free, "held by an epoch that was never mapped", "KVP-EPO-FREE")
    run.hand_over([source])


@scenario("LIVE-1135", "each epoch counts its own Data", "KVP-EPO-CREDIT", "KVP-INL-COUNT", role="sink",
          guards="Credit of one pool is taken for that of another: streams stall, or overrun their window.",
          transport="INLINE", extensions=("EPOCHS", "INLINE"))  # fmt: skip
def _counts(run: DecodeRun) -> None:
    source = _one(run)
    _credited(source, None)
    run.hand_over([source])
    run.engine.ask("move")
    epoch = source.registered().fields["epoch"]
    source.begin_credit()
    _credited(source, epoch)
    run.hand_over([source])


def _credited(source: Source, epoch: str | None) -> None:
    """Wait for a Credit of this epoch, and leave it to whoever sends Data."""
    found = source.expect("Credit", where=lambda fields: fields.get("epoch") == epoch, clause="KVP-EPO-CREDIT")
    source.heard.insert(0, found)


@scenario("LIVE-1136", "the pool moves beside a rank from which nothing comes: no session ends", "KVP-EPO-RISE",
          role="sink", guards="A pool that moves costs every session, although each could go on.", must=False,
          extensions=("EPOCHS",))  # fmt: skip
def _unrouted(run: DecodeRun) -> None:
    *routed, seed = run.source(4, offered=["EPOCHS"])
    run.connect(seed)
    for each in (seed, *routed):
        each.welcome()
        each.describe()
        run.chosen(each)
    for each in routed:
        each.registered()
    if seed.routes():
        raise Missed("a plan by which the fourth of these ranks sends something", "KVP-PLAN-EXACT")
    run.hand_over(routed)
    run.engine.ask("move")
    for each in routed:
        each.registered()
        each.returned(each.expect("Unregister", clause="KVP-EPO-FREE"))
    free = run.engine.ask("returned", seconds=5.0)["free"]
    run.check("free", free, "not free after PROVEN", "KVP-EPO-FREE")
    run.hand_over(routed)


_STRANGER = "Whoever answers at the address is believed to be the source."


@scenario("LIVE-1141", "over TCP with keys, every byte as attention reads it", "KVP-NET-CURVE", role="sink",
          guards=_STRANGER, extensions=("CURVE",))  # fmt: skip
def _keys(run: DecodeRun) -> None:
    sources = run.ready()
    run.hand_over(sources)
    run.hand_over(sources, run.prompt(17))


def _unheard(keys: Any) -> Any:
    def script(run: DecodeRun) -> None:
        source = run.connected(keys=keys())
        prompt = run.fetched(source)
        heard = source.silence(0.5)
        run.check("no word", not heard, str([frame.name for frame in heard]), "KVP-NET-KEY")
        found = run.state(prompt, 0.1)
        run.check("not arrived", found["state"] != "arrived", str(found), "KVP-NET-KEY")

    return script


scenario("LIVE-1142", "a source with another key than was stated hears nothing", "KVP-NET-KEY", role="sink",
         guards=_STRANGER, level="L4", spoils=True, extensions=("CURVE",))(_unheard(new_keys))  # fmt: skip
scenario("LIVE-1143", "a source without keys hears nothing", "KVP-NET-CURVE", role="sink", guards=_STRANGER,
         level="L4", spoils=True, extensions=("CURVE",))(_unheard(lambda: None))  # fmt: skip
