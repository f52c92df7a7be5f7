"""Drop-ins are called as torch's own are: constructors and methods compared with those of the torch that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules as torchs

from qeffect_lm.integrations import pipelining

BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
PAIRS = [
    ("ScheduleGPipe", "ScheduleGPipe"),
    ("Schedule1F1B", "Schedule1F1B"),
    ("ScheduleInterleaved1F1B", "ScheduleInterleaved1F1B"),
    ("ScheduleZBVZeroBubble", "ScheduleZBVZeroBubble"),
    ("ScheduleDualPipeV", "ScheduleDualPipeV"),
    ("PipelineScheduleSingle", "PipelineScheduleSingle"),
    ("ScheduleZBH1", "Schedule1F1B"),  # torch has none of these: one stage on each rank, as of its others
    ("ScheduleZBH2", "Schedule1F1B"),
    ("PipelineSchedule", "ScheduleInterleaved1F1B"),
]


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(call, follow_wrapped=False).parameters.values())


def shapes(call: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Name, kind and default, in order, of what can be given by position."""
    return [(p.name, p.kind, p.default) for p in parameters(call) if p.kind in BY_PLACE]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_constructors_take_by_position_what_torchs_take(ours, theirs):
    mine, wanted = shapes(getattr(pipelining, ours).__init__), shapes(getattr(torchs, theirs).__init__)
    assert len(wanted) >= 8 and mine[: len(wanted)] == wanted
    assert {name for name, *_ in mine[len(wanted) :]} <= {"defer_pp_recv"}  # which an older torch has not
    rest = [p for p in parameters(getattr(pipelining, ours).__init__) if p.kind not in BY_PLACE]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in rest)  # ours, by name only


@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS])
def test_methods_take_what_torchs_take(ours):
    mine = getattr(pipelining, ours)
    for name in ("step", "eval"):
        told = {p.name: (p.kind, p.default) for p in parameters(getattr(mine, name))}
        for p in parameters(getattr(torchs.ScheduleInterleaved1F1B, name)):
            assert told.get(p.name) == (p.kind, p.default), (name, p)
    for name in ("_step_microbatches", "_dump_csv", "_load_csv"):
        got, wanted = shapes(getattr(mine, name)), shapes(getattr(torchs._PipelineScheduleRuntime, name))
        assert got[: len(wanted)] == wanted, name
        assert all(default is None for *_, default in got[len(wanted) :]), name  # what an older torch has not (loss_kwargs)


def test_a_stage_hands_torchs_its_arguments(monkeypatch):
    """First the four that ours looks at; any others go on, in order or by name, whatever this torch has there."""
    first, wanted = parameters(pipelining.PipelineStage.__init__), parameters(TorchStage.__init__)
    assert [(p.name, p.kind, p.default) for p in first[:5]] == [(p.name, p.kind, p.default) for p in wanted[:5]]
    assert [p.kind for p in first[5:]] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    seen: list[Any] = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        self.dw_builder = None

    monkeypatch.setattr(TorchStage, "__init__", init)
    rest = [p.name for p in wanted[5:]]
    module, device = nn.Linear(2, 2), torch.device("cpu")
    pipelining.PipelineStage(module, 1, 3, device, *rest)
    stage = pipelining.PipelineStage(submodule=module, stage_index=1, num_stages=3, device=device, **dict.fromkeys(rest))
    assert seen == [((module, 1, 3, device, *rest), {}), ((module, 1, 3, device), dict.fromkeys(rest))]
    assert stage.conversion.split == ("",) and issubclass(pipelining.PipelineStage, TorchStage)
