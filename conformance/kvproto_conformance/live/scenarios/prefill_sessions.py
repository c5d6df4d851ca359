"""Sessions and transfers of a source, as they go in an engine's day: early, twice, again, in pieces, many at once."""

from __future__ import annotations

from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink
from kvproto_conformance.live.wire import Dealer

_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_TWICE = "A frame that comes twice is done twice, or not answered."


@scenario("LIVE-111", "two sink ranks take their heads, and the request is held until both have", "KVP-TRN-HOLD",
          "KVP-PLAN-EXACT", guards=_PAGES)  # fmt: skip
def _two_ranks(run: PrefillRun) -> None:
    name = f"pair-{run.prompt().id}"
    sinks = [run.ready(ranks=2, rank=rank, name=name) for rank in (0, 1)]
    for first, second in (sinks, sinks[::-1]):
        prompt = run.prompt()
        run.serve(prompt)
        made = [sink.request(prompt.key, prompt.tokens) for sink in (first, second)]
        first.ask_for(made[0])
        second.ask_for(made[1])
        run.arrived(first, made[0], prompt)
        run.over(prompt, "held", 0.1)
        run.arrived(second, made[1], prompt)
        run.over(prompt)


@scenario("LIVE-112", "a Transfer that comes before its prompt", "KVP-TKT-EARLY",
          guards="Decode is told before prefill is, and the request is lost.")  # fmt: skip
