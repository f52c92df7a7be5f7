"""TorchTitan's trainer with its own pipeline schedule and with ours: tokens/s and peak memory, one after the other in one run.

Its Llama 3 debug model (or another of its sizes), its data loader, optimizer and clipping; a step is its ``train_step``, timed
from one wait for the device to the next, the median on the slowest rank. torchtitan 0.2 and 0.3 are configured differently, and
both work. Activations are kept unless asked for: torch's ZB-V walks autograd's graph twice, which selective recomputation
refuses. With one process the pipeline has one rank, which TorchTitan itself would run without a schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qeffect_lm.integrations.torchtitan.pipeline import pipeline_llm, required

WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all variants share: sizes of a step and of the model, and where tokenizer and texts lie."""

    folder: Path
    microbatches: int
    seq_len: int
    model: str
    device: torch.device
    recompute: bool


def assets(folder: Path) -> None:
    """A byte-level tokenizer and a small corpus, as TorchTitan reads them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "data").mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}, and {n} and {n} are {2 * n}. " * 3}) for n in range(200)]
    (folder / "data/train.jsonl").write_text("\n".join(lines))


def own_pipeline(model: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchTitan's own pipeline over torch's schedule. Lists of microbatches, which the trainer of 0.3 hands over and torch
    2.13 does not take, are given where it makes them."""
    schedule, *rest = required("torchtitan.distributed.pipeline_parallel").pipeline_llm(model, *args, **kwargs)
    whole = schedule.step

    def step(*args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **more: Any) -> Any:
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return whole(*args, **more)
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        return schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **more)

    schedule.step = step
    return schedule, *rest


def build(setting: Setting, schedule: str, *, ours: bool, fp8: bool) -> Any:
    """A trainer of the installed torchtitan."""
    from qeffect_lm.integrations.torchtitan import trainer

    sizes = [
        f"--training.seq_len={setting.seq_len}",
        f"--training.local_batch_size={setting.microbatches}",
        f"--training.steps={1 << 20}",
        f"--parallelism.pipeline_parallel_degree={dist.get_world_size()}",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--parallelism.pipeline_parallel_microbatch_size=1",
        "--parallelism.fsdp_reshard_after_forward=never",
        f"--metrics.log_freq={1 << 20}",
        "--debug.seed=1",
    ]
    tokenizer, data = setting.folder / "tokenizer", setting.folder / "data"
    fn = functools.partial(pipeline_llm, fp8=fp8) if ours else own_pipeline
    manager = required("torchtitan.config").ConfigManager()
    if trainer.BY_CONFIG:
        name = f"llama3_{setting.model.lower()}_qeffect" + ("_cpu" if setting.device.type == "cpu" else "")
        config = manager.parse_args(
            ["--module", "qeffect_lm.integrations.torchtitan", "--config", name, f"--hf_assets_path={tokenizer}",
             f"--dataloader.dataset_path={data}", "--validator.no-enable", f"--dump_folder={setting.folder}", *sizes]
        )  # fmt: skip
        config.model_spec.pipelining_fn = fn
        if not setting.recompute:
            config.activation_checkpoint = None
        return config.build()
    specs = required("torchtitan.protocols.train_spec")
    specs._extra_train_specs["measured"] = dataclasses.replace(specs.get_train_spec("llama3"), pipelining_fn=fn)
    more = ["--training.mixed_precision_param=float32"] if setting.device.type == "cpu" else []
    if not setting.recompute:
        more.append("--activation_checkpoint.mode=none")
    config = manager.parse_args(
        ["--model.name=measured", f"--model.flavor={setting.model}", f"--model.hf_assets_path={tokenizer}",
         "--training.dataset=c4_test", f"--training.dataset_path={data}", f"--job.dump_folder={setting.folder}",
         *sizes, *more]
    )  # fmt: skip
    return trainer.Trainer(config)


def with_a_pipeline_of_one() -> None:
    """TorchTitan has a pipeline from two ranks on: here one rank is one, too."""
    dims = required("torchtitan.distributed.parallel_dims").ParallelDims
    exists = dims._mesh_exist
    dims.pp_enabled = property(lambda self: True)
    dims._mesh_exist = lambda self, name, degree: name == "pp" or exists(self, name, degree)


def measure(setting: Setting, schedule: str, steps: int, *, ours: bool, fp8: bool = False) -> dict[str, Any]:
    """Train ``steps`` after a few to warm up; every rank returns the same figures."""
    cuda = setting.device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = build(setting, schedule, ours=ours, fp8=fp8)
    seconds, loss = [], torch.zeros(())
    inner: Callable[..., torch.Tensor] = trainer.forward_backward_step

    def watched(**given: Any) -> torch.Tensor:
        nonlocal loss
        loss = inner(**given)
        return loss

    trainer.forward_backward_step = watched
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(WARM_UP + steps):
        trainer.step += 1
        wait(cuda)
        start = time.perf_counter()
        trainer.train_step(batches)
        wait(cuda)
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    trainer.close()
    last = loss.item() if trainer.pp_has_last_stage else float("-inf")
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    figures = torch.tensor([statistics.median(seconds), peak, last], dtype=torch.float64, device=setting.device)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    median, peak, last = figures.tolist()
    return {
        "pipeline": "QEffect LM" if ours else "torch",
        "schedule": schedule,
        "fp8": fp8,
        "ms": 1e3 * median,
        "tokens_per_s": setting.microbatches * setting.seq_len / median,
        "peak_gib": peak if cuda else None,
        "loss": last,
    }


def wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


def begin(setting: Setting) -> str:
    """Before the first trainer: the environment, CPU or GPU, one process group for all. Returns torchtitan's version."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(setting.folder / "home")}
    required("torchtitan")
    if setting.device.type == "cpu":
        from qeffect_lm.integrations.torchtitan.cpu import on_cpu

        on_cpu()
    assets(setting.folder)
    world = dist.get_world_size()
    required("torchtitan.distributed.utils").init_distributed = lambda *_, **__: world  # the group is up
    if world == 1:
        with_a_pipeline_of_one()
    return importlib.metadata.version("torchtitan")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'pipeline':12} {'schedule':14} {'linears':8} {'ms/step':>9} {'tokens/s':>10} {'peak GiB':>9} {'loss':>9}"]
    for row in rows:
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        linears = "FP8" if row["fp8"] else "as given"
        lines.append(
            f"{row['pipeline']:12} {row['schedule']:14} {linears:8} {row['ms']:9.1f} {row['tokens_per_s']:10.0f} {peak:>9} "
            f"{row['loss']:9.5f}"
        )
    return "\n".join(lines)
