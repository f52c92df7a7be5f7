"""Without a GPU or without Triton: the reference runs, everything imports, and what needs kernels says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qeffect_lm import kernels
from tests.helpers import ROOT
from tools import bench


class OnGpu:
    """What the dispatch asks of a tensor."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_who_takes_the_kernels(monkeypatch):
    """Tensors on a GPU of at most 32 bits, where Triton is; none on CPU, none in float64."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name == "triton" else None)
    assert kernels.usable(OnGpu(torch.bfloat16)) and kernels.usable(OnGpu(torch.float32))
    assert not kernels.usable(OnGpu(torch.float64)) and not kernels.usable(torch.zeros(2))
    assert kernels.quantises(OnGpu(torch.bfloat16)) and not kernels.quantises(OnGpu(torch.float32))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.usable(OnGpu(torch.bfloat16)) and not kernels.quantises(OnGpu(torch.bfloat16))


def test_layers_import_and_run_without_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, qeffect_lm.app.assemble\n"
        "from qeffect_lm.fp8.quantise import E4M3, quantise\n"
        "assert quantise(torch.ones(2, 2), torch.tensor(1.0), E4M3).rows.float().sum() == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures here")
def test_benchmark_needs_a_gpu(capsys, tmp_path):
    assert bench.main(["kernels", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == "error: the kernels run on a GPU only, and torch sees none here\n"
    assert not (tmp_path / "out.json").exists()
