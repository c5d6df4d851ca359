"""Scenarios that go well: Hello to Goodbye, with every byte looked at."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

_LABELS = "Layouts that pass each other's smoke test while heads, layers or pages are exchanged."


def _whole(run: PrefillRun) -> None:
    """Two requests over one session, VERIFY chosen where the engine has it."""
    sink = run.ready(offered=["VERIFY"])
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(17))


def _fetched(run: DecodeRun) -> None:
    """Two fetches over one session, VERIFY chosen where the engine has it."""
    sources = run.ready(offered=["VERIFY"])
    run.hand_over(sources)
    run.hand_over(sources, run.prompt(17))


for _number, (_world, _transport) in enumerate(
    (w, t) for w in ("gqa", "mla", "hybrid") for t in ("SHM", "INLINE")
):  # fmt: skip
    scenario(
        f"LIVE-{101 + _number}", f"two requests of {_world} over {_transport}, every byte by coordinate",
        "KVP-TRN-ORDER", "KVP-TRN-ONLY", "KVP-REG-MAP", "KVP-VERIFY-SOURCE", "KVP-HND-GROUPS",
        guards=_LABELS, world=_world, transport=_transport, extensions=("INLINE",) if _transport == "INLINE" else (),
    )(_whole)  # fmt: skip
    scenario(
        f"LIVE-{301 + _number}", f"two fetches of {_world} over {_transport}, every byte as attention reads it",
        "KVP-TRN-SET", "KVP-REG-COLUMNS", "KVP-TRN-SEQUENCE", "KVP-VERIFY-SINK",
        guards=_LABELS, role="sink", world=_world, transport=_transport,
        extensions=("INLINE",) if _transport == "INLINE" else (),
    )(_fetched)  # fmt: skip
