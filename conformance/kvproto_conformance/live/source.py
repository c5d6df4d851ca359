"""The suite as a source: it listens, and hands labelled bytes to an engine that fetches them."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto_conformance.codec import read_struct
from kvproto_conformance.codec.facts import MAJOR, MINOR
from kvproto_conformance.live import moving, world
from kvproto_conformance.live.memory import Place, Unattested, attestation, boot_id, map_region
from kvproto_conformance.live.peer import Missed, Peer
from kvproto_conformance.live.watch import Frame
from kvproto_conformance.live.wire import Keys, Router
from kvproto_conformance.planner import plan

Json = dict[str, Any]
Regions = dict[int, npt.NDArray[np.uint8]]
MOST_DATA = 4096
"""The bytes of one Data: few, so that streams have many."""


class Asked:
    """A Transfer that was received."""

    def __init__(self, frame: Frame, moved: list[moving.Piece], side: Any, regions: Regions) -> None:
        self.frame, self.moved, self.side, self.regions = frame, moved, side, regions
        self.drawn: list[Json] = []
        """The suite's windows and items, if the engine reads."""

    @property
    def key(self) -> str:
        """Of its ticket."""
        return str(self.frame.fields["ticket"])

    @property
    def of(self) -> Json:
        """The field that every message about it has."""
        return {"sequence": self.frame.fields["sequence"]}


