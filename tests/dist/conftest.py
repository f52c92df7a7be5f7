"""Tests over several processes take most of a suite's time: all are long, but one or two for each promise."""

from __future__ import annotations

import pytest

SHORT = (
    "test_auto_dist.py::test_measured_once_and_saved",
    "test_checkpoint_dist.py::test_a_rank_that_dies_while_writing_does_not_hang_the_other",
    "test_context_parallel.py::test_two_ranks",
    "test_engine_dist.py::test_pipeline_equals_one_process[pp2, fp8, captured, dropout]",
    "test_engine_dist.py::test_dead_peer_is_named",
    "test_expert_parallel.py::test_two_ranks",
    "test_layouts.py::test_no_product_is_left_out",
    "test_layouts.py::test_axes_in_any_order",
    "test_pipelining.py::test_every_schedule_equals_one_process_and_each_other",
    "test_resume.py::test_two_stages_killed_and_restarted_by_torchrun",
    "test_schedules_dist.py::test_a_schedule_over_gloo",
    "test_tied.py::test_two_stages",
    "test_torchtitan.py::test_titans_trainer_with_our_pipeline",  # skipped without torchtitan
    "test_tensor_parallel.py::test_gathered_in_fp8",
    "test_tensor_parallel.py::test_two_ranks",
    "test_zero.py::test_two_replicas",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path, _, name = item.nodeid.removeprefix("tests/dist/").partition("::")
        if item.nodeid.startswith("tests/dist/") and path not in SHORT and f"{path}::{name}" not in SHORT:
            item.add_marker(pytest.mark.long)
