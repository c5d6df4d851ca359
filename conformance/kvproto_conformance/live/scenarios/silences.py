"""Peers that say nothing for a while: Ping, and what is not begun until they are heard again."""

from __future__ import annotations

from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.peer import Peer
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Run, scenario

_DEAD = "Nobody notices that a peer is gone until a request of a user waits for it."
_SLACK = 2.5
"""Seconds by which a timer of the engine may be late."""
_SILENCE = LIMITS["ping_silence"] / 1000
"""Of the pages; an engine may use another, which is why nothing here is a must."""


def _pinged(run: Run, peer: Peer) -> None:
    """Of a peer that is heard: nothing; of one that is not: Ping."""
    peer.answers_pings = False
    early = [frame.name for frame in peer.silence(_SILENCE - 1.0)]
    run.check("not so soon", "Ping" not in early, "Ping before the peer was silent for long", "KVP-SES-PING")
    peer.ask("Ping", "Pong")
    early = [frame.name for frame in peer.silence(_SILENCE - 1.0)]
    run.check("not to a peer that was heard", "Ping" not in early, "Ping, though it was heard", "KVP-SES-PING")
    ping = peer.expect("Ping", seconds=1.0 + _SLACK, clause="KVP-SES-PING")
    peer.answers_pings = True
    peer.reply(ping, "Pong")


@scenario("LIVE-1601", "a sink that says nothing is sent Ping, and one that was heard is not", "KVP-SES-PING",
          guards=_DEAD, level="L4", slow=True, must=False)  # fmt: skip
def _sink(run: PrefillRun) -> None:
    sink = run.ready()
    _pinged(run, sink)
    run.hand_over(sink)


@scenario("LIVE-1602", "a source that says nothing is sent Ping, and one that was heard is not", "KVP-SES-PING",
          role="sink", guards=_DEAD, level="L4", slow=True, must=False)  # fmt: skip
def _source(run: DecodeRun) -> None:
    source = run.one()
    _pinged(run, source)
    run.hand_over([source])


@scenario("LIVE-1603", "nothing new is asked of a source that has been silent for long, until it is heard again",
          "KVP-SES-SUSPECT", role="sink", level="L4", slow=True, must=False,
          guards="Requests pile up at a prefill engine that hangs, and each waits out its deadline there.")  # fmt: skip
def _suspect(run: DecodeRun) -> None:
    source, prompt = run.one(), run.prompt()
    source.answers_pings = False
    source.silence(2 * _SILENCE + _SLACK, but=("Ping",))
    said = run.engine.answer("fetch", id=prompt.id, key=prompt.key, engine=source.name, deadline=60_000,
                             tokens=prompt.tokens, first=0)  # fmt: skip
    asked = [frame.name for frame in source.silence(0.3, but=("Ping",))]
    run.check("nothing is asked", "Transfer" not in asked, "Transfer to a source that is suspect", "KVP-SES-SUSPECT")
    source.answers_pings = True
    source.reply(source.expect("Ping"), "Pong")
    if "ok" in said:  # the engine keeps the request until the source is heard; another refuses it
        run.deliver(source, run.asked(source, prompt), prompt)
        run.arrived(prompt)
    source.ask("Ping", "Pong")
    run.hand_over([source])
