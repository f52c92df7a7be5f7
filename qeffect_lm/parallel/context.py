"""Context parallelism: the tokens of a sequence are cut over ranks, and attention gathers the others' keys and values.

A row of tokens is cut into ``2 n`` chunks for ``n`` ranks; rank r holds chunks ``r`` and ``2 n - 1 - r``, in this order. A
token sees those before it, so late chunks are more work than early ones, and an early with a late one is the same work on
every rank (the cut of Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2).

    F   k and v of all ranks are gathered, in the row's order; each query attends to the keys up to its own place
    I   they are gathered again (only a rank's own were kept); dk and dv of the whole row are summed over the ranks, in float32
        or wider, and each keeps its tokens' part

All else of a decoder is about single tokens. Positions, documents, masks and random numbers are those of a token's place in the
whole row, so a rank computes what one process computes for its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.tensor import Exchange

if TYPE_CHECKING:
    from qeffect_lm.layers.context import LayerContext
    from qeffect_lm.parallel.mesh import Mesh


@dataclass(frozen=True)
class ContextParallel(Exchange):
    """A rank's place on the axis cp.

    Attributes:
        size, rank: of the axis, and this rank's coordinate.
        group: of the peers; None: of structures without storage, which communicate with nobody.
        others: the peers' global ranks.
    """

    axis = "cp"

    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    others: tuple[int, ...] = ()

    @staticmethod
    def of(mesh: Mesh) -> ContextParallel | None:
        """Of a mesh's axis cp; None where it has one rank."""
        size, rank = mesh.size("cp"), mesh.coord("cp")
        if size == 1:
            return None
        return ContextParallel(size, rank, mesh.group("cp"), tuple(mesh.others("cp")))

    # ---- which tokens are here ---------------------------------------------------------------------------------

    def runs(self, row: int) -> tuple[slice, slice]:
        """The places that this rank holds of a row of ``row`` tokens.

        Raises:
            UsageError: the row cannot be cut so.
        """
        chunk, rest = divmod(row, 2 * self.size)
        if rest or not chunk:
            raise UsageError(
                f"a sequence of {row} tokens (data.seq_len) cannot be cut into {2 * self.size} equal chunks, two for each of "
                f"parallel.cp {self.size} ranks: change one of them"
            )
        return tuple(slice(i * chunk, (i + 1) * chunk) for i in (self.rank, 2 * self.size - 1 - self.rank))  # type: ignore[return-value]

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """``[…, row]`` → this rank's ``[…, row / size]``."""
        return torch.cat([whole[..., run] for run in self.runs(whole.shape[-1])], dim=-1)

    def positions(self, sequence: int, device: torch.device | None = None) -> torch.Tensor:
        """int64: the places in the whole row of the ``sequence`` tokens that are here of it."""
        runs = self.runs(sequence * self.size)
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])

    def tokens(self, batch: int, sequence: int, device: torch.device | None = None) -> torch.Tensor:
        """int64 ``[batch * sequence]``: numbers in the whole microbatch of ``batch`` rows of the tokens that are here of it."""
        first = torch.arange(batch, device=device)[:, None] * (sequence * self.size)
        return (first + self.positions(sequence, device)).reshape(-1)

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def whole(self, part: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """``[batch, tokens here, …]`` of every rank → ``[batch, row, …]`` in the row's order, contiguous."""
        batch, sequence, *rest = part.shape
        n, chunk = self.size, sequence // 2
        gathered = self.gather(part.contiguous(), context, who).view(n, batch, 2, chunk, *rest)
        made = part.new_empty(batch, 2 * n, chunk, *rest)
        made[:, :n].copy_(gathered[:, :, 0].transpose(0, 1))
        made[:, n:].copy_(gathered[:, :, 1].flip(0).transpose(0, 1))
        return made.view(batch, 2 * n * chunk, *rest)

    def part_of_sum(self, whole: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        """``[batch, row, …]`` of every rank → this rank's ``[batch, tokens here, …]`` of their sum."""
        batch, row, *rest = whole.shape
        n, chunk = self.size, row // (2 * self.size)
        chunks = whole.view(batch, 2 * n, chunk, *rest)
        parts = whole.new_empty(n, batch, 2, chunk, *rest)
        parts[:, :, 0].copy_(chunks[:, :n].transpose(0, 1))
        parts[:, :, 1].copy_(chunks[:, n:].transpose(0, 1).flip(0))
        made = self.scatter_sum(parts.view(n * batch, 2 * chunk, *rest), context, who)
        return made.view(batch, 2 * chunk, *rest)
