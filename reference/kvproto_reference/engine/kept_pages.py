"""Pages of an engine's pools that are kept after their requests: on the device, on the host, and in storage.

Each rank keeps its own pages, and a process those of the ranks that it hosts: one in torch, all of them in JAX. What a
rank finds in storage, and how long that takes, differs; so each process says when its share of a prompt is there, and
once all have, they agree on one length (docs/tiers.md, Several ranks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvproto import Pool, Tiers
from kvproto.tiers import Chain, PageLease, StorageRead, patience

from .. import checkpoint
from ..cache import Shard
from ..errors import EngineError
from ..models import ModelConfig
from .description import DRAFT, TARGET, check_kept
from .description import shards as shards_of
from .lockstep import Said
from .prefix import tokens_a_unit
from .sequence import TokenSequence
from .world import World

__all__ = ["KeptPages", "names_of"]

States = Callable[[Sequence[int], int], Collection[int] | None]
_PAUSE = 0.002
"""Seconds between polls of what threads have read and written."""


def names_of(folders: Sequence[Path], configs: Sequence[ModelConfig]) -> dict[str, str]:
    """Names of the models and settings that computed the pages of target and draft (KVP-TIER-NAMESPACE)."""
    names = {}
    for name, each, config in zip((TARGET, DRAFT), folders, configs, strict=False):
        names[f"weights.{name}"] = checkpoint.fingerprint(each)
        names[f"rope.{name}"] = repr((config.rope_theta, config.rope_rates, config.rope_gain, config.rope_pairs))
        names[f"dtype.{name}"] = config.dtype
    return names


@attrs.define(eq=False)
class _Coming:
    """A prompt whose pages are being looked up in storage."""

    sequence: TokenSequence
    chains: list[Chain]
    """Of each rank here, as those below."""
    count: int
    """Tokens of the prompt whose pages are looked up."""
    fetches: list[StorageRead]
    said: bool = False
    taken: int | None = None
    """Pages that came from storage."""
    ranks: set[int] = attrs.Factory(set)
    """Ranks that speak for a process which no longer waits for its own."""


@attrs.define(eq=False)
class _Held:
    leases: list[PageLease]
    count: int


class KeptPages:
    """The pages of a process's ranks, which the scheduler takes for a request and leaves when the request is over."""

    def __init__(
        self,
        pools: Mapping[int, Pool],
        names: Mapping[str, str],
        shards: Sequence[Shard],
        world: World,
        host: int,
        storage: str | None,
        ahead: int = 0,
        windows: Mapping[str, int] | None = None,
        states: States = lambda pages, tokens: None,
    ) -> None:
        """`pools` are by rank, `host` is the number of pages on the host, `ahead` that of tokens a draft's row needs.

        `windows` are as in `Tiers`, and `states` is `Runner.states` of the target. Raises EngineError if pages do not
        hold whole runs of a deal.
        """
        self._windows = windows or {}
        self.unit, self._each = tokens_a_unit([*shards, shards[0].whole] if self._windows else shards)
        if not self.unit:
            raise EngineError("--host-pages needs pages that hold whole runs of the deal: choose another --interleave")
        self.tiers: dict[int, Tiers] = {}
        """Of each rank."""
        for rank, pool in sorted(pools.items()):
            check_kept(pool.geometry, self._each)
            owned = shards_of(pool.geometry, rank)
            reach = {name: tokens for name, tokens in self._windows.items() if name in owned}
            ahead_of = [DRAFT] if ahead and DRAFT in owned else []
            self.tiers[rank] = Tiers(
                pool, names, page=self.unit, host=host, storage=storage, ahead=ahead_of, windows=reach
            )
        self._all = [*self.tiers.values()]
        self._states = states
        self._rank, self._world, self._ahead = min(pools), world, ahead
        self._coming: dict[str, _Coming] = {}
        self._held: dict[TokenSequence, _Held] = {}
        self._left = self._told = 0
        """Requests whose pages were returned, and how many of them are in storage, as the other ranks were told."""

    @property
    def available(self) -> list[int]:
        """Pages of each model's pool that no request holds."""
        slots = self._all[0].device.slots
        return [(slots.free + slots.idle) * each for each in self._each]

    def check_room(self, rows: int) -> None:
        """Raise EngineError for a request that the pools can never hold."""
        need, room = -(-rows // self.unit), self._all[0].device.slots.count
        if need > room:
            many = f"{rows} tokens need {need} pages of {self.unit} tokens"
            raise EngineError(f"{many}, the pools have {room}: raise --pages, or ask for less")

    def begin(self, id: str, sequence: TokenSequence, count: int) -> None:
        """Start looking up pages of the first `count` tokens of a prompt in storage, in threads."""
        until = time.monotonic() + patience(count)
        chains = [each.chain(sequence.prompt[:count], **sequence.names) for each in self._all]
        fetches = [each.fetch(chain, until) for each, chain in zip(self._all, chains, strict=True)]
        self._coming[id] = _Coming(sequence, chains, count, fetches)

    def drop(self, id: str) -> None:
        """Drop a request that has not taken its pages, if there is one of that id."""
        self._coming.pop(id, None)

    def turn(self) -> Said:
        """Do what can be done without the other processes; returns what to tell them."""
        self._step()
        now, said = time.monotonic(), list[dict[str, Any]]()
        for id, one in self._coming.items():
            if not one.said and all(fetch.over(now) for fetch in one.fetches):
                one.said = True
                said.append({"op": "fetched", "rank": self._rank, "id": id})
        if self._left > self._told and not any(tiers.busy for tiers in self._all):
            self._told = self._left
            for rank, tiers in self.tiers.items():
                said.append({"op": "settled", "rank": rank, "left": self._left, "pages": dict(tiers.counts)})
        return said

    def next_timer(self) -> float | None:
        """The time at which `turn` may have something to do, or None."""
        waits = self._left > self._told or any(not one.said for one in self._coming.values())
        return time.monotonic() + _PAUSE if waits else None

    def fetched(self, id: str, rank: int) -> None:
        """Note that a rank no longer waits for storage."""
        if id in self._coming:
            self._coming[id].ranks.add(rank)

    def allocate(self, id: str, rows: int) -> tuple[int, dict[str, int]] | None:
        """Give a request pages for `rows` rows; returns how many tokens they hold already on all ranks, and from where.

        Returns None, taking nothing, while a rank waits for storage or has too few pages. A collective.
        """
        one = self._coming[id]
        if len(one.ranks) < self._world.size:
            return None
        if one.taken is None:
            one.taken = min(fetch.take() for fetch in one.fetches)
        leases = self._open(one.chains, -(-rows // self.unit))
        if leases is None:
            return None
        self._step()
        for lease in leases:
            lease.wait()
        # a copy that failed on one rank makes the hit shorter on all
        pages = int(self._least(np.array([min(lease.pages for lease in leases)], np.int32))[0])
        del self._coming[id]
        self._held[one.sequence] = _Held(leases, one.count)
        one.sequence.tables = [
            [slot * each + i for slot in leases[0].slots for i in range(each)] for each in self._each
        ]
        device = min(leases[0].found["device"], pages)
        storage = min(one.taken, pages - device)
        where = {"device": device, "host": pages - device - storage, "storage": storage}
        return pages * self.unit, {name: count * self.unit for name, count in where.items()}

    def free(self, sequence: TokenSequence, valid: int, windows: int = 0) -> None:
        """Take a request's pages back, and keep those of its first `valid` tokens.

        `windows` is the token from which rows of sliding windows are there.
        """
        if (held := self._held.pop(sequence, None)) is None:
            return
        states = self._states(sequence.tables[0], valid)
        for lease in held.leases:
            lease.chain.extend(sequence.text(held.count, valid + self._ahead))
            lease.leave(valid, states, windows)
        self._left += 1
        self._step()

    def close(self, well: bool) -> None:
        """End; with `well`, after everything has been written to storage."""
        for tiers in self._all:
            if well:
                tiers.drain()
            tiers.close()

    def _step(self) -> None:
        for tiers in self._all:
            tiers.step()

    def _open(self, chains: Sequence[Chain], room: int) -> list[PageLease] | None:
        """A lease of each rank here, of what all ranks have; None while one has too few pages. A collective."""
        agreements = [
            tiers.agreement([(chain, room)], len(chain.own)) for tiers, chain in zip(self._all, chains, strict=True)
        ]
        least = self._least(np.minimum.reduce([agreement.vector for agreement in agreements]))
        leases = []
        for agreement in agreements:
            agreement.vector[:] = least
            leases += agreement.open()
        found = [lease for lease in leases if lease is not None]
        if any(lease.slots != found[0].slots for lease in found):  # what one rank does to its pool, all do
            raise EngineError("ranks of one process share a page table, and their tiers gave them other slots")
        return found or None

    def _least(self, vector: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The minimum over all ranks, in place."""
        if self._world.size > 1:
            dist.all_reduce(torch.from_numpy(vector), dist.ReduceOp.MIN, self._world.group)
        return vector
