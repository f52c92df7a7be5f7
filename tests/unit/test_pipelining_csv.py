"""Schedules as torch's CSVs: theirs read as plans, ours read by them, and what their check lets pass is refused by name."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from pipeline.plan import build_plan
from pipeline.validate import validate
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.pipelining import torch_csv
from qeffect_lm.integrations.pipelining.convert import SplitLinear, split_linears

OURS = [
    ("1f1b", 3, 1),
    ("gpipe", 3, 1),
    ("zb-h1", 4, 1),
    ("zb-h2", 2, 1),
    ("interleaved-1f1b", 2, 3),
    ("zb-v", 3, 2),
    ("dualpipev", 2, 2),
]


@pytest.mark.parametrize(("name", "ranks", "chunks"), OURS)
@pytest.mark.parametrize("communication", [False, True])
def test_ours_there_and_back(name, ranks, chunks, communication):
    plan = build_plan(name, ranks, 6, chunks=chunks, holding=torch_csv.HOLDING)
    text = torch_csv.write(plan, communication=communication)
    for cell in text.replace("\n", ",").split(","):
        assert str(torchs._Action.from_str(cell) or "") == cell  # their words
    back = torch_csv.read(text, ranks, ranks * chunks, 6, "file.csv")
    assert back.actions == plan.actions and back.placement == plan.placement and back.slots == plan.slots
    assert ("SEND_F" in text) == communication


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 2, 2),
        ("ScheduleInterleavedZeroBubble", 2, 2),
        ("ScheduleZBVZeroBubble", 3, 2),
        ("ScheduleDualPipeV", 2, 2),
    ],
)
def test_theirs_are_plans(kind, ranks, chunks, tmp_path):
    """Schedules that torch itself makes, in its own CSV: overlapped pairs, full backwards, idle cells and messages included."""
    made = theirs(kind, ranks, chunks, 8)
    made._dump_csv(tmp_path / "comms.csv", format="compute_comms")
    made._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    plan = torch_csv.read((tmp_path / "theirs.csv").read_text(), ranks, ranks * chunks, 8, "theirs.csv")
    validate(plan.actions, plan.placement, 8, lowered=True)
    told = (tmp_path / "comms.csv").read_text()
    assert "SEND_F" in told and torch_csv.read(told, ranks, ranks * chunks, 8, "comms.csv").actions == plan.actions
    for rank, row in made.pipeline_order.items():
        words = [part for cell in row if cell is not None for part in (cell.sub_actions or [cell])]
        wanted = [str(word) for word in words if word.computation_type is torchs.FORWARD]
        assert [str(action) for action in plan.actions[rank] if action.kind == "F"] == wanted


def theirs(kind: str, ranks: int, chunks: int, microbatches: int) -> Any:
    def stage(index: int) -> Any:
        numbers = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0, "stage_index": index}
        return SimpleNamespace(**numbers, is_last=False, submod=nn.Identity())

    return getattr(torchs, kind)([stage(index) for index in range(chunks)], microbatches)


def test_backward_in_reverse_order_is_refused():
    """Looped BFS runs the last microbatch's backward first: its sums would have other bits than any other schedule's."""
    made = theirs("ScheduleLoopedBFS", 2, 2, 4)
    text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in made.pipeline_order.values())
    with pytest.raises(PlanError, match="leaves microbatch order .* sums would depend on the schedule"):
        torch_csv.read(text, 2, 4, 4, "bfs.csv")


GOOD = ["0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1I0,1W0,1F1,1I1,1W1"]


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (["0F0,0F1,0I0,0W0,0I1,0W1,0I0", GOOD[1]], PlanError, "I"),
        (["0F0,0F1,0B0,0B0,0B1", GOOD[1]], PlanError, "0I0|twice"),
        (["0F0,0F1,0I0,0W0", GOOD[1]], PlanError, "0I1|no I"),
        ([GOOD[0], "1F0,1F1,1B1,1B0"], PlanError, "order"),
        ([GOOD[0], "1I0,1F0,1W0,1F1,1I1,1W1"], PlanError, "1I0"),
        ([GOOD[0], "1F0,1W0,1I0,1F1,1I1,1W1"], PlanError, "1W0"),
        (["0F0,0I0,0W0,0F1,0I1,0W1,1F0", "1F1,1I0,1W0,1I1,1W1"], PlanError, "stage 1 is on rank 0 and on rank 1"),
        ([GOOD[0]], PlanError, "has 1 rows, and there are 2"),
        ([GOOD[0], "2F0,2F1,2B0,2B1"], PlanError, "it says something else of stage 1"),
        ([GOOD[0], "1F0,1X0"], UsageError, "row 1, cell 1"),
        ([GOOD[0], "1F0,STEP"], UsageError, "row 1, cell 1: STEP is no action of torch's"),
        (["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"], PlanError, ""),
    ],
)
def test_what_is_no_schedule(rows, error, said):
    """A backward twice, a microbatch without one, a last stage out of order: torch's own check passes the first, the second
    where counts agree, and the third."""
    torch_csv.read("\n".join(GOOD), 2, 2, 2, "good.csv")
    with pytest.raises(error) as caught:
        torch_csv.read("\n".join(rows), 2, 2, 2, "file.csv")
    assert any(part in str(caught.value) for part in said.split("|")), str(caught.value)


def test_the_holes_of_torchs_own_check():
    """What is refused above and passes there, so that the claim is true of the torch that is installed."""
    for rows in (["0F0,0F1,0I0,0W0,0I1,0W1,0I0", GOOD[1]], [GOOD[0], "1F0,1F1,1B1,1B0"]):
        order = {rank: [torchs._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
        torchs._validate_schedule(order, 2, 2, 2)


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Plain(nn.Linear):
    pass


def test_a_converted_linear_stays_what_it_was():
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(4, 8), "own": Own(8, 8), "plain": Plain(8, 4, bias=False), "norm": nn.LayerNorm(4)})
    net["plain"].weight.requires_grad_(False)
    before = {name: (id(p), p.clone()) for name, p in net.named_parameters()}
    x = torch.randn(3, 4)

    def run() -> torch.Tensor:
        return net["norm"](net["plain"](net["own"](net["a"](x))))

    want = run()
    want.sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    told = split_linears(net)
    assert told.split == ("a", "plain") and told.whole == {
        "a.bias": "no linear's weight",
        "own.weight": "its class has a forward of its own",
        "own.bias": "no linear's weight",
        "norm.weight": "no linear's weight",
        "norm.bias": "no linear's weight",
    }
    assert "2 linears are split: a, plain" in str(told) and "1 finished in I (its class has a forward of its own)" in str(told)
    assert isinstance(net["plain"], Plain) and isinstance(net["a"], SplitLinear) and type(net["own"]) is Own
    assert {name: (id(p), p) for name, p in net.named_parameters()}.keys() == before.keys()
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in net.named_parameters())
    assert torch.equal(run(), want)
    run().sum().backward()  # outside of a schedule: as before, weight gradients included
    for name, p in net.named_parameters():
        assert p.grad is grads[name] is None or torch.equal(p.grad, grads[name])
    assert split_linears(net) == told and split_linears(net, only=lambda path, _: path != "a").whole.keys() == told.whole.keys()
    assert split_linears(nn.Linear(2, 2)).split == ("",)


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys, qeffect_lm.integrations.pipelining as p; assert 'torch' not in sys.modules; p.Schedule1F1B"
    subprocess.run([sys.executable, "-c", code], check=True)
