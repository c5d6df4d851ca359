"""kvproto's command line, as tests call it."""

import attrs
import pytest

from kvproto.cli.main import main


@attrs.frozen
class Ran:
    """What a command prints, or what it says is wrong if it ends with status 1."""

    _capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: object, status: int = 0) -> str:
        assert main([str(word) for word in words]) == status
        printed = self._capsys.readouterr()
        return printed.err if status == 1 else printed.out
