"""Prefill in BF16 and decode in FP8, and the other way round, between Sources and Sinks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto import Options, Prompt, Sink, Source, Ticket, new_ticket
from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode
from tests.conversions import TOKENS, WORLDS, Engine, Rank, told, values, whole, widened

PROMPT = Prompt(range(TOKENS))
WAYS: dict[str, dict[str, Any]] = {
    "push": {"transports": ["shm"]},
    "pull": {"transports": ["shm"], "pull": True},
    "packed": {"transports": ["inline"]},
}


@contextlib.contextmanager
def serving(ranks: list[Rank], folder: Path, options: Options) -> Iterator[tuple[list[Source], str]]:
    listen = f"ipc://{folder}/p-{{rank}}"
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Source("p", rank.pool, listen, options)) for rank in ranks]
        yield made, listen.replace("{rank}", "0")


def ranks_of(engine: Engine, geometry: Geometry) -> list[Rank]:
    return [Rank.of(engine, geometry, rank) for rank in range(engine.tp)]


def handed_over(sources: list[Source], here: list[Rank], sink: Sink, there: Rank, ticket: Ticket) -> Any:
    fetch = sink.fetch(ticket, PROMPT, {"kv": there.items})
    for source, rank in zip(sources, here, strict=True):
        source.request(ticket, PROMPT).finish({"kv": rank.items})
    return fetch.wait(20)


@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("states", ["nobody", "the source", "the sink", "another"])
def test_sides_that_do_not_both_say_so_are_refused(states: str, tmp_path: Path) -> None:
    """The error says which conversions there are; KVP-CNV-BOTH."""
    bf16, fp8 = Engine("bf16", 1, 4), Engine("e4m3_block", 1, 4)
    says = {"the source": ("e4m3_block",), "another": ("e4m3_tensor",)}.get(states, ())
    sink = fp8.geometry() if states in ("the sink", "another") else unsaid(fp8.geometry())
    here, there = Rank.of(bf16, bf16.geometry(*says), 0), Rank.of(fp8, sink, 0)
    with serving([here], tmp_path, Options()) as (_, address), Sink("d", there.pool, {"p": address}) as taker:
        with pytest.raises(KvprotoError, match="e4m3_tensor, e4m3_block") as caught:
            taker.fetch(new_ticket("p"), PROMPT, {"kv": there.items}).wait(20)
        assert (caught.value.code, caught.value.path) == (ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].dtype")


def unsaid(geometry: Geometry) -> Geometry:
    (group,) = geometry.groups
    parts = tuple(attrs.evolve(part, x_conversions=None) for part in group.parts)
    return attrs.evolve(geometry, groups=(attrs.evolve(group, parts=parts),))


class Plain(ShmTransport):
    """A transport like CUDA's today, which copies bytes only as they are."""

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
