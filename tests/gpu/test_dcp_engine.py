"""Decode steps captured in CUDA graphs, beside the same steps launched on back end torch."""

from importlib.util import find_spec

import attrs
import numpy as np
import pytest
import torch

from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.captured import CapturedRunner
from kvproto_reference.engine.runner import Chunk
from kvproto_reference.models import Decoder, ModelConfig
from tests.gpu.shards import CONFIGS, deal

WAYS = [("launched", "torch"), ("captured", "torch"), *([("captured", "flashinfer")] * bool(find_spec("flashinfer")))]
STEPS = [((0, 70), (1, 3)), ((0, 71), (1, 4)), ((2, 300),), ((1, 5), (2, 301)), ((2, 302),)]
"""Sequences and positions of their new tokens, step by step."""


def model_of(kind: str) -> Decoder:
    sizes: dict[str, ModelConfig] = {
        "gqa": attrs.evolve(CONFIGS["gqa"], hidden=256, layers=2, heads=8, kv_heads=2, ffn=256),
        "mla": attrs.evolve(CONFIGS["mla"], hidden=256, layers=2, heads=8, ffn=256),
    }
    torch.manual_seed(3)
    made = Decoder(sizes[kind]).to("cuda", torch.bfloat16)
    made.rates = torch.tensor(sizes[kind].rates, device="cuda")
    return made


@pytest.mark.parametrize("kind", CONFIGS)
def test_captured_steps_give_what_launched_ones_do(kind: str) -> None:
    model, page = model_of(kind), 16
    tables = np.split(np.random.default_rng(0).permutation(75), 3)
    logits: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for way, back_end in WAYS:
            pool = KVPool.allocate(model.config, 75, page, device="cuda")
            captured = way != "launched"
            runner = torch_runner(model, pool, Shard(deal(page, 1, 1), 0), back_end=back_end, captured=captured)
            assert isinstance(runner, CapturedRunner) == captured
            for sequence, length in ((0, 70), (1, 3), (2, 300)):
                tokens = [(7 * i + sequence) % 250 for i in range(length)]
                runner.run([Chunk(tokens[at : at + 90], at, tables[sequence]) for at in range(0, length, 90)][:1])
                for at in range(90, length, 90):
                    runner.run([Chunk(tokens[at : at + 90], at, tables[sequence])])
            found = []
            for n, step in enumerate(STEPS):
                found.append(runner.run([Chunk([n + s], at, tables[s]) for s, at in step]).values.double())
            logits.append(found)
    for found in logits[1:]:
        for ours, exact in zip(found, logits[0], strict=True):
            assert ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 3e-2
