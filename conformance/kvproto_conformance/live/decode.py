"""Runs of scenarios in which the engine is the sink, and the suite serves it."""

from __future__ import annotations

import itertools
from typing import Any

from kvproto_conformance.live import moving, world
from kvproto_conformance.live.forms import Form
from kvproto_conformance.live.pull import PullSource
from kvproto_conformance.live.scenario import Prompt, Run, handoff, rows_of, shares
from kvproto_conformance.live.source import Asked, Source
from kvproto_conformance.live.staged import StagedSource
from kvproto_conformance.live.wire import free_address
from kvproto_conformance.sections import whole

Json = dict[str, Any]
_numbers = itertools.count(1)


class DecodeRun(Run):
    """An engine that fetches, as scripts drive it."""

    def source(self, ranks: int = 1, **more: Any) -> list[Source]:
        """The ranks of a source replica of the suite, which listen; nobody knows of them yet."""
        number = next(_numbers)
        keyed, folder = self.live.key[3], self.live.folder.name
        addresses = {r: free_address() if keyed else f"ipc://{folder}/s{number}-{r}" for r in range(ranks)}
        if keyed:
            more.setdefault("keys", self.live.keys)
        more.setdefault("geometry", world.mirror(self.live.geometry, ranks))
        more.setdefault("transport", self.transport)
        kind = StagedSource if self.transport == "NIXL" else PullSource if "PULL" in more.get("offered", ()) else Source
        made = [kind(addresses[r], name=f"suite-{number}", rank=r, endpoints=addresses, **more) for r in addresses]
        self.peers += made
        return made

    def connect(self, source: Source, op: str = "connect") -> Source:
        """Let the engine know where the suite listens, to fetch or to `watch`."""
        key: Json = {"key": self.live.keys.public.decode()} if self.live.key[3] else {}
        self.engine.ask(op, engine=source.name, address=source.endpoints[source.rank], **key)
        return source

    def connected(self, **more: Any) -> Source:
        """The only rank of a source, of which the engine knows."""
        return self.connect(self.source(**more)[0])

    def ready(self, ranks: int = 1, **more: Any) -> list[Source]:
        """Ranks of the suite whose sessions with the engine are ready."""
        made = self.source(ranks, **more)
        self.connect(made[0])
        for each in made:  # the second rank is greeted when the first has described itself
            each.welcome()
            each.describe()
        for each in made:
            each.registered()
        return made

    def one(self, **more: Any) -> Source:
        """The only rank of such a source."""
        return self.ready(**more)[0]

    def fetch(self, source: Source, prompt: Prompt, deadline: int = 60_000, first: int = 0, **more: bool) -> None:
        """Let the engine fetch a request; with `intent` it names pages when they are of use, with `spans` in pieces."""
        self.engine.ask("fetch", id=prompt.id, key=prompt.key, engine=source.name, deadline=deadline,
                        tokens=prompt.tokens, first=first, **more)  # fmt: skip

    def fetched(self, source: Source) -> Prompt:
        """A request that the engine is to fetch."""
        prompt = self.prompt()
        self.fetch(source, prompt)
        return prompt

    def fetching(self, **more: Any) -> tuple[Source, Prompt]:
        """A source that is ready, and a request that the engine is to fetch from it."""
        source = self.one(**more)
        return source, self.fetched(source)

    def begun(self, **more: Any) -> tuple[Source, Prompt, Asked]:
        """A fetch that the source has accepted."""
        source, prompt = self.fetching(**more)
        return source, prompt, self.asked(source, prompt)

    def asked(self, source: Source, prompt: Prompt, state: str = "READY") -> Asked:
        """The engine's Transfer of a request, checked and accepted."""
        return self.accepted(source, source.asked(), prompt, state)

    def accepted(self, source: Source, found: Asked, prompt: Prompt, state: str = "READY") -> Asked:
        """A Transfer that has come, checked and accepted as that of a request."""
        content = world.content(prompt.tokens, prompt.axes)
        fields = found.frame.fields
        self.check("content digest", fields["content"] == content, fields["content"], "KVP-TKT-CONTENT")
        self.check("ticket", fields["ticket"] == prompt.key, "another ticket", "KVP-TKT-BIND")
        states = {grant["state_after"] for grant in fields["grants"] if "state_after" in grant}
        self.check("states", states <= {str(len(prompt.tokens))}, f"after {states}", "KVP-GRANT-STATE")
        source.accept(found, state)
        return found

    def handed(self, source: Source, prompt: Prompt) -> dict[str, str]:
        """Hand-off data of Done, by the engine's group id, in hex."""
        stated = handoff(self.live.geometry, prompt)
        groups = {g["id"]: g for g in source.theirs["groups"]}
        routed = [groups[r["group"]] for r in source.routes() if not world.has_memory(groups[r["group"]])]
        return {g["id"]: "".join(stated[g["name"]][p["name"]] for p in g["parts"]) for g in routed}

    def deliver(self, source: Source, asked: Asked, prompt: Prompt) -> None:
        """All bytes, Done and DoneAck."""
        source.move(asked, prompt.seed)
        done = source.done(asked, self.handed(source, prompt), prompt.seed)
        source.acknowledged(done)

    def delivered(self, source: Source, asked: Asked, prompt: Prompt) -> None:
        """All bytes to DoneAck, and every check of what the engine then has."""
        self.deliver(source, asked, prompt)
        self.arrived(prompt)

    def state(self, prompt: Prompt, seconds: float = 5.0) -> Json:
        """The state of a fetch, as the engine reports it."""
        return self.engine.ask("wait", id=prompt.id, seconds=seconds)

    def arrived(self, prompt: Prompt, first: int = 0) -> None:
        """Check that the engine has a request, and that its attention reads what was sent."""
        found = self.state(prompt)
        self.check("fetch arrived", found["state"] == "arrived", str(found), "KVP-TRN-SET")
        if found["state"] != "arrived":
            return
        wanted = handoff(self.live.geometry, prompt)
        self.check("hand-off", found["handoff"] == wanted, f"{found['handoff']}, not {wanted}", "KVP-HND-GROUPS")
        wrong = self.wrong(prompt, first)
        self.check("every byte", not wrong, wrong, "KVP-TRN-SET")
        self.engine.ask("release", id=prompt.id)

    def wrong(self, prompt: Prompt, first: int = 0) -> str:
        """The first row that the engine's attention reads otherwise than it was sent; empty if there is none."""
        for group, share in shares(self.live.geometry):
            rows = rows_of(group, len(prompt.tokens))
            begin = 0 if group["kind"] == "SLOT" else -(-first // int(group["tokens_per_row"]))
            rows = range(max(rows.start, begin), rows.stop)
            for layer in share["layers"] if rows else ():
                for part in whole(group["parts"]):
                    width = int(part["lanes"]) * int(part["lane_bytes"])
                    form = self.form(group, part["name"])
                    wanted = moving.content(
                        prompt.seed, int(group["model"]), int(layer), part["name"], rows, 0, width, form
                    )
                    found = self.engine.ask("read", id=prompt.id, group=group["name"], layer=int(layer),
                                            part=part["name"], first=rows.start, count=len(rows))["data"]  # fmt: skip
                    for row, held in zip(rows, wanted, strict=True):
                        at = (row - rows.start) * width * 2
                        if found[at : at + width * 2] != held.tobytes().hex():
                            return f"{group['name']}, layer {layer}, part {part['name']}, row {row}"
        return ""

    def form(self, group: Json, part: str) -> Form | None:
        """The form of a part of the engine that the suite's last source converts; None if it states no conversion."""
        sources = [peer for peer in self.peers if isinstance(peer, Source)]
        homes = [home for home in sources[-1].geometry["groups"] if home["name"] == group["name"]]
        return Form.of(homes[0], group, part)

    def lost(self, prompt: Prompt, *codes: str, seconds: float = 5.0, free: bool = True) -> None:
        """Check that the engine has given a fetch up by one of these codes."""
        found = self.state(prompt, seconds)
        good = found["state"] == "lost" and found["code"] in codes
        self.check(f"fetch lost by {' or '.join(codes)}", good, str(found), "KVP-SES-LOST")
        if free and self.check("pages are free", bool(found.get("free")), str(found), "KVP-END-REUSE"):
            self.engine.ask("release", id=prompt.id)

    def hand_over(self, sources: list[Source], prompt: Prompt | None = None, first: int = 0) -> None:
        """One whole transfer, with every check."""
        prompt = prompt or self.prompt()
        self.fetch(sources[0], prompt, first=first)
        asked = [self.asked(source, prompt) for source in sources]
        for source, each in zip(sources, asked, strict=True):
            self.deliver(source, each, prompt)
        self.arrived(prompt, first)

    def serve_fresh(self) -> None:
        """One whole request with a source that the engine has not met."""
        self.hand_over(self.ready())

    def leave(self) -> None:
        """Close all peers, and let the engine forget them, and what it has fetched."""
        for id in sorted(self.engine.held):
            if self.engine.ask("wait", id=id, seconds=0.0)["state"] == "waiting":
                self.engine.ask("abort", id=id)
            if self.engine.ask("wait", id=id, seconds=0.1).get("free"):
                self.engine.ask("release", id=id)
        super().leave()
        for peer in self.peers:
            if isinstance(peer, Source) and peer.rank == min(peer.endpoints):
                self.engine.ask("disconnect", engine=peer.name)
