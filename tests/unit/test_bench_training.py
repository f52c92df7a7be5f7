"""What ``tools.bench train`` makes of its options; its figures need GPUs."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect_lm.errors import UsageError
from tools.bench import gpu
from tools.benchmarks import training
from tools.benchmarks.training import Case, batches

PRESETS = Path(__file__).resolve().parents[2] / "models/configs"
TINY = (
    "run.device=cpu",
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.head_dim=8",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.ffn_size=48",
    "data.seq_len=16",
)


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


def test_sizes_are_presets() -> None:
    arguments = Namespace(sizes="S,MoE", schedules="1f1b", microbatches="8", set=[])
    assert [case.name for case in gpu.cases(arguments)] == ["S 1f1b m=8", "MoE 1f1b m=8"]
    arguments.sizes = "MoE,L"
    with pytest.raises(UsageError, match="no preset for L; there are S, M and MoE"):
        gpu.cases(arguments)


def test_experts_stand_in_the_place_of_the_mlp() -> None:
    """Model MoE is model M in all else, so that the two can be compared; a token's experts are as wide as M's MLP."""
    dense, experts = (Case(size, "1f1b", 8).config(PRESETS, 1).to_dict() for size in ("M", "MoE"))
    ours, theirs = experts.pop("model"), dense.pop("model")
    assert {key for key in ours if ours[key] != theirs[key]} == {"family", "ffn_size", "moe"}
    assert ours["family"] == "mixtral" and ours["moe"]["num_experts"] == 8
    assert ours["moe"]["top_k"] * ours["ffn_size"] == theirs["ffn_size"]
    assert {section for section in experts if experts[section] != dense[section]} == {"run"}


@pytest.mark.parametrize("size", ["M", "MoE"])
def test_a_case_on_a_cpu(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU's own figures: one graph, a graph for each action and eager give one loss, and operations are
    those of the experts that a token goes through."""
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**30)

    def measured(*more: str) -> dict[str, Any]:
        return training.measure(Case(size, "1f1b", 2, (*TINY, *more)), PRESETS, 2, lambda _: None)

    action = measured("graphs.backend=host_replay", "graphs.scope=action")
    eager = measured("graphs.backend=eager")
    untimed = {"bubble": 0.0, "bubble_predicted": 0.0, "bubble_per_rank": [0.0]}  # a replay on a CPU has no times in its graph
    with monkeypatch.context() as patched:
        patched.setattr(training, "measured_bubble", lambda *_: untimed)
        step = measured("graphs.backend=host_replay")
    assert step["losses"] == action["losses"] == eager["losses"] and len(set(eager["losses"])) == len(eager["losses"])
    assert step["graphs"] == [1] and action["graphs"][0] > 1 and eager["graphs"] == [0]
    mlp = 3 * 32 * 48 if size == "M" else 2 * 3 * 32 * 48 + 8 * 32
    flop = 6 * (2 * (4 * 32 * 32 + mlp) + 64 * 32) + 2 * 12 * 32 * 17 / 2
    for row in (step, action, eager):
        assert row["tokens_per_second"] == pytest.approx(2 * 16 * 1e3 / row["ms"])
        assert row["model_tflops_per_gpu"] == pytest.approx(flop * row["tokens_per_second"] / 1e12)
        assert 0 <= row["bubble"] < 1 and row["prepare_s"] > 0 and row["alloc_gib"] == [1.0]
    assert training.table([step, action, eager]).count("\n") == 3
