"""The suite as a source rank that has cached pages, and what it reports of them (tiers.md, "Who has what")."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.peer import PATIENCE, Missed
from kvproto_conformance.live.scenario import Prompt
from kvproto_conformance.live.source import Source
from kvproto_conformance.live.watch import Frame
from kvproto_conformance.tiers import whole_pages

Json = dict[str, Any]
MOST = LIMITS["max_told"]
"""The pages of one Watched."""
_SPACE = "5a" * 32


class Keeper:
    """One rank with pages."""

    def __init__(self, run: DecodeRun, source: Source, **meaning: str) -> None:
        """`meaning` is what Watched says of ids: `namespace`, `page` and `form`."""
        self._run, self.source = run, source
        self.meaning = {"namespace": _SPACE, "page": "16", "form": "OWN"} | meaning
        self.pages: Json = {}
        """The tier of each page, by id."""
        self.number = 40
        """Of the last Kept."""

    def ids(self, prompt: Prompt) -> list[str]:
        """Ids of the pages of a prompt, in the order of its tokens."""
        return whole_pages(self.meaning, prompt.tokens)

    def has(self, ids: Iterable[str], tier: Any = "DEVICE") -> None:
        """Pages that are there before anybody asks."""
        self.pages |= dict.fromkeys(ids, tier)

    def asked(self, after: str | None = None) -> Frame:
        """The engine's next Watch, which must continue after this id; None: from the beginning."""
        clause = "KVP-CAT-GAP" if after is None else "KVP-CAT-LIST"
        found = self.source.expect("Watch", clause=clause)
        if found.fields.get("after") != after:
            raise Missed(f"Watch after {found.fields.get('after')}, not {after}", clause)
        return found

    def piece(self, asked: Frame, ids: Iterable[str], more: bool = False) -> None:
        """Answer a Watch."""
        self.source.reply(asked, "Watched", **self.said(ids, more))

    def said(self, ids: Iterable[str], more: bool = False) -> Json:
        """The fields of a Watched."""
        pages = [{"id": id, "tier": self.pages[id]} for id in ids]
        return {"number": str(self.number), **self.meaning, "pages": pages, "more": more}

    def list(self, most: int = MOST) -> None:
        """Answer a Watch from the beginning and those that follow, until all pages are listed."""
        after: str | None = None
        while True:
            asked = self.asked(after)
            left = sorted(id for id in self.pages if after is None or id > after)
            self.piece(asked, left[:most], len(left) > most)
            if len(left) <= most:
                return
            after = left[most - 1]

    def change(self, pages: Mapping[str, Any]) -> Json:
        """Have pages come, move or go (None), and return the fields of the Kept of it, which may be lost."""
        self.number += 1
        for id, tier in pages.items():
            self.pages.pop(id, None) if tier is None else self.pages.update({id: tier})
        told = [{"id": id} | ({} if pages[id] is None else {"tier": pages[id]}) for id in sorted(pages)]
        return {"number": str(self.number), "pages": told}

    def tell(self, pages: Mapping[str, Any]) -> None:
        """Have pages come, move or go (None), and say so."""
        self.source.send("Kept", **self.change(pages))

    def quiet(self, clause: str) -> None:
        """Check that the engine has asked nothing because of what it has heard so far."""
        self.source.ask("Ping", "Pong")
        if heard := [frame.name for frame in self.source.heard]:
            raise Missed(f"{', '.join(heard)}, where nothing was to be said", clause)

    def says(self, prompt: Prompt, tokens: int, device: int | None = None, *, clause: str) -> None:
        """Check that the engine says, now or soon, that so much of a prompt is there; `device` None: all of that."""
        wanted, end = _answer(tokens, device), time.monotonic() + PATIENCE
        while (found := self._held(prompt)) != wanted and time.monotonic() < end:
            frame = self.source.hear(0.01)
            self.source.heard += [] if frame is None else [frame]
        self._check(found, wanted, clause)

    def still(self, prompt: Prompt, tokens: int, device: int | None = None, *, clause: str) -> None:
        """Check that the engine says so once it has read what was sent."""
        self.source.ask("Ping", "Pong")
        self._check(self._held(prompt), _answer(tokens, device), clause)

    def _held(self, prompt: Prompt) -> Json:
        return self._run.engine.ask("held", engine=self.source.name, tokens=prompt.tokens)

    def _check(self, found: Json, wanted: Json, clause: str) -> None:
        if not self._run.check("what is held", found == wanted, f"{found}, not {wanted}", clause):
            raise Missed(f"{found} is said to be held, not {wanted}", clause)


def _answer(tokens: int, device: int | None) -> Json:
    return {"tokens": tokens, "device": tokens if device is None else device}


def keepers(run: DecodeRun, ranks: int = 1, **meaning: str) -> list[Keeper]:
    """The ranks of a source, of which the engine knows nothing yet."""
    return [Keeper(run, source, **meaning) for source in run.source(ranks, offered=["CATALOGUE"])]


def watch(run: DecodeRun, made: list[Keeper]) -> None:
    """Have the engine watch a source, whose ranks welcome it."""
    run.connect(made[0].source, "watch")
    for keeper in made:
        keeper.source.welcome()
        run.chosen(keeper.source)


def watched(run: DecodeRun, prompt: Prompt, *pages: int, **meaning: str) -> tuple[Keeper, list[str]]:
    """A source that has listed these pages of a prompt in one piece; and the ids of all pages of the prompt."""
    (keeper,) = keepers(run, 1, **meaning)
    ids = keeper.ids(prompt)
    keeper.has(ids[page] for page in pages)
    watch(run, [keeper])
    keeper.list()
    return keeper, ids


def again(run: DecodeRun, keeper: Keeper) -> None:
    """Have the engine forget a source whose session is over, and watch it again."""
    run.engine.ask("disconnect", engine=keeper.source.name)
    keeper.source.over()
    watch(run, [keeper])
