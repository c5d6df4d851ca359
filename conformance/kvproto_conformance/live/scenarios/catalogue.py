"""Extension CATALOGUE: which cached pages a source says that it has, first as a list and then as they come and go."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.sink import Sink
from kvproto_conformance.live.watch import Frame
from kvproto_conformance.tiers import whole_pages

Json = dict[str, Any]
_STALE = "A router believes in pages that an engine does not have, or does not know of those that it has."
_QUIET = 0.3
"""Seconds in which what should not come would have come."""
_MANY, _PAGES = 24, 60
"""Prompts, and pages of each, which is nearly a pool: pages go further away, and some are given up."""


class _Watcher:
    """A session that asks which pages there are, and what it has been told."""

    def __init__(self, run: PrefillRun) -> None:
        self.run, self.pages = run, dict[str, str]()
        self.sink: Sink = run.sink(offered=("CATALOGUE",))
        self.sink.greet()
        run.chosen(self.sink)
        self.first = self.head = self.piece()
        self.number = int(self.head["number"])

    def piece(self, after: str | None = None) -> Json:
        """Ask for a piece of the list, and check that it is one."""
        found = self.sink.ask("Watch", "Watched", clause="KVP-CAT-LIST", **({} if after is None else {"after": after}))
        ids, more = [page["id"] for page in found.fields["pages"]], found.fields["more"]
        rising = all(a < b for a, b in zip([after or "", *ids], ids, strict=False))
        self.run.check("ascending", rising, f"{len(ids)} ids", "KVP-CAT-LIST")
        self.run.check("goes on", bool(ids) or not more, "no page, and still more", "KVP-CAT-LIST")
        known = all("tier" in page for page in found.fields["pages"])
        self.run.check("tiers", known, "a page in no tier", "KVP-CAT-TELL")
        self.pages |= {page["id"]: page.get("tier", "") for page in found.fields["pages"]}
        return found.fields

    def rest(self) -> None:
        """The pieces that are left; nothing changes meanwhile."""
        while self.head["more"]:
            self.head = self.piece(max(self.pages))
            self.run.check("number", int(self.head["number"]) == self.number, self.head["number"], "KVP-CAT-LIST")

    def ids(self, prompt: Prompt) -> list[str]:
        """Ids of the pages of a prompt, by what the source says of them."""
        return whole_pages(self.first, prompt.tokens)

    def told(self, frame: Frame) -> None:
        """Check a Kept, and take what it says."""
        number, pages = int(frame.fields["number"]), frame.fields["pages"]
        self.run.check("next number", number == self.number + 1, f"{number} after {self.number}", "KVP-CAT-NUMBER")
        said = {page["id"]: page.get("tier", "") for page in pages}
        again = [id for id, tier in said.items() if self.pages.get(id, "") == tier]
        self.run.check("news", not again, f"{len(again)} pages of which the same was known", "KVP-CAT-ONCE")
        self.number = number
        for id, tier in said.items():
            self.pages.pop(id, None) if not tier else self.pages.update({id: tier})

    def hear(self, ids: list[str]) -> None:
        """Take what is told until these pages are there."""
        while not {*ids} <= self.pages.keys():
            self.told(self.sink.expect("Kept", clause="KVP-CAT-TELL"))

    def catch_up(self, other: _Watcher) -> None:
        """Take what is told up to what another has asked for later."""
        while self.number < other.number:
            self.told(self.sink.expect("Kept", clause="KVP-CAT-NUMBER"))


def _keep(run: PrefillRun, tokens: int) -> Prompt:
    prompt = run.prompt(tokens)
    run.engine.ask("keep", tokens=prompt.tokens)
    return prompt


@scenario("LIVE-1401", "pages that are there are listed, and no others", "KVP-CAT-LIST", "KVP-CAT-TELL", guards=_STALE,
          extensions=("CATALOGUE",))  # fmt: skip
def _listed(run: PrefillRun) -> None:
    prompts, never = [_keep(run, tokens) for tokens in (45, 64, 15)], run.prompt(45)
    watcher = _Watcher(run)
    watcher.rest()
    for prompt in prompts:
        missing = {*watcher.ids(prompt)} - watcher.pages.keys()
        run.check("listed", not missing, f"{len(missing)} pages of {len(prompt.tokens)} tokens", "KVP-CAT-TELL")
    run.check("not listed", not {*watcher.ids(never)} & watcher.pages.keys(), "never computed", "KVP-CAT-TELL")


@scenario("LIVE-1402", "pages that come are told once, by numbers that rise by one", "KVP-CAT-NUMBER", "KVP-CAT-ONCE",
          guards=_STALE, extensions=("CATALOGUE",))  # fmt: skip
def _told(run: PrefillRun) -> None:
    watcher = _Watcher(run)
    watcher.rest()
    for tokens in (45, 80):
        prompt = _keep(run, tokens)
        watcher.hear(watcher.ids(prompt))
    run.engine.ask("keep", tokens=prompt.tokens)
    watcher.catch_up(_Watcher(run))
    run.hand_over(run.ready())


@scenario("LIVE-1403", "two who watch hear the same", "KVP-CAT-NUMBER", guards=_STALE,
          extensions=("CATALOGUE",))  # fmt: skip
def _two(run: PrefillRun) -> None:
    one = _Watcher(run)
    one.rest()
    prompt = _keep(run, 45)
    one.hear(one.ids(prompt))
    other = _Watcher(run)
    other.rest()
    run.check("as of the last", other.number == one.number, f"{other.number}, not {one.number}", "KVP-CAT-LIST")
    later = _keep(run, 64)
    for watcher in (one, other):
        watcher.hear(one.ids(later))
    one.catch_up(other)
    other.catch_up(one)
    differ = len(one.pages.items() ^ other.pages.items())
    run.check("the same pages", not differ, f"{differ} differ", "KVP-CAT-NUMBER")


@scenario("LIVE-1404", "pages go further away and are given up, and whoever watched knows what a new list says",
          "KVP-CAT-TELL", "KVP-CAT-LIST", guards=_STALE, level="L4", extensions=("CATALOGUE",))  # fmt: skip
def _many(run: PrefillRun) -> None:
    one = _Watcher(run)
    one.rest()
    for _ in range(_MANY):
        _keep(run, _PAGES * int(one.first["page"]))
    other = _Watcher(run)
    other.rest()
    one.catch_up(other)
    differ = len(one.pages.items() ^ other.pages.items())
    run.check("told and listed", not differ, f"{differ} pages of {len(other.pages)} differ", "KVP-CAT-TELL")


@scenario("LIVE-1405", "pages come between two pieces of the list", "KVP-CAT-LIST", "KVP-CAT-NUMBER", guards=_STALE,
          level="L4", extensions=("CATALOGUE",))  # fmt: skip
def _between(run: PrefillRun) -> None:
    watcher = _Watcher(run)
    for _ in range(_MANY):
        if watcher.head["more"]:
            break
        _keep(run, _PAGES * int(watcher.first["page"]))
        watcher = _Watcher(run)
    if watcher.head["more"]:
        _keep(run, 45)
        second = watcher.piece(max(watcher.pages))
        told = [int(frame.fields["number"]) for frame in watcher.sink.heard if frame.name == "Kept"]
        last = max([watcher.number, *told])
        run.check("as of the last", int(second["number"]) == last, f"{second['number']}, not {last}", "KVP-CAT-LIST")
    prompt = _keep(run, 45)
    fresh = _Watcher(run)
    fresh.rest()
    run.check("listed", {*fresh.ids(prompt)} <= fresh.pages.keys(), "a page that was told is not", "KVP-CAT-TELL")


@scenario("LIVE-1406", "a session that goes on to describe itself hears no more of pages", "KVP-CAT-TELL",
          guards=_STALE, extensions=("CATALOGUE",))  # fmt: skip
def _describes(run: PrefillRun) -> None:
    watcher = _Watcher(run)
    watcher.rest()
    sink = watcher.sink
    sink.describe(sink.geometry or {})
    sink.allocate()
    run.keep(sink)
    sink.register()
    _keep(run, 45)
    came = [frame.name for frame in sink.silence(_QUIET)]
    if came:
        raise Missed(f"{', '.join(came)} in a session that has memory", "KVP-SES-STATE")
    run.hand_over(sink)
