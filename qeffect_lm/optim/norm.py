"""The global gradient norm, the same bits for every schedule and every number of pipeline stages.

Each parameter is cut into blocks of 65,536 elements (the last one shorter). A block's squared sum is formed
in float64; the sums of all stages are put in (parameter, block) order, where the order of parameters is
global, and added in that order by a tree over neighbours. Nothing in this depends on which stage held which
parameter, on where a parameter lies in a flat buffer, or on the number of CPU threads:

* where tensor parallelism cuts a parameter, each rank's piece is a parameter of its own here, and counts on its rank alone;
* shards are cut at block edges only: a replica that owns part of the gradient sums whole blocks, and leaves zeros for the rest;
* a block is always summed as one row of a matrix of one fixed shape ``[rows, 65536]``, zero-padded, because
  a reduction's rounding may depend on its shape (on CPU a 1-D sum of a block differs from the same block as
  a row; on GPU the split over threads depends on the number of rows);
* on a GPU one kernel gives each block to one program, whose order of additions is fixed;
* the tree consists of elementwise additions only, ``x[0::2] + x[1::2]`` until one value is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qeffect_lm import kernels
from qeffect_lm.optim.buckets import BLOCK
from qeffect_lm.optim.flat import Entry, FlatBuffers

ROWS = 8
"""Blocks summed at once (a 4 MiB float64 scratch)."""


class BlockOrder:
    """Who holds which block, and where its sum goes.

    ``params`` lists (name, number of elements) of every trainable parameter of the model in global order;
    ``stages`` lists, per pipeline stage, the names it holds (in any order). Each parameter must lie on
    exactly one stage. ``padded_blocks`` is the length of every stage's row of sums, so that one all-gather
    of equal sizes moves them.

    Raises ValueError when ``stages`` does not partition ``params``.
    """

    def __init__(self, params: Sequence[tuple[str, int]], stages: Sequence[Sequence[str]]) -> None:
        self.sizes = dict(params)
        if len(self.sizes) != len(params):
            raise ValueError("a parameter is listed twice in the global order")
        owner: dict[str, int] = {}
        for stage, names in enumerate(stages):
            for name in names:
                if name not in self.sizes:
                    raise ValueError(f"stage {stage} holds {name!r}, which the global order does not list")
                if name in owner:
                    raise ValueError(f"{name!r} is on stages {owner[name]} and {stage}: it would count twice")
                owner[name] = stage
        missing = [name for name in self.sizes if name not in owner]
        if missing:
            raise ValueError(f"no stage holds {', '.join(missing)}")
        self.num_stages = len(stages)
        self._owner = owner
        self.padded_blocks = max([1, *(self.local_blocks(stage) for stage in range(self.num_stages))])

    @staticmethod
    def blocks_of(numel: int) -> int:
        """Number of blocks of a parameter with ``numel`` elements."""
        return -(-numel // BLOCK)

    @property
    def total_blocks(self) -> int:
        return sum(self.blocks_of(size) for size in self.sizes.values())

    def local_names(self, stage: int) -> list[str]:
        """The parameters of one stage, in global order: the order of its sums."""
        return [name for name in self.sizes if self._owner[name] == stage]

    def local_blocks(self, stage: int) -> int:
        return sum(self.blocks_of(self.sizes[name]) for name in self.local_names(stage))

    def index(self) -> list[int]:
        """Position of each block, in (parameter, block) order, in the flattened ``[stages, padded_blocks]``
        sums."""
        used = [0] * self.num_stages
        positions: list[int] = []
        for name, size in self.sizes.items():
            stage = self._owner[name]
            for _ in range(self.blocks_of(size)):
                positions.append(stage * self.padded_blocks + used[stage])
                used[stage] += 1
        return positions


class BlockSums:
    """Squared sums of one stage's main gradients, float64, one per block.

    ``sums`` is ``[padded_blocks]``, zero behind the stage's own blocks, rewritten in place by
    :meth:`compute_`. With sharded buffers it is zero too where another replica owns the block: the replicas' sums add up to
    those of the stage without rounding.

    ``names``: name in the order → the parameter that is counted under it here; None: each under its own. Of what a rank holds a
    copy of, other ranks' part is not counted.

    Raises ValueError when the flat buffers do not hold exactly the parameters, with the sizes, that
    ``order`` names.
    """

    def __init__(
        self, flat: FlatBuffers, order: BlockOrder, stage: int, names: Mapping[str, str] | None = None
    ) -> None:
        held = {name: name for name in flat.trainable_names} if names is None else dict(names)
        listed = order.local_names(stage)
        if sorted(listed) != sorted(held):
            different = sorted(set(listed) ^ set(held))
            raise ValueError(f"stage {stage} and its buffers disagree about {', '.join(different)}")
        names = {name: held[name] for name in listed}
        device = flat.device
        self._grads = flat.grad_buffer
        self._fused = kernels.usable(flat.grad_buffer)
        if self._fused:
            self._plan_fused(flat, order, names)
            return
        runs = self._runs(flat, order, names)
        owned = sum(order.blocks_of(stop - start) for start, stop, _ in runs)
        groups = max(1, -(-owned // ROWS))
        self._scratch = torch.zeros(ROWS, BLOCK, dtype=torch.float64, device=device)
        self._all = torch.zeros(max(groups * ROWS, order.padded_blocks), dtype=torch.float64, device=device)
        # Per group of ROWS blocks: (scratch, gradient) pairs to copy, and the parts of the scratch to clear.
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(groups)]
        self._clears: list[list[torch.Tensor]] = [[] for _ in range(groups)]
        block = 0
        for start, stop, _ in runs:
            block = self._plan(flat.grad_buffer[start:stop], block)
        if block % ROWS or block == 0:
            self._clears[block // ROWS].append(self._scratch[block % ROWS :])
        self._place(flat, order, self._all, runs)

    @classmethod
    def _runs(cls, flat: FlatBuffers, order: BlockOrder, names: Mapping[str, str]) -> list[tuple[int, int, int]]:
        """What this rank owns: first and end in the flat buffer, and the place of the first block among the stage's sums."""
        runs, before = [], 0
        for listed, name in names.items():
            entry = cls._entry(flat, order, listed, name)
            counted = entry.spec.counted
            for start, stop in ((start, min(stop, counted)) for start, stop in flat.own_parts(name)):
                if start < stop:
                    runs.append((entry.offset + start, entry.offset + stop, before + start // BLOCK))
            before += order.blocks_of(counted)
        return runs

    def _place(
        self, flat: FlatBuffers, order: BlockOrder, compact: torch.Tensor, runs: Sequence[tuple[int, int, int]]
    ) -> None:
        """``sums`` is ``compact`` itself where this rank owns all blocks; else what it owns is copied to its places."""
        self._owned: torch.Tensor | None = None
        self.sums = compact[: order.padded_blocks]
        if flat.buckets is None:
            return
        places = [first + i for start, stop, first in runs for i in range(order.blocks_of(stop - start))]
        self._places = torch.tensor(places, dtype=torch.int64, device=flat.device)
        self._owned = compact[: len(places)]
        self.sums = torch.zeros(order.padded_blocks, dtype=torch.float64, device=flat.device)

    def _plan_fused(self, flat: FlatBuffers, order: BlockOrder, names: Mapping[str, str]) -> None:
        """On a GPU one kernel forms all sums: where each block starts, and how long it is."""
        runs = self._runs(flat, order, names)
        spans = [(at, min(BLOCK, stop - at)) for start, stop, _ in runs for at in range(start, stop, BLOCK)]
        self._all = torch.zeros(order.padded_blocks, dtype=torch.float64, device=flat.device)
        self._starts = torch.tensor([start for start, _ in spans], dtype=torch.int64, device=flat.device)
        self._lengths = torch.tensor([length for _, length in spans], dtype=torch.int32, device=flat.device)
        self._place(flat, order, self._all, runs)

    @staticmethod
    def _entry(flat: FlatBuffers, order: BlockOrder, listed: str, name: str) -> Entry:
        entry = flat.entry(name)
        if entry.spec.counted != order.sizes[listed]:
            raise ValueError(f"{name}: {entry.spec.counted} elements here, {order.sizes[listed]} in the global order")
        return entry

    def _plan(self, grad: torch.Tensor, block: int) -> int:
        """Plan the copies of one flat gradient whose first block is number ``block``; return the next free
        number."""
        start = 0
        while start < grad.numel():
            group, row = divmod(block, ROWS)
            full = min((grad.numel() - start) // BLOCK, ROWS - row)
            if full:
                piece = grad[start : start + full * BLOCK].view(full, BLOCK)
                self._copies[group].append((self._scratch[row : row + full], piece))
                start, block = start + full * BLOCK, block + full
                continue
            tail = grad.numel() - start
            self._copies[group].append((self._scratch[row, :tail], grad[start:]))
            self._clears[group].append(self._scratch[row, tail:])
            start, block = grad.numel(), block + 1
        return block

    def compute_(self) -> torch.Tensor:
        """Recompute ``sums`` from the main gradients, in place; returns it."""
        if self._fused:
            if self._starts.numel():
                from qeffect_lm.kernels.optimizer import block_sums

                block_sums(self._grads, self._starts, self._lengths, self._all, BLOCK)
            return self._placed()
        for group, (copies, clears) in enumerate(zip(self._copies, self._clears, strict=True)):
            for target in clears:
                target.zero_()
            for target, source in copies:
                target.copy_(source)
            self._scratch.mul_(self._scratch)
            torch.sum(self._scratch, dim=1, out=self._all[group * ROWS : (group + 1) * ROWS])
        return self._placed()

    def _placed(self) -> torch.Tensor:
        if self._owned is not None:
            self.sums.index_copy_(0, self._places, self._owned)
        return self.sums


class TotalNorm:
    """Adds the sums of all stages to the global L2 norm; every rank computes the same bits.

    Fill ``gathered`` (``[stages, padded_blocks]`` float64, for instance by all-gathering each stage's
    ``BlockSums.sums``), then call :meth:`reduce_`, which rewrites in place ``ordered`` (``[total_blocks]``,
    the sums in (parameter, block) order) and the 0-dim float64 ``norm``.
    """

    def __init__(self, order: BlockOrder, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.gathered = zeros(order.num_stages, order.padded_blocks)
        self.norm = zeros()
        self._index = torch.tensor(order.index(), dtype=torch.int64, device=device)
        width = 1
        while width < order.total_blocks:
            width *= 2
        self._levels = [zeros(width)]
        self.ordered = self._levels[0][: order.total_blocks]
        while width > 1:
            width //= 2
            self._levels.append(zeros(width))

    def reduce_(self) -> torch.Tensor:
        """Order, add pairwise, take the root; returns ``norm``. NaN or infinite when any gradient is."""
        torch.index_select(self.gathered.view(-1), 0, self._index, out=self.ordered)
        for level, above in zip(self._levels, self._levels[1:], strict=False):
            torch.add(level[0::2], level[1::2], out=above)
        torch.sqrt(self._levels[-1][0], out=self.norm)
        return self.norm
