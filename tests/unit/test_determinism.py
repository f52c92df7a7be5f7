"""The variables and switches of a deterministic run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch, determinism_environment


def test_variables_follow_the_thread_count() -> None:
    environ = determinism_environment(3)
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    with pytest.raises(UsageError, match="train.threads"):
        determinism_environment(0)


def test_too_late_is_an_error_and_right_already_is_not() -> None:
    environ = determinism_environment(1)
    assert apply_before_torch(environ, 1) == {}
    environ["MKL_CBWR"] = "AVX512"
    del environ["OMP_DYNAMIC"]
    with pytest.raises(
        QEffectError, match=r"MKL_CBWR=AUTO \(it is AVX512\), OMP_DYNAMIC=FALSE \(it is unset\)"
    ):
        apply_before_torch(environ, 1)
    assert environ["MKL_CBWR"] == "AVX512"
    environ = determinism_environment(1) | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert apply_before_torch(environ, 1) == {}


def test_before_torch_the_variables_are_set_without_importing_it() -> None:
    script = (
        "import os, sys\n"
        "from qeffect_lm.runtime.determinism import apply_before_torch\n"
        "os.environ['OMP_NUM_THREADS'] = '7'\n"
        "changes = apply_before_torch(os.environ, 2)\n"
        "assert changes['OMP_NUM_THREADS'] == ('7', '2'), changes\n"
        "assert changes['MKL_CBWR'] == (None, 'AUTO'), changes\n"
        "assert os.environ['OMP_NUM_THREADS'] == '2' and 'torch' not in sys.modules\n"
        "assert apply_before_torch(os.environ, 2) == {}\n"
    )
    environ = {k: v for k, v in os.environ.items() if k not in determinism_environment()}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=60)


def test_torch_switches() -> None:
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    apply_to_torch(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert torch.get_num_threads() == 1
