"""Frameworks and copies in order, without the host: transfers that arrive during every step."""

import pytest

from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.order import After, follow

SIZE = 256 << 20
STEPS = 12


def test_what_jax_reads_after_a_copy_is_what_was_copied() -> None:
    """Each step a copy arrives, and JAX reads it behind the copy's event; another request's rows stay."""
    jax = pytest.importorskip("jax")
    source, sink = DeviceMemory(SIZE), DeviceMemory(SIZE)
    sink.zero()
    copier = Copier(0)
    half = scattered(4096, SIZE // 4096 // 2, pool=SIZE // 4096)
    prepared = copier.prepare(half, {0: source.address}, {0: sink.address})
    total = jax.jit(lambda x: jax.numpy.sum(x.astype(jax.numpy.uint32)))
    for step in range(1, STEPS):
        value = jax.numpy.full(SIZE, step, jax.numpy.uint8)
        fill = scattered(1 << 20, SIZE >> 20)
        own = DeviceMemory.adopt(value.unsafe_buffer_pointer(), SIZE)
        follow(copier, value)  # the copy waits for XLA to have made it
        copier.submit([CopyJob(copier.prepare(fill, {0: own.address}, {0: source.address}), fill.maps)])
        copy = copier.submit([CopyJob(prepared, half.maps)])
        seen = jax.dlpack.from_dlpack(After(sink, copy))
        assert int(total(seen)) == step * SIZE // 2
        del seen


def test_what_torch_makes_is_there_before_it_is_copied() -> None:
    torch = pytest.importorskip("torch")
    source, sink = DeviceMemory(SIZE), DeviceMemory(SIZE)
    copier = Copier(0)
    program = scattered(4096, SIZE // 4096)
    prepared = copier.prepare(program, {0: source.address}, {0: sink.address})
    made = torch.from_dlpack(source).view(torch.uint8)
    for step in range(1, STEPS):
        for _ in range(20):  # work that is still under way when the copy is submitted
            made.fill_(255)
        made.fill_(step)
        follow(copier, made)
        copy = copier.submit([CopyJob(prepared, program.maps)])
        seen = torch.from_dlpack(After(sink, copy)).view(torch.uint8)
        assert int(seen.to(torch.int64).sum()) == step * SIZE
