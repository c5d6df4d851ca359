"""What tests of the door may do without."""

import pytest

import kvproto.net.allow_list


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow-lists are looked at in every turn; whose key is gone from one is told for a second, as ever."""
    monkeypatch.setattr(kvproto.net.allow_list, "LIST_CHECK", 0.0)
