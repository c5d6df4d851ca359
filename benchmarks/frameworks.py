"""The speed of the reference engine's decoding in JAX, beside torch with the same weights, prompts and cores.

`python benchmarks/frameworks.py [--out] [--model DIR] [--dtype TYPE] [--rounds N] [--quick]`: greedy, without a draft, each
framework in a process of its own that is bound to one core. Both have their turns in alternation: a prefill of all
prompts, then decode steps of the whole batch. Rates are tokens a second of CPU, which other processes change little.
Answers are compared.

The default model is that of `make demo ARGS=--real`, if it is there.

With `--gpu` all share one GPU, on which nothing else runs: rates are tokens a second by the clock, torch runs its decode
steps as CUDA graphs, and without them too, and without the model random weights of its sizes do. Of these, answers of the
two frameworks may differ where two logits are almost equal.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import arguments, child, facts, keep, rounded

from kvproto_reference import checkpoint, smollm2
from kvproto_reference.cache import PageAllocator
from kvproto_reference.cache.memory import shareable
from kvproto_reference.engine.build import Hosted, torch_hosted
from kvproto_reference.engine.description import Layout, geometry
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.engine.world import World
from kvproto_reference.models import Decoder, ModelConfig

BATCHES = (1, 8)
GRAPHS = "torch, CUDA graphs"
LENGTH, NEW = 128, 48
"""Tokens of a prompt and of its answer."""
PAGE, PAGES, BUDGET = 16, 400, 512
"""Tokens of a page, pages of a pool, and prompt tokens that a step may compute."""
Times = tuple[float, float, list[list[int]]]
"""Seconds of CPU of prefill and of decode, and the answers."""


def hosted(framework: str, folder: Path, dtype: str, gpu: bool) -> Hosted:
    """The model on one rank."""
    config = checkpoint.load_config(folder, dtype)
    made = geometry([folder], [config], "", Layout(), PAGE)
    if framework == "jax":
        from kvproto_reference.jax_engine.build import jax_hosted

        return jax_hosted([folder], made, Layout(), PAGES, [0] if gpu else [], dtype=dtype)
    device = torch.device("cuda:0" if gpu else "cpu")
    graphs = framework == GRAPHS
    return torch_hosted([folder], [config], made, Layout(), World(), PAGES, device, shareable, captured=graphs)


def contender(pipe: Connection, framework: str, folder: Path, dtype: str, core: int | None) -> None:
    """Answer what the pipe asks for, in a process of its own, on this core (None: on a GPU)."""
    if core is not None:
        os.sched_setaffinity(0, {core})  # before XLA counts the cores
        torch.set_num_threads(1)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # there are others on the GPU
    engine = hosted(framework, folder, dtype, core is None)
    pipe.send("ready")
    clock = time.perf_counter if core is None else time.process_time
    while (asked := pipe.recv()) is not None:
        pipe.send(answer(engine, clock, *asked))


def answer(engine: Hosted, clock: Callable[[], float], prompts: list[list[int]], new: int) -> Times:
    """Continue all prompts as one batch; a step ends when its tokens are known."""
    pages, prefiller, decoder = PageAllocator(PAGES, 1), Prefiller(engine.target, None, BUDGET), None
    how = SamplingParams(ignore_eos=True)
    some = [TokenSequence(prompt=prompt, max_new=new, sampling=how) for prompt in prompts]
    for sequence in some:
        sequence.tables = [pages.allocate(engine.target.shard.pages(len(sequence.prompt) + new))]
        prefiller.add(sequence)
    began = clock()
    while prefiller.busy:
        prefiller.step()
    between = clock()
    decoder = SpeculativeDecoder(engine.target)
    while not all(sequence.finished for sequence in some):
        decoder.step(some)
    return between - began, clock() - between, [sequence.generated for sequence in some]


def _drawn() -> Path:
    """A folder with random weights of the sizes of SmolLM2-135M."""
    folder = Path(tempfile.mkdtemp())
    sizes = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536, "vocab": 49_152}
    torch.manual_seed(5)
    checkpoint.save(folder, Decoder(ModelConfig(kind="gqa", qk_norm=False, rope_theta=1e5, **sizes)).eval())
    return folder


def main() -> int:
    parser = arguments(__doc__, "frameworks", rounds=5, quick="a shipped model, one prompt and few tokens")
    parser.add_argument("--model", type=Path, help="a checkpoint folder (default: SmolLM2-135M of the demo)")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, by the clock")
    parser.add_argument("--dtype", default="float32", help="element type of weights and caches (%(default)s)")
    args = parser.parse_args()
    drawn = args.gpu and not args.model and not args.quick
    folder = (
        _drawn() if drawn else checkpoint.CHECKPOINTS / "target-gqa" if args.quick else args.model or smollm2.folder()
    )
    length, new = (24, 6) if args.quick else (LENGTH, NEW)
    vocab = checkpoint.load_config(folder).vocab
    core = None if args.gpu else min(os.sched_getaffinity(0))
    ways = ("torch", GRAPHS, "jax") if args.gpu else ("torch", "jax")
    kept: dict[str, Any] = {}
    with ExitStack() as stack:
        pipes = {}
        for framework in ways:
            pipes[framework] = pipe = stack.enter_context(child(contender, framework, folder, args.dtype, core))
            pipe.recv()
            stack.callback(pipe.send, None)
        for batch in BATCHES[:1] if args.quick else BATCHES:
            kept[str(batch)] = of = {name: {way: [] for way in pipes} for name in ("prefill", "decode")}
            others = 0
            for n in range(-1, args.rounds):
                dice = random.Random(f"{batch} {n}")
                prompts = [[dice.randrange(min(100, vocab // 4), vocab) for _ in range(length)] for _ in range(batch)]
                said = []
                for way, pipe in pipes.items():
                    pipe.send((prompts, new))
                    prefill, decode, tokens = pipe.recv()
                    said.append(tokens)
                    if n >= 0:
                        of["prefill"][way].append(batch * length / prefill)
                        of["decode"][way].append(batch * (new - 1) / decode)
                others += sum(any(one != each for one in more) for each, *more in zip(*said, strict=True))
            kept[str(batch)]["others"] = others
            for name in ("prefill", "decode"):
                best = of[name][ways[-2]]
                ratio = median(x / y for x, y in zip(of[name]["jax"], best, strict=True))
                shown = ", ".join(f"{way} {median(rates):.1f}" for way, rates in of[name].items())
                print(f"batch {batch} {name}: {shown} tokens/s ({ratio:.2f}); {others} answers differ", flush=True)
    model = "target-gqa" if args.quick else folder.name if args.model else smollm2.NAME + ", random" * drawn
    figures = {"model": model, "dtype": args.dtype, "length": length, "new": new} | facts("torch", "jax")
    if args.gpu:
        from gpu import gpu_facts  # needs CUDA's packages

        figures |= gpu_facts()
    keep(args.out, rounded(figures | {"batches": kept}, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
