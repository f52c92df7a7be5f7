"""Expert parallelism: a layer's experts spread over ranks, and rows that travel to them and back.

The experts of a layer lie on a line of ranks, of size S: expert e of E is whole on rank ``e // (E / S)``, and a parameter of
that rank alone. Every rank routes tokens of its own. A row, one of a token's k, goes to its expert's rank (*dispatch*) and its
result comes back (*combine*), both by all-to-all; nothing is dropped (GShard: Lepikhin et al. 2020; Megatron-LM's all-to-all
dispatcher).

    F   splits      how many rows each rank has for each of the others' experts
        dispatch    rows [rows, hidden] to their experts, there sorted by expert, then by source rank, then by token
        weights     the router's weight of each of them goes with it
        combine     results back; a token's k are added in the router's order, as in one process
    I   dispatch    gradients of results, the way that the rows went
        combine     gradients of rows back, and
        weights     of their weights

How many rows go where is known on the device only. Two ways, which give the same bits:

* *static*, in a graph: every rank sends every other as many rows as it could ever get of it, ``tokens * min(k, E / S)``. Shapes
  say nothing of the routing, so one graph serves all of them and the host reads nothing. What is not needed is padding: it lies
  behind the last group's rows, belongs to no group, and no amax, scale, product or sum knows of it;
* *exact*, in eager execution: the host reads the splits, and rows alone travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.grouped import Groups, by_group
from qeffect_lm.parallel.peers import naming

if TYPE_CHECKING:
    from qeffect_lm.layers.context import LayerContext
    from qeffect_lm.parallel.mesh import Mesh

LINE, TOKENS = "experts", "tokens"  # of the mesh: whose ranks share a layer's experts, and whose a microbatch's tokens


@dataclass(frozen=True)
class ExpertParallel:
    """A rank's place among those that share a layer's experts.

    Attributes:
        size, rank: of their line, and this rank's place on it.
        axis: what the line runs along, for messages: ``ep``, ``tp`` or ``ep x tp``.
        group: of the line's ranks; None: of structures without storage, which communicate with nobody.
        others: the other ranks' global numbers.
        cut: so many ranks have a part of each microbatch's tokens.
        cut_axis, cut_group, cut_others: of those.
    """

    size: int
    rank: int = 0
    axis: str = "ep"
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    others: tuple[int, ...] = ()
    cut: int = 1
    cut_axis: str = "tp"
    cut_group: dist.ProcessGroup | None = field(default=None, compare=False)
    cut_others: tuple[int, ...] = ()

    @staticmethod
    def of(mesh: Mesh) -> ExpertParallel | None:
        """Of a mesh; None where every rank has all experts and whole microbatches."""
        if mesh.size(LINE) == 1 and mesh.size(TOKENS) == 1:
            return None
        others, cut_others = (tuple(peer for peer in mesh.peers(line) if peer != mesh.rank) for line in (LINE, TOKENS))
        return ExpertParallel(
            mesh.size(LINE), mesh.coord(LINE), _along(mesh, "ep", "tp"), mesh.group(LINE), others,
            mesh.size(TOKENS), _along(mesh, "cp", "tp"), mesh.group(TOKENS), cut_others,
        )  # fmt: skip

    def place(self, rank: int) -> ExpertParallel:
        """Another rank's, which communicates with nobody."""
        return replace(self, rank=rank, group=None, cut_group=None)

    def held(self, experts: int) -> range:
        """Numbers of the experts here, of all.

        Raises:
            UsageError: they do not divide.
        """
        if experts % self.size:
            raise UsageError(
                f"model.moe.num_experts {experts} is not divisible by the {self.size} ranks that share them "
                f"(parallel.{self.axis.replace('x ', 'x parallel.')}): change one of them"
            )
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    # ---- collectives: every peer calls the same ones in the same order -----------------------------------------

    def exchange(
        self,
        rows: torch.Tensor,
        context: LayerContext,
        who: str,
        what: str,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> torch.Tensor:
        """All-to-all of ``rows`` ``[n, …]``, in order of rank on both sides: so many for and from each rank, None: as many for
        each."""
        _tell(context, f"{who}.{what}")
        made = rows.new_empty(rows.shape[0] if received is None else sum(received), *rows.shape[1:])
        with naming(self.others, f"the {what} of {who} over {self.axis}"):
            _all_to_all(made, rows.contiguous(), received, sent, group=self.group)
        return made

    def sum_over_tokens(self, values: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """The sum, in place, over the ranks that have parts of a microbatch's tokens."""
        if self.cut > 1:
            _tell(context, f"{who}.sum")
            with naming(self.cut_others, f"a sum of {who} over {self.cut_axis}"):
                _all_reduce(values, group=self.cut_group)
        return values

    def most_rows(self, tokens: int, k: int, experts: int) -> int:
        """Rows that could come here, with ``k`` each of as many ``tokens`` on every rank."""
        return self.size * rows_between(tokens, k, len(self.held(experts)), self.size)

    # ---- where rows go -----------------------------------------------------------------------------------------

    def dispatched(
        self,
        experts: torch.Tensor,
        offsets: torch.Tensor,
        order: torch.Tensor,
        rows: torch.Tensor,
        context: LayerContext,
        who: str,
    ) -> Dispatch:
        """Settle with the others where this microbatch's rows go.

        Args:
            experts: ``[tokens, k]`` int64, the experts of each token.
            offsets: ``[experts + 1]`` int32, where each expert's assignments begin, sorted.
            order: ``[tokens * k]`` int64, the assignments sorted by expert, stably.
            rows: ``[tokens, k]`` int64, its inverse.
        """
        each = len(self.held(offsets.shape[0] - 1))
        (tokens, k), device = experts.shape, experts.device
        first = offsets.long()
        going = (first[1:] - first[:-1]).view(self.size, each)
        coming = self.exchange(going, context, who, "splits")  # [source, expert here]
        if host_reads(experts):
            sent, received = torch.stack([going.sum(dim=1), coming.sum(dim=1)]).tolist()
            here = torch.arange(each, device=device).repeat(self.size)
            of_slot = here.repeat_interleave(coming.reshape(-1), output_size=sum(received))
            splits, slots, places = (sent, received), order, rows
        else:
            most = rows_between(tokens, k, each, self.size)
            slot = torch.arange(most, device=device)
            of_slot = torch.searchsorted(coming.cumsum(dim=1), slot.expand(self.size, most).contiguous(), right=True)
            start = first[:-1].view(self.size, each)[:, 0]
            slots = order.index_select(0, (start[:, None] + slot).clamp_(max=tokens * k - 1).view(-1))
            shift = torch.arange(self.size, device=device) * most - start
            places = rows + shift.index_select(0, experts.reshape(-1) // each).view_as(rows)
            splits = None
        groups, arrived, back = by_group(of_slot.reshape(-1), each + 1)  # the last: padding, which is no group
        groups = Groups(groups.offsets[:-1], groups.of_row)
        if not arrived.shape[0]:  # nothing came: one row of padding, since there are things that need a row
            groups, arrived = replace(groups, of_row=groups.of_row.new_full((1,), each)), arrived.new_zeros(1)
        return Dispatch(groups, slots, places, arrived, back, self, who, splits)


@dataclass(frozen=True)
class Dispatch:
    """Where rows go over ranks; as :class:`~qeffect_lm.layers.moe.Routing` does within one.

    Attributes:
        groups: rows of the experts here, of all ranks' tokens; padding behind them.
        slots: ``[sent]`` int64, which of the ``tokens * k`` assignments each sent row is (of padding: any).
        places: ``[tokens, k]`` int64, the rows of each token among those sent, in the router's order.
        arrived: ``[rows]`` int64, which received row each row is; ``back`` ``[received]`` is the inverse.
        parallel, who: between whom, and for which layer.
        splits: rows to and from each rank; None: as many to and from each, padding included.
    """

    groups: Groups
    slots: torch.Tensor
    places: torch.Tensor
    arrived: torch.Tensor
    back: torch.Tensor
    parallel: ExpertParallel
    who: str
    splits: tuple[list[int], list[int]] | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.groups.offsets, self.groups.of_row, self.slots, self.places, self.arrived, self.back

    def of_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Dispatch:
        """The same again, of what :meth:`tensors` gave."""
        offsets, of_row, slots, places, arrived, back = tensors
        return replace(self, groups=Groups(offsets, of_row), slots=slots, places=places, arrived=arrived, back=back)

    def spread(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[tokens, features]`` → the rows of the experts here, ``[rows, features]``."""
        return self._there(x.index_select(0, self.slots // self.places.shape[1]), context, "dispatch")

    def weights_of_rows(self, weights: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[tokens, k]`` → ``[rows, 1]``."""
        return self._there(weights.reshape(-1).index_select(0, self.slots), context, "weights")[:, None]

    def collect(self, rows: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, features]`` → all rows of the tokens here, and where among them each token's lie, ``[tokens, k]``."""
        return self._here(rows, context, "combine"), self.places

    def weights_of_tokens(self, of_rows: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[rows]`` → ``[tokens, k]``."""
        return self._here(of_rows, context, "weights").index_select(0, self.places.reshape(-1)).view_as(self.places)

    def _there(self, rows: torch.Tensor, context: LayerContext, what: str) -> torch.Tensor:
        sent, received = (None, None) if self.splits is None else self.splits
        came = self.parallel.exchange(rows, context, self.who, what, received, sent)
        if not came.shape[0]:
            came = came.new_zeros(1, *came.shape[1:])
        return came.index_select(0, self.arrived)

    def _here(self, rows: torch.Tensor, context: LayerContext, what: str) -> torch.Tensor:
        sent, received = (None, None) if self.splits is None else self.splits
        return self.parallel.exchange(rows.index_select(0, self.back), context, self.who, what, sent, received)


def rows_between(tokens: int, k: int, each: int, ranks: int) -> int:
    """Rows that one of ``ranks`` ranks sends another, with ``each`` of the experts, where no shape may tell of the routing: the
    most that there could be."""
    return tokens * min(k, each)


def host_reads(tensor: torch.Tensor) -> bool:
    """Whether the host may read what is on the device now: nothing records the work, and there is data."""
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return _get_current_dispatch_mode() is None


def _tell(context: LayerContext, name: str) -> None:
    if context.scope is not None:
        context.scope.collective(name)


def _along(mesh: Mesh, *axes: str) -> str:
    return " x ".join(axis for axis in axes if mesh.size(axis) > 1) or axes[-1]


_all_reduce = dist.all_reduce
_all_to_all = dist.all_to_all_single
