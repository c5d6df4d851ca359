"""Transfers to a source that say something wrong, and what must come of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.sink import Sink

Json = dict[str, Any]
Change = Callable[[Json, Sink], Json]
"""Of a good Transfer and the sink that would send it: the fields that are wrong."""


def _grant(number: int, **wrong: Any) -> Change:
    def change(good: Json, sink: Sink) -> Json:
        grants = [dict(grant) for grant in good["grants"]]
        for name, value in wrong.items():
            grants[number][name] = value(grants[number]) if callable(value) else value
        return {"grants": [{k: v for k, v in grant.items() if v is not None} for grant in grants]}

    return change


def _fields(**wrong: Any) -> Change:
    return lambda good, sink: wrong


def _items(change: Callable[[list[str]], list[str]]) -> Callable[[Json], list[str]]:
    return lambda grant: change(list(grant["items"]))


def _windows(good: Json, sink: Sink) -> Json:
    grants = [dict(grant) for grant in good["grants"]]
    grants[0]["count"] = grants[0]["valid"] = str(int(grants[0]["count"]) + 1)
    return {"grants": grants}


def _beyond_ring(good: Json, sink: Sink) -> Json:
    grants = [dict(grant) for grant in good["grants"]]
    end = int(grants[1]["first"]) + int(grants[1]["count"])
    more = 1 + next(int(g["rows"]) for g in (sink.geometry or {})["groups"] if g["id"] == grants[1]["group"])
    grants[1] |= {"first": str(end - more), "count": str(more)}
    return {"grants": grants}


@scenario("LIVE-150", "a sink that takes short bodies alone is sent no longer Data", "KVP-FRAME-W-LENGTH",
          guards="A message that its reader has not the room for ends the session.", transport="INLINE",
          extensions=("INLINE",))  # fmt: skip
def _short(run: PrefillRun) -> None:
    limits = {"max_body": "4096", "max_transfers": "64"}
    run.hand_over(run.sink().ready(limits=limits))


@scenario("LIVE-211", "a sink that says it takes one transfer at a time, and asks for three", "KVP-TRN-BUSY",
          level="L4", guards="A limit of what the sink is asked is taken for one of what it may ask.")  # fmt: skip
def _own_limit(run: PrefillRun) -> None:
    """Only a sink begins transfers: its own `max_transfers` is a limit of nothing."""
    sink = run.sink().ready(limits={"max_body": str(1 << 24), "max_transfers": "1"})
    prompts = [run.prompt() for _ in range(3)]
    for prompt in prompts:
        run.take(prompt)
    asked = [run.ask_for(sink, prompt) for prompt in prompts]
    for made, prompt in zip(asked, prompts, strict=True):
        run.compute(prompt)
        run.delivered(sink, made, prompt)


_STALE = "A frame from before is taken for one of now."
_WRITES = "Bytes are written where nobody asked for them: pages of another request are corrupted in silence."
_WRONG = "A sink of another version, epoch or model is served with bytes that mean something else to it."

# id, what is wrong, world, change, message that refuses, codes, path, clause, guards
LIES: list[tuple[str, str, str, Change, str, str | tuple[str, ...], str | None, str, str]] = [
    ("LIVE-401", "the content digest of another prompt", "gqa", _fields(content="ab" * 32),
     "Failed", "CONTENT_MISMATCH", "content", "KVP-TKT-CONTENT",
     "The cache of one prompt is handed to another request: an answer to somebody else's question."),
    ("LIVE-432", "the content digest but for its last byte", "gqa",
     lambda good, sink: {"content": good["content"][:-2] + f"{int(good['content'][-2:], 16) ^ 1:02x}"},
     "Failed", "CONTENT_MISMATCH", "content", "KVP-TKT-CONTENT",
     "The cache of one prompt is handed to another request: an answer to somebody else's question."),
    ("LIVE-402", "another version of the sink's Description", "gqa", _fields(sink_version="7"),
     "Failed", "BAD_GRANT", "sink_version", "KVP-TRN-AGREE", _WRONG),
    ("LIVE-403", "another version of the source's Description", "gqa", _fields(source_version="7"),
     "Failed", "DESCRIPTION_MISMATCH", "source_version", "KVP-TRN-CHECKS", _WRONG),
    ("LIVE-404", "an epoch that was never registered", "gqa", _fields(epoch="9"),
     "Failed", "BAD_GRANT", "epoch", "KVP-TRN-AGREE", _WRITES),
    ("LIVE-405", "a writer too many", "gqa", _fields(writers=["0", "1"]),
     "Failed", "BAD_GRANT", "writers", "KVP-TRN-AGREE", "A sink waits for ever for a rank that has nothing to send."),
    ("LIVE-406", "another writer", "gqa", _fields(writers=["3"]),
     "Failed", "BAD_GRANT", "writers", "KVP-TRN-AGREE", "A sink waits for ever for a rank that has nothing to send."),
    ("LIVE-407", "no grant for the hand-off group", "gqa", lambda good, sink: {"grants": good["grants"][:1]},
     "Failed", "BAD_GRANT", "grants", "KVP-HND-GRANT", "The first token is lost: decode begins with a wrong one."),
    ("LIVE-408", "a grant for a group that nobody has", "gqa", _grant(1, group="99"),
     "Failed", "BAD_GRANT", "grants", "KVP-GRANT-GROUPS", _WRITES),
    ("LIVE-433", "a grant too many", "gqa",
     lambda good, sink: {"grants": [*good["grants"], good["grants"][0] | {"group": "99"}]},
     "Failed", "BAD_GRANT", "grants", "KVP-GRANT-GROUPS", _WRITES),
    ("LIVE-409", "an item beyond the pool", "gqa", _grant(0, items=_items(lambda i: [*i[:-1], "64"])),
     "Failed", "OUT_OF_REGION", "grants[0].items", "KVP-GRANT-POOL", _WRITES),
    ("LIVE-410", "an item far beyond the pool", "gqa", _grant(0, items=_items(lambda i: [*i[:-1], str(2**32 - 1)])),
     "Failed", "OUT_OF_REGION", "grants[0].items", "KVP-GRANT-POOL", _WRITES),
    ("LIVE-411", "one item twice", "gqa", _grant(0, items=_items(lambda i: [*i[:-1], i[0]])),
     "Failed", "ITEM_ALIAS", "grants[0].items", "KVP-GRANT-ALIAS", _WRITES),
    ("LIVE-412", "an item too few", "gqa", _grant(0, items=_items(lambda i: i[:-1])),
     "Failed", "BAD_GRANT", None, "KVP-GRANT-COUNT", _WRITES),
    ("LIVE-413", "an item too many", "gqa", _grant(0, items=_items(lambda i: [*i, "0"])),
     "Failed", "BAD_GRANT", None, "KVP-GRANT-COUNT", _WRITES),
    ("LIVE-414", "no items at all, and no INTENT", "gqa", _grant(0, items=None),
     "Failed", "BAD_GRANT", None, "KVP-INT-ITEMS", "A request without pages is accepted and never ends."),
    ("LIVE-415", "a window that ends above the prompt", "gqa", _windows,
     "Failed", "BAD_GRANT", "grants[0].valid", "KVP-GRANT-PROMPT",
     "A guard tests positions of before: rows that nobody computed are handed over."),
    ("LIVE-416", "`valid` above the prompt, the window below", "gqa", _grant(0, valid="46"),
     "Failed", "BAD_GRANT", "grants[0].valid", "KVP-GRANT-PROMPT",
     "A guard tests positions of before: rows that nobody computed are handed over."),
    ("LIVE-417", "a window that ends above `valid`", "gqa", _grant(0, valid="44"),
     "Error", "BAD_GRANT", "grants[0].valid", "KVP-RULE-BREAK", _WRITES),
    ("LIVE-418", "sequence 0", "gqa", _fields(sequence="0"),
     "Error", "OUT_OF_RANGE", "sequence", "KVP-BODY-RANGE", _STALE),
    ("LIVE-421", "a sequence a million ahead", "gqa", _fields(sequence="1000000"),
     "Failed", "BUSY", "sequence", "KVP-TRN-BUSY", "A peer makes the source remember without a bound."),
    ("LIVE-422", "grants out of order", "gqa", lambda good, sink: {"grants": good["grants"][::-1]},
     "Error", "NOT_ASCENDING", "grants[1].group", "KVP-RULE-BREAK", _WRITES),
    ("LIVE-423", "the state after another token", "hybrid", _grant(2, state_after="44"),
     "Failed", "STATE_POSITION", None, "KVP-GRANT-STATE",
     "A recurrent state of other tokens is decoded on: the text drifts, and nothing says so."),
    ("LIVE-424", "a window longer than the source's ring", "hybrid",
     _grant(1, first=lambda g: str(int(g["first"]) - 1), count=lambda g: str(int(g["count"]) + 1)),
     "Failed", "NOT_HELD", "grants[1].first", "KVP-GRANT-HELD",
     "Rows that the ring has overwritten are served as if they were old ones."),
    ("LIVE-434", "a window longer than the sink's own ring", "hybrid", _beyond_ring,
     "Failed", "BAD_GRANT", "grants[1].count", "KVP-GRANT-RING",
     "Rows of one window are written over others of it."),
    ("LIVE-425", "more transfers than the grants' writers: none", "gqa", _fields(writers=[]),
     "Error", "OUT_OF_RANGE", "writers", "KVP-BODY-RANGE", "A request that nobody answers."),
    ("LIVE-426", "a ticket key of 15 bytes", "gqa", _fields(ticket="00" * 15),
     "Error", "OUT_OF_RANGE", "ticket", "KVP-BODY-RANGE", _STALE),
]  # fmt: skip


def _lie(change: Change, by: str, codes: str | tuple[str, ...], path: str | None, clause: str) -> Any:
    def script(run: PrefillRun) -> None:
        """The lie is refused, writes nothing, and the same session serves the next good request."""
        sink = run.ready()
        prompt = run.prompt()
        run.serve(prompt)
        good = sink.transfer(sink.request(prompt.key, prompt.tokens))
        fields = good | change(good, sink)
        id = sink.misstate("Transfer", **fields)
        run.refused(sink, id, by, codes, path, clause, fields["sequence"])
        run.untouched(sink)
        run.engine.ask("fail", id=prompt.id, reason="over")
        run.engine.ask("wait", id=prompt.id, seconds=5)
        if fields["sequence"] != good["sequence"] or by == "Error":
            sink.sequences -= 1
        run.hand_over(sink)

    return script


for _id, _what, _world, _change, _by, _codes, _path, _clause, _guards in LIES:
    scenario(_id, f"a Transfer with {_what}", _clause, "KVP-ERR-ALONE", guards=_guards, level="L4", world=_world)(
        _lie(_change, _by, _codes, _path, _clause)
    )


_ORDER = ("421", "403", "402", "404", "405", "408", "412", "409", "401", "415")
"""Lies by the order of the checks that find them."""


@scenario("LIVE-435", "Transfers with two faults, each refused by the first check that finds one", "KVP-TRN-CHECKS",
          guards="Two engines name different reasons for one refusal, and their users mend the wrong thing.",
          level="L4")  # fmt: skip
def _two_faults(run: PrefillRun) -> None:
    lies = {row[0].removeprefix("LIVE-"): row for row in LIES}
    for first, second in zip(_ORDER, _ORDER[1:], strict=False):
        _, _, _, change, by, codes, path, _, _ = lies[first]
        sink, prompt = run.ready(), run.prompt()
        run.serve(prompt)
        good = sink.transfer(sink.request(prompt.key, prompt.tokens))
        other = lies[second][3](good, sink)
        fields = good | other | change(good | other, sink)
        id = sink.misstate("Transfer", **fields)
        run.refused(sink, id, by, codes, path, "KVP-TRN-CHECKS", fields["sequence"])
        run.engine.ask("fail", id=prompt.id, reason="over")
        run.engine.ask("wait", id=prompt.id, seconds=5)
        run.untouched(sink)
        if fields["sequence"] != good["sequence"]:
            sink.sequences -= 1
    run.hand_over(sink)


def _beyond(known: bool) -> Any:
    def script(run: PrefillRun) -> None:
        """An end above the prompt is refused as soon as both are known, not when prefill is over."""
        sink, prompt = run.ready(), run.prompt()
        if known:
            run.take(prompt)
        good = sink.transfer(sink.request(prompt.key, prompt.tokens))
        fields, id = good | _windows(good, sink), None
        if known:
            id = sink.misstate("Transfer", **fields)
        else:
            sink.ask("Transfer", "Accepted", **fields)
            run.take(prompt)
        run.refused(sink, id, "Failed", "BAD_GRANT", "grants[0].valid", "KVP-GRANT-PROMPT", fields["sequence"])
        run.fill(prompt)
        run.untouched(sink)
        run.engine.ask("fail", id=prompt.id, reason="over")
        run.hand_over(sink)

    return script


_UNEQUAL = "Decode waits for the end of prefill to learn that the two prompts differ."
for _id, _what, _known in (("427", "of a prompt that prefill computes", True), ("428", "before its prompt", False)):
    scenario(f"LIVE-{_id}", f"a Transfer {_what}, with a window that ends above it", "KVP-GRANT-PROMPT",
             "KVP-TRN-CHECKS", guards=_UNEQUAL, level="L4")(_beyond(_known))  # fmt: skip
