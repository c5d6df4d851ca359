"""Faults that can be built into the engines, to check that violations are found."""

import attrs

from .plan import Weather

__all__ = ["BREAKS", "Break"]


@attrs.frozen
class Break:
    """One fault: what it is, where it shows, and the violations by which it is found."""

    what: str
    kinds: frozenset[str]
    transport: str = "shm"
    weather: Weather | None = None
    """Weather instead of the seed's."""
    patience: float | None = None
    """Seconds after the faults within which everything must have ended, instead of the usual number."""


_LATE = Weather(delay=0.5)
BREAKS = {
    "late write": Break(
        "a source says PROVEN, and writes on", frozenset({"write after proof", "stray write"}), "slow", _LATE
    ),
    "no proof": Break("a sink uses pages again once it has asked for an abort",
                      frozenset({"stray write", "wrong byte"}), "slow", _LATE),
    "counted twice": Break("a decode engine takes an arrival twice", frozenset({"counted twice"})),
    "wrong byte": Break("a prefill engine has a wrong byte in a page", frozenset({"wrong byte"})),
    "write after arrival": Break("a source that is done writes a layer again", frozenset({"write after arrival"}),
                                 "slow"),
    "another's page": Break("a source takes one decode engine's memory for the other's", frozenset({"another's page"}),
                            "slow"),
    "shorter": Break("an engine does not seal its memory, and shortens it", frozenset({"shorter"})),
    "hang": Break("a decode engine overhears that requests have arrived", frozenset({"hang"}), patience=1.0),
    "freed too early": Break("a prefill engine uses pages again while they are read", frozenset({"freed too early"}),
                             "slow"),
    "leak": Break("a decode engine loses a descriptor with each request", frozenset({"leak"})),
    "stale": Break("a prefill engine tells nobody of the pages that it keeps", frozenset({"stale"}), patience=1.0),
    "crash": Break("a prefill engine raises", frozenset({"crash"})),
}  # fmt: skip
