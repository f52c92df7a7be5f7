"""``--dry-run``: what would run, without training: configuration, parameters, plan, memory per rank."""

from __future__ import annotations

from math import prod
from pathlib import Path

from pipeline.plan import Plan
from pipeline.simulate import simulate
from pipeline.timeline_text import render
from qeffect_lm.app import optimizer as optimizers
from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.auto_plan import decide, explain, needs_profile
from qeffect_lm.app.counts import active_parameters, flop_per_token
from qeffect_lm.app.device import planned_device
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import Memory
from qeffect_lm.app.profile import made_up_batch, profile
from qeffect_lm.app.rehearsal import rehearse
from qeffect_lm.app.sources import check_tokenizer
from qeffect_lm.config import Config
from qeffect_lm.optim.gradient_table import gradient_table

MIB = 1024 * 1024


def describe(config: Config, gradients: bool = False) -> str:
    """The whole page, for a terminal 100 columns wide; ``gradients``: with the place of every main gradient."""
    plan, notes = _plan(config)
    layout = Layout(config)
    specs, device = layout.specs, planned_device(config)
    memory = Memory(layout, plan, rehearse(config, device), device)
    counts = config.chunk_layers(plan.placement.num_chunks)
    total, active = sum(prod(spec.shape) for spec in specs.values()), active_parameters(specs.values())
    used = [f"of them {active:,} take part in a token: of experts those that it goes through"] if active < total else []
    tokens = config.data.seq_len * config.data.microbatch_size * plan.microbatches * config.parallel.samples
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
        memory_table(memory),
        *staged_copies(memory),
        *recompute_note(memory),
        *coalesced_places(layout, plan),
        *bucket_tables(layout, plan),
        *(gradient_tables(layout, plan) if gradients else []),
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


def memory_table(memory: Memory) -> str:
    """MiB per pipeline rank by category, and at the peak of a run (docs/plan.md)."""
    names = "parameters", "gradients", "optimizer", "FP8 caches", "activations", "peak"
    widths = 11, 10, 10, 11, 12, 9
    header = "rank " + " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    words = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
    sizes = memory.config.parallel.sizes
    each = "".join(f", each of {sizes[axis]} {word} ranks" for axis, word in words.items() if sizes[axis] > 1)
    lines = [f"memory per pipeline rank{each} (MiB), predicted; activations with slots and workspaces:", header]
    for rank in range(memory.plan.num_ranks):
        held = memory.of(rank)
        sums = [held.categories[name] for name in ("main gradients", "moments", "FP8 weight caches")]
        first = held.categories["parameters"] + held.categories["masters"]
        cells = [first, *sums, sum(held.categories.values()) - first - sum(sums), held.peak]
        text = " ".join(f"{cell / MIB:>{width}.1f}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{rank:>4} {text}")
    return "\n".join(lines)


def staged_copies(memory: Memory) -> list[str]:
    """With ``checkpoint.async_save``, what the copy of a rank's state takes of host memory at most (but for a few KiB)."""
    if not memory.config.checkpoint.async_save:
        return []
    most = max(memory.state(rank) for rank in range(memory.plan.num_ranks))
    return ["", f"saving in the background: up to {most / MIB:.1f} MiB of host memory for a rank's copy of its state"]


def recompute_note(memory: Memory) -> list[str]:
    """With recompute, what it saves and makes again, of the first layer that it is for."""
    kinds = [kind for kind in memory.kinds if kind[1] != "none"]
    if not kinds:
        return []
    plain = memory.config.to_dict()
    plain["model"] |= {"recompute": "none", "recompute_layers": None}
    kept = rehearse(Config.from_dict(plain), memory.device)
    held = memory.rehearsed.layers[kinds[0]].f.left, kept.layers[kinds[0][0], "none"].f.left
    return [
        f"model.recompute {kinds[0][1]}, {len(kinds)} of {len(memory.kinds)} layers: between F and I a microbatch keeps "
        f"{held[0] / MIB:.1f} MiB of a layer",
        f"instead of {held[1] / MIB:.1f} MiB, and W's operands only from I on; I holds one layer's at a time",
    ]


def coalesced_places(layout: Layout, plan: Plan) -> list[str]:
    """With ``pipeline.coalesce_w``, per chunk how many places its operands of W have and how large one is."""
    if plan.coalesce_w == 1:
        return []
    lines = ["", f"W of {plan.coalesce_w} microbatches is one product; its operands in FP8 (part of the activations above):"]
    for rank, slots in enumerate(plan.slots):
        for chunk in plan.placement.chunks(rank):
            places, size = slots.w_slots.count[chunk], layout.place(layout.chunk(plan, chunk))
            lines.append(f"rank {rank}, chunk {chunk}: {places} places of {size:,} bytes, {places * size / MIB:.1f} MiB")
    return lines


def bucket_tables(layout: Layout, plan: Plan) -> list[str]:
    """With shared optimizer state, per pipeline rank the table of buckets and of who owns what (docs/data-parallel.md)."""
    tables = []
    for rank in range(plan.num_ranks):
        buckets = layout.buckets(plan, rank)
        if buckets is not None:
            title = f"buckets of pipeline rank {rank}, in elements of the flat buffers; "
            tables += ["", f"{title}dp i from: the first that replica i owns:", buckets.table(layout.grad_size)]
    return tables


def gradient_tables(layout: Layout, plan: Plan) -> list[str]:
    """Per pipeline rank, where each main gradient lies (docs/gradients.md)."""
    dtype, tables = optimizers.grad_dtype(layout.config), []
    for rank in range(plan.num_ranks):
        params = layout.params(plan, rank)
        entries, _ = layout.flat(params)
        tied = [param for param in params if param.tied_to is not None]
        title = f"main gradients of pipeline rank {rank}, in its flat buffer; chunk: whose work completes them:"
        tables += ["", title, gradient_table(entries, tied, dtype, layout.buckets(plan, rank))]
    return tables


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines()) + "\n"
