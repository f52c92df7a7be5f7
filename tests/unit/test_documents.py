"""Rows of several documents that do not see each other: layers on the CPU, kernels, pipelines, captured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from qeffect_lm.app.assemble import assemble
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.context import LayerContext, Phase
from tests import tiny
from tests.tiny import Batch
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401  (kernels_run is a fixture)

LENGTHS = [[5, 11], [16], [1, 1, 14], [9, 3, 4]]


def packed(seed: int, first: int = 0) -> Batch:
    """Two microbatches of two rows of 16 tokens, of the documents of LENGTHS; ``first`` is added to each row's first
    document."""
    made = tiny.batch(seed, microbatches=2)
    starts = torch.zeros(4, 16, dtype=torch.int32)
    mask = torch.ones(4, 16)
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            starts[row, at : at + length] = at
            at += length
            mask[row, at - 1] = 0  # its target is the next document's first token
        made.inputs.view(4, 16)[row, : lengths[0]] += first
    made.inputs.remainder_(64)
    return replace(made, starts=starts.view(2, 2, 16), loss_mask=mask.view(2, 2, 16), tokens=int(mask.sum()))


def alone(batch: Batch) -> list[Batch]:
    """Its documents, a microbatch of one row each; those of a single token have nothing to predict."""
    made = []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            if length > 1:
                parts = (getattr(batch, name).view(4, 16)[row, at : at + length] for name in ("inputs", "targets", "loss_mask"))
                inputs, targets, mask = (part.view(1, 1, -1) for part in parts)
                made.append(Batch(inputs, targets, mask, batch.tokens, torch.zeros(1, 1, length, dtype=torch.int32)))
            at += length
    return made


KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama selective": {"model__recompute": "selective"},
    "mistral": {"model__family": "mistral", "model__sliding_window": 5},
    "gpt2": {"model__family": "gpt2", "model__num_kv_heads": 4, "model__max_position_embeddings": 24},
}


def settings(batch: int = 2, sequence: int = 16, microbatches: int = 2, **changes: Any) -> Config:
    keys = {"data__documents": "reset", "precision__fp8__recipe": "none", "pipeline__w_delay": 0, "graphs__backend": "eager"}
    return tiny.config(
        data__microbatch_size=batch, data__seq_len=sequence, pipeline__microbatches=microbatches, **{**keys, **changes}
    )


def gradients_of(config: Config, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a first step and its gradients."""
    assembly = assemble(config)
    result = assembly.engine.step(0, batch)
    return float(result.loss), {name: assembly.flat.grad(name).clone() for name in assembly.flat.gradient_names}


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    size = max(float(want.abs().max()), 1e-4)
    error = float((got - want).abs().max())
    assert error <= bound * size, (error, size)


@pytest.mark.parametrize("which", KEYS)
def test_a_packed_document_gives_what_it_gives_alone(which: str) -> None:
    """Loss and every gradient of packed rows are the sums over their documents, each alone in a row as long as itself, in
    float64 within 1e-12 (a row's sums are in other blocks then, so bits may differ); rows that join documents give something
    else."""
    keys = {**KEYS[which], "precision__dtype": "float64"}
    with reference():
        batch = packed(3)
        loss, grads = gradients_of(settings(**keys), batch)
        total, summed = 0.0, {name: torch.zeros_like(grad) for name, grad in grads.items()}
        for one in alone(batch):
            part, mine = gradients_of(settings(1, one.inputs.shape[-1], 1, **keys), one)
            total += part
            for name, grad in mine.items():
                summed[name] += grad
        assert abs(loss - total) <= 1e-12 * total
        for name, grad in grads.items():
            close(grad, summed[name], 1e-12)
        joined, _ = gradients_of(settings(**{**keys, "data__documents": "joined"}), replace(batch, starts=None))
        assert abs(joined - loss) > 1e-5


def rows_of(config: Config, batch: Batch) -> torch.Tensor:
    """Logits ``[4, 16, vocab]`` of a batch's rows."""
    assembly = assemble(config)
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
    assert batch.starts is not None
    context.starts = batch.starts.view(4, 16)
    with torch.no_grad():
        x: torch.Tensor = batch.inputs.view(4, 16)
        for index in sorted(assembly.engine.stages):
            x = assembly.engine.stages[index].chunk(x, context)
    return x


def test_a_document_does_not_see_its_neighbours() -> None:
    """Other tokens in a row's first document change none of the others' logits, bit for bit; joined, they do."""
    with reference():
        one, other = (rows_of(settings(), packed(3, first)) for first in (0, 7))
    for row, lengths in enumerate(LENGTHS):
        rest = slice(lengths[0], None)
        assert tiny.same_bits(one[row, rest], other[row, rest])
        assert not torch.equal(one[row, : lengths[0]], other[row, : lengths[0]])


