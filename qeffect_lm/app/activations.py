"""What microbatches hold of a pipeline rank's memory between F, I and W, estimated from layers' shapes and the plan's slots.

Of a decoder layer, per token and in features, besides FP8's scales:

    for I, none         inputs of both norms, outputs of products but those into the residual stream, attention's heads 4 times
    for I, selective    the same without the heads
    for I, full         the layer's input
    for W               input and output gradient of every product (one byte each in FP8)

With recompute W's operands come into being in I, and I holds the activations of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from models import build_model
from pipeline.actions import Kind
from pipeline.plan import Plan
from qeffect_lm.config import Config
from qeffect_lm.layers.grouped import ExpertLinear
from qeffect_lm.layers.linear import SplitLinear

_RESIDUAL = ("out", "down")  # products whose output is added to the residual stream


@dataclass(frozen=True)
class LayerBytes:
    """Of one decoder layer and one microbatch: held F → I, held until W, and made again in I."""

    mode: str
    for_i: int
    for_w: int
    again: int


def layer_bytes(config: Config, block: torch.nn.Module, mode: str, item: int) -> LayerBytes:
    """Estimate a decoder layer; ``mode``: its recompute; ``item``: bytes of an activation's element. With tensor parallelism
    its linears are a rank's, and with sequence parallelism so is the residual stream."""
    model = config.model
    hidden, heads = model.hidden_size // stream_share(config), model.num_heads // config.parallel.tp
    tokens = config.data.seq_len * config.data.microbatch_size
    linears = [module for module in block.modules() if isinstance(module, SplitLinear)]

    def rows(linear: SplitLinear) -> float:
        """Of an expert on average, for each token."""
        return linear.share if isinstance(linear, ExpertLinear) else 1

    def elements(features: Callable[[SplitLinear], float]) -> int:
        return round(sum(rows(linear) * features(linear) for linear in linears))

    kept = elements(lambda linear: linear.out_features if linear.name.rpartition(".")[2] not in _RESIDUAL else 0)
    operands = elements(lambda part: (part.in_features + part.out_features) * (item if part.recipe is None else 1))
    selective = 2 * hidden + kept
    everything = selective + 4 * heads * model.head_dim
    held = {"none": everything, "selective": selective, "full": hidden}[mode]
    return LayerBytes(mode, tokens * item * held, tokens * operands, tokens * item * (everything - held))


def stream_share(config: Config) -> int:
    """Of so many parts of the residual stream a rank holds one."""
    return config.parallel.tp if config.parallel.sequence_parallel else 1


def activations(config: Config, plan: Plan, rank: int, counts: list[int], dtype: torch.dtype) -> int:
    """Bytes of all microbatches of a rank at their peak."""
    model, item = config.model, dtype.itemsize
    tokens = config.data.seq_len * config.data.microbatch_size
    slots, total, again = plan.slots[rank], 0, 0
    for chunk in plan.placement.chunks(rank):
        layers = chunk_layers(config, chunk, counts, dtype)
        i_bytes = 4 * tokens * model.hidden_size // stream_share(config) * item + sum(layer.for_i for layer in layers)
        w_bytes = sum(layer.for_w for layer in layers if layer.mode == "none")
        late = sum(layer.for_w for layer in layers if layer.mode != "none")
        if chunk == plan.placement.num_chunks - 1:
            vocab = -(-model.vocab_size // config.parallel.tp)
            i_bytes += tokens * (vocab + 2 * model.hidden_size // stream_share(config)) * item
            w_bytes += tokens * (vocab + model.hidden_size) * item
        total += slots.i_slots.count[chunk] * i_bytes + slots.w_slots.count[chunk] * w_bytes
        total += _waiting_for_w(config, plan, rank, chunk) * late
        again = max([again, *(layer.again for layer in layers)])
    return total + again


def chunk_layers(config: Config, chunk: int, counts: list[int], dtype: torch.dtype) -> list[LayerBytes]:
    """Every decoder layer of a chunk; nothing is allocated."""
    from qeffect_lm.app.assemble import make_recipe
    from qeffect_lm.app.holdings import shape_only

    decoder = build_model(config, make_recipe(config), dtype, shape_only(config))
    first = sum(counts[:chunk])
    recomputes = getattr(decoder, "recomputes", lambda layer: "none")
    named = {getattr(block, "name", ""): block for block in decoder.meta_chunk(chunk, counts).blocks}
    return [
        layer_bytes(config, named[f"layers.{i}"], recomputes(i), dtype.itemsize)
        for i in range(first, first + counts[chunk])
        if f"layers.{i}" in named
    ]


def recompute_note(config: Config, plan: Plan, counts: list[int], dtype: torch.dtype) -> list[str]:
    """With recompute, what it saves and makes again, of the first layer that it is for."""
    chunks = range(plan.placement.num_chunks)
    layers = [layer for chunk in chunks for layer in chunk_layers(config, chunk, counts, dtype) if layer.mode != "none"]
    if not layers:
        return []
    some, mib = layers[0], 2**20
    return [
        f"model.recompute {some.mode}, {len(layers)} of {config.model.num_layers} layers: between F and I a microbatch keeps "
        f"{some.for_i / mib:.1f} MiB of a layer",
        f"instead of {(some.for_i + some.again) / mib:.1f} MiB, and W's operands only from I on; I holds one layer's at a time",
    ]


def _waiting_for_w(config: Config, plan: Plan, rank: int, chunk: int) -> int:
    """How many microbatches of a chunk hold operands for W that I made. Graphs of single actions, and operands side by side,
    keep the storages of every W-slot."""
    graphs = config.graphs
    if plan.coalesce_w > 1 or (graphs.backend != "eager" and graphs.scope == "action"):
        return plan.slots[rank].w_slots.count[chunk]
    steps = {Kind.I: 1, Kind.W: -1}
    mine = [action for action in plan.actions[rank] if action.kind in steps]
    return max(accumulate(steps[action.kind] for action in mine if action.key[0] == chunk), default=0)
