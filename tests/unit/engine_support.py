"""What the tests of the contract in the engine share: tiny assemblies, steps, and an undisturbed run to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.contract.errors import LeaseError
from tests.tiny import Batch, batch, config, differing, train

BACKENDS = ("eager", "host_replay")
TINY = {"model__num_layers": 2}
FP8_LINEARS = 8  # and the head, which is never FP8


def make(backend: str = "eager", **overrides: Any) -> Assembly:
    """Assembled, calibrated on batch 0 and, with graphs, captured."""
    assembly = assemble(config(**TINY, graphs__backend=backend, **overrides))
    assembly.prepare(batch(0, assembly.plan.microbatches))
    return assembly


def step(assembly: Assembly, number: int) -> tuple[float, float, bool]:
    result = assembly.engine.step(number, batch(number, assembly.plan.microbatches))
    return float(result.loss), float(result.grad_norm), bool(result.skipped)


def tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Copies of everything a checkpoint saves, FP8 as bytes."""
    items = ((item.name, item.tensor) for item in assembly.logical_tensors())
    return {name: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for name, t in items}


def part(state: dict[str, torch.Tensor], *prefixes: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}


@cache
def reference(
    *numbers: int,
) -> tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor], dict[str, Any]]:
    """An undisturbed eager run of these steps: results, tensors, and the ledger's counters."""
    assembly = make()
    results = [step(assembly, number) for number in numbers]
    assert not any(skipped for _, _, skipped in results) and len({loss for loss, _, _ in results}) == len(numbers)
    return results, tensors(assembly), assembly.ledger.state()


def assert_as_reference(assembly: Assembly, results: list[tuple[float, float, bool]], *numbers: int) -> None:
    wanted, state, counters = reference(*numbers)
    assert results == wanted
    assert differing(tensors(assembly), state) == []
    assert assembly.ledger.state() == counters


def assert_a_swapped_w_is_trapped(settings: Config, batches: Callable[[int], Batch]) -> None:
    """W of two microbatches as one product: the last one's W before the first's is refused before it runs, and the next step is
    clean."""
    run = train(settings, 1, batches=batches)
    engine = run.assembly.engine
    order = engine.actions
    first, second = (next(i for i, a in enumerate(order) if str(a) == name) for name in ("0W0", "0W1"))
    wrong = list(order)
    wrong[first], wrong[second] = wrong[second], wrong[first]
    engine.actions = tuple(wrong)
    with pytest.raises(LeaseError, match="W of microbatch 0 has not handed its leases over"):
        engine.step(1, batches(1))
    engine.actions = order
    clean = train(settings, 2, batches=batches)
    assert float(engine.step(1, batches(1)).loss) == clean.losses[1]
    assert differing(tensors(run.assembly), clean.tensors) == []
