"""A prefill and a decode engine with a draft that is handed over, with a cold one, and with none: first token, and speed.

`python benchmarks/serving_drafts.py [--out] [--model DIR] [--rounds N] [--quick]`: pairs of the demo's engines with SmolLM2 and its
EAGLE-3 head, each process with one thread, all started once and served in alternation; greedy, in float32, prompts that
are pieces of a story and of a page of documentation. The model is that of `make demo ARGS=--real`, which fetches it.

    no draft      neither engine has one
    cold          prefill has no head: its rows of the prompt are zero in decode (`--cold-draft zero`)
    handed over   prefill computes the head's rows, and they move with the target's

First batches that are there at once, then requests that come by themselves at several rates, as in `serving.py`. All pairs
write the same tokens, or the difference is counted (`others`).
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import torch
from acceptance import texts
from harness import arguments, facts, keep, rounded
from serving import LENGTH, NEW, NO_DRAFT, Contender, Serve, batches, loads, pair

from kvproto_reference import checkpoint, smollm2
from kvproto_reference.checkpoint import CHECKPOINTS
from kvproto_reference.tokenizer import Tokenizer

RATES, REQUESTS = (0.25, 0.5), 8
"""Requests a second, and how many come at each rate."""
PROPOSED = 3
"""Tokens that the head proposes at a time, as in `make demo ARGS=--real`."""
SHORT = ("--chunk", str(LENGTH))
"""A prompt a step, so that the first of eight is handed over while the others are computed."""
HEAD = ("--draft", "eagle", "--speculate", str(PROPOSED))
ZERO = ("--cold-draft", "zero")
WAYS = {
    "no draft": (NO_DRAFT, NO_DRAFT),
    "cold": ((*NO_DRAFT, *ZERO), (*HEAD, *ZERO)),
    "handed over": (HEAD, HEAD),
}
"""Options of prefill and of decode."""


def pieces(tokenizer: Tokenizer, length: int, count: int, seed: str) -> list[list[int]]:
    """So many pieces of `length` tokens, from places that the seed draws, of two texts in turn."""
    dice, made = random.Random(seed), texts("smollm2")
    tokens = [tokenizer.encode(made[name].encode()) for name in ("story", "page")]
    found = []
    for n in range(count):
        text = tokens[n % len(tokens)]
        start = dice.randrange(len(text) - length)
        found.append(text[start : start + length])
    return found


def main() -> int:
    parser = arguments(__doc__, "serving_drafts", rounds=3, quick="the small MLA model and its head, and few requests")
    parser.add_argument("--model", type=Path, help="the folder of SmolLM2 (default: that of the demo)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = CHECKPOINTS / "target-small" if args.quick else args.model or smollm2.folder()
    length, new = (24, 6) if args.quick else (LENGTH, NEW)
    ask = partial(pieces, checkpoint.load_tokenizer(model), length)
    with ExitStack() as stack:
        ways: dict[str, Contender] = {}
        before: frozenset[int] = frozenset()
        for way, (source, sink) in WAYS.items():
            serve: Serve = stack.enter_context(pair(model, (*source, *SHORT), (*sink, *SHORT)))
            now = frozenset(process.pid or 0 for process in active_children())
            ways[way], before = Contender(serve, now - before), now
        name = "small MLA" if args.quick else smollm2.NAME
        figures = {"model": name, "head": "eagle", "proposed": PROPOSED, "length": length, "new": new}
        figures |= facts("torch") | {"batches": batches(ways, args.rounds, ask, new)}
        keep(args.out, rounded(figures, 4))
        rates, count = ((50.0,), 3) if args.quick else (RATES, REQUESTS)
        figures["loads"] = loads(ways, rates, max(args.rounds // 3, 1), count, ask, new)
    keep(args.out, rounded(figures, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
