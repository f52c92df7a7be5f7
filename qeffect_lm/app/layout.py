"""A configuration's model cut into blocks: what each block holds, whatever rank it lies on. Nothing is allocated.

A plan puts consecutive blocks on a chunk, so what a rank holds of any layout is a sum over blocks, and many layouts of one
model are compared without building it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from models import build_model
from models.spec import ParameterSpec
from pipeline.plan import Plan
from pipeline.tied import TIED
from qeffect_lm.app import optimizer as optimizers
from qeffect_lm.app.assemble import DTYPES, make_recipe, shard_of
from qeffect_lm.app.counts import tokens_here
from qeffect_lm.app.holdings import local_spec, param_specs, shape_only
from qeffect_lm.config import Config
from qeffect_lm.layers.base import Deferred
from qeffect_lm.layers.joined import place_bytes, taking_part
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.moe import mixtures
from qeffect_lm.optim.buckets import BucketPlan
from qeffect_lm.optim.flat import Entry, ParamSpec, Shard, layout, plan_of
from qeffect_lm.optim.norm import BlockOrder
from qeffect_lm.parallel.mesh import Mesh, axes_of

PIECES = 20_000  # of buckets and replicas together, up to which who owns what is worked out exactly


@dataclass(frozen=True)
class Block:
    """A block of a chunk.

    Attributes:
        layer: which decoder layer it is; None: before (``first``) or after them.
        params: what the flat storage holds of it.
        cached: elements of weights that have FP8 caches.
        buffers: bytes of constants (tables of positions).
        joined: layers whose operands of W lie in places where several microbatches' W is one product.
        routes: whether it has experts.
    """

    layer: int | None
    first: bool
    params: tuple[ParamSpec, ...]
    cached: int
    buffers: int
    joined: tuple[Deferred, ...]
    routes: bool


@dataclass(frozen=True)
class Held:
    """Parameters of a pipeline rank, tied weights among them.

    Attributes:
        size, trained: elements without tied weights, and those of them that train.
        groups: group → elements whose gradients are reduced together, and those of them that no expert has.
        norm_blocks: blocks of the norm.
    """

    params: list[ParamSpec]
    size: int
    trained: int
    groups: dict[int, tuple[int, int]]
    norm_blocks: int


class Layout:
    """Blocks of a configuration's model, and what ranks hold of them.

    Raises:
        UsageError: the model cannot be built.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = DTYPES[config.precision.dtype]
        self.tp, ep = shape_only(config)
        self.model = build_model(config, make_recipe(config), self.dtype, self.tp, ep=ep)
        self.specs: dict[str, ParameterSpec] = {spec.name: spec for spec in self.model.parameters()}
        self.blocks = self._blocks()
        self._owned: dict[Any, tuple[int, int, int]] = {}
        self._held: dict[Any, Held] = {}
        self.even: set[int] = set()  # numbers of replicas whose shares of the state were taken as even

    def of(self, config: Config) -> Layout:
        """The same model under another layout, schedule or optimizer setting."""
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__ | {"config": config})
        return other

    def _blocks(self) -> list[Block]:
        chunk = self.model.meta_chunk(0, [self.config.model.num_layers])
        modules = [*chunk.blocks, *([] if chunk.loss is None else [chunk.loss])]
        found: list[Block] = []
        seen = 0
        for module in modules:
            head, _, number = getattr(module, "name", "").rpartition(".")
            layer = int(number) if head == "layers" else None
            seen += layer is not None
            linears = [m for m in module.modules() if isinstance(m, SplitLinear)]
            found.append(
                Block(
                    layer=layer,
                    first=layer is None and not seen,
                    params=tuple(param_specs(self.config, {0: module}, self.specs, self.model.ties, self.tp)),
                    cached=sum(linear.weight.numel() for linear in linears if linear.recipe is not None),
                    buffers=sum(buffer.nbytes for buffer in module.buffers()),
                    joined=tuple(taking_part(module.modules())),
                    routes=bool(mixtures(module)),
                )
            )
        return found

    @cached_property
    def total(self) -> int:
        """Parameters of the model."""
        return sum(prod(spec.shape) for spec in self.specs.values())

    def chunk(self, plan: Plan, index: int) -> list[Block]:
        """The blocks of a plan's chunk, in the model's order."""
        counts = self.config.chunk_layers(plan.placement.num_chunks)
        first, last = sum(counts[:index]), sum(counts[: index + 1])
        ends = index == 0, index == plan.placement.num_chunks - 1
        return [
            block
            for block in self.blocks
            if (first <= block.layer < last if block.layer is not None else ends[0] if block.first else ends[1])
        ]

    def rank(self, plan: Plan, rank: int) -> list[Block]:
        """All blocks of a rank's chunks."""
        return [block for index in plan.placement.chunks(rank) for block in self.chunk(plan, index)]

    def params(self, plan: Plan, rank: int) -> list[ParamSpec]:
        """The parameters and tied weights of one pipeline rank."""
        return self.held(plan, rank).params

    def held(self, plan: Plan, rank: int) -> Held:
        """The same with sums, made once for all layouts that put the same on a rank."""
        chunks = tuple(plan.placement.chunks(rank))
        key = tuple(self.config.chunk_layers(plan.placement.num_chunks)), chunks
        if key not in self._held:
            sources = self.model.ties.values()
            params = [
                replace(param, group=TIED if param.name in sources else index)
                for index in chunks
                for block in self.chunk(plan, index)
                for param in block.params
            ]
            trained: dict[int, tuple[int, int]] = {}
            for param in params:
                every, dense = trained.get(param.group, (0, 0))
                size = param.numel * param.trainable
                of_all = self.specs[param.tied_to or param.name].expert is None
                trained[param.group] = every + size, dense + size * of_all
            own = [param for param in params if param.tied_to is None]
            self._held[key] = Held(
                params,
                sum(param.numel for param in own),
                sum(param.numel for param in own if param.trainable),
                trained,
                sum(BlockOrder.blocks_of(param.numel) for param in params if param.trainable),
            )
        return self._held[key]

    # ---- the flat storage ----------------------------------------------------------------------------------------

    @property
    def grad_size(self) -> int:
        """Bytes of an element of main gradients."""
        return optimizers.grad_dtype(self.config).itemsize

    @property
    def master_size(self) -> int:
        return 8 if self.dtype is torch.float64 else 4

    @property
    def moment_size(self) -> int:
        dtype = optimizers.moment_dtype(self.config)
        return self.master_size if dtype is None else dtype.itemsize

    @property
    def tokens(self) -> int:
        """Of a microbatch, on a rank and its tensor-parallel peers."""
        return tokens_here(self.config)

    def place(self, blocks: Iterable[Block]) -> int:
        """Bytes of a W-slot of coalesced products of a chunk with these blocks."""
        return place_bytes([layer for block in blocks for layer in block.joined], self.tokens)

    @property
    def border(self) -> int:
        """Bytes of an activation between two chunks; with sequence parallelism a rank's part of it."""
        parallel = self.config.parallel
        share = parallel.tp if parallel.sequence_parallel else 1
        return self.tokens // share * self.config.model.hidden_size * self.dtype.itemsize

    def received(self, source: str) -> int:
        """Elements of a parameter on one rank."""
        return local_spec(self.specs[source], self.tp).numel

    @property
    def shard(self) -> Shard | None:
        """How the replicas share the optimizer's state; None where each has all of it."""
        return shard_of(self.config, Mesh({axis: self.config.parallel.sizes[axis] for axis in axes_of("replicas")}))

    def flat(self, params: Iterable[ParamSpec]) -> tuple[Mapping[str, Entry], list[int]]:
        """Where a rank's parameters lie, as :class:`~qeffect_lm.optim.flat.FlatBuffers` puts them."""
        sizes = self.master_size, self.moment_size, self.dtype.itemsize, self.grad_size
        return layout(list(params), sizes)

    def owned(self, plan: Plan, rank: int) -> tuple[int, int, int] | None:
        """With shared state elements of (masters, moments, what is received at once) of the replica that holds most; the same
        for ranks with equal blocks, so they are worked out once."""
        shard = self.shard
        if shard is None:
            return None
        held = self.held(plan, rank)
        every, trained = held.size, held.trained
        bucket = max(1, shard.bucket_bytes // self.grad_size)
        if shard.ranks * every > PIECES * bucket:  # the table itself would take minutes: even shares
            self.even.add(shard.ranks)
            return -(-every // shard.ranks), -(-trained // shard.ranks), min(every, bucket)
        sizes = tuple((param.numel, param.decay, param.group) for param in held.params if param.tied_to is None)
        groups = {group: i for i, group in enumerate(dict.fromkeys(group for _, _, group in sizes))}
        key = shard.ranks, shard.bucket_bytes, tuple((size, decay, groups[group]) for size, decay, group in sizes)
        if key not in self._owned:
            buckets = self.buckets(plan, rank)
            assert buckets is not None
            replicas = range(shard.ranks)
            received = (size for bucket in buckets.buckets if bucket.trainable for size in bucket.sizes)
            self._owned[key] = (
                max(buckets.owned(replica) for replica in replicas),
                max(buckets.owned(replica, trainable=True) for replica in replicas),
                shard.ranks * max(received, default=0),
            )
        return self._owned[key]

    def buckets(self, plan: Plan, rank: int) -> BucketPlan | None:
        """What a pipeline rank's replicas own; None without shared state."""
        shard = self.shard
        return None if shard is None else plan_of(*self.flat(self.params(plan, rank)), shard, self.grad_size)
