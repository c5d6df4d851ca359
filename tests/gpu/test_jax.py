"""JAX and transfers: XLA computes while rows land in pools that it does not own, and its memory serves as pools."""

import numpy as np
import pytest

from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory, connect
from kvproto.transport.cuda.order import After, follow
from tests.gpu.memory import Bytes, get, put
from tests.gpu.owner import pool
from tests.gpu.test_memory import Owner

STEPS = 50
WIDTH, ROWS, POOL = 4096, 512, 2048
POISON = 0xEE


def test_transfers_arrive_during_every_step(devices: tuple[int, int]) -> None:
    """While XLA is in a chain of matrix products a copy lands; its rows are computed with in the same step, exactly.

    XLA waits for the copy by `After`, the next copy for what XLA still reads by `follow`; the host orders nothing.
    """
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    here, there = devices
    data = np.random.default_rng(1).integers(0, 256, (STEPS, POOL, WIDTH), np.uint8)
    sources = [DeviceMemory(POOL * WIDTH, here) for _ in range(STEPS)]
    for memory, rows in zip(sources, data, strict=True):
        put(memory, rows.reshape(-1))
    sink = DeviceMemory(POOL * WIDTH, there)
    want: Bytes = np.full((POOL, WIDTH), POISON, np.uint8)
    put(sink, want.reshape(-1))
    enable_peer(there, here)
    copier = Copier(there)
    programs = [scattered(WIDTH, ROWS, pool=POOL, seed=step) for step in range(STEPS)]
    prepared = [copier.prepare(p, {0: m.address}, {0: sink.address}) for p, m in zip(programs, sources, strict=True)]
    gpu = jax.devices("cuda")[there]
    weights = jax.device_put(np.random.default_rng(2).normal(0, 0.02, (4096, 4096)).astype(np.float32), gpu)

    @jax.jit
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 16, lambda _, y: jnp.tanh(y @ w), x)

    @jax.jit
    def sums(bytes_: jax.Array) -> jax.Array:
        rows = jax.lax.bitcast_convert_type(bytes_, jnp.uint8).reshape(POOL, WIDTH).astype(jnp.uint32)
        return jnp.sum(rows * (1 + jnp.arange(WIDTH, dtype=jnp.uint32)), axis=1)

    x = chain(weights, weights).block_until_ready()
    sums(jax.dlpack.from_dlpack(sink)).block_until_ready()
    copier.submit([CopyJob(prepared[0], programs[0].maps)]).wait()
    put(sink, want.reshape(-1))
    y, during = None, 0
    weight = 1 + np.arange(WIDTH, dtype=np.uint32)
    for step, program in enumerate(programs):
        if y is not None:
            follow(copier, y)  # the rows that XLA still reads stay until then
        x = chain(x, weights)
        copy = copier.submit([CopyJob(prepared[step], program.maps)])
        while not copy.done:
            pass
        during += not x.is_ready()
        y = sums(jax.dlpack.from_dlpack(After(sink, copy)))
        m = program.maps[0]
        want[m.sink_row] = data[step][m.source_row]
        assert np.array_equal(np.asarray(y), (want.astype(np.uint32) * weight).sum(1, dtype=np.uint32)), step
    assert during > STEPS // 2, f"{during} of {STEPS} copies were over before XLA's step"
    del y
    assert np.array_equal(get(sink).reshape(POOL, WIDTH), want)  # XLA has written nothing
    for memory in (*sources, sink):
        memory.close()


def test_copies_that_wait_for_nobody_arrive_in_order(devices: tuple[int, int]) -> None:
    """The host runs ahead of both: XLA makes rows, the copier sends them, XLA reads them; nobody waits but for events."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    gpu = jax.devices("cuda")[devices[0]]
    sink = DeviceMemory(POOL * WIDTH, devices[0])
    put(sink, np.full(POOL * WIDTH, POISON, np.uint8))
    copier = Copier(devices[0], slots=64)
    total = jax.jit(lambda b: jnp.sum(jax.lax.bitcast_convert_type(b, jnp.uint8).astype(jnp.uint32)))
    make = jax.jit(lambda step: jnp.full(POOL * WIDTH, step, jnp.uint8))
    found, kept = [], []
    with jax.default_device(gpu):
        for step in range(24):
            made = make(np.uint8(step))
            if found:
                follow(copier, found[-1])
            follow(copier, made)
            own = DeviceMemory.adopt(made.unsafe_buffer_pointer(), POOL * WIDTH)
            program = scattered(WIDTH, ROWS, pool=POOL, seed=step)
            prepared = copier.prepare(program, {0: own.address}, {0: sink.address})
            copy = copier.submit([CopyJob(prepared, program.maps)])
            found.append(total(jax.dlpack.from_dlpack(After(sink, copy))))
            kept.append((made, prepared))
    want = np.full(POOL, POISON, np.uint64)
    for step, value in enumerate(found):
        want[scattered(WIDTH, ROWS, pool=POOL, seed=step).maps[0].sink_row] = step
        assert int(value) == int(want.sum()) * WIDTH, step


@pytest.mark.parametrize(("theirs", "mine"), [("jax", "torch"), ("torch", "jax"), ("jax", "jax")])
def test_torch_writes_and_reads_pools_of_jax(
    devices: tuple[int, int], theirs: str, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in torch fills a pool by its DLPack view, decode in torch reads one, whoever has allocated them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    # a pool inside one large allocation, as JAX has it unless told
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2")
    source, device = devices
    length = POOL * WIDTH
    peer = Owner(length, source, theirs)
    peer.ask(torch=4)
    data = np.random.default_rng(4).integers(0, 256, length, np.uint8).reshape(POOL, WIDTH)
    own = pool(length, device, mine)
    seen = torch.from_dlpack(own).view(torch.uint8)
    seen.fill_(POISON)
    torch.cuda.synchronize(device)
    mapped = connect(peer.region, "regions[0]", device)
    copier, program = Copier(device), scattered(WIDTH, ROWS, pool=POOL, seed=8)
    prepared = copier.prepare(program, {0: mapped.address}, {0: own.address})
    copy = copier.submit([CopyJob(prepared, program.maps)])
    got = torch.from_dlpack(After(own, copy)).view(torch.uint8).cpu().numpy().reshape(POOL, WIDTH)
    want = np.full((POOL, WIDTH), POISON, np.uint8)
    want[program.maps[0].sink_row] = data[program.maps[0].source_row]
    assert np.array_equal(got, want)
    mapped.close()
    peer.kill()
