"""The thread that turns a router, and the answers that others wait for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from itertools import count
from typing import Any

import attrs
import zmq

from ..demo.prompts import Prompt
from ..demo.router import Request
from ..engine.logprobs import LogProbs
from ..errors import EngineError
from .balance import BalancedRouter

Told = tuple[list[int], list[LogProbs]]
"""Tokens, and the log probabilities of each if they were asked for; no token at the end."""
_END: Told = [], []

_PATIENCE = 120.0
"""Seconds without news after which a request is given up."""
_TURN = 200
"""The most milliseconds of a turn without news."""


class WrongRequest(EngineError):
    """An error of the request itself, such as a prompt that no pool can hold."""


@attrs.define(eq=False)
class Answer:
    """The tokens of one request as they come."""

    request: Request
    news: queue.SimpleQueue[Told] = attrs.Factory(queue.SimpleQueue)
    tokens: list[int] = attrs.Factory(list)
    """Tokens that were told."""
    error: str = ""
    wrong: bool = False
    """Whether the error is the request's own, so that no other engine would answer it."""
    over: bool = False
    tries: int = 0


class Service:
    """A router in a thread of its own, until `close`."""

    def __init__(self, router: BalancedRouter, most: int = 1024) -> None:
        """At most `most` requests are under way at once."""
        self._router, self._most = router, most
        self._inbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Callable[[Future[Any]], None], Future[Any]]] = queue.SimpleQueue()
        self._answers: dict[Request, Answer] = {}
        self._numbers, self._bell, self._stop = count(), os.eventfd(0, os.EFD_NONBLOCK), threading.Event()
        self.failure = ""
        """The reason that it has ended."""
        self.served = self.lost = self.retried = 0
        self.why: dict[str, str] = router.why()
        """The reason that each engine takes no requests."""
        self.roles: dict[str, str] = {}
        """The role of each engine that can have several."""
        self.open = False
        """Whether a request would be sent at once."""
        router.bell(self._bell)
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def ask(self, prompt: Prompt, max_new: int) -> Generator[Told, None, None]:
        """The tokens of an answer, some at a time; raises EngineError if it is lost, or one too many."""
        if self.failure or self.under_way >= self._most:
            raise EngineError(self.failure or f"{self._most} requests are under way: ask again later")
        answer = Answer(Request(next(self._numbers), prompt, max_new))
        self._inbox.put(answer)
        os.eventfd_write(self._bell, 1)
        try:
            while (told := answer.news.get(timeout=_PATIENCE))[0]:
                yield told
        except queue.Empty:
            said = "; ".join(f"{name}: {why}" for name, why in self.why.items() if why)
            answer.error = f"no engine has answered for {_PATIENCE:.0f} s" + f" ({said})" * bool(said)
        finally:
            self._gone.put(answer)
            os.eventfd_write(self._bell, 1)
        if answer.error:
            raise WrongRequest(answer.error) if answer.wrong else EngineError(answer.error)

    def do(self, begin: Callable[[Future[Any]], None]) -> Any:
        """The result of something that the router's thread begins, and that sets it once it has ended.

        Raises EngineError, also if that takes longer than 120 s.
        """
        result: Future[Any] = Future()
        self._calls.put((begin, result))
        os.eventfd_write(self._bell, 1)
        try:
            return result.result(_PATIENCE)
        except TimeoutError:
            raise EngineError(f"it is not over after {_PATIENCE:.0f} s") from None

    @property
    def under_way(self) -> int:
        """The number of requests that are not over, or whose answers are still being told."""
        return len(self._answers)

    def close(self) -> None:
        """End the thread; answers that are not over end with an error."""
        self._stop.set()
        os.eventfd_write(self._bell, 1)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take()
                self._router.turn(self._news, _TURN)
                self.why, self.open, self.roles = self._router.why(), self._router.open, self._router.roles()
        except (EngineError, zmq.ZMQError) as error:
            self.failure = str(error)
        finally:
            self.failure, self.open = self.failure or "the router has ended", False
            for answer in [each for each in self._answers.values() if not each.over]:
                self._end(answer, self.failure)
            self._router.close()

    def _take(self) -> None:
        """Take new requests and calls, and give up requests that nobody waits for any more."""
        while not self._calls.empty():
            begin, result = self._calls.get()
            try:
                begin(result)
            except EngineError as error:
                result.set_exception(error)
        while not self._inbox.empty():
            answer = self._inbox.get()
            self._answers[answer.request] = answer
            self._router.add(answer.request)
        while not self._gone.empty():
            answer = self._gone.get()
            if (request := answer.request) in self._answers:
                del self._answers[request]
                if not request.over:
                    self._router.cancel(request)
                self._router.forget(request)

    def _news(self, request: Request) -> None:
        answer = self._answers.get(request)
        if answer is None or answer.over:
            return
        self.retried += request.tries > max(answer.tries, 1)
        answer.tries = max(request.tries, 1)
        told, tokens = answer.tokens, request.tokens
        if tokens[: len(told)] != told[: len(tokens)]:
            self._router.cancel(request)
            self._end(answer, "a retry has begun with other tokens than those that were told")
        elif request.error is not None:
            answer.wrong = request.code is None
            self._end(answer, request.error)
        else:
            if len(tokens) > len(told):
                answer.news.put((tokens[len(told) :], request.logprobs[len(told) :]))
                answer.tokens = list(tokens)
            if request.over:
                self.served, answer.over = self.served + 1, True
                answer.news.put(_END)

    def _end(self, answer: Answer, error: str) -> None:
        self.lost += 1
        answer.error, answer.over = error, True
        answer.news.put(_END)
