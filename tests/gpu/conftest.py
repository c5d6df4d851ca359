"""What needs a GPU is skipped without one; what needs two, without two."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import pytest

# JAX takes most of the GPU otherwise, and other files run beside it
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FOUND = 0
if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
    from cuda.bindings import driver

    with contextlib.suppress(RuntimeError):  # no driver
        if driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS:
            FOUND = int(driver.cuDeviceGetCount()[1])

collect_ignore_glob = [] if FOUND else ["test_*.py"]


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0)], ids=["one GPU", "push", "pull"])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Devices of the source's memory and of the sink's; the copy runs on device 0."""
    if max(request.param) >= FOUND:
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def jax_gpus(request: pytest.FixtureRequest) -> range:
    """GPUs of the ranks of a JAX engine."""
    jax = pytest.importorskip("jax", exc_type=ImportError)
    try:
        found = len(jax.devices("cuda"))
    except RuntimeError as error:
        pytest.skip(f"needs JAX with CUDA: {error}")
    if request.param > found:
        pytest.skip("needs two GPUs")
    return range(request.param)
