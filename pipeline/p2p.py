"""Point-to-point transfers between stages.

Each direction (activations forward, gradients backward) has a process group of its own, so that with two ranks, where the
previous and the next peer are the same, the directions never mix. Messages carry a tag made of chunk and microbatch. A
pending transfer keeps a reference to its buffer until it completed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError, naming

__all__ = ["PeerLostError", "Pending", "Transport", "gather_rows"]


@dataclass
class Pending:
    """A transfer in flight: waiting for it is idempotent."""

    peer: int
    what: str
    work: Any
    buffer: torch.Tensor
    timeout: timedelta
    done: bool = field(default=False)

    def wait(self) -> None:
        """Block the host until the transfer completed.

        Raises:
            PeerLostError: names the peer's rank and the transfer.
        """
        if self.done:
            return
        with naming([self.peer], self.what, self.timeout.total_seconds()):
            self.work.wait(self.timeout)
        self.done = True


class Transport:
    """Sends and receives along the pipeline axis of a mesh, over gloo.

    Args:
        mesh: its pipeline peers are the ends.
        microbatches: per step, for tags.
        timeout: seconds to wait for a peer.
    """

    def __init__(self, mesh: Mesh, microbatches: int, timeout: float) -> None:
        self._mesh, self._microbatches = mesh, microbatches
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, Any] = {}
        if mesh.size("pp") > 1:
            lines = sorted({tuple(_line(mesh, rank)) for rank in range(mesh.world)})
            for line in lines:
                for direction in ("F", "B"):
                    group = dist.new_group(list(line), timeout=self._timeout)
                    if mesh.rank in line:
                        self._groups[direction] = group

    def send(self, tensor: torch.Tensor, stage_rank: int, direction: str, chunk: int, microbatch: int) -> Pending:
        """Start sending ``tensor`` of ``chunk`` to pipeline rank ``stage_rank``."""
        peer = self._mesh.rank_at(pp=stage_rank)
        tag = chunk * self._microbatches + microbatch
        what = f"SEND_{direction} of chunk {chunk}, microbatch {microbatch}"
        work = self._start(dist.isend, tensor, peer, direction, tag, what)
        return Pending(peer, what, work, tensor, self._timeout)

    def receive(self, tensor: torch.Tensor, stage_rank: int, direction: str, chunk: int, microbatch: int) -> Pending:
        """Start receiving into ``tensor`` what pipeline rank ``stage_rank`` sends as its ``chunk``."""
        peer = self._mesh.rank_at(pp=stage_rank)
        tag = chunk * self._microbatches + microbatch
        what = f"RECV_{direction} of chunk {chunk}, microbatch {microbatch}"
        work = self._start(dist.irecv, tensor, peer, direction, tag, what)
        return Pending(peer, what, work, tensor, self._timeout)

    def _start(self, call: Any, tensor: torch.Tensor, peer: int, direction: str, tag: int, what: str) -> Any:
        with naming([peer], what):
            return call(tensor, peer, group=self._groups[direction], tag=tag)


def _line(mesh: Mesh, rank: int) -> list[int]:
    """The ranks of the pipeline that ``rank`` belongs to."""
    other = Mesh(mesh.sizes, rank)
    return other.peers("pp")


def gather_rows(rows: torch.Tensor, mine: torch.Tensor, mesh: Mesh, axis: str) -> None:
    """All-gather ``mine`` ``[n]`` along ``axis`` into ``rows`` ``[size, n]``, in order of coordinate.

    Raises:
        PeerLostError: a peer of the axis was lost.
    """
    group = mesh.group(axis)
    if group is None:
        rows[0].copy_(mine)
        return
    others = [rank for rank in mesh.peers(axis) if rank != mesh.rank]
    with naming(others, f"a gather over {axis}"):
        dist.all_gather(list(rows.unbind(0)), mine.contiguous(), group=group)
