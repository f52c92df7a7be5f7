"""The contract around torch's own schedules: what they do and in which order stays torch's, leases and the split are ours.

    schedule = torch.distributed.pipelining.ScheduleZBVZeroBubble(stages, n_microbatches, loss_fn=loss_fn)
    contract = attach(schedule)
    schedule.step(...)

Each stage's ``dw_builder``, torch's own hook for a backward whose weight gradients come later, is given what its converted
linears leave for W, so that backward runs once, whole, and W multiplies. Around each F, I and W of a stage the ledger opens
an action: a backward twice, a W before its I or a microbatch without a backward is an error with a name, where torch's
check passes it.

F, I and W are found at the stages' ``forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk``, which
every schedule of torch calls, of one stage or of several. (``register_custom_function`` is of those of several only, and
replaces an action with its waits and hand-overs.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from qeffect_lm.contract.grads import GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Mode
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.pipelining.convert import Conversion, Tape, running, split_linears, weight_grads
from qeffect_lm.integrations.pipelining.fp8 import state_of
from qeffect_lm.integrations.pipelining.sharded import is_sharded

TAPE = "tape"


class Attached:
    """The contract of one schedule: ``ledger``, ``fp8`` and, by stage number, ``conversions``."""

    def __init__(self, schedule: Any, *, fp8: bool | dict[str, Any] = False, mode: str = "enforce") -> None:
        self._stages = stages = list(getattr(schedule, "_stages", None) or [schedule._stage])
        self.conversions: dict[int, Conversion] = {}
        for stage in stages:
            _check(stage)
            self.conversions[stage.stage_index] = split_linears(stage.submod)
        self.fp8 = state_of(stages, fp8)
        timeline = ScaleTimeline([]) if self.fp8 is None else self.fp8.timeline
        versions = WeightVersions([]) if self.fp8 is None else self.fp8.versions
        self.ledger = Ledger(timeline, versions, GradSlots([]), mode=Mode(mode))
        self._step, self._trains = 0, False
        self._free: dict[int, list[int]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._made: Tape | None = None  # of the backward that has just run
        for stage in stages:
            self._hook(stage)
        self._wrap_step(schedule)

    # ---- one step ----------------------------------------------------------------------------------------------

    def _wrap_step(self, schedule: Any) -> None:
        inner = schedule._step_microbatches

        def step(*args: Any, **kwargs: Any) -> Any:
            self._trains = bool(schedule._has_backward)
            if self.fp8 is not None:
                (self.fp8.begin if self._trains else self.fp8.refresh)(self.ledger)
            if not self._trains:
                return inner(*args, **kwargs)
            try:
                self.ledger.begin_step(self._step)
                made = inner(*args, **kwargs)
                if self.fp8 is not None:
                    self.fp8.commit(self.ledger)
                else:
                    self.ledger.commit(self.ledger.timeline.epochs[Direction.FORWARD])
                self.ledger.end_step()
            except BaseException:
                self._slots.clear()
                self._free.clear()
                self.ledger.abandon_step()
                if self.fp8 is not None:
                    self.fp8.abandon()
                schedule._internal_losses.clear()  # else torch's next step begins with this one's
                for stage in self._stages:
                    for left in (stage.dw_runner, stage.bwd_cache, stage.backward_state):
                        left.clear()
                raise
            self._step += 1
            return made

        schedule._step_microbatches = step

    # ---- one stage ---------------------------------------------------------------------------------------------

    def _hook(self, stage: PipelineStage) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        stage.dw_builder = self._builder  # torch calls it right after the backward whose W it is

        def forward_one_chunk(number: int, *args: Any, **kwargs: Any) -> Any:
            if not self._trains:
                with running(Tape(again=True)):
                    return forward(number, *args, **kwargs)
            with self._action("F", stage.stage_index, number) as (scope, tape):
                scope.retain(TAPE, tape)
                with running(tape):
                    return forward(number, *args, **kwargs)

        def backward_one_chunk(number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
            if not self._trains:  # torch's eval runs the whole schedule, over stages that do nothing in backward
                return None
            with self._action("I", stage.stage_index, number) as (scope, tape):
                tape.again, self._made = True, tape
                with running(tape):
                    # the W of a full backward is an action of its own, below
                    made = backward(number, loss=loss, full_backward=False, last_backward=last_backward)
                scope.input_grad_done(TAPE)
            if full_backward:
                weight_one_chunk(number)
            return made

        def weight_one_chunk(number: int, last_backward: bool = False) -> None:
            if not self._trains:
                return
            with self._action("W", stage.stage_index, number) as (scope, _):
                if scope.take_weight_grad(TAPE) is not None:
                    stage.dw_runner.pop(number)()
            self._free.setdefault(stage.stage_index, []).append(self._slots.pop((stage.stage_index, number)))

        for name, work in (
            ("forward_one_chunk", forward_one_chunk),
            ("backward_one_chunk", backward_one_chunk),
            ("backward_weight_one_chunk", weight_one_chunk),
        ):
            setattr(stage, name, work)

    def _builder(self) -> Callable[..., None]:
        tape, self._made = self._made, None
        assert tape is not None
        return lambda: weight_grads(tape)

    @contextmanager
    def _action(self, kind: str, chunk: int, microbatch: int) -> Iterator[tuple[Any, Tape]]:
        key = chunk, microbatch
        if kind == "F" and key not in self._slots:  # a second F keeps the slot, and is refused for it
            free = self._free.setdefault(chunk, [])
            self._slots[key] = free.pop() if free else sum(c == chunk for c, _ in self._slots)
        index = self._slots.get(key, 0)
        slots = (Slot("I", chunk, index), Slot("W", chunk, index))
        with self.ledger.action(kind, chunk, microbatch, beta=None if kind == "F" else 1, slots=slots) as scope:
            tape = Tape() if kind == "F" else self.ledger.leases.payloads(chunk, microbatch)[TAPE]
            tape.scope = scope
            yield scope, tape
            tape.scope = None


def attach(schedule: _PipelineSchedule, *, fp8: bool | dict[str, Any] = False, contract: str = "enforce") -> Attached:
    """Put the contract around a schedule of torch's, made and not yet run.

    Args:
        schedule: any of ``torch.distributed.pipelining``; its stages' linears are converted in place.
        fp8: True, or options of :class:`~qeffect_lm.integrations.pipelining.fp8.FP8State`.
        contract: ``enforce`` or ``off``.

    Raises:
        UsageError: a schedule of ours, a stage that has a ``dw_builder`` or is wrapped by DDP or FSDP, or one that is attached.
    """
    from qeffect_lm.integrations.pipelining.schedules import PipelineSchedule

    if isinstance(schedule, PipelineSchedule):
        raise UsageError(f"{type(schedule).__name__} runs under the contract by itself: attach() is for torch's schedules")
    return Attached(schedule, fp8=fp8, mode=contract)


def _check(stage: Any) -> None:
    if stage.dw_builder is not None:
        raise UsageError(f"stage {stage.stage_index} has a dw_builder already: attach once, and give no other one")
    if isinstance(stage.submod, DistributedDataParallel) or is_sharded(stage.submod):
        raise UsageError(
            f"stage {stage.stage_index} is in DDP or FSDP, which takes a gradient when autograd makes it: "
            "W is not autograd's. Give the module itself"
        )
