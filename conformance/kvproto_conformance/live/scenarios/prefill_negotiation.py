"""Sessions with a source, from beginning to end: negotiation, incarnations, draining."""

from __future__ import annotations

from kvproto_conformance.live import world
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

_NEGOTIATE = "Engines of two releases cannot say that they do not fit, and hang or guess."


@scenario("LIVE-141", "no version in common", "KVP-NEG-VERSION", guards=_NEGOTIATE)
def _version(run: PrefillRun) -> None:
    sink = run.sink()
    id = sink.send("Hello", **(sink.hello() | {"versions": [{"major": "7", "min_minor": "0", "max_minor": "3"}]}))
    run.refused(sink, id.fields["request"], "Refused", "NO_VERSION", "versions", "KVP-NEG-VERSION")


@scenario("LIVE-142", "a feature is needed that nobody knows", "KVP-NEG-FEATURE", guards=_NEGOTIATE)
def _feature(run: PrefillRun) -> None:
    sink = run.sink()
    unknown = [{"unknown": "28672"}]
    id = sink.send("Hello", **(sink.hello() | {"offered": unknown, "needed": unknown}))
    run.refused(sink, id.fields["request"], "Refused", "FEATURE_MISSING", "needed", "KVP-NEG-FEATURE")


@scenario("LIVE-143", "grease in Hello and in every message after it", "KVP-NEG-IGNORE",
          "KVP-BODY-IGNORE", guards="What a later version adds ends an engine of today.")  # fmt: skip
def _grease(run: PrefillRun) -> None:
    sink = run.sink(offered=["VERIFY"])
    sink.greases = True
    hello = sink.hello()
    sink.greet(
        offered=[*hello["offered"], {"unknown": "61467"}],
        versions=[{"major": "170", "min_minor": "0", "max_minor": "0"}, *hello["versions"]],
    )
    known = sink.watch.features <= {*hello["offered"]}
    run.check("no grease is chosen", known, str(sink.watch.features), "KVP-NEG-CHOOSE")
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    run.hand_over(sink)


@scenario("LIVE-144", "a Hello of another source", "KVP-NEG-ROLE", guards=_NEGOTIATE)
def _role(run: PrefillRun) -> None:
    sink = run.sink()
    id = sink.send("Hello", **(sink.hello() | {"role": "SOURCE"}))
    run.refused(sink, id.fields["request"], "Refused", "WRONG_PEER", None, "KVP-NEG-ROLE")


@scenario("LIVE-145", "an earlier run of a rank comes after a later one", "KVP-SES-SUPERSEDE", "KVP-SES-REPLACED",
          guards="A process that was thought dead takes the place of its successor.")  # fmt: skip
def _superseded(run: PrefillRun) -> None:
    old = run.ready()
    new = run.sink(name=old.name)
    new.incarnation = old.incarnation + (1 << 30)
    new.ready()
    run.keep(new)
    id = old.misstate("Ping")
    run.refused(old, id, "Error", "SUPERSEDED", clause="KVP-SES-REPLACED")
    id = old.misstate("Abort", sequence="1", reason="the client is gone")
    run.refused(old, id, "Error", "SUPERSEDED", "session", "KVP-SES-REPLACED")
    ghost = run.sink(name=old.name)
    ghost.incarnation = old.incarnation
    sent = ghost.send("Hello", **ghost.hello())
    run.refused(ghost, sent.fields["request"], "Refused", "SUPERSEDED", None, "KVP-SES-SUPERSEDE")
    run.hand_over(new)
    old.session = ""


@scenario("LIVE-146", "a prompt that never comes", "KVP-TKT-EARLY",
          guards="A ticket that was mistyped holds decode's pages for ever.", slow=True)  # fmt: skip
def _unknown_ticket(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    made = sink.request(prompt.key, prompt.tokens)
    accepted = sink.ask_for(made)
    run.check("pending", accepted.fields["state"] == "PENDING", accepted.fields["state"], "KVP-TKT-EARLY")
    found = sink.expect("Failed", seconds=20.0, clause="KVP-TKT-EARLY")
    run.check("code", found.fields["code"] == "UNKNOWN_TICKET", str(found.fields), "KVP-TKT-EARLY")
    sink.reply(found, "DoneAck")
    run.hand_over(run.ready(), prompt)  # which has bound the ticket to nobody


@scenario("LIVE-147", "the engine drains: what is under way ends, the rest is refused", "KVP-SES-DRAINING",
          guards="An engine that is taken down loses requests.", spoils=True)  # fmt: skip
def _drain(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    done = sink.await_done(made)
    run.engine.ask("drain")
    late = run.sink()
    sent = late.send("Hello", **late.hello())
    found = late.expect("Refused", "Welcome", where=lambda f: f.get("request") == sent.fields["request"])
    if found.name == "Welcome":
        raise Missed("a new session is welcome while the engine drains", "KVP-SES-DRAINING")
    run.check("code", found.fields["code"] == "DRAINING", found.fields["code"], "KVP-SES-DRAINING")
    other = sink.request(run.prompt().key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(other))
    run.refused(sink, id, "Failed", "DRAINING", None, "KVP-SES-DRAINING", other.sequence)
    sink.reply(done, "DoneAck")
    run.over(prompt)


@scenario("LIVE-148", "an engine that ends says Goodbye", "KVP-SES-DRAINING",
          guards="A peer waits out every patience before it knows.", spoils=True, must=False)  # fmt: skip
def _goodbye(run: PrefillRun) -> None:
    sink = run.ready()
    run.live.engine.stop()
    found = sink.expect("Goodbye", seconds=5.0, clause="KVP-SES-LOST")
    run.check("of this session", found.fields["session"] == sink.session)


@scenario("LIVE-149", "the plan of two sink ranks is the suite's, digest and all", "KVP-PLAN-EXACT", "KVP-REG-CHECK",
          guards="Two planners that nearly agree.", world="mla")  # fmt: skip
def _plan(run: PrefillRun) -> None:
    name = f"pair-{run.prompt().id}"
    for rank in (0, 1):
        sink = run.ready(ranks=2, rank=rank, name=name)
        run.check(f"routes of rank {rank}", len(sink.routes()) == 3, str(sink.routes()), "KVP-PLAN-EXACT")
    described = world.digest_of(run.live.geometry)[1] == sink.their_digest
    run.check("the Description is what the engine said", described, sink.their_digest, "KVP-DSC-DIGEST")
