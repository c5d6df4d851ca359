"""Properties of the kinds of items, as a table: all other code asks for a property, never for a kind."""

import attrs

from kvproto.wire.enums import ItemKind


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


_TOKENS = frozenset({ItemKind.PAGE, ItemKind.RING})

KINDS: dict[int, Kind] = {
    ItemKind.PAGE: Kind(paged=True, maps_to=_TOKENS),
    ItemKind.SLOT: Kind(is_state=True, maps_to=frozenset({ItemKind.SLOT})),
    ItemKind.RING: Kind(wraps=True, maps_to=_TOKENS),
    ItemKind.HANDOFF: Kind(has_memory=False, maps_to=frozenset({ItemKind.HANDOFF})),
}
