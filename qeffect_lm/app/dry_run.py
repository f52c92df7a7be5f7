"""``--dry-run``: what would run, without training: configuration, parameters, plan, memory per rank."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from models import build_model
from models.spec import ParameterSpec
from pipeline.plan import Plan
from pipeline.simulate import simulate
from pipeline.timeline_text import render
from qeffect_lm.app import optimizer as optimizers
from qeffect_lm.app.activations import activations, recompute_note
from qeffect_lm.app.assemble import DTYPES, check_supported, make_plan, make_recipe, shard_of
from qeffect_lm.app.auto_plan import decide, explain, needs_profile
from qeffect_lm.app.counts import active_parameters, flop_per_token
from qeffect_lm.app.holdings import local_spec, param_specs, shape_only
from qeffect_lm.app.profile import made_up_batch, profile
from qeffect_lm.app.sources import check_tokenizer
from qeffect_lm.config import Config
from qeffect_lm.layers.joined import place_bytes
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.optim.buckets import BucketPlan
from qeffect_lm.optim.flat import Entry, ParamSpec, Shard, layout, plan_of
from qeffect_lm.optim.gradient_table import gradient_table
from qeffect_lm.parallel.mesh import Mesh

MIB = 1024 * 1024


def describe(config: Config, gradients: bool = False) -> str:
    """The whole page, for a terminal 100 columns wide; ``gradients``: with the place of every main gradient."""
    check_supported(config)
    plan, notes = _plan(config)
    model = build_model(config, make_recipe(config), DTYPES[config.precision.dtype], shape_only(config))
    specs = {spec.name: spec for spec in model.parameters()}
    counts = config.chunk_layers(plan.placement.num_chunks)
    total, active = sum(prod(spec.shape) for spec in specs.values()), active_parameters(specs.values())
    used = [f"of them {active:,} take part in a token: of experts those that it goes through"] if active < total else []
    tokens = config.data.seq_len * config.data.microbatch_size * plan.microbatches * config.parallel.dp
    result = simulate(plan, 1.0, 1.0, 1.0, 0.0)
    parts = [
        "configuration (resolved)",
        _indent(config.dump_yaml()),
        f"parameters: {total:,} in {len(specs)} tensors, decoder layers per chunk {counts}",
        *used,
        f"model FLOP per token, forward and backward: {flop_per_token(config, specs.values()):.4g}",
        f"tokens per step: {tokens:,}; {config.train.steps:,} steps, {tokens * config.train.steps:,} tokens",
        "",
        f"plan {plan.fingerprint()[:16]}",
        *notes,
        f"one step with T_F = T_I = T_W and free communication (bubble {result.bubble:.1%}):",
        render(plan, width=98),
        "",
        memory_table(config, plan, specs, counts),
        *staged_copies(config, plan, specs, counts),
        *recompute_note(config, plan, counts, DTYPES[config.precision.dtype]),
        *coalesced_places(config, plan, counts),
        *bucket_tables(config, plan, specs, counts),
        *(gradient_tables(config, plan, specs, counts) if gradients else []),
    ]
    return "\n".join([*parts, *_missing(config)])


def _plan(config: Config) -> tuple[Plan, list[str]]:
    """The plan; ``auto`` from this process's speed alone, without messages."""
    if config.pipeline.schedule != "auto":
        return make_plan(config), []
    profiles = []
    if needs_profile(config):
        mine = profile(config, made_up_batch(config))
        profiles = [(rank, mine) for rank in range(config.parallel.pp)]
    found = decide(config, profiles)
    told = explain(config, found)
    return found.plan, [*told, "auto: training measures again, on all ranks and with messages"] if profiles else told


def _missing(config: Config) -> list[str]:
    """What training would stop for that a dry run can see: absent corpora, a tokenizer of another size."""
    notes = []
    for key, prefix in (("data.train", config.data.train), ("data.valid", config.data.valid)):
        if prefix is None and key == "data.train":
            notes.append(f"note: {key} is not set; training needs it")
        elif prefix is not None and not Path(f"{prefix}.bin").exists():
            notes.append(f"note: {key}: {prefix}.bin does not exist yet")
    tokenizer = config.data.tokenizer
    if tokenizer is not None and Path(tokenizer).exists():
        check_tokenizer(config)
    elif tokenizer is not None:
        notes.append(f"note: data.tokenizer: {tokenizer} does not exist yet")
    return notes


