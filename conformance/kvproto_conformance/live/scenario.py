"""A scenario: data, and a short script that plays the engine's peer and makes named checks."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvproto_conformance.codec import read_struct
from kvproto_conformance.live import moving, world
from kvproto_conformance.live.engine import Engine
from kvproto_conformance.live.peer import Missed, Peer
from kvproto_conformance.live.wire import free_address, new_keys

Json = dict[str, Any]
Script = Callable[[Any], None]
NAME = "suite"
"""Of the suite where the engine knows it by its key."""
STARTING = 180.0
"""Seconds that an engine may take to open: a GPU's, or one with NIXL on a machine that is busy, takes long."""
NO_FEATURES = frozenset({"CONVERSION", "CURVE", "DEALS", "LARGE", "RESUME", "SLEEP"})
"""Extensions that are not features of a session."""


@attrs.frozen
class Scenario:
    """One scenario: its engine, its conditions and its script.

    Fields:
        id: Never changes, and is never used again.
        title: What happens, in one line.
        clauses: The clauses that it shows to hold.
        guards: The class of bugs that it guards against, as engines have had them.
        role: Of the engine under test: source or sink.
        level: L3, or L4.
        world: The caches of the engine.
        transport: How bytes move.
        must: Whether a failure makes the engine nonconformant.
        extensions: The features that it needs.
        slow: Whether it waits for a timer of the protocol.
        spoils: Whether the engine serves nobody afterwards, for example because it drains.
        maps: Whether it is about memory that one process maps and another owns.
        script: What is done.
    """

    id: str
    title: str
    clauses: tuple[str, ...]
    guards: str
    role: str
    level: str
    world: str
    transport: str
    must: bool
    extensions: tuple[str, ...]
    slow: bool
    spoils: bool
    maps: bool
    script: Script = attrs.field(repr=False)


SCENARIOS: dict[str, Scenario] = {}
"""All scenarios by id, in the order in which they run."""


def scenario(
    id: str, title: str, *clauses: str, guards: str, role: str = "source", level: str = "L3", world: str = "gqa",
    transport: str = "SHM", must: bool = True, extensions: tuple[str, ...] = (), slow: bool = False,
    spoils: bool = False, maps: bool = False,
) -> Callable[[Script], Script]:  # fmt: skip
    """Turn a script into a scenario."""

    def keep(script: Script) -> Script:
        if id in SCENARIOS:
            raise ValueError(f"two scenarios {id}")
        SCENARIOS[id] = Scenario(
            id, title, clauses, guards, role, level, world, transport, must, extensions, slow, spoils, maps, script
        )
        return script

    return keep


@attrs.frozen
class Check:
    """One thing that was checked."""

    name: str
    good: bool
    text: str = ""
    clause: str = ""


@attrs.frozen
class Prompt:
    """One request, as a router hands it to both sides."""

    id: str
    key: str
    tokens: list[int] = attrs.field(repr=False)
    axes: Mapping[str, int]

    @property
    def seed(self) -> str:
        """Of its labels."""
        return self.key


class Live:
    """A running engine of one world and transport, and the address at which it is reached."""

    def __init__(self, command: Sequence[str], role: str, world: str, transport: str, keyed: bool = False) -> None:
        """`keyed`: over TCP, with CURVE keys; else over ipc."""
        self.key = role, world, transport, keyed
        self.folder = tempfile.TemporaryDirectory(prefix="kvproto-live-")
        self.address = free_address() if keyed else f"ipc://{self.folder.name}/engine"
        self.theirs, self.keys = new_keys(), new_keys()
        """Pairs of the engine and of the suite, where there are keys."""
        self.command = list(command)
        self.start()

    def start(self) -> None:
        """Start an engine if none is running."""
        role, world, transport, keyed = self.key
        self.engine = Engine(self.command)
        try:
            stated: Json = {"listen": self.address} if role == "source" else {}
            if keyed:
                stated["keys"] = {"public": self.theirs.public.decode(), "secret": self.theirs.secret.decode()}
            if keyed and role == "source":
                stated["clients"] = [{"key": self.keys.public.decode(), "engine": NAME}]
            found = self.engine.ask(
                "open", STARTING, role=role, world=world, transport=transport, name="engine", **stated
            )
        except BaseException:
            self.stop()
            raise
        self.geometry: Json = read_struct("Geometry", bytes.fromhex(found["geometry"]))

    def name(self, number: int) -> str:
        """A peer's name: a different one each time, unless the engine knows the suite by its key."""
        return NAME if self.key[3] else f"suite-{number}"

    def restart(self) -> None:
        """Kill the engine (SIGKILL), and start another at the same address."""
        self.engine.kill()
        self.start()

    def wake(self, world: str) -> None:
        """Let an engine whose memory was taken back go on with other memory, of the caches of a world."""
        found = self.engine.ask("wake", STARTING, world=world)
        self.geometry = read_struct("Geometry", bytes.fromhex(found["geometry"]))

    def stop(self) -> None:
        """Stop the engine, and clean up after it."""
        self.engine.stop() if self.engine.alive else self.engine.kill()
        self.folder.cleanup()


