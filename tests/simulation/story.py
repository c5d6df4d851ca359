"""Stories: the engines, requests and faults of one run, which a seed decides and a shrinker makes shorter."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

PREFILLS, DECODES = ("p", "q"), ("d", "e", "f")
"""Engines: up to two that compute, and up to three that decode; each decode engine dials all that compute."""
TPS = (1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (3, 2)
FAULTS = {
    "break": 6, "cut": 5, "half open": 4, "stop": 6, "slow": 3, "jump": 3, "kill": 6, "leave": 3, "clock back": 1, "clock ahead": 1,
    "change frame": 6, "repeat frame": 3, "sleep": 5, "move": 3, "drain": 1, "drift": 2, "stand still": 1, "fork": 1, "shortage": 4,
}  # fmt: skip
"""Kinds of faults, and how often each is drawn."""
MOMENTS = (
    "Transfer", "Transfer", "Accepted", "Done", "Done", "DoneAck", "Grant", "Progress", "Abort", "Drained", "Failed", "Offer",
    "Offer", "Pulled", "Renew", "Hello", "Welcome", "Description", "Register", "Registered", "Unregister", "Data", "Credit",
)  # fmt: skip
"""Kinds of messages that faults are aimed at."""


STORAGE = {
    "storage fails": 3, "storage full": 2, "storage torn": 3, "storage lies": 9, "storage slow": 3, "storage hangs": 2,
    "power loss": 3, "copies fail": 2, "restart": 12, "break": 1,
}  # fmt: skip
"""Kinds of faults of tiers, and how often each is drawn."""
_PROMPTS = 5000


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attrs.frozen
class Setup:
    """The engines of a run, and how fast everything is."""

    prefill: int
    """Ranks of the prefill engine."""
    decode: int
    pages: tuple[int, int] = attrs.field(converter=_tuple)
    """Tokens of a page, at prefill and at decode."""
    engines: int = 1
    """Decode engines, with as many ranks each."""
    sources: int = 1
    """Prefill engines, with as many ranks each."""
    host: int = 0
    """Pages of each prefill rank's host memory; 0: it has no tiers."""
    policy: int = 0
    """The number of the tiers' policy."""
    store: str = ""
    """The kind of storage behind the host: plain, roomy, or none."""
    hostile: str = ""
    """The engine that lies."""
    router: bool = False
    """Whether a router listens with a Finder."""
    way: str = "host"
    """The kind of transport: a name of `memory.WAYS`, or inline."""
    pull: bool = False
    verify: bool = True
    eager: bool = True
    latency: float = 5e-4
    """Seconds that a frame takes, about."""
    pace: float = 1e-3
    """Seconds that a part of a copy takes, about."""
    part: int = 256
    """Bytes of a part."""
    tick: float = 0.0
    """Seconds by which a clock moves on with each reading."""
    rates: tuple[float, float] = attrs.field(default=(1.0, 1.0), converter=_tuple)
    """Speeds of the clocks of both engines."""
    lease: float = 10.0
    part_bytes: int = 1 << 24


@attrs.frozen
class Ask:
    """One request, as a router gives it to both engines."""

    id: int
    at: float
    tokens: int
    deadline: float = 60.0
    cached: int = 0
    chunks: int = 1
    """Calls of `computed` before `finish`."""
    compute: float = 0.05
    """Seconds that prefill takes."""
    lags: tuple[float, float] = attrs.field(default=(0.0, 0.0), converter=_tuple)
    """Seconds after which each engine hears of it; negative if it never does."""
    to: int = 0
    """The number of the decode engine that fetches it."""
    of: int = 0
    """The number of the prefill engine that computes it."""
    both: float = -1.0
    """Seconds after which another decode engine hears of it too, with the same ticket."""
    late_pages: bool = False
    """Whether decode names its pages when they are wanted."""
    spans: bool = False
    abort: float = -1.0
    """Seconds after which decode aborts it."""
    fail: float = -1.0
    """Seconds after which prefill gives it up."""
    again: float = -1.0
    """Seconds after which both engines hear of it again, under the same ticket."""
    prompt: int = 0
    """The number of its prompt, which others may share; 0: one of its own."""
    other_prompt: bool = False
    """Whether decode has another prompt under the same ticket."""

    @property
    def content(self) -> int:
        """What labels of its rows name."""
        return _PROMPTS + self.prompt if self.prompt else self.id


