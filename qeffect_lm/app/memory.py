"""What a rank's memory is for, at the peak of each phase of a run; predicted, nothing is allocated.

What lies there all the time follows from shapes (:mod:`qeffect_lm.app.layout`). What microbatches hold is added up along the
plan's actions from what each part's work was seen to hold (:mod:`qeffect_lm.app.rehearsal`). Captured graphs keep their
memory: on a GPU a pool for each pair of slots, or one for the step; ``host_replay`` keeps every tensor that was ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pipeline.actions import Kind
from pipeline.ordered import buffer_of
from pipeline.partial import sizes_of
from pipeline.plan import Plan
from qeffect_lm.app.layout import Block, Layout
from qeffect_lm.app.rehearsal import Held, PartBytes, Rehearsed, layer_kinds
from qeffect_lm.config import Config
from qeffect_lm.kernels.cublaslt_api import WORKSPACE_BYTES
from qeffect_lm.kernels.cudnn_attention import scores_bytes
from qeffect_lm.optim.adamw import CPU_CHUNK
from qeffect_lm.optim.buckets import BLOCK
from qeffect_lm.optim.norm import ROWS

RESIDENT = "parameters", "masters", "moments", "main gradients", "FP8 weight caches", "slots and inputs", "workspaces"
PASSING = "I leases", "W leases", "logits", "work in progress"
STATE = "parameters", "masters", "moments", "FP8 weight caches"
CATEGORIES = (*RESIDENT, *PASSING)
START, COMPUTE, OPTIMIZER, SAVE = "calibration and capture", "forward and backward", "optimizer step", "save"
Counts = tuple[int, int]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        categories: at the peak of forward and backward, by :data:`CATEGORIES`.
        phases: all of it at the peak of each phase; a phase that a run has not is left out.
        host: of a GPU's host, for a copy of the state that is saved in the background.
    """

    categories: dict[str, int]
    phases: dict[str, int]
    host: int = 0

    @property
    def peak(self) -> int:
        return max(self.phases.values())


@dataclass(frozen=True)
class ChunkBytes:
    """One microbatch of a chunk, as :class:`PartBytes`; ``logits`` are in it from F to W."""

    f: Held = Held()
    i: Held = Held()
    w: Held = Held()
    logits: int = 0
    retried: int = 0  # most alive in I beside F's and I's results, where I is captured more than once and so lets nothing go


def chunk_bytes(parts: Sequence[PartBytes], border: int, logits: int = 0) -> ChunkBytes:
    """A chunk from its parts in the model's order. Between two parts there is one activation of ``border`` bytes more."""
    if not parts:
        return ChunkBytes()
    before = [sum(part.f.left for part in parts[:k]) for k in range(len(parts))]
    waiting = [sum(part.i.left for part in parts[:k]) for k in range(len(parts))]
    total, last = sum(part.i.left for part in parts), len(parts) - 1
    out = 0 if logits else border  # autograd's end, which the slot keeps until I is done
    f = Held(
        sum(part.f.left for part in parts),
        max(left + part.f.peak for left, part in zip(before, parts, strict=True)),
        sum(part.f.made for part in parts),
    )
    i = Held(
        total,
        max(
            before[k] + part.i.peak + total - waiting[k] - part.i.left + (k < last) * (border + out)
            for k, part in enumerate(parts)
        ),
        sum(part.i.made for part in parts),
    )
    w = Held(
        sum(part.w.left for part in parts),
        max(left + part.w.peak for left, part in zip(waiting, parts, strict=True)),
        sum(part.w.made for part in parts),
    )
    return ChunkBytes(f, i, w, logits, max(part.i.peak - part.f.left for part in parts) + border)


@dataclass
class _Sum:
    """What a rank's microbatches hold at the fullest moment of a step."""

    peak: int = 0
    categories: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PASSING, 0))


def along(plan: Plan, rank: int, chunks: dict[int, ChunkBytes]) -> _Sum:
    """Walk a rank's actions: F leaves what I reads, I leaves what W reads; each needs more while it runs."""
    found, held = _Sum(), 0
    after_f, after_i = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
    for action in plan.actions[rank]:
        if action.kind not in (Kind.F, Kind.I, Kind.W):
            continue
        index = action.key[0]
        chunk = chunks[index]
        work = {Kind.F: chunk.f.peak, Kind.I: chunk.i.peak - chunk.f.left, Kind.W: chunk.w.peak - chunk.i.left}[action.kind]
        if held + work > found.peak:
            logits = sum((after_f[c] + after_i[c]) * chunks[c].logits for c in chunks)
            leases = [sum(n[c] * getattr(chunks[c], k).left for c in chunks) for n, k in ((after_f, "f"), (after_i, "i"))]
            in_i = min(leases[0], sum(after_f[c] * chunks[c].logits for c in chunks))
            parts = leases[0] - in_i, leases[1] - (logits - in_i), logits, work
            found = _Sum(held + work, dict(zip(PASSING, (max(0, part) for part in parts), strict=True)))
        if action.kind is Kind.F:
            after_f[index] += 1
        elif action.kind is Kind.I:
            after_f[index] -= 1
            after_i[index] += 1
        else:
            after_i[index] -= 1
        held = sum(after_f[c] * chunks[c].f.left + after_i[c] * chunks[c].i.left for c in chunks)
    return found


