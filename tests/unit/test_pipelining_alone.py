"""Drop-in schedules on one rank: FP8 of converted linears, what is refused, and what a failed step leaves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules as torchs
from torch.nn.parallel import DistributedDataParallel

from pipeline.plan import build_plan
from qeffect_lm.contract.errors import LeaseLeakError, StaleWeightError
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.quantise import E4M3, E5M2, current_scale
from qeffect_lm.integrations import pipelining
from qeffect_lm.integrations.pipelining import attach, split_linears, torch_csv
from tests import pipelining_support as support

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one(kind: Any = pipelining.Schedule1F1B, stage: Any = pipelining.PipelineStage, module: Any = None, **options: Any) -> Any:
    """A schedule over one stage and two microbatches, and that stage's module."""
    options = {"loss_fn": support.loss_fn} | options
    held = stage(support.model(1)[0] if module is None else module, 0, 1, CPU)
    return kind(held, 2, **options), held.submod


def grads(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def bits(state: Any) -> dict[str, bytes]:
    return {name: support.raw(t) for name, t in state.state_dict().items()}


def tiny(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return support.loss_fn(output, target) * 2.0**-30


TOKENS, TARGET = support.batch(4)


@pytest.mark.parametrize("around", [False, True])
def test_fp8_gradients_of_the_first_step_are_float32s_to_its_formats(around):
    """Every tensor has its own scale until maxima rolled in: gradients far below what E5M2 holds at scale 1 are as good as
    others. Bound: one rounding to E5M2 (2^-3) and two to E4M3 (2^-4), of the norm."""
    told = {}
    for loss_fn in (support.loss_fn, tiny):
        for fp8 in (False, True):
            if around:
                schedule, module = one(torchs.Schedule1F1B, TorchStage, loss_fn=loss_fn)
                state = attach(schedule, fp8=fp8).fp8
            else:
                schedule, module = one(fp8=fp8, loss_fn=loss_fn)
                state = schedule.fp8
            schedule.step(TOKENS, target=TARGET)
            told[loss_fn, fp8] = grads(module)
    for name, wanted in told[support.loss_fn, False].items():
        rounded, small = told[support.loss_fn, True][name], told[tiny, True][name]
        assert 0 < (rounded - wanted).norm() <= (2**-3 + 2 * 2**-4) * wanted.norm(), name
        assert torch.equal(small * 2.0**30, rounded), name
    assert state is not None and state.unrolled == set()
    role = "stage0.0.block.up.grad_output"  # from now on the timeline's: of the maximum that was rolled in
    assert state.timeline.scale_of(role) == E5M2.max / state.timeline.history_of(role)[0]


def test_first_scales_are_each_tensors_own():
    schedule, module = one(fp8={"margin": 1})
    state = schedule.fp8
    schedule.eval(TOKENS)
    weight = module[1].head.weight
    assert state.timeline.scale_of("stage0.1.head.weight") == current_scale(weight.detach().bfloat16(), E4M3, 1) != 1
    assert state.timeline.scale_of("stage0.1.head.input") == 1  # nothing rolled: evaluation tells nothing
    assert len(state.unrolled) == 3 * len(state.linears)
    x = torch.randn(4, support.WIDTH)
    assert state.linears["stage0.1.head"].fp8._operand("input", x, None).scale_inv == 1 / current_scale(x, E4M3, 1)
    theirs, attached = one(torchs.Schedule1F1B, TorchStage)
    attach(theirs, fp8={"margin": 1})
    with torch.no_grad():
        assert torch.equal(theirs.eval(TOKENS, target=TARGET), schedule.eval(TOKENS))  # cast for an evaluation, too
    before = state.state_dict()
    schedule.step(TOKENS, target=TARGET)
    theirs.step(TOKENS, target=TARGET)
    assert all(torch.equal(grads(attached)[name], grad) for name, grad in grads(module).items())
    again, other = one(fp8={"margin": 1})  # a checkpoint of before the first step: still its own scales
    again.fp8.load_state_dict(before)
    assert len(again.fp8.unrolled) == 3 * len(state.linears)
    again.step(TOKENS, target=TARGET)
    assert all(torch.equal(grads(other)[name], grad) for name, grad in grads(module).items())
    support.descend([module])
    once, weights = state.state_dict(), {name: w.clone() for name, w in module.state_dict().items()}
    late, resumed = one(fp8={"margin": 1})
    late.fp8.load_state_dict(once)
    assert late.fp8.unrolled == set()
    with pytest.raises(StaleWeightError, match="cast with its saved scale, is not the saved cast: load the weights, too"):
        late.step(TOKENS, target=TARGET)
    late, resumed = one(fp8={"margin": 1})
    late.fp8.load_state_dict(once)
    resumed.load_state_dict(weights)
    for each, of in ((schedule, module), (late, resumed)):
        of.zero_grad()
        each.step(TOKENS, target=TARGET)
        support.descend([of])
    assert bits(late.fp8) == bits(state) != {name: support.raw(t) for name, t in once.items()}
    assert all(torch.equal(grads(resumed)[name], grad) for name, grad in grads(module).items())
    with pytest.raises(UsageError, match="amax history has 16 windows, not 3"):
        one(fp8={"history": 3, "margin": 1})[0].fp8.load_state_dict(once)
    with pytest.raises(UsageError, match="has no FP8 state stage0.0.block.down/"):
        again.fp8.load_state_dict({key: value for key, value in once.items() if "0.block.down" not in key})


def test_weights_are_cast_after_writes_that_autograd_does_not_count():
    """A fused optimizer's, after an evaluation or a save has cast what was there before it."""
    told = []
    for between in (lambda s: None, lambda s: s.eval(TOKENS), lambda s: s.fp8.state_dict()):
        schedule, module = one(fp8=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, fused=True)
        schedule.step(TOKENS, target=TARGET)
        between(schedule)
        counted = module[1].head.weight._version
        optimizer.step()
        assert module[1].head.weight._version == counted  # else there is nothing to show
        optimizer.zero_grad()
        schedule.step(TOKENS, target=TARGET)
        told.append(grads(module))
    for other in told[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in told[0].items())


def test_a_failed_step_leaves_no_maxima_behind():
    """Neither those of its microbatches, nor scales that it rolled before its fault was found (torch's own schedules)."""
    schedule, module = one(fp8=True)
    clean, other = one(fp8=True)
    calls: list[int] = []

    def stops(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) > 1:
            raise ArithmeticError("stop")
        return 1e6 * out

    handle = module[1].norm.register_forward_hook(stops)
    with pytest.raises(ArithmeticError):
        schedule.step(TOKENS, target=TARGET)
    handle.remove()
    module.zero_grad()
    for each, of in ((schedule, module), (clean, other)):
        each.step(TOKENS, target=TARGET)
        of.zero_grad()
        each.step(TOKENS, target=TARGET)
    assert bits(schedule.fp8) == bits(clean.fp8)
    assert all(torch.equal(grads(other)[name], grad) for name, grad in grads(module).items())

    theirs, module = one(torchs.Schedule1F1B, TorchStage)
    contract = attach(theirs, fp8=True)
    theirs.step(TOKENS, target=TARGET)
    before = bits(contract.fp8)
    stage, epochs = theirs._stage, dict(contract.fp8.timeline.epochs)
    backward = stage.backward_one_chunk
    stage.backward_one_chunk = lambda number, **kw: backward(number, **kw) if number else None
    with pytest.raises(LeaseLeakError):
        theirs.step(TOKENS, target=TARGET)
    assert bits(contract.fp8) == before
    assert contract.fp8.timeline.epochs == epochs


class Skips(nn.Module):
    """A part that runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.expert, self.runs = support.model(1)[0], nn.Linear(support.WIDTH, support.WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[0](x)
        return self.inner[1](x + self.expert(x) if self.runs else x)


def test_an_fp8_linear_that_did_not_run():
    schedule, _ = one(module=Skips(), fp8=True)
    with pytest.raises(UsageError, match=r"stage0.expert \(1 of 6\) is to multiply in FP8 and did not run so .*'idle': True"):
        schedule.step(TOKENS, target=TARGET)
    schedule, module = one(module=Skips(), fp8={"idle": True}, loss_fn=tiny)
    schedule.step(TOKENS, target=TARGET)
    assert schedule.fp8.unrolled == {"stage0.expert.input", "stage0.expert.grad_output"}
    module.zero_grad()
    plain, other = one(module=Skips(), loss_fn=tiny)
    other.load_state_dict(module.state_dict())
    module.runs = other.runs = True
    for each in (schedule, plain):  # one that is late has its own scales in its first step, too
        each.step(TOKENS, target=TARGET)
    wanted = other.expert.weight.grad
    assert 0 < (module.expert.weight.grad - wanted).norm() <= (2**-3 + 2 * 2**-4) * wanted.norm()
    assert schedule.fp8.unrolled == set()


def test_a_linear_whose_forward_was_replaced():
    """Before it is split it is left whole, with the reason; after it an FP8 schedule refuses to run past it."""
    module = support.model(1)[0]
    head = module[1].head
    head.forward = types.MethodType(lambda self, x: F.linear(x, self.weight), head)
    told = split_linears(module)
    assert told.whole["1.head.weight"] == "its forward was replaced before it was split" and "1.head" not in told.split
    schedule, _ = one(module=module, fp8=True)
    schedule.step(TOKENS, target=TARGET)
    schedule, module = one(fp8=True)
    head = module[1].head
    head.forward = types.MethodType(lambda self, x: F.linear(x, self.weight), head)
    with pytest.raises(UsageError, match=r"stage0.1.head \(1 of 5\) is to multiply in FP8 and did not run so"):
        schedule.step(TOKENS, target=TARGET)


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_stage_that_is_one_linear():
    why = "its class has a forward of its own"
    assert split_linears(Own(2, 2)).whole == {"weight": why, "bias": "no linear's weight"}
    module = nn.Linear(4, 4)
    schedule, _ = one(module=module, fp8=True, loss_fn=F.mse_loss)
    assert list(schedule.fp8.linears) == ["stage0"] and "1 linears are split: " in schedule.report()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    schedule.step(x, target=y)
    assert module.weight.grad.abs().sum() > 0 and "stage0/scale.input" in schedule.fp8.state_dict()


def test_scale_grads_by_position_and_the_contract_off():
    """By position it has torch's place; without the contract the bits are the same, and nothing is refused."""
    told = []
    for scaled in (True, False):
        module = support.model(1)[0]
        stage = pipelining.PipelineStage(module, 0, 1, CPU)
        pipelining.Schedule1F1B(stage, 2, support.loss_fn, None, None, None, scaled).step(TOKENS, target=TARGET)
        told.append(grads(module))
    assert all(torch.equal(2 * grad, told[1][name]) for name, grad in told[0].items())
    for options in ({}, {"fp8": True}):
        both = [one(contract=mode, **options) for mode in ("enforce", "off")]
        for schedule, _ in both:
            schedule.step(TOKENS, target=TARGET)
        first, second = (grads(module) for _, module in both)
        assert all(torch.equal(grad, second[name]) for name, grad in first.items())

    def spoil(*_: Any) -> None:
        with torch.no_grad():
            module[0].block.up.weight.add_(0.5)

    for mode in ("off", "enforce"):
        schedule, module = one(contract=mode, fp8=True)
        module[1].head.register_forward_hook(spoil)
        theirs, _ = one(torchs.Schedule1F1B, TorchStage)
        attach(theirs, contract=mode)
        stage = theirs._stage
        backward = stage.backward_one_chunk
        stage.backward_one_chunk = lambda number, backward=backward, **kw: backward(number, **kw) if number else None
        if mode == "off":
            schedule.step(TOKENS, target=TARGET)
            theirs.step(TOKENS, target=TARGET)
            continue
        with pytest.raises(StaleWeightError, match="stage0.0.block.up.weight was written after"):
            schedule.step(TOKENS, target=TARGET)
        with pytest.raises(LeaseLeakError):
            theirs.step(TOKENS, target=TARGET)


def test_what_a_stage_may_not_be():
    def builder() -> Any:
        return lambda: None

    def wrapped() -> nn.Module:
        return DistributedDataParallel(support.model(1)[0])

    def stage(make: Any, module: nn.Module, **options: Any) -> Any:
        return make(module, 0, 1, CPU, **options)

    with pytest.raises(UsageError, match="dw_builder is for torch's own schedules"):
        stage(pipelining.PipelineStage, nn.Linear(2, 2), dw_builder=builder)
    theirs = stage(TorchStage, nn.Linear(2, 2), dw_builder=builder)
    with pytest.raises(UsageError, match="stage 0 has a dw_builder"):
        pipelining.Schedule1F1B(theirs, 2, F.mse_loss)
    with pytest.raises(UsageError, match="stage 0 has a dw_builder already"):
        attach(torchs.Schedule1F1B(theirs, 2, F.mse_loss))
    with pytest.raises(UsageError, match="stage 0 is in DistributedDataParallel"):
        pipelining.Schedule1F1B(stage(TorchStage, wrapped()), 2, F.mse_loss)
    with pytest.raises(UsageError, match="stage 0 is in DDP or FSDP"):
        attach(torchs.Schedule1F1B(stage(TorchStage, wrapped()), 2, F.mse_loss))
    for fp8 in (True, {"history": 2}):
        with pytest.raises(UsageError, match="no linear of this rank's stages is split"):
            one(module=nn.LayerNorm(4), fp8=fp8)
        with pytest.raises(UsageError, match="no linear of this rank's stages is split"):
            attach(one(torchs.Schedule1F1B, TorchStage, module=nn.LayerNorm(4))[0], fp8=fp8)
    with torch.device("meta"):
        schedule, _ = one(module=nn.Linear(4, 4), fp8=True, loss_fn=F.mse_loss)
    with pytest.raises(UsageError, match="are on the meta device: materialise"):
        schedule.step(torch.zeros(4, 4), target=torch.zeros(4, 4))


def test_plans_that_do_not_fit():
    schedule, module = one()
    plan = schedule.plan
    for other, said in (
        (build_plan("1f1b", 2, 2, chunks=1, holding=torch_csv.HOLDING), "is of 2 stages on 2 ranks, and there are 1 on 1"),
        (build_plan("1f1b", 1, 4, chunks=1, holding=torch_csv.HOLDING), "has 4 microbatches, not 2"),
        (build_plan("1f1b", 1, 2, chunks=1, window="microbatch"), "here the window is a step"),
    ):
        with pytest.raises(UsageError, match=said):
            schedule.set_plan(other)
    assert schedule.plan is plan
    schedule.step(TOKENS, target=TARGET)
    with pytest.raises(UsageError, match="say which schedule"):
        one(pipelining.PipelineSchedule)
    with pytest.raises(UsageError, match="there are none"):
        pipelining.PipelineSchedule([], 2, name="1f1b")
    with pytest.raises(UsageError, match="nothing"):
        one(pipelining.PipelineSchedule, name="nothing")
    late, other = one(pipelining.PipelineSchedule, name="1f1b", w_delay=1)
    assert late.pipeline_order != schedule.pipeline_order
    late.step(TOKENS, target=TARGET)
    assert all(torch.equal(grads(other)[name], grad) for name, grad in grads(module).items())
    with pytest.raises(UsageError, match="no loss_fn"):
        one(loss_fn=None)[0].step(TOKENS, target=TARGET)
    with pytest.raises(UsageError, match="a loss is one number"):
        one(loss_fn=lambda output, target: output)[0].step(TOKENS, target=TARGET)
