"""What a ``ModelSpec`` of TorchTitan (0.3), or a ``TrainSpec`` (0.2), takes as its ``pipelining_fn``: stages as it makes them,
our schedule over them.

    spec.pipelining_fn = functools.partial(pipeline_llm, fp8=True)

TorchTitan splits the model, parallelises and wraps the parts as it does for its own schedules; the schedule that it makes is
replaced by ours of the same name before its first step. ``pipeline_parallel_schedule`` takes torch's names and ZBH1 and ZBH2.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.pipelining.convert import split_linears
from qeffect_lm.integrations.pipelining.schedules import BY_TORCH_NAME, PipelineSchedule

OWN = {"zbh1": "1F1B", "zbh2": "1F1B"}  # ours, and whose placement of stages they share
HEADS = ("lm_head", "output")  # the output projection's names in 0.3 and 0.2


def pipeline_llm(
    model: torch.nn.Module, *args: Any, fp8: bool | dict[str, Any] = False, contract: str = "enforce", **kwargs: Any
) -> Any:
    """TorchTitan's ``pipeline_llm``, with our schedule.

    Args:
        fp8: linears of the stages multiply in FP8 (True, or options of
            :class:`~qeffect_lm.integrations.pipelining.fp8.FP8State`); the output projection stays as it is.
        args, kwargs: what TorchTitan's trainer passes: ``parallelism``, ``loss_fn``, … by name, or in 0.2 by
            position, with a ``job_config`` that has ``parallelism``.

    Returns: schedule, model parts, whether the first and the last stage are here.

    Raises:
        UsageError: no torchtitan, or a schedule that is neither torch's nor ours.
    """
    theirs = required("torchtitan.distributed.pipeline_parallel").pipeline_llm
    given = inspect.signature(theirs).bind(model, *args, **kwargs).arguments
    job = given.get("job_config")
    parallelism = given["parallelism"] if job is None else job.parallelism
    name = parallelism.pipeline_parallel_schedule
    kind = schedule_class(name)
    if name.lower() in OWN:
        other = dataclasses.replace(parallelism, pipeline_parallel_schedule=OWN[name.lower()])
        given |= {"parallelism": other} if job is None else {"job_config": dataclasses.replace(job, parallelism=other)}
    split_linears(model, only=lambda path, _: path.partition(".")[0] not in HEADS)  # before TorchTitan wraps their forward
    schedule, parts, first, last = theirs(**given)
    ours = kind.in_place_of(schedule, fp8=fp8, contract=contract)
    if parallelism.pipeline_parallel_schedule_csv:
        file = Path(parallelism.pipeline_parallel_schedule_csv)
        if not file.is_file():
            raise UsageError(f"parallelism.pipeline_parallel_schedule_csv: no file {file}")
        ours._load_csv(str(file))
    required("torchtitan.tools.logging").logger.info(f"QEffect LM runs {ours.plan.schedule}\n{ours.report()}")
    return ours, parts, first, last


def schedule_class(name: str) -> type[PipelineSchedule]:
    """Ours of a name that ``pipeline_parallel_schedule`` may have; case does not matter.

    Raises:
        UsageError: there is none of that name.
    """
    for known, kind in BY_TORCH_NAME.items():
        if known.lower() == name.lower():
            return kind
    raise UsageError(f"parallelism.pipeline_parallel_schedule is {name}; ours are {', '.join(BY_TORCH_NAME)}")


def required(module: str) -> Any:
    """A module of torchtitan's, or one of ours that needs it.

    Raises:
        UsageError: it is not installed, or of a version that has no such module.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise UsageError("torchtitan is not installed: pip install 'qeffect-lm[titan]'")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this torchtitan does not fit: {module} needs {error.name}, which is not here (0.3.0 is what this was tried with)"
        ) from error
