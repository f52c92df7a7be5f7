"""The end of an optimizer step: reduce → finite vote → norm → clip → optimizer → commit → refresh.

Each piece is a method of device work only, so that it is captured like any action; what crosses ranks lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.ordered import OrderedSum
from pipeline.p2p import gather_rows
from pipeline.partial import PartialSums
from pipeline.sharded import ShardExchange
from pipeline.tied import TIED, TiedWeights
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.fp8.cache import WeightCache
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.norm import BlockOrder, BlockSums, TotalNorm
from qeffect_lm.optim.spikes import NOT_FINITE, SpikeGate
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import naming


@dataclass(frozen=True)
class StepResult:
    """Device tensors (0-dim) of one step, equal on every rank; reading one is a host synchronisation.

    Attributes:
        loss: mean over the step's valid tokens, in nats.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of the step.
        skipped: nothing was updated, since a gradient, an amax or the loss was not finite, or since loss or norm spiked.
        reason: why (int64), as :func:`~qeffect_lm.optim.spikes.reason_text` says it; 0 where nothing was skipped.
        routing: ``[layers, 2 + experts]`` float64, of models with experts: both losses of each layer's router, before their
            coefficients, and the valid tokens of each expert (:class:`~qeffect_lm.layers.router.Router`).
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    lr: torch.Tensor
    skipped: torch.Tensor
    reason: torch.Tensor
    routing: torch.Tensor | None = None


