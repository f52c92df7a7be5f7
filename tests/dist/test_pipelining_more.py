"""Drop-in schedules on two gloo ranks: stages of FSDP2, scales shared by ranks, plans from CSVs, planned buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B as Torch1F1B
from torch.distributed.tensor import DTensor

from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from qeffect_lm.integrations import pipelining
from qeffect_lm.integrations.pipelining import torch_csv
from tests import pipelining_support as support
from tests.helpers import run_distributed

CPU = torch.device("cpu")
SIZE, MICROBATCHES, STEPS = 8, 2, 2


def _sharded(rank: int, world: int) -> dict[str, Any]:
    """Two replicas of a pipeline of one rank, their stage in FSDP2 over both; or without it, gradients averaged by hand."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}

    def train(
        fsdp: dict[str, Any] | None,
        *,
        dtype: Any = torch.float64,
        parts: int = 0,
        late: int = 0,
        rows: str = "",
        fp8: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        (module,) = support.model(1, dtype)
        stage = pipelining.PipelineStage(module, 0, 1, CPU, group=alone)
        if fsdp is not None:
            for part in list(module)[:parts]:
                fully_shard(part, mesh=mesh, **fsdp)
            fully_shard(module, mesh=mesh, **fsdp)
        plan: dict[str, Any] = {"name": "1f1b", "w_delay": late, "fp8": fp8 or False}
        if rows:
            plan["plan"] = torch_csv.read(rows, 1, 1, MICROBATCHES, "rows")
        schedule = pipelining.PipelineSchedule(stage, MICROBATCHES, support.loss_fn, **plan)
        losses: list[Any] = []
        for step in range(STEPS):
            module.zero_grad()
            tokens, target = (t.chunk(world)[rank] for t in support.batch(SIZE, 1 + step))
            if fp8 and rank:  # so that maxima differ between ranks
                tokens, target = tokens[:1].expand_as(tokens), target[:1].expand_as(target)
            told: list[Any] = []
            schedule.step(tokens, target=target, losses=told)
            losses += [loss.item() for loss in told]
            for parameter in module.parameters():
                if fsdp is None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                assert isinstance(parameter.grad, DTensor) == (fsdp is not None)
            grads = {n: full(p.grad).clone() for n, p in module.named_parameters()}
            support.descend([module])
        state = None if schedule.fp8 is None else {n: support.raw(t) for n, t in schedule.fp8.state_dict().items()}
        return {"losses": losses, "grads": grads, "state": state}

    keep = {"reshard_after_forward": False}
    told["by hand"] = train(None)
    told["whole"] = train(keep)
    told["parts"] = train(keep, parts=2, late=1)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    told["mixed"] = train({**keep, "mp_policy": narrow}, dtype=torch.float32, parts=2)
    both = dist.group.WORLD
    for name, fsdp, group in (("alone", None, None), ("shared", None, both), ("fsdp", keep, both)):
        told[f"fp8 {name}"] = train(fsdp, dtype=torch.float32, parts=1, fp8={"amax_group": group, "history": 3})
    with pytest.raises(UsageError) as caught:
        train({"reshard_after_forward": True}, parts=1, rows="0F0,0I0,0F1,0W0,0I1,0W1")
    told["not gathered"] = str(caught.value)
    (module,) = support.model(1)
    fully_shard(module[0], mesh=mesh)
    stage = pipelining.PipelineStage(module, 0, 1, CPU, group=alone)
    for kind in (pipelining.Schedule1F1B, lambda *given: pipelining.attach(Torch1F1B(*given))):
        with pytest.raises(UsageError) as caught:
            kind(stage, MICROBATCHES, support.loss_fn)
        told.setdefault("a part", []).append(str(caught.value))
    return told


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_stages_in_fsdp_and_scales_that_ranks_share() -> None:
    """FSDP2's gradients are the mean over replicas, of one module or parts, W at once or late, reduced in float32 beneath
    bfloat16; sharded FP8 has the scales, histories and casts of both ranks, which differ where maxima are not shared."""
    one, two = run_distributed(_sharded, 2, timeout=170)
    losses, grads = support.by_hand(support.model(1, torch.float64), SIZE, 2 * MICROBATCHES, STEPS)
    both = [loss for step in range(STEPS) for rank in (one, two) for loss in rank["by hand"]["losses"][2 * step : 2 * step + 2]]
    assert both == pytest.approx(losses, rel=1e-12)
    for name in ("by hand", "whole", "parts"):
        for rank in (one, two):
            assert rank[name]["losses"] == pytest.approx(rank["by hand"]["losses"], rel=1e-12)
            for key, grad in grads.items():
                torch.testing.assert_close(rank[name]["grads"][key.removeprefix("0.")], grad, rtol=1e-9, atol=1e-12)
    for key, grad in grads.items():
        mixed = one["mixed"]["grads"][key.removeprefix("0.")]
        assert mixed.dtype is torch.float32 and 0 < (mixed - grad).norm() < 0.05 * grad.norm(), key
    assert one["fp8 shared"]["losses"] != two["fp8 shared"]["losses"]
    scales = [name for name in one["fp8 alone"]["state"] if "scale." in name]
    assert len(scales) == 15 and any(one["fp8 alone"]["state"][name] != two["fp8 alone"]["state"][name] for name in scales)
    for name in ("fp8 shared", "fp8 fsdp"):
        assert one[name]["state"] == two[name]["state"] == one["fp8 shared"]["state"]
        for key, grad in one["fp8 shared"]["grads"].items():
            assert torch.equal(one[name]["grads"][key], grad), (name, key)
    assert "was sharded again between its forward and W: keep weights gathered in a pipeline (resh" in one["not gathered"]
    assert "stage 0 has FSDP modules and is none itself" in one["a part"][0] and "is in DDP or FSDP" in one["a part"][1]


def held(plan: Any, rank: int, stage: int) -> int:
    """How many microbatches the stage has at once, at most, by the rank's row: from the receive of its input to its W."""
    now: set[int] = set()
    most = 0
    for action in plan.actions[rank]:
        if action.chunk == stage and action.kind in ("RECV_F", "F"):
            now.add(action.microbatch)
        elif action.chunk == stage and action.kind == "W":
            now.remove(action.microbatch)
        most = max(most, len(now))
    return most


def _planned(rank: int, world: int, folder: str) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage as TorchStage
    from torch.distributed.pipelining import ScheduleInterleaved1F1B as TorchInterleaved

    told: dict[str, Any] = {}
    tokens, target = support.batch(16)

    def made(kind: Any, stages: int, stage: Any = pipelining.PipelineStage, **options: Any) -> Any:
        mine = support.stages_of(support.model(stages), world, rank, "loop", stage)
        return kind(mine if stages > world else mine[0], 8, loss_fn=support.loss_fn, **options), mine

    def run(name: str, schedule: Any, stages: Any) -> Any:
        losses: list[Any] = []
        runner, early = schedule.runner, [0]
        do = runner._do

        def watched(*given: Any) -> None:
            do(*given)
            early.append(sum(len(border._arriving) for border in runner._training.values()))

        runner._do = watched
        schedule.step(*((tokens,) if rank == 0 else ()), target=target if rank == world - 1 else None, losses=losses)
        grads = {f"{s.stage_index}.{n}": p.grad.clone() for s in stages for n, p in s.submod.named_parameters()}
        buffers = {key: border.buffers for key, border in schedule.runner._training.items() if border.buffers}
        most = {key: held(schedule.plan, rank, key[0] + (1 if key[1] == "F" else -1)) for key in buffers}
        told[name] = {"losses": [x.item() for x in losses], "grads": grads, "early": max(early)}
        told[name] |= {"buffers": buffers, "held": most}
        return schedule

    ours = run("1f1b", *made(pipelining.Schedule1F1B, 2))
    run("deferred", *made(pipelining.PipelineSchedule, 2, name="1f1b", defer_pp_recv=True))
    run("interleaved", *made(pipelining.ScheduleInterleaved1F1B, 4))

    # plans from files: ours, torch's own, and one that is none
    zb = made(pipelining.ScheduleZBH1, 2)[0]
    file = Path(folder) / f"zb{rank}.csv"
    zb._dump_csv(str(file))
    assert "RECV" in file.read_text()
    loaded, mine = made(pipelining.Schedule1F1B, 2)
    loaded._load_csv(str(file), format="compute_comms")
    assert loaded.pipeline_order == zb.pipeline_order != ours.pipeline_order
    run("zb-h1 from a file", loaded, mine)
    file.write_text("0F0,0F0\n1F0,1B0\n")
    with pytest.raises(PlanError):
        loaded._load_csv(str(file))
    assert loaded.pipeline_order == zb.pipeline_order

    # in place of torch's
    for name, kind, stages, options in (
        ("1f1b in place", Torch1F1B, 2, {"scale_grads": False}),
        ("interleaved in place", TorchInterleaved, 4, {"defer_pp_recv": True}),
    ):
        theirs, mine = made(kind, stages, TorchStage, **options)
        place = getattr(pipelining, kind.__name__).in_place_of(theirs, contract="off")
        if stages > world:
            theirs._dump_csv(str(file), format="compute_only")
            place._load_csv(str(file))
        assert place._stages == mine and not place.runner.ledger.checks
        run(name, place, mine)
    theirs, _ = made(Torch1F1B, 2, TorchStage)
    pipelining.attach(theirs)
    with pytest.raises(UsageError, match="has a dw_builder"):
        pipelining.Schedule1F1B.in_place_of(theirs)
    return told


def test_plans_from_files_buffers_and_places(tmp_path: Path) -> None:
    one, two = run_distributed(_planned, 2, str(tmp_path), timeout=170)
    told = {name: one[name]["grads"] | two[name]["grads"] for name in one}
    losses, grads = support.by_hand(support.model(2), 16, 8)
    for name, wanted, scale in (
        ("deferred", "1f1b", 1),
        ("zb-h1 from a file", "1f1b", 1),
        ("1f1b in place", "1f1b", 8),
        ("interleaved in place", "interleaved", 1),
    ):
        assert two[name]["losses"] == two[wanted]["losses"]
        for key, grad in told[wanted].items():
            assert torch.equal(told[name][key], scale * grad), (name, key)
    assert two["1f1b"]["losses"] == pytest.approx(losses, rel=1e-6)
    for key, grad in grads.items():
        torch.testing.assert_close(told["1f1b"][key], grad, rtol=1e-4, atol=1e-7)
    for rank in (one, two):
        for name, run in rank.items():
            deferred = name in ("deferred", "interleaved in place")
            assert (run["early"] == 0) == deferred, name  # receives started before the action that needs them
            assert all(buffers <= run["held"][border] < 8 for border, buffers in run["buffers"].items()), name
    assert one["1f1b"]["buffers"] == {(1, "B"): 2} and two["1f1b"]["buffers"] == {(0, "F"): 1}  # of eight microbatches
    assert one["interleaved"]["buffers"] == {(1, "F"): 2, (3, "B"): 2, (1, "B"): 4}
    assert two["interleaved"]["buffers"] == {(0, "F"): 4, (2, "F"): 2, (2, "B"): 4}
