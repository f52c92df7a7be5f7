"""What ``tools.bench train`` makes of its options; its figures need GPUs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from qeffect_lm.errors import UsageError
from tools.benchmarks.training import Case, batches

PRESETS = Path(__file__).resolve().parents[2] / "models/configs"


def test_stages_are_what_other_axes_leave() -> None:
    assert Case("S", "1f1b", 8).config(PRESETS, 2).parallel.sizes == {"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 1}
    both = Case("S", "1f1b", 8, ("parallel.tp=2",)).config(PRESETS, 4)
    assert both.parallel.sizes == {"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 2} and both.pipeline.microbatches == 8
    with pytest.raises(UsageError, match="3 ranks do not divide by parallel.tp=2: start a multiple of 2"):
        Case("S", "1f1b", 8, ("parallel.tp=2",)).config(PRESETS, 3)


def test_replicas_have_samples_of_their_own_and_one_divisor() -> None:
    config = Case("S", "1f1b", 2, ("parallel.dp=2",)).config(PRESETS, 2)
    first, second = (next(islice(batches(config, replica), 1)) for replica in (0, 1))
    assert not torch.equal(first.inputs, second.inputs)
    assert first.tokens == second.tokens == 2 * first.inputs.numel()
