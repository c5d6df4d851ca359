"""Extension PULL: leases that are renewed, that end, that are given back; Offers that lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvproto_conformance.live import world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.memory import holds
from kvproto_conformance.live.peer import RESEND
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.pull import PullSink, PullSource
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.source import Asked, Source
from kvproto_conformance.live.watch import SUITE, Frame

Json = dict[str, Any]
_LENT = "Pages that decode reads are given to another request, or are read where nobody offered them."
_CLOCK = "A lease is counted from when its frame came: pages are read after they were given to another request."
_EARLY = "What overtakes a Register is refused, and a request is lost in the moment in which a pool moves."
_LIE = "Pages are read that nobody offered: another request's cache is decoded on."


def _offered(run: PrefillRun, deadline: int = 60_000) -> tuple[PullSink, Prompt, Request, Frame]:
    """A request that the engine offers; nothing of it is read yet."""
    sink, prompt = run.ready(offered=["PULL", "VERIFY"]), run.prompt()
    run.chosen(sink)
    assert isinstance(sink, PullSink)
    run.take(prompt, deadline)
    run.compute(prompt)
    made = run.ask_for(sink, prompt)
    return sink, prompt, made, sink.await_done(made)


def _too_late(run: PrefillRun, sink: Sink, id: str) -> None:
    """Check that a Renew is refused."""
    found = sink.expect("Error", "Renewed", where=lambda f: f.get("request") == id, clause="KVP-PUL-RENEW")
    said = found.fields.get("code"), found.fields.get("path")
    run.check("refused", said == ("DEADLINE", "lease"), f"{found.name} {said[0]} at {said[1]!r}", "KVP-PUL-RENEW")


@scenario("LIVE-1061", "a lease is renewed twice before its offer is read", "KVP-PUL-OFFER", guards=_LENT,
          extensions=("PULL",))  # fmt: skip
def _renewed(run: PrefillRun) -> None:
    sink, prompt, made, offer = _offered(run)
    wanted = offer.fields["lease"]
    for _ in range(2):
        found = sink.ask("Renew", "Renewed", **sink.named(made), lease=wanted, clause="KVP-PUL-OFFER").fields["lease"]
        run.check("a lease of at most what was asked", 0 < int(found) <= int(wanted), f"{found} ms", "KVP-PUL-OFFER")
    run.delivered(sink, made, prompt)
    run.hand_over(sink)


@scenario("LIVE-1062", "what is offered stays as it is while others are served", "KVP-PUL-OFFER", guards=_LENT,
          extensions=("PULL",))  # fmt: skip
def _kept(run: PrefillRun) -> None:
    sink, prompt, made, _ = _offered(run)
    run.over(prompt, "held", 0.1)
    for tokens in (45, 17, 45):
        run.hand_over(sink, run.prompt(tokens))
    run.delivered(sink, made, prompt)


@scenario("LIVE-1063", "an offer is given back unread", "KVP-END-PROVEN", guards=_LENT, extensions=("PULL",))
def _back(run: PrefillRun) -> None:
    sink, _, made, _ = _offered(run)
    found = sink.ask("Abort", "Drained", **sink.named(made), reason="nobody waits")
    run.check("proof", found.fields["proof"] == "PROVEN", found.fields["proof"], "KVP-END-PROVEN")
    id = sink.misstate("Renew", **sink.named(made), lease="1000")
    _too_late(run, sink, id)
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-1064", "a lease ends with its ticket, and is not renewed", "KVP-PUL-RENEW", guards=_LENT, slow=True,
          extensions=("PULL",))  # fmt: skip
def _ended(run: PrefillRun) -> None:
    sink, _, made, offer = _offered(run, deadline=1500)
    lease = int(offer.fields["lease"])
    if run.check("no longer than its ticket", lease <= 1500, f"{lease} ms", "KVP-PUL-RENEW"):
        sink.silence(lease / 1000 + 0.1)
        _too_late(run, sink, sink.misstate("Renew", **sink.named(made), lease="1000"))
    run.untouched(sink)
    run.hand_over(sink)


@scenario("LIVE-1065", "Renew of what was not offered", "KVP-PUL-RENEW", guards=_LENT, level="L4",
          extensions=("PULL",))  # fmt: skip
def _unoffered(run: PrefillRun) -> None:
    sink, prompt = run.ready(offered=["PULL"]), run.prompt()
    run.chosen(sink)
    run.take(prompt)
    made = run.ask_for(sink, prompt)
    _too_late(run, sink, sink.misstate("Renew", **sink.named(made), lease="1000"))
    run.compute(prompt)
    run.delivered(sink, made, prompt)


@scenario("LIVE-1066", "a lease is renewed for longer than its ticket lasts", "KVP-PUL-RENEW", guards=_LENT,
          extensions=("PULL",))  # fmt: skip
def _bounded(run: PrefillRun) -> None:
    sink, prompt, made, offer = _offered(run, deadline=60_000)
    for asked in (120_000, 61_000):
        found = sink.ask("Renew", "Renewed", **sink.named(made), lease=str(asked), clause="KVP-PUL-RENEW").fields
        said = f"{found['lease']} ms of {asked}, and of a ticket of 60000"
        run.check("no longer than its ticket", 0 < int(found["lease"]) <= 60_000, said, "KVP-PUL-RENEW")
    run.delivered(sink, made, prompt)
    run.check("nor is its Offer", int(offer.fields["lease"]) <= 60_000, offer.fields["lease"], "KVP-PUL-RENEW")


@scenario("LIVE-1067", "an offer that was given back does not come again", "KVP-SES-RESEND", slow=True,
          guards="A source asks for ever about what is over, and gives up a session that is well.",
          extensions=("PULL",))  # fmt: skip
def _silent(run: PrefillRun) -> None:
    sink, _, made, offer = _offered(run)
    sink.ask("Abort", "Drained", **sink.named(made), reason="nobody waits")
    late = sink.silence(2.5)
    run.check("no Offer again", all(f.raw != offer.raw for f in late), str([f.name for f in late]), "KVP-SES-RESEND")
    run.hand_over(sink)


def _begun(run: DecodeRun, **more: Any) -> tuple[Source, Prompt, Asked]:
    """A fetch that the source has accepted, and has the rows of."""
    source, prompt = run.one(offered=["PULL", "VERIFY"], **more), run.prompt()
    run.chosen(source)
    run.fetch(source, prompt)
    asked = run.asked(source, prompt)
    source.move(asked, prompt.seed)
    return source, prompt, asked


def _late(run: DecodeRun) -> tuple[Source, Prompt, Frame, Frame]:
    """An Offer whose lease is over at the sink when it comes, as that counts from Transfer; it, and the Renew of it."""
    source, prompt, asked = _begun(run)
    source.silence(1.6)
    offer = source.done(asked, run.handed(source, prompt), prompt.seed, lease="1500")
    renew = source.expect("Renew", "Pulled", clause="KVP-PUL-READ")
    run.check("nothing read", renew.name == "Renew", "Pulled of a lease that was over", "KVP-PUL-READ")
    return source, prompt, offer, renew


@scenario("LIVE-1161", "an Offer comes when its lease is over: it is renewed before anything is read", "KVP-PUL-READ",
          role="sink", guards=_CLOCK, slow=True, extensions=("PULL",))  # fmt: skip
def _waits(run: DecodeRun) -> None:
    source, prompt, offer, renew = _late(run)
    if renew.name == "Renew":
        early = source.silence(0.2)
        run.check("still nothing", not early, str([frame.name for frame in early]), "KVP-PUL-READ")
        source.reply(renew, "Renewed", lease=renew.fields["lease"])
        source.acknowledged(offer)
        run.arrived(prompt)
        run.hand_over([source])


@scenario("LIVE-1162", "a lease that is over is not renewed: the fetch is lost", "KVP-PUL-READ", role="sink",
          guards=_CLOCK, slow=True, extensions=("PULL",))  # fmt: skip
def _refused(run: DecodeRun) -> None:
    source, prompt, _, renew = _late(run)
    if renew.name == "Renew":
        source.reply(renew, "Error", code="DEADLINE", path="lease", mine="over", yours="more")
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, "DEADLINE")
        run.hand_over([source])


@scenario("LIVE-1163", "the engine aborts while it waits for its lease", "KVP-END-REUSE", role="sink", guards=_LENT,
          slow=True, extensions=("PULL",))  # fmt: skip
def _aborted(run: DecodeRun) -> None:
    source, prompt, _, renew = _late(run)
    if renew.name == "Renew":
        run.engine.ask("abort", id=prompt.id)
        source.reply(source.expect("Abort", clause="KVP-END-REUSE"), "Drained", proof="PROVEN")
        run.lost(prompt, "ABORTED")
        run.hand_over([source])


@scenario("LIVE-1164", "Released of an offer that waits for its lease, and was not read", "KVP-PUL-OFFER", role="sink",
          guards=_LIE, level="L4", slow=True, extensions=("PULL",))  # fmt: skip
def _let_go(run: DecodeRun) -> None:
    source, prompt, offer, renew = _late(run)
    if renew.name == "Renew":
        source.misstate("Released", sequence=offer.fields["sequence"])
        found = source.expect("Error", clause="KVP-PUL-OFFER").fields
        run.check("refused", found["code"] == "UNEXPECTED_MESSAGE", str(found), "KVP-SES-STATE")
        given_up = [frame for frame in source.silence(0.5, but=("Abort",)) if frame.name != "Renew"]
        run.check("nothing read", not given_up, str([frame.name for frame in given_up]), "KVP-PUL-READ")
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, "UNEXPECTED_MESSAGE")
        run.hand_over([source])


@scenario("LIVE-1165", "an Offer overtakes the mapping of its epoch", "KVP-PUL-EARLY", role="sink", guards=_EARLY,
          slow=True, extensions=("PULL", "EPOCHS"))  # fmt: skip
def _overtakes(run: DecodeRun) -> None:
    source = run.one(offered=["PULL", "EPOCHS", "VERIFY"])
    run.chosen(source)
    assert isinstance(source, PullSource)
    for _ in range(6):  # an engine may have mapped it before it looks at the next frame
        prompt = run.prompt(10)
        run.fetch(source, prompt)
        asked = run.asked(source, prompt)
        source.move_pool()
        source.move(asked, prompt.seed)
        with run.engine.held_up():
            registered = source.register()
            offer = source.done(asked, run.handed(source, prompt), prompt.seed)
        begin = time.monotonic()
        source.acknowledged(offer, "KVP-PUL-EARLY")
        source.lent(registered)
        run.arrived(prompt)
        if time.monotonic() - begin > RESEND / 2:  # it was left unanswered, and came again
            break
    run.hand_over([source])


@scenario("LIVE-1178", "an Offer that was read comes again: Pulled, as before", "KVP-SES-REPLY", role="sink",
          guards="A reply that was lost keeps prefill's pages, or prefill takes what was read for what was given up.",
          extensions=("PULL",))  # fmt: skip
def _again(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    offer = source.done(asked, run.handed(source, prompt), prompt.seed)
    source.acknowledged(offer)
    for _ in range(3):
        source.watch.see(offer.raw, SUITE)
        source.wire.send(offer.raw)
        source.acknowledged(offer, "KVP-SES-REPLY")
    run.arrived(prompt)
    run.hand_over([source])


@scenario("LIVE-1179", "Renewed of a request that is over, and of one whose lease nobody renews", "KVP-SES-ANSWERED",
          role="sink", guards="An answer that comes late ends whatever is under way.", level="L4",
          extensions=("PULL",))  # fmt: skip
def _stray(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    source.misstate("Renewed", request="990", **asked.of, lease="1000")
    source.acknowledged(source.done(asked, run.handed(source, prompt), prompt.seed))
    run.arrived(prompt)
    source.misstate("Renewed", request="991", **asked.of, lease="1000")
    run.hand_over([source])


@scenario("LIVE-1166", "a source asks memory back that is read", "KVP-EPO-UNMAP", role="sink",
          guards="Memory that prefill has given to somebody else is still read by decode, or is never given back.",
          extensions=("PULL", "EPOCHS"))  # fmt: skip
def _asked_back(run: DecodeRun) -> None:
    source = run.one(offered=["PULL", "EPOCHS", "VERIFY"])
    run.chosen(source)
    assert isinstance(source, PullSource)
    for _ in range(6):  # an engine may have read everything before it looks at the next frame
        assert source.memory is not None
        prompt, nonce = run.prompt(10), source.memory.nonce
        run.fetch(source, prompt)
        asked = run.asked(source, prompt)
        source.move(asked, prompt.seed)
        with run.engine.held_up():
            offer = source.done(asked, run.handed(source, prompt), prompt.seed)
            back = source.send("Unregister", request=source.next_id(), epoch=str(source.epoch))
        source.acknowledged(offer)
        found = source.expect("Unregistered", again=back, clause="KVP-EPO-UNMAP")
        run.check("proof", found.fields["proof"] == "PROVEN", found.fields["proof"], "KVP-EPO-UNMAP")
        run.check("unmapped", not holds(run.engine.pids, nonce), "PROVEN, and still mapped", "KVP-EPO-UNMAP")
        run.arrived(prompt)
        source.move_pool()
        source.lend()
    run.hand_over([source])


@scenario("LIVE-1167", "a source registers memory in a session that its owner does not attest", "KVP-REG-ATTEST",
          role="sink", guards="Decode reads a cache that belongs to somebody else.", extensions=("PULL",),
          maps=True)  # fmt: skip
def _of_another(run: DecodeRun) -> None:
    source = run.connected(offered=["PULL", "VERIFY"])
    assert isinstance(source, PullSource)
    source.welcome()
    run.chosen(source)
    source.describe()
    Source.registered(source)
    asked = source.register(attests=False)
    id = asked.fields["request"]
    found = source.expect("Refused", "Error", where=lambda f: f["request"] == id, again=asked, clause="KVP-REG-ATTEST")
    run.check("code", found.fields["code"] == "TRANSPORT_FAILED", found.fields["code"], "KVP-REG-ATTEST")


@scenario("LIVE-1180", "a lease ends when its offer was read long ago", "KVP-PUL-READ", role="sink", slow=True,
          guards="The end of a lease that nobody needs any more costs whatever is under way.",
          extensions=("PULL",))  # fmt: skip
def _unneeded(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    offer = source.done(asked, run.handed(source, prompt), prompt.seed, lease="2000")
    while (found := source.expect("Pulled", "Renew", clause="KVP-PUL-READ")).name == "Renew":  # it was held up
        source.reply(found, "Renewed", lease=found.fields["lease"])
    source.send("Released", sequence=offer.fields["sequence"])
    run.arrived(prompt)
    late = source.silence(2.2)
    run.check("nothing said", not late, str([frame.name for frame in late]), "KVP-PUL-READ")
    run.hand_over([source])


def _first(**changes: Callable[[Any], Any]) -> Callable[[Json], Json]:
    """The first grant otherwise, by functions of what it says."""
    return lambda good: {
        "grants": [good["grants"][0] | {n: of(good["grants"][0][n]) for n, of in changes.items()}, *good["grants"][1:]]
    }


def _lied(change: Callable[[Json], Json], code: str, path: str, clause: str) -> Any:
    def script(run: DecodeRun) -> None:
        """The Offer is refused before anything is read; the request is lost, and the next is not."""
        source, prompt, asked = _begun(run)
        good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
        offer = source.send("Offer", request=source.next_id(), **asked.of, **(good | change(good)))
        id = offer.fields["request"]
        found = source.expect("Error", "Pulled", where=lambda f: f.get("request") == id, clause=clause)
        said = found.fields.get("code"), found.fields.get("path")
        if run.check("refused", said == (code, path), f"{found.name} {said[0]} at {said[1]!r}", clause):
            source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
            run.lost(prompt, code)
            run.hand_over([source])

    return script


# id, what, change, code and path of the Error, clause
OFFERS: list[tuple[str, str, Callable[[Json], Json], str, str, str]] = [
    ("1171", "another writer", lambda good: {"writer": "5"}, "WRONG_PEER", "writer", "KVP-TRN-WRITER"),
    ("1172", "an epoch that there is not", lambda good: {"epoch": "7"}, "BAD_GRANT", "epoch", "KVP-PUL-OFFER"),
    ("1173", "an item too few", _first(items=lambda i: i[1:]), "BAD_GRANT", "grants[0].items", "KVP-GRANT-COUNT"),
    ("1174", "an item beyond the pool", _first(items=lambda i: ["64", *i[1:]]), "OUT_OF_REGION", "grants[0].items",
     "KVP-GRANT-POOL"),
    ("1175", "a group too few", lambda good: {"grants": good["grants"][1:]}, "BAD_GRANT", "grants", "KVP-GRANT-GROUPS"),
    ("1176", "no hand-off data", lambda good: {"handoff": []}, "WRONG_PEER", "handoff", "KVP-HND-GROUPS"),
]  # fmt: skip
for _id, _what, _change, _code, _path, _clause in OFFERS:
    scenario(f"LIVE-{_id}", f"an Offer with {_what}", _clause, "KVP-TRN-REFUSE", role="sink", guards=_LIE, level="L4",
             extensions=("PULL",))(_lied(_change, _code, _path, _clause))  # fmt: skip


def _uncovered(rows: str, first: int, end: int) -> Any:
    def script(run: DecodeRun) -> None:
        """Nothing is read in place of rows that are not offered: the request is lost, and the next is not."""
        stated = world.mirror(run.live.geometry)
        (group,) = (group for group in stated["groups"] if group["kind"] == "PAGE")
        group["rows"] = rows
        source, prompt, asked = _begun(run, geometry=stated)
        good = source.done_fields(asked, run.handed(source, prompt), prompt.seed)
        pages, *others = good["grants"]
        lies = {"first": str(first), "count": str(end - first), "valid": str(end)}
        lies["items"] = pages["items"][first // int(rows) :][: world.items_of(group, first, end - first)]
        offer = source.send("Offer", request=source.next_id(), **asked.of, **good | {"grants": [pages | lies, *others]})
        found = source.expect("Error", "Abort", "Pulled", clause="KVP-PUL-OFFER")
        if found.name == "Error":
            id, said = offer.fields["request"], found.fields
            run.check("refused", (said.get("request"), said["code"]) == (id, "BAD_GRANT"), str(said), "KVP-TRN-REFUSE")
            found = source.expect("Abort", clause="KVP-END-FAILED")
        if run.check("not used", found.name == "Abort", "Pulled of rows that were not offered", "KVP-PUL-OFFER"):
            source.reply(found, "Drained", proof="PROVEN")
            run.lost(prompt, "BAD_GRANT")
            run.hand_over([source], run.prompt(17))

    return script


_LESS = "Prefill has fewer pages than it was asked for, and decode reads others in their place."
for _id, _what, _rows, _begin, _end in (
    ("1181", "begins after what was asked for", "4", 16, 45),
    ("1182", "ends before what was asked for", "4", 0, 40),
    ("1183", "begins after what was asked for, in pages of a token", "1", 16, 45),
    ("1184", "ends before what was asked for, in pages of a token", "1", 0, 40),
):
    scenario(f"LIVE-{_id}", f"an Offer of a window that {_what}", "KVP-PUL-OFFER", "KVP-END-FAILED", role="sink",
             guards=_LESS, level="L4", extensions=("PULL",))(_uncovered(_rows, _begin, _end))  # fmt: skip


@scenario("LIVE-1177", "Done in place of an Offer", "KVP-TRN-REFUSE", role="sink", guards=_LIE, level="L4",
          extensions=("PULL",))  # fmt: skip
def _pushed(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    groups = [route["group"] for route in source.routes()]
    lie = {"writer": "0", "groups": groups, "bytes": "0", "outcome": "CONTINUE", "handoff": []}
    id = source.misstate("Done", **asked.of, **lie)
    found = source.expect("Error", "DoneAck", where=lambda f: f.get("request") == id, clause="KVP-TRN-REFUSE")
    code = found.fields.get("code")
    if run.check("refused", code == "UNEXPECTED_MESSAGE", f"{found.name} {code}", "KVP-TRN-REFUSE"):
        source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
        run.lost(prompt, "UNEXPECTED_MESSAGE")
        run.hand_over([source])
