"""Settings that every adapter has, read from what a user said, each mistake named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import KvprotoError, LocalError, Options, Seed, Sink, Source, Ticket, read_sources
from kvproto.errors import ErrorCode
from kvproto.probes import Probes
from kvproto.wire.plain import read_file
from kvproto_discovery import FoundSources, Registration, read_found
from kvproto_discovery.places import SCHEMES, etcd_of

__all__ = ["Places", "Presence", "checked", "kept", "of_environment", "of_replica", "probes_of", "refuse"]

_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]*):(\d{1,5})")
REPLICA = 256
"""Ports between the probes of two replicas; ranks of one follow each other."""
Places = str | Mapping[int, str]
"""Addresses of ranks: one text with "{rank}" and "{replica}" where they differ, or an address for each rank."""


def checked(where: str, cls: type[Any], given: Any, prefill: bool, decode: bool, **usual: Any) -> dict[str, Any]:
    """The arguments of a class of settings; those that every adapter has are looked at, but for names.

    `usual` are options of kvproto that hold unless the user says otherwise. Raises LocalError naming the setting that
    is unknown, missing or wrong; `where` is what the user calls all of them.
    """
    fields = {field.name: field.default for field in attrs.fields(cls)}
    if not isinstance(given, Mapping) or (unknown := sorted(given.keys() - fields.keys())):
        found = repr(unknown[0]) if isinstance(given, Mapping) else type(given).__name__
        raise refuse(where, "", f"settings of {list(fields)}", found, "correct its name")
    made = dict(given)
    for name in ("listen", "advertise"):
        if made.get(name) is not None or (prefill and name == "listen"):
            made[name] = _places(where, name, made.get(name))
    if decode and not made.get("sources"):
        advice = 'such as {"prefill": "ipc:///run/kv/prefill-0"}, by the names that requests say'
        raise refuse(where, "sources", "where prefill engines listen, as this engine decodes", "none", advice)
    seconds = made.get("deadline", fields["deadline"])
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        advice = f"leave it out for {fields['deadline']:g}"
        raise refuse(where, "deadline", "seconds above 0", repr(seconds), advice)
    if (place := made.get("probes")) is not None and not _PLACE.fullmatch(str(place)):
        raise refuse(where, "probes", "HOST:PORT", repr(place), 'such as "0.0.0.0:9400"; leave it out to have none')
    if not isinstance(description := made.get("description", ""), str):
        raise refuse(where, "description", "the path of a file", repr(description), "leave it out to have none")
    try:
        made["options"] = Options(**{**usual, **made.get("options", {})})
    except TypeError as error:
        raise refuse(where, "options", "names of kvproto.Options", str(error), "correct it") from None
    made["sources"] = _sources(where, made.get("sources", {}), made.get("source_keys"))
    if made.get("register") is not None:
        try:
            made["register"] = etcd_of(str(made["register"]))
        except LocalError as error:
            raise error.at(f"{where}.register") from None
    return made


def _places(where: str, name: str, given: Any) -> Places:
    """An address, or one for each rank; raises LocalError."""
    if isinstance(given, str) and given:
        return given
    try:
        made = {int(rank): address for rank, address in given.items()}
    except (AttributeError, TypeError, ValueError):
        made = {}
    if not made or not all(isinstance(address, str) for address in made.values()):
        advice = 'such as "ipc:///run/kv/prefill-{rank}", or {"0": "tcp://a:7100", "1": "tcp://b:7100"} by rank'
        raise refuse(where, name, "an address, as this engine prefills", str(given), advice)
    return made


def of_replica(places: Places | None, replica: int) -> Places | None:
    """The addresses of the ranks of one replica, of what a setting says of all of them."""
    if places is None or isinstance(places, str):
        return places and places.replace("{replica}", str(replica))
    return {rank: address.replace("{replica}", str(replica)) for rank, address in places.items()}


def probes_of(place: str | None, replica: int, *ranks: Source | Sink) -> Probes | None:
    """Probes of the rank of one process, as the setting `probes` asks for them; raises LocalError."""
    if place is None:
        return None
    host, _, port = place.rpartition(":")
    return Probes(f"{host}:{int(port) + REPLICA * replica + ranks[0].pool.rank}", *ranks)


class Presence:
    """The probes of a rank, its row in a directory, and the sources that it follows there, until `close`."""

    def __init__(self, settings: Any, replica: int, replicas: int, source: Source | None, sink: Sink | None) -> None:
        """As the settings of an adapter ask for them; `replicas` share the engine's name. Raises LocalError."""
        found, doors = settings.sources, [door for door in (source, sink) if door is not None]
        self._made: list[Probes | Registration | FoundSources] = []
        if isinstance(found, FoundSources) and sink is not None:
            found.follow(sink)
            self._made.append(found)
        if settings.register is not None and source is not None:
            self._made.append(Registration(settings.register, source, replicas))
        if (probes := probes_of(settings.probes, replica, *doors)) is not None:
            self._made.append(probes)

    def close(self) -> None:
        """Leave the directory, and answer no probes; the rank stays open."""
        for made in self._made:
            made.close()


def _sources(where: str, given: Any, keys: Any) -> Mapping[tuple[str, int], Seed]:
    """By engine and replica; an address, or a mapping with its key; or found in a directory, with one of these keys."""
    if isinstance(given, str) and given.startswith(SCHEMES):
        try:
            return read_found(given, keys)
        except LocalError as error:
            raise error.at(
                f"{where}.source_keys" if error.path.startswith("source_keys") else f"{where}.sources"
            ) from None
    if keys is not None:
        advice = "state each key beside its address, or let DNS or etcd name the sources"
        raise refuse(where, "source_keys", "sources that a directory names", repr(given), advice)
    if isinstance(given, str):
        return dict(read_sources(given))
    if not isinstance(given, Mapping):
        raise refuse(where, "sources", "a mapping of names to addresses, or a file", type(given).__name__, "correct it")
    found = {}
    for name, seed in given.items():
        engine, _, replica = name.partition("/")
        try:
            found[engine, int(replica or 0)] = Seed(seed) if isinstance(seed, str) else Seed(**seed)
        except (TypeError, ValueError) as error:
            mine = 'an address, or {"address": ..., "key": ...}, by "name" or "name/replica"'
            raise refuse(where, f"sources[{name!r}]", mine, str(error), "correct it") from None
    return found


def of_environment(variable: str, such_as: str) -> Any:
    """The settings in an environment variable: a JSON object, or its path. Raises LocalError if it says neither."""
    text, mine = os.environ.get(variable, ""), "a JSON object, or the path of one"
    if not text:
        raise refuse(variable, "", mine, "nothing", f"such as {such_as}")
    try:
        return json.loads(text if text.lstrip().startswith("{") else read_file(text))
    except (OSError, ValueError, KvprotoError) as error:
        raise refuse(variable, "", mine, str(error), "correct it") from None


def kept(ticket: Ticket, seconds: float) -> Ticket:
    """The ticket of a request whose pages are kept for `seconds` at most, whatever the client that made it has said."""
    return attrs.evolve(ticket, deadline=min(ticket.deadline, max(int(seconds * 1000), 1)))


def refuse(where: str, path: str, mine: str, yours: str, advice: str) -> LocalError:
    """An error of a setting."""
    return LocalError(ErrorCode.OUT_OF_RANGE, f"{where}.{path}" if path else where, mine, yours, advice)
