"""Frames that are refused before their type is known, which are answered, and after it, which depends on the type."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.lax import raw_frame
from kvproto_conformance.live.peer import Peer
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Run, scenario

_ERRORS = "Two engines answer each other's errors, or a peer of a later version hears nothing at all."


def _refused(run: Run, peer: Peer) -> None:
    """Say what is no message, which is answered, and what is a notice, reply or Error that cannot be read."""
    body = b"\x81\x01\xcf" + int(peer.session).to_bytes(8, "big")
    for name, code, frame in (
        ("Pong of major 9", "UNSUPPORTED_VERSION", raw_frame("Pong", body, major=9)),
        ("Goodbye of major 9", "UNSUPPORTED_VERSION", raw_frame("Goodbye", body, major=9)),
        ("a type that there is not", "UNKNOWN_MESSAGE", raw_frame("Pong", body, type=0x7FFF)),
        ("a frame of 12 bytes", "TRUNCATED", raw_frame("Pong", body)[:12]),
    ):  # fmt: skip
        peer.misbehave(name, frame)
        found = peer.expect("Error", seconds=6.0, clause="KVP-ERR-ANSWER").fields
        run.check(name, found["code"] == code, str(found), "KVP-ERR-ANSWER")
    for name in ("Pong", "Goodbye", "Error"):
        peer.misbehave(f"{name} with a flag", raw_frame(name, body, flags=1))
        peer.misbehave(f"{name} of another length", raw_frame(name, body) + b"\0")
    peer.ask("Ping", "Pong")
    said = [frame.name for frame in peer.heard if frame.name in ("Error", "Goodbye")]
    run.check("silence", not said, str(said), "KVP-ERR-SILENT")


@scenario("LIVE-210", "frames that are no message to a source, and notices and replies that it cannot read",
          "KVP-ERR-SILENT", guards=_ERRORS, level="L4")  # fmt: skip
def _source(run: PrefillRun) -> None:
    sink = run.ready()
    _refused(run, sink)
    run.hand_over(sink)


@scenario("LIVE-946", "frames that are no message to a sink, and notices and replies that it cannot read",
          "KVP-ERR-SILENT", role="sink", guards=_ERRORS, level="L4")  # fmt: skip
def _sink(run: DecodeRun) -> None:
    source = run.one()
    _refused(run, source)
    run.hand_over([source])
