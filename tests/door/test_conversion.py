"""Prefill in BF16 and decode in FP8, and the other way round, between Sources and Sinks."""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Options, Prompt, Sink, Source, Ticket, new_ticket
from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto.transport.base import Exposure, Move
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode
from kvproto.wire.enums import Transport as Code
from tests.conversions import TOKENS, WORLDS, Engine, Rank, told, values, whole, widened
from tests.plan.test_conversion import World

PROMPT = Prompt(range(TOKENS))
WAYS: dict[str, dict[str, Any]] = {
    "push": {"transports": ["shm"]},
    "pull": {"transports": ["shm"], "pull": True},
    "packed": {"transports": ["inline"]},
    "staged": {"transports": ["nixl"]},
}
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
EACH_WAY = pytest.mark.parametrize("way", [pytest.param(way, marks=NIXL if way == "staged" else ()) for way in WAYS])


@contextlib.contextmanager
def serving(ranks: Sequence[Any], folder: Path, options: Options) -> Iterator[tuple[list[Source], str]]:
    listen = f"ipc://{folder}/p-{{rank}}"
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Source("p", rank.pool, listen, options)) for rank in ranks]
        yield made, listen.replace("{rank}", "0")


def ranks_of(engine: Engine, geometry: Geometry) -> list[Rank]:
    return [Rank.of(engine, geometry, rank) for rank in range(engine.tp)]


def handed_over(sources: list[Source], here: Sequence[Any], sink: Sink, there: Any, ticket: Ticket) -> Any:
    fetch = sink.fetch(ticket, PROMPT, {"kv": there.items})
    for source, rank in zip(sources, here, strict=True):
        source.request(ticket, PROMPT).finish({"kv": rank.items})
    return fetch.wait(20)


@EACH_WAY
@pytest.mark.parametrize(("source", "sink"), WORLDS)
def test_pages_arrive_in_the_form_of_the_sink(source: Engine, sink: Engine, way: str, tmp_path: Path) -> None:
    """With checksums, by each way in which bytes go; KVP-CNV-EXACT, KVP-CNV-VERIFY."""
    geometries, options = told(source, sink), Options(**WAYS[way])
    here = ranks_of(source, geometries[0])
    held = whole(source, values())
    for rank in here:
        rank.fill(held)
    wanted = whole(sink, values()) if source.form == "bf16" else widened(source, held)
    there = Rank.of(sink, geometries[1], sink.tp - 1)
    with (
        serving(here, tmp_path, options) as (sources, address),
        Sink("d", there.pool, {"p": address}, options) as taker,
    ):
        arrived = handed_over(sources, here, taker, there, new_ticket("p"))
        assert arrived.checksums
        assert not there.wrong(wanted)


