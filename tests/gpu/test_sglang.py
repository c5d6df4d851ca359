"""SGLang's pools in device memory, stated by the back end and moved by transports `cuda` and `nixl`, read back in every byte."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvproto import Options  # noqa: E402
from kvproto.transport.cuda.driver import call, driver  # noqa: E402
from kvproto_engines.gpu import Gpu  # noqa: E402
from tests.gpu.conftest import FOUND  # noqa: E402
from tests.gpu.gate import Gate  # noqa: E402
from tests.sglang.handover import Side, hand_over  # noqa: E402
from tests.sglang.kinds import KINDS, Standins, side  # noqa: E402

pytestmark = pytest.mark.timeout(300)
HERE, THERE = "cuda:0", f"cuda:{int(FOUND > 1)}"
"""The engine that prefills has its pools on the first GPU, the other on the second where there is one."""
HEADS = [name for name, kind in KINDS.items() if any(part == "k" for part, _, _ in kind.models[0].parts)]


def cuda(side: int) -> Options:
    return Options(thread=False, transports=["cuda"])


def nixl(side: int) -> Options:
    """Packed, through staging memory; whichever way UCX finds, as it need not be a fast one here."""
    from kvproto.transport.nixl.transport import NixlTransport

    device = torch.device((HERE, THERE)[side]).index
    return Options(thread=False, transports=[NixlTransport(device=device, floor=0.0)])


def place(folder: Path) -> str:
    return f"ipc://{folder}/p-{{rank}}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [((64, 1), (16, 2)), ((1, 2), (32, 1)), ((16, 1), (64, 1))])
def test_every_value_is_where_the_other_engine_looks(kind: str, sizes: Any, tmp_path: Path) -> None:
    one, two = (side(kind, *each, Standins(where)) for each, where in zip(sizes, (HERE, THERE), strict=True))
    assert hand_over(one, two, place(tmp_path), cuda) == []


@pytest.mark.parametrize("kind", HEADS)
def test_pages_of_heads_meet_pages_of_tokens(kind: str, tmp_path: Path) -> None:
    one, two = side(kind, 64, 1, Standins(HERE, "hnd")), side(kind, 16, 2, Standins(THERE))
    assert hand_over(one, two, place(tmp_path), cuda) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_flips_shows(kind: str, tmp_path: Path) -> None:
    def spoil(source: Side) -> None:
        KINDS[kind].flip(source.ranks[0], source)

    one, two = side(kind, 64, 1, Standins(HERE)), side(kind, 16, 1, Standins(THERE))
    assert len(hand_over(one, two, place(tmp_path), cuda, spoil=spoil)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_by_nixl_through_staging(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    one, two = side(kind, 64, 1, Standins(HERE)), side(kind, 16, 1, Standins(THERE))
    assert hand_over(one, two, place(tmp_path), nixl) == []


@pytest.mark.parametrize("kind", ["MHA", "MLA", "sliding windows", "Mamba 2", "sparse MLA in FP8", "EAGLE"])
def test_what_a_forward_is_still_writing_is_waited_for(kind: str, tmp_path: Path) -> None:
    """The pages are written when the prompt is long said to be there."""
    one, two = side(kind, 64, 1, Standins(HERE)), side(kind, 16, 1, Standins(THERE))
    stream, tensors = torch.cuda.Stream(HERE), _tensors(one)

    def late() -> Any:
        made = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            for tensor, before in zip(tensors, made, strict=True):
                tensor.copy_(before)
            return stream.record_event()

    assert hand_over(one, two, place(tmp_path), cuda, late=late) == []


def test_pages_are_free_when_the_forward_stream_has_done() -> None:
    gate, stream = Gate(0), torch.cuda.Stream(HERE)
    call(driver.cuStreamWaitEvent(stream.cuda_stream, gate.handle, 0), "wait")
    idle = Gpu(torch.device(HERE), stream).idle()
    assert not idle()
    gate.open()
    stream.synchronize()
    torch.cuda.synchronize()
    assert idle()


def test_an_event_of_sglang_goes_before_one_of_the_stream() -> None:
    gpu, given = Gpu(torch.device(HERE)), torch.cuda.Event()
    given.record()
    assert gpu.written(given) is given
    assert gpu.written().cuda_event != given.cuda_event
    assert Gpu(torch.device("cpu")).written() is None


def _tensors(made: Side) -> list[Any]:
    """All that the pools of an engine hold, once."""
    found: list[Any] = []
    for pool in made.ranks[0]:
        for inner in (pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))):
            for name in ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer"):
                found += getattr(inner, name, [])
        if hasattr(pool, "mamba_pool"):
            found += [*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal]
    return found
