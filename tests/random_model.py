"""Models with random weights, for tests of generation and evaluation."""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm.app.inference import build
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.layers.dropout import host_key
from tests.tiny import config


class RandomWeights:
    """Every parameter from its name alone; large enough that logits differ."""

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(host_key("weights", name))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (1 + values / 10 if len(shape) == 1 else values / 4).to(dtype)

    def cached(self, name: str) -> None:
        return None


def random_model(dtype: str = "float64", context: int | None = None, **overrides: Any) -> InferenceModel:
    """The tiny configuration's model without FP8; overrides as in :func:`tests.tiny.config`."""
    overrides = {"precision__fp8__recipe": "none", **overrides}
    return build(config(precision__dtype=dtype, **overrides), RandomWeights(), context)
