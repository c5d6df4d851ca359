"""Runs one model over one paged pool: a step is any number of spans of any sequences."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention.batch import Batch, Span, batch_of
from ..attention.paged import PagedAttention
from ..cache import KVPool, Shard
from ..cache.states import StateRecord
from ..errors import EngineError
from ..models import Adapted, Cached, Head, Lora, Model, Pipeline, Taps
from .sequence import IMAGE

NO_LORAS: Mapping[str, Lora] = MappingProxyType({})
Computed = Callable[[int], None]
"""Called with each layer once its rows of a step are written, on a GPU in stream order."""


@attrs.frozen
class Chunk:
    """Tokens of one sequence from position `start` on, its page table, and whether logits of `every` token are wanted.

    Otherwise only those of the last token are, or none if the chunk is `unread`. The tokens of a head are those after
    its positions, and it reads hidden states of the target, or what it made itself.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    every: bool = False
    unread: bool = False
    proposed: int = 0
    """The number of tokens, the last ones, that are proposals; `Runner.settle` says which stay."""
    window: Sequence[int] = ()
    """The pages in which the sliding windows of the sequence move (`cache/windows.py`)."""
    hidden: Tensor | None = None
    """The target's hidden states at these positions [tokens, taps * width]."""
    made: Tensor | None = None
    """In their place, a head's output of the positions before [tokens, hidden]."""
    seen: Tensor | None = None
    """Rows of images [IMAGE tokens, hidden], which the target reads in place of the embeddings of its IMAGE tokens."""
    adapter: str = ""
    """The adapter with which the target computes these tokens; empty for none."""

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def wanted(self) -> int:
        """The number of its last tokens whose logits are wanted."""
        return len(self.tokens) if self.every else int(not self.unread)


class Logits(Protocol):
    """Logits [n, vocab] of the tokens of a step for which they are wanted, on any device; the same on all ranks."""

    def best(self) -> npt.NDArray[np.int64]:
        """The most likely next token for each [n]."""
        ...

    def row(self, index: int) -> npt.NDArray[np.float64]:
        """The logits of one token [vocab]."""
        ...

    @property
    def hidden(self) -> Tensor | None:
        """Hidden states [tokens, taps * width] of all tokens of the step, where the runner taps layers.

        Of a head: its output [n, hidden].
        """
        return None


class Runner(Protocol):
    """A model and its pool, which the scheduler steps, on one rank or on several ranks of one process."""

    @property
    def shard(self) -> Shard:
        """The tokens of a sequence that the pool stores."""
        ...

    @property
    def vocab(self) -> int:
        """Number of tokens that logits cover."""
        ...

    @property
    def ahead(self) -> int:
        """Tokens after its own position that a row needs: 1 for a head."""
        return 0

    @property
    def windowed(self) -> bool:
        """Whether some layers have a sliding window, so that chunks need the pages in which it moves."""
        return False

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> Logits:
        """Run one step, whose rows are written to the slots of the page tables."""
        ...

    def settle(self, kept: Sequence[int]) -> None:
        """Keep so many tokens of each chunk of the last step, at least those that were no proposals.

        Rows of the others are written again; recurrent states go back to where they were before them.
        """
        return

    @property
    def record(self) -> StateRecord | None:
        """The record of the recurrent states of sequences, in a hybrid model."""
        return None

    def begin(self, pages: Sequence[int], shared: int) -> None:
        """Forget the recurrent states in the pages of a new sequence, but those of its first `shared` tokens.

        These may be pages of other sequences too.
        """
        if self.record is not None:
            self.record.begin(pages, shared)

    def arrived(self, pages: Sequence[int], tokens: int) -> None:
        """Note that a sequence's recurrent state after `tokens` tokens has come into its pages from elsewhere."""
        if self.record is not None:
            self.record.arrived(pages, tokens)

    def states(self, pages: Sequence[int], tokens: int) -> set[int] | None:
        """The ends of pages up to `tokens` tokens after which they hold the recurrent state; None without such."""
        return None if self.record is None else self.record.kept(pages, tokens)

    def clear(self, pages: Sequence[int]) -> None:
        """Set all rows of these pages to zero."""
        ...

    def idle(self) -> None:
        """Take part in the steps of replicas with which this one shares experts, until none has another one."""
        return

    def close(self) -> None:
        """End, once the last step is over; graphs keep the groups in which ranks exchange from ending."""
        return


