"""What a user says of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import LocalError, Options, Seed, read_sources
from kvproto.errors import ErrorCode

__all__ = ["Settings", "refuse"]


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one engine.

    Fields:
        name: Of the engine, the same on all its ranks; it stands in tickets.
        listen: Prefill: where each rank listens, with "{rank}" where ranks differ and "{replica}" where replicas do.
        sources: Decode: where the prefill engines listen, by name (replica 0) or "name/replica", or a file of them.
        options: What `kvproto.Options` takes.
        deadline: Seconds for which a prefill engine keeps a request's pages for whoever has its ticket.
        weights: Names the weights, where both engines' folders do not: compared before any page moves.
        pages: "strides", "whole", or "auto": as strides wherever these say where each byte of a page lies.
    """

    name: str
    listen: str | None = None
    sources: Mapping[tuple[str, int], Seed] = {}
    options: Options = attrs.field(factory=Options)
    deadline: float = 60.0
    weights: str | None = None
    pages: str = "auto"

    @classmethod
    def read(cls, given: Mapping[str, Any], engine_id: str, producer: bool, consumer: bool) -> Settings:
        """Raises LocalError naming the setting that is unknown, missing or wrong."""
        known = [field.name for field in attrs.fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise refuse("", f"settings of {known}", repr(unknown[0]), "correct its name")
        made = {"name": engine_id, **given}
        if producer and not isinstance(made.get("listen"), str):
            raise refuse(
                "listen", "an address, as this engine prefills", "none", 'such as "ipc:///run/kv/prefill-{rank}"'
            )
        if consumer and not made.get("sources"):
            advice = 'such as {"prefill": "ipc:///run/kv/prefill-0"}'
            raise refuse("sources", "where prefill engines listen, as this engine decodes", "none", advice)
        if made.get("pages", "auto") not in ("auto", "strides", "whole"):
            raise refuse("pages", '"auto", "strides" or "whole"', repr(made["pages"]), "leave it out")
        deadline = made.get("deadline", 60.0)
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or deadline <= 0:
            raise refuse("deadline", "seconds above 0", repr(deadline), "leave it out for 60")
        options = made.get("options", {})
        if not isinstance(options, Mapping):
            raise refuse("options", "a mapping of the names of kvproto.Options", type(options).__name__, "correct it")
        try:
            made["options"] = Options(**options)
        except TypeError as error:
            raise refuse("options", "names of kvproto.Options", str(error), "correct it") from None
        made["sources"] = _sources(made.get("sources", {}))
        return cls(**made)


def _sources(given: Any) -> dict[tuple[str, int], Seed]:
    """By engine and replica; an address, or a mapping with its key."""
    if isinstance(given, str):
        return dict(read_sources(given))
    if not isinstance(given, Mapping):
        raise refuse("sources", "a mapping of names to addresses, or a file", type(given).__name__, "correct it")
    found = {}
    for name, seed in given.items():
        engine, _, replica = name.partition("/")
        try:
            place = engine, int(replica or 0)
            found[place] = Seed(seed) if isinstance(seed, str) else Seed(**seed)
        except (TypeError, ValueError) as error:
            mine = 'an address, or {"address": ..., "key": ...}, by "name" or "name/replica"'
            raise refuse(f"sources[{name!r}]", mine, str(error), "correct it") from None
    return found


def refuse(path: str, mine: str, yours: str, advice: str) -> LocalError:
    """An error of a setting."""
    where = f"kv_connector_extra_config.{path}" if path else "kv_connector_extra_config"
    return LocalError(ErrorCode.OUT_OF_RANGE, where, mine, yours, advice)