def steps_of(microbatches: int = 2, **keys: Any) -> tiny.Trained:
    def batches(step: int) -> Batch:
        made = packed(step)
        if step % 2:  # documents lie elsewhere in every other step
            parts = {name: getattr(made, name).flip(0, 1) for name in ("inputs", "targets", "loss_mask", "starts")}
            made = replace(made, **parts)
        return made

    plan = keys.pop("plan", None)
    config = settings(microbatches=microbatches, **{"precision__fp8__recipe": "delayed", **keys})
    return tiny.train(config, 4, plan=plan, batches=batches)


def test_captured_and_piped_steps_are_the_eager_ones() -> None:
    """A replayed step reads where its own documents begin, on every stage; evaluation and calibration do too."""
    with reference():
        eager = steps_of()
        for other in (steps_of(graphs__backend="host_replay"), steps_of(plan=tiny.local_plan(4, 2))):
            assert other.losses == eager.losses and other.norms == eager.norms
            held = (eager.assembly.evaluator.run(packed(9)), other.assembly.evaluator.run(packed(9)))
            assert held[0] == held[1]
        assert len(set(eager.losses)) == 4
        with pytest.raises(UsageError, match="the data does not say where documents begin.*data.documents"):
            eager.assembly.engine.step(4, replace(packed(0), starts=None))


# ---- kernels --------------------------------------------------------------------------------------------------------


def attention(qkv: torch.Tensor, starts: torch.Tensor, window: int | None) -> torch.Tensor:
    """In float64 by a mask: ``[batch, sequence, kv_heads, group, head_dim]``."""
    batch, sequence, kv, parts, d = qkv.shape
    wide = qkv.double()
    q = wide[:, :, :, :-2].reshape(batch, sequence, kv * (parts - 2), d).transpose(1, 2)
    k, v = (wide[:, :, :, i].transpose(1, 2).repeat_interleave(parts - 2, dim=1) for i in (-2, -1))
    at = torch.arange(sequence, device=qkv.device)
    mask = (at[None] <= at[:, None])[None] & (at[None, None] >= starts[:, :, None])
    if window is not None:
        mask = mask & (at[None] > at[:, None] - window)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    return y.transpose(1, 2).reshape(batch, sequence, kv, parts - 2, d)


def rows(lengths: list[list[int]]) -> torch.Tensor:
    made = [[sum(one[:i]) for i, length in enumerate(one) for _ in range(length)] for one in lengths]
    return torch.tensor(made, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("kv", "group", "d", "window"), [(1, 2, 16, None), (1, 1, 24, 9)])
def test_the_kernels_are_masked_attention(kv: int, group: int, d: int, window: int | None) -> None:
    """Forward and backward against float64, within a hundred roundings of float32; of an odd length, over several blocks."""
    from qeffect_lm.kernels.document_attention import DocumentAttention

    starts = rows([[40, 1, 20, 29], [3, 2, 85]])
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(2, 90, kv, group + 2, d, generator=generator).to(DEVICE)
    dy = torch.randn(2, 90, kv, group, d, generator=generator).to(DEVICE)
    kernel = DocumentAttention(starts, window)
    assert kernel.takes(qkv)
    y, lse = kernel.forward(qkv)
    leaf = qkv.double().requires_grad_()
    want = attention(leaf, starts, window)
    close(y.double(), want.detach(), 1e-5)
    dqkv = kernel.backward(qkv, y, lse, dy)
    (wanted,) = torch.autograd.grad(want, leaf, dy.double())
    close(dqkv.double(), wanted, 1e-5)
    assert tiny.same_bits(dqkv, kernel.backward(qkv, y, lse, dy))


def test_the_kernels_keep_documents_apart_bit_for_bit() -> None:
    """Other numbers in the first document: the second's result and gradient keep their bits, forward and backward."""
    from qeffect_lm.kernels.document_attention import DocumentAttention

    starts = rows([[37, 43]])
    qkv = torch.randn(1, 80, 1, 3, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    other = qkv.clone()
    other[:, :37] *= 3.0
    made = []
    for one in (qkv, other):
        kernel = DocumentAttention(starts)
        y, lse = kernel.forward(one)
        made.append((y, kernel.backward(one, y, lse, torch.ones_like(y))))
    for a, b in zip(*made, strict=True):
        assert tiny.same_bits(a[:, 37:], b[:, 37:]) and not torch.equal(a[:, :37], b[:, :37])


def test_a_step_on_kernels_is_the_reference_step() -> None:
    """Rotation by each document's own positions and attention, forward and backward, in a whole step: the gradients of the
    reference layers, within roundings of float32."""
    keys = {"model__num_layers": 1}
    batch = packed(4)
    loss, grads = gradients_of(settings(**keys), batch)
    with reference():
        wanted, expected = gradients_of(settings(**keys), batch)
    assert abs(loss - wanted) <= 1e-5 * wanted
    for name, grad in grads.items():
        close(grad, expected[name], 2e-4)


def test_what_cannot_keep_documents_apart_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.documents reset: model\.backend te does not"):
        settings(model__backend="te", run__device="cuda", precision__dtype="bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "documents", False)
        with pytest.raises(UsageError, match=r"layers\.0\.attention \(Attention\) does not keep documents apart"):
            assemble(settings())
