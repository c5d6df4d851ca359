"""The user's settings of the back end: the environment variable KVPROTO_SGLANG, a JSON object or the path of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import LocalError, Options, Seed, Ticket
from kvproto.errors import ErrorCode
from kvproto_discovery import Etcd, FoundSources
from kvproto_engines.settings import Places, checked, kept, of_environment, of_replica, refuse
from kvproto_sglang.metadata import SETS
from kvproto_sglang.tickets import DEADLINE, Asked, ticket_of

__all__ = ["RELEASES", "VARIABLE", "Settings", "check_release"]

VARIABLE = "KVPROTO_SGLANG"
TICKET_WAIT = 60.0
"""Seconds for which a fetch waits for its prompt; longer than a step, of which the first is the longest."""
RELEASES = ("0.5.23",)
"""Releases of SGLang whose interface this back end was tested with."""


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one engine.

    Fields:
        name: Of the engine, the same on all its ranks. Of a prefill engine what requests call it by: `bootstrap_host`
            and `bootstrap_port` with a colon between, or `bootstrap_host` alone.
        listen: Prefill: where each rank listens, with "{rank}" where ranks differ, and "{replica}" where those do; or a
            mapping by rank.
        advertise: Prefill: likewise, where decode engines reach the ranks if they do not at `listen`.
        sources: Decode: where the prefill engines listen, by name (replica 0) or "name/replica", or a file of them; or
            "dns:..." or "etcd:...", as `kvproto_discovery.directory_of` reads it.
        source_keys: Decode, with these: a file of the public keys that sources may have, one a line.
        register: Prefill: "etcd:...", in which each rank keeps a row of its own for as long as it takes requests.
        options: What `kvproto.Options` takes; `ticket_wait` is 60 s where it does not say otherwise, as SGLang reads a
            prompt's own request between steps.
        deadline: Seconds for which a prefill engine keeps a request's pages for whoever has its room, and the most for
            which a decode engine waits for them.
        metadata: Decode: what prefill engines hand over beside pages, a name of `metadata.SETS`.
        probes: HOST:PORT of the probes of rank 0 of replica 0; rank r of replica n has the port 256 n + r further on.
        description: A file into which the engine writes what it states, with "{replica}" where replicas differ.
        weights: Names the weights, where both engines' folders do not: compared before any page moves.
        convert: Whether rows may be converted between BF16 and FP8, where the other engine's are of the other type.
        facts: What is compared before any page moves, in place of what the engine says of itself.
    """

    name: str = "sglang"
    listen: Places | None = None
    advertise: Places | None = None
    sources: Mapping[tuple[str, int], Seed] = {}
    source_keys: str | None = None
    register: Etcd | None = None
    options: Options = attrs.field(factory=Options)
    deadline: float = DEADLINE
    metadata: str = "all"
    probes: str | None = None
    description: str | None = None
    weights: str | None = None
    convert: bool = False
    facts: Mapping[str, str] | None = None

    @classmethod
    def of_environment(cls, prefill: bool) -> Settings:
        """Raises LocalError naming what is missing or wrong."""
        return cls.read(of_environment(VARIABLE, '{"name": "prefill"}'), prefill)

    @classmethod
    def read(cls, given: Any, prefill: bool) -> Settings:
        """Raises LocalError naming the setting that is unknown, missing or wrong."""
        made = checked(VARIABLE, cls, given, prefill, not prefill, ticket_wait=TICKET_WAIT)
        if prefill and not isinstance(made.get("name"), str):
            mine = "a name, as this engine prefills"
            raise refuse(VARIABLE, "name", mine, str(made.get("name")), 'such as "10.0.0.1:8998", as requests say it')
        if made.get("metadata", "all") not in SETS:
            raise refuse(
                VARIABLE, "metadata", f"one of {sorted(SETS)}", repr(made["metadata"]), 'leave it out for "all"'
            )
        if not isinstance(made.get("convert", False), bool):
            raise refuse(VARIABLE, "convert", "true or false", repr(made["convert"]), "leave it out to convert nothing")
        return cls(**made)

    def places_of(self, replica: int, replicas: int) -> tuple[Places, Places | None]:
        """The addresses at which ranks of a replica listen and are reached; LocalError if all replicas share one."""
        for name, places in (("listen", self.listen), ("advertise", self.advertise)):
            if replicas > 1 and places is not None and "{replica}" not in str(places):
                mine, advice = f"{replicas} replicas with addresses of their own", 'put "{replica}" into it'
                raise refuse(VARIABLE, name, mine, str(places), advice)
        return of_replica(self.listen, replica) or "", of_replica(self.advertise, replica)

    def source_of(self, address: str) -> str:
        """The name of the prefill engine that a request calls by `host:port`; raises LocalError(WRONG_PEER)."""
        names = {name for name, _ in self.sources}
        for name in (address, address.rpartition(":")[0]):
            if name in names:
                return name
        advice = "name it so in `sources`, or call it by the name that is there"
        raise LocalError(ErrorCode.WRONG_PEER, "bootstrap_host", f"one of {sorted(names)}", address, advice)

    def ticket_here(self, request: Any, asked: Asked, replica: int) -> Ticket:
        """The ticket of a request at this prefill engine: the router's, or that of its room.

        Raises LocalError(WRONG_PEER) for a room of another prefill engine, as nobody would come for its pages here.
        """
        host, port = request.bootstrap_host, request.bootstrap_port
        known = self.name in (host, f"{host}:{port}", f"[{host}]:{port}")
        if not (known or asked.ticket is not None or host is None):
            advice = "correct the host or the bootstrap port that the load balancer has, or this engine's `name`"
            raise LocalError(ErrorCode.WRONG_PEER, "bootstrap_host", self.name, f"{host}:{port}", advice)
        return kept(asked.ticket or ticket_of(request.bootstrap_room, self.name, replica, self.deadline), self.deadline)

    def ticket_there(self, room: int, address: str, asked: Asked) -> Ticket:
        """The ticket of a request that this decode engine fetches from the prefill engine at an address."""
        return kept(asked.ticket or ticket_of(room, self.source_of(address), 0, self.deadline), self.deadline)

    def replicas(self, name: str) -> int:
        """Of a prefill engine."""
        if isinstance(self.sources, FoundSources):
            return self.sources.replicas(name)
        return max((replica + 1 for known, replica in self.sources if known == name), default=1)


def check_release(version: str) -> None:
    """Raise LocalError for a release of SGLang whose interface is not known."""
    if version.partition("+")[0] not in RELEASES:
        mine, advice = f"SGLang {' or '.join(RELEASES)}", "install one of them, or a newer kvproto"
        raise refuse(VARIABLE, "", mine, version, advice)
