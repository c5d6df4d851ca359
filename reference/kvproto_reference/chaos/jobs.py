"""Several seeds at a time: each job is this command in another process, which reads seeds from a pipe."""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

from .report import Result

__all__ = ["results"]


def results(seeds: Iterable[int], args: argparse.Namespace) -> Iterator[Result]:
    """The results of all seeds, in the order in which they end."""
    found: queue.Queue[Result | None] = queue.Queue()
    left, lock = iter(seeds), threading.Lock()
    command = [sys.executable, "-m", "kvproto_reference.chaos", "--worker", "--seconds", str(args.seconds)]
    for option, value in (("--transport", args.transport), ("--break", args.broken)):
        command += [option, value] if value else []
    command += ["--nixl"] * args.nixl

    def work() -> None:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            while True:
                with lock:
                    seed = next(left, None)
                if seed is None:
                    break
                print(seed, file=process.stdin, flush=True)
                line = process.stdout.readline()
                if not line:
                    break
                found.put(Result.of(json.loads(line)))
            process.stdin.close()
        found.put(None)

    for _ in range(args.jobs):
        threading.Thread(target=work, daemon=True).start()
    ended = 0
    while ended < args.jobs:
        one = found.get()
        if one is None:
            ended += 1
        else:
            yield one
