"""Extension CATALOGUE of sinks: what a router believes of the pages that a source reports, listed and told."""

from __future__ import annotations

import secrets

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.keeper import MOST, again, keepers, watch, watched
from kvproto_conformance.live.scenario import Prompt, scenario

_STALE = "A router sends requests to an engine that has dropped their pages, or past one that has them."
_MISSED = "A message that was lost leaves a router with a wrong picture for as long as the engine runs."
_IDS = "A router counts pages by its own idea of them, and finds nothing that the engine reports."
_RANKS = "A router counts what one rank has, where another rank has to compute it."
_GONE = "A router goes on sending requests to what an engine had before it ended."
_NEW = {"unknown": "77"}
"""A tier of a later version."""


@scenario("LIVE-1411", "a list in one piece, of ids of both forms and pages of two lengths", "KVP-TIER-ID", role="sink",
          guards=_IDS, extensions=("CATALOGUE",))  # fmt: skip
def _listed(run: DecodeRun) -> None:
    for form, page in (("OWN", 16), ("AHEAD", 7)):
        prompt, other = run.prompt(7 * page), run.prompt(7 * page)
        keeper, ids = watched(run, prompt, 0, 1, 2, form=form, page=str(page), namespace=secrets.token_hex(32))
        keeper.says(prompt, 3 * page, clause="KVP-TIER-ID")
        keeper.still(other, 0, clause="KVP-TIER-ID")
        keeper.tell(dict.fromkeys(ids, "DEVICE"))
        keeper.says(prompt, len(ids) * page, clause="KVP-TIER-ID")


@scenario("LIVE-1412", "pages after which a request cannot continue are not reported, and those beyond count",
          "KVP-TIER-LENGTH", role="sink", guards="A router stops at the first page of a window that has passed.",
          extensions=("CATALOGUE",))  # fmt: skip
def _beyond(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 1, 4)
    keeper.says(prompt, 80, clause="KVP-TIER-LENGTH")
    keeper.tell({ids[4]: None})
    keeper.says(prompt, 32, clause="KVP-TIER-LENGTH")


@scenario("LIVE-1413", "a list in several pieces, as long as they may be, and one that is empty", "KVP-CAT-LIST",
          role="sink", guards=_STALE, extensions=("CATALOGUE",))  # fmt: skip
def _pieces(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    for most, there, others in ((2, 6, 0), (MOST, 6, MOST + 30), (1, 0, 0)):
        (keeper,) = keepers(run)
        keeper.has([*keeper.ids(prompt)[:there], *(secrets.token_hex(32) for _ in range(others))])
        watch(run, [keeper])
        keeper.list(most)
        keeper.says(prompt, 16 * there, clause="KVP-CAT-LIST")
        keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1414", "pages come and go between two pieces of the list", "KVP-CAT-GAP", role="sink", guards=_STALE,
          extensions=("CATALOGUE",))  # fmt: skip
def _between(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    low, *_, high = sorted(ids)
    keeper.has([low, high])
    watch(run, [keeper])
    keeper.piece(keeper.asked(), [low], more=True)
    later = keeper.asked(low)
    keeper.tell({low: None})
    keeper.tell({high: "HOST"})
    keeper.piece(later, [high])
    wanted = (ids.index(high) + 1) * 16
    keeper.says(prompt, wanted, 0, clause="KVP-CAT-GAP")
    begin = Prompt("", "", prompt.tokens[: (ids.index(low) + 1) * 16], {})
    keeper.says(begin, wanted if wanted < len(begin.tokens) else 0, 0, clause="KVP-CAT-GAP")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1415", "pages come, move and go, by numbers that rise by one", "KVP-CAT-GAP", role="sink",
          guards=_STALE, extensions=("CATALOGUE",))  # fmt: skip
def _told(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0)
    for changes, tokens, device in (
        ({ids[1]: "DEVICE", ids[2]: "DEVICE"}, 48, 48), ({ids[2]: "HOST"}, 48, 32),
        ({ids[0]: "HOST", ids[1]: None}, 48, 0), ({ids[2]: None}, 16, 0), ({ids[0]: "DEVICE"}, 16, 16),
        ({ids[0]: None}, 0, 0),
    ):  # fmt: skip
        keeper.tell(changes)
        keeper.says(prompt, tokens, device, clause="KVP-CAT-GAP")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1416", "a Kept is lost: the next one shows it, and the list is asked for again", "KVP-CAT-GAP",
          role="sink", guards=_MISSED, extensions=("CATALOGUE",))  # fmt: skip
