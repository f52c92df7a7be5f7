"""Evaluation: forward passes over held-out data through the same pipeline.

It reads scales and cached weights, and writes no amax, no lease, no gradient; generators are put back. So training goes on
bit for bit as if it had not run.
"""

from __future__ import annotations

import torch

from pipeline.batch import StepInput, check_starts
from pipeline.engine import Engine
from pipeline.p2p import gather_rows
from pipeline.stage import MicrobatchSlot
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.context import Phase
from qeffect_lm.runtime.rng import restore_generators, save_generators


class Evaluator:
    """Evaluates on an engine's stages, in slots of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots: dict[int, MicrobatchSlot] = {}

    def run(self, batch: StepInput) -> float:
        """Mean loss in nats per valid token over all microbatches of ``batch``; the same number on every rank.

        Raises:
            UsageError: microbatches of another shape than the pipeline's buffers have.
            PeerLostError: a neighbour died.
        """
        engine = self._engine
        ledger = engine.ledger
        shape = engine.inputs.shape[1:]
        if tuple(batch.inputs.shape[1:]) != shape:
            raise UsageError(
                f"evaluation on microbatches of {list(batch.inputs.shape[1:])} tokens, the pipeline's buffers hold "
                f"{list(shape)}: use data.microbatch_size sequences of data.seq_len"
            )
        check_starts(batch, engine.inputs.starts)
        if ledger.checks:
            reads = tuple((name, "rows") for name in engine.cache.names)
            ledger.versions.require_all(reads, epoch=ledger.weight_epoch(), reader="evaluation")
        with engine.computing():
            return self._run(engine.inputs.elsewhere(batch))

    def _run(self, batch: StepInput) -> float:
        engine = self._engine
        generators = save_generators()
        engine.divisor.fill_(batch.tokens)  # every training step writes its own
        if not self._slots:
            self._slots = {index: stage.make_slot(Phase.EVAL) for index, stage in engine.stages.items()}
        total = torch.zeros(1, dtype=torch.float64, device=engine.divisor.device)
        try:
            for microbatch in range(batch.inputs.shape[0]):
                self._forward(batch, microbatch, total)
            for axis in ("cp", "pp"):  # every token is counted on one rank of each
                rows = total.new_zeros(engine.mesh.size(axis), 1)
                gather_rows(rows, total, engine.mesh, axis)
                total = rows.sum(0)
            return float(total)
        finally:
            restore_generators(generators)

    def _forward(self, batch: StepInput, microbatch: int, total: torch.Tensor) -> None:
        engine = self._engine
        for index in sorted(engine.stages):
            stage, slot = engine.stages[index], self._slots[index]
            if slot.context.starts is not None and batch.starts is not None:
                slot.context.starts.copy_(batch.starts[microbatch])
            if stage.first:
                slot.x.copy_(batch.inputs[microbatch])
            else:
                engine.fetch(self._slots, index, "F", microbatch)
            if stage.last:
                assert slot.context.targets is not None and slot.context.loss_mask is not None
                slot.context.targets.copy_(batch.targets[microbatch])
                slot.context.loss_mask.copy_(batch.loss_mask[microbatch])
            stage.evaluate(slot)
            if stage.last:
                total.add_(slot.out.double())
            engine.deliver(self._slots, index, "F", microbatch)

