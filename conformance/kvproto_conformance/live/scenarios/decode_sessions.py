"""Sessions and fetches of a sink, as they go in an engine's day: early, twice, in pieces, given up."""

from __future__ import annotations

import subprocess
import time

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.peer import PATIENCE
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.source import this_process
from kvproto_conformance.live.watch import Frame

_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_LOST = "A request that is lost lets decode wait for ever."


@scenario("LIVE-311", "two source ranks: nothing has arrived before both are Done", "KVP-TRN-SET", "KVP-TRN-ALL",
          role="sink", guards="Decode begins when the first of several prefill ranks is done.")  # fmt: skip
def _two_ranks(run: DecodeRun) -> None:
    sources, prompt = run.ready(2), run.prompt()
    run.fetch(sources[0], prompt)
    first, second = (run.asked(source, prompt) for source in sources)
    run.deliver(sources[0], first, prompt)
    waiting = run.state(prompt, 0.2)
    run.check("still waiting", waiting["state"] == "waiting", str(waiting), "KVP-TRN-SET")
    run.deliver(sources[1], second, prompt)
    run.arrived(prompt)


@scenario("LIVE-312", "prefill takes its time", "KVP-TKT-EARLY", role="sink", guards=_LOST)
def _pending(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    source.accept(asked, "PENDING")
    early = source.silence(0.2)
    run.check("nothing said", not early, str([frame.name for frame in early]), "KVP-TRN-LONG")
    run.delivered(source, asked, prompt)


@scenario("LIVE-313", "a fetch that begins behind a prefix which the engine has", "KVP-GRANT-COUNT", role="sink",
          guards="Pages of a prefix that others share are named again, and written.")  # fmt: skip
def _prefix(run: DecodeRun) -> None:
    sources = run.ready()
    for first in (16, 32):
        run.hand_over(sources, run.prompt(), first)


@scenario("LIVE-314", "a prompt of one token, and one of whole pages", "KVP-GRANT-COUNT", role="sink",
          guards="The last page is counted by one too many or too few.")  # fmt: skip
def _lengths(run: DecodeRun) -> None:
    sources = run.ready()
    for tokens in (1, 15, 16, 17, 32):
        run.hand_over(sources, run.prompt(tokens))


@scenario("LIVE-315", "the first token ends the text", "KVP-TRN-SET", role="sink",
          guards="Decode goes on after the end of the text.")  # fmt: skip
def _finished(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.move(asked, prompt.seed)
    done = source.done(asked, run.handed(source, prompt), prompt.seed, outcome="FINISHED")
    source.acknowledged(done)
    found = run.state(prompt)
    run.check("finished", found.get("finished") is True, str(found), "KVP-TRN-SET")


@scenario("LIVE-316", "Done twice: DoneAck twice", "KVP-SES-REPLY", role="sink",
          guards="A reply that was lost keeps prefill's pages for ever.")  # fmt: skip
def _twice(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.move(asked, prompt.seed)
    done = source.done(asked, run.handed(source, prompt), prompt.seed)
    source.acknowledged(done)
    for _ in range(3):
        source.wire.send(done.raw)
        source.acknowledged(done, "KVP-SES-REPLY")
    run.arrived(prompt)


@scenario("LIVE-317", "a Transfer that is not answered comes again under its id", "KVP-SES-RESEND", role="sink",
          guards=_LOST, slow=True)  # fmt: skip
def _resend(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    first = source.asked()
    again = source.asked()
    same = first.frame.fields == again.frame.fields
    run.check("the same Transfer", same, str(again.frame.fields), "KVP-SES-RESEND")
    source.accept(again)
    run.delivered(source, again, prompt)


def _aborted(source_abort: Frame) -> str:
    return str(source_abort.fields["sequence"])


@scenario("LIVE-318", "the engine aborts, and the source says PROVEN", "KVP-END-REUSE", role="sink", guards=_PAGES)
def _abort(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    run.engine.ask("abort", id=prompt.id)
    abort = source.expect("Abort", clause="KVP-END-REUSE")
    run.check("this one", _aborted(abort) == asked.of["sequence"], str(abort.fields))
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    run.hand_over([source])


@scenario(
    "LIVE-319", "the engine aborts, and nothing is proven", "KVP-END-REUSE", role="sink", guards=_PAGES, maps=True
)
def _unproven(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    run.asked(source, prompt)
    run.engine.ask("abort", id=prompt.id)
    abort = source.expect("Abort", clause="KVP-END-REUSE")
    source.reply(abort, "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    found = run.state(prompt)
    run.check("pages are not free", found["free"] is False, str(found), "KVP-END-REUSE")
    run.hand_over([source])


@scenario("LIVE-320", "prefill fails a request", "KVP-END-FAILED", role="sink", guards=_LOST)
def _failed(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    failed = source.fail(asked, "PROMPT_TOO_LONG", "40 tokens", "45 tokens")
    source.acknowledged(failed)
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "PROMPT_TOO_LONG")
    run.hand_over([source])


@scenario("LIVE-321", "one of two source ranks fails: the other is told to stop", "KVP-END-FAILED", role="sink",
          guards=_PAGES)  # fmt: skip
def _one_fails(run: DecodeRun) -> None:
    sources, prompt = run.ready(2), run.prompt()
    run.fetch(sources[0], prompt)
    first, _second = (run.asked(source, prompt) for source in sources)
    failed = sources[0].fail(first, "ABORTED", "", "")
    sources[0].acknowledged(failed)
    for source in sources:
        abort = source.expect("Abort", clause="KVP-END-FAILED")
        source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    run.hand_over(sources)


@scenario("LIVE-322", "Ping is answered in every state of a session", "KVP-SES-PONG", role="sink",
          guards="An engine that is busy registering is taken for dead.")  # fmt: skip
def _pings(run: DecodeRun) -> None:
    source = run.connected()
    for step in (source.welcome, source.describe, source.registered):
        step()
        source.ask("Ping", "Pong")
        run.check(f"Pong when {source.watch.state}", True)
    run.hand_over([source])


@scenario("LIVE-323", "grease in every message of the source", "KVP-BODY-IGNORE", role="sink",
          guards="What a later version adds ends an engine of today.")  # fmt: skip
def _grease(run: DecodeRun) -> None:
    (source,) = run.source(offered=["VERIFY"])
    source.greases = True
    run.connect(source)
    source.ready()
    run.hand_over([source])


@scenario("LIVE-324", "five fetches at once, in any order, served in another order", "KVP-TRN-SEQUENCE", role="sink",
          guards="Transfers of one session get each other's pages.")  # fmt: skip
def _many(run: DecodeRun) -> None:
    source = run.one()
    prompts = [run.prompt(5 + 7 * i) for i in range(5)]
    for prompt in prompts:
        run.fetch(source, prompt)
    came = [source.asked() for _ in prompts]
    numbers = [int(each.of["sequence"]) for each in came]
    run.check("sequences", numbers == list(range(1, 6)), str(numbers), "KVP-TRN-SEQUENCE")
    keys = [each.key for each in came]
    if not run.check("tickets", sorted(keys) == sorted(p.key for p in prompts), str(keys), "KVP-TKT-BIND"):
        return
    asked = [run.accepted(source, came[keys.index(prompt.key)], prompt) for prompt in prompts]
    for i in (3, 0, 4, 1, 2):
        run.deliver(source, asked[i], prompts[i])
        run.arrived(prompts[i])


@scenario("LIVE-325", "the source says Goodbye while a fetch waits", "KVP-SES-LOST", role="sink", guards=_LOST)
def _goodbye(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    run.asked(source, prompt)
    source.goodbye()
    run.lost(prompt, "PEER_LOST", free=False)


@scenario("LIVE-326", "a Hello that is not answered comes again", "KVP-SES-RESEND", role="sink",
          guards="Decode that starts before prefill never finds it.", slow=True)  # fmt: skip
def _hello(run: DecodeRun) -> None:
    source = run.connected()
    first = source.expect("Hello")
    again = source.expect("Hello")
    same = first.fields["request"] == again.fields["request"]
    run.check("the same Hello", same, str(again.fields), "KVP-SES-RESEND")
    source.heard.insert(0, again)
    source.ready()
    run.hand_over([source])


@scenario("LIVE-327", "an engine that ends says Goodbye", "KVP-SES-DRAINING", role="sink",
          guards="A peer waits out every patience before it knows.", spoils=True, must=False)  # fmt: skip
def _ends(run: DecodeRun) -> None:
    source = run.one()
    run.live.engine.stop()
    found = source.expect("Goodbye", seconds=5.0, clause="KVP-SES-LOST")
    run.check("of this session", found.fields["session"] == source.session)
    run.peers.clear()
    source.wire.close()
    source.unmap()


@scenario("LIVE-328", "the source does not know the session on this connection: it is resumed", "KVP-SES-HELLO",
          role="sink", guards="A connection that breaks costs every transfer that was under way.",
          extensions=("RESUME",))  # fmt: skip
def _resumes(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    unknown = {"code": "UNKNOWN_SESSION", "path": "session", "mine": "no such session", "yours": source.session}
    source.send("Error", request=asked.frame.fields["request"], **unknown)
    hello = source.expect("Hello", clause="KVP-SES-HELLO")
    resumed = hello.fields.get("resume")
    run.check("resumes", resumed == source.session, f"{resumed}, not {source.session}", "KVP-SES-HELLO")
    source.reply(hello, "Welcome", **source.welcomed)
    source.accept(asked)
    run.delivered(source, asked, prompt)


@scenario("LIVE-329", "nothing is proven of a request, until the process that wrote is dead", "KVP-END-REUSE",
          "KVP-REG-DEATH", role="sink", guards="Pages that nobody can write any more are never used again.",
          must=False, maps=True)  # fmt: skip
def _dies(run: DecodeRun) -> None:
    (source,) = run.source()
    with subprocess.Popen(["sleep", "600"]) as writer:
        try:
            run.connect(source)
            source.welcome()
            source.describe()
            source.registered(process=this_process(writer.pid))
            prompt = run.fetched(source)
            run.asked(source, prompt)
            run.engine.ask("abort", id=prompt.id)
            source.reply(source.expect("Abort", clause="KVP-END-REUSE"), "Drained", proof="UNPROVABLE")
            run.lost(prompt, "ABORTED", free=False)
            before = run.state(prompt)
            run.check("pages are not free", before["free"] is False, str(before), "KVP-END-REUSE")
        finally:
            writer.kill()
    found, end = run.state(prompt), time.monotonic() + PATIENCE
    while not found["free"] and time.monotonic() < end:
        source.hear(0.02)
        found = run.state(prompt)
    if run.check("pages are free", bool(found["free"]), str(found), "KVP-REG-DEATH"):
        run.engine.ask("release", id=prompt.id)
    source.over()


@scenario("LIVE-330", "the engine aborts twice: one Abort", "KVP-SES-RESEND", role="sink", guards=_PAGES, must=False)
def _aborts(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    run.asked(source, prompt)
    for _ in range(2):
        run.engine.ask("abort", id=prompt.id)
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    source.ask("Ping", "Pong")  # whatever was said before it has come
    more = [f for f in source.heard if f.name == "Abort" and f.fields["request"] != abort.fields["request"]]
    run.check("one Abort", not more, f"{len(more)} more", "KVP-SES-RESEND")
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    run.hand_over([source])
