"""The cost of checksums to a hand-over between GPUs: `python benchmarks/verify_gpu.py [--out]` on one GPU or two.

A prefill process holds the pages of 8 prompts of 8,192 tokens (8 layers, 8 KV heads of 128, bf16: 2.15 GB), scattered; a
decode process fetches all of them at once, with checksums and without, in turn. The figure is the time from the first `fetch`
until the last request is reported as arrived: alone, and beside a thread in each process that computes in Python without
end, as an engine's loop may. With two GPUs the pages cross NVLink; on one, both processes share it. --before measures another
checkout in the same run; --out keeps all samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu import gpu_facts
from harness import arguments, child, keep

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, lay_out, new_ticket, write_ticket
from kvproto.prompt import read_ticket

LAYERS, HEADS, DIM, PAGE, TOKENS, PROMPTS = 8, 8, 128, 16, 8192, 8
WARM_UP = 2
WAYS = {"with checksums": True, "without": False}
PAGES = PROMPTS * TOKENS // PAGE


def tensors(device: int, fill: bool) -> list[torch.Tensor]:
    """A tensor a layer, [page, token, head, K then V]."""
    shape = PAGES, PAGE, HEADS, 2 * DIM
    made = [torch.empty(shape, dtype=torch.bfloat16, device=f"cuda:{device}") for _ in range(LAYERS)]
    for each in made:
        each.random_(-100, 100) if fill else each.fill_(-1)
    return made


def pool(device: int, fill: bool) -> tuple[Pool, list[torch.Tensor]]:
    geometry = lay_out([Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.BF16)])
    made = tensors(device, fill)
    split = {"k": [each[..., :DIM] for each in made], "v": [each[..., DIM:] for each in made]}
    return Pool(geometry, {"kv": split}, axes="page token head dim"), made


def scattered(seed: int) -> list[list[int]]:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    each = TOKENS // PAGE
    return [order[i * each : (i + 1) * each] for i in range(PROMPTS)]


def spin() -> None:
    while True:
        sum(range(2000))


def opened(stack: ExitStack, folder: str, device: int, busy: bool, source: bool) -> dict[str, Any]:
    """A Source or a Sink for each way; then a thread that computes, if the process is to be busy."""
    torch.cuda.set_device(device)
    sides: dict[str, Any] = {}
    for name, verify in WAYS.items():
        held, tensors_ = pool(device, source)
        stack.callback(tensors_.clear)  # the pool does not keep them
        address, options = f"ipc://{folder}/{verify}", Options(verify=verify)
        side = (
            Source("prefill", held, address, options) if source else Sink("decode", held, {"prefill": address}, options)
        )
        sides[name] = stack.enter_context(side)
    torch.cuda.synchronize()
    if busy:
        threading.Thread(target=spin, daemon=True).start()
    return sides


def prefill(pipe: Connection, folder: str, device: int, busy: bool) -> None:
    with ExitStack() as stack:
        sources = opened(stack, folder, device, busy, True)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            name, seed = asked
            requests, tickets = [], []
            for i, pages in enumerate(scattered(seed)):
                ticket = new_ticket("prefill")
                requests.append(sources[name].request(ticket, Prompt(range(i, i + TOKENS))))
                requests[-1].finish({"kv": pages})
                tickets.append(write_ticket(ticket))
            pipe.send(tickets)
            for request in requests:
                request.wait(60)


def decode(pipe: Connection, folder: str, device: int, busy: bool) -> None:
    with ExitStack() as stack:
        sinks = opened(stack, folder, device, busy, False)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            name, seed, tickets = asked
            prompts = [Prompt(range(i, i + TOKENS)) for i in range(PROMPTS)]
            order = zip(map(read_ticket, tickets), prompts, scattered(seed + 1), strict=True)
            began, ends = time.perf_counter(), []
            fetches = [sinks[name].fetch(ticket, prompt, {"kv": pages}) for ticket, prompt, pages in order]
            for fetch in fetches:
                fetch.wait(60)
                ends.append(1e3 * (time.perf_counter() - began))
            pipe.send(ends)


def measure(rounds: int, busy: bool, devices: tuple[int, int]) -> dict[str, list[list[float]]]:
    """By way and round, milliseconds from the first `fetch` until each request has arrived."""
    samples: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        source = stack.enter_context(child(prefill, folder, devices[0], busy))
        source.recv()
        sink = stack.enter_context(child(decode, folder, devices[1], busy))
        sink.recv()
        for n in range(-WARM_UP, rounds):
            for name in WAYS:
                source.send((name, n + WARM_UP))
                sink.send((name, n + WARM_UP, source.recv()))
                ends = sink.recv()
                if n >= 0:
                    samples[name].append(ends)
        for pipe in (sink, source):
            pipe.send(None)
    return samples


def main() -> None:
    parser = arguments(__doc__, "verify_gpu", rounds=15)
    parser.add_argument("--before", type=Path, help="a checkout of kvproto to measure in the same run")
    args = parser.parse_args()
    devices = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
    samples: dict[str, Any] = {}
    for busy in (False, True):
        name = "busy" if busy else "alone"
        samples[name] = measure(args.rounds, busy, devices)
        for way, rounds in samples[name].items():
            last = [max(ends) for ends in rounds]
            print(f"{name}, {way}: median {median(last):.1f} ms, least {min(last):.1f}", flush=True)
    if args.before:
        path = os.pathsep.join([str(args.before), os.environ.get("PYTHONPATH", "")])
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "before.json"
            command = [sys.executable, __file__, "--rounds", str(args.rounds), "--out", str(out)]
            print(f"before, {args.before}:", flush=True)
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
            samples["before"] = json.loads(out.read_text())["samples"]
    keep(args.out, gpu_facts() | {"devices": devices, "samples": samples})


if __name__ == "__main__":
    main()
