"""A scenario: data, and a short script that plays the engine's peer and checks by name what comes of it."""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.codec import read_struct
from kvproto_conformance.live import moving, world
from kvproto_conformance.live.engine import Engine
from kvproto_conformance.live.memory import holds
from kvproto_conformance.live.peer import Missed, Peer
from kvproto_conformance.live.sink import Request, Sink

__all__ = ["SCENARIOS", "Check", "Prompt", "Run", "Scenario", "scenario"]

Json = dict[str, Any]
Script = Callable[["Run"], None]
_numbers = itertools.count(1)


@attrs.frozen
class Scenario:
    """What one scenario is about.

    Fields:
        id: Never changes, and is never used again.
        title: What happens, in a line.
        clauses: What is shown to hold.
        guards: The class of bugs that it guards against, as engines have had them.
        role: Of the engine under test: source or sink.
        level: L3, or L4.
        world: The caches of the engine.
        transport: How bytes move.
        must: Whether a failure makes the engine nonconformant.
        extensions: Features that it needs.
        slow: Whether it waits for a timer of the protocol.
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
    script: Script = attrs.field(repr=False)


SCENARIOS: dict[str, Scenario] = {}
"""By id, in the order in which they are run."""


def scenario(
    id: str, title: str, *clauses: str, guards: str, role: str = "source", level: str = "L3", world: str = "gqa",
    transport: str = "SHM", must: bool = True, extensions: tuple[str, ...] = (), slow: bool = False,
) -> Callable[[Script], Script]:  # fmt: skip
    """Make a script a scenario."""

    def keep(script: Script) -> Script:
        if id in SCENARIOS:
            raise ValueError(f"two scenarios {id}")
        SCENARIOS[id] = Scenario(
            id, title, clauses, guards, role, level, world, transport, must, extensions, slow, script
        )
        return script

    return keep


@attrs.frozen
class Check:
    """One thing that was looked at."""

    name: str
    good: bool
    text: str = ""
    clause: str = ""


@attrs.frozen
class Prompt:
    """One request, as whoever routes requests hands it to both sides."""

    id: str
    key: str
    tokens: list[int] = attrs.field(repr=False)
    axes: Mapping[str, int]

    @property
    def seed(self) -> str:
        """Of its labels."""
        return self.key


class Live:
    """A running engine of one world and transport, with where it is reached."""

    def __init__(self, command: Sequence[str], role: str, world: str, transport: str) -> None:
        self.key = role, world, transport
        self.folder = tempfile.TemporaryDirectory(prefix="kvproto-live-")
        self.address = f"ipc://{self.folder.name}/engine"
        self.engine = Engine(command)
        try:
            stated: Json = {"listen": self.address} if role == "source" else {}
            found = self.engine.ask("open", role=role, world=world, transport=transport, name="engine", **stated)
        except BaseException:
            self.stop()
            raise
        self.geometry: Json = read_struct("Geometry", bytes.fromhex(found["geometry"]))

    def stop(self) -> None:
        """End the engine, and clean up after it."""
        self.engine.stop() if self.engine.alive else self.engine.kill()
        self.folder.cleanup()


class Run:
    """One run of a scenario."""

    def __init__(self, live: Live, scenario: Scenario) -> None:
        self.live, self.scenario = live, scenario
        self.engine, self.transport = live.engine, scenario.transport
        self.checks: list[Check] = []
        self.peers: list[Peer] = []
        self._nonces: list[str] = []

    def check(self, name: str, good: bool, text: str = "", clause: str = "") -> bool:
        """Note something that was looked at."""
        self.checks.append(Check(name, bool(good), "" if good else text, clause))
        return bool(good)

    def sink(self, ranks: int = 1, rank: int = 0, name: str = "", **more: Any) -> Sink:
        """A sink rank of the suite that has said nothing yet."""
        more.setdefault("geometry", world.mirror(self.live.geometry, ranks))
        more.setdefault("transport", self.transport)
        made = Sink(self.live.address, name=name or f"suite-{next(_numbers)}", rank=rank, **more)
        self.peers.append(made)
        return made

    def ready(self, **more: Any) -> Sink:
        """A sink rank whose memory the engine has mapped."""
        made = self.sink(**more).ready()
        self.keep(made)
        return made

    def keep(self, sink: Sink) -> None:
        """Look later whether the engine still holds the sink's memory."""
        if sink.memory is not None and sink.transport == "SHM":
            self._nonces.append(sink.memory.nonce)

    def prompt(self, tokens: int = 45) -> Prompt:
        """A request that nobody knows yet."""
        key = secrets.token_hex(16)
        return Prompt(key[:12], key, [int(key[:4], 16) + i for i in range(tokens)], {})

    def take(self, prompt: Prompt, deadline: int = 60_000) -> None:
        """Let the engine have a request."""
        self.engine.ask("request", id=prompt.id, key=prompt.key, engine="engine", deadline=deadline,
                        tokens=prompt.tokens)  # fmt: skip

    def fill(self, prompt: Prompt, upto: int | None = None) -> None:
        """Let the engine compute: labelled bytes for every token below `upto`."""
        tokens = len(prompt.tokens) if upto is None else upto
        for group, share in _shares(self.live.geometry):
            rows = rows_of(group, tokens)
            for layer in share["layers"]:
                for part in group["parts"]:
                    width = int(part["lanes"]) * int(part["lane_bytes"])
                    data = moving.label(prompt.seed, int(group["model"]), int(layer), part["name"], rows, 0, width)
                    self.engine.ask("fill", id=prompt.id, group=group["name"], layer=int(layer), part=part["name"],
                                    first=rows.start, data=data.tobytes().hex())  # fmt: skip

    def finish(self, prompt: Prompt, finished: bool = False) -> None:
        """Let the engine say that prefill is over."""
        self.engine.ask("finish", id=prompt.id, handoff=handoff(self.live.geometry, prompt), finished=finished)

    def serve(self, prompt: Prompt) -> None:
        """Request, fill and finish."""
        self.take(prompt)
        self.fill(prompt)
        self.finish(prompt)

    def over(self, prompt: Prompt, state: str = "freed", seconds: float = 5.0) -> None:
        """Check how the engine says that a request has ended."""
        found = self.engine.ask("wait", id=prompt.id, seconds=seconds)["state"]
        self.check(f"request {state}", found == state, f"the engine says {found}", "KVP-TRN-HOLD")

    def arrived(self, sink: Sink, made: Request, prompt: Prompt) -> None:
        """Done, and check everything about it; then DoneAck."""
        done = sink.await_done(made)
        moved = sink.pieces(made)
        self.check_bytes(sink, made, prompt, moved)
        fields, routed = done.fields, [route["group"] for route in sink.routes()]
        self.check("writer", fields["writer"] == str(sink.source_rank), fields["writer"], "KVP-TRN-WRITER")
        self.check("groups", fields["groups"] == routed, str(fields["groups"]), "KVP-TRN-WRITER")
        size = sum(p.hi - p.lo for p in moved)
        self.check("bytes", fields["bytes"] == str(size), f"{fields['bytes']}, not {size}", "KVP-HND-GROUPS")
        stated = {h["group"]: h["data"] for h in fields["handoff"]}
        wanted = handed(sink, prompt, self.live.geometry)
        self.check("hand-off", stated == wanted, f"{stated}, not {wanted}", "KVP-HND-GROUPS")
        if "VERIFY" in sink.watch.features:
            sums = {str(g): str(v) for g, v in moving.checksums(moved, prompt.seed).items()}
            found = {c["group"]: c["value"] for c in fields.get("checksums", [])}
            self.check("checksums", found == sums, f"{found}, not {sums}", "KVP-VERIFY-SOURCE")
        sink.reply(done, "DoneAck")

    def check_bytes(self, sink: Sink, made: Request, prompt: Prompt, moved: list[moving.Piece]) -> None:
        """Every byte of the sink's memory, by coordinate, padding and canaries included."""
        if sink.transport == "INLINE":
            sink.unpack(made, moved)
        sink.expected(made, moved, prompt.seed)
        self.check("every byte", not (text := sink.differs()), text, "KVP-TRN-ORDER")

    def hand_over(self, sink: Sink, prompt: Prompt | None = None, first: int = 0) -> None:
        """One whole transfer, with every check."""
        prompt = prompt or self.prompt()
        self.serve(prompt)
        made = sink.request(prompt.key, prompt.tokens, prompt.axes, first)
        sink.ask_for(made)
        self.arrived(sink, made, prompt)
        self.over(prompt)

    def probe(self) -> None:
        """A fresh, correct peer is served, whatever came before."""
        before = len(self.checks)
        self.hand_over(self.ready())
        good = all(check.good for check in self.checks[before:])
        self.check("a fresh peer is served", good, "what follows a refusal is refused too", "KVP-ERR-ALONE")

    def leave(self) -> None:
        """Close all peers, and look whether the engine has let go of them."""
        for peer in self.peers:
            peer.close()
        end = time.monotonic() + 5.0
        while (held := [n for n in self._nonces if holds(self.engine.pid, n)]) and time.monotonic() < end:
            time.sleep(0.002)
        text = f"{len(held)} regions of peers that are gone"
        self.check("nothing is held", not held, text, "KVP-EPO-UNMAP")

    def drop(self) -> None:
        """Close what a failed run has left; nothing is looked at."""
        for peer in self.peers:
            peer.wire.close()


