"""A router of engines that can do both: it copies pages, moves requests and changes roles, while it serves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from kvproto import new_ticket, write_ticket

from ..demo.options import ROLES
from ..demo.prompts import Prompt
from ..demo.router import DEADLINE, EngineLine, Request
from ..errors import EngineError
from ..router.balance import BalancedRouter

NAME = "engine"
"""The name of the engines; the first part of the names of their control sockets."""


@attrs.define(eq=False)
class Copy:
    """Rows on their way from one engine to another, of a text or of the request `of`."""

    here: str
    there: str
    prompt: Prompt
    ended: Callable[[Copy], None] = lambda copy: None
    """Called once it is over."""
    of: str = ""
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    ticket: dict[str, Any] = attrs.Factory(dict)
    over: bool = False
    tokens: int = 0
    """Tokens whose rows were copied, or were there already."""
    cached: int = 0
    """Tokens that were there already."""
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    """The reason for which nothing was copied."""


@attrs.define(eq=False)
class Move:
    """A request on its way from one decode engine to another."""

    request: Request
    here: str
    there: str
    ended: Callable[[Move], None] = lambda move: None
    """Called once the other engine has written a token, or nothing is moved."""
    copy: Copy | None = None
    """The rows that were copied while the request went on."""
    id: str = ""
    """The identity of the request's try."""
    ticket: dict[str, Any] = attrs.Factory(dict)
    prefill: str = ""
    """The prefill engine of the request, as long as it may come back to `here`."""
    ranks: list[dict[str, Any]] | None = None
    """The state of its first hand-over, likewise."""
    stopped: float = 0.0
    """The time of the last token that `here` has written, by time.monotonic."""
    arrived: bool = False
    over: bool = False
    rows: int = 0
    """Rows that the other engine needed."""
    fetched: int = 0
    """Rows that it fetched after the stop."""
    seconds: float = 0.0
    """The time of that fetch."""
    gap: float = 0.0
    """Seconds from the last token of `here` to the first of `there`, as the router sees them."""
    error: str = ""
    """The reason for which it has not moved."""


