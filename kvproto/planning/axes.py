"""What rows stand for positions of: the tokens of the prompt, or an axis of their own (spec/v1/model.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvproto.wire.messages import Group

__all__ = ["NO_AXES", "TOKENS", "axis_of", "length_of"]

TOKENS = "tokens"
"""The axis of a group that names none."""
NO_AXES: Mapping[str, int] = MappingProxyType({})
"""Of a request that is tokens alone."""


def axis_of(group: Group) -> str:
    """The axis of a group's rows."""
    return group.axis or TOKENS


def length_of(group: Group, tokens: int, axes: Mapping[str, int]) -> int:
    """How long a group's axis is, of a request of so many tokens and other axes; what is not named is empty."""
    return tokens if axis_of(group) == TOKENS else axes.get(axis_of(group), 0)
