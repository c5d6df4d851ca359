"""Shorter stories with the same kind of violation: fewer requests and faults, and everything else as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from tests.simulation.running import play
from tests.simulation.story import Ask, Setup, Story


def shrink(story: Story, kind: str, most: int = 200, fails: Callable[[Story], bool] | None = None) -> Story:
    """The shortest story found in `most` runs that has a violation of this kind."""

    def violates(other: Story) -> bool:
        found = play(other).violation
        return found is not None and found.kind == kind

    fails, left, better = fails or violates, most, True
    while better and left > 0:
        better = False
        for other in _simpler(story):
            if left <= 0:
                break
            if other == story:
                continue
            left -= 1
            if fails(other):
                story, better = other, True
                break
    return story


def _simpler(story: Story) -> Iterator[Story]:
    """Stories that are simpler by one step, the largest steps first."""
    for name in ("asks", "faults"):
        all_ = getattr(story, name)
        for size in (len(all_) // 2, 1) if len(all_) > 2 else (1,):
            for at in range(0, len(all_), max(size, 1)):
                yield attrs.evolve(story, **{name: all_[:at] + all_[at + size :]})
    plain = Setup(1, 1, (4, 4))
    for field in attrs.fields(Setup):
        yield attrs.evolve(story, setup=attrs.evolve(story.setup, **{field.name: getattr(plain, field.name)}))
    for n, ask in enumerate(story.asks):
        usual = Ask(ask.id, ask.at, ask.tokens)
        for name, value in [(f.name, getattr(usual, f.name)) for f in attrs.fields(Ask) if f.name != "compute"] + [
            ("tokens", 1),
            ("compute", 0.0),
        ]:
            changed = attrs.evolve(ask, **{name: value})
            yield attrs.evolve(story, asks=(*story.asks[:n], changed, *story.asks[n + 1 :]))
    for n, fault in enumerate(story.faults):
        for name, value in (("prefill", 0), ("decode", 0), ("number", 1), ("seconds", round(fault.seconds / 2, 4))):
            different = attrs.evolve(fault, **{name: value})  # type: ignore[arg-type]
            yield attrs.evolve(story, faults=(*story.faults[:n], different, *story.faults[n + 1 :]))
