"""JAX engines for tests: runners and pools of all ranks, a model without training, and a loop that generates."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kvproto import Geometry, Pool
from kvproto_reference import checkpoint
from kvproto_reference.cache import PageAllocator
from kvproto_reference.engine.description import TARGET, Layout, geometry
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.runner import Runner
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.jax_engine.build import jax_runner
from kvproto_reference.jax_engine.runner import JaxRunner
from kvproto_reference.models import Decoder, ModelConfig

SIZES = {"hidden": 32, "layers": 2, "heads": 6, "ffn": 50, "vocab": 40}
IDS = [(7 * i * i + 3 * i) % 40 for i in range(41)]
PAGE, PAGES = 16, 24
PROMPTS = [b"Alice was beginning to get very tired of sitting by her sister", b"So she was considering in her own mind"]
ALONE, PAIR, DEALT = Layout(), Layout(tp=2, dcp=2, interleave=3), Layout(tp=4, dcp=2, interleave=3)
CONTEXT = Layout(cp=2, interleave=3)


def stated(target: Path, draft: Path, layout: Layout, page: int = PAGE) -> Geometry:
    configs = checkpoint.load_config(target), checkpoint.load_config(draft)
    return geometry((target, draft), configs, "bytes", layout, page)


def one(
    folder: Path, layout: Layout = ALONE, page: int = PAGE, gpus: Sequence[int] = (), **how: bool
) -> tuple[JaxRunner, list[Pool]]:
    """A target's runner, and the pools of its ranks: on these GPUs, or on the host."""
    made = stated(folder, folder, layout, page)
    devices: Sequence[int | None] = gpus or [None] * layout.ranks
    pools = [Pool.allocate(made, PAGES, rank=rank, device=devices[rank]) for rank in range(layout.ranks)]
    return jax_runner(folder, pools, TARGET, layout, **how), pools


def generate(target: Runner, draft: Runner, max_new: int = 24, k: int = 4) -> list[TokenSequence]:
    """All prompts at once: prefill, then speculative steps."""
    pages = PageAllocator(PAGES, 1), PageAllocator(PAGES, 2)
    requests = [TokenSequence(prompt=list(prompt), max_new=max_new) for prompt in PROMPTS]
    prefiller, decoder = Prefiller(target, draft, 128), SpeculativeDecoder(target, draft, k)
    for request in requests:
        need = [model.shard.pages(len(request.prompt) + max_new) for model in (target, draft)]
        request.tables = [free.allocate(n) for free, n in zip(pages, need, strict=True)]
        if target.windowed:  # pages 0 to 11 for the first, and so on
            request.tables.append([*range(PAGES // 2 * (at := requests.index(request)), PAGES // 2 * (at + 1))])
        prefiller.add(request)
    while prefiller.busy:
        prefiller.step()
    while not all(request.finished for request in requests):
        decoder.step(requests)
    return requests


def drawn(config: ModelConfig, folder: Path) -> Decoder:
    """A model without training, saved; parameters that begin as zeros or ones are drawn too."""
    torch.manual_seed(5)
    model = Decoder(config).eval().requires_grad_(False)
    for name, value in model.state_dict().items():
        if "norm" in name or "bias" in name or "correction" in name:
            value.add_(torch.randn_like(value), alpha=0.2)
    checkpoint.save(folder, model)
    return model
