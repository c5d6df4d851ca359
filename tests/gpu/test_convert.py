"""Conversion on GPUs, over the worlds of the host's tests: byte for byte, in the mapped memory of a peer too."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Sink, lay_out, new_ticket
from kvproto.copying.execute import checksums, execute
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.transport import CudaTransport
from kvproto.wire.enums import ErrorCode, Feature
from tests import pools
from tests.conversions import LAYERS, WORLDS, Engine, Rank, told, values, whole, widened
from tests.door.test_conversion import PROMPT, handed_over, ranks_of, serving
from tests.errors import raises
from tests.gpu.memory import get, on_gpu, put
from tests.plan.test_conversion import World, regions
from tests.pools import contents

PAIRS = [*WORLDS, (Engine("bf16", 1, 4), Engine("e4m3_block", 1, 8, blocks=16))]


def on(device: int, rank: Rank, shift: int = 0) -> DeviceMemory:
    """The same bytes on a GPU, behind some others."""
    memory = DeviceMemory(contents(rank.pool).size + shift, device)
    put(memory, np.concatenate([np.zeros(shift, np.uint8), contents(rank.pool)]))
    return memory


@pytest.mark.parametrize(("source", "sink"), PAIRS)
@pytest.mark.parametrize("shift", [0, 4, 3])
def test_every_byte_is_that_of_the_host(devices: tuple[int, int], source: Engine, sink: Engine, shift: int) -> None:
    """Whether memory is aligned or not; checksums are those of the host, KVP-CNV-VERIFY."""
    enable_peer(0, 1) if max(devices) else None
    copier = Copier(0)
    for a, b, program in World.of(source, sink).programs:
        here, there = on(devices[0], a, shift), on(devices[1], b, shift)
        places = {0: here.address + shift}, {0: there.address + shift}
        copy = copier.submit([CopyJob(copier.prepare(program, *places), program.maps)])
        copy.wait()
        assert (copy.done, copy.bytes) == (True, program.bytes)
        execute(program, regions(a), regions(b))
        assert np.array_equal(get(there)[shift:], contents(b.pool))
        for rank, place, is_sink in ((a, places[0], False), (b, places[1], True)):
            assert copier.begin_checksums(program, place, is_sink)() == checksums(program, regions(rank), is_sink)
        here.close()
        there.close()


@pytest.mark.parametrize("scale", [1.0, 0.0123, 2.0**-80, 2.0**-100, 448.0, 3e38])
@pytest.mark.parametrize("widens", [False, True])
def test_every_number_is_that_of_the_host(scale: float, widens: bool) -> None:
    """All BF16, infinite ones and NaN among them, and all codes of FP8; KVP-CNV-EXACT."""
    shape: dict[str, Any] = {"kv_heads": 1, "head_dim": 32, "page": 16}
    fp8 = Cache.gqa("kv", 1, dtype=DType.F8E4M3, **shape).converts("e4m3_tensor", scales={"k": scale, "v": scale})
    sides = [lay_out([cache]) for cache in (Cache.gqa("kv", 1, **shape).converts("e4m3_tensor"), fp8)]
    source, sink = sides[::-1] if widens else sides
    pages = (1 << 16) // (16 * 32)
    ends = [columns_without_gaps(geometry, 0, {0: pages}) for geometry in (source, sink)]
    layouts = [RankLayout(geometry, 0, columns) for geometry, (columns, _) in zip((source, sink), ends, strict=True)]
    window = {0: Window(0, 16 * pages, np.arange(pages))}
    program = Pair(plan(source, sink, (Feature.CONVERT,)).between(0, 0), *layouts).lower(window, window)
    kind = np.uint8 if widens else np.uint16
    every = np.arange(ends[0][1] // np.dtype(kind).itemsize).astype(kind).view(np.uint8)
    here, there = (DeviceMemory(length) for _, length in ends)
    put(here, every)
    copier = Copier(0)
    copier.submit([CopyJob(copier.prepare(program, {0: here.address}, {0: there.address}), program.maps)]).wait()
    wanted = np.zeros(ends[1][1], np.uint8)
    execute(program, {0: memoryview(every)}, {0: memoryview(wanted)})
    assert np.array_equal(get(there), wanted)


def test_pairs_and_layers_share_a_launch() -> None:
    """More pairs than a copier has slots, each of one layer."""
    copier, jobs, checks = Copier(0, slots=2), [], []
    for source, sink in WORLDS:
        a, b, program = World.of(source, sink).programs[0]
        here, there = on(0, a), on(0, b)
        prepared = copier.prepare(program, {0: here.address}, {0: there.address})
        jobs.append(CopyJob(prepared, program.maps, (1, LAYERS - 1)))
        execute(program.select(layers=range(1, LAYERS - 1)), regions(a), regions(b))
        checks.append((here, there, contents(b.pool)))
    copier.submit(jobs).wait()
    for _, there, wanted in checks:
        assert np.array_equal(get(there), wanted)


def test_many_launches_follow_one_another() -> None:
    """Each has buffers of its own until it is done."""
    a, b, program = World.of(*WORLDS[0]).programs[0]
    here, there, copier = on(0, a), on(0, b), Copier(0, slots=4)
    job = CopyJob(copier.prepare(program, {0: here.address}, {0: there.address}), program.maps)
    copies = [copier.submit([job]) for _ in range(4)]
    copies[0].wait()
    copier.submit([job]).wait()
    execute(program, regions(a), regions(b))
    assert np.array_equal(get(there), contents(b.pool))


def test_rows_beyond_the_pool_are_refused() -> None:
    a, b, program = World.of(*WORLDS[0]).programs[0]
    here, there, copier = on(0, a), on(0, b), Copier(0)
    prepared = copier.prepare(program, {0: here.address}, {0: there.address})
    beyond = attrs.evolve(program.maps[0], sink_item=program.maps[0].sink_item + (1 << 20))
    with raises(LocalError, code=ErrorCode.OUT_OF_REGION):
        copier.submit([CopyJob(prepared, [beyond])])
    assert np.array_equal(get(there), contents(b.pool))


# between Sources and Sinks

WAYS: dict[str, dict[str, Any]] = {"push": {"transports": ["cuda"]}, "pull": {"transports": ["cuda"], "pull": True}}


@attrs.frozen(eq=False)
class OnGpu:
    """A rank whose pool is on a GPU; what tests fill and compare is its copy on the host."""

    host: Rank
    pool: Pool

    @classmethod
    def of(cls, host: Rank, device: int) -> "OnGpu":
        found = cls(host, pools.allocate(host.geometry, host.rank, {0: 2 * len(host.items)}, device))
        found.upload()
        return found

    @property
    def items(self) -> Any:
        return self.host.items

    def upload(self) -> None:
        put(on_gpu(self.pool), contents(self.host.pool))

    def download(self) -> Rank:
        contents(self.host.pool)[:] = get(on_gpu(self.pool), contents(self.host.pool).size)
        return self.host


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("source", "sink"), WORLDS)
def test_pages_arrive_in_the_form_of_the_sink(
    source: Engine, sink: Engine, way: str, devices: tuple[int, int], tmp_path: Path
) -> None:
    """With checksums; KVP-CNV-EXACT, KVP-CNV-VERIFY."""
    geometries, options, held = told(source, sink), Options(**WAYS[way]), whole(source, values())
    hosts = ranks_of(source, geometries[0])
    for host in hosts:
        host.fill(held)
    here = [OnGpu.of(host, devices[0]) for host in hosts]
    there = OnGpu.of(Rank.of(sink, geometries[1], sink.tp - 1), devices[1])
    wanted = whole(sink, values()) if source.form == "bf16" else widened(source, held)
    with (
        serving(here, tmp_path, options) as (sources, address),
        Sink("d", there.pool, {"p": address}, options) as taker,
    ):
        arrived = handed_over(sources, here, taker, there, new_ticket("p"))
        assert arrived.checksums
        assert not there.download().wrong(wanted)


@pytest.mark.parametrize("way", WAYS)
def test_rows_go_while_prefill_runs(way: str, devices: tuple[int, int], tmp_path: Path) -> None:
    """Chunk by chunk and layer by layer; what is not computed yet is other bytes until then."""
    engines, options = WORLDS[0], Options(**WAYS[way], verify="pages", part_bytes=1)
    geometries, held = told(*engines), whole(engines[0], values())
    here = [OnGpu.of(host, devices[0]) for host in ranks_of(engines[0], geometries[0])]
    there = OnGpu.of(Rank.of(engines[1], geometries[1], 0), devices[1])
    ticket = new_ticket("p")
    with (
        serving(here, tmp_path, options) as (sources, address),
        Sink("d", there.pool, {"p": address}, options) as taker,
    ):
        fetch = taker.fetch(ticket, PROMPT, {"kv": there.items})
        for source, rank in zip(sources, here, strict=True):
            request = source.request(ticket, PROMPT)
            for tokens, layers in ((8, None), (20, (0, 1)), (20, (1, 3))):
                rank.host.fill(held, tokens, layers)
                rank.upload()
                request.computed({"kv": rank.items[: tokens // 4]}, tokens=tokens, layers=layers)
            rank.host.fill(held)
            rank.upload()
            request.finish({"kv": rank.items})
        fetch.wait(20)
    assert not there.download().wrong(whole(engines[1], values()))


class Mistaken(CudaTransport):
    """A transport that rounds the greatest of each block to its neighbour."""

    def start(self, moves: Any) -> Any:
        copy = super().start(moves)
        copy.wait()
        for move in moves:
            (region,) = move.sinks.values()
            held = get(region)
            held[held == 0x7E] = 0x7D
            put(region, held)
        return copy


def test_a_checksum_sees_bytes_of_another_formula(tmp_path: Path) -> None:
    """The sums are of what the source should have written; KVP-CNV-VERIFY."""
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    geometries = told(bf16, fp8)
    host = Rank.of(bf16, geometries[0], 0)
    host.fill(whole(bf16, values()))
    here, there = OnGpu.of(host, 0), OnGpu.of(Rank.of(fp8, geometries[1], 0), 0)
    wrong, right = Options(transports=[Mistaken()]), Options(transports=["cuda"])
    with (
        serving([here], tmp_path, wrong) as (sources, address),
        Sink("d", there.pool, {"p": address}, right) as taker,
    ):
        with pytest.raises(KvprotoError) as caught:
            handed_over(sources, [here], taker, there, new_ticket("p"))
        assert caught.value.code == ErrorCode.VERIFY_FAILED
