"""The fused quantisers and whole layers, where operands of W of several microbatches lie side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qeffect_lm.fp8.quantise import E4M3, E5M2, Quantised
from qeffect_lm.layers.rope import rope_tables
from tests.unit.interpreted import DEVICE, kernels_run  # noqa: F401
from tests.unit.layer_harness import random

TOKENS, WIDTH = 32, 48


def _x(seed: int, width: int = WIDTH) -> torch.Tensor:
    return random(TOKENS, width, seed=seed, dtype=torch.bfloat16).to(DEVICE)


def _norm(outputs):
    from qeffect_lm.kernels import norm

    return norm.forward_quantise(_x(1), _x(2)[0], 1e-5, outputs)[0]


def _norm_of_whole_rows(outputs):
    from qeffect_lm.kernels import norm, tables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "norm_rows", lambda m, k: tables.Tile(8, k, 4))
        return norm.forward_quantise(_x(1), _x(2)[0], 1e-5, outputs)[0]


def _swiglu(outputs):
    from qeffect_lm.kernels import swiglu

    return swiglu.quantise(_x(3, 2 * WIDTH), outputs)


def _swiglu_backward(outputs):
    from qeffect_lm.kernels import swiglu

    return swiglu.backward_quantise(_x(3, WIDTH), _x(4, WIDTH // 2), outputs)


def _rope_backward(outputs):
    from qeffect_lm.kernels import rope

    cos, sin = (table.to(DEVICE) for table in rope_tables(TOKENS, 12, 100.0, torch.bfloat16))
    shapes = (1, 1, 2, TOKENS, 12), (1, 1, TOKENS, 12), (1, 1, TOKENS, 12)
    parts = [random(*shape, seed=5, dtype=torch.bfloat16).to(DEVICE) for shape in shapes]
    return rope.backward_quantise(*parts, cos, sin, outputs)


@pytest.mark.parametrize("work", [_norm, _norm_of_whole_rows, _swiglu, _swiglu_backward, _rope_backward])
def test_fused_quantisers_take_a_place(work: Callable[..., Quantised]):
    """Each writes its columns into its part of a wider matrix, byte for byte what it writes alone, and nothing beside it."""
    from qeffect_lm.kernels.quantise import Outputs

    fmt = E5M2 if "backward" in work.__name__ else E4M3

    def outputs(place: torch.Tensor | None) -> Outputs:
        scale = torch.tensor(20.0, device=DEVICE)
        return Outputs((TOKENS, WIDTH), scale, fmt, rows=True, columns=True, amax_out=None, columns_out=place)

    alone = work(outputs(None))
    wide = torch.full((WIDTH, 3 * TOKENS), 7.0, device=DEVICE).to(fmt.dtype)
    part = wide[:, TOKENS : 2 * TOKENS]
    beside = work(outputs(part))
    assert alone.columns is not None and alone.rows is not None and beside.rows is not None and beside.columns is part
    assert torch.equal(part.view(torch.uint8), alone.columns.view(torch.uint8)) and alone.columns.float().abs().max() > 0
    assert torch.equal(beside.rows.view(torch.uint8), alone.rows.view(torch.uint8))
    assert (wide[:, :TOKENS].float() == 7.0).all() and (wide[:, 2 * TOKENS :].float() == 7.0).all()
