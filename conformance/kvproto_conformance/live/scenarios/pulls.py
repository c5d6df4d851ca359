"""Extension PULL that goes well, in both roles: the sink reads what the source offers."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

_LENT = "Pages that decode reads are given to another request, or are read where nobody offered them."


def _read(run: PrefillRun) -> None:
    """Two requests over one session."""
    sink = run.ready(offered=["PULL", "VERIFY"])
    run.chosen(sink)
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(17))


def _lent(run: DecodeRun) -> None:
    """Two fetches over one session."""
    sources = run.ready(offered=["PULL", "VERIFY"])
    run.chosen(sources[0])
    run.hand_over(sources)
    run.hand_over(sources, run.prompt(17))


for _number, _world in enumerate(("gqa", "mla", "hybrid")):
    scenario(f"LIVE-{1051 + _number}", f"two requests of {_world} are offered, every byte by coordinate",
             "KVP-PUL-OFFER", guards=_LENT, world=_world, extensions=("PULL",))(_read)  # fmt: skip
    scenario(f"LIVE-{1151 + _number}", f"two fetches of {_world} are read, every byte as attention reads it",
             "KVP-PUL-OFFER", guards=_LENT, role="sink", world=_world, extensions=("PULL",))(_lent)  # fmt: skip
