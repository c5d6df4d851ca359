"""The plan of one seed, as a pure function of its number, so that `--show` prints what a run will do."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import attrs

from .labels import PAGE

__all__ = [
    "DECODES",
    "PREFILLS",
    "WAYS",
    "Fault",
    "Order",
    "Plan",
    "Weather",
    "make",
    "rare_boundaries",
    "router_boundaries",
    "transport_of",
]

PREFILLS, DECODES = ("prefill0", "prefill1"), ("decode0", "decode1")
ENGINES = (*PREFILLS, *DECODES)

_ALWAYS = (
    "Hello", "Welcome", "Describe", "Description", "Register", "Registered", "Ping", "Pong", "Transfer", "Accepted",
    "Abort", "Drained", "Error", "Goodbye", "Failed",
)  # fmt: skip
_RARE = "Unregister", "Unregistered", "Refused"
_OF_A_WAY = {
    "push": ("Done", "DoneAck"), "pull": ("Offer", "Pulled", "Renew", "Renewed", "Released"),
    "inline": ("Credit", "Data", "Done", "DoneAck"),
}  # fmt: skip
"""By way: messages at whose boundary an engine may be killed, in addition to those of every way."""
_SPANS = "Grant", "Progress"
_OF_A_TRANSPORT = {"nixl": ("Chunk", "Credit"), "shm": _SPANS, "slow": _SPANS, "inline": _SPANS}
"""By transport: messages that few requests or few transports have, in addition to the rare ones of all."""
_OF_ROUTERS = "Watch", "Watched", "Kept"
"""The same for what routers hear."""
MOMENTS = ("before", "after", "later")
"""Just before the proxy passes the message on, just after, or some milliseconds after."""


@attrs.frozen
class Order:
    """One request: which engines compute and fetch it, and what happens to it meanwhile. Times are in seconds."""

    number: int
    at: float
    prefill: str
    decode: str
    tokens: int
    cached: int
    """Tokens that decode already has."""
    first: float
    """The delay until one side hears of it: prefill if negative, else decode."""
    chunks: tuple[tuple[float, int], ...]
    """Pauses of prefill, and the number of tokens that are computed after each."""
    deadline: float
    hold: int
    """Steps for which decode keeps the pages."""
    abort: float | None = None
    fail: float | None = None
    """The time after which prefill gives it up, if it does."""
    unheard: str = ""
    """The side that never hears of it."""
    other_prompt: bool = False
    """Whether the two sides have different prompts."""
    named: str = "at once"
    """The time at which decode names its pages: "at once", "late" (once prefill is over), or in "spans" meanwhile."""


@attrs.frozen
class Fault:
    """Something that happens to an engine, or to a connection: at a time, or at the boundary of a message."""

    kind: str
    whom: str
    at: float = 0.0
    seconds: float = 0.0
    """Its duration, or the time that an engine stays dead."""
    amount: float = 0.0
    message: str = ""
    nth: int = 0
    moment: str = ""

    @property
    def boundary(self) -> str:
        """The boundary at which it kills, in words."""
        return f"{self.message} {self.moment} {self.whom}"


@attrs.frozen
class Weather:
    """The share of frames that the proxy treats in each way."""

    drop: float = 0.0
    delay: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    cut: float = 0.0
    """The end is cut off, so that it is no longer a frame."""
    garble: float = 0.0
    """Bytes are changed, and usually no reader accepts it."""
    lie: float = 0.0
    """Bytes are changed, and a reader still accepts it."""


@attrs.frozen
class Plan:
    """Everything that one seed does."""

    seed: int
    seconds: float
    """Seconds of faults, after which everything has to come to an end."""
    way: str
    transports: dict[str, str]
    threads: dict[str, bool]
    rates: dict[str, float]
    """The speed of each engine's clock."""
    verify: bool | str
    weather: Weather
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]

    def lines(self) -> list[str]:
        """The plan in words."""
        head = f"seed {self.seed}: {self.way} by {self.transports}, threads {self.threads}, clocks {self.rates}"
        return [head, f"  verify {self.verify}, {self.weather}", *(f"  {x}" for x in (*self.faults, *self.orders))]


