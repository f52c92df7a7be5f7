"""Weights for benchmarks: of the sizes that training begins with, drawn where they live."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

import torch

from models.spec import ParameterSpec
from qeffect_lm.app import assemble as assembling
from qeffect_lm.layers.dropout import host_key
from qeffect_lm.optim.flat import FlatBuffers


def drawn_on_device() -> AbstractContextManager[object]:
    """Inside, assembly draws weights on the device. A fresh run's are drawn on the CPU, which takes longer than a measurement.

    Values depend on seed and name alone, so that layouts of one model begin alike.
    """
    return mock.patch.object(assembling, "initialise", _draw)


def _draw(flat: FlatBuffers, specs: dict[str, ParameterSpec], seed: int) -> None:
    generator = torch.Generator(flat.device)
    for name in flat.names:
        generator.manual_seed(host_key("benchmark", seed, name) % 2**63)
        std = specs[name].init_std
        flat.master(name).fill_(1.0) if std is None else flat.master(name).normal_(std=std, generator=generator)
    flat.gather()
