"""The optimizer of a configuration: who updates what, in which types, with which guard."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from models.spec import ParameterSpec
from qeffect_lm.config import Config
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.build import make_optimizer
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.muon import Muon
from qeffect_lm.optim.spikes import SpikeGate


def moment_dtype(config: Config) -> torch.dtype | None:
    """Of the moments; None: the masters'."""
    return torch.bfloat16 if config.optim.moments == "bfloat16" else None


def grad_dtype(config: Config) -> torch.dtype:
    """Of the main gradients."""
    if config.precision.dtype == "float64":
        return torch.float64
    return torch.bfloat16 if config.precision.main_grads == "bfloat16" else torch.float32


def decays(config: Config, spec: ParameterSpec) -> bool:
    """Whether weight decay applies: what the model says (matrices yes, norms and biases no), less an exempt embedding."""
    return spec.decay and (config.optim.decay_embedding or not spec.embedding)


def gate_of(config: Config, device: torch.device) -> SpikeGate | None:
    """The gate for spikes; None where ``optim.skip_sigma`` is null."""
    optim = config.optim
    return None if optim.skip_sigma is None else SpikeGate(optim.skip_sigma, optim.skip_warmup, device)


def make(config: Config, flat: FlatBuffers, specs: Mapping[str, ParameterSpec]) -> Optimizer:
    """The optimizer over one rank's buffers.

    Raises:
        UsageError: settings that contradict each other, or a backend that is not to be had.
    """
    optim = config.optim
    schedule = Schedule(
        kind=optim.schedule,
        lr=optim.lr,
        total_steps=config.train.steps,
        warmup_steps=optim.warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
        wsd_decay_steps=optim.wsd_decay_steps,
    )
    muon = None
    if optim.name == "muon":
        matrices = {name: specs[name].matrices for name in flat.trainable_names if specs[name].matrices}
        muon = Muon(flat, matrices, momentum=optim.muon_momentum)
    return make_optimizer(
        optim.backend,
        flat,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        schedule=schedule,
        muon=muon,
    )
