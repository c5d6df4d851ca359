"""What checksums cost a hand-over between GPUs: `python benchmarks/verify_gpu.py [--write]` on one GPU or two.

A prefill process holds the pages of 8 prompts of 8,192 tokens (8 layers, 8 KV heads of 128, bf16: 2.15 GB), scattered; a
decode process fetches all of them at once, with checksums and without, in turn. The figure is the time from the first `fetch`
until the last request is reported as arrived: alone, and beside a thread in each process that computes in Python without
end, as an engine's loop may. With two GPUs the pages cross NVLink; on one, both processes share it. --before measures another
checkout in the same run; --write keeps raw samples in benchmarks/results/verify_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from facts import facts

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, lay_out, new_ticket, write_ticket
from kvproto.prompt import read_ticket

RESULTS = Path(__file__).parent / "results/verify_gpu.json"
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


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(2000))


def prefill(pipe: Connection, folder: str, device: int, busy: bool) -> None:
    torch.cuda.set_device(device)
    stop = threading.Event()
    sources = {}
    for name, verify in WAYS.items():
        held, made = pool(device, True)
        sources[name] = Source("prefill", held, f"ipc://{folder}/{verify}", options=Options(verify=verify)), made
    torch.cuda.synchronize()
    if busy:
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        name, seed = asked
        requests, tickets = [], []
        for i, pages in enumerate(scattered(seed)):
            ticket = new_ticket("prefill")
            request = sources[name][0].request(ticket, Prompt(range(i, i + TOKENS)))
            request.finish({"kv": pages})
            requests.append(request)
            tickets.append(write_ticket(ticket))
        pipe.send(tickets)
        for request in requests:
            request.wait(60)
    stop.set()
    for source, _ in sources.values():
        source.close()


def decode(pipe: Connection, folder: str, device: int, busy: bool) -> None:
    torch.cuda.set_device(device)
    stop = threading.Event()
    sinks = {}
    for name, verify in WAYS.items():
        held, made = pool(device, False)
        address = f"ipc://{folder}/{verify}"
        sinks[name] = Sink("decode", held, {"prefill": address}, options=Options(verify=verify)), made
    torch.cuda.synchronize()
    if busy:
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        name, seed, tickets = asked
        tickets = [read_ticket(each) for each in tickets]
        prompts = [Prompt(range(i, i + TOKENS)) for i in range(PROMPTS)]
        began = time.perf_counter()
        fetches = [
            sinks[name][0].fetch(ticket, prompt, {"kv": pages})
            for ticket, prompt, pages in zip(tickets, prompts, scattered(seed + 1), strict=True)
        ]
        ends = []
        for fetch in fetches:
            fetch.wait(60)
            ends.append(1e3 * (time.perf_counter() - began))
        pipe.send(ends)
    stop.set()
    for sink, _ in sinks.values():
        sink.close()


def measure(rounds: int, busy: bool, devices: tuple[int, int]) -> dict[str, list[list[float]]]:
    """By way and round, milliseconds from the first `fetch` until each request has arrived."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for work, device in zip((prefill, decode), devices, strict=True):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, folder, device, busy))
            process.start()
            sides.append((here, process))
            here.recv()
        (source, _), (sink, _) = sides
        samples: dict[str, list[list[float]]] = {name: [] for name in WAYS}
        for n in range(rounds + WARM_UP):
            for name in WAYS:
                source.send((name, n))
                sink.send((name, n, source.recv()))
                ends = sink.recv()
                if n >= WARM_UP:
                    samples[name].append(ends)
        for pipe, process in sides:
            pipe.send(None)
            process.join(30)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="a checkout of kvproto to measure in the same run")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write, if not to benchmarks/results")
    args = parser.parse_args()
    devices = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
    found: dict[str, Any] = {}
    for busy in (False, True):
        name = "busy" if busy else "alone"
        found[name] = measure(args.rounds, busy, devices)
        for way, rounds in found[name].items():
            last = [max(each) for each in rounds]
            print(f"{name}, {way}: median {median(last):.1f} ms, least {min(last):.1f}", flush=True)
    if args.before:
        path = os.pathsep.join([str(args.before), os.environ.get("PYTHONPATH", "")])
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "before.json"
            command = [sys.executable, __file__, "--rounds", str(args.rounds), "--out", str(out)]
            print(f"before, {args.before}:", flush=True)
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
            found["before"] = json.loads(out.read_text())["samples"]
    if args.write or args.out:
        made = facts() | {"devices": devices, "samples": found}
        (args.out or RESULTS).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
