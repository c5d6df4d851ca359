"""Plans between many replicas: equal geometries are planned once."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from kvproto.planning.geometry import Geometry, digest, encode_geometry
from kvproto.planning.plan import Plan, plan

__all__ = ["Planner"]


class Planner:
    """Keeps plans by all that they depend on: both geometries, the ordinal of the sink replica, and the features.

    A replica that comes or goes changes no plan between others.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Geometry, bytes]] = {}
        self._plans: dict[tuple[bytes, bytes, int, frozenset[int]], Plan] = {}

    def plan(self, source: Geometry, sink: Geometry, features: Collection[int] = ()) -> Plan:
        """What `plan.plan` returns, made once for equal arguments; errors are raised each time."""
        key = self._key(source), self._key(sink), sink.replica, frozenset(features)
        made = self._plans.get(key)
        if made is None:
            made = self._plans[key] = plan(source, sink, features)
        return made

    def _key(self, geometry: Geometry) -> bytes:
        """Digest of a geometry without its replica, kept by identity, as geometries never change."""
        held = self._keys.get(id(geometry))
        if held is None:
            key = digest(encode_geometry(attrs.evolve(geometry, replica=0)))
            held = self._keys[id(geometry)] = geometry, key
        return held[1]
