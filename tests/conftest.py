"""What the inner loop leaves out, and which tests run on one worker."""

import gc
import os
import warnings
from functools import cache
from importlib import import_module
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import zmq

gc.disable()  # until all is imported and collected, of which nothing goes
pytest.register_assert_rewrite("tests.commands", "tests.errors")  # so that they show what came instead

os.umask(0o022)  # an allow-list that its group may write to is refused
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # torch and numpy: other workers have the cores
COMPILED = Path(__file__).parents[1] / "build/xla"
"""Programs of XLA, which many engines and processes have alike; as with bytecode, the next run begins with them."""
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

SLOW = {
    "calibration/test_probe.py",
    "captures/test_bounds.py::test_what_is_too_many_is_refused_as_it_comes",
    "captures/test_refusals.py",
    "chaos",
    "cli/test_cli.py::test_reader_that_has_seen_enough",
    "cli/test_layouts.py::test_vectors_are_what_is_described",
    "cli/test_plans.py",
    "cli/test_probe.py",
    "conformance/test_checking.py",
    "conformance/test_codec.py::test_second_opinion_on_every_vector",
    "conformance/test_codec.py::test_two_readers_agree_on_any_bytes",
    "conformance/test_codec.py::test_two_readers_of_json_agree",
    "conformance/test_codec.py::test_two_writers_agree",
    "conformance/test_conformance.py",
    "conformance/test_dcp.py::test_a_fault_fails_the_cases_that_name_it",
    "conformance/test_dcp.py::test_two_deals_agree",
    "conformance/test_driver.py::test_a_degenerate_testee_earns_nothing",
    "conformance/test_driver.py::test_a_hello_that_says_nothing_makes_an_invalid_run",
    "conformance/test_engines_c.py",
    "conformance/test_fresh.py",
    "conformance/test_live.py",
    "conformance/test_meeting.py",
    "conformance/test_planner.py",
    "conformance/test_planner_profiles.py",
    "conformance/test_profiles.py::test_an_engine_may_know_no_message_of_an_extension",
    "conformance/test_prove.py",
    "conformance/test_reports.py",
    "conformance/test_testees.py",
    "demo",
    "door/test_addresses.py",
    "door/test_conversion.py",
    "discovery/test_dns.py::test_pods_are_found_by_their_names_whatever_their_addresses",
    "discovery/test_etcd.py",
    "discovery/test_settings.py",
    "door/test_faults.py",
    "door/test_floods.py",
    "door/test_four_bits.py",
    "door/test_growth.py",
    "door/test_inline.py::test_a_request_arrives_whatever_credit_allows",
    "door/test_intent.py",
    "door/test_keys.py",
    "door/test_late.py::test_any_prefill_that_gives_pages_up",
    "door/test_namespaces.py",
    "door/test_pool_bytes.py",
    "door/test_readiness.py",
    "door/test_sleep.py",
    "door/test_sleep_random.py",
    "door/test_staged.py",
    "examples",
    "fuzz",
    "gpu",
    "moving",
    "net/test_limits.py",
    "net/test_sockets.py",
    "node/test_bounds.py",
    "node/test_death.py",
    "node/test_long_work.py",
    "node/test_nixl_node.py",
    "node/test_offering.py::test_what_is_offered_suffices",
    "node/test_others_memory.py",
    "node/test_parts.py",
    "node/test_pull.py::test_a_source_is_killed_while_it_is_read",
    "node/test_sources.py",
    "observability/test_metrics.py",
    "observability/test_probes.py",
    "plan/test_aliasing.py::test_items_are_refused_exactly_if_a_byte_is_claimed_twice",
    "plan/test_aliasing.py::test_no_byte_that_is_claimed_twice_gets_past_the_check",
    "plan/test_block_scales.py::test_blocks_move_with_their_scales",
    "plan/test_conversion_worlds.py",
    "plan/test_deals.py",
    "plan/test_engines.py::test_a_model_moves_byte_by_byte_from_each_engine_to_another",
    "plan/test_late.py::test_a_window_is_cut_to_the_rows_that_are_held",
    "plan/test_page_sums.py::test_the_suite_finds_the_same_sums_of_pages",
    "plan/test_parallel.py::test_whatever_is_laid_out_is_a_description_and_the_rest_is_refused_by_name",
    "plan/test_plan.py::test_many_groups_and_many_runs_of_layers_take_no_longer_than_what_they_state",
    "plan/test_plan.py::test_plan_against_brute_force",
    "plan/test_program.py::test_checksum_of_more_bytes_than_are_summed_at_once",
    "plan/test_program.py::test_every_byte_against_brute_force",
    "plan/test_program.py::test_part_of_a_program_is_the_program_of_the_part",
    "plan/test_row_vectors.py",
    "plan/test_slices.py::test_slices_say_where_their_bytes_are",
    "plan/test_spreading.py",
    "plan/test_vectors.py::test_vectors_of_fleets_are_what_their_maker_makes",
    "plan/test_wild.py",
    "reference",
    "router",
    "session/test_catalogue.py::test_whatever_is_lost_the_list_is_right_in_the_end",
    "session/test_hostile.py::test_well_formed_nonsense_costs_nobody_else_anything",
    "session/test_product.py",
    "session/test_resume.py::test_a_frame_costs_the_same_beside_4096_held_transfers",
    "session/test_resume.py::test_hellos_without_more_cost_nobody_a_session",
    "session/test_resume.py::test_runs_of_one_rank_leave_one_session",
    "session/test_session.py::test_a_frame_costs_the_same_beside_sessions_that_are_over_and_awaited",
    "session/test_session.py::test_lost_and_doubled_frames_change_nothing",
    "session/test_session.py::test_noise_gets_a_typed_answer_and_costs_nobody_anything",
    "session/test_staged.py::test_nonsense_in_packed_bytes_and_credits_costs_nobody_else_anything",
    "sglang/test_families.py",
    "sglang/test_transfers.py",
    "simulation/test_simulation.py::test_a_seed_decides_everything_in_any_process",
    "simulation/test_simulation.py::test_every_kind_of_fault_and_end_is_reached",
    "simulation/test_simulation.py::test_what_was_found_once_stays_mended",
    "tiers/test_agreement.py::test_all_ranks_decide_the_same_and_can_do_it",
    "tiers/test_cache.py::test_a_process_ends_while_its_storage_hangs",
    "tiers/test_cache.py::test_nobody_waits_for_a_storage_that_hangs_until_it_is_back",
    "tiers/test_catalogue.py::test_what_is_told_is_what_is_found",
    "tiers/test_faults.py",
    "tiers/test_groups.py::test_a_writer_of_several_pages_that_is_killed_leaves_whole_ones",
    "tiers/test_index.py::test_every_slot_is_freed_once_whatever_fails_when",
    "tiers/test_packs.py",
    "tiers/test_packs_shared.py",
    "tiers/test_power.py",
    "tiers/test_relayout.py",
    "tiers/test_shared.py",
    "tiers/test_storage.py",
    "tiers/test_stores.py",
    "tiers/test_whole.py",
    "tools/test_benchmarks.py::test_imports_are_there",
    "tools/test_candidates.py",
    "tools/test_models.py",
    "tools/test_release.py",
    "tools/test_small_runs.py",
    "transport/test_cuda_convert.py",
    "transport/test_cuda_kernel.py",
    "transport/test_cuda_stream.py",
    "transport/test_nixl.py",
    "transport/test_nixl_anew.py",
    "transport/test_packed.py",
    "transport/test_program_cache.py::test_it_goes_with_the_operations",
    "transport/test_shm.py::test_another_process_writes",
    "transport/test_staged.py::test_streams_arrive_whole_in_any_order_of_events",
    "transport/test_tensors.py",
    "vllm/test_families.py",
    "vllm/test_workers.py",
    "wire/test_codec.py::test_round_trip",
    "wire/test_make.py",
    "wire/test_readers.py",
    "wire/test_refusals.py::test_mutations_let_only_wire_errors_out",
    "wire/test_refusals.py::test_random_bytes_let_only_wire_errors_out",
    "wire/test_vectors.py::test_every_vector_can_be_explained",
    "wire/test_vectors.py::test_streams_may_be_cut_anywhere",
}
"""Folders, files and tests that take seconds each: models, real transports, and the longest searches of their rooms."""

