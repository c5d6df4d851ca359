"""What the inner loop leaves out, and which tests run on one worker."""

import gc
from functools import cache
from importlib import import_module
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import hypothesis
import pytest

SLOW = {
    "calibration/test_probe.py",
    "cli/test_probe.py",
    "conformance/test_codec.py::test_two_readers_agree_on_any_bytes",
    "conformance/test_codec.py::test_two_readers_of_json_agree",
    "demo",
    "door/test_faults.py",
    "door/test_namespaces.py",
    "door/test_staged.py",
    "examples",
    "fuzz",
    "gpu",
    "node/test_nixl_node.py",
    "plan/test_engines.py::test_a_model_moves_byte_by_byte_from_each_engine_to_another",
    "plan/test_plan.py::test_many_groups_and_many_runs_of_layers_take_no_longer_than_what_they_state",
    "reference",
    "session/test_product.py",
    "session/test_hostile.py::test_well_formed_nonsense_costs_nobody_else_anything",
    "session/test_staged.py::test_nonsense_in_chunks_and_credits_costs_nobody_else_anything",
    "transport/test_nixl.py",
    "node/test_death.py",
    "node/test_parts.py",
    "node/test_sources.py",
    "plan/test_aliasing.py::test_no_byte_that_is_claimed_twice_gets_past_the_check",
    "plan/test_plan.py::test_plan_against_brute_force",
    "plan/test_program.py::test_every_byte_against_brute_force",
    "session/test_pull.py::test_lost_and_doubled_frames_change_nothing",
    "session/test_session.py::test_lost_and_doubled_frames_change_nothing",
    "transport/test_cuda_kernel.py",
    "transport/test_cuda_stream.py",
    "transport/test_packed.py",
    "wire/test_straight.py::test_what_it_takes_the_strict_reader_takes",
    "wire/test_refusals.py::test_mutations_let_only_wire_errors_out",
}
"""Folders, files and tests that take seconds each: models, real transports, and the longest searches of their rooms."""

ONE_WORKER = {
    "reference/test_reference_parallel.py": "ranks",
    "reference/test_hf_checkpoint.py": "transformers",
    "reference/test_hf_logits.py": "transformers",
    "reference/test_hf_demo.py": "transformers",
    "door/test_staged.py": "nixl",
    "node/test_nixl_node.py": "nixl",
    "transport/test_nixl.py": "nixl",
    "calibration/test_probe.py": "probe",
    "transport/test_cuda_kernel.py": "kernel",
    "transport/test_cuda_stream.py": "kernel",
    "reference/test_jax_attention.py": "jax",
    "reference/test_jax_context.py": "jax",
    "reference/test_jax_engine.py": "jax",
}
"""Files whose tests share what one worker starts or makes: UCX, a probe of the machine, the compiled kernel, XLA."""

HERE = Path(__file__).parent

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")  # how long an example takes is no finding


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, files that hold nothing else are not even imported: some import torch and models."""
    without = config.getoption("markexpr") == "not slow"
    return True if without and collection_path.relative_to(HERE).as_posix() in SLOW else None


@cache
def _file(path: Path) -> str:
    """As the tables name it."""
    return path.relative_to(HERE).as_posix()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks slow tests by the table above."""
    file = _file(item.path)
    name = item.name.split("[")[0]
    if SLOW & {file.split("/")[0], file, f"{file}::{name}"}:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sends tests by the other table; marks of xdist's own would need ids that pytest no longer lets it change."""
    made = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    made._split_scope = lambda nodeid: ONE_WORKER.get(nodeid.partition("::")[0].removeprefix("tests/"), nodeid)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one worker begin, so that none of them is left over at the end."""
    items.sort(key=lambda item: _file(item.path) not in ONE_WORKER)


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage, which some tests ask for, need not look at torch again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """A name in the tables that no longer exists is an error."""
    get_temp_dir()  # of the sockets of `tests.processes`, now: a test may have a TMPDIR of its own
    gone = [name for name in (*SLOW, *ONE_WORKER) if not (HERE / name.split("::")[0]).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names what is not there: {', '.join(sorted(gone))}")
