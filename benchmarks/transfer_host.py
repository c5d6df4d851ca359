"""Scattered runs between two processes by NIXL over host memory: a descriptor a run, packed into slots, and one long write.

`python benchmarks/transfer_host.py [--out]`. Each round measures all ways one after the other; rates are medians. The ceiling is
one NIXL write of 64 MB. On host memory UCX copies with a core of the sender, the packer with another, and the sink
unpacks with a third: with fewer cores than that they wait for each other; `cpus` says how many there were, and `load` how
many threads of other processes competed for them.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import attrs
import numpy as np
from harness import arguments, child, facts, keep

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry, Rank, mla, owns
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.nixl.agent import Agent, Registered
from kvproto.transport.nixl.direct import Costs, DirectWrite, choose
from kvproto.transport.staging.packed import PackedStream
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender

RUNS = (512, 1152, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
POOL, MOVED, CEILING = 256 << 20, 128 << 20, 64 << 20
MOST_DESCRIPTORS = 16384
SLOTS = 4


def program(run: int, number: int) -> CopyProgram:
    """`number` runs of `run` bytes, in random order on both sides of a pool of POOL bytes."""
    rows, row = (1, run) if run < 8192 else (run // 4096, 4096)
    group = mla(0, "pages", 0, row, rows)
    group = attrs.evolve(group, parts=(attrs.evolve(group.parts[0], lane_bytes=row),))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, [0]),)),))
    items = POOL // run
    own = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: items})[0])
    dice = np.random.default_rng(run)
    windows = [{0: Window(0, number * rows, dice.permutation(items)[:number])} for _ in range(2)]
    return Pair(plan(geometry, geometry).between(0, 0), own, own).lower(*windows)


def sink(conn: Connection, slot_bytes: int) -> None:
    """Pages and staging slots of a peer; unpacks what chunks name."""
    pages = np.ones(POOL, np.uint8)
    with Agent() as agent:
        staging = agent.register(np.ones(SLOTS * slot_bytes, np.uint8), slot_bytes)
        conn.send([agent.register(pages).region(0), staging.region(1)])
        receiver = StagedReceiver(staging)
        while asked := conn.recv():
            if isinstance(asked, str):  # a checksum
                conn.send(int(pages.view(np.uint64).sum(dtype=np.uint64)))
                continue
            sequence, run, number = asked
            receiver.open(sequence, PackedStream(program(run, number), "sink", {0: memoryview(pages)}))
            conn.send(None)
            while not receiver.finish(sequence):
                if (credit := receiver.credit(1)) is not None:
                    conn.send(credit)
                receiver.chunk(conn.recv())
            receiver.close(sequence)
            conn.send(None)


def packed(
    conn: Connection, agent: Agent, link: StagedLink, sequence: int, run: int, made: CopyProgram, own: Registered
) -> float:
    """Seconds from the first byte that is gathered to the last one that is scattered."""
    conn.send((sequence, run, int(made.maps[0].size * made.ops["lane_bytes"][0]) // run))
    assert conn.recv() is None
    begin = time.perf_counter()
    sender = StagedSender(link, PackedStream(made, "source", {0: memoryview(own.memory.buffer)}))  # type: ignore[arg-type]
    while not sender.done:
        while conn.poll(0):
            link.grant(conn.recv())
        before = sender.under_way
        pieces = sender.step()
        for piece in pieces:
            conn.send(piece.notice(1, sequence))
        if not pieces and sender.under_way == before:
            wait([conn, agent], 0.01)
            agent.wait(0)
    while (message := conn.recv()) is not None:
        link.grant(message)
    return time.perf_counter() - begin


def direct(agent: Agent, made: CopyProgram, own: Registered, peer: Any) -> float:
    """Seconds from the program to the last byte."""
    begin = time.perf_counter()
    assert DirectWrite(agent, made, {0: own}, {0: peer}).post().wait(60)
    return time.perf_counter() - begin


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "transfer_host", rounds=7)
    parser.add_argument("--slot", type=int, default=8 << 20, help="bytes of a staging slot")
    parser.add_argument("--runs", type=int, nargs="*", default=list(RUNS), help="their lengths in bytes")
    args = parser.parse_args()
    head = (
        {"benchmark": "transfer_host", "unit": "GB/s"} | facts("nixl") | {"ucx_tls": os.environ.get("UCX_TLS", "all")}
    )
    samples: dict[str, dict[str, Any]] = {}
    with child(sink, args.slot) as peer, Agent() as agent:
        own = agent.register(np.random.default_rng(0).integers(0, 256, POOL, np.uint8))
        staging = agent.register(np.ones(SLOTS * args.slot, np.uint8), args.slot)
        pages, slots = (agent.connect(region, "regions") for region in peer.recv())
        link, sequence = StagedLink(staging, slots), 0
        heads = "".join(
            f"{name:>{w}}" for name, w in (("descriptors", 14), ("ceiling", 10), ("direct", 10), ("packed", 10))
        )
        print(f"{'run':>10}{heads}{'of ceiling':>12}  GB/s, medians")
        for run in args.runs:
            whole, fewer = MOVED // run, min(MOVED // run, MOST_DESCRIPTORS)
            all_runs, some_runs = program(run, whole), program(run, fewer)
            row: dict[str, Any] = {"ceiling": [], "direct": [], "packed": [], "descriptors": fewer}
            samples[str(run)] = row
            for i in range(args.rounds + 1):  # the first one warms up
                begin = time.perf_counter()
                assert pages.write(own.memory.part(0, CEILING), pages.memory.part(0, CEILING)).wait(60)
                rates = {"ceiling": CEILING / (time.perf_counter() - begin)}
                rates["direct"] = some_runs.bytes / direct(agent, some_runs, own, pages)
                sequence += 1
                rates["packed"] = all_runs.bytes / packed(peer, agent, link, sequence, run, all_runs, own)
                if i:
                    for way, rate in rates.items():
                        row[way].append(round(rate / 1e9, 4))
            ceiling, one, other = (median(row[way]) for way in ("ceiling", "direct", "packed"))
            print(f"{run:10}{fewer:14}{ceiling:10.2f}{one:10.2f}{other:10.2f}{other / ceiling:12.2f}")
        short, top = str(args.runs[0]), median(s for row in samples.values() for s in row["ceiling"])
        costs = Costs(args.runs[0] / median(samples[short]["direct"]) / 1e9, top * 1e9, 0.5)
        for run in args.runs:
            samples[str(run)]["chosen"] = choose(program(run, 4).runs(), costs).value
        chosen = {run: row["chosen"] for run, row in samples.items()}
        print(f"descriptor {costs.descriptor * 1e6:.2f} us; chosen: {chosen}")
        peer.send(None)
    keep(args.out, head | {"bytes": MOVED, "slots": SLOTS, "slot_bytes": args.slot, "runs": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
