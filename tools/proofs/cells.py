"""The cells of the matrix on a GPU: which plan, window, width and number of ranks; their configuration, plan and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.actions import Action, Kind
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.schedules import Placement
from qeffect_lm.config import Config
from qeffect_lm.data.loader import StepBatch

MICROBATCHES, VOCAB, HISTORY = 4, 512, 4
SKIPS = (17,)  # the steps with a loss that is not finite, so that nothing is updated


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        plan: a schedule; ``zb-v@2`` is the one for two ranks, all its chunks on each single rank of the cell.
        pp: pipeline ranks.
        scope: what one graph holds.
        backend: who runs the layers.
        dropout: with it the layers run apart; without, attention and MLP are a node each.
    """

    plan: str
    window: str
    hidden: int
    layers: int
    pp: int = 1
    scope: str = "action"
    backend: str = "native"
    dropout: float = 0.0

    @property
    def name(self) -> str:
        words = [f"pp{self.pp}", self.plan, self.window, f"hidden {self.hidden}x{self.layers}", f"dropout {self.dropout:g}"]
        return " ".join([*words, *([self.backend] if self.backend != "native" else []), f"scope {self.scope}"])

    def config(self, graphs: str, device: str, **more: Any) -> Config:
        """``graphs``: the graph backend."""
        sequence = 128 if self.hidden < 1024 else 256
        data: dict[str, Any] = {
            "run": {"device": device, "seed": 20},
            "model": {
                "vocab_size": VOCAB,
                "hidden_size": self.hidden,
                "num_layers": self.layers,
                "num_heads": self.hidden // 64,
                "num_kv_heads": max(1, self.hidden // 128),
                "ffn_size": 2 * self.hidden,
                "dropout": self.dropout,
            },
            "precision": {"dtype": "bfloat16", "fp8": {"recipe": "delayed", "history": HISTORY, "window": self.window}},
            "parallel": {"pp": self.pp},
            "pipeline": {"microbatches": MICROBATCHES},
            "graphs": {"backend": graphs},
            "data": {"seq_len": sequence, "microbatch_size": 2},
            "optim": {"lr": 2e-3, "warmup_steps": 4, "schedule": "cosine"},
            "train": {"steps": 60, "eval_microbatches": 2},
            "launch": {"timeout_seconds": 120.0},
        }
        if self.backend != "native":
            data["model"]["backend"] = self.backend
        if graphs != "eager" and self.scope != "action":
            data["graphs"]["scope"] = self.scope
        for section, values in more.items():
            data[section] = {**data[section], **values}
        return Config.from_dict(data)

    def make_plan(self) -> Plan:
        """Validated; the same on all ranks."""
        schedule, _, ranks = self.plan.partition("@")
        if ranks:
            return on_one_rank(build_plan(schedule, int(ranks), MICROBATCHES, delay(schedule)), self.window)
        return build_plan(schedule, self.pp, MICROBATCHES, delay(schedule), self.window)

    def batch(self, step: int) -> StepBatch:
        """Random tokens of the step; in a step of :data:`SKIPS` one token weighs infinitely."""
        config = replace(self, backend="native").config("eager", "cpu")  # for its sizes; te would ask for a GPU
        shape = (MICROBATCHES, config.data.microbatch_size, config.data.seq_len)
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, VOCAB, (*shape[:2], shape[2] + 1), generator=generator)
        mask = (torch.rand(shape, generator=generator) < 0.9).float()
        valid = int(mask.sum())
        if step in SKIPS:
            mask[1, 0, 3] = float("inf")
        ids = torch.arange(shape[0] * shape[1]).view(shape[:2])
        return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, ids, valid)


def delay(schedule: str) -> int:
    """W one microbatch late where the schedule leaves that open, so that leases are not released last in, first out."""
    return 1 if schedule in ("1f1b", "gpipe", "interleaved-1f1b") else 0


def on_one_rank(plan: Plan, window: str) -> Plan:
    """All ranks' work on one rank, in the order in which they would do it if each action took one unit of time."""
    rows = [[action for action in row if action.is_compute] for row in plan.actions]
    last = plan.placement.num_chunks - 1
    done: set[Action] = set()
    merged: list[Action] = []
    while any(rows):
        ready = [row[0] for row in rows if row and _needs(row[0], last) <= done]
        if not ready:
            raise AssertionError(f"{plan.schedule}: no rank can go on")
        for action in ready:
            next(row for row in rows if row and row[0] == action).pop(0)
        done.update(ready)
        merged += ready
    chunks = plan.placement.num_chunks
    return make_plan(
        f"{plan.schedule}@{plan.num_ranks}", [merged], Placement((0,) * chunks), plan.microbatches, window=window
    )


def _needs(action: Action, last: int) -> set[Action]:
    chunk, microbatch = action.key
    if action.kind is Kind.F:
        return {Action(Kind.F, chunk - 1, microbatch)} if chunk else set()
    if action.kind is Kind.I:
        return {Action(Kind.F, chunk, microbatch) if chunk == last else Action(Kind.I, chunk + 1, microbatch)}
    return {Action(Kind.I, chunk, microbatch)}


WINDOWS = ("step", "microbatch")
# (plan, layers) for each width; on one rank, and on two.
ONE = {256: ("1f1b", "zb-h1@3", "zb-v@2", "dualpipev@2"), 1024: ("1f1b", "zb-v@2"), 4096: ("zb-h1@2",)}
TWO = {256: ("1f1b", "zb-h1", "zb-v", "dualpipev"), 1024: ("1f1b", "zb-v"), 4096: ("1f1b",)}
LAYERS = {256: 4, 1024: 4, 4096: 2}


def cells(
    pp: int, hidden: Sequence[int], windows: Sequence[str], scopes: Sequence[str], backend: str = "native"
) -> Iterator[Cell]:
    """The default cells: every plan in both windows at 256; wider, window and plan take turns. Every other cell has dropout.
    Whole steps as one graph: two of the plans."""
    for scope in scopes:
        for width in hidden:
            choice = ONE if pp == 1 else TWO
            plans = choice.get(width, choice[256])
            for number, plan in enumerate(plans if scope == "action" else plans[:3:2]):
                for turn, window in enumerate(windows):
                    dropout = 0.1 * ((number + turn) % 2)
                    if width == 256 or len(plans) == 1 or len(windows) == 1 or window == WINDOWS[number % 2]:
                        yield Cell(plan, window, width, LAYERS.get(width, 4), pp, scope, backend, dropout)
