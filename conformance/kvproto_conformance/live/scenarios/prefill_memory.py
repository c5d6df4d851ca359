"""Secrets and memory of a source: incarnations, tickets, sequences, session ids, keys, ends."""

from __future__ import annotations

import tempfile
from itertools import combinations
from pathlib import Path

from kvproto_conformance.live import moving, world
from kvproto_conformance.live.engine import Engine
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import STARTING, scenario
from kvproto_conformance.live.wire import Dealer

_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_TWICE = "One ticket is fetched twice, and the second time from pages of another request."
_LATER = "A run takes the place of its successor, or is kept out by one that is gone and whose clock was ahead."
_APART = 1 << 32
"""The least distance of two session ids that are drawn at random: nearer ones come once in 10^8 runs."""


@scenario("LIVE-171", "session ids of six sinks, none of which tells another", "KVP-SES-GUESS",
          guards="Whoever has one session guesses the next one, and speaks in it.")  # fmt: skip
def _guess(run: PrefillRun) -> None:
    ids = [int(run.ready().session) for _ in range(6)]
    near = min(abs(a - b) for a, b in combinations(ids, 2))
    run.check("far apart", near > _APART, f"two ids differ by {near}", "KVP-SES-GUESS")


@scenario("LIVE-172", "a ticket in a second sequence while the first is under way", "KVP-TKT-USED", guards=_TWICE)
def _used(run: PrefillRun) -> None:
    sink, prompt, made = run.begun()
    other = sink.request(prompt.key, prompt.tokens)
    id = sink.misstate("Transfer", **sink.transfer(other))
    run.refused(sink, id, "Failed", "TICKET_USED", "ticket", "KVP-TKT-USED", other.sequence)
    run.compute(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-173", "a ticket that another replica of the same engine has taken", "KVP-TKT-BIND", guards=_TWICE)
def _replica(run: PrefillRun) -> None:
    first, prompt = run.ready(), run.prompt()
    second = run.sink(name=first.name).ready(replica="1")
    run.keep(second)
    run.take(prompt)
    made = run.ask_for(first, prompt)
    other = second.request(prompt.key, prompt.tokens)
    id = second.misstate("Transfer", **second.transfer(other))
    run.refused(second, id, "Failed", "TICKET_BOUND", "ticket", "KVP-TKT-BIND", other.sequence)
    run.compute(prompt)
    run.delivered(first, made, prompt)
    run.untouched(second)


@scenario("LIVE-174", "an earlier run of a rank comes when the later one is open, and when it has said Goodbye",
          "KVP-SES-SUPERSEDE", guards=_LATER)  # fmt: skip
def _gone(run: PrefillRun) -> None:
    later = run.ready()
    ghost = run.sink(name=later.name)
    ghost.incarnation = later.incarnation - (1 << 30)
    sent = ghost.send("Hello", **ghost.hello())
    run.refused(ghost, sent.fields["request"], "Refused", "SUPERSEDED", "incarnation", "KVP-SES-SUPERSEDE")
    later.goodbye()
    survivor = run.sink(name=later.name)
    survivor.incarnation = ghost.incarnation
    survivor.ready(clause="KVP-SES-SUPERSEDE")
    run.keep(survivor)
    run.hand_over(survivor)


@scenario("LIVE-175", "a second Transfer of the oldest sequence, which an Abort has ended", "KVP-TRN-STALE",
          guards=_PAGES)  # fmt: skip
def _forgotten(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    fields = sink.transfer(made)
    sink.ask("Transfer", "Accepted", **fields)
    sink.ask("Abort", "Drained", sequence=made.sequence, reason="the client is gone")
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "STALE_TRANSFER", "sequence", "KVP-TRN-STALE", made.sequence)
    run.engine.ask("fail", id=prompt.id, reason="over")
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-176", "no Done while all rows are there, but prefill is not over", "KVP-TRN-ORDER",
          guards="Decode begins without the first token.")  # fmt: skip
def _computed(run: PrefillRun) -> None:
    sink, prompt, made = run.begun()
    run.fill(prompt)
    run.engine.ask("computed", id=prompt.id, tokens=len(prompt.tokens))
    early = [frame.name for frame in sink.silence(0.3, but=("Data",))]
    if not run.check("no Done", "Done" not in early, str(early), "KVP-TRN-ORDER"):
        return
    run.finish(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-177", "items of two columns that lie over each other", "KVP-GRANT-ALIAS", level="L4", world="mla",
          guards="Two caches are written into the same bytes, and both are read.")  # fmt: skip
