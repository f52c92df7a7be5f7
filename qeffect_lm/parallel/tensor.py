"""Tensor parallelism as a rank's layers see it: their peers, and the collectives between them.

A layer's product is cut over the ranks of a group (Shoeybi et al. 2019, "Megatron-LM"). With *sequence parallelism*
(Korthikanti et al. 2022) what stands between products, norms, dropout and the residual stream, is cut along tokens: rank t of T
holds tokens ``t n / T … (t + 1) n / T`` of the ``n = batch * sequence`` of a microbatch, as ``[n / T, hidden]``.

    into a column-parallel product    F gathers tokens, I adds input gradients and keeps its own tokens
    out of a row-parallel product     F adds parts and keeps its own tokens, I gathers the output gradient
    without sequence parallelism      I adds input gradients, F adds parts; every rank has all tokens

Every collective is launched on the stream that computes, inside of its action, and told to the action's scope: it is an effect
of the action like any other (:meth:`~qeffect_lm.contract.ledger.Scope.collective`), part of the graph that is captured, and in
one order on all peers. On a GPU the library forks its own stream from ours and joins it again by events, which a capture
records as edges. W needs none: it reads what F and I gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from qeffect_lm import kernels
from qeffect_lm.parallel.peers import naming

if TYPE_CHECKING:
    from qeffect_lm.layers.context import LayerContext
    from qeffect_lm.parallel.mesh import Mesh


class Exchange:
    """Collectives of the ranks along one axis, made inside of an action. Every peer calls the same ones in the same order."""

    axis: ClassVar[str]
    size: int
    rank: int
    group: dist.ProcessGroup | None
    others: tuple[int, ...]

    def gather(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """``[n, …]`` of every rank → ``[size * n, …]`` in order of rank, the same bytes on all."""
        self._tell(context, who, "gather")
        made = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with naming(self.others, f"a gather of {who} over {self.axis}"):
            all_gather(made, x.contiguous(), group=self.group)
        return made

    def sum_(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """The sum over the ranks, in place and in the tensor's dtype; the same bytes on all."""
        self._tell(context, who, "sum")
        with naming(self.others, f"a sum of {who} over {self.axis}"):
            _all_reduce(x, group=self.group)
        return x

    def scatter_sum(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """``[size * n, …]`` → this rank's ``[n, …]`` of the sum over the ranks; ``x`` may be overwritten."""
        self._tell(context, who, "scatter")
        length = x.shape[0] // self.size
        x = x.contiguous()
        with naming(self.others, f"a sum of {who} over {self.axis}"):
            if kernels.on_gpu(x):
                made = x.new_empty(length, *x.shape[1:])
                _reduce_scatter(made, x, group=self.group)
                return made
            _all_reduce(x, group=self.group)  # gloo's own reduce-scatter does this, on a thread that no capture sees
            return x[self.rank * length : (self.rank + 1) * length].clone()

    @staticmethod
    def _tell(context: LayerContext, who: str, kind: str) -> None:
        if context.scope is not None:
            context.scope.collective(f"{who}.{kind}")


@dataclass(frozen=True)
class TensorParallel(Exchange):
    """A rank's place on the axis tp.

    Attributes:
        size, rank: of the axis, and this rank's coordinate.
        sequence: what stands between products is cut along tokens.
        group: of the peers; None: of structures without storage, which communicate with nobody.
        others: the peers' global ranks.
    """

    axis = "tp"

    size: int
    rank: int = 0
    sequence: bool = True
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    others: tuple[int, ...] = ()

    @staticmethod
    def of(mesh: Mesh, sequence: bool) -> TensorParallel | None:
        """Of a mesh's axis tp; None where it has one rank."""
        size, rank = mesh.size("tp"), mesh.coord("tp")
        if size == 1:
            return None
        return TensorParallel(size, rank, sequence, mesh.group("tp"), tuple(mesh.others("tp")))

    def tokens(self, total: int) -> slice:
        """The tokens of a microbatch that this rank holds between products."""
        if not self.sequence:
            return slice(0, total)
        length = total // self.size
        return slice(self.rank * length, (self.rank + 1) * length)

    # ---- at the borders of products ----------------------------------------------------------------------------

    def enter(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """F, into a column-parallel product: ``[tokens of this rank, features]`` → ``[tokens, features]``."""
        return self.gather(x, context, who) if self.sequence else x

    def enter_grad(self, dx: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """I of the same: the parts' sum, of this rank's tokens. ``dx`` may be overwritten."""
        return self.scatter_sum(dx, context, who) if self.sequence else self.sum_(dx, context, who)

    def leave(self, y: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """F, out of a row-parallel product: as :meth:`enter_grad`."""
        return self.scatter_sum(y, context, who) if self.sequence else self.sum_(y, context, who)

    def leave_grad(self, dy: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """I of the same: as :meth:`enter`."""
        return self.gather(dy, context, who) if self.sequence else dy


_all_reduce = dist.all_reduce
# Newer versions of torch call them single, and warn of the older names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