class TorchLogits(Logits):
    """Logits in a tensor [n, vocab]."""

    def __init__(self, values: Tensor, check: Callable[[], None] = lambda: None, hidden: Tensor | None = None) -> None:
        """`check` is called once the step is over, and raises if it failed on another rank."""
        self.values, self._check, self._hidden = values, check, hidden

    @property
    def hidden(self) -> Tensor | None:
        return self._hidden

    def best(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.values.argmax(-1).cpu().numpy()
        self._check()
        return found

    def row(self, index: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self.values[index].double().cpu().numpy()
        self._check()
        return found


class TorchModel(Runner):
    """A torch model and its pool on one rank."""

    def __init__(self, model: Cached, pool: KVPool, shard: Shard) -> None:
        if pool.page_size != shard.group.rows:
            raise EngineError(f"the pool has pages of {pool.page_size} rows, not {shard.group.rows}")
        if pool.config != model.config:
            raise EngineError("the pool was made for another model config")
        self.pool, self._shard, self._vocab = pool, shard, model.config.vocab

    def clear(self, pages: Sequence[int]) -> None:
        for tensor in self.pool.tensors.values():
            tensor[list(pages)] = 0

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def vocab(self) -> int:
        return self._vocab


def _begun(attention: PagedAttention, chunks: Sequence[Chunk], shard: Shard) -> list[Tensor]:
    """A step's tokens, positions and wanted rows on the device, where `attention` has begun with it."""
    batch, tokens, wanted = assemble(chunks, shard)
    attention.begin(batch)
    return [torch.from_numpy(a).to(attention.pool.device) for a in (tokens, batch.positions, wanted)]


class TorchRunner(TorchModel):
    """A torch model whose steps attend over the pool, whole or dealt over a DCP group."""

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        shard: Shard,
        taps: Sequence[int] = (),
        loras: Mapping[str, Lora] = NO_LORAS,
    ) -> None:
        """Steps keep the hidden states of the layers `taps`, for a draft; `loras` are the adapters by name."""
        super().__init__(model, attention.pool, shard)
        self.model, self.attention, self._taps, self._loras = model, attention, taps, loras

    @property
    def windowed(self) -> bool:
        return self.model.config.window is not None

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        with torch.no_grad():
            ids, positions, rows = _begun(self.attention, chunks, self._shard)
            taps = Taps(self._taps) if self._taps else None
            seen, adapted = seen_in(chunks), adapted_in(chunks, self._loras, ids.device)
            logits = self.model.forward(ids, positions, self.attention, computed, rows, taps, seen, adapted)
            self.attention.end()
            return TorchLogits(logits, self.attention.check, taps.hidden if taps else None)

    def idle(self) -> None:
        with torch.no_grad():
            self.model.idle()

    def settle(self, kept: Sequence[int]) -> None:
        self.attention.settle(kept)

    @property
    def record(self) -> StateRecord | None:
        return self.attention.record


class HeadRunner(TorchModel):
    """A head whose steps attend over the pool; all chunks of a step read the same kind of features."""

    def __init__(self, head: Head, attention: PagedAttention, shard: Shard) -> None:
        super().__init__(head, attention.pool, shard)
        self.head, self.attention = head, attention

    @property
    def ahead(self) -> int:
        return 1

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        with torch.no_grad():
            ids, positions, rows = _begun(self.attention, chunks, self._shard)
            made = [chunk.made for chunk in chunks if chunk.made is not None]
            read = [chunk.hidden for chunk in chunks if chunk.hidden is not None]
            features = torch.cat(made) if made else self.head.fuse(torch.cat(read))
            logits, out = self.head.forward(ids, positions, features, self.attention, computed, rows)
            return TorchLogits(self.head.spread(logits), self.attention.check, out)


@attrs.frozen
class Elsewhere(Runner):
    """A model on other ranks, whose logits this rank receives."""

    stages: Pipeline
    vocab: int
    shard: Shard
    """The shard of a rank that has the model."""
    device: torch.device
    ahead: int = 0

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        count = sum(chunk.wanted for chunk in chunks)
        return TorchLogits(self.stages.everywhere(torch.empty(count, self.vocab, device=self.device)))

    def clear(self, pages: Sequence[int]) -> None:
        """Nothing to do: the rows are on other ranks."""


def seen_in(chunks: Sequence[Chunk], own: npt.NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor] | None:
    """Tokens of a step that stand for rows of images [n], and these rows [n, hidden]; None if none does.

    With `own`, the ascending tokens of the step that this rank computes, those are counted and no others.
    """
    places, at = [], 0
    for chunk in chunks:
        if chunk.seen is not None:
            places.append(at + np.flatnonzero(np.array(chunk.tokens) == IMAGE))
        at += len(chunk.tokens)
    if not places:
        return None
    place, rows = torch.from_numpy(np.concatenate(places)), torch.cat([c.seen for c in chunks if c.seen is not None])
    if own is not None:
        mine = torch.isin(place, torch.from_numpy(own))
        place, rows = torch.searchsorted(torch.from_numpy(own), place[mine]), rows[mine]
    return place, rows


def adapted_in(
    chunks: Sequence[Chunk],
    loras: Mapping[str, Lora],
    device: torch.device,
    own: npt.NDArray[np.int64] | None = None,
) -> Adapted:
    """The adapters of a step's tokens; `own` are the ascending tokens of the step that this rank computes, or all."""
    if not any(chunk.adapter for chunk in chunks):
        return Adapted()
    names = np.repeat([chunk.adapter for chunk in chunks], [len(chunk.tokens) for chunk in chunks])
    names = names if own is None else names[own]
    places = {name: np.flatnonzero(names == name) for name in dict.fromkeys(chunk.adapter for chunk in chunks) if name}
    return Adapted([(loras[name], torch.from_numpy(place).to(device)) for name, place in places.items()])


def assemble(
    chunks: Sequence[Chunk], shard: Shard, whole: bool = True
) -> tuple[Batch, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The arrays of a step, its tokens [tokens], and those whose logits are wanted [n]; `whole` is as in `batch_of`."""
    spans = [Span(c.start, len(c.tokens), c.pages, c.proposed, c.window) for c in chunks]
    batch = batch_of(spans, shard, whole)
    tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int64)
    wanted = np.array([chunk.wanted for chunk in chunks], np.int64)
    before = np.cumsum(wanted) - wanted
    rows = np.repeat(batch.starts[1:] - wanted - before, wanted) + np.arange(wanted.sum())
    return batch, tokens, rows.astype(np.int64)