class PeerRouter(BalancedRouter):
    """A router of engines each of which prefills, decodes or does both, and which are all connected."""

    def __init__(self, folder: Path, engines: int, note: Callable[[str], None] = lambda text: None) -> None:
        """Connect to the engines 0 to `engines` - 1 in `folder`."""
        super().__init__(folder, NAME, engines, 0)
        self._note = note
        self._switches: dict[str, tuple[str, Callable[[], None]]] = {}
        """Roles that engines have yet to say that they have, and what is called then."""
        self._copies: dict[str, Copy] = {}
        self._moves: dict[str, Move] = {}
        """By the identity of the request's try."""

    def _counts(self, prefill: int, decode: int) -> dict[str, int]:
        return {NAME: prefill}

    def _needs(self, name: str) -> int:
        return self._replicas[NAME] - 1

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for here, source in self._engines.items():
            for there, sink in self._engines.items():
                if here != there and source.role in ("prefill", "both") and sink.role in ("decode", "both"):
                    yield here, there

    def running(self, name: str) -> list[Request]:
        """The requests that an engine decodes, and that are not on their way to another."""
        mine = (r for r in self.requests if r.engines[1:] == (name,) and r.id not in self._moves)
        return [request for request in mine if request.arrived is not None and not request.over]

    def _known(self, name: str) -> EngineLine:
        if name not in self._engines:
            raise EngineError(f"there is no engine {name}: they are {', '.join(self._engines)}")
        return self._engines[name]

    # the three verbs

    def switch(self, name: str, role: str, ended: Callable[[], None] = lambda: None) -> None:
        """Have an engine take requests of another kind; what it has is finished, and its rows stay.

        `ended` is called once it says so. Raises EngineError for an engine that does not answer, or is still to say so
        of an earlier role, and for a role that there is not.
        """
        if role not in ROLES:
            raise EngineError(f"a role is one of {', '.join(ROLES)}, not {role!r}")
        engine = self._known(name)
        if not engine.takes:
            raise EngineError(f"{name} {engine.said.format(path=engine.line.path)}")
        if name in self._switches:
            raise EngineError(f"{name} has not said yet that its role is {self._switches[name][0]}")
        self._switches[name] = role, ended
        engine.line.send("role", role=role)
        engine.role = role

    def _ready(self, name: str, engine: EngineLine, word: dict[str, Any]) -> None:
        super()._ready(name, engine, word)
        role, ended = self._switches.get(name, ("", lambda: None))
        if role == engine.role:
            del self._switches[name]
            self._note(f"{name} takes requests to {role}" if role != "both" else f"{name} takes all requests")
            ended()
        elif role:  # it said so before it was told
            engine.role = role

    def copy(self, prompt: Prompt, here: str, there: str, ended: Callable[[Copy], None], of: str = "") -> Copy:
        """Copy rows of a text, as many pages as `here` has of its beginning, to where later requests find them."""
        self._apart(here, there)
        made = Copy(here, there, prompt, ended, of)
        self._copies[made.id] = made
        made.ticket = write_ticket(new_ticket(NAME, replica=_number(here), deadline=DEADLINE))
        self._engines[here].line.send("lend", **_text(made) | ({"of": of} if of else {}))
        return made

    def move(self, request: Request, there: str, ended: Callable[[Move], None], ahead: bool = True) -> Move:
        """Have another engine decode a request on; `ahead`: its rows so far are copied before it stops."""
        if request.arrived is None or request.over or request.id in self._moves:
            raise EngineError("only a request that is being decoded moves, to one engine at a time")
        here = request.engines[1]
        self._apart(here, there)
        made = self._moves[request.id] = Move(request, here, there, ended, id=request.id)
        made.prefill, made.ranks = request.engines[0], request.arrived
        made.ticket = write_ticket(new_ticket(NAME, replica=_number(here), deadline=DEADLINE))
        if ahead:
            text = attrs.evolve(request.prompt, tokens=request.prompt.tokens + request.tokens)
            made.copy = self.copy(text, here, there, lambda copy: self._stop(made), request.id)
        else:
            self._stop(made)
        return made

    def _apart(self, here: str, there: str) -> None:
        """Raise EngineError unless one engine can fetch from the other."""
        self._known(here)
        if here == there or _number(here) not in self._known(there).sources:
            raise EngineError(f"{there} has no session with {here}, from which it would fetch")

    # how they go on

    def _stop(self, move: Move) -> None:
        """Have the engine that decodes a request hand it over."""
        if not move.over:
            self._engines[move.here].line.send("move", id=move.id, ticket=move.ticket)

    def _take(self, name: str, word: dict[str, Any], on_news: Callable[[Request], None]) -> None:
        id = word.get("id", "")
        if (copy := self._copies.get(id)) is not None:
            self._of_copy(copy, word)
            return
        move = self._moves.get(id)
        if move is None or not self._of_move(move, name, word):
            super()._take(name, word, on_news)
        if move is not None and move.arrived and word["op"] in ("tokens", "finished") and name == move.there:
            move.gap = time.monotonic() - move.stopped
            self._over(move)

    def _of_copy(self, copy: Copy, word: dict[str, Any]) -> None:
        match word["op"]:
            case "lent":
                text = attrs.evolve(copy.prompt, tokens=copy.prompt.tokens[: word["prompt"]])
                fields = _text(attrs.evolve(copy, prompt=text)) | {"tokens": word["tokens"]}
                self._engines[copy.there].line.send("copy", **fields)
            case "copied":
                copy.tokens, copy.cached = word["tokens"], word["cached"]
                copy.bytes, copy.seconds, copy.over = word["bytes"], word["seconds"], True
                self._has(copy.there, copy.prompt.tokens[: copy.tokens])
            case "refused" | "failed":
                copy.error, copy.over = word["error"], True
                self._engines[copy.here].line.send("drop", id=copy.id)
        if copy.over:
            del self._copies[copy.id]
            copy.ended(copy)

    def _of_move(self, move: Move, name: str, word: dict[str, Any]) -> bool:
        """Take a word about a request that moves; returns whether nobody else has to."""
        request, op = move.request, word["op"]
        match op:
            case "moving":
                at = request.at
                move.stopped, move.rows = max(at.get("tokens", 0.0), at.get("arrived", 0.0)), word["rows"]
                request.engines, request.arrived, request.freed = (move.here, move.there), None, False
                asked = request.body(move.ticket) | {"generated": request.tokens}
                self._engines[move.there].line.send("decode", **asked)
            case "stays":
                request.engines, request.arrived, request.freed = (move.prefill, move.here), move.ranks, True
                self._over(move, move.error or word["error"])
            case "gone":
                self._again(request, move.error, "PEER_LOST")
            case "left":
                request.freed = True
            case "failed" if name == move.there and not move.arrived:
                move.error = word["error"]
                self._engines[move.here].line.send("stay", id=request.id)
            case "arrived" if name == move.there:
                move.arrived, move.fetched = True, move.rows - word["cached"]
                move.seconds = max(rank["seconds"] for rank in word["ranks"])
                return False
            case "finished" if name == move.here:
                self._over(move, "the request is over")
                return False
            case _:
                return False
        return True

    def _over(self, move: Move, error: str = "") -> None:
        if move.over:
            return
        move.over, move.error = True, error
        self._moves.pop(move.id, None)
        move.ended(move)

    def _drop(self, request: Request) -> None:
        super()._drop(request)
        if (move := self._moves.get(request.id)) is not None:
            self._over(move, move.error or "the request is given up")

    def _lost(self, name: str, engine: EngineLine) -> None:
        """End what an engine that has gone took part in; its requests are asked again."""
        _, ended = self._switches.pop(name, ("", lambda: None))
        ended()  # it begins again with the role that it was started with
        for copy in [c for c in self._copies.values() if name in (c.here, c.there)]:
            self._of_copy(copy, {"op": "failed", "error": f"{name} is gone"})
        for move in [m for m in self._moves.values() if name in (m.here, m.there)]:
            self._over(move, f"{name} is gone")
        super()._lost(name, engine)

    def stop(self) -> None:
        """Stop all engines."""
        until, running = time.monotonic() + 5, {name for name, engine in self._engines.items() if engine.there}
        for engine in self._engines.values():
            engine.line.send("stop")
        while running and time.monotonic() < until:
            running -= {name for name, word in self._listen() if word["op"] in ("stopped", "lost")}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _text(copy: Copy) -> dict[str, Any]:
    """The fields of the words that ask for a copy."""
    prompt = copy.prompt
    how = {"adapter": prompt.adapter, "cache_salt": prompt.cache_salt}
    return {"id": copy.id, "ticket": copy.ticket, "prompt": prompt.tokens, **how}
