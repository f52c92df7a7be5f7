"""What a model's parameters amount to for one token: how many take part, how many operations that is, how many experts."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from models.spec import ParameterSpec
from qeffect_lm.config import Config
from qeffect_lm.layers.router import STATISTICS


def active_parameters(specs: Iterable[ParameterSpec]) -> int:
    """Parameters that take part in a token: of experts those that it goes through."""
    return sum(prod(spec.shape) * spec.active[0] // spec.active[1] for spec in specs)


def tokens_here(config: Config) -> int:
    """Tokens of a microbatch that a rank's layers see: a part of each sequence with context parallelism, else all."""
    return config.data.seq_len * config.data.microbatch_size // config.parallel.cp


def routing_sums(layers: int, specs: Iterable[ParameterSpec], device: torch.device) -> torch.Tensor | None:
    """Where routers sum up a step, a row for each decoder layer; the same shape on every rank, whether it holds a router or
    not. None without experts."""
    experts = max((spec.active[1] for spec in specs), default=1)
    if experts == 1:
        return None
    return torch.zeros(layers, STATISTICS + experts, dtype=torch.float64, device=device)


def flop_per_token(config: Config, specs: Iterable[ParameterSpec]) -> float:
    """Model FLOP of one token, forward and backward: 6 for each element of a matrix that takes part, and causal attention's own
    products, of which a window leaves less. Without norms, activations, embedding and anything that is computed again.

    This times tokens per second is the model FLOP/s of a run (Chowdhery et al. 2022, appendix B).
    """
    model, sequence = config.model, config.data.seq_len
    matrices = [spec for spec in specs if len(spec.shape) == 2 and not spec.embedding]
    used = active_parameters(matrices)
    if model.tie_word_embeddings:
        used += model.vocab_size * model.hidden_size  # the head's product, by the embedding's weight
    window = sequence if model.sliding_window is None else min(model.sliding_window, sequence)
    windowed = model.num_layers - min(model.max_window_layers, model.num_layers)

    def seen(window: int) -> float:
        """Tokens that a token sees, on average."""
        return (window * (window + 1) / 2 + (sequence - window) * window) / sequence

    tokens = windowed * seen(window) + (model.num_layers - windowed) * seen(sequence)
    return 6.0 * used + 12.0 * model.num_heads * model.head_dim * tokens
