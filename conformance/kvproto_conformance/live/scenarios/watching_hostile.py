"""Extension CATALOGUE of sinks, beside sources that report what they should not, or nothing at all."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.keeper import Keeper, again, keepers, watch, watched
from kvproto_conformance.live.scenario import scenario

_MISSED = "A message that cannot be read leaves a router with a wrong picture for as long as the engine runs."
_LOOP = "A bug of one engine's list keeps a router asking for ever."
_FOREIGN = "An answer of a process that is gone is taken for one of its successor."


@scenario("LIVE-1420", "pages of another session", "KVP-SES-OTHER", role="sink", guards=_FOREIGN, level="L4",
          extensions=("CATALOGUE",))  # fmt: skip
def _other(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0)
    keeper.says(prompt, 16, clause="KVP-SES-OTHER")
    source = keeper.source
    lie = {"session": str(int(source.session) ^ 1), "pages": [{"id": ids[4], "tier": "DEVICE"}]}
    source.misstate("Kept", number=str(keeper.number + 1), **lie)
    found = source.expect("Error", clause="KVP-SES-OTHER")
    run.check("code", found.fields["code"] == "UNKNOWN_SESSION", str(found.fields), "KVP-SES-OTHER")
    keeper.still(prompt, 16, clause="KVP-SES-OTHER")
    keeper.tell({ids[1]: "DEVICE"})
    keeper.says(prompt, 32, clause="KVP-SES-OTHER")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1421", "a piece that nobody asked for, and a second answer", "KVP-SES-ANSWERED", role="sink",
          guards=_FOREIGN, level="L4", extensions=("CATALOGUE",))  # fmt: skip
def _unasked(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    keeper.has(ids)
    lie = keeper.said(ids[4:5]) | {"number": "7"}
    keeper.pages = {ids[0]: "DEVICE"}
    watch(run, [keeper])
    asked = keeper.asked()
    other = str(int(asked.fields["request"]) + 1000)
    keeper.source.misstate("Watched", request=other, **lie)
    keeper.still(prompt, 0, clause="KVP-SES-ECHO")
    keeper.piece(asked, [ids[0]])
    keeper.says(prompt, 16, clause="KVP-SES-ECHO")
    for request in (asked.fields["request"], other):
        keeper.source.misstate("Watched", request=request, **lie)
        keeper.still(prompt, 16, clause="KVP-SES-ANSWERED")
    keeper.tell({ids[1]: "DEVICE"})
    keeper.says(prompt, 32, clause="KVP-SES-ANSWERED")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1422", "a piece that does not go on, and so a list that would never end", "KVP-CAT-PIECE", role="sink",
          guards=_LOOP, level="L4", extensions=("CATALOGUE",))  # fmt: skip
def _endless(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    for begins, more, ends in ((0, True, 0), (1, True, 0), (1, True, 1), (1, False, 1), (2, True, 1)):
        (keeper,) = keepers(run)
        ids = keeper.ids(prompt)
        keeper.has(ids)
        low = sorted(ids)[:begins]
        watch(run, [keeper])
        if low:
            keeper.piece(keeper.asked(), low, more=True)
        asked = keeper.asked(low[-1] if low else None)
        _misled(keeper, asked.fields["request"], sorted(ids)[:ends], more)
        keeper.source.expect("Goodbye", clause="KVP-CAT-PIECE")
        keeper.says(prompt, 0, clause="KVP-CAT-OVER")
        again(run, keeper)
        keeper.list()
        keeper.says(prompt, 96, clause="KVP-CAT-PIECE")


def _misled(keeper: Keeper, request: str, ids: list[str], more: bool) -> None:
    """A Watched that is well formed, and still breaks KVP-CAT-LIST."""
    keeper.source.misstate("Watched", request=request, **keeper.said(ids, more))


@scenario("LIVE-1423", "pages that do not ascend are refused without a word", "KVP-RULE-BREAK", "KVP-ERR-ALONE",
          "KVP-ERR-SILENT", role="sink", guards=_MISSED, level="L4", extensions=("CATALOGUE",))  # fmt: skip
def _descending(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0)
    keeper.says(prompt, 16, clause="KVP-ERR-ALONE")
    for some in (sorted(ids[2:4], reverse=True), [ids[2], ids[2]]):
        pages = [{"id": id, "tier": "DEVICE"} for id in some]
        keeper.source.misstate("Kept", number=str(keeper.number + 1), pages=pages)
        keeper.still(prompt, 16, clause="KVP-ERR-ALONE")
    keeper.quiet("KVP-ERR-SILENT")
    keeper.tell({ids[1]: "DEVICE"})
    keeper.says(prompt, 32, clause="KVP-ERR-ALONE")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1424", "a piece whose pages do not ascend is no answer: Watch comes again", "KVP-RULE-BREAK",
          "KVP-SES-RESEND", role="sink", guards=_MISSED, level="L4", slow=True, extensions=("CATALOGUE",))  # fmt: skip
def _unreadable(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    keeper.has(ids)
    watch(run, [keeper])
    asked = keeper.asked()
    _misled(keeper, asked.fields["request"], sorted(ids, reverse=True), False)
    keeper.still(prompt, 0, clause="KVP-ERR-ALONE")
    keeper.quiet("KVP-ERR-SILENT")
    again = keeper.asked()
    run.check("the same Watch", again.fields == asked.fields, str(again.fields), "KVP-SES-RESEND")
    keeper.piece(again, sorted(ids))
    keeper.says(prompt, 96, clause="KVP-SES-RESEND")


@scenario("LIVE-1425", "a source that has no catalogue is not asked for it", "KVP-NEG-UNUSED", role="sink",
          guards="An engine of an earlier day is asked for ever for what it cannot answer.",
          extensions=("CATALOGUE",))  # fmt: skip
def _lacks(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    source = keeper.source
    keeper.has(keeper.ids(prompt))
    source.offered.clear()
    run.connect(source, "watch")
    hello = source.expect("Hello", clause="KVP-NEG-VERSION")
    if "CATALOGUE" in hello.fields["needed"]:
        source.reply(hello, "Refused", code="FEATURE_MISSING", path="needed", mine="(none)", yours="CATALOGUE")
    else:
        source.heard.append(hello)
        source.welcome()
        if not any(frame.name == "Goodbye" for frame in source.silence(0.2)):
            keeper.still(prompt, 0, clause="KVP-NEG-UNUSED")
            keeper.quiet("KVP-NEG-UNUSED")
    keeper.says(prompt, 0, clause="KVP-NEG-UNUSED")
    source.goodbye()
    source.offered.add("CATALOGUE")
    again(run, keeper)
    keeper.list()
    keeper.says(prompt, 96, clause="KVP-NEG-UNUSED")
