"""Alternatives to kvproto: NIXL (UCX) and Mooncake's transfer engine, one descriptor per run, between two processes.

`measure(runs, rounds)` gives GB/s by library and run length, from the call to its completion; pools of 4 GB on two GPUs. At
most 16,384 descriptors a call, so that a round stays short: a descriptor's price does not depend on their number. A library
that is not installed, or does not start, is left out with its reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness import child, rounded

POOL = 4 << 30
MOST = 16384


def _nixl_agent(name: str, device: int) -> tuple[Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    from kvproto.transport.cuda.memory import DeviceMemory

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = DeviceMemory(POOL, device)
    agent.register_memory([(memory.address, POOL, device, "")], "VRAM")
    return agent, memory


def _nixl_owner(pipe: Connection) -> None:
    agent, memory = _nixl_agent("owner", 1)
    pipe.send((agent.get_agent_metadata(), memory.address))
    pipe.poll(None)


def _nixl_writer(pipe: Connection) -> Callable[[np.ndarray, np.ndarray, int], Callable[[], None]]:
    agent, memory = _nixl_agent("writer", 0)
    metadata, address = pipe.recv()
    peer = agent.add_remote_agent(metadata)

    def prepare(sources: np.ndarray, sinks: np.ndarray, run: int) -> Callable[[], None]:
        lists = []
        for base, places, device in ((memory.address, sources, 0), (address, sinks, 1)):
            table = np.stack([base + places * run, np.full(len(places), run), np.full(len(places), device)], axis=1)
            lists.append(agent.get_xfer_descs(np.ascontiguousarray(table, np.uint64), "VRAM"))
        handle = agent.initialize_xfer("WRITE", lists[0], lists[1], peer)

        def go() -> None:
            state = agent.transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise RuntimeError("the transfer failed")
                state = agent.check_xfer_state(handle)

        return go

    return prepare


def _mooncake_engine(device: int) -> tuple[Any, Any, str]:
    os.environ["MC_INTRANODE_NVLINK"] = "1"
    from mooncake.engine import TransferEngine

    from kvproto.transport.cuda.memory import DeviceMemory

    for protocol in ("nvlink_intra", "nvlink"):
        engine = TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == 0:
            memory = DeviceMemory(POOL, device)
            if engine.register_memory(memory.address, POOL) == 0:
                return engine, memory, f"127.0.0.1:{engine.get_rpc_port()}"
    raise RuntimeError("no NVLink transport starts")


def _mooncake_owner(pipe: Connection) -> None:
    _engine, memory, name = _mooncake_engine(1)
    pipe.send((name, memory.address))
    pipe.poll(None)


def _mooncake_writer(pipe: Connection) -> Callable[[np.ndarray, np.ndarray, int], Callable[[], None]]:
    engine, memory, _ = _mooncake_engine(0)
    name, address = pipe.recv()

    def prepare(sources: np.ndarray, sinks: np.ndarray, run: int) -> Callable[[], None]:
        here, there = ((base + p * run).tolist() for base, p in ((memory.address, sources), (address, sinks)))
        lengths = [run] * len(here)

        def go() -> None:
            if engine.batch_transfer_sync_write(name, here, there, lengths) != 0:
                raise RuntimeError("the transfer failed")

        return go

    return prepare


LIBRARIES = {
    "NIXL, descriptors": (_nixl_owner, _nixl_writer),
    "Mooncake, descriptors": (_mooncake_owner, _mooncake_writer),
}


def _write(result: Connection, library: str, pipe: Connection, runs: list[int], rounds: int) -> None:
    try:
        prepare = LIBRARIES[library][1](pipe)
        dice = np.random.default_rng(1)
        for run in runs:
            number = max(min(MOST, (1 << 30) // run), 1)
            go = prepare(*(dice.permutation(POOL // run)[:number] for _ in range(2)), run)
            samples = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                go()
                samples.append(number * run / (time.perf_counter() - began) / 1e9)
            result.send((run, samples[1:]))
        result.send(None)
    except Exception as error:
        result.send(f"{type(error).__name__}: {error}")


def measure(runs: list[int], rounds: int) -> dict[str, dict[int, list[float]] | str]:
    """By library, the samples by run length, or why there are none."""
    return {library: _measure(library, runs, rounds) for library in LIBRARIES}


def _measure(library: str, runs: list[int], rounds: int) -> dict[int, list[float]] | str:
    samples: dict[int, list[float]] = {}
    with child(LIBRARIES[library][0]) as owner, child(_write, library, owner, runs, rounds) as result:
        try:
            while result.poll(90):
                if (word := result.recv()) is None or isinstance(word, str):
                    return samples or word or "no samples"
                samples[word[0]] = word[1]
        except EOFError:
            return samples or "the process ended"
    return samples or "no answer in 90 s"


if __name__ == "__main__":
    for library, rates in measure([512, 8192, 1 << 20, 1 << 26], 3).items():
        print(library, rates if isinstance(rates, str) else rounded(rates, 2))
