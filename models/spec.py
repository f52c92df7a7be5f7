"""What a model owes the framework: a list of named blocks, cut into chunks for pipeline stages.

The engine knows a model as an ordered list of blocks; a chunk runs some of them. The first takes token ids
``[batch, sequence]``, the last gives the loss; between two there is one activation tensor ``[batch, sequence, hidden]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.optim.muon import RowBlock


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter by logical name, with its initialisation and the mesh axis that cuts each dimension (None: none)."""

    name: str
    shape: tuple[int, ...]
    init_std: float | None  # None: ones
    decay: bool
    axes: tuple[str | None, ...]
    embedding: bool = False  # a table of rows, of which a step uses a few
    matrices: tuple[RowBlock, ...] = ()  # of a hidden layer: its logical matrices, for optimizers of matrices


class ModelSpec(Protocol):
    """A model family with its sizes."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    def parameters(self, layers: Sequence[int] | None = None) -> list[ParameterSpec]:
        """All parameters in global order, or those of some decoder layers only."""
        ...

    @property
    def ties(self) -> dict[str, str]:
        """Weight of a layer → the parameter that it is, another layer's, perhaps on another rank; most models: none."""
        ...

    def chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """Build chunk ``index`` of ``len(stage_layers)``; ``stage_layers`` says how many decoder layers each gets."""
        ...


class Chunk(nn.Module):
    """Consecutive blocks of a model. Called with ``(x, context)``; gives activations, or on the last chunk the loss.

    In evaluation without targets the last chunk gives the logits ``[batch, sequence, vocab]``.
    """

    def __init__(self, blocks: Sequence[Layer], *, loss: Layer | None = None, first: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.loss = loss
        self.first = first

    @property
    def last(self) -> bool:
        return self.loss is not None

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        once = context.phase is Phase.CALIBRATE and torch.is_grad_enabled()
        for block in self.blocks:
            # Calibration runs once, in high precision: it keeps borders only, or its activations would set a run's peak.
            x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False) if once else block(x, context)
        if self.loss is not None and context.targets is not None:
            return self.loss(x, context)
        return x


def layer_range(index: int, counts: Sequence[int]) -> range:
    """The decoder layers of stage ``index``."""
    start = sum(counts[:index])
    return range(start, start + counts[index])