@EACH_WAY
def test_rows_go_while_prefill_runs(way: str, tmp_path: Path) -> None:
    """Chunk by chunk and layer by layer; what is not computed yet is other bytes until then."""
    engines, options = WORLDS[0], Options(**WAYS[way], verify="pages", part_bytes=1)
    geometries, held = told(*engines), whole(engines[0], values())
    here, there = ranks_of(engines[0], geometries[0]), Rank.of(engines[1], geometries[1], 0)
    ticket = new_ticket("p")
    with (
        serving(here, tmp_path, options) as (sources, address),
        Sink("d", there.pool, {"p": address}, options) as taker,
    ):
        fetch = taker.fetch(ticket, PROMPT, {"kv": there.items})
        for source, rank in zip(sources, here, strict=True):
            request = source.request(ticket, PROMPT)
            for tokens, layers in ((8, None), (20, (0, 1)), (20, (1, 3))):
                rank.fill(held, tokens, layers)
                request.computed({"kv": rank.items[: tokens // 4]}, tokens=tokens, layers=layers)
            rank.fill(held)
            request.finish({"kv": rank.items})
        fetch.wait(20)
    assert not there.wrong(whole(engines[1], values()))


class Mistaken(ShmTransport):
    """A transport that rounds the greatest of each block to its neighbour."""

    def start(self, moves: Any) -> Any:
        copy = super().start(moves)
        for move in moves:
            (region,) = move.sinks.values()
            held = np.frombuffer(region.buffer, np.uint8)
            held[held == 0x7E] = 0x7D
        return copy


def test_a_checksum_sees_bytes_of_another_formula(tmp_path: Path) -> None:
    """The sums are of what the source should have written; KVP-CNV-VERIFY."""
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    geometries = told(bf16, fp8)
    here, there = Rank.of(bf16, geometries[0], 0), Rank.of(fp8, geometries[1], 0)
    here.fill(whole(bf16, values()))
    wrong = Options(transports=[Mistaken()])
    with serving([here], tmp_path, wrong) as (sources, address), Sink("d", there.pool, {"p": address}) as taker:
        with pytest.raises(KvprotoError) as caught:
            handed_over(sources, [here], taker, there, new_ticket("p"))
        assert caught.value.code == ErrorCode.VERIFY_FAILED


@pytest.mark.parametrize("states", ["nobody", "the source", "the sink", "another"])
def test_sides_that_do_not_both_say_so_are_refused(states: str, tmp_path: Path) -> None:
    """The error says which conversions there are; KVP-CNV-BOTH."""
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    says = {"the source": ("e4m3_block",), "another": ("e4m3_tensor",)}.get(states, ())
    sink = fp8.geometry() if states in ("the sink", "another") else unsaid(fp8.geometry())
    here, there = Rank.of(bf16, bf16.geometry(*says), 0), Rank.of(fp8, sink, 0)
    with serving([here], tmp_path, Options()) as (_, address), Sink("d", there.pool, {"p": address}) as taker:
        with pytest.raises(KvprotoError, match="or state e4m3_block on both") as caught:
            taker.fetch(new_ticket("p"), PROMPT, {"kv": there.items}).wait(20)
        assert (caught.value.code, caught.value.path) == (ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].dtype")


def unsaid(geometry: Geometry) -> Geometry:
    (group,) = geometry.groups
    parts = tuple(attrs.evolve(part, x_conversions=None) for part in group.parts)
    return attrs.evolve(geometry, groups=(attrs.evolve(group, parts=parts),))


@NIXL
def test_nixl_converts_while_it_packs_alone(tmp_path: Path) -> None:
    """A sink that registers pages for direct writes is refused, and a source writes none directly whatever comes."""
    from kvproto.transport.nixl.direct import Costs, WriteMode
    from kvproto.transport.nixl.transport import NixlTransport

    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    geometries = told(bf16, fp8)
    here, there = Rank.of(bf16, geometries[0], 0), Rank.of(fp8, geometries[1], 0)
    here.fill(whole(bf16, values()))
    long_runs = Options(transports=[NixlTransport(Costs(0, 1e9))])
    with serving([here], tmp_path, Options(transports=["nixl"])) as (sources, address):
        with Sink("d", there.pool, {"p": address}, long_runs) as taker:
            handed_over(sources, [here], taker, there, new_ticket("p"))
            assert not there.wrong(whole(fp8, values()))
        direct = Options(transports=[NixlTransport(WriteMode.DIRECT)])
        with Sink("e", there.pool, {"p": address}, direct) as taker:
            with pytest.raises(KvprotoError, match="write packed") as caught:
                handed_over(sources, [here], taker, there, new_ticket("p"))
            assert (caught.value.code, caught.value.path) == (ErrorCode.NO_TRANSPORT, "regions[0].handles")
    program = World.of(bf16, fp8).programs[0][2]
    with contextlib.closing(NixlTransport()) as transport, pytest.raises(KvprotoError, match="staging slots"):
        transport.start([Move(program, {}, {})])


class Plain(ShmTransport):
    """A transport like NIXL's of a GPU, which copies bytes only as they are."""

    capabilities = attrs.evolve(ShmTransport.capabilities, converts=False)


def test_a_side_whose_transports_do_not_convert_does_not_offer_to(tmp_path: Path) -> None:
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    geometries = told(bf16, fp8)
    here, there = Rank.of(bf16, geometries[0], 0), Rank.of(fp8, geometries[1], 0)
    with (
        serving([here], tmp_path, Options(transports=[Plain()])) as (_, address),
        Sink("d", there.pool, {"p": address}) as taker,
        pytest.raises(KvprotoError) as caught,
    ):
        taker.fetch(new_ticket("p"), PROMPT, {"kv": there.items}).wait(20)
    assert caught.value.code == ErrorCode.DTYPE_MISMATCH


class Named(Plain):
    """The same under the name of another transport, beside one that converts."""

    capabilities = attrs.evolve(Plain.capabilities, code=Code.CUDA)

    def expose(self, *arguments: Any) -> Exposure:
        exposed = super().expose(*arguments)
        handles = {
            id: tuple(attrs.evolve(handle, transport=Code.CUDA) for handle in of_region)
            for id, of_region in exposed.handles.items()
        }
        return attrs.evolve(exposed, handles=handles)


@pytest.mark.parametrize("both", [False, True])
def test_memory_is_mapped_by_a_transport_that_converts(both: bool, tmp_path: Path) -> None:
    """If the sides have none in common, the refusal names the one that does not."""
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    geometries = told(bf16, fp8)
    here, there = Rank.of(bf16, geometries[0], 0), Rank.of(fp8, geometries[1], 0)
    here.fill(whole(bf16, values()))
    ours, theirs = Options(transports=[Named(), "inline"]), Options(transports=[Named(), "inline" if both else "shm"])
    with serving([here], tmp_path, ours) as (sources, address), Sink("d", there.pool, {"p": address}, theirs) as taker:
        if both:
            handed_over(sources, [here], taker, there, new_ticket("p"))
            assert not there.wrong(whole(fp8, values()))
            return
        with pytest.raises(KvprotoError, match="a transport that converts") as caught:
            handed_over(sources, [here], taker, there, new_ticket("p"))
        assert caught.value.code == ErrorCode.NO_TRANSPORT