def memory_table(config: Config, plan: Plan, specs: dict[str, ParameterSpec], counts: list[int]) -> str:
    """MiB per pipeline rank by category, with tensor parallelism of the first of its ranks; activations are an estimate from
    the layers' shapes and the plan's slots."""
    names = "parameters", "gradients", "optimizer", "FP8 caches", "activations", "total"
    header = "rank " + " ".join(f"{name:>{width}}" for name, width in zip(names, (11, 10, 10, 11, 12, 9), strict=True))
    tp = f", each of {config.parallel.tp} tensor-parallel ranks" if config.parallel.tp > 1 else ""
    lines = [f"memory per pipeline rank{tp} (MiB); activations estimated from shapes and the plan's slots:", header]
    for rank in range(plan.num_ranks):
        numbers = memory_of(config, plan, rank, specs, counts)
        cells = [numbers[key] / MIB for key in ("parameters", "gradients", "optimizer", "caches", "activations")]
        widths = (11, 10, 10, 11, 12)
        text = " ".join(f"{cell:>{width}.1f}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{rank:>4} {text} {sum(cells):>9.1f}")
    return "\n".join(lines)


def staged_copies(config: Config, plan: Plan, specs: dict[str, ParameterSpec], counts: list[int]) -> list[str]:
    """With ``checkpoint.async_save``, what the copy of a rank's state takes of host memory at most (but for a few KiB)."""
    if not config.checkpoint.async_save:
        return []
    numbers = [memory_of(config, plan, rank, specs, counts) for rank in range(plan.num_ranks)]
    most = max(sum(one[key] for key in ("parameters", "optimizer", "caches")) for one in numbers)
    return ["", f"saving in the background: up to {most / MIB:.1f} MiB of host memory for a rank's copy of its state"]


def coalesced_places(config: Config, plan: Plan, counts: list[int]) -> list[str]:
    """With ``pipeline.coalesce_w``, per chunk how many places its operands of W have and how large one is."""
    if plan.coalesce_w == 1:
        return []
    model = build_model(config, make_recipe(config), DTYPES[config.precision.dtype], shape_only(config))
    tokens = config.data.seq_len * config.data.microbatch_size
    lines = ["", f"W of {plan.coalesce_w} microbatches is one product; its operands in FP8 (part of the activations above):"]
    for rank, slots in enumerate(plan.slots):
        for chunk in plan.placement.chunks(rank):
            places, size = slots.w_slots.count[chunk], place_bytes(model.meta_chunk(chunk, counts).modules(), tokens)
            lines.append(f"rank {rank}, chunk {chunk}: {places} places of {size:,} bytes, {places * size / MIB:.1f} MiB")
    return lines


def bucket_tables(config: Config, plan: Plan, specs: dict[str, ParameterSpec], counts: list[int]) -> list[str]:
    """With shared optimizer state, per pipeline rank the table of buckets and of who owns what (docs/data-parallel.md)."""
    shard = shard_of(config, Mesh({"dp": config.parallel.dp}))
    if shard is None:
        return []
    tables = []
    for rank in range(plan.num_ranks):
        buckets = _buckets(config, plan, rank, specs, counts, shard)
        title = f"buckets of pipeline rank {rank}, in elements of the flat buffers; dp i from: the first that replica i owns"
        tables += ["", f"{title}:", buckets.table(optimizers.grad_dtype(config).itemsize)]
    return tables


