"""TorchTitan's trainer and Llama 3 debug model on two gloo ranks, through our pipelining_fn and beside its own schedule."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_distributed
from tools.benchmarks.titan import assets, own_pipeline

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan")

SEQUENCE, MICROBATCHES = 16, 4


def _train(rank: int, world: int, folder: str, runs: list[dict[str, Any]]) -> list[Any]:
    """Trainers one after the other in one process group; what each tells."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ |= {"HF_HOME": f"{folder}/home{rank}", "LOCAL_RANK": str(rank)}
    from qeffect_lm.integrations.torchtitan.cpu import on_cpu

    on_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils

    utils.init_distributed = lambda *_, **__: world  # the test's group is up
    told = []
    for run in runs:
        arguments = [
            "--module", "qeffect_lm.integrations.torchtitan", "--config", "llama3_debugmodel_qeffect_cpu",
            f"--hf_assets_path={folder}/tokenizer", f"--dataloader.dataset_path={folder}/data", "--validator.no-enable",
            f"--training.seq_len={SEQUENCE}", f"--training.steps={run['steps']}", f"--training.local_batch_size={MICROBATCHES}",
            f"--dump_folder={folder}/{run['name']}",
            "--training.max_norm=1000",  # its gradient norm is summed stage by stage: no clipping, where bits are compared
            *run.get("options", ()),
        ]  # fmt: skip
        told.append(_one(ConfigManager().parse_args(arguments), run))
    return told


def _one(config: Any, run: dict[str, Any]) -> dict[str, Any]:
    from qeffect_lm.integrations.torchtitan.pipeline import pipeline_llm

    fn = own_pipeline if run.get("theirs") else functools.partial(pipeline_llm, fp8=run.get("fp8", False))
    config.model_spec.pipelining_fn = fn
    config.loss.num_chunks = 2
    trainer = config.build()
    losses, inner = [], trainer.pp_forward_backward_step

    def watched(**given: Any) -> torch.Tensor:
        loss = inner(**given)
        if trainer.pp_has_last_stage:
            losses.append(loss.item())
        return loss

    trainer.pp_forward_backward_step = watched
    if "until" in run:  # interrupted there: planned, and so the learning rate with it, are all of its steps
        trainer.should_continue_training = lambda: trainer.step < run["until"]
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            same_everywhere(name, parameter)
    trainer.train()
    state = None if getattr(trainer.pp_schedule, "fp8", None) is None else trainer.pp_schedule.fp8.state_dict()
    parameters = {n: local(p).clone() for part in trainer.model_parts for n, p in part.named_parameters()}
    report = trainer.pp_schedule.report() if hasattr(trainer.pp_schedule, "report") else ""
    trainer.close()
    told = None if state is None else {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in state.items()}
    return {"losses": losses, "parameters": parameters, "state": told, "report": report}


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()


@torch.no_grad()
def same_everywhere(name: str, parameter: torch.Tensor) -> None:
    """TorchTitan draws stage by stage: drawn anew by name, so that placements of stages do not matter."""
    name = name.replace("_checkpoint_wrapped_module.", "")
    draw = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    mine = local(parameter)
    mine.copy_(torch.ones_like(mine) if mine.dim() == 1 else torch.randn(mine.shape, generator=draw) * 0.1)


def joined(ranks: list[list[Any]], number: int) -> tuple[list[float], dict[str, torch.Tensor], dict[str, bytes]]:
    one, two = (rank[number] for rank in ranks)
    return one["losses"] + two["losses"], one["parameters"] | two["parameters"], (one["state"] or {}) | (two["state"] or {})


SCHEDULE = "--parallelism.pipeline_parallel_schedule="


def test_titans_trainer_with_our_pipeline(tmp_path: Path) -> None:
    """Ours under ZB-V, 1F1B and ZB-H1: the same bits; its own 1F1B: the same to float32's rounding. FP8 resumed from its
    checkpoint: the bits of the run that went on, scales, histories and cached weights included."""
    check(tmp_path, steps=2)


@pytest.mark.long
def test_titans_trainer_for_twenty_steps(tmp_path: Path) -> None:
    check(tmp_path, steps=20)


def check(folder: Path, steps: int) -> None:
    assets(folder)
    saved = ["--checkpoint.enable", f"--checkpoint.interval={steps}", "--checkpoint.keep_latest_k=0"]
    runs = [
        {"name": "zbv", "steps": steps},
        {"name": "ours", "steps": steps, "options": [f"{SCHEDULE}1F1B"]},
        *([{"name": "zbh1", "steps": steps, "options": [f"{SCHEDULE}ZBH1"]}] if steps >= 20 else []),
        {"name": "theirs", "steps": steps, "options": [f"{SCHEDULE}1F1B"], "theirs": True},
        {"name": "unsaved", "steps": steps + 2, "until": 1, "fp8": True},
        {"name": "fp8", "steps": steps + 2, "fp8": True, "options": saved},
        {"name": "part", "steps": steps + 2, "until": steps, "fp8": True, "options": saved},
        {"name": "part", "steps": steps + 2, "fp8": True, "options": saved},
    ]
    ranks = run_distributed(_train, 2, str(folder), runs, timeout=900)
    zbv, *same_bits, own, unsaved, whole, part, resumed = (joined(ranks, number) for number in range(len(runs)))
    assert len(own[0]) == steps and own[0][-1] != own[0][0]
    for other in same_bits:
        assert other[0] == zbv[0] and differing(other[1], zbv[1]) == []
    assert zbv[0] == pytest.approx(own[0], rel=2e-5)
    for name, parameter in own[1].items():  # Adam divides by gradients' sizes: a few of its steps of lr may differ
        torch.testing.assert_close(zbv[1][name], parameter, rtol=0, atol=8e-4 * steps / 4)
    assert whole[0] == part[0] + resumed[0] and len(part[0]) == steps and differing(whole[1], resumed[1]) == []
    assert whole[2] == resumed[2] and len(whole[2]) > 100
    assert unsaved[0] == whole[0][:1]
    near = min(steps, 4)  # then two runs of different roundings drift apart
    assert whole[0][0] != zbv[0][0] and whole[0][:near] == pytest.approx(zbv[0][:near], rel=0.05)
    report = ranks[0][0]["report"]
    assert "linears are split: layers.0" in report and "tok_embeddings.weight" in report and "ran whole" not in report


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
