"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import Options, Seed
from kvproto_discovery import Etcd
from kvproto_engines.settings import Places, checked, refuse

__all__ = ["WHERE", "Settings"]

WHERE = "kv_connector_extra_config"


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one engine.

    Fields:
        name: Of the engine, the same on all its ranks; it stands in tickets.
        listen: Prefill: where each rank listens, with "{rank}" where ranks differ and "{replica}" where replicas do; or
            a mapping by rank.
        advertise: Prefill: likewise, where decode engines reach the ranks if they do not at `listen`.
        sources: Decode: where the prefill engines listen, by name (replica 0) or "name/replica", or a file of them; or
            "dns:..." or "etcd:...", as `kvproto_discovery.directory_of` reads it.
        source_keys: Decode, with these: a file of the public keys that sources may have, one a line.
        register: Prefill: "etcd:...", in which each rank keeps a row of its own for as long as it takes requests.
        options: What `kvproto.Options` takes.
        deadline: Seconds for which a prefill engine keeps a request's pages for whoever has its ticket, and the most
            for which a decode engine waits for them.
        probes: HOST:PORT of the probes of rank 0 of replica 0; rank r of replica n has the port 256 n + r further on.
        description: A file into which the engine writes what it states, with "{replica}" where replicas differ.
        weights: Names the weights, where both engines' folders do not: compared before any page moves.
        convert: Whether rows may be converted between BF16 and FP8, where the other engine's are of the other type.
        pages: "strides", "whole", or "auto": as strides wherever these say where each byte of a page lies.
    """

    name: str
    listen: Places = ""
    advertise: Places | None = None
    sources: Mapping[tuple[str, int], Seed] = {}
    source_keys: str | None = None
    register: Etcd | None = None
    options: Options = attrs.field(factory=Options)
    deadline: float = 60.0
    probes: str | None = None
    description: str | None = None
    weights: str | None = None
    convert: bool = False
    pages: str = "auto"

    @classmethod
    def read(cls, given: Mapping[str, Any], engine_id: str, producer: bool, consumer: bool) -> Settings:
        """Raises LocalError naming the setting that is unknown, missing or wrong."""
        made = checked(WHERE, cls, {"name": engine_id, **given}, producer, consumer)
        if made.get("pages", "auto") not in ("auto", "strides", "whole"):
            raise refuse(WHERE, "pages", '"auto", "strides" or "whole"', repr(made["pages"]), "leave it out")
        if not isinstance(made.get("convert", False), bool):
            raise refuse(WHERE, "convert", "true or false", repr(made["convert"]), "leave it out to convert nothing")
        return cls(**made)
