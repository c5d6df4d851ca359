"""Peers of sessions with PULL: the suite as a source that lends its memory, and as a sink that reads the engine's."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvproto_conformance.live import moving, world
from kvproto_conformance.live.memory import Shared, Unattested, boot_id, map_region
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.source import Asked, Regions, Source
from kvproto_conformance.live.watch import Frame

Json = dict[str, Any]
LEASE = 60_000
"""Milliseconds of a good Offer."""


def _empty(fields: Json) -> None:
    """Check a Register whose memory nobody else writes; raises Missed."""
    if any(handle["data"] for region in fields["regions"] for handle in region["handles"]):
        raise Missed("handles of memory that nobody else may touch", "KVP-REG-ACCESS")


class PullSource(Source):
    """A source rank of the suite whose memory the engine reads."""

    maps = False

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, **more)
        self.columns, self._length = world.lay_out(self.geometry, self.rank)
        self.memory: Shared | None = Shared(self._length)
        self.epoch = 1
        """Of the memory that is offered from."""
        self.image = self.memory.bytes.copy()
        self._old: list[Shared] = []
        self._used: dict[str, int] = {}
        """Items of each group that were offered."""
        self._sizes: dict[str, int] = {}
        """Bytes of each Offer, by request id."""

    def registered(self, **changes: Any) -> Frame:
        """Hear Register, which lends nothing, answer it, and lend the suite's own memory."""
        found = super().registered(**changes)
        _empty(found.fields)
        self.lend()
        return found

    def lend(self) -> Frame:
        """Register to Registered, of memory that may be read."""
        return self.lent(self.register())

    def register(self, attests: bool = True) -> Frame:
        """Register memory that may be read; Registered is not waited for. `attests` unless the session shall lie."""
        assert self.memory is not None
        if attests:
            self.memory.attest(self.attestation("READ"))
        handle = {"transport": self.transport, "data": self.memory.handle()}
        region = {"id": "0", "base": "0", "length": str(self.memory.bytes.size), "kind": "HOST", "boot": boot_id(),
                  "handles": [handle]}  # fmt: skip
        return self.send(
            "Register", request=self.next_id(), source=self.digest, sink=self.their_digest, epoch=str(self.epoch),
            access="READ", regions=[region], columns=self.columns, routes=self.routes(), plan=self.planned["plan"],
        )  # fmt: skip

    def lent(self, asked: Frame) -> Frame:
        """Hear Registered of a Register."""
        id = asked.fields["request"]
        found = self.expect("Registered", where=lambda f: f["request"] == id, again=asked, clause="KVP-REG-MAP")
        if world.known(found.fields["routes"]) != self.routes() or found.fields["plan"] != self.planned["plan"]:
            raise Missed("Registered with other routes or another plan digest", "KVP-REG-CHECK")
        return found

    def move_pool(self) -> None:
        """Have other memory from now on, of the next epoch, of which nothing is said yet."""
        assert self.memory is not None
        self._old.append(self.memory)
        self.memory, self.epoch = Shared(self._length), self.epoch + 1

    def _drawn(self, asked: Asked) -> list[Json]:
        """Windows of the suite's groups that cover what a Transfer asks for, and items that nothing else is in."""
        mine = {group["name"]: group for group in self.geometry["groups"]}
        names = {group["id"]: group["name"] for group in self.theirs["groups"]}
        found = []
        for grant in asked.frame.fields["grants"]:
            group = mine[names[grant["group"]]]
            made = {key: value for key, value in grant.items() if key != "items"} | {"group": group["id"]}
            if world.has_memory(group):
                need = world.items_of(group, int(grant["first"]), int(grant["count"]))
                used = self._used[group["id"]] = self._used.get(group["id"], 0) + need
                made["items"] = [str(used - 1 - n) for n in range(need)]
            found.append(made)
        return sorted(found, key=lambda grant: int(grant["group"]))

    def move(self, asked: Asked, seed: str) -> None:
        """Have the labelled bytes in memory that the engine may read."""
        assert self.memory is not None
        asked.drawn = self._drawn(asked)
        windows = [grant | {"items": grant.get("items", [])} for grant in asked.drawn]
        here = moving.side(self.geometry, self.rank, self.columns, windows)
        for piece in asked.moved:
            for _, offset, lo, hi in moving.spans(here, piece.home, piece):
                held = moving.label(seed, piece.model, piece.layer, piece.name, [piece.row], lo, hi)[0]
                self.memory.bytes[offset : offset + hi - lo] = held
        self.image = self.memory.bytes.copy()

    def done_fields(self, asked: Asked, handoff: Mapping[str, str], seed: str) -> Json:
        """The fields of a good Offer."""
        good = super().done_fields(asked, handoff, seed)
        kept = {key: value for key, value in good.items() if key not in ("groups", "bytes")}
        return kept | {"epoch": str(self.epoch), "grants": asked.drawn, "lease": str(LEASE)}

    def done(self, asked: Asked, handoff: Mapping[str, str], seed: str, **changes: Any) -> Frame:
        """Send Offer."""
        fields = self.done_fields(asked, handoff, seed)
        sent = self.send("Offer", request=self.next_id(), **asked.of, **(fields | changes))
        self._sizes[sent.fields["request"]] = sum(p.hi - p.lo for p in asked.moved)
        return sent

    def acknowledged(self, done: Frame, clause: str = "KVP-PUL-OFFER") -> Frame:
        """Hear Pulled of an Offer, and say Released; of a Failed, DoneAck."""
        if done.name != "Offer":
            return super().acknowledged(done, clause)
        id = done.fields["request"]
        found = self.expect("Pulled", where=lambda f: f["request"] == id, again=done, clause=clause)
        if found.fields["bytes"] != str(self._sizes[id]):
            raise Missed(f"Pulled of {found.fields['bytes']} bytes, not {self._sizes[id]}", clause)
        if self.memory is not None and (self.memory.bytes != self.image).any():
            raise Missed("memory that may be read was written", "KVP-REG-ACCESS")
        self.send("Released", sequence=done.fields["sequence"])
        return found

    def close(self) -> None:
        """Goodbye, and give the memory back."""
        super().close()
        for memory in (self.memory, *self._old):
            if memory is not None:
                memory.close()
        self.memory = None
        self._old.clear()


