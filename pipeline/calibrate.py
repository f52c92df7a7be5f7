"""Calibration: where do scales come from before there is a history?

Our own high-precision F and I of microbatch 0 through all stages, with the step's loss divisor. It records each role's amax,
max-reduced over DP and TP, and leaves nothing else behind: no gradient, no random draw, no data consumed. Its commit makes
epoch 1. (With scale 1, E5M2 would flush most gradients to zero.)
"""

from __future__ import annotations

import torch

from pipeline.batch import StepInput, check_starts
from pipeline.engine import Engine
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.context import Phase
from qeffect_lm.layers.dropout import host_key


def calibrate(engine: Engine, batch: StepInput) -> None:
    """Calibrate all roles of the engine's rank on microbatch 0 of ``batch``; collective over the pipeline.

    Raises:
        PeerLostError: a neighbour died.
    """
    with engine.computing():
        _calibrate(engine, engine.inputs.elsewhere(batch))


def sample_underflow(engine: Engine, batch: StepInput, recipe: DelayedScaling) -> dict[str, tuple[int, int]]:
    """Of microbatch 0 of ``batch``, run as a calibration does, how many of each role's non-zero values its current scale would
    make zero, and how many there are; of this rank's roles and pieces. Between two steps; collective over the pipeline. It
    changes nothing.

    Takes the memory of one microbatch in high precision, beside what captured graphs hold. Experts' inputs and gradients are
    not sampled.

    Raises:
        PeerLostError: a neighbour died.
    """
    timeline = engine.ledger.timeline
    before = timeline.open_amax.clone()
    recipe.counts = {}
    try:
        with engine.computing():
            _run(engine, engine.inputs.elsewhere(batch))
    finally:
        counts, recipe.counts = recipe.counts, None
        timeline.open_amax.copy_(before)
    if not counts:
        return {}
    return {role: (lost, of) for role, (lost, of) in zip(counts, torch.stack(list(counts.values())).tolist(), strict=True)}


def _calibrate(engine: Engine, batch: StepInput) -> None:
    _run(engine, batch)
    engine.end.reduce_amax_()
    ledger = engine.ledger
    ledger.commit(ledger.timeline.epochs[Direction.FORWARD], by="CALIBRATION", calibration=True)
    with torch.no_grad():
        ledger.timeline.roll_(engine.end.never_skip)


def _run(engine: Engine, batch: StepInput) -> None:
    """F and I of microbatch 0 through all stages; the recipe observes every tensor that would be in FP8."""
    check_starts(batch, engine.inputs.starts)
    engine.divisor.fill_(batch.tokens)
    order = sorted(engine.stages)
    slots = {index: engine.stages[index].make_slot(Phase.CALIBRATE) for index in order}
    for index in order:
        stage, slot = engine.stages[index], slots[index]
        slot.context.key.fill_(host_key("calibration", engine.mesh.coord("samples")))
        if slot.context.starts is not None and batch.starts is not None:
            slot.context.starts.copy_(batch.starts[0])
        if stage.first:
            slot.x.copy_(batch.inputs[0])
        else:
            engine.fetch(slots, index, "F")
        if stage.last:
            assert slot.context.targets is not None
            slot.context.targets.copy_(batch.targets[0])
        if slot.context.loss_mask is not None:
            slot.context.loss_mask.copy_(batch.loss_mask[0])
        stage.forward(slot, None)
        engine.deliver(slots, index, "F")
    for index in reversed(order):
        stage, slot = engine.stages[index], slots[index]
        if not stage.last:
            engine.fetch(slots, index, "B")
        stage.input_grad(slot, None)
        engine.deliver(slots, index, "B")