@attrs.frozen
class Fault:
    """Something that goes wrong: its kind, a rank of prefill and one of decode, a side, seconds and a number."""

    at: float
    kind: str
    prefill: int = 0
    decode: int = 0
    at_decode: bool = False
    engine: int = 0
    """The number of the decode engine."""
    source: int = 0
    """The number of the prefill engine."""
    seconds: float = 0.0
    number: int = 0
    on: str = ""
    """The kind of message of which the `number`-th brings it, if that comes before `at`."""


@attrs.frozen
class Story:
    """Everything that a run begins with."""

    seed: int
    setup: Setup
    asks: tuple[Ask, ...] = attrs.field(converter=_tuple)
    faults: tuple[Fault, ...] = attrs.field(converter=_tuple)

    def __len__(self) -> int:
        return len(self.asks) + len(self.faults)

    def lines(self) -> list[str]:
        """The story for people: only what is not as usual."""
        plain = Setup(self.setup.prefill, self.setup.decode, self.setup.pages)
        first = f"{self.setup.prefill} prefill and {self.setup.decode} decode ranks{_differing(self.setup, plain)}"
        told = [
            (ask.at, f"request {ask.id} of {ask.tokens} tokens{_differing(ask, Ask(ask.id, ask.at, ask.tokens))}")
            for ask in self.asks
        ]
        for fault in self.faults:
            told.append((fault.at, f"{fault.kind}{_differing(fault, Fault(fault.at, fault.kind))}"))
        return [first, *(f"{at:9.4f} {text}" for at, text in sorted(told))]


def _differing(value: Any, plain: Any) -> str:
    pairs = ((f.name, getattr(value, f.name), getattr(plain, f.name)) for f in attrs.fields(type(value)))
    return "".join(f", {name.replace('_', ' ')} {mine}" for name, mine, usual in pairs if mine != usual)


def write(story: Story) -> str:
    """A story as JSON, without what is as usual."""

    def small(field: Any, value: Any) -> bool:
        return bool(field.default is attrs.NOTHING or value != field.default)

    return json.dumps(attrs.asdict(story, filter=small))


def read(text: str) -> Story:
    """The story of its JSON."""
    row = json.loads(text)
    asks, faults = (Ask(**ask) for ask in row["asks"]), (Fault(**fault) for fault in row["faults"])
    return Story(row["seed"], Setup(**row["setup"]), tuple(asks), tuple(faults))


def of_seed(seed: int) -> Story:
    """The story of a seed."""
    chance = random.Random(seed)
    prefill, decode = chance.choice(TPS)
    way = chance.choice(("host", "device", "device", "remote", "inline"))
    pull = way in ("host", "device") and chance.random() < 0.3
    engines, sources = chance.choice((1, 1, 1, 2, 2, 3)), chance.choice((1, 1, 1, 2))
    liars = [DECODES[engines - 1], *(PREFILLS[1:sources])]
    host, policy, store, router = _tiers(chance)
    setup = Setup(
        prefill,
        decode,
        chance.choice(((4, 4), (4, 8), (8, 4), (2, 6))),
        engines,
        sources,
        host,
        policy,
        store,
        chance.choice(liars) if chance.random() < 0.12 else "",
        router,
        way,
        pull,
        verify=chance.random() < 0.6,
        eager=chance.random() < 0.8,
        latency=chance.choice((1e-4, 5e-4, 5e-3, 5e-2)),
        pace=chance.choice((1e-4, 1e-3, 2e-2, 2e-2, 0.2) if not pull else (1e-3, 2e-2, 0.1, 0.2)),
        part=chance.choice((128, 512, 2048)),
        tick=chance.choice((0.0, 1e-6, 2e-4, 3e-3)),
        rates=(chance.choice((1.0, 1.0, 0.98, 1.05)), chance.choice((1.0, 1.0, 0.97, 1.02))),
        lease=chance.choice((10.0, 1.0)),
        part_bytes=chance.choice((1 << 24, 1)),
    )
    span = chance.choice((2.0, 8.0, 30.0) if not setup.host else (8.0, 30.0))
    count = chance.choice((1, 1, 2, 3, 5, 8) if not setup.host else (2, 4, 8, 12))
    asks = sorted((_ask(chance, span, setup) for _ in range(count)), key=lambda ask: ask.at)
    weights = (
        FAULTS if not setup.host or chance.random() < 0.3 else FAULTS | STORAGE if chance.random() < 0.5 else STORAGE
    )
    kinds = chance.sample(sorted(weights), chance.choice((0, 1, 2, 3, 5)))
    faults = [
        _fault(chance, {kind: weights[kind] for kind in kinds}, span, setup)
        for _ in range(chance.choice((1, 2, 4, 8)) if kinds else 0)
    ]
    if setup.store and chance.random() < 0.7:  # what the host held is read from storage again
        restart = _fault(chance, {"restart": 1}, span, setup)
        faults.append(attrs.evolve(restart, at=round(span * (0.2 + 0.4 * chance.random()), 4), on=""))
    numbered = (attrs.evolve(ask, id=n + 1) for n, ask in enumerate(asks))
    return Story(seed, setup, tuple(numbered), tuple(sorted(faults, key=lambda fault: fault.at)))