def resident_bytes(layout: Layout, plan: Plan, rank: int, device: str) -> dict[str, int]:
    """What lies there all the time, by :data:`RESIDENT`."""
    sums, blocks = layout.held(plan, rank), layout.rank(plan, rank)
    held, size, trained = sums.params, sums.size, sums.trained
    names = {param.name for param in held if param.tied_to is None}
    tied = [param for param in held if param.tied_to is not None]
    copies = sum(param.numel for param in tied if param.tied_to not in names)
    # What arrives from other ranks before it is added: of copies of tied weights, and of others that sum gradients a bucket's.
    here = {param.name for param in held}
    ties = layout.model.ties.items()
    received = sum(layout.received(source) for copy, source in ties if source in here and copy not in here)
    owned, moments = size, trained  # by the replica that owns most
    shared = layout.owned(plan, rank)
    if shared is not None:
        owned, moments, received = shared[0], shared[1], received + shared[2]
    longest, parallel = max((every for every, _ in sums.groups.values()), default=0), layout.config.parallel
    received += buffer_of(parallel.ep, longest) + (buffer_of(parallel.dp * parallel.cp, longest) if shared is None else 0)
    if parallel.tp > 1:
        parts = sizes_of(param for param in held if param.trainable and param.tied_to is None).values()
        received += sum(parts) + buffer_of(parallel.tp, max(parts, default=0))
    separate = layout.dtype.itemsize != layout.master_size
    gradients = trained + sum(param.numel for param in tied if param.trainable) + received
    return {
        "parameters": (size * separate + copies) * layout.dtype.itemsize,
        "masters": (owned if separate else size) * layout.master_size,
        "moments": 2 * moments * layout.moment_size,
        "main gradients": gradients * layout.grad_size,
        "FP8 weight caches": 2 * sum(block.cached for block in blocks),
        "slots and inputs": _borders(layout, plan, rank) + sum(block.buffers for block in blocks),
        "workspaces": _workspaces(layout, plan, rank, blocks, device),
    }


def _borders(layout: Layout, plan: Plan, rank: int) -> int:
    """Slots' own buffers, W-slots of coalesced products, and the step's tokens."""
    data, slots = layout.config.data, plan.slots[rank]
    documents, tokens = data.documents == "reset", layout.tokens
    total, ends = 0, [False] * 3  # of the rank: first chunk, last chunk, a chunk that masks losses
    for index in plan.placement.chunks(rank):
        blocks = layout.chunk(plan, index)
        first, last = index == 0, index == plan.placement.num_chunks - 1
        masked = last or any(block.routes for block in blocks)
        activations = (not first) * 2 + (not last) * 2
        per_token = first * 8 + last * 8 + masked * 4 + documents * 4
        total += slots.i_slots.count[index] * (activations * layout.border + per_token * tokens)
        if plan.coalesce_w > 1:
            total += slots.w_slots.count[index] * layout.place(blocks)
        ends = [before or now for before, now in zip(ends, (first, last, masked), strict=True)]
    return total + plan.microbatches * tokens * (ends[0] * 8 + ends[1] * 8 + ends[2] * 4 + documents * 4)


