"""The suite as a sink: Hello to Goodbye with an engine that has the cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvproto_conformance.codec import read_struct
from kvproto_conformance.codec.facts import ENUMS, MAJOR, MINOR
from kvproto_conformance.live import moving, world
from kvproto_conformance.live.memory import Place, Shared, attestation, boot_id
from kvproto_conformance.live.peer import Missed, Peer
from kvproto_conformance.live.watch import Frame
from kvproto_conformance.live.wire import Dealer, Keys
from kvproto_conformance.planner import plan

Json = dict[str, Any]
WINDOW = 1 << 20
"""Bytes of Data that may be on their way."""
CANARY = (1 << 20) + 7
"""After how many bytes the pattern repeats that memory has at first."""


class Request:
    """One request that a sink rank fetches."""

    def __init__(self, key: str, tokens: Sequence[int], axes: Mapping[str, int]) -> None:
        self.key, self.tokens, self.axes = key, list(tokens), dict(axes)
        self.grants: list[Json] = []
        self.sequence = ""
        self.sent: Frame | None = None
        self.stream: bytearray = bytearray()
        self.last = False
        """Whether the last bytes of the stream have come."""


class Sink(Peer):
    """One rank of the suite as a sink."""

    unpacks = False
    """Whether it writes its pages itself, whichever the transport."""

    def __init__(
        self, address: str, *, name: str, geometry: Json | None = None, rank: int = 0, transport: str = "SHM",
        offered: Iterable[str] = (), needed: Iterable[str] = (), heads_first: bool = False, items: int = 64,
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        """`geometry` is the suite's own Description; without it, one is made to fit once the engine's is known."""
        super().__init__(Dealer(address, keys), "source")
        self.address = address
        self.name, self.rank, self.transport = name, rank, transport
        self.offered = sorted({*offered, *(["INLINE"] if transport == "INLINE" else [])}, key=_feature)
        self.needed = list(needed)
        self.geometry, self.theirs = geometry, {}  # type: Json | None, Json
        self.version, self.their_version = "1", "1"
        self.heads_first, self.items = heads_first, items
        self.memory: Shared | None = None
        self.old: list[Shared] = []
        """Of epochs before."""
        self.spare: Shared | None = None
        """More memory, for lies about it."""
        self.image = np.empty(0, np.uint8)
        self.columns: list[Json] = []
        self.planned: Json = {}
        self.source_rank = 0
        self.place: Place = name, 0, rank
        """The rank that its Hello states."""
        self.peer_place: Place = "", 0, 0
        """The engine's rank, as its Welcome says."""
        self.sequences = 0
        self.epoch = 3
        """Of the latest Register; not 1 at first, which an engine could say without reading it."""
        self.window = WINDOW
        """The bytes of Data that may be on their way."""
        self.credit = self.counted = 0
        """Bytes of Data that the latest epoch has granted and received."""
        self.first: int | None = None
        """The first epoch of the session."""
        self.used: set[tuple[str, int]] = set()

    def hello(self) -> Json:
        """The fields of a good Hello."""
        return {
            "request": self.next_id(), "versions": [{"major": str(MAJOR), "min_minor": "0", "max_minor": str(MINOR)}],
            "engine": self.name, "incarnation": str(self.incarnation), "rank": str(self.rank), "replica": "0",
            "role": "SINK", "offered": self.offered, "needed": self.needed,
            "limits": {"max_body": str(1 << 24), "max_transfers": "64"},
        }  # fmt: skip

    def greet(self, **changes: Any) -> Frame:
        """Hello to Welcome, which the `clause` asks for."""
        clause = changes.pop("clause", "KVP-NEG-CHOOSE")
        said = self.hello() | changes
        sent = self.send("Hello", **said)
        id = sent.fields["request"]
        found = self.expect("Welcome", where=lambda f: f["request"] == id, again=sent, clause=clause)
        self.session, self.source_rank = found.fields["session"], int(found.fields["rank"])
        self.place = said["engine"], int(said["replica"]), int(said["rank"])
        self.peer_place = found.fields["engine"], int(found.fields["replica"]), self.source_rank
        self.first, self.counted = None, 0
        listed = {e["rank"]: e["address"] for e in found.fields["endpoints"]}
        if found.fields["engine"] != "engine" or found.fields["rank"] not in listed:
            raise Missed(
                f"Welcome of {found.fields['engine']!r}, with endpoints of ranks {sorted(listed)}", "KVP-NEG-CHOOSE"
            )
        if self.address.startswith("ipc:") and listed[found.fields["rank"]] != self.address:
            raise Missed(f"Welcome at {self.address} says {listed[found.fields['rank']]}", "KVP-NEG-CHOOSE")
        return found

    def describe(self, geometry: Json) -> Frame:
        """Describe to Description, and the plan of both."""
        self.geometry = geometry
        data, digest = world.digest_of(geometry)
        found = self.ask("Describe", "Description", version=self.version, geometry=data, digest=digest)
        self.digest = digest
        self._learn(found)
        return found

    def described_again(self) -> Frame:
        """Hear Describe of an engine whose caches have changed, plan anew, and answer."""
        assert self.geometry is not None
        found = self.expect("Describe", clause="KVP-DSC-AGAIN")
        self._learn(found)
        data, digest = world.digest_of(self.geometry)
        self.reply(found, "Description", version=self.version, geometry=data, digest=digest)
        return found

    def _learn(self, described: Frame) -> None:
        fields = described.fields
        self.theirs = read_struct("Geometry", bytes.fromhex(fields["geometry"]))
        self.their_version, self.their_digest = fields["version"], fields["digest"]
        if world.digest_as_stated(fields["geometry"]) != self.their_digest:
            raise Missed("a Description whose digest is not that of its geometry", "KVP-DSC-DIGEST")
        self.planned = plan(self.theirs, self.geometry or {}, self.watch.features)

    def routes(self) -> list[Json]:
        """Of this rank pair, as Register and Registered state them."""
        pair = str(self.source_rank), str(self.rank)
        return [{"group": r["group"], "digest": r["digest"]} for r in self.planned["routes"]
                if (r["source"], r["sink"]) == pair]  # fmt: skip

    @property
    def writers(self) -> list[str]:
        """Source ranks that this rank awaits."""
        return list(self.planned["required"][str(self.rank)])

    def allocate(self) -> None:
        """Memory of this rank, every byte of it known."""
        assert self.geometry is not None
        self.columns, length = world.lay_out(self.geometry, self.rank, self.items, self.heads_first)
        self.memory = Shared(length)
        canary = moving.label(f"canary {self.name}", 0, 0, "", [0], 0, min(length, CANARY))[0]
        self.image = np.resize(canary, length)
        self.memory.bytes[:] = self.image

    def attestation(self, access: str = "WRITE") -> bytes:
        """The digest that the owner of memory in this session writes."""
        return attestation(self.session, access, self.peer_place, self.place)

    def registration(self) -> Json:
        """The fields of a good Register, whose session is attested."""
        assert self.memory is not None
        self.memory.attest(self.attestation())
        inline = self.transport == "INLINE"
        handle = {"transport": self.transport, "data": "" if inline else self.memory.handle()}
        region = {"id": "0", "base": "0", "length": str(self.memory.bytes.size), "kind": "HOST", "boot": boot_id(),
                  "handles": [handle]}  # fmt: skip
        return {"source": self.their_digest, "sink": self.digest, "epoch": str(self.epoch), "access": "WRITE",
                "regions": [region], "columns": self.columns, "routes": self.routes(),
                "plan": self.planned["plan"]}  # fmt: skip

    def register(self, **changes: Any) -> Frame:
        """Register to Registered; raises Missed if the engine's routes, plan or transport differ from the suite's."""
        found = self.ask("Register", "Registered", clause="KVP-REG-MAP", **(self.registration() | changes))
        if world.known(found.fields["routes"]) != self.routes() or found.fields["plan"] != self.planned["plan"]:
            raise Missed("Registered with other routes or another plan digest", "KVP-REG-CHECK")
        if (found.fields["epoch"], found.fields["transport"]) != (str(self.epoch), self.transport):
            raise Missed(f"Registered names {found.fields['transport']} and epoch {found.fields['epoch']}")
        self.first = self.epoch if self.first is None else self.first
        self.open_credit()
        return found

    def move(self) -> Frame:
        """Register other memory under the next epoch; requests from now on go there."""
        if self.memory is not None:
            self.old.append(self.memory)
        self.epoch, self.counted = self.epoch + 1, 0
        self.allocate()
        return self.register()

    def give_back(self, epoch: int, at_once: bool | None = None) -> Frame:
        """Unregister to Unregistered."""
        return self.ask("Unregister", "Unregistered", epoch=str(epoch), at_once=at_once, clause="KVP-EPO-UNMAP")

    def open_credit(self) -> None:
        """Let the source send, where the transport needs that."""
        if self.transport == "INLINE":
            self.grant_bytes()

    def grant_bytes(self) -> None:
        """Grant what has come, and a window; the first epoch of a session need not be named (KVP-EPO-CREDIT)."""
        self.credit = self.counted + self.window
        epoch = None if self.epoch == self.first else str(self.epoch)
        self.send("Credit", kind="INLINE", total=str(self.credit), epoch=epoch)

    def count_anew(self) -> None:
        """Let the source send again after the session was resumed, which counts bytes from 0."""
        self.counted = 0
        self.open_credit()

    def ready(self, ranks: int = 1, **hello: Any) -> Sink:
        """Hello to Registered, with a Description that mirrors the engine's."""
        self.greet(**hello)
        if self.geometry is None:
            raise ValueError("a Sink needs a Description before it is ready")
        self.describe(self.geometry)
        self.allocate()
        self.register()
        return self

    def request(
        self, key: str, tokens: Sequence[int], axes: Mapping[str, int] | None = None, first: int = 0
    ) -> Request:
        """A request with windows from `first` on, and its own items, in random order, in every routed group."""
        made = Request(key, tokens, axes or {})
        groups = {g["id"]: g for g in self.geometry["groups"]} if self.geometry else {}
        shares = self.side(made).shares
        for route in self.routes():
            group = groups[route["group"]]
            begin, count = world.window(group, len(tokens), made.axes, first)
            need = world.items_of(group, begin, count, shares[group["id"]]["cp_rank"]) if world.has_memory(group) else 0
            free = [i for i in reversed(range(self.items)) if (group["id"], i) not in self.used]
            taken = free[:need:1] if need % 2 else [*free[1:need:2], *free[0:need:2]]
            if len(taken) < need:
                raise ValueError(f"the suite's pool of {self.items} items is too small for {need}")
            self.used |= {(group["id"], i) for i in taken}
            valid = begin + count if world.has_memory(group) else 0
            grant = {"group": group["id"], "first": str(begin), "count": str(count), "valid": str(valid)}
            if world.has_memory(group):
                grant["items"] = [str(i) for i in taken]
            if group["kind"] == "SLOT":
                grant["state_after"] = str(len(tokens))
            made.grants.append(grant)
        return made

    def transfer(self, made: Request) -> Json:
        """The fields of a good Transfer of a request, with the next sequence."""
        self.sequences += 1
        made.sequence = str(self.sequences)
        return {"sequence": made.sequence, "ticket": made.key,
                "content": world.content(made.tokens, made.axes), "source_version": self.their_version,
                "sink_version": self.version, "epoch": str(self.epoch), "grants": made.grants,
                "writers": self.writers}  # fmt: skip

    def ask_for(self, made: Request, **changes: Any) -> Frame:
        """Transfer to Accepted."""
        found = self.ask("Transfer", "Accepted", **(self.transfer(made) | changes))
        made.sent = found
        return found

    def intend(self, made: Request) -> Frame:
        """Transfer without items, to Accepted (feature INTENT)."""
        bare = [{key: value for key, value in grant.items() if key != "items"} for grant in made.grants]
        return self.ask_for(made, grants=bare)

    def granted(self, made: Request, tokens: int | None = None, since: int = 0) -> list[Json]:
        """The grants of a Grant: windows that end with `tokens` (None: whole), and items that `since` had not."""
        assert self.geometry is not None
        groups, found = {g["id"]: g for g in self.geometry["groups"]}, []
        for whole in made.grants:
            group, grant = groups[whole["group"]], dict(whole)
            first, end = int(whole["first"]), int(whole["first"]) + int(whole["count"])
            upto = end if tokens is None else min(end, max(tokens, first))
            grant["count"] = str(upto - first)
            if "items" in whole:
                had, has = (world.items_of(group, first, max(n - first, 0)) for n in (since, upto))
                grant["items"] = whole["items"][had:has]
            found.append(grant)
        return found

    def grant(self, made: Request, tokens: int | None = None, since: int = 0) -> Frame:
        """Grant to Accepted."""
        return self.ask("Grant", "Accepted", **self.named(made), grants=self.granted(made, tokens, since))

    def named(self, made: Request) -> Json:
        """The fields that every message about a request has."""
        return {"sequence": made.sequence}

    def await_done(self, made: Request, seconds: float = 10.0) -> Frame:
        """Receive all Data, then Done, without acknowledging it."""
        mine = self.of(made)
        while True:
            found = self.expect("Done", "Data", "Failed", where=mine, seconds=seconds, clause="KVP-TRN-ORDER")
            if found.name == "Done":
                if made.stream and not made.last:
                    raise Missed("Done, though no Data was the last", "KVP-INL-LAST")
                return found
            if found.name == "Failed":
                text = f"Failed {found.fields['code']} at {found.fields['path']!r}, {found.fields['mine']!r}"
                raise Missed(f"{text} and {found.fields['yours']!r} in place of Done")
            self.take_data(made, found)

    def answers(self, id: str) -> Any:
        """Whether a frame has the id of a request."""
        return lambda fields: fields.get("request") == id

    def of(self, made: Request) -> Any:
        """Whether a frame is about a request."""
        return lambda fields: fields.get("sequence") == made.sequence

    def take_data(self, made: Request, data: Frame) -> None:
        """The next bytes of an inline stream."""
        raw = bytes.fromhex(data.fields["data"])
        if int(data.fields["offset"]) != len(made.stream):
            raise Missed(f"Data at {data.fields['offset']}, not at {len(made.stream)}", "KVP-INL-NEXT")
        if made.last:
            raise Missed("Data after the last of its stream", "KVP-INL-LAST")
        made.last = bool(data.fields.get("last"))
        self.counted += len(raw)
        if self.counted > self.credit:
            raise Missed(f"{self.counted} bytes of Data under a total of {self.credit}", "KVP-INL-BEYOND")
        made.stream += raw
        self.grant_bytes()

    def pieces(self, made: Request) -> list[moving.Piece]:
        """Pieces that this rank pair moves for a request, in the order of the stream."""
        return moving.pieces(self.theirs, self.geometry or {}, (self.source_rank, self.rank), self.watch.features,
                             self.side(made))  # fmt: skip

    def side(self, made: Request) -> Any:
        """This rank with the windows of a request."""
        windows = [grant | {"items": grant.get("items", [])} for grant in made.grants]
        return moving.side(self.geometry or {}, self.rank, self.columns, windows)

    def unpack(self, made: Request, moved: list[moving.Piece]) -> None:
        """Write an inline stream into the pages, as a sink does; raises Missed if its length is wrong."""
        assert self.memory is not None
        here, at = self.side(made), 0
        for piece in moved:
            for _, offset, lo, hi in moving.spans(here, piece.group, piece):
                part = made.stream[at + lo - piece.lo : at + hi - piece.lo]
                self.memory.bytes[offset : offset + len(part)] = np.frombuffer(bytes(part), np.uint8)
            at += piece.hi - piece.lo
        if at != len(made.stream):
            raise Missed(f"a stream of {len(made.stream)} bytes, not {at}", "KVP-STG-ORDER")

    def end(self, done: Frame, size: int) -> None:
        """Acknowledge Done."""
        self.reply(done, "DoneAck")

    def expected(self, made: Request, moved: list[moving.Piece], seed: str) -> None:
        """Add what a request moves to the image of what this memory must hold from now on."""
        here = self.side(made)
        for piece in moved:
            for _, offset, lo, hi in moving.spans(here, piece.group, piece):
                held = moving.carried(piece, seed, lo, hi)
                self.image[offset : offset + hi - lo] = held

    def differs(self) -> str:
        """The difference of the memory from what it must hold, canaries included; empty if there is none."""
        assert self.memory is not None
        wrong = np.flatnonzero(self.memory.bytes != self.image)
        if not wrong.size:
            return ""
        at = int(wrong[0])
        return f"{wrong.size} bytes differ, the first at {at}: {self._where(at)}"

    def _where(self, at: int) -> str:
        """The place of a byte, in words."""
        for columns in self.columns:
            for k, begin in enumerate(int(offset) for offset in columns["offset"]):
                item = int(columns["item_stride"][k])
                if begin <= at < begin + item * int(columns["items"]):
                    number, rest = divmod(at - begin, item)
                    return f"group {columns['group']}, column {k}, item {number}, byte {rest} of it"
        return "between columns"

    def close(self) -> None:
        """Say Goodbye, and free the memory."""
        super().close()
        for memory in (self.memory, self.spare, *self.old):
            if memory is not None:
                memory.close()
        self.memory = self.spare = None
        self.old.clear()

    @property
    def pid(self) -> int:
        """Of the suite."""
        return os.getpid()


def _feature(name: str) -> int:
    return ENUMS["Feature"].values[name]
