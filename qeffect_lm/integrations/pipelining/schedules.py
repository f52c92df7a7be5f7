"""Drop-ins for torch.distributed.pipelining: the same constructors, ``step`` and ``eval``, run by plans under the contract.

    from qeffect_lm.integrations.pipelining import PipelineStage, ScheduleZBVZeroBubble

    stages = [PipelineStage(module, index, num_stages, device, group=group) for …]   # or torch's own stages
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(tokens, target=labels, losses=losses)

What differs from torch, on purpose:

- linears are split by layer: I makes no weight gradient, W repeats nothing of backward, and what a checkpointed module computes
  again it computes once;
- the step is checked: leases, scale epochs, weight versions (:mod:`qeffect_lm.contract`); so is a CSV, by every rule that our
  own plans keep (a backward twice, a microbatch without one, stages that wait for each other);
- as many receive buffers as the plan holds at once, not one for each microbatch;
- ``scale_grads`` weighs each microbatch's loss by 1/n instead of dividing the sums at the end, so that gradients of two calls
  of ``step`` add up to the right sum;
- ``eval`` works on V shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from pipeline.plan import Plan, build_plan
from pipeline.schedules import find_schedule
from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.pipelining import sharded, torch_csv
from qeffect_lm.integrations.pipelining.convert import Conversion, SplitLinear, split_linears
from qeffect_lm.integrations.pipelining.fp8 import state_of
from qeffect_lm.integrations.pipelining.links import GroupLine
from qeffect_lm.integrations.pipelining.runner import Batch, Results, Runner


class PipelineStage(TorchStage):
    """torch's stage, with the same arguments; its module's linears are split at once (``conversion`` says which).

    Raises:
        UsageError: a ``dw_builder``: the stage's W is made by its linears.
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        if self.dw_builder is not None:
            raise UsageError("dw_builder is for torch's own schedules (see attach): here the linears themselves make W")
        self.conversion: Conversion = split_linears(submodule)