class Source(Peer):
    """One rank of the suite as a source."""

    maps = True
    """Whether it maps memory that the engine registers for SHM."""

    def __init__(
        self, address: str, *, name: str, geometry: Json, rank: int = 0, endpoints: Mapping[int, str] | None = None,
        transport: str = "SHM", offered: Iterable[str] = (), needed: Iterable[str] = (),
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        super().__init__(Router(address, keys), "sink")
        self.name, self.geometry, self.rank, self.transport = name, geometry, rank, transport
        self.endpoints = dict(endpoints or {rank: address})
        self.offered = {*offered, *(["INLINE"] if transport == "INLINE" else [])}
        self.needed = list(needed)
        self.version = "1"
        self.theirs: Json = {}
        self.welcomed: Json = {}
        """The fields of the last Welcome."""
        self.sink_rank = 0
        self.peer_place: Place = "", 0, 0
        """The engine's rank, as its Hello says."""
        self.planned: Json = {}
        self.epochs: dict[str, tuple[list[Json], Regions]] = {}
        """Columns, and regions by id, of each epoch that the engine has registered."""
        self.regions: Regions = {}
        """The regions of the epoch that was registered last, by id."""
        self.nonces: list[str] = []
        """Of the regions that the engine has registered."""
        self._maps: list[mmap.mmap] = []
        self.total = self.sent = 0
        self.damages = False
        """Whether one bit of what it moves is flipped."""

    def welcome(self, **changes: Any) -> Frame:
        """Hear Hello and answer Welcome; returns Hello. A change may be a function of what Hello says."""
        hello = self.expect("Hello", clause="KVP-NEG-VERSION")
        self.session, self.epochs = changes.pop("session", str(secrets.randbits(64) | 1)), {}
        self.begin_credit()
        chosen = [f for f in hello.fields["offered"] if isinstance(f, str) and f in self.offered]
        theirs = [int(v["max_minor"]) for v in hello.fields["versions"] if v["major"] == str(MAJOR)]
        minor = min([MINOR, *theirs])
        fields: Json = {
            "version": {"major": str(MAJOR), "minor": str(minor)},
            "engine": self.name, "incarnation": str(self.incarnation),
            "rank": str(self.rank), "replica": "0", "features": chosen,
            "limits": {"max_body": str(1 << 24), "max_transfers": "64"},
            "endpoints": [{"rank": str(r), "address": a} for r, a in sorted(self.endpoints.items())],
        }  # fmt: skip
        stated = {key: of(hello.fields) if callable(of) else of for key, of in changes.items()}
        self.welcomed = fields | stated
        self.reply(hello, "Welcome", **self.welcomed)
        self.sink_rank = int(hello.fields["rank"])
        self.peer_place = hello.fields["engine"], int(hello.fields["replica"]), self.sink_rank
        return hello

    def attestation(self, access: str = "WRITE") -> bytes:
        """The digest that the owner of memory in this session writes."""
        stated = self.welcomed
        return attestation(self.session, access, (stated["engine"], int(stated["replica"]), self.rank), self.peer_place)

    def begin_credit(self) -> None:
        """Count from 0: what was granted and sent before belongs to an earlier session."""
        self.heard = [frame for frame in self.heard if frame.name != "Credit"]
        self.total = self.sent = 0

    def describe(self, clause: str = "KVP-DSC-BOTH", **changes: Any) -> Frame:
        """Hear Describe, plan, and answer Description; returns Describe."""
        found = self.expect("Describe", clause=clause)
        self.theirs = read_struct("Geometry", bytes.fromhex(found.fields["geometry"]))
        self.their_digest = found.fields["digest"]
        if world.digest_as_stated(found.fields["geometry"]) != self.their_digest:
            raise Missed("a Describe whose geometry has another digest", "KVP-DSC-DIGEST")
        self.their_version = found.fields["version"]
        data, self.digest = world.digest_of(self.geometry)
        self.planned = plan(self.geometry, self.theirs, self.watch.features)
        self.reply(
            found, "Description", **({"version": self.version, "geometry": data, "digest": self.digest} | changes)
        )
        return found

    def redescribe(self) -> Frame:
        """Describe to Description, of the same caches under the next version (feature EPOCHS)."""
        self.version = str(int(self.version) + 1)
        data, digest = world.digest_of(self.geometry)
        found = self.ask("Describe", "Description", version=self.version, geometry=data, digest=digest)
        self.their_version, self.their_digest = found.fields["version"], found.fields["digest"]
        return self.last["Describe"]

    def routes(self) -> list[Json]:
        """Of this rank pair."""
        pair = str(self.rank), str(self.sink_rank)
        return [{"group": r["group"], "digest": r["digest"]} for r in self.planned["routes"]
                if (r["source"], r["sink"]) == pair]  # fmt: skip

    def registered(self, **changes: Any) -> Frame:
        """Hear Register, check all of it, map the memory and answer Registered; returns Register."""
        found = self.expect("Register", clause="KVP-REG-MAP")
        fields = found.fields
        for name, wanted, clause in (
            ("source", self.digest, "KVP-REG-DIGESTS"), ("sink", self.their_digest, "KVP-REG-DIGESTS"),
            ("routes", self.routes(), "KVP-REG-ROUTES"), ("plan", self.planned["plan"], "KVP-REG-ROUTES"),
            ("access", "WRITE", "KVP-REG-ACCESS"),
        ):  # fmt: skip
            if world.known(fields[name]) != wanted:
                raise Missed(f"Register with {name} {fields[name]}, not {wanted}", clause)
        if self.epochs and int(fields["epoch"]) <= max(map(int, self.epochs)):
            raise Missed(f"Register of epoch {fields['epoch']} after {', '.join(self.epochs)}", "KVP-EPO-RISE")
        self.regions = {}
        self.epochs[fields["epoch"]] = fields["columns"], self.regions
        if self.transport == "SHM" and self.maps:
            for region in fields["regions"]:
                try:
                    mapped, view, nonce = map_region(region, self.attestation())
                except Unattested as error:
                    raise Missed(str(error), "KVP-REG-ATTEST") from error
                self.nonces.append(nonce)
                self._maps.append(mapped)
                self.regions[int(region["id"])] = view
        self.reach(fields["regions"])
        answer: Json = {"epoch": fields["epoch"], "transport": self.transport, "routes": self.routes(),
                        "plan": self.planned["plan"]}  # fmt: skip
        if self.transport == "SHM" and self.maps:
            answer["process"] = this_process()
        self.reply(found, "Registered", **(answer | changes))
        return found

    def reach(self, regions: list[Json]) -> None:
        """Reach memory that is not mapped."""

    def ready(self, clause: str = "KVP-DSC-BOTH") -> Source:
        """Hello to Registered; without Describe, `clause` is not kept."""
        self.welcome()
        self.describe(clause)
        self.registered()
        return self

    def asked(self, seconds: float = 10.0) -> Asked:
        """Receive a Transfer, and check it as a source does, without answering it."""
        found = self.expect("Transfer", seconds=seconds, clause="KVP-TRN-ALL")
        fields = found.fields
        routed = [route["group"] for route in self.routes()]
        for name, have, wanted, clause in (
            ("grants", [g["group"] for g in fields["grants"]], routed, "KVP-GRANT-GROUPS"),
            ("writers", fields["writers"], self.planned["required"][str(self.sink_rank)], "KVP-TRN-ALL"),
            ("sink_version", fields["sink_version"], self.their_version, "KVP-TRN-AGREE"),
            ("source_version", fields["source_version"], self.version, "KVP-TRN-CHECKS"),
        ):  # fmt: skip
            if have != wanted:
                raise Missed(f"Transfer with {name} {have}, not {wanted}", clause)
        windows = [grant | {"items": grant.get("items", [])} for grant in fields["grants"]]
        groups = {g["id"]: g for g in self.theirs["groups"]}
        bare = "INTENT" in self.watch.features and not any(grant["items"] for grant in windows)
        for grant in windows:
            group, first, count = groups[grant["group"]], int(grant["first"]), int(grant["count"])
            need = world.items_of(group, first, count) if world.has_memory(group) else 0
            if not bare and group["cp_size"] == "1" and len(grant["items"]) != need:
                raise Missed(f"{len(grant['items'])} items of {group['name']}, not {need}", "KVP-GRANT-COUNT")
        if fields["epoch"] not in self.epochs:
            raise Missed(f"a Transfer into epoch {fields['epoch']}, which is not registered", "KVP-EPO-FREE")
        made = Asked(found, [], None, self.epochs[fields["epoch"]][1])
        if not bare:
            self.place(made, windows)
        return made

    def place(self, asked: Asked, windows: list[Json]) -> None:
        """Note which bytes go where, now that the items are known."""
        columns, _ = self.epochs[asked.frame.fields["epoch"]]
        asked.side = moving.side(self.theirs, self.sink_rank, columns, windows)
        pair = self.rank, self.sink_rank
        asked.moved = moving.pieces(self.geometry, self.theirs, pair, self.watch.features, asked.side)

    def progress(self, asked: Asked, state: str, tokens: int | None = None) -> None:
        """Report the progress of prefill."""
        self.send("Progress", **asked.of, state=state, tokens=None if tokens is None else str(tokens))

    def granted(self, asked: Asked, spans: bool = False) -> None:
        """Receive and answer Grants until all items of a request are named."""
        stated, items = asked.frame.fields["grants"], dict[str, list[str]]()
        groups = {g["id"]: g for g in self.theirs["groups"]}
        while True:
            found = self.expect("Grant", where=lambda f: f["sequence"] == asked.of["sequence"], clause="KVP-INT-ITEMS")
            grants = found.fields["grants"]
            windows = [{k: v for k, v in grant.items() if k not in ("items", "count")} for grant in grants]
            wanted = [{k: v for k, v in grant.items() if k not in ("items", "count")} for grant in stated]
            if windows != wanted:
                raise Missed(f"a Grant of {windows}, not {wanted}", "KVP-INT-WINDOW")
            for grant in grants:
                items.setdefault(grant["group"], []).extend(grant.get("items", []))
            self.reply(found, "Accepted", state="READY")
            counts = [int(grant["count"]) for grant in grants]
            if counts == [int(grant["count"]) for grant in stated]:
                break
            if not spans:
                raise Missed(f"a Grant of {counts} tokens, without SPANS", "KVP-INT-WINDOW")
            self.progress(asked, "READY")
        for grant in stated:
            group = groups[grant["group"]]
            need = world.items_of(group, int(grant["first"]), int(grant["count"])) if world.has_memory(group) else 0
            if len(items[grant["group"]]) != need:
                raise Missed(f"{len(items[grant['group']])} items of {group['name']}, not {need}", "KVP-GRANT-COUNT")
        self.place(asked, [grant | {"items": items[grant["group"]]} for grant in stated])

    def returned(self, asked: Frame, proof: str = "PROVEN") -> None:
        """Answer an Unregister, and release the memory of the epoch."""
        self.epochs.pop(asked.fields["epoch"])
        self.reply(asked, "Unregistered", epoch=asked.fields["epoch"], proof=proof)

    def accept(self, asked: Asked, state: str = "READY") -> None:
        """Answer Accepted."""
        self.reply(asked.frame, "Accepted", state=state)

    def move(self, asked: Asked, seed: str) -> None:
        """Bring the labelled bytes to their destination by the session's transport."""
        if self.transport == "SHM":
            self.write(asked, seed)
        else:
            self.stream(asked, seed)

    def write(self, asked: Asked, seed: str) -> None:
        """Write into the engine's memory."""
        for piece in asked.moved:
            for region, offset, lo, hi in moving.spans(asked.side, piece.group, piece):
                held = moving.carried(piece, seed, lo, hi)
                asked.regions[region][offset : offset + hi - lo] = held
        if self.damages:
            piece = asked.moved[len(asked.moved) // 2]
            region, offset, _, _ = next(moving.spans(asked.side, piece.group, piece))
            asked.regions[region][offset] ^= 4

    def packed(self, asked: Asked, seed: str) -> bytes:
        """The packed stream."""
        raw = bytearray().join(moving.carried(p, seed, p.lo, p.hi).tobytes() for p in asked.moved)
        if self.damages:
            raw[len(raw) // 2] ^= 4
        return bytes(raw)

    def stream(self, asked: Asked, seed: str, most: int = MOST_DATA) -> None:
        """Send Data under credit, to the end of the stream."""
        raw, at = self.packed(asked, seed), 0
        while at < len(raw):
            self.take_credit(1)
            end = min(at + most, len(raw), at + self.total - self.sent)
            self.data(asked, at, raw[at:end], end == len(raw))
            at = end

    def data(self, asked: Asked, offset: int, raw: bytes, last: bool) -> None:
        """One piece of a stream."""
        self.sent += len(raw)
        self.send("Data", **asked.of, offset=str(offset), data=raw.hex(), last=last)

    def take_credit(self, least: int, clause: str = "KVP-INL-CREDIT") -> None:
        """Receive Credits until this many bytes may be sent."""
        while any(frame.name == "Credit" for frame in self.heard) or self.total - self.sent < least:
            credit = self.expect("Credit", clause=clause)
            total = int(credit.fields["total"])
            if total < self.total:
                raise Missed(f"a total of {total} after {self.total}", "KVP-INL-CREDIT")
            self.total = total

    def done_fields(self, asked: Asked, handoff: Mapping[str, str], seed: str) -> Json:
        """The fields of a valid Done; `handoff` is by the sink's group, in hex."""
        size = sum(p.hi - p.lo for p in asked.moved)
        fields: Json = {
            "writer": str(self.rank), "groups": [r["group"] for r in self.routes()], "bytes": str(size),
            "outcome": "CONTINUE", "handoff": [{"group": g, "data": handoff[g]} for g in sorted(handoff, key=int)],
        }  # fmt: skip
        if "VERIFY" in self.watch.features:
            sums = moving.checksums(asked.moved, seed)
            fields["checksums"] = [{"group": g, "value": str(sums[g])} for g in sorted(sums, key=int)]
        return fields

    def done(self, asked: Asked, handoff: Mapping[str, str], seed: str, **changes: Any) -> Frame:
        """Send Done."""
        fields = self.done_fields(asked, handoff, seed)
        return self.send("Done", request=self.next_id(), **asked.of, **(fields | changes))

    def acknowledged(self, done: Frame, clause: str = "KVP-TRN-SET") -> Frame:
        """Receive the DoneAck of a Done or Failed."""
        id = done.fields["request"]
        return self.expect("DoneAck", where=lambda f: f["request"] == id, again=done, clause=clause)

    def fail(self, asked: Asked, code: str, mine: str = "", yours: str = "") -> Frame:
        """Send Failed under an id of its own."""
        return self.send("Failed", request=self.next_id(), **asked.of, code=code, path="", mine=mine, yours=yours)

    def restart(self) -> None:
        """Begin again as another run at the same address, which knows of no session."""
        assert isinstance(self.wire, Router)
        self.wire.restart()
        self.incarnation += 1 << 20

    def unmap(self) -> None:
        """Release the engine's memory."""
        self.regions, self.epochs = {}, {}
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()

    def give_up(self, asked: Frame) -> None:
        """Release the engine's memory, and answer its Unregister."""
        self.unmap()
        self.reply(asked, "Unregistered", epoch=asked.fields["epoch"], proof="PROVEN")

    def close(self) -> None:
        """Say Goodbye, and release the engine's memory."""
        super().close()
        self.unmap()


def this_process(pid: int | None = None) -> Json:
    """The suite's process, or another of its own, as Registered states it."""
    pid = os.getpid() if pid is None else pid
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return {"boot": boot_id(), "namespace": str(namespace), "pid": str(pid), "start": start}
