"""Numbers that pages state and that no vector holds."""

from kvproto.wire import tables
from kvproto.wire.enums import LengthRule


def test_grease_is_what_the_page_says() -> None:
    """KVP-GREASE-SEND: 0x801B to 0xFFFB and 0xF01B to 0xFFF8, every 31st, and major 0xAA."""
    fields, features = tables.GREASE_FIELD_IDS, tables.GREASE_FEATURES
    assert (fields[0], fields[1] - fields[0], fields[-1], len(fields)) == (0x801B, 31, 0xFFFB, 1057)
    assert (features[0], features[1] - features[0], features[-1], len(features)) == (0xF01B, 31, 0xFFF8, 132)
    assert tables.GREASE_MAJOR == 0xAA


def test_rules_by_which_pages_are_found() -> None:
    """Structures of storage say them by number."""
    assert {rule.name: rule.value for rule in LengthRule} == {"PREFIX": 1, "WINDOW": 2, "STATE": 3}
