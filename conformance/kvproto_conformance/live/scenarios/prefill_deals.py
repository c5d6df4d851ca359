"""Sinks that deal tokens among their ranks, fetched for from a source that has all tokens on one."""

from __future__ import annotations

from kvproto_conformance.live import world
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

_RANKS, _INTERLEAVE, _ORIGIN = 2, 3, 10


def _dealing(run: PrefillRun) -> list[Sink]:
    """The ranks of a sink, which deal what comes after a prefix that is on none of them."""
    name, stated = f"deal-{run.prompt().id}", world.dealt(run.live.geometry, _RANKS, _INTERLEAVE, _ORIGIN)
    return [run.ready(rank=rank, name=name, geometry=stated) for rank in range(_RANKS)]


@scenario("LIVE-161", "two sink ranks that deal tokens from an origin on, each of which takes its own",
          "KVP-DCP-OWNER", "KVP-GRANT-COUNT", "KVP-TRN-HOLD", extensions=("DEALS",),
          guards="A rank gets rows of another, or all rows: it attends to tokens that are not its own.")  # fmt: skip
def _shares(run: PrefillRun) -> None:
    sinks, prompt = _dealing(run), run.prompt()
    run.serve(prompt)
    made = [sink.request(prompt.key, prompt.tokens, first=_ORIGIN) for sink in sinks]
    for sink, each in zip(sinks, made, strict=True):
        sink.ask_for(each)
        run.arrived(sink, each, prompt)
    run.over(prompt)


@scenario("LIVE-162", "a sink of one cp rank, whose interleave and origin say nothing", "KVP-DCP-ONE",
          guards="What an engine that deals nothing left as it was is taken for a deal.")  # fmt: skip
def _alone(run: PrefillRun) -> None:
    sink = run.ready(geometry=world.dealt(run.live.geometry, 1, _INTERLEAVE, _ORIGIN))
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(), _ORIGIN - 3)


@scenario("LIVE-164", "a sink that deals tokens: its Description is answered, or refused by name",
          "KVP-GEO-UNSUPPORTED", "KVP-DSC-PATH",
          guards="A source that plans no deals takes the rows of one rank for those of all.")  # fmt: skip
def _either(run: PrefillRun) -> None:
    sink = run.sink()
    sink.greet()
    data, digest = world.digest_of(world.dealt(run.live.geometry, _RANKS, _INTERLEAVE, _ORIGIN))
    found = sink.ask("Describe", "Description", "Refused", version="1", geometry=data, digest=digest)
    if found.name == "Refused":
        code, path = (found.fields[key] for key in ("code", "path"))
        good = (code, path) == ("LAYOUT_UNSUPPORTED", "geometry.groups[0].cp_size")
        run.check("what a planner without deals refuses", good, f"{code} at {path!r}", "KVP-GEO-UNSUPPORTED")


@scenario("LIVE-429", "a Transfer with a window that begins before the origin of the sink's deal", "KVP-DCP-WINDOW",
          "KVP-TRN-CHECKS", level="L4", extensions=("DEALS",),
          guards="Tokens that no rank owns are counted back from the origin, into rows of other tokens.")  # fmt: skip
def _before(run: PrefillRun) -> None:
    sinks, prompt = _dealing(run), run.prompt()
    run.serve(prompt)
    for sink in sinks:
        made = sink.request(prompt.key, prompt.tokens, first=_ORIGIN - 1)
        id = sink.misstate("Transfer", **sink.transfer(made))
        run.refused(sink, id, "Failed", "BAD_GRANT", "grants[0].first", "KVP-DCP-WINDOW", made.sequence)
        run.untouched(sink)
