"""Runs of scenarios in which the engine is the source, and the suite fetches from it."""

from __future__ import annotations

import itertools
import time
from typing import Any

from kvproto_conformance.live import moving, world
from kvproto_conformance.live.forms import dtype_of, values
from kvproto_conformance.live.memory import began, boot_id, holds
from kvproto_conformance.live.pull import PullSink
from kvproto_conformance.live.scenario import Live, Prompt, Run, Scenario, handoff, rows_of, shares
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.staged import StagedSink
from kvproto_conformance.live.watch import Frame
from kvproto_conformance.sections import whole

Json = dict[str, Any]
_numbers = itertools.count(1)
_NOTHING_COMPARED = ("ABORTED", "DEADLINE", "INTERNAL")
"""Codes of what has ended, where no value of one side is wrong for the other."""


class PrefillRun(Run):
    """An engine that computes prompts, as scripts drive it."""

    def __init__(self, live: Live, scenario: Scenario) -> None:
        super().__init__(live, scenario)
        self._nonces: list[str] = []

    def sink(self, ranks: int = 1, rank: int = 0, name: str = "", **more: Any) -> Sink:
        """A sink rank of the suite that has said nothing yet."""
        more.setdefault("geometry", world.mirror(self.live.geometry, ranks))
        more.setdefault("transport", self.transport)
        if self.live.key[3]:
            more.setdefault("keys", self.live.keys._replace(server=self.live.theirs.public))
        kind = StagedSink if self.transport == "NIXL" else PullSink if "PULL" in more.get("offered", ()) else Sink
        made = kind(self.live.address, name=name or self.live.name(next(_numbers)), rank=rank, **more)
        self.peers.append(made)
        return made

    def ready(self, **more: Any) -> Sink:
        """A sink rank whose memory the engine has mapped."""
        made = self.sink(**more).ready()
        self.keep(made)
        process = made.last_heard["Registered"].fields.get("process")
        if process is not None:
            pid, start = int(process["pid"]), int(process["start"])
            own = pid in self.engine.pids and start == began(pid) and process["boot"] == boot_id()
            self.check("process", own, f"Registered names process {pid}, begun at {start}", "KVP-REG-PROCESS")
        return made

    def refused(
        self,
        sink: Sink,
        id: str | None,
        by: str,
        codes: str | tuple[str, ...],
        path: str | None = None,
        clause: str = "",
        sequence: str = "",
    ) -> Frame:
        """Check the message, code and path of a refusal; a Failed under another id is told by `sequence`."""
        wanted = (codes,) if isinstance(codes, str) else codes

        def where(fields: Json) -> bool:
            return id is None or fields.get("request") == id or (by == "Failed" and fields["sequence"] == sequence)

        found = sink.expect(by, where=where, seconds=6.0, clause=clause)
        fields = found.fields
        self.check("code", fields["code"] in wanted, f"{fields['code']} at {fields['path']!r}, not {wanted}", clause)
        if path is not None:
            self.check("path", fields["path"] == path, f"{fields['path']!r}, not {path!r}", "KVP-ERR-REPORT")
        if fields["code"] not in _NOTHING_COMPARED:
            self.check("mine and yours", fields["mine"] or fields["yours"], "both are empty", "KVP-ERR-REPORT")
        if by == "Failed":
            sink.reply(found, "DoneAck")
        return found

    def untouched(self, sink: Sink) -> None:
        """Check that nothing has written the sink's memory."""
        self.check("memory as before", not (text := sink.differs()), text, "KVP-ERR-ALONE")

    def untouched_beyond(self, sink: Sink, made: Request, prompt: Prompt, tokens: int) -> None:
        """Check that of a request nothing but rows below `tokens` is written, or what was there before."""
        before, whole = sink.image.copy(), sink.pieces(made)
        sink.expected(made, [piece for piece in whole if piece.row < tokens], prompt.seed)
        held = sink.memory.bytes if sink.memory is not None else before
        wrong = int(((held != sink.image) & (held != before)).sum())
        sink.image = before
        self.check("nothing beyond", not wrong, f"{wrong} bytes that were not granted", "KVP-INT-WRITE")

    def keep(self, sink: Sink) -> None:
        """Look later whether the engine still holds the sink's memory."""
        if sink.memory is not None and sink.transport == "SHM":
            self._nonces.append(sink.memory.nonce)

    def take(self, prompt: Prompt, deadline: int = 60_000) -> None:
        """Let the engine have a request."""
        self.engine.ask("request", id=prompt.id, key=prompt.key, engine="engine", deadline=deadline,
                        tokens=prompt.tokens)  # fmt: skip

    def fill(self, prompt: Prompt, upto: int | None = None) -> None:
        """Let the engine compute: labelled bytes for every token below `upto`."""
        tokens = len(prompt.tokens) if upto is None else upto
        for group, share in shares(self.live.geometry):
            rows = rows_of(group, tokens)
            for layer in share["layers"]:
                for part in whole(group["parts"]):
                    width = int(part["lanes"]) * int(part["lane_bytes"])
                    data = moving.label(prompt.seed, int(group["model"]), int(layer), part["name"], rows, 0, width)
                    data = values(data, dtype_of(group, part["name"]))
                    self.engine.ask("fill", id=prompt.id, group=group["name"], layer=int(layer), part=part["name"],
                                    first=rows.start, data=data.tobytes().hex())  # fmt: skip

    def compute(self, prompt: Prompt) -> None:
        """Fill all and finish."""
        self.fill(prompt)
        self.finish(prompt)

    def finish(self, prompt: Prompt, finished: bool = False) -> None:
        """Let the engine say that prefill is over."""
        self.engine.ask("finish", id=prompt.id, handoff=handoff(self.live.geometry, prompt), finished=finished)

    def serve(self, prompt: Prompt) -> None:
        """Request, fill and finish."""
        self.take(prompt)
        self.compute(prompt)

    def ask_for(self, sink: Sink, prompt: Prompt) -> Request:
        """Have a sink ask for a request: Transfer to Accepted."""
        made = sink.request(prompt.key, prompt.tokens)
        sink.ask_for(made)
        return made

    def begun(self, **more: Any) -> tuple[Sink, Prompt, Request]:
        """A request that the engine has, and that a sink has asked for."""
        sink, prompt = self.ready(**more), self.prompt()
        self.take(prompt)
        return sink, prompt, self.ask_for(sink, prompt)

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
        size = sum(p.hi - p.lo for p in moved)
        if done.name == "Done":
            self.check("groups", fields["groups"] == routed, str(fields["groups"]), "KVP-TRN-WRITER")
            self.check("bytes", fields["bytes"] == str(size), f"{fields['bytes']}, not {size}", "KVP-HND-GROUPS")
        late = {grant["group"] for grant in made.grants if grant.get("late")}
        begun = {begin["group"] for begin in fields.get("begins") or ()}
        self.check("begins", begun <= late, f"of groups {sorted(begun - late)}", "KVP-GRANT-BEGINS")
        stated = {h["group"]: h["data"] for h in fields["handoff"]}
        wanted = handed(sink, prompt, self.live.geometry)
        self.check("hand-off", stated == wanted, f"{stated}, not {wanted}", "KVP-HND-GROUPS")
        if "VERIFY" in sink.watch.features:
            sums = {str(g): str(v) for g, v in moving.checksums(moved, prompt.seed).items()}
            found = {c["group"]: c["value"] for c in fields.get("checksums", [])}
            self.check("checksums", found == sums, f"{found}, not {sums}", "KVP-VERIFY-SOURCE")
        sink.end(done, size)

    def delivered(self, sink: Sink, made: Request, prompt: Prompt) -> None:
        """Done with every check, and then the end of the request."""
        self.arrived(sink, made, prompt)
        self.over(prompt)

    def check_bytes(self, sink: Sink, made: Request, prompt: Prompt, moved: list[moving.Piece]) -> None:
        """Every byte of the sink's memory, by coordinate, padding and canaries included."""
        if sink.unpacks or sink.transport == "INLINE":
            sink.unpack(made, moved)
        sink.expected(made, moved, prompt.seed)
        self.check("every byte", not (text := sink.differs()), text, "KVP-TRN-ORDER")

    def hand_over(self, sink: Sink, prompt: Prompt | None = None, first: int = 0) -> None:
        """One whole transfer, with every check."""
        prompt = prompt or self.prompt()
        self.serve(prompt)
        made = sink.request(prompt.key, prompt.tokens, prompt.axes, first)
        sink.ask_for(made)
        self.delivered(sink, made, prompt)

    def serve_fresh(self) -> None:
        """One whole request with a sink that the engine has not met."""
        self.hand_over(self.ready())

    def leave(self) -> None:
        """Close all peers, and look whether the engine has let go of them."""
        super().leave()
        for id in sorted(self.engine.held):
            if self.engine.ask("wait", id=id, seconds=0.0)["state"] == "held":
                self.engine.ask("fail", id=id, reason="the scenario is over")
                self.engine.ask("wait", id=id, seconds=0.5)
        end = time.monotonic() + 5.0
        while (held := [n for n in self._nonces if holds(self.engine.pids, n)]) and time.monotonic() < end:
            time.sleep(0.002)
        text = f"{len(held)} regions of peers that are gone"
        self.check("nothing is held", not held, text, "KVP-EPO-UNMAP")


def handed(sink: Sink, prompt: Prompt, geometry: Json) -> dict[str, str]:
    """Hand-off data that Done must have, by the sink's group."""
    stated = handoff(geometry, prompt)
    groups = {g["id"]: g for g in (sink.geometry or {})["groups"]}
    routed = [groups[r["group"]] for r in sink.routes() if not world.has_memory(groups[r["group"]])]
    return {g["id"]: "".join(stated[g["name"]][p["name"]] for p in g["parts"]) for g in routed}
