"""Requests of more pages than short ones have: where an engine does otherwise with many than with few."""

from __future__ import annotations

from kvproto_conformance.live import world
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

_TOKENS = 300
"""A page each, which is how some engines keep them by default."""


def _ready(run: PrefillRun) -> Sink:
    stated = world.mirror(run.live.geometry)
    for group in stated["groups"]:
        if group["kind"] == "PAGE":
            group["rows"] = "1"
    return run.ready(geometry=stated, items=_TOKENS + 4, offered=["VERIFY"])


@scenario("LIVE-163", "300 tokens, a page for each, every byte by coordinate", "KVP-GRANT-COUNT", "KVP-TRN-ORDER",
          "KVP-VERIFY-SOURCE", world="long",
          guards="Only short prompts were tried: longer lists and larger copies take another way.")  # fmt: skip
def _pages(run: PrefillRun) -> None:
    run.hand_over(_ready(run), run.prompt(_TOKENS))


@scenario("LIVE-430", "a Transfer with one of 300 items twice", "KVP-GRANT-ALIAS", "KVP-TRN-CHECKS", level="L4",
          world="long", guards="Only short lists are searched for items that occur twice.")  # fmt: skip
def _twice(run: PrefillRun) -> None:
    sink, prompt = _ready(run), run.prompt(_TOKENS)
    run.take(prompt)
    made = sink.request(prompt.key, prompt.tokens)
    pages, *others = made.grants
    for at in (1, _TOKENS - 1):  # beside the other, and far from it
        items = list(pages["items"])
        items[at] = items[0]
        id = sink.misstate("Transfer", **(sink.transfer(made) | {"grants": [pages | {"items": items}, *others]}))
        run.refused(sink, id, "Failed", "ITEM_ALIAS", "grants[0].items", "KVP-GRANT-ALIAS", made.sequence)
    run.untouched(sink)
    run.engine.ask("fail", id=prompt.id, reason="over")
