"""Shared parts of the adapters of engines, which know none of the engines by name."""

import sys
from importlib.util import find_spec

from kvproto.distributions import check_versions

check_versions("kvproto-engines")


def check_engine(engine: str, distribution: str) -> None:
    """Raise ModuleNotFoundError, which says what to do, unless the package of an adapter's engine is installed."""
    if sys.modules.get(engine) is None and find_spec(engine) is None:
        text = f"{distribution} runs inside of {engine}, which this environment lacks: install both into one"
        raise ModuleNotFoundError(text, name=engine)