class Run:
    """One run of a scenario, whatever the engine's role."""

    def __init__(self, live: Live, scenario: Scenario) -> None:
        self.live, self.scenario = live, scenario
        self.transport = scenario.transport
        self.checks: list[Check] = []
        self.peers: list[Peer] = []

    @property
    def engine(self) -> Engine:
        """The engine that is running now."""
        return self.live.engine

    def check(self, name: str, good: bool, text: str = "", clause: str = "") -> bool:
        """Record a check."""
        self.checks.append(Check(name, bool(good), "" if good else text, clause))
        return bool(good)

    def prompt(self, tokens: int = 45) -> Prompt:
        """A request that neither side knows yet."""
        key = secrets.token_hex(16)
        return Prompt(key[:12], key, [int(key[:4], 16) + i for i in range(tokens)], {})

    def chosen(self, peer: Peer) -> None:
        """Check that the session has every feature that the scenario is about; raises Missed."""
        if missing := sorted({*self.scenario.extensions} - NO_FEATURES - peer.watch.features):
            raise Missed(f"{missing[0]} is claimed, was offered, and was not chosen", "KVP-NEG-CHOOSE")

    def probe(self) -> None:
        """Check that a new, correct peer is served, whatever happened before."""
        before = len(self.checks)
        self.serve_fresh()
        good = all(check.good for check in self.checks[before:])
        self.check("a fresh peer is served", good, "what follows a refusal is refused too", "KVP-ERR-ALONE")

    def serve_fresh(self) -> None:
        """One whole request with a peer that the engine has not met."""
        raise NotImplementedError

    def leave(self) -> None:
        """Close all peers, and check that the engine has let go of them."""
        for peer in self.peers:
            peer.close()

    def drop(self) -> None:
        """Close what a failed run has left open, without checks."""
        for peer in self.peers:
            peer.wire.close()


def rows_of(group: Json, tokens: int) -> range:
    """The rows that an engine holds for this many tokens."""
    rows, step = int(group["rows"]), int(group["tokens_per_row"])
    if group["kind"] == "SLOT":
        return range(int(group.get("live_rows", rows)))
    return range(max(tokens // step - rows, 0), tokens // step) if group["kind"] == "RING" else range(tokens // step)


def shares(geometry: Json) -> list[tuple[Json, Json]]:
    """Groups with memory, and what the one rank of the engine owns of each."""
    groups = {g["id"]: g for g in geometry["groups"]}
    return [(groups[s["group"]], s) for s in geometry["ranks"][0]["owns"] if world.has_memory(groups[s["group"]])]


def handoff(geometry: Json, prompt: Prompt) -> dict[str, dict[str, str]]:
    """The hand-off data of a request in hex, by group and part name."""

    def data(part: Json) -> str:
        made = moving.label(prompt.seed, 0, 0, f"handoff {part['name']}", 0, 0, int(part["lane_bytes"]))
        return bytes(made.tobytes()).hex()

    return {
        g["name"]: {
            p["name"]: data(p) for p in g["parts"]
        }
        for g in geometry["groups"] if not world.has_memory(g)
    }  # fmt: skip