def gradient_tables(config: Config, plan: Plan, specs: dict[str, ParameterSpec], counts: list[int]) -> list[str]:
    """Per pipeline rank, where each main gradient lies (docs/gradients.md)."""
    shard, dtype = shard_of(config, Mesh({"dp": config.parallel.dp})), optimizers.grad_dtype(config)
    tables = []
    for rank in range(plan.num_ranks):
        params = held_by(config, plan, rank, specs, counts)
        entries, _ = _layout(config, params)
        buckets = None if shard is None else _buckets(config, plan, rank, specs, counts, shard)
        tied = [param for param in params if param.tied_to is not None]
        title = f"main gradients of pipeline rank {rank}, in its flat buffer; chunk: whose work completes them:"
        tables += ["", title, gradient_table(entries, tied, dtype, buckets)]
    return tables


def _wide(config: Config) -> int:
    """Bytes of an element of masters."""
    return 8 if DTYPES[config.precision.dtype] is torch.float64 else 4


def _moment(config: Config) -> int:
    """Bytes of an element of a moment."""
    dtype = optimizers.moment_dtype(config)
    return _wide(config) if dtype is None else dtype.itemsize


def _buckets(
    config: Config, plan: Plan, rank: int, specs: dict[str, ParameterSpec], counts: list[int], shard: Shard
) -> BucketPlan:
    return plan_of(*_layout(config, held_by(config, plan, rank, specs, counts)), shard, optimizers.grad_dtype(config).itemsize)


def _layout(config: Config, params: list[ParamSpec]) -> tuple[dict[str, Entry], list[int]]:
    """Where a rank's parameters lie, as :class:`~qeffect_lm.optim.flat.FlatBuffers` puts them."""
    dtypes = DTYPES[config.precision.dtype], optimizers.grad_dtype(config)
    return layout(params, (_wide(config), _moment(config), *(dtype.itemsize for dtype in dtypes)))


def held_by(
    config: Config, plan: Plan, rank: int, specs: dict[str, ParameterSpec], counts: list[int]
) -> list[ParamSpec]:
    """The parameters and tied weights of one pipeline rank."""
    model = build_model(config, make_recipe(config), DTYPES[config.precision.dtype], shape_only(config))
    chunks = {c: model.meta_chunk(c, counts) for c in plan.placement.chunks(rank)}
    return param_specs(config, chunks, specs, model.ties, shape_only(config))


def memory_of(config: Config, plan: Plan, rank: int, specs: dict[str, ParameterSpec], counts: list[int]) -> dict[str, int]:
    """Bytes of one pipeline rank by category."""
    dtype = DTYPES[config.precision.dtype]
    wide = _wide(config)
    held = held_by(config, plan, rank, specs, counts)
    names = [param.name for param in held if param.tied_to is None]
    size = sum(param.numel for param in held if param.tied_to is None)
    tied = [param for param in held if param.tied_to is not None]
    copies = sum(param.numel for param in tied if param.tied_to not in names)
    model = build_model(config, make_recipe(config), dtype, shape_only(config))
    modules = [m for chunk in plan.placement.chunks(rank) for m in model.meta_chunk(chunk, counts).modules()]
    cached = sum(m.weight.numel() for m in modules if isinstance(m, SplitLinear) and m.recipe is not None)
    # What arrives from other ranks before it is added: of copies of tied weights, and of replicas a bucket's.
    here = {param.name for param in held}
    apart = [source for copy, source in model.ties.items() if source in here and copy not in here]
    received = sum(local_spec(specs[source], shape_only(config)).numel for source in apart)
    separate = dtype.itemsize != wide
    owned = size  # of masters and moments, by the replica that owns most
    shard = shard_of(config, Mesh({"dp": config.parallel.dp}))
    if shard is not None:
        buckets = _buckets(config, plan, rank, specs, counts, shard)
        owned = max(buckets.owned(replica) for replica in range(shard.ranks))
        trained = [bucket for bucket in buckets.buckets if bucket.trainable]
        received += shard.ranks * max((size for bucket in trained for size in bucket.sizes), default=0)
    return {
        "parameters": (owned * wide + size * dtype.itemsize if separate else size * wide) + copies * dtype.itemsize,
        "gradients": (size + sum(param.numel for param in tied) + received) * optimizers.grad_dtype(config).itemsize,
        "optimizer": 2 * owned * _moment(config),
        "caches": 2 * cached,
        "activations": activations(config, plan, rank, counts, dtype),
    }


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines()) + "\n"
