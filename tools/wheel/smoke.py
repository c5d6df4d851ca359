"""What the bare wheel can do: the codec, a plan, and bytes moved by it, with kvproto's own dependencies alone."""

import importlib.util

import numpy as np

import kvproto
from kvproto import wire
from kvproto.copying.execute import execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import lower
from kvproto.copying.program import RankLayout, Window
from kvproto.node.pool import pack
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.transport import names
from kvproto.wire.messages import Goodbye

TOKENS = 21


def codec() -> None:
    """A frame comes back as it was."""
    message = Goodbye(session=7, reason="shutdown")
    assert wire.decode(wire.encode(message)) == message


def moved(source: Geometry, sink: Geometry) -> int:
    """Bytes that arrive in a pool of ones, from pools of zeros, by every route of the plan."""
    made = plan(source, sink)
    pools = {}
    for at, geometry, fill in (("source", source, 0), ("sink", sink, 255)):
        for share in geometry.ranks:
            need = items_needed(geometry.groups[0], 0, 0, TOKENS)
            columns, length = pack(geometry, share.rank, {0: need})
            pools[at, share.rank] = columns, bytearray([fill]) * length, Window(0, TOKENS, np.arange(need))
    for a, b in sorted({(r.source, r.sink) for r in made.routes}):
        here, there = pools["source", a], pools["sink", b]
        sides = RankLayout(source, a, here[0]), RankLayout(sink, b, there[0])
        copy = lower(made.between(a, b), *sides, {0: here[2]}, {0: there[2]})
        execute(copy, {0: memoryview(here[1])}, {0: memoryview(there[1])})
    return sum(pools["sink", r.rank][1].count(0) for r in sink.ranks)


def main() -> None:
    """Everything in turn; an assertion that fails ends it."""
    assert not importlib.util.find_spec("torch")
    assert kvproto.__version__
    codec()
    cache = [Cache.gqa("target", layers=3, kv_heads=4, head_dim=16, page=4)]
    found = moved(lay_out(cache, Parallel(tp=4)), lay_out(cache, Parallel(tp=2)))
    assert found == TOKENS * 3 * 2 * 4 * 16 * 2, found
    assert {"shm", "cuda", "nixl"} <= set(names()), names()
    print("the wheel works in an empty environment")


if __name__ == "__main__":
    main()
