"""Peers that come in crowds: what one engine takes is not taken from another."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec import read_frame, write_frame
from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.live import world
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink
from kvproto_conformance.live.wire import Dealer

_GREEDY = "A client that reconnects in a loop, or an attacker, uses up the sessions and the memory of all."
_AT_ONCE = 500
"""Hellos that are sent before their answers are read."""


def _crowd(sink: Sink, ranks: int, *others: Sink) -> None:
    """Greet as so many ranks of an engine, over one connection, and go no further in any session.

    Meanwhile others answer Ping: on a busy machine it takes longer than a session may be silent.
    """
    for begin in range(0, ranks, _AT_ONCE):
        some = range(begin, min(begin + _AT_ONCE, ranks))
        for rank in some:
            sink.wire.send(write_frame("Hello", sink.hello() | {"rank": str(rank)}))
        for rank in some:  # Welcome, or Refused; of sessions that end for others, Error or nothing
            if sink.wire.receive(5.0) is None:
                raise Missed(f"no answer to Hello of rank {rank}", "KVP-SES-ENGINE")
        for other in others:
            other.silence(0.001)


@scenario("LIVE-1641", "an engine greets as 66,000 ranks: another one's session stays, and everybody is served",
          "KVP-SES-ENGINE", level="L4", slow=True,
          guards=_GREEDY)  # fmt: skip
def _many(run: PrefillRun) -> None:
    bare, ready, crowd = run.sink(), run.ready(), run.sink()
    bare.greet()
    _crowd(crowd, 66_000, bare, ready)
    run.hand_over(ready)
    bare.describe(bare.geometry or {})
    bare.allocate()
    bare.register()
    run.hand_over(bare)


def _asked(sink: Sink, name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The answer to a request of one of many sessions, which are not watched."""
    asked = {"request": sink.next_id()} | fields
    sink.wire.send(write_frame(name, asked))
    while raw := sink.wire.receive(5.0):
        answer, found = read_frame(raw)
        if answer not in ("Ping", "Goodbye") and found.get("request") == asked["request"]:
            return answer, found
    raise Missed(f"no answer to {name}", "KVP-SES-ENGINE")


def _replicas(run: PrefillRun, sink: Sink, most: int) -> None:
    """Describe so many replicas of an engine over one connection, or until the engine is busy with them."""
    for replica in map(str, range(1, most + 1)):
        name, fields = _asked(sink, "Hello", **sink.hello() | {"replica": replica})
        if name == "Refused":
            run.check("busy", fields["code"] == "BUSY", fields["code"], "KVP-SES-ENGINE")
            return
        data, digest = world.digest_of(world.mirror(run.live.geometry, replica=int(replica)))
        described = {"version": "1", "geometry": data, "digest": digest}
        name, _ = _asked(sink, "Describe", session=fields["session"], **described)
        if name != "Description":
            raise Missed(f"{name}, not Description, of replica {replica}", "KVP-SES-ENGINE")


@scenario("LIVE-1642", "an engine describes more replicas than there are sessions: others are served, its own resumed",
          "KVP-SES-ENGINE", "KVP-SES-RESUME", level="L4", slow=True, guards=_GREEDY,
          extensions=("RESUME",))  # fmt: skip
def _full(run: PrefillRun) -> None:
    own = run.ready()
    _replicas(run, run.sink(name=own.name), LIMITS["max_sessions"] + 100)
    run.serve_fresh()
    own.wire.close()
    own.wire = Dealer(run.live.address)
    found = own.greet(resume=own.session).fields["session"]
    run.check("resumed", found == own.session, f"session {found}", "KVP-SES-RESUME")
    own.count_anew()
    run.hand_over(own)
