"""The axis that a group's rows lie along: the tokens of the prompt, or another such as "image" (spec/v1/model.md)."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvproto.wire.messages import Group

TOKENS = "tokens"
"""The axis of a group that names none."""
NO_AXES: Mapping[str, int] = MappingProxyType({})
"""The axes of a request that consists of tokens alone."""


def axis_of(group: Group) -> str:
    """The name of the axis that a group's rows lie along."""
    return group.axis or TOKENS


def length_of(group: Group, tokens: int, axes: Mapping[str, int]) -> int:
    """Positions on a group's axis in a request of `tokens` tokens and other `axes`; 0 on an axis that is not named."""
    return tokens if group.axis in (None, TOKENS) else axes.get(group.axis, 0)


def lengths_of(groups: Iterable[Group], tokens: int, axes: Mapping[str, int]) -> dict[int, int]:
    """Lengths of several groups, as `length_of` has them, by group id."""
    return {group.id: length_of(group, tokens, axes) for group in groups}
