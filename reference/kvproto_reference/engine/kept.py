"""An engine that keeps pages of target and draft after a request: on the device, on the host, in storage."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from pathlib import Path

import attrs

from kvproto import Tiers
from kvproto.tiers.store import Store

from .. import checkpoint
from ..cache import KVPool, Shard
from ..cache.memory import shareable
from ..errors import OutOfPages
from ..tokenizer import check_agreement
from .build import torch_runner
from .description import DRAFT, TARGET, Layout, geometry, hand_over
from .prefill import Prefiller
from .sequence import Sequence, SpeculationStats, rows_needed
from .speculative import SpeculativeDecoder
from .tiered import names_of

_PAUSE = 0.0002
"""Seconds between polls of storage; an engine with other requests would run a step for them."""


@attrs.frozen(kw_only=True)
class Answer:
    """What a request got, and how many tokens of its prompt were found where."""

    tokens: list[int]
    stats: SpeculationStats
    device: int
    host: int
    storage: int
    first: float
    """Seconds to the first token."""


class KeptEngine:
    """Target and draft on one rank, one request at a time."""

    def __init__(
        self, target_dir: Path, draft_dir: Path, *, pages: int, host: int, storage: Path | str | Store | None = None,
        page_size: int = 16, chunk: int = 64, k: int = 4, keep: bool = True,
    ) -> None:  # fmt: skip
        """Pools of `pages` pages, and `host` pages on the host; without `keep` everything is computed each time."""
        folders = target_dir, draft_dir
        self.tokenizer = checkpoint.load_tokenizer(target_dir)
        check_agreement(self.tokenizer, checkpoint.load_tokenizer(draft_dir))
        models = [checkpoint.load(each) for each in folders]
        configs = models[0].config, models[1].config
        said = geometry(target_dir, draft_dir, configs, self.tokenizer.identity, Layout(), page_size)
        groups = {group.name: group for group in said.groups}
        pools = {
            name: KVPool.allocate(config, pages, page_size, memory=shareable)
            for name, config in zip((TARGET, DRAFT), configs, strict=True)
        }
        runners = [
            torch_runner(model, pools[name], Shard(groups[name], 0))
            for name, model in zip((TARGET, DRAFT), models, strict=True)
        ]
        pool, names = hand_over(said, pools, 0), names_of(folders, configs)
        self.tiers = Tiers(pool, names, page=page_size, host=host, storage=storage)
        self._prefiller = Prefiller(runners[0], runners[1], chunk)
        self._decoder = SpeculativeDecoder(runners[0], runners[1], k)
        self._shard, self._page, self._keep = runners[0].shard, page_size, keep

    def answer(self, prompt: Tokens[int], max_new: int) -> Answer:
        """Continue a prompt by the most likely tokens, at most `max_new`; raises OutOfPages."""
        begun, tiers, page = time.monotonic(), self.tiers, self._page
        # without its last token, which is computed in any case, since its logits are wanted
        chain = tiers.chain(prompt[:-1])
        fetch = tiers.fetch(chain, float("inf"))
        while not fetch.over(time.monotonic()):
            time.sleep(_PAUSE)
        fetched = fetch.take()
        room = self._shard.pages(rows_needed(len(prompt), max_new))
        lease = tiers.open(chain, room)
        if lease is None:
            tiers.drain()  # pages that are being copied to the host are pinned until then
            lease = tiers.open(chain, room)
        if lease is None:
            raise OutOfPages(f"{room} pages requested, of {tiers.device.slots.count}")
        rows = 0
        try:
            tiers.step()
            sequence = Sequence(prompt=[*prompt], max_new=max_new, eos=self.tokenizer.eos)
            sequence.target_pages, sequence.draft_pages = [*lease.slots], [*lease.slots]
            self._prefiller.add(sequence, lease.pages * page)
            while self._prefiller.busy:
                self._prefiller.step()
            first = time.monotonic() - begun
            while not sequence.finished:
                self._decoder.step([sequence])
            chain.extend([prompt[-1], *sequence.generated])
            rows = sequence.valid if self._keep else 0
        finally:
            lease.leave(rows)
        tiers.step()
        device, host = (lease.found[name] * page for name in ("device", "host"))
        storage = min(fetched * page, host)
        return Answer(
            tokens=sequence.generated, stats=sequence.stats, device=device, host=host - storage, storage=storage,
            first=first,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for storage."""
        self.tiers.drain()
        self.tiers.close()
