"""Pages of a GPU's pool that go to the host and come back: right bytes in stream order, layer by layer."""

import math
from collections.abc import Iterator

import pytest

from kvproto import Cache, DType, Pool, Tiers, lay_out
from kvproto.tiers import PageLease, WritePolicy

torch = pytest.importorskip("torch")
pager = pytest.importorskip("kvproto.transport.cuda.pager", exc_type=ImportError)

PAGE, LAYERS, PAGES = 16, 6, 40
BUSY = 40_000_000
"""Cycles for which the engine's stream is held back: some 20 ms, longer than any copy here."""


class Engine:
    """A target and a draft, whose rows are numbers made of layer, token and the prompt's seed."""

    def __init__(self, policy: WritePolicy = WritePolicy.WRITE_THROUGH, host: int = 128) -> None:
        caches = [
            Cache.gqa("target", LAYERS, kv_heads=2, head_dim=64, page=PAGE, dtype=DType.F32),
            Cache.mla("draft", 1, latent=48, rope=16, page=PAGE // 2, dtype=DType.F32, model=1),
        ]
        self.pool = Pool.allocate(lay_out(caches), {"target": PAGES, "draft": 2 * PAGES}, device=0)
        self.stream = torch.cuda.Stream()
        names = {"weights.target": "1", "rope.target": "-", "dtype.target": "F32"}
        self.tiers = Tiers(self.pool, names, page=PAGE, host=host, policy=policy, stream=self.stream.cuda_stream)

    def views(self, slot: int) -> Iterator[tuple[int, "torch.Tensor"]]:
        """Layer, and the numbers [pages, tokens, heads, width] of each part in a slot."""
        for name, group in (("target", 0), ("draft", 1)):
            share = self.pool.layout.shares[group]
            parts = [part.name for part in self.pool.group(name).parts]
            for layer in share.layers.tolist():
                for part in parts:
                    region, offset, shape, strides = self.pool.place(name, layer, part)
                    whole = torch.from_dlpack(self.pool.memories[region]).view(torch.uint8)
                    seen = whole.as_strided(shape, strides, offset).view(torch.float32)
                    count = PAGE // shape[1]
                    yield layer, seen[slot * count : (slot + 1) * count]

    def compute(self, seed: int, lease: PageLease, first: int, pages: int) -> None:
        """Pages [first, pages), on the engine's stream, which is busy before and after."""
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(BUSY)
            for i in range(first, pages):
                for k, (layer, rows) in enumerate(self.views(lease.slots[i])):
                    rows.copy_(self.right(seed, i, k, layer, rows.shape))
            torch.cuda._sleep(BUSY)

    def right(self, seed: int, i: int, k: int, layer: int, shape: tuple[int, ...]) -> "torch.Tensor":
        base = ((seed * 100 + i) * 32 + k) * 8 + layer
        return (torch.arange(math.prod(shape), device="cuda", dtype=torch.float32) % 97 + base).reshape(shape)

    def wrong(self, seed: int, lease: PageLease, pages: int, layers: range) -> "torch.Tensor":
        """How many numbers of these layers are wrong, as the engine's stream sees it now."""
        with torch.cuda.stream(self.stream):
            bad = torch.zeros((), device="cuda", dtype=torch.int64)
            for i in range(pages):
                for k, (layer, rows) in enumerate(self.views(lease.slots[i])):
                    if layer in layers:
                        bad += (rows != self.right(seed, i, k, layer, rows.shape)).sum()
            return bad

    def turn(self, seed: int, tokens: int) -> PageLease:
        chain = self.tiers.chain([seed + n % 7 for n in range(tokens)])
        lease = self.tiers.open(chain, -(-tokens // PAGE))
        assert lease is not None
        self.tiers.step()
        lease.wait()
        self.compute(seed, lease, lease.pages, tokens // PAGE)
        lease.leave(tokens)
        return lease


def poison(engine: Engine) -> None:
    with torch.cuda.stream(engine.stream):
        for memory in engine.pool.memories.values():
            torch.from_dlpack(memory).view(torch.uint8).fill_(0xEE)


@pytest.mark.parametrize("part", [1, 8 << 20], ids=["a copy a layer", "one copy"])
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_pages_come_back_in_stream_order_and_layer_by_layer(
    policy: WritePolicy, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pager, "_PART", part)
    engine = Engine(policy)
    tiers = engine.tiers
    engine.turn(1, 20 * PAGE)
    tiers.step()
    if policy is WritePolicy.WRITE_THROUGH:
        assert tiers.busy, "nobody has waited for the stream, nor has the host"
        tiers.drain()
        tiers.device.evict(PAGES)
    else:
        engine.turn(2, 30 * PAGE)  # writes the slots of the first prompt once they are on the host
        engine.turn(3, 40 * PAGE)
        tiers.drain()
        tiers.device.evict(PAGES)
        tiers.drain()
    poison(engine)
    chain = tiers.chain([1 + n % 7 for n in range(20 * PAGE)])
    lease = tiers.open(chain, 20)
    assert lease is not None
    tiers.step()
    assert lease.pages == 20
    bad = []
    for layer in range(LAYERS):
        lease.wait(layer)
        bad.append(engine.wrong(1, lease, 20, range(layer + 1)))
    torch.cuda.synchronize()
    assert [int(each) for each in bad] == [0] * LAYERS
    tiers.step()
    assert lease.ready
    lease.leave(20 * PAGE)
    tiers.close()


def test_a_load_that_nobody_waits_for_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, as its engine goes on with other requests."""
    monkeypatch.setattr(pager, "_PART", 1)
    engine = Engine()
    tiers = engine.tiers
    engine.turn(1, 20 * PAGE)
    tiers.drain()
    tiers.device.evict(PAGES)
    poison(engine)
    lease = tiers.open(tiers.chain([1 + n % 7 for n in range(20 * PAGE)]), 20)
    assert lease is not None
    tiers.step()
    while not lease.ready:
        tiers.step()
    assert lease.pages == 20
    bad = engine.wrong(1, lease, 20, range(LAYERS))
    torch.cuda.synchronize()
    assert int(bad) == 0
    lease.leave(20 * PAGE)
    tiers.close()


def test_many_turns_of_conversations_that_do_not_fit() -> None:
    engine = Engine(WritePolicy.WRITE_BACK, host=200)
    tiers, found = engine.tiers, 0
    for turn in range(1, 5):
        for seed in (1, 20, 40, 60):
            tokens = turn * 5 * PAGE
            chain = tiers.chain([seed + n % 7 for n in range(tokens)])
            lease = tiers.open(chain, turn * 5)
            assert lease is not None
            tiers.step()
            lease.wait()
            bad = engine.wrong(seed, lease, lease.pages, range(LAYERS))
            torch.cuda.synchronize()
            assert int(bad) == 0
            found += lease.found["host"]
            engine.compute(seed, lease, lease.pages, turn * 5)
            lease.leave(tokens)
            tiers.step()
    assert found > 20
    tiers.drain()
    assert tiers.device.slots.free + tiers.device.slots.idle == PAGES
    tiers.close()
