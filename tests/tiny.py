"""A tiny model on made-up data, for tests of the engine: configuration, batches, runs and bitwise comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.actions import Action, Kind
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.parallel.mesh import Mesh


@dataclass
class Batch:
    """One optimizer step of data, as the engine reads it."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    tokens: int
    starts: torch.Tensor | None = None


def batch(seed: int, microbatches: int = 4, size: int = 2, sequence: int = 16, vocab: int = 64) -> Batch:
    """Random tokens of a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (microbatches, size, sequence + 1), generator=generator)
    mask = torch.ones(microbatches, size, sequence)
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, microbatches * size * sequence)


def config(**overrides: Any) -> Config:
    """The tiny configuration; keys are ``section__key`` or ``section__sub__key``."""
    data: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_size": 48,
        },
        "precision": {"dtype": "float32", "fp8": {"recipe": "delayed", "history": 3}},
        "pipeline": {"microbatches": 4, "w_delay": 1},
        "data": {"seq_len": 16, "microbatch_size": 2},
        "optim": {"warmup_steps": 2, "lr": 1e-2},
        "train": {"steps": 10},
        "launch": {"timeout_seconds": 60.0},
    }
    for key, value in overrides.items():
        *path, last = key.split("__")
        section = data
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return Config.from_dict(data)


def local_plan(chunks: int, microbatches: int, window: str = "step") -> Plan:
    """``chunks`` stages on one rank, all F, then all I, then all W: a pipeline without messages."""
    actions = [Action(Kind.F, chunk, m) for m in range(microbatches) for chunk in range(chunks)]
    actions += [Action(Kind.I, chunk, m) for m in range(microbatches) for chunk in reversed(range(chunks))]
    actions += [Action(Kind.W, chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    return make_plan("local", [actions], Placement((0,) * chunks), microbatches, window=window)


@dataclass
class Trained:
    """What a run left: the assembly, and per step loss, gradient norm, skipped; scales after each step."""

    assembly: Assembly
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    scales: list[torch.Tensor]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all logical tensors; FP8 ones as their bytes (pickle knows no FP8)."""
        items = ((item.name, item.tensor) for item in self.assembly.logical_tensors())
        return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in items}


def train(
    settings: Config,
    steps: int = 6,
    *,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    batches: Callable[[int], Batch] = batch,
    between: Callable[[Assembly, int], None] | None = None,
) -> Trained:
    """Assemble, prepare and run ``steps`` steps; ``between`` is called after each."""
    assembly = assemble(settings, mesh, plan)
    assembly.prepare(batches(0))
    run = Trained(assembly, [], [], [], [])
    for step in range(steps):
        result = assembly.engine.step(step, batches(step))
        run.losses.append(float(result.loss))
        run.norms.append(float(result.grad_norm))
        run.skipped.append(bool(result.skipped))
        run.scales.append(assembly.timeline.scale.clone())
        if between is not None:
            between(assembly, step)
    return run


@torch.no_grad()
def logits_of(assembly: Assembly, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch, sequence]`` → ``[batch, sequence, vocab]``, in evaluation, through all chunks of this process."""
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
    x = tokens
    for index in sorted(assembly.engine.stages):
        x = assembly.engine.stages[index].chunk(x, context)
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, signed zeros and NaN payloads included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ; a name that only one side has counts too."""
    return sorted(n for n in set(a) | set(b) if n not in a or n not in b or not same_bits(a[n], b[n]))


def assert_moved(run: Trained) -> None:
    """The run is worth comparing: scales are not 1 and change, losses differ, gradients are not zero, nothing was skipped."""
    assert len(set(run.losses)) == len(run.losses) and all(norm > 0 for norm in run.norms) and not any(run.skipped)
    if run.assembly.timeline.roles:
        assert all(bool((scale != 1).all()) for scale in run.scales)
        assert all(not torch.equal(a, b) for a, b in zip(run.scales, run.scales[1:], strict=False))


def merged(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of all pipeline ranks by name."""
    result: dict[str, torch.Tensor] = {}
    for part in parts:
        result.update(part)
    return result
