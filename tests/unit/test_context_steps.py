"""Context parallelism around the layers: how a step is staged, what a configuration says, what a rank holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.batch import StepBuffers
from qeffect_lm.app.dry_run import describe
from qeffect_lm.config import load_config
from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.context import ContextParallel
from tests.tiny import batch, config


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_is_cut_where_it_is_staged(rank: int) -> None:
    """Tokens, targets, masks and documents of a rank; random keys, the divisor and what is refused are those of whole rows."""
    cp, mine = ContextParallel(2, rank), [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    about: dict[str, Any] = {"first": True, "last": True, "seed": 5, "replica": 0, "replicas": 1, "documents": True}
    step = replace(batch(3, 2, 1, 8), starts=torch.tensor([0, 0, 0, 3, 3, 5, 5, 5], dtype=torch.int32).expand(2, 1, 8))
    step.loss_mask[:, :, 5:] = 0
    buffers, whole = (StepBuffers((2, 1, 8), torch.ones(()), cp=one, **about) for one in (cp, None))
    for one in (buffers, whole):
        one.load(4, step)
    for name in ("inputs", "targets", "loss_mask", "starts"):
        assert torch.equal(getattr(buffers, name), getattr(step, name)[..., mine]), name
        assert torch.equal(getattr(buffers.elsewhere(step), name), getattr(step, name)[..., mine]), name
        assert torch.equal(getattr(whole, name), getattr(step, name)), name
    assert torch.equal(buffers.keys, whole.keys) and buffers.divisor == whole.divisor == step.tokens
    assert whole.elsewhere(step) is step and buffers.elsewhere(step).tokens == step.tokens
    with pytest.raises(UsageError, match=r"a step of \[2, 1, 4\] tokens .* are made for \[2, 1, 8\]"):
        buffers.load(4, replace(batch(3, 2, 1, 4), starts=step.starts))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data__seq_len": 18}, r"data.seq_len 18 is not divisible by 2 x parallel.cp = 4, .* \(data.seq_len=20 does\)"),
        ({"parallel__cp": 16}, r"data.seq_len 16 is not divisible by 2 x parallel.cp = 32, .* \(data.seq_len=32 does\)"),
        (
            {"parallel__tp": 4, "data__seq_len": 12, "parallel__cp": 6, "data__microbatch_size": 3},
            "data.seq_len x data.microbatch_size / parallel.cp 6 = 6 tokens are not divisible by parallel.tp 4",
        ),
        ({"precision__fp8__recipe": "delayed", "data__microbatch_size": 1}, "microbatch_size / parallel.cp 2 = 8 is not a"),
        ({"model__backend": "te", "run__device": "cuda"}, "model.backend te runs without context parallelism so far"),
        ({"pipeline__schedule": "auto", "pipeline__w_delay": 0}, "schedule auto measures whole sequences only"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(keys: dict[str, Any], words: str) -> None:
    """Which number to change, before anything starts."""
    with pytest.raises(UsageError, match=words):
        config(**{"parallel__cp": 2, "precision__fp8__recipe": "none", "model__head_dim": 16, **keys})


def test_dry_run_of_a_rank(tmp_path: Any) -> None:
    """A rank's activations are half of one process's, and keys and values of whole rows; parameters are not cut, and the
    optimizer's state is shared."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {vocab_size: 8192, hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 128}\n"
        "precision: {fp8: {recipe: delayed}}\ndata: {seq_len: 512, microbatch_size: 4}\nrun: {device: cpu}\n"
        "train: {steps: 4}\noptim: {zero: 1}\n"
    )
    rows = []
    for cp in (1, 2):
        out = describe(load_config(file, [f"parallel.cp={cp}"]))
        assert ("each of 2 context-parallel ranks" in out) is (cp == 2)
        rows.append([float(cell) for cell in next(line for line in out.splitlines() if line.startswith("   0 ")).split()[1:]])
    parameters, _, optimizer, _, activations, _ = zip(*rows, strict=True)
    scratch = (8 * 65536 * 8 + 3 * 65536 * 4) / 2**20  # of norm and optimizer, the same for both
    assert 0.45 < (activations[1] - scratch) / (activations[0] - scratch) < 0.65
    assert optimizer[1] == pytest.approx(optimizer[0] / 2, rel=0.3) and parameters[0] == parameters[1]
