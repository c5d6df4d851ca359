"""One Description of all pipeline stages: each knows its own layers, and all state the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import torch.distributed

from kvproto import Cache, LocalError
from kvproto.errors import ErrorCode

__all__ = ["Gather", "Key", "Share", "alone", "gatherer", "in_step", "joined", "titles_of"]

Gather = Callable[[Any], list[Any]]
"""Takes an object of this pipeline stage and returns those of all, by stage; all stages call it at the same time."""
Key = tuple[str, int, int, str]
"""A kind of layers, alike on all stages: back end, block table, model, and the engine's specification of the cache."""
T = TypeVar("T")


@attrs.frozen
class Share:
    """A stage's layers of one kind, as kvproto sees them.

    Fields:
        caches: With the layers of this stage.
        scales: Of K and of V of each layer, if the engine's cache is quantized by them.
        order: How the matrices of states lie; empty if there is one way.
    """

    key: Key
    caches: list[Cache]
    scales: list[tuple[float, float]]
    order: str


def alone(given: Any) -> list[Any]:
    """The Gather of an engine without pipeline stages."""
    return [given]


def gatherer(stages: int, group: Callable[[], Any]) -> Gather:
    """The exchange between so many pipeline stages, whose processes are of a group with a `cpu_group` of torch's."""
    if stages == 1:
        return alone

    def gather(given: Any) -> list[Any]:
        found: list[Any] = [None] * stages
        torch.distributed.all_gather_object(found, given, group=group().cpu_group)
        return found

    return gather


def in_step(gather: Gather, make: Callable[[], T]) -> list[T]:
    """Results of `make` by stage; raises the LocalError of the first stage that has one, on all of them."""
    made: T | LocalError
    try:
        made = make()
    except LocalError as error:
        made = error
    found = gather(made)
    for each in found:
        if isinstance(each, LocalError):
            raise each
    return found


def titles_of(keys: Iterable[Key]) -> dict[Key, str]:
    """Titles of kinds in the order in which stages name them: the back end, with a number for all but the first."""
    order = list(dict.fromkeys(keys))
    return {key: f"{key[0]} {n}" if n else key[0] for n, key in enumerate(order)}


def joined(stages: Sequence[Sequence[Share]]) -> dict[Key, Share]:
    """Shares of all stages as one each; raises LocalError if stages store a kind of layers differently."""
    found: dict[Key, Share] = {}
    for share in (share for stage in stages for share in stage):
        before = found.get(share.key)
        if before is not None:
            caches = [_one(*pair) for pair in zip(before.caches, share.caches, strict=True)]
            share = attrs.evolve(share, caches=caches, scales=before.scales + share.scales)
        found[share.key] = share
    return found


def _one(cache: Cache, other: Cache) -> Cache:
    """A cache with the layers of both."""
    layers = cache.layers + tuple(layer for layer in other.layers if layer not in cache.layers)
    both = [attrs.evolve(each, layers=layers) for each in (cache, other)]
    if both[0] != both[1]:
        path, mine = f"layers {list(other.layers)}", f"as layers {list(cache.layers)} of another pipeline stage"
        yours = f"{other.group.parts}, not {cache.group.parts}"
        raise LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "start all stages with the same settings")
    return both[0]
