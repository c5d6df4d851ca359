"""Prefill and decode in one process at TP 1: what a prefill/decode pair is compared with."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from kvproto import lay_out

from .. import checkpoint
from ..adapters import NO_ADAPTERS, Adapters, chosen, load_adapters
from ..cache import HybridPools, KVPool, PageAllocator, Shard
from ..cache.forms import MODEL
from ..cache.windows import needed
from ..models import head_among
from ..tokenizer import BYTES, Tokenizer
from .build import torch_runner
from .description import Layout, cache
from .logprobs import LogProbs
from .prefill import Prefiller
from .runner import Chunk, Runner
from .sampling import SamplingParams, Scores
from .sequence import SpeculationStats, TokenSequence, rows_needed
from .speculative import SpeculativeDecoder


@attrs.frozen(kw_only=True)
class Result:
    """Generated tokens (EOS included, if reached) and speculation counts."""

    tokens: list[int]
    stats: SpeculationStats
    logprobs: list[LogProbs] = attrs.Factory(list)
    tokenizer: Tokenizer = BYTES

    @property
    def text(self) -> bytes:
        """The generated text, without EOS."""
        return self.tokenizer.decode(self.tokens)


def _models(made: Sequence[tuple[Runner, KVPool]]) -> tuple[Runner, Runner | None]:
    """The target, and the draft if there is one."""
    return made[0][0], made[1][0] if made[1:] else None


class Undivided:
    """One engine with a target, an optional draft, and a pool of `pages` pages for each."""

    def __init__(
        self,
        target_dir: Path,
        draft_dir: Path | None = None,
        *,
        page_size: int = 16,
        pages: int = 64,
        chunk: int = 64,
        k: int = 4,
        seed: int = 0,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        back_end: str = "torch",
        cold: bool = False,
        adapters: Adapters = NO_ADAPTERS,
        prefill_form: str = MODEL,
        decode_form: str = MODEL,
    ) -> None:
        """With `cold`, the draft begins without rows of the prompt: they are zero, and what a head reads of it is.

        The forms are those in which prefill and decode store rows (`cache.forms`): if they differ, rows of a prompt are
        stored in that of decode once it is computed, as a pair of engines that converts has them.
        """
        self._cold = cold
        self._chunk = chunk
        self._adapters = adapters
        folders = [target_dir] if draft_dir is None else [target_dir, draft_dir]
        self.tokenizer = checkpoint.shared_tokenizer(*folders)
        configs = [checkpoint.load_config(folder, dtype) for folder in folders]
        checkpoint.check_draft(folders, configs)
        head = head_among(configs)

        def runner(model: int, folder: Path, form: str) -> tuple[Runner, KVPool]:
            loaded = checkpoint.load_either(folder, target_dir, dtype=dtype, device=device)
            (group,) = lay_out([cache(model, loaded.config, Layout(), page_size)]).groups
            pool = KVPool.allocate(loaded.config, pages, page_size, device=device, form=form)
            taps = head.taps if head and not model else ()
            shard = Shard(group, 0)
            beside = HybridPools.allocate(loaded.config, pages, shard, device=device)
            loras = load_adapters(NO_ADAPTERS if model else adapters, loaded.config, loaded.tp, device)
            made = torch_runner(loaded, pool, shard, back_end=back_end, taps=taps, beside=beside, loras=loras)
            return made, pool

        self.rounds = checkpoint.load_config(target_dir, dtype).dtype != "float32"
        """Whether the last bits of logits depend on what else was in a step."""
        made = {
            form: [runner(model, folder, form) for model, folder in enumerate(folders)]
            for form in dict.fromkeys((decode_form, prefill_form))
        }
        (self._target, self._draft), (target, draft) = (_models(made[form]) for form in (decode_form, prefill_form))
        self._converting: list[tuple[KVPool, KVPool]] = []
        """Pools of prefill, each with that of decode which stores its rows in another form."""
        if prefill_form != decode_form:
            both = zip(made[prefill_form], made[decode_form], strict=True)
            self._converting = [(prefill, decode) for (_, prefill), (_, decode) in both][: 1 if cold else 2]
        models = 1 if self._draft is None else 2
        self._window = min(needed(configs[0], page_size, max(chunk, k + 1)), pages)
        """Pages in which the sliding windows of a sequence move; 0 without such."""
        self._pages = [PageAllocator(pages, seed + model) for model in range(models + bool(self._window))]
        self._decoder = SpeculativeDecoder(self._target, self._draft, k)
        self._prefill = target
        self._prefiller = Prefiller(target, None if cold else draft, chunk)
        self._decoding: list[TokenSequence] = []
        self._exact: Undivided | None = None
        """The target in 32 bits, where this engine rounds."""
        if self.rounds:
            self._exact = Undivided(
                target_dir, page_size=page_size, pages=pages, chunk=chunk, device=device, adapters=adapters
            )

    def generate(
        self,
        prompt: bytes | Sequence[int],
        sampling: SamplingParams | None = None,
        max_new: int = 64,
        adapter: str = "",
    ) -> Result:
        """Continue a prompt, text or tokens, by at most `max_new` tokens; greedy by default."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, bytes) else prompt
        return self.generate_all([(ids, sampling or SamplingParams())], max_new, adapters=[adapter])[0]

    def generate_all(
        self,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        max_new: int,
        seen: Sequence[Tensor | None] = (),
        adapters: Sequence[str] = (),
    ) -> list[Result]:
        """Continue many prompts as one batch, by at most `max_new` tokens each.

        `seen` are the rows of each prompt's images, as `TokenSequence` has them, and `adapters` the name of each one's.
        """
        some: list[TokenSequence] = []
        try:
            for (ids, sampling), rows, adapter in zip_longest(prompts, seen, adapters):
                some.append(self.add(ids, sampling, max_new, rows, adapter or ""))
            while not all(sequence.finished for sequence in some):
                self.step()
        finally:
            for sequence in some:
                self._end(sequence)
        return [Result(tokens=s.generated, stats=s.stats, logprobs=s.logprobs, tokenizer=self.tokenizer) for s in some]

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new: int,
        seen: Tensor | None = None,
        adapter: str = "",
    ) -> TokenSequence:
        """Begin with a prompt, whose sequence later steps complete; raises OutOfPages if too few pages are free."""
        sequence = TokenSequence(
            prompt=list(prompt),
            max_new=max_new,
            sampling=sampling,
            tokenizer=self.tokenizer,
            seen=seen,
            adapter=chosen(self._adapters, adapter),
        )
        counts = [self.pages_of(len(sequence.prompt), max_new)] * len(self._pages)
        if self._window:
            counts[-1] = min(self._window, counts[0])
        sequence.tables = [pages.allocate(n) for pages, n in zip(self._pages, counts, strict=True)]
        if self._cold and self._draft is not None:
            self._draft.clear(sequence.tables[1])
        self._prefiller.add(sequence)
        return sequence

    def step(self) -> None:
        """Compute a piece of the prompts under way, and one step of those that have their first token."""
        for sequence in self._prefiller.step():
            if self._cold and sequence.hidden is not None:
                sequence.hidden = torch.zeros_like(sequence.hidden)
            for model, pages in enumerate(sequence.tables[:2]):
                self._store(model, pages)
            self._decoding.append(sequence)
        if self._decoding:
            self._decoder.step(self._decoding)
        for sequence in [sequence for sequence in self._decoding if sequence.finished]:
            self._end(sequence)

    def _end(self, sequence: TokenSequence) -> None:
        """Free the pages of a sequence that has them, wherever it is."""
        self._prefiller.drop(sequence)
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        for pages, table in zip(self._pages, sequence.tables, strict=False):  # none, if it has ended before
            pages.free(table)
        sequence.tables = []

    def _store(self, model: int, pages: Sequence[int]) -> None:
        """Store these pages of a prompt in the form of decode."""
        for prefill, decode in self._converting[model : model + 1]:
            decode.take(prefill, pages)

    def pages_of(self, prompt: int, max_new: int) -> int:
        """Pages of either pool that a prompt of `prompt` tokens needs with its continuation."""
        return self._target.shard.pages(rows_needed(prompt, max_new))

    def lag(self, prompt: Sequence[int], found: Sequence[int], adapter: str = "") -> float:
        """The largest distance of the tokens that continue a prompt from the most likely ones in 32 bits.

        Each is in units of the error that rounding makes there, the root of the mean square over all logits, given the
        tokens before; 0 if all are the most likely, infinite for others where nothing rounds.
        """
        worst, exact = 0.0, self._exact or self
        both = (engine.scores(prompt, found, adapter) for engine in (self, exact))
        for token, scores, right in zip(found, *both, strict=True):
            behind, error = float(right.max() - right[token]), float(np.std(scores - right))
            worst = max(worst, behind / error if error else behind and math.inf)
        return worst

    def scores(self, prompt: Sequence[int], found: Sequence[int], adapter: str = "") -> Iterator[Scores]:
        """The logits [vocab] from which each token of a prompt's continuation was to be chosen."""
        ids = [*prompt, *found]
        pages = self._pages[0].allocate(self._target.shard.pages(len(ids)))
        window = self._pages[-1].allocate(self._window) if self._window else []
        start, last = 0, len(ids) - 1
        try:
            while start < last:
                runner, end = (self._target, last) if start >= len(prompt) else (self._prefill, min(len(prompt), last))
                stop = min(start + self._chunk, end)
                piece = Chunk(ids[start:stop], start, pages, every=True, window=window, adapter=adapter)
                logits = runner.run([piece])
                for place in range(max(start, len(prompt) - 1), stop):
                    yield logits.row(place - start)
                start = stop
                if start == len(prompt):
                    self._store(0, pages)
        finally:
            self._pages[0].free(pages)
            self._pages[-1].free(window)
