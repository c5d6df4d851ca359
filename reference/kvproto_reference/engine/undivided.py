"""Prefill and decode in one process at TP 1: what a prefill/decode pair is compared with."""

from collections.abc import Sequence as Tokens
from pathlib import Path

import attrs
import torch

from .. import checkpoint
from ..tokenizer import BYTES, Tokenizer, check_agreement
from .pages import PageAllocator, pages_for
from .pool import KVPool
from .prefill import prefill
from .runner import ModelRunner
from .sampling import SamplingParams
from .sequence import Sequence, SpeculationStats, rows_needed
from .speculative import SpeculativeDecoder


@attrs.frozen(kw_only=True)
class Result:
    """Generated tokens (EOS included, if reached) and speculation counts."""

    tokens: list[int]
    stats: SpeculationStats
    tokenizer: Tokenizer = BYTES

    @property
    def text(self) -> bytes:
        """The generated text, without EOS."""
        return self.tokenizer.decode(self.tokens)


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
    ) -> None:
        self._chunk, self._page_size = chunk, page_size
        self.tokenizer = checkpoint.load_tokenizer(target_dir)
        if draft_dir is not None:
            check_agreement(self.tokenizer, checkpoint.load_tokenizer(draft_dir))

        def runner(folder: Path) -> ModelRunner:
            model = checkpoint.load(folder, dtype=dtype, device=device)
            return ModelRunner(model, KVPool.allocate(model.config, pages, page_size, device=device), page_size)

        self._target = runner(target_dir)
        self._draft = runner(draft_dir) if draft_dir is not None else None
        self._target_pages = PageAllocator(pages, seed)
        self._draft_pages = PageAllocator(pages, seed + 1)
        self._decoder = SpeculativeDecoder(self._target, self._draft, k)

    def generate(
        self, prompt: bytes | Tokens[int], sampling: SamplingParams | None = None, max_new: int = 64
    ) -> Result:
        """Continue a prompt, text or tokens, by at most `max_new` tokens; greedy unless told otherwise."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, bytes) else list(prompt)
        sequence = Sequence(prompt=ids, max_new=max_new, sampling=sampling or SamplingParams(), eos=self.tokenizer.eos)
        count = pages_for(rows_needed(len(sequence.prompt), max_new), self._page_size)
        try:
            sequence.target_pages = self._target_pages.allocate(count)
            if self._draft is not None:
                sequence.draft_pages = self._draft_pages.allocate(count)
            prefill(sequence, self._target, self._draft, self._chunk)
            while not sequence.finished:
                self._decoder.step(sequence)
        finally:
            self._target_pages.free(sequence.target_pages)
            self._draft_pages.free(sequence.draft_pages)
        return Result(tokens=sequence.generated, stats=sequence.stats, tokenizer=self.tokenizer)
