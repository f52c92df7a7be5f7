"""A model for passes without gradients: its layers on one device, with the parameters that such passes read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.kv_cache import KVCache


@dataclass
class InferenceModel:
    """A whole model, from token ids to logits, in evaluation: scales are read, nothing is written.

    Attributes:
        blocks: its layers in order; the last makes logits of each position by itself.
        context_length: the most tokens of one sequence.
        vocab_size: the number of logits.
        token_bytes: keys and values of one token, in all layers.
        caches: its attention takes part in a cache; else every token needs a pass over all before it.
        alone: sequences must be run one by one, since an FP8 recipe scales whole tensors: what lies beside a sequence would
            change it.
        tensors: what the layers read, by name, for the register of a capture.
    """

    blocks: nn.ModuleList
    device: torch.device
    context_length: int
    vocab_size: int
    token_bytes: int
    caches: bool = True
    alone: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """``[batch, sequence]`` int64 on the device → what the head reads, ``[batch, sequence, hidden]``. With a cache the
        tokens continue the sequences of its rows, and the caller moves ``cache.lengths`` on."""
        key = torch.zeros((), dtype=torch.int64, device=self.device)
        context = LayerContext(Phase.EVAL, key=key, cache=cache)
        if cache is not None:
            cache.begin(tokens.shape[1])
        x = tokens
        for block in self.blocks[:-1]:
            x = block(x, context)
        return x

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` → logits ``[..., vocab]``, in the model's dtype."""
        context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64, device=self.device))
        last: Layer = self.blocks[-1]  # type: ignore[assignment]
        logits: torch.Tensor = last(hidden, context)
        return logits

    def logits(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """``[batch, sequence]`` → logits of every position, ``[batch, sequence, vocab]``."""
        return self.head(self.hidden(tokens, cache))