class StepEnd:
    """State and work of the step's end on one rank.

    Args:
        order: its holders are (pipeline stage, expert-parallel rank, tensor-parallel rank), the last fastest.
        counted: name in ``order`` → the parameter of ``flat`` that this rank counts under it; None: all, under their own names.
        routing: what this rank's routers sum up, a row for each decoder layer (of others' zeros); of one shape on all ranks.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        flat: FlatBuffers,
        optimizer: Optimizer,
        timeline: ScaleTimeline,
        cache: WeightCache,
        order: BlockOrder,
        microbatches: int,
        gate: SpikeGate | None = None,
        tied: TiedWeights | None = None,
        routing: torch.Tensor | None = None,
        rows: int = 0,
        counted: Mapping[str, str] | None = None,
    ) -> None:
        device = flat.device
        self._mesh, self._flat, self._optimizer = mesh, flat, optimizer
        self._timeline, self._cache = timeline, cache
        self.gate = gate
        self.tied = tied
        self._exchange = None if flat.buckets is None else ShardExchange(flat, mesh)
        self._partial = PartialSums(flat, mesh) if self.tensor else None
        longest = max((stop - start for chunk in flat.groups for start, stop in flat.ranges(chunk)), default=0)
        lines = ["ep"] if self._exchange is not None else ["ep", "replicas"]
        self._ordered = {
            line: OrderedSum(mesh, line, longest, flat.grad_buffer) for line in lines if mesh.group(line) is not None
        }
        self._sums = BlockSums(flat, order, mesh.coord("pp") * mesh.size("experts") + mesh.coord("experts"), counted)
        self._norm = TotalNorm(order, device)
        self._blocks = order.padded_blocks
        wide = torch.float64
        self.routing = torch.zeros(0, 0, dtype=wide, device=device) if routing is None else routing
        self.routed = torch.zeros_like(self.routing)  # of all stages and replicas
        more = self.routing.numel()
        self.losses = torch.zeros(microbatches, dtype=wide, device=device)  # per microbatch, on the last stage
        # The same before the division, per row of a microbatch: for reports, no part of the step.
        self.row_losses = torch.zeros(microbatches, rows, dtype=wide, device=device) if rows else None
        # This replica's routing, number of non-finite amax and loss.
        self._mine = torch.zeros(more + 2, dtype=wide, device=device)
        self._replicas = torch.zeros(mesh.size("data"), more + 2, dtype=wide, device=device)
        # One row per stage and rank of the line of experts: block sums, routing, number of non-finite amax slots, loss.
        self._row = torch.zeros(self._blocks + more + 2, dtype=wide, device=device)
        self._stage_row = torch.zeros_like(self._row)  # with sharded gradients: block sums of all replicas
        self._peer_rows = torch.zeros(mesh.size("experts"), self._row.numel(), dtype=wide, device=device)
        self._rows = torch.zeros(mesh.size("pp") * mesh.size("experts"), self._row.numel(), dtype=wide, device=device)
        self.apply = torch.ones((), dtype=torch.bool, device=device)
        self.reason = torch.zeros((), dtype=torch.int64, device=device)
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.never_skip = torch.zeros((), dtype=torch.bool, device=device)
        self.loss = torch.zeros((), dtype=wide, device=device)

    # ---- between graphs: what crosses ranks --------------------------------------------------------------------

    @property
    def replicated(self) -> bool:
        """Whether gradients are reduced over ranks that train on other tokens."""
        return self._mesh.group("data") is not None

    @property
    def exchanging(self) -> bool:
        """Whether F and I exchange with other ranks."""
        return self._mesh.size("peers") > 1

    @property
    def tensor(self) -> bool:
        """Whether there are tensor-parallel peers."""
        return self._mesh.size("tp") > 1

    @property
    def scratch(self) -> list[str]:
        """Attributes that hold what is on its way between ranks, by path."""
        found = [] if self._exchange is None else ["_exchange/received"]
        found += [f"_ordered.{line}/buffer" for line, ordered in self._ordered.items() if ordered.buffer.numel()]
        if self._partial is not None:
            found += [f"_partial/buffers.{chunk}" for chunk in self._partial.chunks]
            found += ["_partial/ordered/buffer"] * bool(self._partial.ordered.buffer.numel())
        return found + ([] if self.tied is None else [f"tied/received.{name}" for name in self.tied.received])

    def reduce_gradients_(self, chunk: int) -> None:
        """Sum a chunk's main gradients, on our own buffers: over tp those of which each peer has a part, over ep all but
        experts', and all over dp and cp. ``TIED``: of parameters that other layers' weights are."""
        if self._partial is not None:
            self._partial.sum_(chunk)
        for line, ordered in self._ordered.items():
            with naming(self._mesh.others(line), f"the reduction of chunk {chunk}'s gradients over {line}"):
                for start, stop in self._flat.ranges(chunk, line):  # what its ranks hold alike
                    ordered.sum_(self._flat.grad_buffer[start:stop])
        if self._exchange is not None:
            self._exchange.reduce_(chunk)

    def reduce_(self) -> None:
        """What is reduced at the step's end: without replicas, gradients of which each tp peer has a part; gradients of tied
        weights, added over their layers and then over replicas; open amax slots, max-merged."""
        if self._partial is not None and not self.replicated:
            for chunk in self._partial.chunks:
                self._partial.sum_(chunk)
        if self.tied is not None:
            self.tied.collect_()
            if self.replicated:
                self.reduce_gradients_(TIED)
        self.reduce_amax_()

    def reduce_amax_(self, directions: Iterable[Direction] = tuple(Direction)) -> None:
        """Max-merge open amax slots over all ranks of a pipeline stage (never over stages, whose roles differ); an expert's
        over its replicas.

        A NaN becomes an infinity first: a library's MAX may lose a NaN, and then ranks would disagree.
        """
        for line in ("replicas", "experts"):
            if self._mesh.group(line) is not None:
                for direction in directions:
                    self._merge_amax_(direction, line, "the reduction of amax")

    def _merge_amax_(self, direction: Direction, line: str, what: str) -> None:
        slots = self._timeline.open_amax[self._timeline.rows(direction, shared=line != "replicas")]
        if slots.numel():
            slots.nan_to_num_(nan=float("inf"), posinf=float("inf"))
            with naming(self._mesh.others(line), f"{what} over {line}"):
                dist.all_reduce(slots, op=dist.ReduceOp.MAX, group=self._mesh.group(line))

    def merge_weight_amax_(self) -> None:
        """After a refresh: the amax of each tp peer's piece of a weight becomes the whole weight's. What is saved between steps
        is then the same on all peers, and what one process would have. Nothing to do without peers."""
        if self._mesh.group("tp") is not None:
            self._merge_amax_(Direction.FORWARD, "tp", "the merge of weights' amax")

    def agree_on_(self, number: int) -> bool:
        """Whether all peers have the same 63-bit number; a host synchronisation."""
        mine = torch.tensor([number], dtype=torch.int64, device=self._flat.device)
        rows = torch.zeros(self._mesh.size("peers"), 1, dtype=torch.int64, device=self._flat.device)
        gather_rows(rows, mine, self._mesh, "peers")
        return bool((rows == number).all())

    def gather_loss_(self) -> None:
        gather_rows(self._replicas, self._mine, self._mesh, "data")

    def gather_(self) -> None:
        """Every stage's row to every stage. Of shards each block's sum comes from its owner, to which the others add zeros."""
        row = self._row
        if self._exchange is not None:
            row = self._stage_row.copy_(row)
            self._exchange.sum_(row[: self._blocks])
        gather_rows(self._peer_rows, row, self._mesh, "experts")
        stages = self._rows.view(self._mesh.size("pp"), -1)
        gather_rows(stages, self._peer_rows.view(-1), self._mesh, "pp")

    def share_(self) -> None:
        """After the optimizer: every replica gets the parameters that the others updated, and copies of tied weights follow.
        Nothing to do without shards and copies."""
        if self._exchange is not None:
            self._exchange.share_()
        if self.tied is not None:
            self.tied.share_()

    # ---- device work ------------------------------------------------------------------------------------------

    def sum_losses_(self) -> None:
        """Per-microbatch losses, added in microbatch order, and this replica's routing and count of non-finite amax."""
        self._mine.zero_()
        self._mine[:-2].copy_(self.routing.reshape(-1))
        for microbatch in range(self.losses.shape[0]):
            self._mine[-1].add_(self.losses[microbatch])
        self._timeline.non_finite_(self._mine[-2])

    def local_sums_(self) -> None:
        """This stage's block sums, its routing, count of non-finite amax and loss over all replicas, into the row to be
        gathered."""
        self._row[: self._blocks].copy_(self._sums.compute_())
        total = self._replicas[0].clone()
        for rank in range(1, self._replicas.shape[0]):
            total.add_(self._replicas[rank])
        self._row[self._blocks :].copy_(total)
        if self._mesh.coord("ep"):  # the same on all ep ranks, and counted once
            self._row[self._blocks :].zero_()
        if self._mesh.coord("tp"):  # so is the loss on all tp ranks; but they route tokens of their own, to experts of theirs
            self._row[-1].zero_()

    def optimizer_step_(self) -> None:
        """Vote, norm, clip, update, and the cast of the compute-dtype parameters. Equal rows give equal decisions."""
        self._norm.gathered.copy_(self._rows[:, : self._blocks])
        norm = self._norm.reduce_()
        if self.routed.numel():
            self.routed.copy_(self._rows[:, self._blocks : -2].sum(dim=0).view_as(self.routed))
        self.loss.copy_(self._rows[:, -1].sum())
        bad = self._rows[:, -2].sum()
        finite = torch.isfinite(norm) & torch.isfinite(self.loss) & (bad == 0)
        self.apply.copy_(finite)
        torch.mul(~finite, NOT_FINITE, out=self.reason)
        if self.gate is not None:
            self.apply.copy_(self.gate.check_(self.loss, norm, finite))
            self.reason.add_(self.gate.reason)
        self.skip.copy_(~self.apply)
        self._optimizer.step_(norm, self.apply)

    def veto_(self) -> None:
        """Have :meth:`optimizer_step_` skip, until the next gather: a rehearsal must not move weights."""
        self._rows[:, -2].fill_(1)

    def commit_(self) -> None:
        """Roll all histories (window ``step``); a skipped step rolls none and clears the window."""
        self._timeline.roll_(self.skip)

    def commit_direction_(self, direction: Direction) -> None:
        """Roll one direction (window ``microbatch``), where the step's fate is not known yet."""
        self._timeline.roll_(self.never_skip, (direction,))

    def refresh_(self) -> None:
        """Quantise every weight into its cache, once."""
        self._cache.refresh_()

    def result(self) -> StepResult:
        routed = self.routed if self.routed.numel() else None
        return StepResult(self.loss, self._norm.norm, self._optimizer.lr, self.skip, self.reason, routed)