def _gap(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0, 1, 2)
    keeper.says(prompt, 48, clause="KVP-CAT-GAP")
    keeper.change({ids[1]: None, ids[2]: None})
    keeper.tell({secrets.token_hex(32): "DEVICE"})
    asked = keeper.asked()
    keeper.still(prompt, 0, clause="KVP-CAT-GAP")
    keeper.piece(asked, sorted(keeper.pages))
    keeper.says(prompt, 16, clause="KVP-CAT-GAP")
    keeper.tell({ids[1]: "DEVICE"})
    keeper.says(prompt, 32, clause="KVP-CAT-GAP")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1417", "what changed is lost between two pieces: the number of the second shows it", "KVP-CAT-GAP",
          role="sink", guards=_MISSED, extensions=("CATALOGUE",))  # fmt: skip
def _piece(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    low, high = sorted([ids[2], ids[3]])
    keeper.has([low, high])
    watch(run, [keeper])
    keeper.piece(keeper.asked(), [low], more=True)
    later = keeper.asked(low)
    keeper.change({low: None, high: None, ids[0]: "DEVICE"})
    keeper.piece(later, [])
    asked = keeper.asked()
    keeper.still(prompt, 0, clause="KVP-CAT-GAP")
    keeper.piece(asked, [ids[0]])
    keeper.says(prompt, 16, clause="KVP-CAT-GAP")
    keeper.quiet("KVP-CAT-GAP")


@scenario("LIVE-1418", "the session continues over another connection: the list is asked for again", "KVP-CAT-GAP",
          role="sink", guards=_MISSED, extensions=("CATALOGUE",))  # fmt: skip
def _continues(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids, source = keeper.ids(prompt), keeper.source
    keeper.has(ids)
    watch(run, [keeper])
    low = min(ids)
    keeper.piece(keeper.asked(), [low], more=True)
    asked = keeper.asked(low)
    unknown = {"code": "UNKNOWN_SESSION", "path": "session", "mine": "no such session", "yours": source.session}
    source.send("Error", request=asked.fields["request"], **unknown)
    hello = source.expect("Hello", clause="KVP-SES-HELLO")
    keeper.change(dict.fromkeys(ids[1:]))
    if hello.fields.get("resume") == source.session:
        source.reply(hello, "Welcome", **source.welcomed)
    else:
        source.over()
        source.heard.append(hello)
        source.welcome()
    keeper.list()
    keeper.says(prompt, 16, clause="KVP-CAT-GAP")


@scenario("LIVE-1419", "a page in a tier of a later version", "KVP-BODY-OPEN", role="sink",
          guards="What a later version adds ends an engine of today.", extensions=("CATALOGUE",))  # fmt: skip
def _tier(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    keeper.has(ids[:1])
    keeper.has(ids[1:2], _NEW)
    watch(run, [keeper])
    keeper.list()
    keeper.says(prompt, 32, 16, clause="KVP-BODY-OPEN")
    keeper.tell({ids[0]: _NEW, ids[2]: _NEW})
    keeper.says(prompt, 48, 0, clause="KVP-BODY-OPEN")
    keeper.tell({ids[2]: "DEVICE"})
    keeper.says(prompt, 48, clause="KVP-BODY-OPEN")


@scenario("LIVE-1426", "a source that says Goodbye has nothing, until it is watched again", "KVP-CAT-OVER",
          role="sink", guards=_GONE, extensions=("CATALOGUE",))  # fmt: skip
def _goodbye(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0, 1, 2)
    keeper.says(prompt, 48, clause="KVP-CAT-OVER")
    keeper.source.goodbye()
    keeper.source.over()
    keeper.says(prompt, 0, clause="KVP-CAT-OVER")
    keeper.pages, keeper.number = {ids[0]: "HOST"}, 0
    again(run, keeper)
    keeper.list()
    keeper.says(prompt, 16, 0, clause="KVP-CAT-OVER")
    keeper.tell({ids[1]: "DEVICE"})
    keeper.says(prompt, 32, clause="KVP-CAT-OVER")


@scenario("LIVE-1427", "a source that was killed and begins again has nothing", "KVP-CAT-OVER", "KVP-SES-BACK",
          "KVP-SES-RESUMED", role="sink", guards=_GONE, must=False,
          extensions=("CATALOGUE", "CURVE", "RESUME"))  # fmt: skip
def _killed(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, _ = watched(run, prompt, 0, 1, 2)
    keeper.says(prompt, 48, clause="KVP-CAT-OVER")
    source = keeper.source
    source.answers_pings = False
    source.restart()
    ping = source.expect("Ping", clause="KVP-SES-BACK").fields
    source.over()
    unknown = {"code": "UNKNOWN_SESSION", "path": "session", "mine": "no such session", "yours": ping["session"]}
    source.misstate("Error", request=ping["request"], **unknown)
    hello = source.welcome()
    if hello.fields.get("resume") is not None:
        source.expect("Goodbye", clause="KVP-SES-RESUMED")
    keeper.says(prompt, 0, clause="KVP-CAT-OVER")


@scenario("LIVE-1428", "a session that is over is opened again, and the list asked for", "KVP-CAT-OVER", role="sink",
          guards=_GONE, level="L4", must=False, slow=True, extensions=("CATALOGUE",))  # fmt: skip
def _returns(run: DecodeRun) -> None:
    prompt = run.prompt(100)
    keeper, ids = watched(run, prompt, 0, 1, 2)
    keeper.says(prompt, 48, clause="KVP-CAT-OVER")
    keeper.source.goodbye()
    keeper.source.over()
    keeper.pages = {ids[0]: "HOST"}
    keeper.source.welcome()
    keeper.list()
    keeper.says(prompt, 16, 0, clause="KVP-CAT-OVER")


@scenario("LIVE-1429", "two ranks: what both have reported, each by numbers of its own", "KVP-TIER-LENGTH",
          "KVP-CAT-GAP", role="sink", guards=_RANKS, extensions=("CATALOGUE",))  # fmt: skip
def _ranks(run: DecodeRun) -> None:
    prompt, (first, second) = run.prompt(100), keepers(run, 2)
    ids = first.ids(prompt)
    first.has([ids[0], ids[1], ids[4]])
    second.has([ids[0], ids[1], ids[3]])
    second.has([ids[2]], "HOST")
    second.number = 3
    watch(run, [first, second])
    first.list()
    first.still(prompt, 0, clause="KVP-TIER-LENGTH")
    second.list()
    first.says(prompt, 32, clause="KVP-TIER-LENGTH")
    second.tell({ids[4]: "HOST"})
    first.says(prompt, 80, 32, clause="KVP-TIER-LENGTH")
    first.tell({ids[3]: "DEVICE"})
    first.says(prompt, 80, 64, clause="KVP-TIER-LENGTH")
    first.tell({ids[4]: None})
    first.says(prompt, 64, clause="KVP-TIER-LENGTH")
    for each in (first, second):
        each.quiet("KVP-CAT-GAP")


@scenario("LIVE-1430", "one of two ranks has missed something, or ends: nothing is held until it has reported again",
          "KVP-CAT-GAP", "KVP-TIER-LENGTH", "KVP-CAT-OVER", role="sink", guards=_RANKS,
          extensions=("CATALOGUE",))  # fmt: skip
def _one_of_two(run: DecodeRun) -> None:
    prompt, (first, second) = run.prompt(100), keepers(run, 2)
    ids = first.ids(prompt)
    for each in (first, second):
        each.has(ids[:3])
    watch(run, [first, second])
    for each in (first, second):
        each.list()
    first.says(prompt, 48, clause="KVP-TIER-LENGTH")
    second.change({ids[2]: None})
    second.tell({ids[3]: "DEVICE"})
    asked = second.asked()
    second.still(prompt, 0, clause="KVP-CAT-GAP")
    second.piece(asked, sorted(second.pages))
    first.says(prompt, 32, clause="KVP-TIER-LENGTH")
    second.source.goodbye()
    second.source.over()
    first.says(prompt, 0, clause="KVP-CAT-OVER")


@scenario("LIVE-1431", "what is told before the first piece is in that piece, and is no reason to ask again",
          "KVP-CAT-GAP", role="sink", guards="While pages come and go, a router asks again and again for the list.",
          extensions=("CATALOGUE",))  # fmt: skip
def _early(run: DecodeRun) -> None:
    prompt, (keeper,) = run.prompt(100), keepers(run)
    ids = keeper.ids(prompt)
    keeper.has(ids[:2])
    watch(run, [keeper])
    for lost in (False, True):
        if lost:
            keeper.change({ids[3]: None})
            keeper.tell({ids[1]: "DEVICE"})
        asked = keeper.asked()
        keeper.tell({ids[4]: "DEVICE"})
        keeper.tell({ids[4]: None, ids[1]: "HOST"})
        keeper.still(prompt, 0, clause="KVP-CAT-GAP")
        keeper.piece(asked, sorted(keeper.pages))
        keeper.says(prompt, 32, 16, clause="KVP-CAT-GAP")
        keeper.tell({ids[3]: "DEVICE"})
        keeper.says(prompt, 64, clause="KVP-CAT-GAP")
        keeper.quiet("KVP-CAT-GAP")
