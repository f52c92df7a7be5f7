"""Configurations for TorchTitan's launcher:

    torchrun --nproc-per-node 2 -m torchtitan.train --module qeffect_lm.integrations.torchtitan \\
        --config llama3_debugmodel_qeffect

They are TorchTitan's own, of the same name without ``_qeffect``, with our pipeline over two ranks.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from qeffect_lm.integrations.torchtitan.pipeline import pipeline_llm, required


def llama3_debugmodel_qeffect() -> Any:
    """Llama 3's debug model over ZB-V and two ranks, its linears in FP8 under delayed scaling."""
    return _ours("llama3_debugmodel", "ZBVZeroBubble", fp8=True)


def llama3_debugmodel_qeffect_bf16() -> Any:
    """The same without FP8."""
    return _ours("llama3_debugmodel", "ZBVZeroBubble", fp8=False)


def llama3_debugmodel_qeffect_cpu() -> Any:
    """For :mod:`qeffect_lm.integrations.torchtitan.cpu`: attention that has a backward on a CPU, whole float32, no FP8."""
    config = _ours("llama3_debugmodel", "ZBVZeroBubble", fp8=False)
    attention = required("torchtitan.models.common.attention").ScaledDotProductAttention
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.Config()
    config.training.mixed_precision_param = "float32"
    return config


def llama3_8b_qeffect() -> Any:
    """Llama 3 8B in FP8."""
    return _ours("llama3_8b", "ZBVZeroBubble", fp8=True)


def _ours(name: str, schedule: str, *, fp8: bool) -> Any:
    trainer = required("qeffect_lm.integrations.torchtitan.trainer").Trainer
    base = getattr(required("torchtitan.models.llama3.config_registry"), name)()
    config = trainer.Config(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init})
    config.model_spec = dataclasses.replace(base.model_spec, pipelining_fn=partial(pipeline_llm, fp8=fp8))
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.training.disable_cuda_graphs = True  # TorchTitan captures no pipelines
    return config
