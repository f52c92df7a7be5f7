"""What the contract adds to one replayed action on the host, whatever the number of layers behind it.

The engine runs a real plan with real summaries; its graphs are replaced by ones that do nothing, as a GPU's are asynchronous.
What is left is host time: the engine's own, and the ledger's. Modes take turns from step to step on the same objects.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.actions import Action, Kind
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import load_config
from qeffect_lm.data.loader import StepBatch

MICROBATCHES = 8
KINDS = (Kind.F, Kind.I, Kind.W)


class Nothing:
    """A graph whose launch takes no time."""

    digest, pool_bytes = "", 0

    @property
    def lines(self) -> list[str]:
        return []

    def replay(self) -> None: ...

    def reset(self) -> None: ...

    def storages(self) -> dict[int, int]:
        return {}


def small(config: Path, layers: int) -> Assembly:
    """The demo's kind of model with ``layers`` blocks, narrow, in one process, captured."""
    overrides = [
        f"model.num_layers={layers}",
        "model.vocab_size=64",
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "model.ffn_size=16",
        "data.seq_len=16",
        "data.microbatch_size=1",
        "parallel.pp=1",
        "pipeline.stage_layers=null",
        f"pipeline.microbatches={MICROBATCHES}",
        "pipeline.w_delay=1",
        "precision.fp8.recipe=delayed",
        "graphs.backend=host_replay",
    ]
    assembly = assemble(load_config(config, overrides))
    assembly.prepare(batch(0))
    return assembly


def batch(step: int) -> StepBatch:
    tokens = torch.randint(0, 64, (MICROBATCHES, 1, 17), generator=torch.Generator().manual_seed(step))
    mask = torch.ones(MICROBATCHES, 1, 16)
    ids = torch.arange(MICROBATCHES).view(MICROBATCHES, 1)
    return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, ids, int(mask.sum()))


def timed(assembly: Assembly, samples: dict[str, dict[str, list[float]]]) -> Callable[[str], None]:
    """Wrap the engine's handlers so that they note their microseconds; returns what chooses the mode to note for."""
    engine = assembly.engine
    now = ["off"]

    def wrap(kind: Kind, handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def run(action: Action) -> None:
            began = time.perf_counter_ns()
            handler(action)
            samples[str(kind)][now[0]].append((time.perf_counter_ns() - began) / 1000)

        return run

    for kind in KINDS:
        engine._handlers[kind] = wrap(kind, engine._handlers[kind])

    def choose(mode: str) -> None:
        now[0] = mode

    return choose


def measure(config: Path, layers: int, steps: int = 60) -> dict[str, dict[str, float]]:
    """Kind → {off, enforce, added} in microseconds of host time per replayed action (medians)."""
    assembly = small(config, layers)
    captured = assembly.engine.captured
    assert captured is not None
    captured.actions = {key: (Nothing(), summary) for key, (_, summary) in captured.actions.items()}
    samples: dict[str, dict[str, list[float]]] = {str(kind): {"off": [], "enforce": []} for kind in KINDS}
    choose = timed(assembly, samples)
    data: Any = batch(1)
    for step in range(2 * steps):
        mode = ("off", "enforce")[(step + step // 2) % 2]  # off enforce enforce off: neither is always first
        choose(mode)
        assembly.ledger.switch(mode, synchronised=True)
        assembly.engine.step(step, data)
    medians = {kind: {mode: statistics.median(values) for mode, values in modes.items()} for kind, modes in samples.items()}
    return {kind: {**modes, "added": modes["enforce"] - modes["off"]} for kind, modes in medians.items()}
