"""Proof that a sink may accept, and its scope: beside it are other ranks, sequences, sessions and processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.scenarios.decode_ends import aborted, is_free, not_free, waits_for_proof
from kvproto_conformance.live.source import Asked, Source, this_process
from kvproto_conformance.live.watch import Frame

Json = dict[str, Any]
_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_KEPT = "Pages that nobody writes any more are never used again."
_EARLY = "Decode begins with the cache of some ranks, and garbage of the others."
_LOST = "A word too late costs a request that was well."


def _under(id: str) -> Callable[[Json], bool]:
    """Whether a message is about the request of this id."""
    return lambda fields: fields.get("request") == id


def _both(run: DecodeRun) -> tuple[list[Source], Prompt, list[Asked]]:
    """A fetch that both ranks of a source have accepted."""
    sources, prompt = run.ready(2), run.prompt()
    run.fetch(sources[0], prompt)
    return sources, prompt, [run.asked(source, prompt) for source in sources]


def _drained(source: Source, proof: str) -> Frame:
    """Answer the next Abort."""
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    source.reply(abort, "Drained", proof=proof)
    return abort


def _waits(run: DecodeRun, source: Source, prompt: Prompt, clause: str) -> None:
    """Check that the engine still waits for the rest of a fetch."""
    source.ask("Ping", "Pong")
    found = run.state(prompt, 0.1)
    run.check("still waiting", found["state"] == "waiting", str(found), clause)


@scenario("LIVE-907", "of two ranks one is proven to write no more, and then the other", "KVP-END-REUSE", role="sink",
          guards=_PAGES, level="L4", maps=True)  # fmt: skip
def _one_of_two(run: DecodeRun) -> None:
    sources, prompt, _ = _both(run)
    run.engine.ask("abort", id=prompt.id)
    first, second = sources
    _drained(first, "PROVEN")
    not_free(run, first, prompt, "KVP-END-REUSE")
    abort = _drained(second, "UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    not_free(run, first, prompt, "KVP-END-REUSE")
    second.reply(abort, "Drained", proof="PROVEN")
    second.ask("Ping", "Pong")
    is_free(run, second, prompt, "KVP-SES-ANSWERED")
    run.hand_over(sources)


@scenario("LIVE-908", "of two ranks one is Done, and the other fails and proves nothing", "KVP-END-REUSE", role="sink",
          guards=_PAGES, level="L4", maps=True)  # fmt: skip
def _done_of_two(run: DecodeRun) -> None:
    sources, prompt, asked = _both(run)
    first, second = sources
    run.deliver(first, asked[0], prompt)
    second.acknowledged(second.fail(asked[1], "BUSY"))
    abort = _drained(second, "UNPROVABLE")
    run.lost(prompt, "BUSY", free=False)
    not_free(run, second, prompt, "KVP-END-REUSE")
    second.reply(abort, "Drained", proof="PROVEN")
    is_free(run, second, prompt, "KVP-SES-ANSWERED")
    run.hand_over(sources)


@scenario("LIVE-909", "of three transfers one is proven to be over", "KVP-END-REUSE", role="sink", guards=_PAGES,
          level="L4", maps=True)  # fmt: skip
def _one_of_three(run: DecodeRun) -> None:
    source = run.one()
    prompts, aborts = [run.prompt() for _ in range(3)], []
    for prompt in prompts:
        run.fetch(source, prompt)
        run.asked(source, prompt)
    for prompt in prompts:
        aborts.append(aborted(run, source, prompt))
    for number in (1, 2, 0):
        source.reply(aborts[number], "Drained", proof="PROVEN")
        is_free(run, source, prompts[number], "KVP-END-REUSE")
        for other in {1: (0, 2), 2: (0,), 0: ()}[number]:
            found = run.state(prompts[other], 0.0)
            run.check(f"pages of {other} are not free", not found.get("free"), str(found), "KVP-END-REUSE")
    run.hand_over([source])


def _left(run: DecodeRun, process: Callable[[], Json] | None = None) -> tuple[Source, Prompt, Json]:
    """A session that has ended without proof about a fetch; what Drained then has to say of that."""
    (source,), changes = run.source(), {}
    run.connect(source)
    source.welcome()
    source.describe()
    if process is not None:
        changes["process"] = process()
    source.registered(**changes)
    prompt = run.fetched(source)
    asked = run.asked(source, prompt)
    abort = aborted(run, source, prompt)
    said = asked.of | {"session": source.session, "request": abort.fields["request"]}
    source.reply(abort, "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    source.goodbye()
    not_free(run, source, prompt, "KVP-END-REUSE")
    source.over()
    return source, prompt, said


def _again(run: DecodeRun, source: Source, **registered: Any) -> tuple[Prompt, Asked]:
    """The next session, and a fetch of it that the source has accepted."""
    prompt = run.fetched(source)
    source.welcome()
    source.describe()
    source.registered(**registered)
    asked = run.asked(source, prompt)
    return prompt, asked


@scenario("LIVE-910", "proof of a transfer, and one of the session before has the same sequence", "KVP-END-REUSE",
          "KVP-SES-OTHER", role="sink", guards=_PAGES, level="L4", maps=True)  # fmt: skip
def _same_sequence(run: DecodeRun) -> None:
    source, before, said = _left(run)
    prompt, asked = _again(run, source)
    run.check("the same sequence", asked.of["sequence"] == said["sequence"], str(asked.of), "KVP-TRN-SEQUENCE")
    abort = aborted(run, source, prompt)
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    not_free(run, source, before, "KVP-END-REUSE")
    source.misstate("Drained", **said, proof="PROVEN")
    is_free(run, source, before, "KVP-SES-OTHER")
    run.hand_over([source])


@scenario("LIVE-911", "the process of a session ends, and another one wrote in the session before", "KVP-END-REUSE",
          role="sink", guards=_PAGES, level="L4", maps=True)  # fmt: skip
def _another_process(run: DecodeRun) -> None:
    writers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        source, before, said = _left(run, lambda: this_process(writers[0].pid))
        prompt, _ = _again(run, source, process=this_process(writers[1].pid))
        run.engine.ask("abort", id=prompt.id)
        _drained(source, "PROVEN")
        run.lost(prompt, "ABORTED")
        writers[1].kill()
        writers[1].wait()
        source.silence(0.3)
        not_free(run, source, before, "KVP-END-REUSE")
        source.misstate("Drained", **said, proof="PROVEN")
        is_free(run, source, before, "KVP-SES-OTHER")
        source.session = ""
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@scenario("LIVE-912", "Done of one rank comes again, and the other is not Done", "KVP-TRN-SET", role="sink",
          guards=_EARLY, level="L4")  # fmt: skip
def _done_again(run: DecodeRun) -> None:
    (first, second), prompt, asked = _both(run)
    first.move(asked[0], prompt.seed)
    done = first.done(asked[0], run.handed(first, prompt), prompt.seed)
    first.acknowledged(done)
    for _ in range(3):
        first.wire.send(done.raw)
        first.acknowledged(done, "KVP-SES-REPLY")
    _waits(run, first, prompt, "KVP-TRN-SET")
    run.deliver(second, asked[1], prompt)
    run.arrived(prompt)


# what a Done says that is not to be believed
_LIES: dict[str, Callable[[Json], Json]] = {
    "of another writer": lambda good: {"writer": "5"},
    "of a group too few": lambda good: {"groups": good["groups"][:-1]},
}


@scenario("LIVE-913", "a Done that crosses an Abort, of another writer or groups", "KVP-TRN-WRITER", role="sink",
          guards=_PAGES, level="L4")  # fmt: skip
def _crosses(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    abort = aborted(run, source, prompt)
    good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    for what, lie in _LIES.items():
        id = source.misstate("Done", **(good | asked.of | lie(good)))
        found = source.expect("Error", "DoneAck", where=_under(id), clause="KVP-TRN-WRITER")
        run.check(f"a Done {what} is refused", found.name == "Error", found.name, "KVP-TRN-REFUSE")
    waits_for_proof(run, source, prompt, abort, "KVP-TRN-WRITER")


@scenario("LIVE-914", "a Done after the session has ended, of another writer or groups", "KVP-TRN-WRITER", role="sink",
          guards=_PAGES, level="L4", maps=True)  # fmt: skip
def _late(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    aborted(run, source, prompt)
    good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
    session = source.session
    source.goodbye()
    run.lost(prompt, "ABORTED", free=False)
    source.over()
    for lie in _LIES.values():
        source.misstate("Done", **(good | asked.of | lie(good)), session=session)
        not_free(run, source, prompt, "KVP-TRN-WRITER")
    source.misstate("Done", **good, **asked.of, session=session)
    is_free(run, source, prompt, "KVP-SES-OTHER")


@scenario("LIVE-915", "Drained that no Abort has asked for", "KVP-SES-STATE", role="sink", guards=_PAGES,
          level="L4")  # fmt: skip
def _unasked(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    source.ask("Ping", "Pong")  # Accepted has been read
    for id in ("900000", asked.frame.fields["request"]):
        source.misstate("Drained", request=id, **asked.of, proof="PROVEN")
        found = source.expect("Error", clause="KVP-SES-STATE").fields
        run.check("code", found["code"] == "UNEXPECTED_MESSAGE", str(found), "KVP-SES-STATE")
    _waits(run, source, prompt, "KVP-ERR-ALONE")
    abort = aborted(run, source, prompt)
    waits_for_proof(run, source, prompt, abort, "KVP-END-REUSE")


@scenario("LIVE-916", "something is proven, and then nothing is: a second Drained", "KVP-SES-ANSWERED", role="sink",
          guards=_KEPT, level="L4")  # fmt: skip
def _taken_back(run: DecodeRun) -> None:
    source, prompt, _ = run.begun()
    abort = aborted(run, source, prompt)
    source.reply(abort, "Drained", proof="PROVEN")
    found = run.state(prompt)
    run.check("pages are free", bool(found.get("free")), str(found), "KVP-END-REUSE")
    source.reply(abort, "Drained", proof="UNPROVABLE")
    is_free(run, source, prompt, "KVP-SES-ANSWERED")
    run.hand_over([source])


@scenario("LIVE-917", "Failed of a rank that was Done", "KVP-SES-STATE", "KVP-ERR-ALONE", role="sink", guards=_LOST,
          level="L4")  # fmt: skip
def _failed_after_done(run: DecodeRun) -> None:
    (first, second), prompt, asked = _both(run)
    run.deliver(first, asked[0], prompt)
    id = first.misstate("Failed", **asked[0].of, code="BUSY", path="", mine="", yours="")
    found = first.expect("Error", "DoneAck", where=_under(id), clause="KVP-SES-STATE")
    run.check("refused", found.name == "Error", found.name, "KVP-SES-STATE")
    _waits(run, first, prompt, "KVP-ERR-ALONE")
    run.deliver(second, asked[1], prompt)
    run.arrived(prompt)


@scenario("LIVE-918", "a second Done under another id says otherwise", "KVP-SES-ANSWERED", role="sink", level="L4",
          guards="The first token of a request is changed by what comes later.")  # fmt: skip
def _second_done(run: DecodeRun) -> None:
    """It may be refused, or acknowledged as proof that is known: nothing changes."""
    (first, second), prompt, asked = _both(run)
    run.deliver(first, asked[0], prompt)
    good = first.done_fields(asked[0], run.handed(first, prompt), prompt.seed)
    other = [each | {"data": "55" * (len(each["data"]) // 2)} for each in good["handoff"]]
    id = first.misstate("Done", **(good | asked[0].of | {"handoff": other, "outcome": "FINISHED"}))
    first.expect("Error", "DoneAck", where=_under(id), clause="KVP-SES-REPLY")
    _waits(run, first, prompt, "KVP-TRN-SET")
    run.deliver(second, asked[1], prompt)
    found = run.state(prompt)
    run.check("not finished", found.get("finished") is False, str(found), "KVP-SES-ANSWERED")
    run.arrived(prompt)
