"""The speed of the reference engines with a real model, beside transformers with the same weights, prompts and threads.

`python benchmarks/serving.py [--out] [--model DIR] [--rounds N] [--quick]`: greedy, in float32, without a draft, one
thread to a process; prompts of random tokens, so that nothing is found in a cache. All contenders are started once and have
their turns in alternation. A request is compared with what the first contender wrote for it.

    generate      transformers' `generate`, which takes a whole batch at a time
    continuous    transformers' continuous batching (`ContinuousBatchingManager`), with pages of the same length
    undivided     one reference engine for prefill and decode
    pair          a prefill and a decode engine of the demo in processes of their own, over shared memory

First batches that are there at once, in tokens a second of the clock and of CPU; then requests that come by themselves (exponential gaps), at
several rates. `generate` cannot take those. The default model is that of `make demo ARGS=--real`, if it is there.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from harness import arguments, child, facts, keep, rounded

from kvproto_reference import checkpoint, smollm2
from kvproto_reference.demo import decode, prefill
from kvproto_reference.demo.engines import Engines
from kvproto_reference.demo.prompts import Prompt
from kvproto_reference.demo.router import LOAD, Request, Router
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.undivided import Undivided

BATCHES, RATES, REQUESTS = (1, 8), (0.2, 0.4, 0.8), 12
"""Prompts at once; requests a second, and how many come at each rate."""
LENGTH, NEW = 128, 48
"""Tokens of a prompt and of its answer."""
PAGE, PAGES, BUDGET = 16, 400, 512
"""Tokens of a page, pages of a pool, and prompt tokens that a step may compute."""
HOW = SamplingParams(ignore_eos=True)
Arrivals = Sequence[tuple[float, list[int]]]
"""The time of each request, in seconds, and its prompt."""


@attrs.define
class Answer:
    """The tokens of a request, and when each was there, in seconds after the request came."""

    tokens: list[int] = attrs.Factory(list)
    at: list[float] = attrs.Factory(list)
    steps: int = 0
    """Steps of decode, where a pair says them."""

    def take(self, tokens: Sequence[int], now: float) -> None:
        """Take all tokens so far."""
        self.at += (len(tokens) - len(self.at)) * [now]
        self.tokens = list(tokens)


Serve = Callable[[Arrivals, int], list[Answer]]
"""Serves requests, with so many new tokens each."""
Ask = Callable[[int, str], list[list[int]]]
"""Makes so many prompts of a seed."""


def undivided(model: Path) -> Serve:
    engine = Undivided(model, page_size=PAGE, pages=PAGES, chunk=BUDGET)

    def serve(arrivals: Arrivals, new: int) -> list[Answer]:
        answers = [Answer() for _ in arrivals]
        sequences: list[Any] = []
        began = time.perf_counter()
        while len(sequences) < len(arrivals) or not all(sequence.finished for sequence in sequences):
            for at, prompt in arrivals[len(sequences) :]:
                if at <= time.perf_counter() - began:
                    sequences.append(engine.add(prompt, HOW, new))
            if all(sequence.finished for sequence in sequences):
                time.sleep(max(arrivals[len(sequences)][0] - (time.perf_counter() - began), 0))
                continue
            engine.step()
            for sequence, answer, (at, _) in zip(sequences, answers, arrivals, strict=False):
                answer.take(sequence.generated, time.perf_counter() - began - at)
        return answers

    return serve


def generate(model: Any) -> Serve:
    def serve(arrivals: Arrivals, new: int) -> list[Answer]:
        prompts = torch.tensor([prompt for _, prompt in arrivals])
        began = time.perf_counter()
        found = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False)
        took = time.perf_counter() - began
        return [Answer(row[prompts.shape[1] :].tolist(), new * [took]) for row in found]

    return serve


def continuous(manager: Any) -> Serve:
    def serve(arrivals: Arrivals, new: int) -> list[Answer]:
        answers = [Answer() for _ in arrivals]
        asked: dict[str, int] = {}
        began, over = time.perf_counter(), 0
        while over < len(arrivals):
            for at, prompt in arrivals[len(asked) :]:
                if at <= time.perf_counter() - began:
                    asked[manager.add_request(prompt, max_new_tokens=new, streaming=True)] = len(asked)
            due = arrivals[len(asked)][0] - (time.perf_counter() - began) if len(asked) < len(arrivals) else 1.0
            told = manager.get_result(timeout=max(due, 0.001))
            if told is not None:
                n = asked[told.request_id]
                answers[n].take(told.generated_tokens, time.perf_counter() - began - arrivals[n][0])
                over += told.is_finished()
        return answers

    return serve


def contender(pipe: Connection, way: str, folder: Path) -> None:
    """Serve what the pipe asks for, in a process of its own."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if way == "undivided":
            serve = undivided(folder)
        else:
            import transformers

            transformers.utils.logging.disable_progress_bar()
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
            if way == "generate":
                serve = generate(model)
            else:
                sizes = {"page_size": PAGE, "num_blocks": PAGES, "max_batch_tokens": BUDGET}
                how = transformers.ContinuousBatchingConfig(**sizes)
                run = model.continuous_batching_context_manager(continuous_batching_config=how)
                serve = continuous(stack.enter_context(run))
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            pipe.send(serve(*asked))