WAYS = {"shm": "push", "slow": "push", "inline": "inline", "pull": "pull", "slow pull": "pull", "nixl": "push"}
"""Transports, and how their bytes move."""
_CALM = Weather()
_WEATHERS = (
    _CALM, Weather(drop=0.03, delay=0.05, double=0.03, swap=0.03), Weather(drop=0.12, delay=0.1, double=0.1, swap=0.1),
    Weather(delay=0.3, swap=0.1), Weather(cut=0.03, garble=0.05, drop=0.02), Weather(lie=0.03, double=0.02),
)  # fmt: skip
_HAPPENINGS = {
    "kill": 5, "kill at": 8, "stop": 4, "jump": 2, "old clock": 1, "fork": 2, "descriptors": 2, "memory": 2,
    "full shm": 1, "shorten": 2, "unsealed": 1, "cut": 3, "abort all": 3, "reconnect": 2, "drain": 1, "sleep": 4,
    "move": 4,
}  # fmt: skip
"""Kinds of faults and how often each is drawn."""


def transport_of(seed: int) -> str:
    """The transport of a seed: NIXL once in ten seeds, the others in turn."""
    names = [name for name in WAYS if name != "nixl"]
    return "nixl" if seed % 10 == 9 else names[seed % 10 % len(names)]


def make(seed: int, seconds: float, transport: str = "") -> Plan:
    """The plan of a seed with `seconds` of faults, over `transport` or else one that is drawn."""
    rng = random.Random(seed)
    chosen = transport or transport_of(seed)
    return Plan(
        seed,
        seconds,
        WAYS[chosen],
        dict.fromkeys(ENGINES, chosen),
        {name: rng.random() < 0.7 for name in ENGINES},
        {name: round(rng.uniform(0.995, 1.005), 4) for name in ENGINES},
        rng.choice((True, True, "pages")),
        rng.choice(_WEATHERS),
        tuple(_orders(rng, seconds)),
        tuple(_faults(rng, seed, seconds, chosen)),
    )


def _orders(rng: random.Random, seconds: float) -> list[Order]:
    found, at = list[Order](), 0.05
    while at < seconds:
        tokens = rng.choice((rng.randint(1, 2 * PAGE), rng.randint(1, 24 * PAGE)))
        ends = sorted({rng.randint(1, tokens) for _ in range(rng.randint(0, 3))} | {tokens})
        found.append(
            Order(
                len(found) + 1,
                round(at, 3),
                rng.choice(PREFILLS),
                rng.choice(DECODES),
                tokens,
                rng.randint(0, tokens - 1) if rng.random() < 0.2 else 0,
                round(rng.uniform(-0.1, 0.1), 3),
                tuple((round(rng.expovariate(1 / 0.04), 3), end) for end in ends),
                rng.choice((0.3, 1.5, 1.5, 3.0)),
                rng.randint(1, 20),
                **_fate(rng),
                named=rng.choice(("at once", "at once", "late", "spans")),
            )
        )
        at += rng.expovariate(1 / 0.07)
    return found


def _fate(rng: random.Random) -> dict[str, Any]:
    drawn = rng.random()
    if drawn < 0.15:
        return {"abort": round(rng.expovariate(1 / 0.08), 3)}
    if drawn < 0.20:
        return {"fail": round(rng.expovariate(1 / 0.08), 3)}
    if drawn < 0.23:
        return {"unheard": rng.choice(("prefill", "decode"))}
    return {"other_prompt": True} if drawn < 0.25 else {}


def boundaries(way: str) -> list[tuple[str, str, str]]:
    """Message, moment and role of every boundary at which an engine may be killed."""
    return list(product((*_ALWAYS, *_OF_A_WAY[way]), MOMENTS, ("prefill", "decode")))