def _over_each_other(run: PrefillRun) -> None:
    sink = run.sink()
    sink.greet()
    sink.describe(sink.geometry or {})
    sink.allocate()
    target, draft = sink.columns
    sink.register(columns=[target, draft | {"offset": [target["offset"][0]] * len(draft["offset"])}])
    run.keep(sink)
    prompt = run.prompt()
    run.serve(prompt)
    fields = sink.transfer(sink.request(prompt.key, prompt.tokens))
    for grant in fields["grants"]:
        if grant.get("items"):
            grant["items"] = [str(i) for i in range(len(grant["items"]))]
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "ITEM_ALIAS", None, "KVP-GRANT-ALIAS", fields["sequence"])
    run.untouched(sink)
    run.engine.ask("fail", id=prompt.id, reason="over")


@scenario("LIVE-178", "a ticket that is used, with an item beyond the pool: the item is found first", "KVP-TRN-CHECKS",
          level="L4", guards="Two engines name different reasons for one refusal.")  # fmt: skip
def _used_and_beyond(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    run.delivered(sink, made, prompt)
    fields = sink.transfer(sink.request(prompt.key, prompt.tokens))
    fields["grants"][0]["items"][-1] = "64"
    id = sink.misstate("Transfer", **fields)
    run.refused(sink, id, "Failed", "OUT_OF_REGION", "grants[0].items", "KVP-TRN-CHECKS", fields["sequence"])
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-179", "Credit that falls, and Credit of more than may be given", "KVP-INL-CREDIT", level="L4",
          transport="INLINE", extensions=("INLINE",),
          guards="A source sends what nobody has room for, or stalls for ever.")  # fmt: skip
def _credit(run: PrefillRun) -> None:
    sink = run.ready()
    for total in (sink.credit - 1, sink.counted + (1 << 22) + 1):
        sink.misstate("Credit", kind="INLINE", total=str(total), epoch=str(sink.epoch))
        run.refused(sink, None, "Error", "CREDIT", "total", "KVP-INL-CREDIT")
    run.hand_over(sink)


@scenario("LIVE-181", "the keys of tickets are in nothing that an engine prints", "KVP-SECRET-LOG",
          guards="Whoever reads a log fetches the requests of others.")  # fmt: skip
def _secrets(run: PrefillRun) -> None:
    sink, aborted = run.ready(), run.prompt()
    run.hand_over(sink)
    run.take(aborted)
    made = run.ask_for(sink, aborted)
    sink.ask("Abort", "Drained", sequence=made.sequence, reason="the client is gone")
    used = sink.request(aborted.key, aborted.tokens)
    id = sink.misstate("Transfer", **(sink.transfer(used) | {"content": "00" * 32}))
    run.refused(sink, id, "Failed", ("CONTENT_MISMATCH", "TICKET_USED"), sequence=used.sequence)
    run.engine.ask("fail", id=aborted.id, reason="over")
    printed = run.engine.printed()
    for form in (aborted.key.encode(), aborted.key.upper().encode(), bytes.fromhex(aborted.key)):
        run.check("no key", form not in printed, "the key of a ticket is on stderr", "KVP-SECRET-LOG")


@scenario("LIVE-182", "a Transfer that was refused comes again under its id, and is refused again", "KVP-SES-REPLY",
          level="L4", guards="A Failed that was lost lets a request hang.")  # fmt: skip
def _refused_again(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    fields = sink.transfer(sink.request(prompt.key, prompt.tokens)) | {"content": "ab" * 32}
    first = sink.send("Transfer", request=sink.next_id(), **fields)
    for _ in range(2):
        found = sink.expect("Failed", where=sink.answers(first.fields["request"]), seconds=6.0, clause="KVP-SES-REPLY")
        run.check("code", found.fields["code"] == "CONTENT_MISMATCH", found.fields["code"], "KVP-SES-REPLY")
        sink.watch.see(first.raw, "suite")
        sink.wire.send(first.raw)
    sink.reply(sink.expect("Failed", where=sink.answers(first.fields["request"]), clause="KVP-SES-REPLY"), "DoneAck")
    run.engine.ask("fail", id=prompt.id, reason="over")
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-183", "another Describe in a session that is ready, without EPOCHS", "KVP-SES-STATE", level="L4",
          guards="Caches change under a plan that was made for others.")  # fmt: skip