NO_DRAFT = ("--draft", "none")


@contextmanager
def pair(model: Path, source: Sequence[str] = NO_DRAFT, sink: Sequence[str] = NO_DRAFT) -> Iterator[Serve]:
    """A prefill and a decode engine with these options of their drafts, and a router in this process."""
    with tempfile.TemporaryDirectory() as made, Engines() as engines:
        sizes = ["--page-size", str(PAGE), "--pages", str(PAGES), "--chunk", str(BUDGET)]
        shared = ["--dir", made, "--target", str(model), *sizes]
        engines.start("prefill-0", prefill.main, [*shared, *source])
        engines.start("decode-0", decode.main, [*shared, "--quiet", *sink])
        router = Router(Path(made), "prefill", engines)
        router.wait_ready(LOAD, LOAD)

        def serve(arrivals: Arrivals, new: int) -> list[Answer]:
            router.requests = []
            answers = [Answer() for _ in arrivals]
            began = time.perf_counter()

            def on_news(request: Request) -> None:
                answer, came = answers[request.number], arrivals[request.number][0]
                answer.take(request.tokens, time.perf_counter() - began - came)
                answer.steps = (request.stats or {}).get("steps", 0)

            def on_turn() -> bool:
                for at, prompt in arrivals[len(router.requests) :]:
                    if at <= time.perf_counter() - began:
                        router.submit([Prompt(name="", tokens=prompt, sampling=HOW)], new)
                return len(router.requests) == len(arrivals)

            router.collect(on_news, on_turn, 2)
            if failed := [request.error for request in router.requests if request.error]:
                raise RuntimeError(failed[0])
            return answers

        yield serve
        router.stop()
        router.close()


