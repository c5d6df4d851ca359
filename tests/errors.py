"""The errors that a test expects, by their fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], match: str | None = None, **fields: Any
) -> Iterator[Any]:
    """As `pytest.raises` does, an error of this kind, whose `code`, `path`, `mine`, `yours` and `advice` are these."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in fields} == fields
