"""The commands of the page of reviewers' questions, and of the demo's own."""

import re
import shlex
from pathlib import Path

import pytest

from kvproto_reference.demo.arguments import check, parse

ROOT = Path(__file__).parents[2]
PAGE, OF_THE_DEMO = ((ROOT / "docs" / name).read_text() for name in ("asked.md", "demo.md"))


@pytest.mark.parametrize("args", re.findall(r'make demo ARGS="(.*?)"', PAGE + OF_THE_DEMO))
def test_demos_take_their_options(args: str) -> None:
    """As the shell splits what make passes on."""
    check(parse(shlex.split(args)))


def test_files_are_there() -> None:
    named = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", PAGE)
    assert len(named) > 2
    assert all((ROOT / name).is_file() for name in named)
