"""The role, level and extensions that an implementation may claim, and which suites each claim entails."""

from __future__ import annotations

import json
from typing import Any

import attrs

from kvproto_conformance.data import REGISTRY

LEVELS = {
    "L1": "codec: bytes and fields, and what is refused",
    "L2": "plan: who sends which bytes where",
    "L3": "session: a live engine over ZeroMQ",
    "L4": "robust: the same under faults",
}
ROLES = {
    "reader": "reads frames and writes none",
    "codec": "reads and writes frames",
    "planner": "reads and writes Descriptions, and plans",
    "router": "reads and writes tickets",
    "source": "prefill: has the cache and sends it",
    "sink": "decode: takes the cache",
    "both": "source and sink",
}
HIGHEST = {"reader": "L1", "codec": "L1", "router": "L1", "planner": "L2"}
"""The highest level of a role, if that is not L4."""
PARTIAL = ("reader", "codec")
"""Roles that may be claimed for some messages only."""
_FACTS: dict[str, Any] = json.loads(REGISTRY.read_text(encoding="utf-8"))
_PROFILES: dict[str, Any] = _FACTS["profile"]
EXTENSIONS = {name: row["doc"] for name, row in _PROFILES.items() if f"--extension {name}" in row["check"]} | {
    "sleep": "Memory that is taken back for a while, of live engines.",
    "large": "Copies of a gigabyte, of live engines that send.",
}
"""Extensions that suites check, by the name of their profile, and what engines need for some scenarios."""
STRUCT_OF = {"planner": "Geometry", "router": "Ticket"}
"""Roles whose codec covers one struct."""

_SIDES = frozenset({"source", "sink", "both"})
_SOURCES = frozenset({"source", "both"})
_SINKS = frozenset({"sink", "both"})


@attrs.frozen
class Suite:
    """Cases of one kind."""

    level: str
    roles: frozenset[str]
    says: str
    extension: str = ""


SUITES = {
    "codec": Suite("L1", frozenset(ROLES), "bytes and fields"),
    "tickets": Suite("L1", _SIDES | {"router"}, "the JSON form of tickets"),
    "writing": Suite("L1", frozenset(ROLES) - {"reader", "router", "planner"}, "what no writer may write"),
    "json": Suite("L1", frozenset(ROLES) - {"reader", "router"}, "the JSON form of everything else", "json"),
    "streams": Suite("L1", frozenset(ROLES), "frames in a stream, cut anywhere", "streams"),
    "negotiation": Suite("L2", _SOURCES, "version and features of a session"),
    "deal": Suite("L2", _SIDES | {"planner"}, "which rank stores which token, and where", "deals"),
    "plan": Suite("L2", _SIDES | {"planner"}, "who sends what to whom"),
    "lowering": Suite("L2", _SIDES, "which bytes go where"),
    "late": Suite("L2", _SOURCES, "windows that begin late"),
    "merge": Suite("L2", _SIDES, "attention over shares made one", "merge"),
    "verify": Suite("L2", _SIDES, "checksums", "verify"),
    "stream": Suite("L2", _SIDES, "the order in which bytes are packed", "staged"),
    "convert": Suite("L2", _SIDES, "bytes in another form", "conversion"),
    "inline": Suite("L2", _SINKS, "Data under credit", "inline"),
    "session": Suite("L3", _SIDES, "a live engine, from Hello to Goodbye, every byte by coordinate"),
    "robust": Suite("L4", _SIDES, "the same beside peers that misbehave"),
}
"""By name, in the order in which they run."""

_EXTENSION_OF = {feature: name for name, row in _PROFILES.items() for feature in row.get("features", ())}


def extensions_of(suite: str, features: list[str]) -> frozenset[str]:
    """The extensions that a case needs: those of its suite, and of the features that it plans with."""
    own = {SUITES[suite].extension} - {""}
    return frozenset(own | {_EXTENSION_OF[name] for name in features if name in _EXTENSION_OF})


def extensions_with(name: str) -> frozenset[str]:
    """The extensions that have a message or struct, if the core does not: a claim of any of them reads it."""
    return frozenset(_FACTS["profiles"].get(name, ())) & EXTENSIONS.keys()


@attrs.frozen
class Claim:
    """The claim of a testee, by its own word."""

    role: str
    level: str
    extensions: frozenset[str] = frozenset()
    messages: frozenset[str] = frozenset()
    """The messages and structs that it reads, unless it reads all."""
    minor: int = 0
    """The minor version of the specification that it was made for."""

    def asks(self, suite: str, needs: frozenset[str], either: frozenset[str], about: str) -> bool:
        """Whether a case counts: by its suite, what it `needs`, one of `either`, and what it is `about`, if any."""
        asked = SUITES[suite]
        return (
            self.role in asked.roles
            and asked.level <= self.level
            and needs <= self.extensions
            and (not either or bool(either & self.extensions) or about in self.messages)
            and (suite != "codec" or about == STRUCT_OF.get(self.role, about))
            and (suite != "codec" or not self.messages or about in self.messages | {""})
        )

    def __str__(self) -> str:
        words = [self.role, self.level, *sorted(self.extensions)]
        some = f" of {', '.join(sorted(self.messages))}" if self.messages else ""
        return " · ".join(words) + some