@attrs.frozen
class Contender:
    """A way of serving, and its processes."""

    serve: Serve
    processes: frozenset[int]

    def cpu(self) -> float:
        """Seconds of CPU that its processes have used."""
        fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.processes)
        return sum(int(user) + int(system) for _, user, system in (f[10:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def contenders(model: Path) -> Iterator[dict[str, Contender]]:
    """All of them, started, by name."""
    with ExitStack() as stack:
        serve, before = stack.enter_context(pair(model)), frozenset(map(_pid, active_children()))
        found = {"pair": Contender(serve, before)}
        for way in ("generate", "continuous", "undivided"):
            pipe = stack.enter_context(child(contender, way, model))
            pipe.recv()
            stack.callback(pipe.send, None)

            def asked(arrivals: Arrivals, new: int, pipe: Connection = pipe) -> list[Answer]:
                pipe.send((arrivals, new))
                answers: list[Answer] = pipe.recv()
                return answers

            now = frozenset(map(_pid, active_children()))
            found[way], before = Contender(asked, now - before), now
        yield {way: found[way] for way in ("generate", "continuous", "undivided", "pair")}


def _pid(process: BaseProcess) -> int:
    return process.pid or 0


def prompts(length: int, vocab: int, count: int, seed: str) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(min(100, vocab // 4), vocab) for _ in range(length)] for _ in range(count)]


def differ(found: Mapping[str, list[Answer]]) -> int:
    """The number of requests that a contender answered otherwise than the first one did."""
    first, *others = found.values()
    return sum(a.tokens != b.tokens for answers in others for a, b in zip(first, answers, strict=True))


def batches(ways: Mapping[str, Contender], rounds: int, ask: Ask, new: int) -> dict[str, Any]:
    """Tokens a second, and of CPU, by size of the batch and contender: one for each round but the first."""
    kept: dict[str, Any] = {}
    for batch in BATCHES:
        kept[str(batch)] = of = {name: {way: [] for way in ways} for name in ("rates", "cpu")}
        others = 0
        for n in range(-1, rounds):
            asked = [(0.0, prompt) for prompt in ask(batch, f"{batch} {n}")]
            found = {}
            for way, each in ways.items():
                before = each.cpu()
                found[way] = each.serve(asked, new)
                if n >= 0:
                    of["rates"][way].append(batch * new / max(answer.at[-1] for answer in found[way]))
                    of["cpu"][way].append(batch * new / max(each.cpu() - before, 0.01))
            others += differ(found)
        kept[str(batch)]["others"] = others
        for way in ways:
            shown = [
                f"{median(by[way]):6.1f} ({median(x / y for x, y in zip(by[way], by[next(iter(ways))], strict=True)):.2f})"
                for by in (of["rates"], of["cpu"])
            ]
            print(f"batch {batch} {way:11}: {shown[0]} tokens/s, {shown[1]} a second of CPU", flush=True)
    return kept


def loads(
    ways: Mapping[str, Contender], rates: Sequence[float], rounds: int, count: int, ask: Ask, new: int
) -> list[dict[str, Any]]:
    """Results of each contender that takes requests at any time, at each rate: one entry for each round."""
    kept = []
    able = {way: each.serve for way, each in ways.items() if way != "generate"}
    for rate in rates:
        for n in range(rounds):
            dice, at, asked = random.Random(f"{rate} {n}"), 0.0, []
            for prompt in ask(count, f"{rate} {n}"):
                asked.append((at, prompt))
                at += dice.expovariate(rate)
            found = {way: serve(asked, new) for way, serve in able.items()}
            for way, answers in found.items():
                wall = max(at + answer.at[-1] for (at, _), answer in zip(asked, answers, strict=True))
                first = [answer.at[0] for answer in answers]
                gaps = [b - a for answer in answers for a, b in zip(answer.at, answer.at[1:], strict=False)]
                of = {"rate": rate, "way": way, "wall": wall, "requests": count, "tokens": count * new}
                steps = {"steps": total} if (total := sum(answer.steps for answer in answers)) else {}
                kept.append({**of, **steps, "others": differ(found), "first": first, "between": gaps})
                shown = f"first {median(first) * 1e3:.0f} ms, between {median(gaps) * 1e3:.0f} ms"
                print(f"{rate} requests/s {way:11}: {count * new / wall:5.1f} tokens/s, {shown}", flush=True)
    return kept


def tiny(folder: Path) -> Path:
    """A model of random weights, for a run of seconds."""
    import tokenizers
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({str(n): n for n in range(96)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / checkpoint.TOKENIZER_FILE))
    return folder


def main() -> int:
    parser = arguments(__doc__, "serving", rounds=5, quick="a tiny model and few requests")
    parser.add_argument("--model", type=Path, help="a folder of Hugging Face's (default: SmolLM2-135M of the demo)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if args.quick:
            model = tiny(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            model = args.model or smollm2.folder()
        length, new = (24, 6) if args.quick else (LENGTH, NEW)
        ask = partial(prompts, length, checkpoint.load_config(model).vocab)
        ways = stack.enter_context(contenders(model))
        figures = {"model": "tiny" if args.quick else smollm2.NAME, "threads": 1, "length": length, "new": new}
        figures |= facts("torch", "transformers") | {"batches": batches(ways, args.rounds, ask, new)}
        keep(args.out, rounded(figures, 4))
        rates, count, rounds = ((50.0,), 3, 1) if args.quick else (RATES, REQUESTS, max(args.rounds // 4, 1))
        figures["loads"] = loads(ways, rates, rounds, count, ask, new)
    keep(args.out, rounded(figures, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
