"""Distinctions that a source must make: sessions, ranks, replicas and runs of one sink, and tickets used by each."""

from __future__ import annotations

from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

_TWICE = "One ticket is fetched twice, and the second time from pages of another request."
_LOST = "A request that could have been served is refused, for what another has done."
_SECRET = "A session of one peer is driven by another."
_LATER = 1 << 30
"""By how much the incarnation of a later run is greater here."""


@scenario("LIVE-191", "a ticket that is used, in another session of the same sink", "KVP-TKT-USED", guards=_TWICE)
def _used(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.hand_over(sink, prompt)
    sink.goodbye()
    again = run.sink(name=sink.name)
    again.incarnation = sink.incarnation
    again.ready()
    run.keep(again)
    other = again.request(prompt.key, prompt.tokens)
    id = again.misstate("Transfer", **again.transfer(other))
    run.refused(again, id, "Failed", "TICKET_USED", "ticket", "KVP-TKT-USED", other.sequence)
    run.untouched(again)


@scenario("LIVE-192", "a Transfer that its prompt refuses has not bound the ticket", "KVP-TKT-BIND", guards=_LOST)
def _not_bound(run: PrefillRun) -> None:
    wrong, sink, prompt = run.ready(), run.ready(), run.prompt()
    made = wrong.request(prompt.key, prompt.tokens)
    wrong.ask("Transfer", "Accepted", **(wrong.transfer(made) | {"content": "ab" * 32}))
    run.take(prompt)
    run.refused(wrong, None, "Failed", "CONTENT_MISMATCH", "content", "KVP-TKT-CONTENT", made.sequence)
    good = run.ask_for(sink, prompt)
    run.compute(prompt)
    run.delivered(sink, good, prompt)


@scenario("LIVE-193", "the engine gives up a request that nobody has asked for yet", "KVP-TRN-CHECKS",
          guards="A prompt that cannot be computed lets decode wait for ever.")  # fmt: skip
def _given_up(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    run.engine.ask("fail", id=prompt.id, reason="no pages")
    made = sink.request(prompt.key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(made))
    run.refused(sink, id, "Failed", ("ABORTED", "TICKET_USED"), clause="KVP-TRN-CHECKS", sequence=made.sequence)
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-194", "the engine drains: the other rank of a sink that it serves is served", "KVP-SES-DRAINING",
          guards="An engine that is taken down loses requests.", spoils=True)  # fmt: skip
def _drain(run: PrefillRun) -> None:
    name = f"pair-{run.prompt().id}"
    first, second = (run.ready(ranks=2, rank=rank, name=name) for rank in (0, 1))
    prompt = run.prompt()
    run.take(prompt)
    made = [sink.request(prompt.key, prompt.tokens) for sink in (first, second)]
    first.ask_for(made[0])
    run.engine.ask("drain")
    second.ask_for(made[1])
    run.compute(prompt)
    run.arrived(first, made[0], prompt)
    run.arrived(second, made[1], prompt)
    run.over(prompt)


@scenario("LIVE-195", "a later run of one rank leaves the other rank, and the other replica, as they are",
          "KVP-SES-SUPERSEDE", guards="One rank that began again costs all others their sessions.")  # fmt: skip
def _apart(run: PrefillRun) -> None:
    name = f"pair-{run.prompt().id}"
    zero, one = (run.ready(ranks=2, rank=rank, name=name) for rank in (0, 1))
    replica = run.sink(ranks=2, rank=1, name=name).ready(replica="1")
    run.keep(replica)
    later = run.sink(ranks=2, rank=1, name=name)
    later.incarnation = one.incarnation + _LATER
    later.ready()
    run.keep(later)
    for sink in (zero, replica, later):
        sink.ask("Ping", "Pong", clause="KVP-SES-SUPERSEDE")
    one.session = ""
    ghost = run.sink(ranks=2, rank=0, name=name)
    ghost.incarnation = zero.incarnation - _LATER
    sent = ghost.send("Hello", **ghost.hello())
    run.refused(ghost, sent.fields["request"], "Refused", "SUPERSEDED", "incarnation", "KVP-SES-SUPERSEDE")


@scenario("LIVE-196", "an Error of another connection does not end a session", "KVP-SES-UNKNOWN", guards=_SECRET)
def _stranger(run: PrefillRun) -> None:
    sink, stranger, prompt = run.ready(), run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    done = sink.await_done(made)
    stranger.misstate("Error", session=sink.session, request=done.fields["request"], code="UNKNOWN_SESSION",
                      path="session", mine="others", yours=sink.session)  # fmt: skip
    stranger.ask("Ping", "Pong")
    sink.ask("Ping", "Pong", clause="KVP-SES-UNKNOWN")
    sink.reply(done, "DoneAck")
    run.over(prompt)


def _not_resumed(run: PrefillRun, sink: Sink, other: Sink, **hello: object) -> None:
    """Check that a Hello that names a session in `resume` opens another."""
    found = other.greet(resume=sink.session, **hello)
    run.check("another session", found.fields["session"] != sink.session, str(hello), "KVP-SES-RESUME")
    other.goodbye()


@scenario("LIVE-197", "a session is not resumed by another rank, another engine, or with other features",
          "KVP-SES-RESUME", guards=_SECRET, extensions=("RESUME",))  # fmt: skip
def _others(run: PrefillRun) -> None:
    sink = run.ready(offered=["VERIFY"])
    for rank, name, offered in ((1, sink.name, ["VERIFY"]), (0, "", ["VERIFY"]), (0, sink.name, [])):
        other = run.sink(rank=rank, name=name, offered=offered)
        other.incarnation, other.ids = sink.incarnation, 100
        _not_resumed(run, sink, other)
    run.hand_over(sink)


@scenario("LIVE-198", "a later run of a sink does not resume the session of the one before", "KVP-SES-RESUME",
          guards="Memory of a process that is gone is written on.", extensions=("RESUME",))  # fmt: skip
def _later(run: PrefillRun) -> None:
    sink = run.ready()
    other = run.sink(name=sink.name)
    other.incarnation, other.ids = sink.incarnation + _LATER, 100
    _not_resumed(run, sink, other)
    sink.session = ""


@scenario("LIVE-199", "Hello that comes twice over one connection is one session", "KVP-SES-REPLY",
          guards="Sessions that nobody knows of fill a source.")  # fmt: skip
def _hello_twice(run: PrefillRun) -> None:
    sink = run.sink()
    first = sink.greet().fields["session"]
    raw = sink.last["Hello"].raw
    sink.watch.see(raw, "suite")
    sink.wire.send(raw)
    again = sink.expect("Welcome", clause="KVP-SES-REPLY").fields["session"]
    run.check("one session", first == again, f"{first} and {again}", "KVP-SES-REPLY")
    sink.goodbye()


@scenario("LIVE-201", "max_transfers Transfers wait for their prompts, and one more is too many", "KVP-TRN-BUSY",
          level="L4", guards="A source takes fewer than it said, or as many as it is sent.")  # fmt: skip
def _most(run: PrefillRun) -> None:
    sink = run.sink()
    welcome = sink.greet()
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    for _ in range(int(welcome.fields["limits"]["max_transfers"])):
        sink.used.clear()
        prompt = run.prompt(1)
        sink.ask_for(sink.request(prompt.key, prompt.tokens))
    sink.used.clear()
    made = sink.request(run.prompt().key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(made))
    run.refused(sink, id, "Failed", "BUSY", "sequence", "KVP-TRN-BUSY", made.sequence)
    sink.goodbye()


@scenario("LIVE-202", "items of two columns that take turns in one region", "KVP-GRANT-ALIAS", level="L4", world="mla",
          guards="Caches of one pool that lie between each other are taken for ones over each other.")  # fmt: skip
def _turns(run: PrefillRun) -> None:
    sink = run.sink()
    sink.greet()
    sink.describe(sink.geometry or {})
    sink.allocate()
    target = sink.columns[0]
    begin, step, count = int(target["offset"][0]), int(target["item_stride"][0]), len(target["offset"])
    target["offset"] = [str(begin + k * step) for k in range(count)]
    target["item_stride"] = [str(count * step)] * count
    sink.register()
    run.keep(sink)
    run.hand_over(sink)


@scenario("LIVE-203", "a second Transfer of a sequence that is under way", "KVP-TRN-STALE",
          guards="One transfer has two records: it is freed by one, and written by the other.")  # fmt: skip
def _second(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    fields = sink.transfer(made)
    sink.ask("Transfer", "Accepted", **fields)
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "STALE_TRANSFER", "sequence", "KVP-TRN-STALE", made.sequence)
    run.compute(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-204", "a Transfer after the Descriptions, before Register", "KVP-TRN-CHECKS", level="L4",
          guards="Items of memory that nobody has mapped are written.")  # fmt: skip
def _unregistered(run: PrefillRun) -> None:
    sink, prompt = run.sink(), run.prompt()
    sink.greet()
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.serve(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(made))
    run.refused(sink, id, "Failed", "UNEXPECTED_MESSAGE", "", "KVP-TRN-CHECKS", made.sequence)
    run.engine.ask("fail", id=prompt.id, reason="over")
    run.keep(sink)
    sink.register()
    run.hand_over(sink)


@scenario("LIVE-205", "Abort of a transfer beyond max_transfers: no proof, or the transfer is refused later",
          "KVP-END-UNSEEN", level="L4",
          guards="An Abort is answered and forgotten, and its Transfer is served into other pages.")  # fmt: skip
def _beyond(run: PrefillRun) -> None:
    sink = run.sink()
    most = int(sink.greet().fields["limits"]["max_transfers"])
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    proof = sink.ask("Abort", "Drained", sequence=str(most + 1), reason="changed its mind").fields["proof"]
    run.hand_over(sink)
    if proof == "PROVEN":
        prompt = run.prompt()
        run.serve(prompt)
        fields = sink.transfer(sink.request(prompt.key, prompt.tokens)) | {"sequence": str(most + 1)}
        id = sink.misstate("Transfer", **fields)
        run.refused(sink, id, "Failed", "ABORTED", "sequence", "KVP-END-UNSEEN", fields["sequence"])
        run.untouched(sink)
        run.engine.ask("fail", id=prompt.id, reason="over")


@scenario("LIVE-206", "Abort where there can be no transfer", "KVP-SES-STATE", level="L4",
          guards="A message at the wrong time moves the state of a session.")  # fmt: skip
def _no_transfer(run: PrefillRun) -> None:
    sink = run.sink()
    sink.greet()
    sink.describe(sink.geometry or {})
    id = sink.misstate("Abort", sequence="9", reason="over")
    run.refused(sink, id, "Error", "UNEXPECTED_MESSAGE", "sequence", "KVP-SES-STATE")
    sink.allocate()
    run.keep(sink)
    sink.register()
    run.hand_over(sink)


@scenario("LIVE-207", "Credit in a session whose bytes go by shared memory", "KVP-SES-STATE", level="L4", maps=True,
          guards="A message at the wrong time moves the state of a session.")  # fmt: skip
def _no_credit(run: PrefillRun) -> None:
    sink = run.ready()
    sink.misstate("Credit", kind="INLINE", total="100", epoch=str(sink.epoch))
    run.refused(sink, None, "Error", "UNEXPECTED_MESSAGE", "", "KVP-SES-STATE")
    run.hand_over(sink)


@scenario("LIVE-208", "DoneAck before Done, and of a transfer that never was", "KVP-SES-STATE", level="L4",
          guards="A message at the wrong time ends a transfer, and frees its pages under the copy.")  # fmt: skip
def _early_answer(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    sink.ask("Transfer", "Accepted", **sink.transfer(made))
    for sequence in (int(made.sequence), int(made.sequence) + 7):
        sink.misstate("DoneAck", sequence=str(sequence))
        run.refused(sink, None, "Error", "UNEXPECTED_MESSAGE", "sequence", "KVP-SES-STATE")
    run.fill(prompt)
    run.finish(prompt)
    run.arrived(sink, made, prompt)
    run.over(prompt)


@scenario("LIVE-209", "Aborts of more unseen transfers than a source records: each has its Drained", "KVP-END-UNSEEN",
          "KVP-END-PROVEN", level="L4",
          guards="A source has proven an Abort that it forgets, or a sink never hears what became of it.")  # fmt: skip
def _many_aborts(run: PrefillRun) -> None:
    sink = run.sink()
    most = min(int(sink.greet().fields["limits"]["max_transfers"]), 1024)
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    numbers = [str(2 + n) for n in range(2 * most + 2)]  # 1 stays open, so that none is below the low-water mark
    drained = {each: sink.ask("Abort", "Drained", sequence=each, reason="over") for each in numbers}
    proven = [each for each, found in drained.items() if found.fields["proof"] == "PROVEN"]
    prompt = run.prompt()
    run.serve(prompt)
    for number in proven[:1] + proven[-1:]:
        fields = sink.transfer(sink.request(prompt.key, prompt.tokens)) | {"sequence": number}
        id = sink.misstate("Transfer", **fields)
        run.refused(sink, id, "Failed", "ABORTED", "sequence", "KVP-END-UNSEEN", number)
    run.untouched(sink)
    run.engine.ask("fail", id=prompt.id, reason="over")
    sink.sequences = 0
    run.hand_over(sink)
