"""The drop-ins for torch.distributed.pipelining on two gloo ranks, beside one process and beside torch's own schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.contract.errors import LeaseLeakError, StaleWeightError, WeightGradBeforeInputGradError
from qeffect_lm.errors import QEffectError, UsageError
from tests import pipelining_support as support
from tests.helpers import run_distributed

ALL = [
    ("ScheduleGPipe", 2),
    ("Schedule1F1B", 2),
    ("ScheduleZBH1", 2),
    ("ScheduleZBH2", 2),
    ("ScheduleInterleaved1F1B", 4),
    ("ScheduleZBVZeroBubble", 4),
    ("ScheduleDualPipeV", 4),
]


def _runs(rank: int, world: int, variants: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """One variant after the other in the same processes."""
    return [support.pipeline(rank, world, name, **options) for name, options in variants]


def together(ranks: list[list[Any]], number: int) -> dict[str, Any]:
    """What the ranks of a variant tell, in one piece."""
    one, two = (rank[number] for rank in ranks)
    joined = {key: {**one[key], **two[key]} for key in ("grads", "runs", "parameters")}
    state = None if one["state"] is None else {**one["state"], **two["state"]}
    outputs = one["outputs"] if one["outputs"][0] is not None else two["outputs"]
    return {**joined, "losses": one["losses"] + two["losses"], "state": state, "outputs": outputs}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_every_schedule_equals_one_process_and_each_other() -> None:
    """float64: losses, gradients and outputs of one process, to rounding. float32: schedules of the same stages, W at once or
    late, have the same bits; FP8 too, with scales, histories and cached weights; so have recomputed activations, made once."""
    wide = [(name, {"stages": stages, "dtype": torch.float64}) for name, stages in ALL]
    narrow = [(name, {"stages": stages}) for name, stages in ALL]
    in_fp8 = [one for one in ALL if one[0] not in ("ScheduleZBH2", "ScheduleGPipe")]
    fp8 = [(name, {"stages": stages, "fp8": {"history": 3}}) for name, stages in in_fp8]
    again = [("ScheduleZBVZeroBubble", {"stages": 4, "again": way, **more}) for way in ("reentrant", "other")
             for more in ({}, {"fp8": {"history": 3}})]  # fmt: skip
    plain = [("Schedule1F1B", {"stages": 2, "torch_stages": True})]
    ranks = run_distributed(_runs, 2, [*wide, *narrow, *fp8, *again, *plain], timeout=240)
    told = [together(ranks, number) for number in range(len(ranks[0]))]

    for (_, stages), one in zip(ALL, told, strict=False):
        losses, grads = support.by_hand(support.model(stages, torch.float64), 8, 4, 2)
        assert one["losses"] == pytest.approx(losses, rel=1e-12)
        assert one["grads"].keys() == grads.keys() and one["outputs"][1].shape == (8, support.LENGTH, support.VOCAB)
        for name, grad in grads.items():
            torch.testing.assert_close(one["grads"][name], grad, rtol=1e-10, atol=1e-13)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for (name, options), one in zip([*wide, *narrow, *fp8, *again, *plain], told, strict=True):
        groups.setdefault((options["stages"], str(options.get("dtype")), "fp8" in options), []).append(one)
        assert len(one["losses"]) == 8 and one["losses"][4:] != one["losses"][:4], name
    assert sorted(len(group) for group in groups.values()) == [2, 3, 4, 5, 5, 5]
    for group in groups.values():
        for other in group[1:]:
            assert other["losses"] == group[0]["losses"] and same(other["grads"], group[0]["grads"]) == []
            assert same(other["parameters"], group[0]["parameters"]) == []
            assert other["state"] == group[0]["state"]
    for one in told[-5:-1]:  # two steps of four microbatches: F and, once, again in I
        assert set(one["runs"].values()) == {16}, one["runs"]
    assert set(told[-1]["runs"].values()) == {8}
    report = ranks[0][len(ALL)]["report"]
    assert "2 linears are split: block.up, block.down" in report and "embedding.weight" in report


def _features(rank: int, world: int) -> dict[str, Any]:
    """What a user does with a schedule beyond a step."""
    from torch.distributed.pipelining import PipelineStage as TorchStage
    from torch.distributed.pipelining import Schedule1F1B as Torch1F1B
    from torch.distributed.pipelining import ScheduleZBVZeroBubble as TorchZBV

    from qeffect_lm.integrations import pipelining
    from qeffect_lm.integrations.pipelining import attach

    told: dict[str, Any] = {}
    tokens, target = support.batch(8)

    def make(kind: Any, stages: int, shape: str, stage: Any, microbatches: int = 4, **options: Any) -> Any:
        held = support.stages_of(support.model(stages), world, rank, shape, stage)
        given = held if shape == "v" or stages > world else held[0]
        return kind(given, microbatches, loss_fn=support.loss_fn, **options), held

    def grads(held: Any) -> dict[str, torch.Tensor]:
        return {f"{s.stage_index}.{n}": p.grad.clone() for s in held for n, p in s.submod.named_parameters()}

    # ours and torch's, a whole batch and microbatches
    ours, held = make(pipelining.ScheduleZBVZeroBubble, 4, "v", pipelining.PipelineStage)
    losses: list[Any] = []
    ours.step(*((tokens,) if rank == 0 else ()), target=target if rank == 0 else None, losses=losses)
    told["whole"] = [x.item() for x in losses], grads(held)
    for module in held:
        module.submod.zero_grad()
    arg_mbs = [(t,) for t in tokens.chunk(4)] if rank == 0 else None
    target_mbs = list(target.chunk(4)) if rank == 0 else None
    ours.step(arg_mbs=arg_mbs, kwarg_mbs=[{}] * 4, target_mbs=target_mbs, losses=losses, return_outputs=False)
    told["microbatches"] = [x.item() for x in losses], grads(held)
    ours.step(arg_mbs=arg_mbs, target_mbs=target_mbs)
    told["twice"] = grads(held)  # G3: the sum of two calls

    # forward only, on a V, where torch's refuses
    evaluated: list[Any] = []
    out = ours.eval(*((tokens,) if rank == 0 else ()), target=target if rank == 0 else None, losses=evaluated)
    told["eval"] = [x.item() for x in evaluated], out, [x.item() for x in losses]
    told["eval alone"] = ours.eval(*((tokens,) if rank == 0 else ()))

    # torch's schedules under the contract
    attached = [("1f1b", Torch1F1B, 2, "loop"), ("zbv", TorchZBV, 4, "v")]
    if torch.__version__ < (2, 13):  # the shapes of a V go to the rank itself there, which gloo does not do
        attached.pop()
    for name, kind, stages, shape in attached:
        theirs, held = make(kind, stages, shape, TorchStage)
        contract = attach(theirs)
        losses = []
        theirs.step(*((tokens,) if rank == 0 else ()), target=target if held[-1].is_last else None, losses=losses)
        told[name] = [x.item() for x in losses], grads(held)
        assert contract.ledger.timeline.commits == 1 and all(c.split for c in contract.conversions.values())
    for name, kind in (("1f1b alone", Torch1F1B), ("1f1b ours", pipelining.Schedule1F1B)):
        theirs, held = make(kind, 2, "loop", TorchStage)
        losses = []
        theirs.step(*((tokens,) if rank == 0 else ()), target=target if rank == 1 else None, losses=losses)
        told[name] = [x.item() for x in losses], grads(held)
    return told


def test_batches_microbatches_eval_and_torchs_own_schedules() -> None:
    first, second = run_distributed(_features, 2, timeout=240)
    for key in first.keys() & {"whole", "microbatches", "1f1b", "zbv", "1f1b alone", "1f1b ours"}:
        first[key] = first[key][0] + second[key][0], first[key][1] | second[key][1]
    assert first["whole"][0] == first["microbatches"][0] and same(first["whole"][1], first["microbatches"][1]) == []
    for name, grad in (first["twice"] | second["twice"]).items():
        assert torch.equal(grad, 2 * first["whole"][1][name]) or torch.allclose(grad, 2 * first["whole"][1][name], rtol=1e-6)
    assert first["eval"][0] == first["eval"][2] and torch.equal(first["eval"][1], first["eval alone"])  # V: rank 0 is last, too
    assert first["eval"][1].shape == (8, support.LENGTH, support.VOCAB) and second["eval"][1] is None
    pairs = [("zbv", "whole"), ("1f1b", "1f1b ours")]  # sums divided by n = 4 have the bits of weights of 1/4
    for attached, ours in pairs[torch.__version__ < (2, 13) :]:
        assert first[attached][0] == first[ours][0] and same(first[attached][1], first[ours][1]) == []
    assert first["1f1b alone"][0] == pytest.approx(first["1f1b"][0], rel=1e-6)
    for name, grad in first["1f1b alone"][1].items():
        torch.testing.assert_close(first["1f1b"][1][name], grad, rtol=1e-5, atol=1e-7)


def _faults(rank: int, world: int) -> dict[str, str]:
    """What is refused, in one process each of two; the other rank waits for nothing."""
    from torch.distributed.pipelining import PipelineStage as TorchStage
    from torch.distributed.pipelining import Schedule1F1B as Torch1F1B

    from qeffect_lm.integrations import pipelining
    from qeffect_lm.integrations.pipelining import attach

    alone = [dist.new_group([r], use_local_synchronization=False) for r in range(world)][rank]
    tokens, target = support.batch(4)

    def schedule(kind: Any = pipelining.Schedule1F1B, make: Any = pipelining.PipelineStage, **options: Any) -> Any:
        stage = make(support.model(1)[0], 0, 1, torch.device("cpu"), group=alone)
        return kind(stage, 2, loss_fn=support.loss_fn, **options), stage

    told = {}

    def refused(name: str, error: type[Exception], work: Any) -> None:
        with pytest.raises(error) as caught:
            work()
        told[name] = str(caught.value)

    fp8, stage = schedule(fp8=True)
    weight = stage.submod[0].block.up.weight

    def spoil(*_: Any) -> None:
        with torch.no_grad():
            weight.add_(0.5)

    handle = stage.submod[1].head.register_forward_hook(spoil)
    refused("written in a step", StaleWeightError, lambda: fp8.step(tokens, target=target))
    handle.remove()
    fp8.step(tokens, target=target)  # one rank, nothing in flight: the next step is clean
    ours, stage = schedule()
    ours.step(tokens, target=target)
    refused("no targets", UsageError, lambda: ours.step(tokens))
    refused("both", UsageError, lambda: ours.step(tokens, arg_mbs=[(tokens,)] * 2))
    refused("number", UsageError, lambda: ours.step(arg_mbs=[(tokens,)] * 3))
    refused("too few rows", UsageError, lambda: ours.step(tokens[:1], target=target[:1]))
    with torch.no_grad():
        refused("no gradients", UsageError, lambda: ours.step(tokens, target=target))
    refused("attached", UsageError, lambda: attach(ours))
    before = copy.deepcopy({n: p.grad for n, p in stage.submod.named_parameters()})
    assert all(grad is not None for grad in before.values())

    theirs, stage = schedule(Torch1F1B, TorchStage)
    attach(theirs)
    refused("twice attached", UsageError, lambda: attach(theirs))
    theirs.step(tokens, target=target)
    backward = stage.backward_one_chunk
    stage.backward_one_chunk = lambda number, **kw: backward(number, **kw) if number else None
    refused("without a backward", LeaseLeakError, lambda: theirs.step(tokens, target=target))
    stage.backward_one_chunk = lambda number, **kw: stage.backward_weight_one_chunk(number)
    refused("W first", WeightGradBeforeInputGradError, lambda: theirs.step(tokens, target=target))
    stage.backward_one_chunk = lambda number, **kw: [backward(number, **kw), backward(number, **kw)]
    refused("twice", QEffectError, lambda: theirs.step(tokens, target=target))
    stage.backward_one_chunk = backward
    theirs.step(tokens, target=target)
    return told


def test_what_is_refused() -> None:
    told = run_distributed(_faults, 2, timeout=240)[0]
    said = {
        "written in a step": "was written after it was cast to FP8 for this step",
        "no targets": "the last stage's rank needs targets",
        "both": "not both",
        "number": "Expecting 2 arg_mbs but got 3",
        "too few rows": "a batch of 1 has no 2 microbatches",
        "no gradients": "call eval",
        "attached": "runs under the contract by itself",
        "twice attached": "attach once",
        "without a backward": "I never ran|missing|I",
        "W first": "W before I",
        "twice": "",
    }
    assert told.keys() == said.keys()
    for name, text in said.items():
        assert any(part in told[name] for part in text.split("|")), (name, told[name])
