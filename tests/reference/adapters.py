"""Two adapters with random weights."""

from pathlib import Path

from kvproto_reference.adapters import Adapters, adapters_of, draw_adapter


def two(folder: Path, target: Path) -> Adapters:
    """Two adapters of a target."""
    return adapters_of({name: draw_adapter(folder / name, target, seed) for seed, name in enumerate(("red", "blue"))})