THOROUGH = {
    "chaos/test_chaos.py::test_a_fault_in_the_engines_is_found",
    "chaos/test_chaos.py::test_an_engine_that_starts_when_the_faults_are_over_has_a_right_clock",
    "chaos/test_chaos.py::test_seeds_without_violations",
    "conformance/test_engines_c.py::test_they_pass_the_live_driver",
    "conformance/test_live.py::test_a_fault_is_found_by_the_scenario_that_names_it",
    "conformance/test_prove.py::test_parts_make_the_whole_and_an_interrupted_run_goes_on",
    "conformance/test_prove.py::test_what_nobody_notices_and_a_reason_that_is_not_true_fail_the_command",
    "router/test_rolling.py",
    "tools/test_candidates.py::test_a_draft_changes_with_a_line_in_the_changelog",
    "tools/test_candidates.py::test_a_minor_version_adds_a_field",
    "tools/test_candidates.py::test_the_check_refuses_a_change_until_a_candidate_is_opened",
    "tools/test_small_runs.py",
}
"""Files and tests that `make test` leaves to `make test-thorough`: the project's own tools, whole, and whether they find faults.

`tests.cases` leaves it cases of other tests.
"""

ONE_WORKER = {
    "conformance/test_meeting.py": "versions",
    "conformance/test_engines_c.py": "engines in C",
    "conformance/test_testees.py": "testees",
    "reference/test_reference_parallel.py": "ranks",
    "reference/test_expert_parallel.py": "experts",
    "reference/test_hf_checkpoint.py": "transformers",
    "reference/test_hf_configs.py": "transformers",
    "reference/test_hf_logits.py": "transformers",
    "reference/test_hf_demo.py": "transformers",
    "reference/test_smollm2.py": "transformers",
    "tools/test_models.py": "transformers",
    "door/test_staged.py": "nixl",
    "node/test_nixl_node.py": "nixl",
    "transport/test_nixl.py": "nixl",
    "calibration/test_probe.py": "probe",
    "transport/test_cuda_kernel.py": "kernel",
    "transport/test_cuda_stream.py": "kernel",
    "reference/test_jax_attention.py": "jax",
    "reference/test_jax_context.py": "jax",
    "reference/test_jax_engine.py": "jax",
    "reference/test_jax_tiers.py": "jax",
}
"""Files whose tests share what one worker starts or makes: compiled testees, UCX, a probe of the machine, XLA."""

