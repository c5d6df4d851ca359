"""Ends of a source's request: aborted before, while and after rows are copied, given up, refused, or too late."""

from __future__ import annotations

import time

from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."


@scenario("LIVE-121", "Abort before prefill ends: PROVEN, and no byte is written after it", "KVP-END-PROVEN",
          guards=_PAGES)  # fmt: skip
def _abort(run: PrefillRun) -> None:
    sink, prompt, made = run.begun()
    drained = sink.ask("Abort", "Drained", sequence=made.sequence, reason="the client is gone")
    run.check("proven", drained.fields["proof"] == "PROVEN", drained.fields["proof"], "KVP-END-PROVEN")
    run.compute(prompt)
    late = sink.silence(0.1)
    run.check("nothing follows", not late, str([frame.name for frame in late]), "KVP-END-PROVEN")
    run.untouched(sink)
    run.engine.ask("fail", id=prompt.id, reason="over")
    run.hand_over(sink)


@scenario("LIVE-122", "Abort while rows are copied: once it is PROVEN, no byte changes", "KVP-END-PROVEN",
          guards=_PAGES)  # fmt: skip
def _abort_running(run: PrefillRun) -> None:
    sink, prompt, made = run.begun()
    run.fill(prompt)
    run.engine.ask("computed", id=prompt.id, tokens=30)
    drained = sink.ask("Abort", "Drained", sequence=made.sequence, reason="the client is gone")
    assert sink.memory is not None
    sink.image[:] = sink.memory.bytes
    run.check("proven", drained.fields["proof"] == "PROVEN", drained.fields["proof"], "KVP-END-PROVEN")
    run.finish(prompt)
    sink.silence(0.1)
    run.untouched(sink)
    run.engine.ask("fail", id=prompt.id, reason="over")
    run.hand_over(sink)


_WATCHED = 3.0
"""Seconds for which memory is watched after PROVEN: device queues are slower than messages."""


@scenario("LIVE-139", "three Aborts, before, amid and after the copy: for seconds after PROVEN no byte changes",
          "KVP-END-PROVEN", guards=_PAGES, slow=True)  # fmt: skip
def _watched(run: PrefillRun) -> None:
    sinks = []
    for upto, finished in ((0, False), (30, False), (None, True)):
        sink, prompt, made = run.begun()
        if upto != 0:
            run.fill(prompt)
        if finished:
            run.finish(prompt)
        elif upto:
            run.engine.ask("computed", id=prompt.id, tokens=upto)
        drained = sink.ask("Abort", "Drained", sequence=made.sequence, reason="the client is gone")
        run.check("proven", drained.fields["proof"] == "PROVEN", drained.fields["proof"], "KVP-END-PROVEN")
        assert sink.memory is not None
        sink.image[:] = sink.memory.bytes
        if not finished:
            run.finish(prompt)
        run.engine.ask("fail", id=prompt.id, reason="over")
        sinks.append(sink)
    until = time.monotonic() + _WATCHED
    while time.monotonic() < until:
        for sink in sinks:
            sink.silence(0.1)
    for sink in sinks:
        run.untouched(sink)
    run.hand_over(run.ready())


@scenario("LIVE-123", "Abort of a transfer that has not come yet", "KVP-END-UNSEEN",
          guards="An Abort overtakes its Transfer, which is then served into pages of somebody else.")  # fmt: skip
def _abort_unseen(run: PrefillRun) -> None:
    sink, before, prompt = run.ready(), run.prompt(), run.prompt()
    run.take(before)
    sink.ask_for(sink.request(before.key, before.tokens))  # keeps what follows above the low-water mark
    run.serve(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    fields = sink.transfer(made)
    drained = sink.ask("Abort", "Drained", sequence=made.sequence, reason="changed its mind")
    proven = drained.fields["proof"] == "PROVEN"
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "ABORTED", "sequence", "KVP-END-UNSEEN", made.sequence)
    run.check("proven", proven, drained.fields["proof"], "KVP-END-PROVEN")
    run.untouched(sink)
    for each in (before, prompt):
        run.engine.ask("fail", id=each.id, reason="over")
    run.refused(sink, None, "Failed", "ABORTED", sequence="1")
    run.hand_over(sink)


@scenario("LIVE-125", "Abort after Done: Drained says PROVEN", "KVP-END-PROVEN", guards=_PAGES)
def _abort_done(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    run.delivered(sink, made, prompt)
    drained = sink.ask("Abort", "Drained", sequence=made.sequence, reason="late")
    run.check("proven", drained.fields["proof"] == "PROVEN", drained.fields["proof"], "KVP-END-PROVEN")
    run.hand_over(sink)


@scenario("LIVE-126", "prefill gives a request up", "KVP-TRN-CHECKS",
          guards="A prompt that cannot be computed lets decode wait for ever.")  # fmt: skip
def _failed(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    sent = sink.ask_for(made)
    run.engine.ask("fail", id=prompt.id, reason="no pages")
    found = run.refused(sink, None, "Failed", "ABORTED", clause="KVP-TRN-CHECKS")
    run.check("about it", found.fields["sequence"] == sent.fields["sequence"], clause="KVP-SES-ECHO")
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-127", "the first token ends the text", "KVP-TRN-SET",
          guards="Decode goes on after the end of the text.")  # fmt: skip
def _finished(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    run.fill(prompt)
    run.finish(prompt, finished=True)
    made = run.ask_for(sink, prompt)
    done = sink.await_done(made)
    run.check("outcome", done.fields["outcome"] == "FINISHED", done.fields["outcome"])
    sink.reply(done, "DoneAck")
    run.over(prompt)


@scenario("LIVE-129", "an Error in place of DoneAck ends the transfer", "KVP-TRN-REFUSED",
          guards="A source says Done for ever to a sink that has refused it.", slow=True)  # fmt: skip
def _refused_done(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    done = sink.await_done(made)
    sink.send("Error", request=done.fields["request"], code="WRONG_PEER", path="writer", mine="1", yours="0")
    late = sink.silence(3.0)
    run.check("no Done again", not late, str([frame.name for frame in late]), "KVP-TRN-REFUSED")
    run.over(prompt, "undelivered")


@scenario("LIVE-131", "a deadline passes while prefill runs", "KVP-TKT-DEADLINE",
          guards="A request that everybody has forgotten keeps its pages.")  # fmt: skip
def _deadline(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt, deadline=300)
    run.ask_for(sink, prompt)
    run.refused(sink, None, "Failed", "DEADLINE", clause="KVP-TKT-DEADLINE")
    run.over(prompt, "expired")
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-132", "a request that nobody fetches ends at its deadline", "KVP-TKT-DEADLINE",
          guards="A request that everybody has forgotten keeps its pages.")  # fmt: skip
def _nobody(run: PrefillRun) -> None:
    prompt = run.prompt()
    run.take(prompt, deadline=200)
    run.compute(prompt)
    run.over(prompt, "expired")
