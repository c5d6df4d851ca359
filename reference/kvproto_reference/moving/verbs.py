"""The verbs of `kvproto-router --engines`: POST /admin/role, /admin/copy and /admin/move, each with a JSON object."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..demo.prompts import Prompt
from ..errors import EngineError
from ..router.service import Service
from .router import Copy, Move, PeerRouter


class Verbs:
    """The verbs by path; each takes the body of a request, and returns the answer once it is done."""

    def __init__(self, router: PeerRouter, service: Service, tokens: Callable[[Any], list[int]]) -> None:
        """`tokens` reads a prompt, a text or token ids, and raises EngineError."""
        self._router, self._service, self._tokens = router, service, tokens
        self.paths = {"/admin/role": self.role, "/admin/copy": self.copy, "/admin/move": self.move}

    def role(self, body: dict[str, Any]) -> dict[str, Any]:
        """{"engine": NAME, "role": "prefill", "decode" or "both"}: what it takes from now on; raises EngineError."""
        name, role = _texts(body, "engine", "role")
        self._service.do(lambda done: self._router.switch(name, role, partial(done.set_result, None)))
        return {"engine": name, "role": role}

    def copy(self, body: dict[str, Any]) -> dict[str, Any]:
        """{"from": NAME, "to": NAME, "prompt": TEXT or TOKENS}: the pages of its beginning; raises EngineError."""
        here, there = _texts(body, "from", "to")
        prompt = Prompt(name="", tokens=self._tokens(body.get("prompt")), cache_salt=str(body.get("cache_salt", "")))
        copy: Copy = self._service.do(lambda done: _begin_copy(self._router, prompt, here, there, done))
        if copy.error:
            raise EngineError(copy.error)
        return {name: getattr(copy, name) for name in ("tokens", "cached", "bytes", "seconds")}

    def move(self, body: dict[str, Any]) -> dict[str, Any]:
        """{"from": NAME, "to": NAME}: all requests that the one decodes; raises EngineError."""
        here, there = _texts(body, "from", "to")
        moves: list[Move] = self._service.do(partial(_begin_moves, self._router, here, there))
        told = [{"rows": m.rows, "fetched": m.fetched, "gap": m.gap, "fetch": m.seconds} for m in moves if not m.error]
        return {"moved": told, "stayed": [move.error for move in moves if move.error]}


def _begin_copy(router: PeerRouter, prompt: Prompt, here: str, there: str, done: Future[Copy]) -> None:
    router.copy(prompt, here, there, done.set_result)


def _begin_moves(router: PeerRouter, here: str, there: str, done: Future[list[Move]]) -> None:
    """Move what an engine decodes; the future gets all of the moves once each is over."""
    moves: list[Move] = []
    requests = router.running(here)

    def ended(move: Move) -> None:
        moves.append(move)
        if len(moves) == len(requests):
            done.set_result(moves)

    if not requests:
        done.set_result(moves)
    for request in requests:
        router.move(request, there, ended)


def _texts(body: dict[str, Any], *names: str) -> list[str]:
    """The members of these names; raises EngineError unless each is a text."""
    for name in names:
        if not isinstance(body.get(name), str):
            raise EngineError(f"{name} is a text, such as {'decode' if name == 'role' else 'engine-0'}")
    return [body[name] for name in names]
