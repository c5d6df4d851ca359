"""Engines that are killed and begin again."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

_SUCCESSOR = "A process that began again is taken for the one before it, and its answers for proof."


@scenario("LIVE-751", "the engine is killed while a request waits, and begins again", "KVP-SES-INCARNATION",
          "KVP-SES-UNKNOWN", "KVP-END-INCARNATION", guards=_SUCCESSOR, level="L4")  # fmt: skip
def _prefill(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    made = run.ask_for(sink, prompt)
    before = int(sink.last_heard["Welcome"].fields["incarnation"])
    run.live.restart()
    id = sink.misstate("Abort", sequence=made.sequence, reason="is anybody there")
    run.refused(sink, id, "Error", "UNKNOWN_SESSION", clause="KVP-END-INCARNATION")
    session = sink.session
    sink.over()
    found = sink.greet(resume=session)
    run.check("another session", found.fields["session"] != session, clause="KVP-SES-GUESS")
    later = int(found.fields["incarnation"]) > before
    run.check("a later run", later, found.fields["incarnation"], "KVP-SES-INCARNATION")
    run.untouched(sink)
    sink.describe(sink.geometry or {})
    sink.register()
    sink.sequences = 0
    run.hand_over(sink)


@scenario("LIVE-851", "the engine is killed in the middle of a fetch, and begins again", "KVP-SES-INCARNATION",
          role="sink", guards=_SUCCESSOR, level="L4")  # fmt: skip
def _decode(run: DecodeRun) -> None:
    source, prompt = run.one(), run.prompt()
    before = int(source.last_heard["Hello"].fields["incarnation"])
    run.fetch(source, prompt)
    run.asked(source, prompt)
    run.live.restart()
    source.unmap()
    source.over()
    run.connect(source)
    hello = source.welcome()
    later = int(hello.fields["incarnation"]) > before
    run.check("a later run", later, hello.fields["incarnation"], "KVP-SES-INCARNATION")
    source.describe()
    source.registered()
    run.hand_over([source])
