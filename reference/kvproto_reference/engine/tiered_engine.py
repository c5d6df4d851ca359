"""An engine that keeps pages of target and draft after a request: on the device, on the host, in storage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import torch

from kvproto import Geometry, Tiers
from kvproto.tiers import Chain, PageLease
from kvproto.tiers.store import Store

from .. import checkpoint
from ..adapters import NO_ADAPTERS, Adapters, chosen
from ..cache.memory import shareable
from ..errors import EngineError, OutOfPages
from .build import Hosted, torch_hosted
from .description import DRAFT, Layout, check_kept, geometry, windows_of
from .kept_pages import names_of
from .prefill import Prefiller
from .prefix import tokens_a_unit
from .sequence import SpeculationStats, TokenSequence, rows_needed
from .speculative import SpeculativeDecoder
from .world import World

_PAUSE = 0.0002
"""Seconds between polls of storage; an engine with other requests would run a step for them."""


@attrs.frozen(kw_only=True)
class Answer:
    """The answer to a request, and how many tokens of its prompt were found where."""

    tokens: list[int]
    stats: SpeculationStats
    device: int
    host: int
    storage: int
    first: float
    """Seconds to the first token."""


class Host(Protocol):
    """Puts models and pools together: `jax_hosted`, or what stands for `torch_hosted` here."""

    def __call__(self, folders: tuple[Path, ...], geometry: Geometry, layout: Layout, pages: int, /) -> Hosted:
        """All ranks of an engine, in this process."""
        ...


class TieredEngine:
    """Target and draft in one process, one request at a time; in JAX on any number of ranks, each with its tiers."""

    def __init__(
        self,
        target_dir: Path,
        draft_dir: Path,
        *,
        pages: int,
        host: int,
        storage: Path | str | Store | None = None,
        page_size: int = 16,
        chunk: int = 64,
        k: int = 4,
        keep: bool = True,
        layout: Layout | None = None,
        hosted: Host | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        """Pools of `pages` pages, and `host` pages on the host; without `keep` everything is computed each time.

        `hosted` makes the models, in torch on one rank unless it is `jax_hosted`. Raises EngineError where pages do not
        hold whole runs of a deal.
        """
        folders, layout = (target_dir, draft_dir), layout or Layout()
        self.tokenizer = checkpoint.shared_tokenizer(target_dir, draft_dir)
        configs = checkpoint.load_config(target_dir), checkpoint.load_config(draft_dir)
        said = geometry(folders, configs, self.tokenizer.identity, layout, page_size)
        if hosted is not None and adapters:
            raise EngineError("adapters are torch's: `hosted` computes all requests with the target alone")
        self._adapters = adapters
        made = (hosted or partial(_torch, adapters))(folders, said, layout, pages)
        whole = [made.target.shard.whole] if made.target.windowed else []
        self._unit, self._each = tokens_a_unit([*made.shards, *whole])
        if not self._unit:
            raise EngineError("a page has to hold whole runs of the deal: choose another interleave")
        check_kept(said, self._each)
        names = names_of(folders, configs)
        ahead = [DRAFT] if made.draft is not None and made.draft.ahead else []
        self.ranks = [
            Tiers(pool, names, page=self._unit, host=host, storage=storage, ahead=ahead, windows=windows_of(configs))
            for _, pool in sorted(made.pools.items())
        ]
        self.tiers = self.ranks[0]
        self._prefiller = Prefiller(made.target, made.draft, chunk)
        self._decoder = SpeculativeDecoder(made.target, made.draft, k)
        self._keep = keep
        self._states, self._arrived = made.target.states, made.target.arrived

    def answer(self, prompt: Sequence[int], max_new: int, adapter: str = "", cache_salt: str = "") -> Answer:
        """Continue a prompt by the most likely tokens, at most `max_new`; raises OutOfPages."""
        begun, unit = time.monotonic(), self._unit
        sequence = TokenSequence(
            prompt=[*prompt],
            max_new=max_new,
            tokenizer=self.tokenizer,
            adapter=chosen(self._adapters, adapter),
            cache_salt=cache_salt,
        )
        # without its last token, which is computed in any case, since its logits are wanted
        chains = [tiers.chain(prompt[:-1], **sequence.names) for tiers in self.ranks]
        fetches = [tiers.fetch(chain, float("inf")) for tiers, chain in zip(self.ranks, chains, strict=True)]
        while not all(fetch.over(time.monotonic()) for fetch in fetches):
            time.sleep(_PAUSE)
        fetched = min(fetch.take() for fetch in fetches)
        room = -(-rows_needed(len(prompt), max_new) // unit)
        leases = self._open(chains, room)
        if leases is None:
            self.drain()  # pages that are being copied to the host are pinned until then
            leases = self._open(chains, room)
        if leases is None:
            raise OutOfPages(f"{room} pages requested, of {self.tiers.device.slots.count}")
        rows, states = 0, None
        try:
            for tiers in self.ranks:
                tiers.step()
            pages = min(lease.pages for lease in leases)
            sequence.tables = [
                [slot * each + i for slot in leases[0].slots for i in range(each)] for each in self._each
            ]
            self._prefiller.add(sequence, pages * unit)
            self._arrived(sequence.tables[0], pages * unit)
            while self._prefiller.busy:
                self._prefiller.step()
            first = time.monotonic() - begun
            while not sequence.finished:
                self._decoder.step([sequence])
            for chain in chains:
                chain.extend([prompt[-1], *sequence.generated])
            rows = sequence.shared if self._keep else 0
            states = self._states(sequence.tables[0], rows)
        finally:
            for lease in leases:
                lease.leave(rows, states)
        for tiers in self.ranks:
            tiers.step()
        device = min(leases[0].found["device"], pages)
        storage = min(fetched, pages - device)
        return Answer(
            tokens=sequence.generated,
            stats=sequence.stats,
            device=device * unit,
            host=(pages - device - storage) * unit,
            storage=storage * unit,
            first=first,
        )

    def _open(self, chains: Sequence[Chain], room: int) -> list[PageLease] | None:
        """A lease of every rank, of what all of them have; None while one has too few pages."""
        agreements = [
            tiers.agreement([(chain, room)], len(chain.own)) for tiers, chain in zip(self.ranks, chains, strict=True)
        ]
        least = np.minimum.reduce([agreement.vector for agreement in agreements])
        for agreement in agreements:
            agreement.vector[:] = least
        leases = [lease for agreement in agreements for lease in agreement.open() if lease is not None]
        if any(lease.slots != leases[0].slots for lease in leases):  # what one rank does to its pool, all do
            for lease in leases:
                lease.leave()
            raise EngineError("ranks of one process share a page table, and their tiers gave them other slots")
        return leases or None

    def drain(self) -> None:
        """Wait until the host and storage have all that they are to have."""
        for tiers in self.ranks:
            tiers.drain()

    def close(self) -> None:
        """Wait for storage."""
        self.drain()
        for tiers in self.ranks:
            tiers.close()


def _torch(adapters: Adapters, folders: tuple[Path, ...], said: Geometry, layout: Layout, pages: int, /) -> Hosted:
    configs = tuple(checkpoint.load_config(folder) for folder in folders)
    host = torch.device("cpu")
    return torch_hosted(folders, configs, said, layout, World(), pages, host, shareable, adapters=adapters)
