"""Items of caches: a table of their kinds, which all other code asks for a property, and the axes of their rows."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from kvproto.wire.enums import ItemKind
from kvproto.wire.messages import Group


@attrs.frozen(kw_only=True)
class Kind:
    """Properties of one kind of items."""

    has_memory: bool = True
    """Whether items lie in a registered pool, so that Register has columns of the group and grants name items."""
    paged: bool = False
    """Whether a request has as many items as its tokens fill, which may be dealt over ranks."""
    wraps: bool = False
    """Whether a request's one item is a ring that holds its last rows: row = position mod rows."""
    is_state: bool = False
    """Whether a request's one item is the state after one position, which exists once that position is computed."""
    maps_to: frozenset[int]
    """Kinds that the sink's items may have, because their rows stand for the same positions."""


_OF_TOKENS = frozenset({ItemKind.PAGE, ItemKind.RING})

KINDS: dict[int, Kind] = {
    ItemKind.PAGE: Kind(paged=True, maps_to=_OF_TOKENS),
    ItemKind.SLOT: Kind(is_state=True, maps_to=frozenset({ItemKind.SLOT})),
    ItemKind.RING: Kind(wraps=True, maps_to=_OF_TOKENS),
    ItemKind.HANDOFF: Kind(has_memory=False, maps_to=frozenset({ItemKind.HANDOFF})),
}

TOKENS = "tokens"
"""The axis of a group that names none; another, such as "image", is a name of its own (spec/v1/model.md)."""
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