def _described_again(run: PrefillRun) -> None:
    sink = run.ready()
    data, digest = world.digest_of(sink.geometry or {})
    id = sink.misstate("Describe", version="2", geometry=data, digest=digest)
    run.refused(sink, id, "Refused", "UNEXPECTED_MESSAGE", "", "KVP-SES-STATE")
    run.hand_over(sink)


@scenario("LIVE-184", "Abort of a session that has ended, over its connection and over another", "KVP-END-AFTER",
          guards=_PAGES)  # fmt: skip
def _abort_after(run: PrefillRun) -> None:
    sink, _prompt, made = run.begun()
    session = sink.session
    sink.goodbye()
    for again in (False, True):
        if again:
            sink.wire.close()
            sink.wire = Dealer(run.live.address)
        id = sink.misstate("Abort", session=session, sequence=made.sequence, reason="the client is gone")
        found = sink.expect("Drained", "Error", where=sink.answers(id), clause="KVP-END-AFTER")
        proof = found.fields.get("proof", found.fields.get("code"))
        run.check("proven", proof == "PROVEN", f"{found.name} {proof}", "KVP-END-AFTER")
    sink.session = ""
    run.serve_fresh()


@scenario("LIVE-185", "checksums are of what the source holds, not of what is at the sink by then",
          "KVP-VERIFY-SOURCE", extensions=("VERIFY",),
          guards="Bytes that went wrong on the way pass as verified.")  # fmt: skip
def _own_memory(run: PrefillRun) -> None:
    sink, prompt, made = run.begun(offered=["VERIFY"])
    run.fill(prompt)
    run.engine.ask("computed", id=prompt.id, tokens=len(prompt.tokens))
    sink.silence(0.1, but=("Data",))
    assert sink.memory is not None
    sink.memory.bytes[:] = ~sink.memory.bytes
    run.finish(prompt)
    done = sink.await_done(made)
    sums = {str(g): str(v) for g, v in moving.checksums(sink.pieces(made), prompt.seed).items()}
    found = {c["group"]: c["value"] for c in done.fields.get("checksums", [])}
    run.check("checksums", found == sums, f"{found}, not {sums}", "KVP-VERIFY-SOURCE")
    sink.end(done, 0)
    run.over(prompt)


@scenario("LIVE-186", "Done is answered by UNKNOWN_SESSION: the source's session has ended, and the request too",
          "KVP-TRN-REFUSED", guards="Memory of a peer that began again stays mapped for ever.")  # fmt: skip
def _unknown(run: PrefillRun) -> None:
    sink, prompt = run.ready(), run.prompt()
    run.serve(prompt)
    made = run.ask_for(sink, prompt)
    asked = sink.await_done(made).fields["request"]
    sink.send("Error", request=asked, code="UNKNOWN_SESSION", path="session", mine="others", yours=sink.session)
    run.over(prompt, "undelivered")
    id = sink.misstate("Ping")
    run.refused(sink, id, "Error", "UNKNOWN_SESSION", "session", "KVP-SES-UNKNOWN")
    sink.session = ""
    run.serve_fresh()


@scenario("LIVE-187", "an engine is to listen in a directory that others may enter, without keys", "KVP-NET-INSECURE",
          guards="Anybody on the host reads the prompts of everybody.", level="L4")  # fmt: skip
def _insecure(run: PrefillRun) -> None:
    command, (role, caches, transport, _) = run.live.command, run.live.key
    with tempfile.TemporaryDirectory(prefix="kvproto-open-") as folder:
        Path(folder).chmod(0o755)
        other, address = Engine(command), f"ipc://{folder}/engine"
        try:
            asked = {"role": role, "world": caches, "transport": transport, "name": "engine", "listen": address}
            run.check("refused", "err" in other.answer("open", STARTING, **asked), "it listens", "KVP-NET-INSECURE")
        finally:
            other.stop()
    run.serve_fresh()