def _workspaces(layout: Layout, plan: Plan, rank: int, blocks: Sequence[Block], device: str) -> int:
    """Of libraries on a GPU; of the optimizer and the norm on a CPU; sums of the norm's blocks."""
    sums = 8 * layout.held(plan, rank).norm_blocks * (2 * plan.num_ranks + 3)
    if device == "cpu":
        scratch = min(CPU_CHUNK, sum(param.numel for block in blocks for param in block.params))
        return sums + 3 * scratch * layout.master_size + ROWS * BLOCK * 8
    model, data = layout.config.model, layout.config.data
    group = model.num_heads // model.num_kv_heads
    heads = -(-model.num_kv_heads // layout.config.parallel.tp)
    shape = data.microbatch_size, data.seq_len, heads, group + 2, model.head_dim
    qkv = torch.empty(shape, dtype=layout.dtype, device="meta")
    attends = any(block.layer is not None for block in blocks) and layout.dtype is torch.bfloat16
    ours = data.documents == "reset" or layout.config.parallel.cp > 1  # kernels of our own, without a workspace
    return sums + WORKSPACE_BYTES + scores_bytes(qkv) * (attends and not ours)


class Memory:
    """Predicts every rank of a plan.

    Args:
        layout: of the configuration that is planned.
        rehearsed: what its parts hold, on the kind of device that is planned for.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, layout: Layout, plan: Plan, rehearsed: Rehearsed, device: str) -> None:
        self.layout, self.plan, self.rehearsed, self.device = layout, plan, rehearsed, device
        self.config: Config = layout.config
        self.kinds = layer_kinds(self.config)
        self.tokens = layout.tokens
        self.border = layout.border

    # ---- one rank ------------------------------------------------------------------------------------------------

    def of(self, rank: int) -> RankMemory:
        """Bytes of pipeline rank ``rank`` (of its replicas the one that holds most)."""
        resident = resident_bytes(self.layout, self.plan, rank, self.device)
        static = sum(resident.values())
        chunks = {index: self.chunk(index) for index in self.plan.placement.chunks(rank)}
        walk = along(self.plan, rank, chunks)
        end = self._end(rank)
        graphs, categories = self.config.graphs, resident | walk.categories
        state = sum(resident[name] for name in STATE)
        copy = state if self.config.checkpoint.async_save else 0
        on_device = copy if self.device == "cpu" else 0
        start = self._calibration(rank)
        if graphs.backend == "eager":
            phases = {COMPUTE: walk.peak, OPTIMIZER: end[0], SAVE: on_device}
        elif graphs.backend == "host_replay":
            pool = self._tapes(rank, chunks) + end[1]
            start = max(start, pool + state)  # a capture runs its work, so it copies what that would change
            phases = {COMPUTE: pool, OPTIMIZER: pool, SAVE: pool + on_device}
            categories["work in progress"] += max(0, pool - walk.peak)
        else:
            pool = max(walk.peak, end[0]) if graphs.scope == "step" else self._pools(rank, chunks) + end[0]
            start = max(start, pool)
            phases = {COMPUTE: pool, OPTIMIZER: pool, SAVE: pool}
            categories["work in progress"] += max(0, pool - walk.peak)
        if start:
            phases = {START: start, **phases}
        return RankMemory(categories, {name: static + size for name, size in phases.items()}, copy - on_device)

    def state(self, rank: int) -> int:
        """Bytes of what a checkpoint saves of a rank."""
        resident = resident_bytes(self.layout, self.plan, rank, self.device)
        return sum(resident[name] for name in STATE)

    def chunk(self, index: int) -> ChunkBytes:
        """One microbatch of a chunk."""
        last = index == self.plan.placement.num_chunks - 1
        vocab = -(-self.config.model.vocab_size // self.config.parallel.tp)
        logits = self.tokens * vocab * self.layout.dtype.itemsize if last else 0
        rehearsed = self.rehearsed
        return chunk_bytes(self._parts(index, rehearsed.embedding, rehearsed.layers, rehearsed.head), self.border, logits)

    def _parts(self, index: int, embedding: PartBytes, layers: dict, head: PartBytes) -> list[PartBytes]:
        found, blocks = [], self.layout.chunk(self.plan, index)
        if any(block.first for block in blocks):
            found.append(embedding)
        for block in blocks:
            if block.layer is not None:
                part = layers[self.kinds[block.layer]]
                found.append(_until_w(part) if self.config.model.backend == "te" else part)
        if index == self.plan.placement.num_chunks - 1:
            found.append(head)
        return found

    # ---- other phases --------------------------------------------------------------------------------------------

    def _calibration(self, rank: int) -> int:
        if self.rehearsed.calibration is None:
            return 0
        parts = [part for c in self.plan.placement.chunks(rank) for part in self._parts(c, *self.rehearsed.calibration)]
        return max(chunk_bytes(parts, self.border).i.peak, chunk_bytes(parts, self.border).f.peak) if parts else 0

    def _end(self, rank: int) -> Counts:
        """Bytes at the peak of a step's end, and all that it makes."""
        elements = self.layout.held(self.plan, rank).size
        at = [[max(0.0, a + b * elements) for a, b in piece] for piece in self.rehearsed.end.values()]
        return round(max(peak for peak, _ in at)), round(sum(made for _, made in at))

    def _tapes(self, rank: int, chunks: dict[int, ChunkBytes]) -> int:
        """Everything that the tapes of ``host_replay`` made: of each graph, or of each action of the step."""
        if self.config.graphs.scope == "step":
            work = [(action.kind, action.key[0]) for action in self.plan.actions[rank] if action.is_compute]
        else:
            work = [(key.kind, key.chunk) for key in self.plan.graph_keys(rank)]
        made = {Kind.F: "f", Kind.I: "i", Kind.W: "w"}
        return sum(getattr(chunks[index], made[kind]).made for kind, index in work)

    def _pools(self, rank: int, chunks: dict[int, ChunkBytes]) -> int:
        """A GPU's pools: of each pair of slots the graphs of F, and of I and W for each beta."""
        betas: dict[tuple[int, int, int], set[int | None]] = {}
        for key in self.plan.graph_keys(rank):
            betas.setdefault((key.chunk, key.i_slot, key.w_slot), set()).update({key.beta} - {None})
        total = 0
        for (index, _, _), several in betas.items():
            chunk = chunks[index]
            if len(several) > 1:
                total += max(chunk.f.peak, chunk.f.left + chunk.retried + len(several) * chunk.i.left)
            else:
                total += max(chunk.f.peak, chunk.i.peak, chunk.w.peak)
        return total


def _until_w(part: PartBytes) -> PartBytes:
    """Transformer Engine's layers keep all that they saved until W."""
    left = max(part.f.left, part.i.left)
    w = Held(part.w.left, part.w.peak + left - part.i.left, part.w.made)
    return replace(part, i=replace(part.i, left=left, peak=max(part.i.peak, left)), w=w)
