"""Peers of sessions with STAGED: the suite as a sink with staging slots, and as a source that writes the engine's."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvproto_conformance.live import nixl
from kvproto_conformance.live.memory import BadHandle, boot_id
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.source import Asked, Source
from kvproto_conformance.live.watch import Frame

Json = dict[str, Any]
SLOTS, SLOT = 4, 640
"""Of the suite's staging memory: small, so that a stream has many pieces, and rows lie over their ends."""


class StagedSink(Sink):
    """A sink rank of the suite, whose pages nobody but itself writes."""

    unpacks = True

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, **(more | {"offered": {*more.get("offered", ()), "STAGED"}}))
        self.staging = np.zeros(SLOTS * SLOT, np.uint8)
        self._made, self._stated = nixl.agent().register(self.staging, SLOT)
        self.open_slots: set[int] = set()
        """Slots that the engine may write."""
        self.eager = True
        """Whether slots are granted by themselves."""

    def registration(self) -> Json:
        """A good Register: pages without a handle's data, and staging memory that no column names."""
        good = super().registration()
        (pages,) = good["regions"]
        pages["handles"] = [{"transport": "NIXL", "data": ""}]
        staging = pages | {"id": "1", "length": str(self.staging.size),
                           "handles": [{"transport": "NIXL", "data": nixl.write_handle(self._stated)}]}  # fmt: skip
        return good | {"regions": [pages, staging]}

    def open_credit(self) -> None:
        """Grant every slot."""
        if self.eager:
            self.grant_slots(*range(SLOTS))

    def grant_slots(self, *slots: int) -> None:
        """Let the engine write these."""
        self.open_slots |= {*slots}
        self.send("Credit", kind="STAGING", slots=[str(slot) for slot in slots])

    def await_done(self, made: Request, seconds: float = 10.0) -> Frame:
        """Chunks as far as there are some, then Done, which is not yet acknowledged."""
        while True:
            found = self.expect("Done", "Chunk", "Failed", where=self.of(made), seconds=seconds,
                                clause="KVP-TRN-ORDER")  # fmt: skip
            if found.name == "Done":
                return found
            if found.name == "Failed":
                raise Missed(f"Failed {found.fields['code']} at {found.fields['path']!r} in place of Done")
            slot = self.take_chunk(made, found)
            if self.eager:
                self.grant_slots(slot)

    def take_chunk(self, made: Request, chunk: Frame) -> int:
        """The next bytes of a stream, out of their slot, which is returned; raises Missed."""
        slot, offset, size = (int(chunk.fields[name]) for name in ("slot", "offset", "bytes"))
        if slot not in self.open_slots:
            raise Missed(f"a Chunk in slot {slot}; {sorted(self.open_slots)} are granted", "KVP-STG-BEYOND")
        if offset != len(made.stream) or size > SLOT:
            raise Missed(f"a Chunk of {size} bytes at {offset}, not at {len(made.stream)}", "KVP-STG-NEXT")
        self.open_slots.remove(slot)
        made.stream += self.staging[slot * SLOT : slot * SLOT + size].tobytes()
        self.staging[slot * SLOT : (slot + 1) * SLOT] = 0x5A
        return slot

    def close(self) -> None:
        """Goodbye, and let nobody write the slots."""
        super().close()
        if self._made is not None:
            nixl.agent().forget(self._made)
        self._made = None


class StagedSource(Source):
    """A source rank of the suite, which writes the engine's staging slots."""

    maps = False

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, **more)
        self.offered.add("STAGED")
        self.there: nixl.Staging | None = None
        self.slots: list[int] = []
        """Of the engine's, those that may be written."""
        self._buffer = np.zeros(1 << 16, np.uint8)
        self._made, _ = nixl.agent().register(self._buffer, 0)

    def reach(self, regions: list[Json]) -> None:
        """Find the staging memory of a Register; raises Missed where pages have a handle, or there is none."""
        found: list[nixl.Staging] = []
        for region in regions:
            data = next((bytes.fromhex(h["data"]) for h in region["handles"] if h["transport"] == "NIXL"), None)
            if data:
                try:
                    found.append(nixl.read_handle(data))
                except BadHandle as error:
                    raise Missed(str(error), "KVP-REG-STAGING") from None
                if found[-1].length < int(region["length"]) or region["boot"] != boot_id():
                    raise Missed("staging memory that is shorter than its region, or of another host")
        staging = [each for each in found if each.slots]
        if len(staging) != 1 or len(found) != 1:
            raise Missed(f"{len(staging)} staging memories among {len(found)} handles with data", "KVP-REG-STAGING")
        (self.there,) = staging
        nixl.agent().meet(self.there)

    def take_slots(self, least: int = 1) -> None:
        """Hear Credits until so many slots may be written; raises Missed for one that cannot be granted."""
        assert self.there is not None
        while any(frame.name == "Credit" for frame in self.heard) or len(self.slots) < least:
            fields = self.expect("Credit", clause="KVP-STG-RETURN").fields
            if fields["kind"] != "STAGING":
                raise Missed(f"Credit of {fields['kind']}", "KVP-STG-KIND")
            for slot in map(int, fields["slots"]):
                if slot >= self.there.slots or slot in self.slots:
                    raise Missed(f"Credit of slot {slot}, which is none or is granted already", "KVP-STG-TWICE")
                self.slots.append(slot)

    def stream(self, asked: Asked, seed: str, most: int = 0) -> None:
        """Write the stream into slots, and say Chunk of each."""
        raw, at = self.packed(asked, seed), 0
        assert self.there is not None
        most = min(most or self.there.slot, self.there.slot, self._buffer.size)
        while at < len(raw):
            end = min(at + most, len(raw))
            self.put(asked, at, raw[at:end], end == len(raw))
            at = end

    def put(self, asked: Asked, offset: int, raw: bytes, last: bool, slot: int | None = None) -> int:
        """Write one piece into a slot that is granted, or into this one, and say Chunk; the slot."""
        assert self.there is not None
        if slot is None:
            self.take_slots()
            slot = self.slots.pop(0)
        piece = self._buffer[: len(raw)]
        piece[:] = np.frombuffer(raw, np.uint8)
        nixl.agent().write(piece, self.there, slot * self.there.slot)
        self.chunk(asked, slot, offset, len(raw), last)
        return slot

    def chunk(self, asked: Asked, slot: int, offset: int, size: int, last: bool) -> None:
        """Say what a slot holds."""
        self.send("Chunk", **asked.of, slot=str(slot), offset=str(offset), bytes=str(size), last=last)

    def unmap(self) -> None:
        """Know the engine's slots no more."""
        super().unmap()
        if self.there is not None:
            nixl.agent().leave(self.there)
        self.there = None
        if self._made is not None:
            nixl.agent().forget(self._made)
        self._made = None