def rows_of(group: Json, tokens: int) -> range:
    """Rows that an engine holds of so many tokens."""
    rows, step = int(group["rows"]), int(group["tokens_per_row"])
    if group["kind"] == "SLOT":
        return range(int(group.get("live_rows", rows)))
    return range(max(tokens // step - rows, 0), tokens // step) if group["kind"] == "RING" else range(tokens // step)


def _shares(geometry: Json) -> list[tuple[Json, Json]]:
    """Groups with memory, and what the one rank of the engine owns of each."""
    groups = {g["id"]: g for g in geometry["groups"]}
    return [(groups[s["group"]], s) for s in geometry["ranks"][0]["owns"] if world.has_memory(groups[s["group"]])]


def handoff(geometry: Json, prompt: Prompt) -> dict[str, dict[str, str]]:
    """Hand-off data of a request in hex, by group and part name."""

    def data(part: Json) -> str:
        made = moving.label(prompt.seed, 0, 0, f"handoff {part['name']}", 0, 0, int(part["lane_bytes"]))
        return bytes(made.tobytes()).hex()

    return {
        g["name"]: {
            p["name"]: data(p) for p in g["parts"]
        }
        for g in geometry["groups"] if not world.has_memory(g)
    }  # fmt: skip


def handed(sink: Sink, prompt: Prompt, geometry: Json) -> dict[str, str]:
    """What Done must have as hand-off data, by the sink's group."""
    stated = handoff(geometry, prompt)
    groups = {g["id"]: g for g in (sink.geometry or {})["groups"]}
    routed = [groups[r["group"]] for r in sink.routes() if not world.has_memory(groups[r["group"]])]
    return {g["id"]: "".join(stated[g["name"]][p["name"]] for p in g["parts"]) for g in routed}


def missed(text: str, clause: str = "") -> Missed:
    """What a script raises where there is no going on."""
    return Missed(text, clause)


def folder_of(live: Live) -> Path:
    """Where sockets of this run may be made."""
    return Path(live.folder.name)