def rare_boundaries(transport: str) -> list[tuple[str, str, str]]:
    """The same for rare messages: every third seed also kills at one of them."""
    return list(product((*_RARE, *_OF_A_TRANSPORT.get(transport, ())), MOMENTS, ("prefill", "decode")))


def router_boundaries() -> list[tuple[str, str, str]]:
    """The same for what routers hear: every third seed, other than those, also kills at one of them."""
    return list(product(_OF_ROUTERS, MOMENTS, ("prefill", "decode")))


def _faults(rng: random.Random, seed: int, seconds: float, transport: str) -> list[Fault]:
    """Every seed kills at one boundary, which they take in turn; what else happens is drawn."""
    every = boundaries(WAYS[transport])
    message, moment, role = every[seed // 5 % len(every)]
    found = [_kill_at(rng, message, moment, role)]
    for kind in rng.choices(list(_HAPPENINGS), list(_HAPPENINGS.values()), k=rng.randint(2, 6)):
        at, whom = round(rng.uniform(0.2, seconds), 3), rng.choice(ENGINES)
        match kind:
            case "kill at":
                found.append(_kill_at(rng, *rng.choice(every)))
            case "kill":
                found.append(Fault(kind, whom, at, _dead(rng)))
            case "old clock":
                found.append(Fault(kind, whom, at, _dead(rng), -rng.choice((0.05, 5.0, 3600.0))))
            case "full shm":
                found.append(Fault(kind, whom, at, _dead(rng)))
            case "stop":
                found.append(Fault(kind, whom, at, rng.choice((0.05, 0.3, 1.4, 1.7))))
            case "jump":
                found.append(Fault(kind, whom, at, amount=rng.choice((0.2, 1.2, 40.0, 100_000.0))))
            case "descriptors" | "memory":
                found.append(Fault(kind, whom, at, rng.uniform(0.1, 0.6), rng.choice((0, 2, 8))))
            case "fork":
                found.append(Fault(kind, whom, at, rng.uniform(0.05, 0.8)))
            case "shorten" | "abort all" | "drain":
                found.append(Fault(kind, whom, at))
            case "sleep":
                found.append(Fault(kind, whom, at, rng.choice((0.01, 0.1, 0.4))))
            case "reconnect" | "move":
                found.append(Fault(kind, rng.choice(DECODES), at))
            case "cut" | "unsealed":
                found.append(Fault(kind, f"{rng.choice(PREFILLS)} {rng.choice(DECODES)}", at))
    found += _caches(random.Random(f"caches {seed}"), seconds)
    if seed % 3 == 0:
        rare = rare_boundaries(transport)
        found.append(_kill_at(random.Random(f"rare {seed}"), *rare[seed // 30 % len(rare)]))
    if seed % 3 == 1:
        told = router_boundaries()
        found.append(_kill_at(random.Random(f"router {seed}"), *told[seed // 30 % len(told)]))
    return sorted(found, key=lambda fault: fault.at)


def _caches(rng: random.Random, seconds: float) -> list[Fault]:
    """Engines whose caches change, in every other seed; drawn separately, so that the rest is as without them."""
    count = rng.choice((0, 1, 2, 3)) if rng.random() < 0.67 else 0
    times = [round(rng.uniform(0.2, seconds), 3) for _ in range(count)]
    return [Fault("caches", rng.choice(ENGINES), at, rng.choice((0.0, 0.01, 0.1))) for at in times]


def _dead(rng: random.Random) -> float:
    return rng.choice((0.0, 0.02, 0.1, 0.4))


def _kill_at(rng: random.Random, message: str, moment: str, role: str) -> Fault:
    nth = rng.choice((1, 1, 2, 3, rng.randint(4, 12)))
    return Fault("kill at", role, seconds=_dead(rng), message=message, nth=nth, moment=moment)