HERE = Path(__file__).parent

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")  # how long an example takes is no finding


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command of kvproto, and says what it printed."""
    return import_module("tests.commands").Ran(capsys)


def _left_open(context: Any) -> None:
    """In place of pyzmq's own, which waits for ever for sockets that are collected as garbage with their context."""
    if not context.closed:
        warnings.warn(f"{context} was left open", ResourceWarning, stacklevel=1)


zmq.Context.__del__ = _left_open  # type: ignore[method-assign]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, files that hold nothing else are not even imported: some import torch and models."""
    without = config.getoption("markexpr") == "not slow"
    return True if without and collection_path.relative_to(HERE).as_posix() in SLOW else None


@cache
def _file(path: Path) -> str:
    """As the tables name it."""
    return path.relative_to(HERE).as_posix()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks slow and thorough tests by the tables above."""
    file = _file(item.path)
    name = item.name.split("[")[0]
    names = {file.split("/")[0], file, f"{file}::{name}"}
    if THOROUGH & names:
        item.add_marker(pytest.mark.thorough)
    if SLOW & names or item.get_closest_marker("thorough"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sends tests by the other table; marks of xdist's own would need ids that pytest no longer lets it change."""
    gc.enable()  # here nothing is collected

    class Scheduling(import_module("xdist.scheduler").LoadScopeScheduling):  # type: ignore[misc]
        """Forgets tests that are over: xdist's own counts all of them again at each end of a test."""

        def _split_scope(self, nodeid: str) -> str:
            return ONE_WORKER.get(nodeid.partition("::")[0].removeprefix("tests/"), nodeid)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one worker begin, and slow ones follow, so that no worker has a long test left at the end."""
    items.sort(key=lambda item: (_file(item.path) not in ONE_WORKER, item.get_closest_marker("slow") is None))


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage, which some tests ask for, need not look at torch again."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """A name in the tables that no longer exists is an error."""
    get_temp_dir()  # of the sockets of `tests.processes`, now: a test may have a TMPDIR of its own
    gone = [name for name in (*SLOW, *ONE_WORKER) if not (HERE / name.split("::")[0]).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names what is not there: {', '.join(sorted(gone))}")
