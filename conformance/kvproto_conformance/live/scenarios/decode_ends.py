"""Ends of a session, a transfer or a process as a sink sees them: proof, and lookalikes of proof."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.source import Asked, Source, this_process
from kvproto_conformance.live.watch import ENGINE, Frame

Json = dict[str, Any]
_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_KEPT = "Pages that nobody writes any more are never used again."
_HANGS = "Requests wait in a session that is over for their source."
_ANOTHER = "A word about another transfer, rank or memory is taken for one about this."


def aborted(run: DecodeRun, source: Source, prompt: Prompt) -> Frame:
    """The Abort of a fetch that the engine gives up."""
    run.engine.ask("abort", id=prompt.id)
    return source.expect("Abort", clause="KVP-END-REUSE")


def is_free(run: DecodeRun, source: Source, prompt: Prompt, clause: str) -> None:
    """Check that the engine takes what was just said for proof."""
    source.silence(0.1)
    found = run.state(prompt, 0.1)
    if run.check("pages are free", bool(found.get("free")), str(found), clause):
        run.engine.ask("release", id=prompt.id)


def not_free(run: DecodeRun, source: Source, prompt: Prompt, clause: str) -> None:
    """Check that the engine still waits for proof; of pages that only itself writes it has it."""
    source.silence(0.1)
    found = run.state(prompt, 0.1)
    if run.transport == "SHM":
        run.check("pages are not free", not found.get("free"), str(found), clause)


def waits_for_proof(run: DecodeRun, source: Source, prompt: Prompt, abort: Frame, clause: str) -> None:
    """Prove nothing of a fetch that was given up, check that its pages wait, and then prove it."""
    source.reply(abort, "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    not_free(run, source, prompt, clause)
    source.reply(abort, "Drained", proof="PROVEN")
    is_free(run, source, prompt, "KVP-SES-ANSWERED")
    run.hand_over([source])


@scenario("LIVE-888", "nothing is proven, and then it is: a second Drained", "KVP-SES-ANSWERED", role="sink",
          guards=_KEPT, level="L4", maps=True)  # fmt: skip
def _second_drained(run: DecodeRun) -> None:
    source, prompt, _ = run.begun()
    abort = aborted(run, source, prompt)
    waits_for_proof(run, source, prompt, abort, "KVP-END-REUSE")


@scenario("LIVE-905", "Done crosses an Abort, and Drained proves nothing", "KVP-SES-ANSWERED", role="sink",
          guards=_KEPT, level="L4", maps=True)  # fmt: skip
def _done_crosses(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.move(asked, prompt.seed)
    abort = aborted(run, source, prompt)
    source.acknowledged(source.done(asked, run.handed(source, prompt), prompt.seed))
    source.reply(abort, "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    is_free(run, source, prompt, "KVP-SES-ANSWERED")
    run.hand_over([source])


@scenario("LIVE-889", "Drained of another sequence under the id of an Abort", "KVP-SES-STATE", role="sink",
          guards=_PAGES, level="L4")  # fmt: skip
def _drained_of_another(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    abort = aborted(run, source, prompt)
    another = str(int(asked.of["sequence"]) + 1)
    source.misstate("Drained", request=abort.fields["request"], sequence=another, proof="PROVEN")
    found = source.expect("Error", clause="KVP-SES-STATE").fields
    run.check("code", found["code"] == "UNEXPECTED_MESSAGE", str(found), "KVP-SES-STATE")
    not_free(run, source, prompt, "KVP-END-REUSE")
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    run.hand_over([source])


@scenario("LIVE-890", "Accepted of another sequence under the id of a Transfer", "KVP-SES-STATE", role="sink",
          guards=_ANOTHER, level="L4", slow=True)  # fmt: skip
def _accepted_of_another(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    another = str(int(asked.of["sequence"]) + 1)
    source.misstate("Accepted", request=asked.frame.fields["request"], sequence=another, state="READY")
    found = source.expect("Error", clause="KVP-SES-STATE").fields
    run.check("code", found["code"] == "UNEXPECTED_MESSAGE", str(found), "KVP-SES-STATE")
    again = source.asked()
    run.check("the same Transfer", again.frame.fields == asked.frame.fields, str(again.frame.fields), "KVP-ERR-ALONE")
    source.accept(again)
    run.delivered(source, again, prompt)


@scenario("LIVE-891", "a Transfer is answered by Error", "KVP-END-FAILED", role="sink", guards=_HANGS, level="L4")
def _refused_by_error(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    source.send("Error", request=asked.frame.fields["request"], code="TOO_LARGE", path="grants", mine="1", yours="2")
    source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
    run.lost(prompt, "TOO_LARGE", "PEER_LOST")
    run.hand_over([source])


@scenario("LIVE-892", "the source does not know the session any more", "KVP-SES-REVOKED", role="sink", guards=_HANGS,
          level="L4")  # fmt: skip
def _unknown(run: DecodeRun) -> None:
    """It says so of an Abort, and another transfer is under way; a sink that can resume goes on with that."""
    source, prompt, asked = run.begun()
    given_up = run.prompt()
    run.fetch(source, given_up)
    run.asked(source, given_up)
    abort = aborted(run, source, given_up)
    said = {"code": "UNKNOWN_SESSION", "path": "session", "mine": "no such session", "yours": source.session}
    source.send("Error", request=abort.fields["request"], **said)
    hello = _reopens(source)
    if hello is not None and hello.fields.get("resume"):
        source.reply(hello, "Welcome", **source.welcomed)
        source.reply(abort, "Drained", proof="PROVEN")
        run.lost(given_up, "ABORTED")
        run.delivered(source, asked, prompt)
        return
    found = run.state(prompt, 1.0)
    if not run.check("the session is over", found["state"] == "lost", str(found), "KVP-SES-REVOKED"):
        return
    source.over()
    if hello is not None:
        source.heard.append(source.watch.see(hello.raw, ENGINE))
    run.lost(prompt, "PEER_LOST", "UNKNOWN_SESSION", free=False)
    following = run.prompt()
    run.fetch(source, following)
    source.ready()
    run.deliver(source, run.asked(source, following), following)
    run.arrived(following)


def _reopens(source: Source) -> Frame | None:
    """The Hello of a sink that says it without a reason such as a fetch; what it aborts, it hears proof of."""
    heard = source.silence(0.3)
    for abort in (frame for frame in heard if frame.name == "Abort"):
        source.reply(abort, "Drained", proof="PROVEN")
    return next((frame for frame in heard if frame.name == "Hello"), None)


@scenario("LIVE-893", "the source has heard of a later run of this engine", "KVP-SES-REVOKED", role="sink",
          guards=_HANGS, level="L4")  # fmt: skip
def _superseded(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    said = {"code": "SUPERSEDED", "path": "session", "mine": "a later run", "yours": source.session}
    source.send("Error", request=asked.frame.fields["request"], **said)
    run.lost(prompt, "PEER_LOST", "SUPERSEDED", free=False)
    _reopens(source)
    source.over()
    following = run.prompt()
    run.fetch(source, following)
    heard = [frame.name for frame in source.silence(0.3)]
    run.check("no Transfer", "Transfer" not in heard, str(heard), "KVP-SES-REVOKED")


def _late(say: Callable[[DecodeRun, Source, Asked, Prompt, Frame], Json]) -> Any:
    def script(run: DecodeRun) -> None:
        """An Abort is out when the source says Goodbye; what comes afterwards is proof all the same."""
        source, prompt, asked = run.begun()
        abort = aborted(run, source, prompt)
        session = source.session
        fields = say(run, source, asked, prompt, abort)
        source.goodbye()
        run.lost(prompt, "ABORTED", free=False)
        not_free(run, source, prompt, "KVP-END-REUSE")
        name = "Drained" if "proof" in fields else "Done"
        source.over()
        source.misstate(name, session=session, **fields)
        is_free(run, source, prompt, "KVP-SES-OTHER")

    return script


def _drained_late(run: DecodeRun, source: Source, asked: Asked, prompt: Prompt, abort: Frame) -> Json:
    return {"request": abort.fields["request"], "sequence": asked.of["sequence"], "proof": "PROVEN"}


def _done_late(run: DecodeRun, source: Source, asked: Asked, prompt: Prompt, abort: Frame) -> Json:
    done = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    return done | asked.of | {"request": source.next_id()}


scenario("LIVE-894", "Drained after the session has ended", "KVP-SES-OTHER", role="sink", guards=_KEPT, level="L4",
         maps=True)(_late(_drained_late))  # fmt: skip
scenario("LIVE-895", "Done after the session has ended", "KVP-SES-OTHER", role="sink", guards=_KEPT, level="L4",
         maps=True)(_late(_done_late))  # fmt: skip


@scenario("LIVE-896", "Abort goes on after the session has ended", "KVP-END-LATE", role="sink", guards=_KEPT,
          level="L4", must=False, slow=True, maps=True)  # fmt: skip
def _asks_on(run: DecodeRun) -> None:
    source, prompt, _ = run.begun()
    source.goodbye()
    run.lost(prompt, "PEER_LOST", free=False)
    source.reply(source.expect("Abort", clause="KVP-END-LATE"), "Drained", proof="PROVEN")
    is_free(run, source, prompt, "KVP-SES-OTHER")
    source.over()


def _of_another(change: Callable[[Json], Json]) -> Any:
    def script(run: DecodeRun) -> None:
        """The process that ends is not the one that Registered names, as far as this host can know."""
        (source,) = run.source()
        with subprocess.Popen(["sleep", "600"]) as writer:
            try:
                run.connect(source)
                source.welcome()
                source.describe()
                process = this_process(writer.pid)
                source.registered(process=process | change(process))
                prompt = run.fetched(source)
                run.asked(source, prompt)
                abort = aborted(run, source, prompt)
                source.reply(abort, "Drained", proof="UNPROVABLE")
                run.lost(prompt, "ABORTED", free=False)
                not_free(run, source, prompt, "KVP-REG-DEATH")
            finally:
                writer.kill()
        source.silence(0.3)
        not_free(run, source, prompt, "KVP-REG-DEATH")
        source.reply(abort, "Drained", proof="PROVEN")
        is_free(run, source, prompt, "KVP-SES-ANSWERED")
        run.hand_over([source])

    return script


for _id, _what, _change in (
    ("LIVE-897", "on another host", lambda process: {"boot": process["boot"][:-1] + "e0"[process["boot"][-1] == "e"]}),
    ("LIVE-898", "in another namespace", lambda process: {"namespace": str(int(process["namespace"]) + 1)}),
    ("LIVE-899", "that began at another time", lambda process: {"start": str(int(process["start"]) + 1)}),
):
    scenario(_id, f"a process {_what} with the PID of one that ends", "KVP-REG-DEATH", role="sink", guards=_PAGES,
             level="L4", maps=True)(_of_another(_change))  # fmt: skip


@scenario("LIVE-900", "a source that takes one transfer at a time", "KVP-TRN-SEQUENCE", role="sink", level="L4",
          guards="Prefill refuses what is beyond its limit, and the requests are lost.")  # fmt: skip
def _one_at_a_time(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome(limits={"max_body": str(1 << 24), "max_transfers": "1"})
    source.describe()
    source.registered()
    first, second = run.prompt(), run.prompt()
    run.fetch(source, first)
    asked = run.asked(source, first)
    run.fetch(source, second)
    heard = [frame.name for frame in source.silence(0.3)]
    run.check("no second Transfer", "Transfer" not in heard, str(heard), "KVP-TRN-SEQUENCE")
    run.delivered(source, asked, first)
    if run.state(second, 0.0)["state"] == "lost":
        run.lost(second, "BUSY")
    else:
        run.deliver(source, run.asked(source, second), second)
        run.arrived(second)


@scenario("LIVE-901", "a Welcome of another engine", "KVP-NEG-CHECK", role="sink", guards=_ANOTHER, level="L4")
def _another_engine(run: DecodeRun) -> None:
    (source,), prompt = run.source(), run.prompt()
    run.connect(source)
    run.fetch(source, prompt)
    source.welcome(engine="another")
    source.expect("Goodbye", clause="KVP-NEG-CHECK")
    run.lost(prompt, "WRONG_PEER", "PEER_LOST")
    source.session = ""


@scenario("LIVE-902", "a Welcome of another rank than its endpoint's", "KVP-NEG-CHECK", role="sink", guards=_ANOTHER,
          level="L4")  # fmt: skip
def _another_rank(run: DecodeRun) -> None:
    (first, second), prompt = run.source(2), run.prompt()
    run.connect(first)
    run.fetch(first, prompt)
    first.welcome()
    first.describe()
    second.incarnation = first.incarnation + 1  # no earlier run of rank 0
    second.welcome(rank="0")
    second.expect("Goodbye", clause="KVP-NEG-CHECK")
    heard = [frame.name for frame in first.silence(0.2)]
    run.check("nothing is requested", "Transfer" not in heard, str(heard), "KVP-TRN-ALL")
    run.lost(prompt, "WRONG_PEER", "PEER_LOST")
    first.session = second.session = ""


def _registered(change: Json) -> Any:
    def script(run: DecodeRun) -> None:
        """Everything that waits for the session is lost."""
        (source,), prompt = run.source(), run.prompt()
        run.connect(source)
        run.fetch(source, prompt)
        source.welcome()
        source.describe()
        source.registered(**change)
        source.expect("Goodbye", clause="KVP-REG-CHECK")
        found = run.state(prompt)
        run.check("fetch lost", found["state"] == "lost", str(found), "KVP-SES-LOST")
        source.session = ""

    return script


for _id, _field, _value in (("LIVE-903", "epoch", "7"), ("LIVE-904", "transport", "NIXL")):
    scenario(_id, f"a Registered with another {_field}", "KVP-REG-CHECK", role="sink", guards=_ANOTHER,
             level="L4")(_registered({_field: _value}))  # fmt: skip
