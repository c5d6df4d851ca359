"""Outcomes of all requests, findings that the proxy's lies excuse, and violations."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs

from kvproto.wire import messages as m

from .book import Finding, Name
from .plan import Order, Plan
from .proxy import Pair, Passing, Proxy, read
from .report import Result, Violation

__all__ = ["Ask", "Judge"]

_OF_UCX = re.compile(r"\[\d+\.\d+\] |[IWE]\d{4} ")
"""Beginnings of lines in which NIXL and UCX say that a peer is gone."""


@attrs.define(eq=False)
class Ask:
    """One attempt of a request."""

    name: Name
    order: Order
    key: bytes = attrs.field(repr=False)
    outcome: str = ""
    touched: bool = False
    """Whether the proxy has lied about it."""
    heard: list[str] = attrs.Factory(list)
    """Engines that have heard of it."""

    @property
    def pair(self) -> Pair:
        """Its prefill and its decode engine."""
        return Pair(self.order.prefill, self.order.decode)


class Judge:
    """Judges the requests and findings of one seed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.asks: dict[Name, Ask] = {}
        self.arrived: set[int] = set()
        """Numbers of requests with an attempt that arrived."""
        self.liars: set[Pair] = set()
        """Pairs with a session that was lied about as a whole."""
        self.misled: set[str] = set()
        """Engines that were told what only another run of them forgets: a later run of a peer than there is, so that
        they refuse the real one, or another process that writes their pages, whose end they wait for.
        """
        self.misplaced: set[str] = set()
        """Engines whose Register was lied about, so that peers may write partial labels anywhere."""
        self._keys: dict[bytes, Ask] = {}
        self._transfers: dict[tuple[Pair, int, int], Ask] = {}
        self._counts: Counter[str] = Counter()
        self._boundaries: list[str] = []
        self._violations: list[Violation] = []
        self._excused: list[str] = []

    @property
    def kinds(self) -> set[str]:
        """The kinds of the violations so far."""
        return {each.kind for each in self._violations}

    def count(self, what: str) -> None:
        """Count something by name."""
        self._counts[what] += 1

    def boundary(self, what: str) -> None:
        """Note a boundary at which an engine was killed."""
        self._boundaries.append(what)

    def violation(self, kind: str, text: str) -> None:
        """Note something that must never happen."""
        self._violations.append(Violation(kind, text))

    # requests

    def asked(self, ask: Ask) -> None:
        """Note an attempt that begins."""
        self.asks[ask.name] = self._keys[ask.key] = ask
        ask.touched = ask.pair in self.liars

    def told(self, name: Name, engine: str) -> None:
        """Note that an engine has heard of an attempt."""
        self.asks[name].heard.append(engine)

    def arrives(self, name: Name) -> None:
        """Note an attempt that has arrived."""
        self._end(name, "arrived")
        self.arrived.add(name[0])

    def loses(self, name: Name, code: str) -> None:
        """Note an attempt that is lost."""
        self._end(name, code)

    def _end(self, name: Name, outcome: str) -> None:
        ask = self.asks[name]
        if ask.outcome:
            self.violation("counted twice", f"request {name[0]}.{name[1]} is {outcome}, and was {ask.outcome}")
        ask.outcome = outcome

    def died(self, engine: str) -> None:
        """Note that a run of a decode engine has ended, and its requests with it."""
        for ask in self.asks.values():
            if engine == ask.order.decode and engine in ask.heard and not ask.outcome:
                ask.outcome = "its engine died"

    def lost_by(self, number: int) -> dict[str, int]:
        """Outcomes of a request's attempts, with the number of each."""
        return dict(Counter(ask.outcome or "nothing" for name, ask in self.asks.items() if name[0] == number))

    # lies

    def passing(self, one: Passing) -> None:
        """Note a frame as the proxy passes it on, to remember which request a Transfer is for."""
        if one.name == "Transfer" and (said := read(one.frame)) is not None:
            ask = self._keys.get(bytes(said.ticket))
            if ask is not None:
                self._transfers[one.pair, said.session, said.sequence] = ask

    def lied(self, one: Passing, said: Any, made: Any) -> None:
        """Note a frame that was changed and can be read: the requests of both versions of it may fail."""
        self.count("lies")
        if isinstance(said, m.Data) and isinstance(made, m.Data):
            return  # VERIFY finds it
        if isinstance(made, m.Hello | m.Welcome) and made.incarnation > getattr(said, "incarnation", 0):
            self.misled |= {one.pair.prefill, one.pair.decode}
        if isinstance(made, m.Registered) and made.process != getattr(said, "process", None):
            self.misled.add(one.pair.decode)
        if isinstance(made, m.Register):
            self.misplaced.add(one.pair.decode)
        about = [self._about(one, each) for each in (said, made) if each is not None]
        if any(each is None for each in about) or not about:
            self.liars.add(one.pair)
            for ask in self.asks.values():
                ask.touched |= ask.pair == one.pair
        for named in about:
            if named is not None:
                named.touched = True

    def _about(self, one: Passing, said: Any) -> Ask | None:
        if isinstance(said, m.Transfer):
            return self._keys.get(bytes(said.ticket))
        sequence = getattr(said, "sequence", None)
        return None if sequence is None else self._transfers.get((one.pair, said.session, sequence))

    def finding(self, engine: str, found: Finding) -> None:
        """Judge what an engine has found on its pages."""
        author, victim = (self.asks.get(name or (0, 0)) for name in (found.author, found.victim))
        theirs = victim is not None and victim.touched and found.kind == "wrong byte"
        if author is not None and author.order.decode != engine:
            self.violation("another's page", f"{engine}: {found.text}")
        elif theirs or (author.touched if author is not None else found.torn and engine in self.misplaced):
            self._excused.append(found.text)
        else:
            self.violation(found.kind, f"{engine}: {found.text}")

    def result(self, wall: float, broken: str, proxy: Proxy, engines: Any) -> Result:
        """The result of the seed, with what engines have written to their logs."""
        for name, engine in engines.items():
            log = Path(engine.setup.log)
            text = log.read_text(errors="replace") if log.exists() else ""
            log.unlink(missing_ok=True)
            text = "".join(each for each in text.splitlines(keepends=True) if not _OF_UCX.match(each))
            if text.strip():
                self._violations.append(Violation("crash", f"{name} said: {text[-1500:]}"))
        lost = Counter(ask.outcome or "unheard" for ask in self.asks.values())
        arrived = lost.pop("arrived", 0)
        return Result(
            self._plan.seed,
            broken,
            self._plan.way,
            self._plan.transports["prefill0"],
            round(wall, 2),
            len(self.asks),
            arrived,
            dict(lost),
            dict(self._counts),
            dict(proxy.counts),
            dict(proxy.passed),
            self._boundaries,
            [fault.boundary for fault in self._plan.faults if fault.kind == "kill at"],
            self._excused,
            self._violations,
        )
