"""Cases of which `make test` runs some and `make test-thorough` the rest."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def rest(*cases: Any) -> list[Any]:
    """Cases, each a value or a tuple of values, that are thorough: `make test` has others of their kind."""
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.thorough) for case in cases]


def sampled(*values: Iterable[Any], every: int) -> list[Any]:
    """Every choice of these values, which are equal in kind; all but each nth are thorough.

    Those that stay lie on diagonals: each value is among them where the others have at least `every` choices.
    """
    cases = []
    for choice in product(*map(enumerate, values)):
        marks = [pytest.mark.thorough] if sum(n for n, _ in choice) % every else []
        cases.append(pytest.param(*(value for _, value in choice), marks=marks))
    return cases
