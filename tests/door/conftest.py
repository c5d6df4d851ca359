"""What tests of the door may do without."""

import pytest

import kvproto.net.allow_list
import kvproto.net.limits


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow-lists are looked at in every turn, rather than each second."""
    monkeypatch.setattr(kvproto.net.allow_list, "LIST_CHECK", 0.0)
    monkeypatch.setattr(kvproto.net.limits, "LIST_CHECK", 0.0)
