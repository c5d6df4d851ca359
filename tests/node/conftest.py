"""What tests of several parts of the node begin with."""

from collections.abc import Iterator

import pytest

from tests.node.stages import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.source.close()
    made.sink.close()