def _early(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    made = sink.request(prompt.key, prompt.tokens)
    accepted = sink.ask_for(made)
    run.check("pending", accepted.fields["state"] == "PENDING", accepted.fields["state"], "KVP-TKT-EARLY")
    run.serve(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-113", "no Done before prefill is over", "KVP-TRN-ORDER",
          guards="Decode begins with rows that nobody has computed.")  # fmt: skip
def _during(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    accepted = sink.ask_for(made)
    run.check("not ready", accepted.fields["state"] != "READY", accepted.fields["state"], "KVP-TKT-EARLY")
    run.fill(prompt, 20)
    run.engine.ask("computed", id=prompt.id, tokens=20)
    early = sink.silence(0.1)
    run.check("nothing said", not early, str([frame.name for frame in early]), "KVP-TRN-ORDER")
    run.compute(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-114", "a fetch that begins behind a prefix which the sink has", "KVP-GRANT-COUNT",
          guards="Pages of a prefix that others share are written again.")  # fmt: skip
def _prefix(run: PrefillRun) -> None:
    sink = run.ready()
    for first in (16, 3, 44):
        run.hand_over(sink, run.prompt(), first)


@scenario("LIVE-115", "a prompt of one token, and one of whole pages", "KVP-GRANT-COUNT",
          guards="The last page is counted by one too many or too few.")  # fmt: skip
def _lengths(run: PrefillRun) -> None:
    sink = run.ready()
    for tokens in (1, 4, 16, 17, 32):
        run.hand_over(sink, run.prompt(tokens))


@scenario("LIVE-116", "Ping is answered in every state of a session", "KVP-SES-PONG",
          guards="An engine that is busy registering is taken for dead.")  # fmt: skip
def _pings(run: PrefillRun) -> None:
    sink = run.sink()
    steps = (
        sink.greet, lambda: sink.describe(sink.geometry or {}), sink.allocate, lambda: run.keep(sink), sink.register,
    )  # fmt: skip
    for step in steps:
        step()
        found = sink.ask("Ping", "Pong")
        run.check(f"Pong when {sink.watch.state}", found.fields["session"] == sink.session, clause="KVP-SES-PONG")
    run.hand_over(sink)


@scenario("LIVE-117", "Describe, Register and Transfer twice under one id", "KVP-SES-REPLY", guards=_TWICE)
def _again(run: PrefillRun) -> None:
    sink = run.sink()
    sink.greet()

    def twice(name: str, answer: str) -> None:
        frame = sink.last[name]
        sink.watch.see(frame.raw, "suite")
        sink.wire.send(frame.raw)
        found = sink.expect(answer, where=lambda f: f["request"] == frame.fields["request"], clause="KVP-SES-REPLY")
        run.check(f"{answer} again", True, found.name)

    sink.describe(sink.geometry or {})
    twice("Describe", "Description")
    sink.allocate()
    run.keep(sink)
    sink.register()
    twice("Register", "Registered")
    prompt = run.prompt()
    run.take(prompt)
    made = run.ask_for(sink, prompt)
    twice("Transfer", "Accepted")
    run.compute(prompt)
    run.delivered(sink, made, prompt)
    run.hand_over(sink)


def _resumed(sink: Sink, session: str) -> None:
    """Hello that resumes a session, to a Welcome of the same; raises Missed, as nothing can follow in another."""
    found = sink.greet(resume=session).fields["session"]
    if found != session:
        raise Missed(f"Welcome to session {found}, where {session} was to be resumed", "KVP-SES-RESUME")


@scenario("LIVE-118", "a connection breaks, and the session is resumed over another", "KVP-SES-RESUME",
          guards="A connection that breaks costs every transfer that was under way.",
          extensions=("RESUME",))  # fmt: skip
def _resume(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    made = run.ask_for(sink, prompt)
    sink.wire.close()
    sink.wire = Dealer(run.live.address)
    _resumed(sink, sink.session)
    sink.count_anew()
    run.serve(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-151", "the session is resumed in the middle of a stream: its transfer ends, and bytes count from 0",
          "KVP-INL-BROKEN", "KVP-INL-RESUMED", transport="INLINE", extensions=("INLINE", "RESUME"),
          guards="After a connection broke the two sides count from different bytes: streams stall.")  # fmt: skip
def _broken_stream(run: PrefillRun) -> None:
    sink, prompt, later = run.sink(), run.prompt(), run.prompt()
    sink.window = 4096
    sink.ready()
    run.serve(prompt)
    made, waiting = (sink.request(each.key, each.tokens) for each in (prompt, later))
    sink.ask_for(made)
    sink.expect("Data", where=sink.of(made), clause="KVP-INL-TURN")
    sink.ask_for(waiting)
    old = sink.wire
    sink.wire = Dealer(run.live.address)
    _resumed(sink, sink.session)
    old.close()
    sink.counted, sink.window = 0, 2048
    sink.open_credit()
    run.refused(sink, None, "Failed", "PEER_LOST", None, "KVP-INL-BROKEN", made.sequence)
    run.serve(later)
    run.delivered(sink, waiting, later)
    run.hand_over(sink)


@scenario("LIVE-120", "the Hello that resumed a session comes again after the next one did", "KVP-SES-LATE",
          guards="What an old connection still held takes a session back: answers go where nobody is.",
          extensions=("RESUME",))  # fmt: skip
def _late_hello(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    session, old = sink.session, sink.wire
    sink.wire = Dealer(run.live.address)
    _resumed(sink, session)
    late = sink.last["Hello"].raw
    sink.wire.close()
    sink.wire = Dealer(run.live.address)
    _resumed(sink, session)
    sink.watch.see(late, "suite")
    old.send(late)
    sink.silence(0.2)  # it has been read before what comes over the other connection
    sink.count_anew()
    made = run.ask_for(sink, prompt)
    sink.wire.send(late)
    run.serve(prompt)
    run.delivered(sink, made, prompt)
    old.close()


@scenario("LIVE-119", "a session that nobody has is not resumed", "KVP-SES-GUESS",
          guards="A process that began again is taken for the one before it.")  # fmt: skip
def _no_resume(run: PrefillRun) -> None:
    sink = run.sink()
    found = sink.greet(resume="12345")
    run.check("a new session", found.fields["session"] != "12345", clause="KVP-SES-GUESS")
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    run.hand_over(sink)


@scenario("LIVE-128", "Done comes again under its id until it is acknowledged", "KVP-SES-RESEND", "KVP-TRN-HOLD",
          guards="A lost frame lets a request hang, or its pages leak.", slow=True)  # fmt: skip
def _resend(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    first = sink.await_done(made)
    again = sink.expect("Done", seconds=8.0, clause="KVP-SES-RESEND")
    same = first.fields == again.fields
    run.check("the same Done", same, f"{first.fields} and {again.fields}", "KVP-SES-RESEND")
    run.over(prompt, "held", 0.05)
    sink.reply(again, "DoneAck")
    run.over(prompt)


@scenario("LIVE-133", "a ticket that another engine's sink has taken", "KVP-TKT-BIND",
          guards="Two decode engines compute one request, or the wrong one gets it.")  # fmt: skip
def _bound(run: PrefillRun) -> None:
    first, second, prompt = run.ready(), run.ready(), run.prompt()
    run.take(prompt)
    made = run.ask_for(first, prompt)
    other = second.request(prompt.key, prompt.tokens)
    id = second.misstate("Transfer", **second.transfer(other))
    run.refused(second, id, "Failed", "TICKET_BOUND", "ticket", "KVP-TKT-BIND", other.sequence)
    run.compute(prompt)
    run.delivered(first, made, prompt)
    run.untouched(second)


@scenario("LIVE-134", "a ticket in two sequences of a session", "KVP-TKT-USED",
          guards="One ticket is fetched twice, and the second time from pages of another request.")  # fmt: skip
def _used(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    run.delivered(sink, made, prompt)
    other = sink.request(prompt.key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(other))
    run.refused(sink, id, "Failed", "TICKET_USED", "ticket", "KVP-TKT-USED", other.sequence)
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-135", "a Transfer of a sequence that has ended", "KVP-TRN-STALE",
          guards="A frame that waited in a queue writes pages that belong to another request by now.")  # fmt: skip
def _stale(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    fields = sink.transfer(made)
    sink.ask("Transfer", "Accepted", **fields)
    run.delivered(sink, made, prompt)
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "STALE_TRANSFER", "sequence", "KVP-TRN-STALE", made.sequence)
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-136", "eight transfers at once, finished in another order", "KVP-TRN-BUSY",
          guards="Transfers of one session get each other's pages.")  # fmt: skip
def _many(run: PrefillRun) -> None:
    sink = run.ready()
    prompts = [run.prompt(5 + 3 * i) for i in range(8)]
    made = [sink.request(p.key, p.tokens) for p in prompts]
    for each, prompt in zip(made, prompts, strict=True):
        run.take(prompt)
        sink.ask_for(each)
    for i in (3, 0, 7, 1, 6, 2, 5, 4):
        run.fill(prompts[i])
        run.finish(prompts[i])
        run.arrived(sink, made[i], prompts[i])
        run.over(prompts[i])
