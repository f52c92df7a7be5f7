"""Schedules on a V: rank r of p holds chunks r and 2p − 1 − r, so the model goes down the ranks and back.

The last chunk shares a rank with the first: its loss is there early, and every rank holds, over a step, about as
much as any other. Both schedules are published for a minimum of microbatches; below it the order for the minimum
is made and the microbatches that do not exist are left out.

This module has only the orders; :data:`pipeline.schedules.SCHEDULES` names them and checks their sizes.
"""

from __future__ import annotations

from pipeline.actions import Action, Kind

_F, _I, _W = Kind.F, Kind.I, Kind.W  # looked up once: an enumeration's member costs more than a global name


class _Row:
    """One rank's actions in the making: each call takes the next microbatch of its kind and chunk."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self.waiting: list[Action] = []  # the W of each I that ran alone, in order
        self._forwards = dict.fromkeys(chunks, 0)  # how many ran
        self._backwards = dict.fromkeys(chunks, 0)

    def forward(self, chunk: int) -> None:
        microbatch = self._forwards[chunk]
        self._forwards[chunk] = microbatch + 1
        self.actions.append(Action(_F, chunk, microbatch))

    def backward(self, chunk: int, *, whole: bool) -> None:
        """I, and W at once if ``whole``; otherwise the W waits for :meth:`weight`."""
        microbatch = self._backwards[chunk]
        self._backwards[chunk] = microbatch + 1
        self.actions.append(Action(_I, chunk, microbatch))
        (self.actions if whole else self.waiting).append(Action(_W, chunk, microbatch))

    def weight(self) -> None:
        """The longest waiting W, if there is one."""
        if self.waiting:
            self.actions.append(self.waiting.pop(0))

    def first(self, m: int) -> list[Action]:
        """The actions of the microbatches below ``m``."""
        if max(self._forwards.values()) <= m:
            return self.actions
        return [action for action in self.actions if action.key[1] < m]


def zb_v(p: int, m: int) -> list[list[Action]]:
    """ZB-V ("Zero Bubble Pipeline Parallelism", Qi et al., ICLR 2024, section 6): no bubble when T_F = T_I = T_W.

    Rank r warms up with 2p − 1 − r F of its first chunk and r of its second, runs p − r times F I W of the second,
    then F I W of the two chunks in turn; in the tail I comes first and W fills the gaps. The same order as
    torch.distributed.pipelining's ``ScheduleZBVZeroBubble``. Holds what 1F1B holds on its first rank, p microbatches.

    Args:
        p: ranks, two chunks each. m: microbatches. Both at least 1.

    Returns: per rank, 6·m compute actions.
    """
    plan = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        row = _Row((down, up))
        total = max(m, 2 * p - 1)
        for _ in range(2 * (p - rank) - 1):
            row.forward(down)
        for _ in range(rank):
            row.forward(up)
            row.forward(down)
        for _ in range(p - rank):
            row.forward(up)
            row.backward(up, whole=True)
        for started in range(2 * p - 1 - rank, total + p - 1 - rank):
            if started < total:
                row.forward(down)
            row.backward(down, whole=True)
            row.forward(up)
            row.backward(up, whole=True)
        for _ in range(rank):
            row.backward(down, whole=False)
            row.backward(up, whole=False)
        ups = [action for action in row.waiting if action.key[0] == up]
        row.waiting = [action for action in row.waiting if action.key[0] == down]
        for _ in range(p - rank):
            row.backward(down, whole=False)
            row.weight()
        row.waiting = ups + row.waiting
        while row.waiting:
            row.weight()
        plan.append(row.first(m))
    return plan


def dual_pipe_v(p: int, m: int) -> list[list[Action]]:
    """DualPipeV (DeepSeek, 2025; the "cut-in-half" form of DualPipe), eight phases as in ``dualpipev.py``.

    DualPipe runs an F and a whole backward of another microbatch as one kernel-level pair, to hide expert
    communication. Nothing overlaps here, so each pair is its F and then its I and W, and a rank waits for the
    gradient only when the F has run. Holds p microbatches and one chunk.

    Arguments and result as :func:`zb_v`.
    """
    plan = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        row = _Row((down, up))
        total, behind = max(m, 2 * p), p - 1 - rank
        for _ in range(2 * behind):
            row.forward(down)
        for _ in range(rank + 1):
            row.forward(down)
            row.forward(up)
        for _ in range(behind):
            row.backward(up, whole=False)
            row.weight()
            row.forward(up)
        for place in range(total - p):
            if place < total - 2 * p + rank + 1:
                row.forward(down)
            row.backward(up, whole=True)
            row.forward(up)
            row.backward(down, whole=True)
        for place in range(2 * (rank + 1)):  # in the second half W is left for the gaps
            row.backward(up if place % 2 == 0 else down, whole=place <= rank)
        for _ in range(behind):
            row.weight()
            row.backward(down, whole=False)
        while row.waiting:
            row.weight()
        plan.append(row.first(m))
    return plan