class PullSink(Sink):
    """A sink rank of the suite that reads the engine's memory."""

    unpacks = True

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, **more)
        self.lent: tuple[str, list[Json], Regions] = "", [], {}
        """Epoch, columns and regions of the engine's memory."""
        self.offers: dict[str, Frame] = {}
        """By sequence."""
        self._maps: list[mmap.mmap] = []

    def registration(self) -> Json:
        """The fields of a good Register: handles of nothing."""
        good = super().registration()
        regions = [r | {"handles": [h | {"data": ""} for h in r["handles"]]} for r in good["regions"]]
        return good | {"regions": regions}

    def register(self, **changes: Any) -> Frame:
        """Register to Registered in both directions."""
        found = super().register(**changes)
        self.borrow()
        return found

    def borrow(self) -> Frame:
        """Hear the engine's Register, check all of it, map the memory and answer."""
        found = self.expect("Register", clause="KVP-PUL-OFFER")
        fields = found.fields
        for name, wanted, clause in (
            ("source", self.their_digest, "KVP-REG-DIGESTS"), ("sink", self.digest, "KVP-REG-DIGESTS"),
            ("routes", self.routes(), "KVP-REG-ROUTES"), ("plan", self.planned["plan"], "KVP-REG-ROUTES"),
            ("access", "READ", "KVP-REG-ACCESS"),
        ):  # fmt: skip
            if world.known(fields[name]) != wanted:
                raise Missed(f"Register with {name} {fields[name]}, not {wanted}", clause)
        regions: Regions = {}
        for region in fields["regions"]:
            try:
                mapped, view, _ = map_region(region, self.attestation("READ"))
            except Unattested as error:
                raise Missed(str(error), "KVP-REG-ATTEST") from error
            self._maps.append(mapped)
            regions[int(region["id"])] = view
        self.lent = fields["epoch"], fields["columns"], regions
        self.reply(found, "Registered", epoch=fields["epoch"], transport=self.transport, routes=self.routes(),
                   plan=self.planned["plan"])  # fmt: skip
        return found

    def give_up(self, asked: Frame) -> None:
        """Let go of the engine's memory, and answer its Unregister."""
        self._release()
        self.reply(asked, "Unregistered", epoch=asked.fields["epoch"], proof="PROVEN")

    def await_done(self, made: Request, seconds: float = 10.0) -> Frame:
        """An Offer, of which nothing is read yet; the same when it is asked for again."""
        if made.sequence in self.offers:
            return self.offers[made.sequence]
        found = self.expect("Offer", "Failed", "Done", where=self.of(made), seconds=seconds, clause="KVP-PUL-OFFER")
        if found.name != "Offer":
            raise Missed(f"{found.name} {found.fields.get('code', '')} in place of Offer", "KVP-PUL-OFFER")
        self.offers[made.sequence] = found
        if found.fields["epoch"] != self.lent[0]:
            raise Missed(f"an Offer of epoch {found.fields['epoch']}, not {self.lent[0]}", "KVP-PUL-OFFER")
        return found

    def unpack(self, made: Request, moved: list[moving.Piece]) -> None:
        """Read what was offered into the suite's pages; raises Missed where rows were not offered."""
        assert self.memory is not None
        _, columns, regions = self.lent
        offered = [g | {"items": g.get("items", [])} for g in self.offers[made.sequence].fields["grants"]]
        there = moving.side(self.theirs, self.source_rank, columns, offered)
        here = self.side(made)
        for piece in moved:
            if piece.row not in there.rows(piece.home):
                raise Missed(f"row {piece.row} of group {piece.home} was not offered", "KVP-PUL-OFFER")
            row = np.zeros(piece.hi - piece.lo, np.uint8)
            for region, offset, lo, hi in moving.spans(there, piece.home, piece):
                row[lo - piece.lo : hi - piece.lo] = regions[region][offset : offset + hi - lo]
            for _, offset, lo, hi in moving.spans(here, piece.group, piece):
                self.memory.bytes[offset : offset + hi - lo] = row[lo - piece.lo : hi - piece.lo]

    def end(self, done: Frame, size: int) -> None:
        """Say Pulled, and hear Released."""
        self.reply(done, "Pulled", bytes=str(size))
        sequence = done.fields["sequence"]
        self.expect("Released", where=lambda f: f["sequence"] == sequence, clause="KVP-PUL-OFFER")

    def close(self) -> None:
        """Goodbye, and let go of the engine's memory."""
        super().close()
        self._release()

    def _release(self) -> None:
        self.lent = self.lent[0], [], {}
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()