class PipelineSchedule(_PipelineSchedule):
    """A plan of ours over torch's stages. Use a subclass, or ``name`` for any schedule of ours, or ``plan``.

    Arguments by position are those of torch's schedules of several stages; ours are given by name.

    Args:
        stages: this rank's stages, one or a list; ours or torch's own.
        n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: as of torch's schedules.
        backward_requires_autograd: taken and not needed.
        defer_pp_recv: a receive is started when what it brings is needed, not as early as the plan can.
        name: 1f1b, gpipe, interleaved-1f1b, zb-h1, zb-h2, zb-v or dualpipev.
        w_delay: microbatches by which W trails I, of schedules that do not say themselves.
        plan: instead of a name.
        fp8: True, or options of :class:`~qeffect_lm.integrations.pipelining.fp8.FP8State`: linears multiply in FP8.
        contract: ``enforce`` or ``off``.
        timeout: seconds to wait for a peer.

    Raises:
        UsageError: stages that the schedule does not put on this rank; a module in ``DistributedDataParallel``, which reduces
            gradients when autograd makes them: W is not autograd's. (FSDP2 can be told to wait, and is.)
    """

    schedule_name: ClassVar[str | None] = None

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        name: str | None = None,
        w_delay: int | None = 0,
        plan: Plan | None = None,
        fp8: bool | dict[str, Any] = False,
        contract: Literal["enforce", "off"] = "enforce",
        timeout: float = 600.0,
    ) -> None:
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        self._stages: list[TorchStage] = list(stages) if isinstance(stages, Sequence) else [stages]
        if not self._stages:
            raise UsageError("a schedule needs this rank's stages, and there are none")
        self._num_stages = self._stages[0].num_stages
        self._line = GroupLine(self._stages[0].group)
        self._mode, self._timeout, self._defer_pp_recv = contract, timeout, defer_pp_recv
        self.conversions = {stage.stage_index: self._converted(stage) for stage in self._stages}
        self.fp8 = state_of(self._stages, fp8)
        self.runner: Runner | None = None
        self.set_plan(plan if plan is not None else self._plan(name or self.schedule_name, n_microbatches, w_delay))

    @classmethod
    def in_place_of(cls, theirs: Any, **options: Any) -> PipelineSchedule:
        """A schedule of ours over the stages of one of torch's, with its loss and settings; that one is not run.

        Args:
            theirs: made, not yet run.
            options: of ours alone (``fp8``, ``contract``, ``plan``, …).
        """
        if getattr(theirs, "_defer_pp_recv", False):
            options["defer_pp_recv"] = True
        return cls(
            list(getattr(theirs, "_stages", None) or [theirs._stage]),
            theirs._n_microbatches,
            theirs._loss_fn,
            theirs._args_chunk_spec,
            theirs._kwargs_chunk_spec,
            theirs._output_merge_spec,
            theirs.scale_grads,
            **options,
        )

    # ---- the plan ----------------------------------------------------------------------------------------------

    def _plan(self, name: str | None, microbatches: int, w_delay: int | None) -> Plan:
        if name is None:
            raise UsageError("say which schedule: a subclass, name= or plan=")
        ranks = len(self._line.ranks)
        if self._num_stages % ranks:
            raise UsageError(f"{self._num_stages} stages do not divide among {ranks} pipeline ranks")
        lag = None if find_schedule(name).own_lag else w_delay
        return build_plan(name, ranks, microbatches, lag, chunks=self._num_stages // ranks, holding=torch_csv.HOLDING)

    def set_plan(self, plan: Plan) -> None:
        """Run ``plan`` from now on.

        Raises:
            UsageError: it is of other ranks, stages or microbatches.
        """
        mine, rank = sorted(stage.stage_index for stage in self._stages), self._line.coord("pp")
        if plan.num_ranks != len(self._line.ranks) or plan.placement.num_chunks != self._num_stages:
            raise UsageError(
                f"the plan {plan.schedule} is of {plan.placement.num_chunks} stages on {plan.num_ranks} ranks, and there are "
                f"{self._num_stages} on {len(self._line.ranks)}"
            )
        if plan.microbatches != self._n_microbatches:
            raise UsageError(f"the plan {plan.schedule} has {plan.microbatches} microbatches, not {self._n_microbatches}")
        if plan.window != "step":
            raise UsageError("plans of window microbatch roll scales between microbatches: here the window is a step")
        if list(plan.placement.chunks(rank)) != mine:
            raise UsageError(
                f"pipeline rank {rank} has stages {mine}, and {plan.schedule} puts {list(plan.placement.chunks(rank))} there"
            )
        if self.runner is not None:
            self.runner.close()
        self.plan = plan
        self.runner = Runner(
            plan,
            self._line,
            {stage.stage_index: stage for stage in self._stages},
            torch.device(self._stages[0].device),
            loss_fn=self._loss_fn,
            seed=1 / self._n_microbatches if self.scale_grads else 1.0,
            fp8=self.fp8,
            mode=self._mode,
            timeout=self._timeout,
            defer=self._defer_pp_recv,
        )

    @property
    def pipeline_order(self) -> dict[int, list[str]]:
        """Compute actions by rank, as torch writes them."""
        return {rank: [str(action) for action in row if action.is_compute] for rank, row in enumerate(self.plan.actions)}

    def _dump_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms") -> None:
        Path(filename).write_text(torch_csv.write(self.plan, communication=format == "compute_comms"))

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Run the compute actions of a CSV of torch's or ours; messages are made anew, as the plan's proof needs them.

        Raises:
            PlanError, UsageError: see :func:`qeffect_lm.integrations.pipelining.torch_csv.read`.
        """
        text = Path(filename).read_text()
        ranks = len(self._line.ranks)
        self.set_plan(torch_csv.read(text, ranks, self._num_stages, self._n_microbatches, Path(filename).name))

    # ---- stages ------------------------------------------------------------------------------------------------

    @staticmethod
    def _converted(stage: TorchStage) -> Conversion:
        if stage.dw_builder is not None:
            raise UsageError(f"stage {stage.stage_index} has a dw_builder: that is for torch's own schedules (see attach)")
        module = stage.submod
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                f"stage {stage.stage_index} is in DistributedDataParallel, which reduces a gradient when autograd makes it: W "
                "is not autograd's. Give the module itself, and average the gradients over replicas after step()"
            )
        sharded.check(module, stage.stage_index)
        return split_linears(module)

    def report(self) -> str:
        """What is split and what is not, stage by stage; after a step also what turned out to run whole."""
        lines = [f"stage {index}: {conversion}" for index, conversion in self.conversions.items()]
        for stage in self._stages:
            for path, module in stage.submod.named_modules():
                if isinstance(module, SplitLinear) and module.split_seen_whole:
                    lines.append(f"stage {stage.stage_index}: {path} ran whole: {module.split_seen_whole}")
        return "\n".join(lines)

    # ---- what users call ---------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        *args: Any,
        target: Any = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step over a whole batch (``args``, ``kwargs``, ``target``), split along dimension 0, or over given microbatches.

        Args:
            args: of the first stage; ``arg_mbs`` a list of tuples instead.
            kwargs: of every stage; ``kwarg_mbs`` a list of dicts instead.
            target: of ``loss_fn``; ``target_mbs`` a list instead.
            losses: is given the microbatches' losses, on the last stage's rank.

        Returns: the last stage's outputs, merged, on its rank; else None.

        Raises:
            UsageError: both a batch and microbatches, or another number of them; no gradients (``torch.no_grad()``).
            ContractViolation, PeerLostError: see :meth:`qeffect_lm.integrations.pipelining.runner.Runner.step`.
        """
        batch = self._batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        return self._run(batch, losses, return_outputs)

    def eval(  # type: ignore[override]
        self,
        *args: Any,
        target: Any = None,
        losses: list | None = None,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Forward only, arguments as of :meth:`step`; targets may be left out, there are no losses then."""
        batch = self._batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        assert self.runner is not None
        return self._give(self.runner.evaluate(batch, return_outputs), losses, return_outputs)

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        return self._run(Batch(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {}), losses, return_outputs)

    def _run(self, batch: Batch, losses: list | None, return_outputs: bool) -> Any:
        if self._loss_fn is None:
            raise UsageError("step() trains, and this schedule has no loss_fn: give it one, or call eval()")
        if not torch.is_grad_enabled():
            raise UsageError("step() needs gradients, and torch.no_grad() is on: call eval()")
        assert self.runner is not None
        return self._give(self.runner.step(batch, return_outputs), losses, return_outputs)

    def _give(self, results: Results, losses: list | None, return_outputs: bool) -> Any:
        if losses is not None and results.losses:
            losses.clear()
            losses.extend(results.losses[m] for m in sorted(results.losses))
        if return_outputs and results.outputs:
            return self._merge_outputs([results.outputs[m] for m in sorted(results.outputs)])
        return None

    def _batch(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        arg_mbs: list | None,
        kwarg_mbs: list | None,
        target_mbs: list | None,
        loss_kwargs: dict[str, Any] | None,
    ) -> Batch:
        if arg_mbs is not None or kwarg_mbs is not None or target_mbs is not None:
            if args or kwargs or target is not None:
                raise UsageError("give a whole batch or microbatches (arg_mbs, kwarg_mbs, target_mbs), not both")
            try:
                arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs)
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from error
            return Batch(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {})
        for value in (*args, *kwargs.values(), target):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] < self._n_microbatches:
                raise UsageError(f"a batch of {value.shape[0]} has no {self._n_microbatches} microbatches")
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        targets = None if target is None else list(torch.tensor_split(target, self._n_microbatches))
        return Batch(arg_mbs, kwarg_mbs, targets, loss_kwargs or {})


class PipelineScheduleSingle(PipelineSchedule):
    """One stage on each rank. By position it takes what torch's schedules of one stage take, ``stage`` first."""

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **ours: Any,
    ) -> None:
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__(stage, n_microbatches, loss_fn, *specs, scale_grads, **ours)


class ScheduleGPipe(PipelineScheduleSingle):
    schedule_name = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    schedule_name = "1f1b"


class ScheduleZBH1(PipelineScheduleSingle):
    """Zero Bubble H1 (Qi et al. 2023); torch has it as InterleavedZeroBubble with one stage per rank."""

    schedule_name = "zb-h1"


class ScheduleZBH2(PipelineScheduleSingle):
    schedule_name = "zb-h2"


class ScheduleInterleaved1F1B(PipelineSchedule):
    schedule_name = "interleaved-1f1b"


class ScheduleZBVZeroBubble(PipelineSchedule):
    schedule_name = "zb-v"


class ScheduleDualPipeV(PipelineSchedule):
    schedule_name = "dualpipev"


BY_TORCH_NAME: dict[str, type[PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
    "ZBH1": ScheduleZBH1,
    "ZBH2": ScheduleZBH2,
}
"""torch's names of schedules (case does not matter to it), and two that it has not."""
