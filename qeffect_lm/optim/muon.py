"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Per logical matrix ``W`` ``[m, n]`` with gradient ``G`` (clipped as AdamW's is), momentum ``M`` and rate ``lr``:

    M = mu M + G;   U = G + mu M (Nesterov);   O = NewtonSchulz(U);   W = (1 - lr * decay) W - lr * 0.2 sqrt(max(m, n)) O

The Newton-Schulz iteration (five times, Jordan's coefficients) brings all singular values of ``U / |U|_F`` near 1. The factor
``0.2 sqrt(max(m, n))`` is Moonlight's (Liu et al., arXiv:2502.16982, section 2.2): it gives the update the root mean square
that AdamW's has, so both share one learning rate and one weight decay.

Only device work, in place, on buffers made once. A matrix always passes through the same scratch, so its update does not
depend on where it lies. The iteration's products run in bfloat16 on a GPU, as Jordan's do, elsewhere in the master's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
NORM_EPS = 1e-7
"""Added to the Frobenius norm: a gradient of zeros moves nothing."""

RowBlock = tuple[int, int, int]
"""``(groups, first, last)``: of a parameter's rows in ``groups`` equal runs, rows ``first`` to ``last`` of each run."""


@dataclass(frozen=True)
class Factors:
    """A step's 0-dim device tensors: whether it applies (bool), clip factor and ``1 - lr * decay`` (master's dtype; None:
    there is none), learning rate (float64)."""

    apply: torch.Tensor
    clip: torch.Tensor | None
    keep: torch.Tensor | None
    lr: torch.Tensor


@dataclass(frozen=True)
class _Matrix:
    """Live views ``[groups, rows / groups, cols]`` of one logical matrix, and the scratch for its shape."""

    master: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    g: torch.Tensor  # as the views, contiguous, master's dtype
    u: torch.Tensor
    low: torch.Tensor | None  # the momentum's dtype, where that is another
    wide: torch.Tensor  # the update as [r, c], r <= c: a view of u
    x: torch.Tensor  # [r, c] in the iteration's dtype
    y: torch.Tensor
    gram: torch.Tensor  # [r, r]
    gram2: torch.Tensor
    factor: float


class Muon:
    """Updates the matrices of one rank's :class:`FlatBuffers`; ``moment1`` holds the momentum, ``moment2`` stays zero.

    Args:
        matrices: parameter → the row blocks of its logical matrices (a fused ``qkv`` has three), which cover it once.
        momentum: ``mu``, at least 0 and below 1.

    Raises:
        UsageError: a momentum outside its range.
        ValueError: row blocks that do not cover their parameter's rows once.
    """

    def __init__(self, flat: FlatBuffers, matrices: Mapping[str, Sequence[RowBlock]], *, momentum: float) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"optim.muon_momentum is {momentum}; it must be at least 0 and below 1")
        if flat.buckets is not None:
            raise UsageError("optim.name=muon needs whole matrices on every replica: set optim.zero=0, or optim.name=adamw")
        self.names = frozenset(matrices)
        self.momentum = momentum
        self._flat = flat
        self._dtype = torch.bfloat16 if flat.device.type == "cuda" else flat.master_buffer.dtype
        self._lr = torch.zeros((), dtype=flat.master_buffer.dtype, device=flat.device)
        self._norm = torch.zeros((), dtype=flat.master_buffer.dtype, device=flat.device)
        for name, blocks in matrices.items():
            self._check_cover(name, blocks)
        shapes = [(name, block, self._shape(name, block)) for name, blocks in matrices.items() for block in blocks]
        largest = max([rows * cols for _, _, (rows, cols) in shapes], default=0)
        widest = max([min(shape) ** 2 for _, _, shape in shapes], default=0)
        wide, moments = flat.master_buffer.dtype, flat.moment1_buffer.dtype
        self._scratch = torch.zeros(2, largest, dtype=wide, device=flat.device)
        self._low = torch.zeros(largest if moments != wide else 0, dtype=moments, device=flat.device)
        self._iterates = torch.zeros(2, largest, dtype=self._dtype, device=flat.device)
        self._grams = torch.zeros(2, widest, dtype=self._dtype, device=flat.device)
        self._matrices = [self._matrix(name, block, shape) for name, block, shape in shapes]

    def _shape(self, name: str, block: RowBlock) -> tuple[int, int]:
        groups, first, last = block
        return groups * (last - first), self._flat.entry(name).spec.shape[1]

    def _check_cover(self, name: str, blocks: Sequence[RowBlock]) -> None:
        shape = self._flat.entry(name).spec.shape
        groups = {block[0] for block in blocks}
        run = shape[0] // min(groups)
        edges = [row for _, first, last in sorted(blocks) for row in (first, last)]
        whole = len(groups) == 1 and shape[0] % min(groups) == 0 and edges[::2] == [0, *edges[1:-1:2]] and edges[-1] == run
        if len(shape) != 2 or not whole:
            raise ValueError(f"{name} {list(shape)}: row blocks {list(blocks)} do not cover its rows once")

    def _matrix(self, name: str, block: RowBlock, shape: tuple[int, int]) -> _Matrix:
        flat, (rows, cols), (groups, first, last) = self._flat, shape, block
        size, r, c = rows * cols, min(shape), max(shape)

        def views(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(groups, tensor.shape[0] // groups, cols)[:, first:last]

        g, u = (self._scratch[i, :size].view(groups, last - first, cols) for i in range(2))
        low = self._low[:size].view_as(g) if self._low.numel() else None
        logical = self._scratch[1, :size].view(rows, cols)
        x, y = (self._iterates[i, :size].view(r, c) for i in range(2))
        gram, gram2 = (self._grams[i, : r * r].view(r, r) for i in range(2))
        return _Matrix(
            master=views(flat.master(name)),
            grad=views(flat.grad(name)),
            momentum=views(flat.moment1(name)),
            g=g,
            u=u,
            low=low,
            wide=logical if rows <= cols else logical.t(),
            x=x,
            y=y,
            gram=gram,
            gram2=gram2,
            factor=RMS * math.sqrt(c),
        )

    def update_(self, factors: Factors) -> None:
        """One step of every matrix's master and momentum; where ``apply`` is False they keep their bytes."""
        self._lr.copy_(factors.lr)
        for matrix in self._matrices:
            self._update(matrix, factors)

    def gather_(self) -> None:
        """Refresh the compute-dtype parameters from the masters, of these matrices only."""
        for name in sorted(self.names):
            self._flat.param(name).copy_(self._flat.master(name))

    def _update(self, matrix: _Matrix, factors: Factors) -> None:
        g, u = matrix.g, matrix.u
        g.copy_(matrix.grad)
        if factors.clip is not None:
            g.mul_(factors.clip)
        u.copy_(matrix.momentum)
        u.mul_(self.momentum)
        u.add_(g)
        kept = u
        if matrix.low is not None:
            matrix.low.copy_(u)
            kept = matrix.low
        torch.where(factors.apply, kept, matrix.momentum, out=matrix.momentum)
        u.mul_(self.momentum)
        u.add_(g)
        self._orthogonalise(matrix)
        u.mul_(self._lr)
        u.mul_(matrix.factor)
        if factors.keep is not None:
            torch.mul(matrix.master, factors.keep, out=g)
            g.sub_(u)
        else:
            torch.sub(matrix.master, u, out=g)
        torch.where(factors.apply, g, matrix.master, out=matrix.master)

    def _orthogonalise(self, matrix: _Matrix) -> None:
        """``u`` becomes the matrix with its singular vectors and singular values near 1."""
        a, b, c = COEFFICIENTS
        x, y, gram, gram2 = matrix.x, matrix.y, matrix.gram, matrix.gram2
        torch.linalg.vector_norm(matrix.u, out=self._norm)
        self._norm.add_(NORM_EPS)
        matrix.u.div_(self._norm)
        x.copy_(matrix.wide)
        for _ in range(ITERATIONS):  # x = a x + (b S + c S^2) x with S = x x'
            torch.mm(x, x.t(), out=gram)
            torch.mm(gram, gram, out=gram2)
            gram2.mul_(c)
            gram.mul_(b)
            gram2.add_(gram)
            torch.mm(gram2, x, out=y)
            x.mul_(a)
            x.add_(y)
        matrix.wide.copy_(x)
