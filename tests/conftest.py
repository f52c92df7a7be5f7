"""Set up for all tests: determinism before torch is imported, one thread, reproducible hypothesis."""

from __future__ import annotations

import os

from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

apply_before_torch(os.environ, threads=1)  # before any test module imports torch

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():  # Triton reads it when it is imported, and many a package does that
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

_common = {"deadline": None, "max_examples": 100, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, print_blob=True, **_common)
settings.register_profile("explore", derandomize=False, print_blob=True, **_common)
# Derandomised unless asked: the same commit gives the same verdict everywhere. QEFFECT_HYPOTHESIS=explore
# searches on.
settings.load_profile(os.environ.get("QEFFECT_HYPOTHESIS", "ci"))


@pytest.fixture(scope="session", autouse=True)
def _deterministic_torch() -> None:
    """The switches that a training process sets (qeffect_lm.runtime.determinism), for every test."""
    apply_to_torch(threads=1)


@pytest.fixture(autouse=True)
def _gpu_tests_need_a_gpu(request: pytest.FixtureRequest) -> None:
    """Tests marked ``gpu`` skip, and say so, on a machine without one."""
    if request.node.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