def _ask(chance: random.Random, span: float, setup: Setup) -> Ask:
    tokens = chance.choice((1, 3, 8, 13, 24, 31) if not setup.host else (3, 8, 13, 24, 31))
    short = chance.random() < 0.2
    lags = [
        0.0 if chance.random() < 0.6 else chance.random() ** 2 * 12,
        0.0 if chance.random() < 0.6 else chance.random() ** 2 * 5,
    ]
    if chance.random() < 0.06:
        lags[chance.random() < 0.5] = -1.0
    compute = chance.choice((0.0, 0.02, 0.3, 2.0))
    late = chance.random() < 0.4
    return Ask(
        0,
        round(chance.random() ** 1.5 * span, 4),
        tokens,
        deadline=round(0.05 + chance.random() * 4, 3) if short else chance.choice((10.0, 60.0)),
        cached=0 if late or chance.random() < 0.7 else chance.randrange(tokens),
        chunks=chance.choice((1, 1, 3)),
        compute=compute,
        lags=(round(lags[0], 4), round(lags[1], 4)),
        to=chance.randrange(setup.engines),
        of=chance.randrange(setup.sources),
        both=round(chance.random() ** 2 * 4, 4) if setup.engines > 1 and chance.random() < 0.1 else -1.0,
        late_pages=late,
        spans=late and chance.random() < 0.5,
        abort=round(chance.random() ** 2 * (compute + 1), 4) if chance.random() < 0.2 else -1.0,
        fail=round(chance.random() ** 2 * (compute + 1), 4) if chance.random() < 0.15 else -1.0,
        again=round(chance.random() ** 2 * 8, 4) if chance.random() < 0.05 else -1.0,
        prompt=chance.randrange(4) if setup.host else 0,
        other_prompt=chance.random() < 0.03,
    )


def _tiers(chance: random.Random) -> tuple[int, int, str, bool]:
    """The pages of the host, the policy, the storage, and whether a router listens."""
    if chance.random() < 0.7:
        return 0, 0, "", False
    store = chance.choice(("", "plain", "plain", "roomy", "roomy"))
    return chance.choice((4, 12, 40)), chance.choice((0, 0, 0, 1, 2)), store, chance.random() < 0.4


def _fault(chance: random.Random, kinds: Mapping[str, int], span: float, setup: Setup) -> Fault:
    kind = chance.choices([*kinds], [*kinds.values()])[0]
    seconds = chance.choice((0.01, 0.3, 1.0, 6.0, 12.0, 25.0, 40.0, 70.0)) * (0.5 + chance.random())
    on = chance.choice(MOMENTS) if kind not in STORAGE and chance.random() < 0.5 else ""
    aimed_number = chance.choice((1, 1, 2, 3, 5))
    return Fault(
        round(span if on else chance.random() * span, 4),
        kind,
        chance.randrange(setup.prefill),
        chance.randrange(setup.decode),
        chance.random() < 0.5,
        chance.randrange(setup.engines),
        chance.randrange(setup.sources),
        round(seconds, 4),
        aimed_number if on else chance.randrange(1, 30),
        on,
    )
