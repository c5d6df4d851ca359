"""Decode steps as CUDA graphs: the host plans a step, and the GPU replays it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import torch
from torch import Tensor

from ..attention.batch import Batch
from ..attention.paged import PagedAttention
from ..cache import Shard
from ..models import Model
from .runner import Chunk, Computed, TorchLogits, TorchRunner, assemble

__all__ = ["CapturedRunner"]


@attrs.frozen(eq=False)
class _Step:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    places: Tensor
    logits: Tensor


class CapturedRunner(TorchRunner):
    """A torch model on one GPU; steps of one token for each sequence are captured, once for each number of sequences.

    Other steps run as in `TorchRunner`. The kernel must plan in fixed memory (`fixed`), and the logits of a step must
    be read before the next step, whose plan replaces its plan. Ranks of a group must exchange over NCCL or mapped
    memory, which graphs hold, and capture in the same steps, as `Kernel.repeats` is the same on all of them.
    """

    def __init__(self, model: Model, attention: PagedAttention, shard: Shard) -> None:
        super().__init__(model, attention, shard)
        self._steps: dict[tuple[int, Hashable], _Step] = {}

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        if computed is not None or any(len(chunk.tokens) > 1 for chunk in chunks):
            return super().run(chunks, computed)
        batch, tokens, _ = assemble(chunks, self.shard)
        if (repeats := self.attention.repeats(batch)) is None:
            return super().run(chunks, computed)
        with torch.no_grad():
            key = batch.tokens, repeats
            if key not in self._steps:
                self._steps[key] = self._capture(batch)
            step = self._steps[key]
            self.attention.begin(batch, step.places)
            step.tokens.copy_(torch.from_numpy(tokens))
            step.positions.copy_(torch.from_numpy(batch.positions))
            step.graph.replay()
            return TorchLogits(step.logits.clone(), self.attention.check)

    def close(self) -> None:
        for step in self._steps.values():
            step.graph.reset()
        self._steps.clear()

    def _capture(self, batch: Batch) -> _Step:
        """Capture a step; the warm-up run writes to where the step will write."""
        device = self.attention.pool.device
        tokens, positions, places = (torch.zeros(batch.tokens, dtype=torch.int64, device=device) for _ in range(3))
        positions.copy_(torch.from_numpy(batch.positions))
        self.attention.begin(batch, places)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.model.forward(tokens, positions, self.attention)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process, such as NCCL's and those that copy pages, may call CUDA meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self.model.forward(tokens, positions, self.attention)
        return _Step(graph, tokens, positions, places, logits)
