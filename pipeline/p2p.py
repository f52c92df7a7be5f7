"""Point-to-point transfers between stages, over gloo and NCCL alike.

Each queue of a plan (:class:`pipeline.rendezvous.Queue`: source, destination, direction) has a process group of its own, of
its two ranks, and so a communicator of its own. That matters where the previous and the next peer are the same rank, on a V
or with interleaved chunks, and most of all on NCCL, which ignores tags and runs the transfers of one communicator one after
the other in the order in which each side issued them: with one communicator for both ways, a rank that issues send, receive
while its peer does the same would never finish. With one for each queue only the queue's order counts, and that is the plan's
at both ends (:mod:`pipeline.validate`); no transfer needs to be batched with another.

Every communicator is used once when it is made. NCCL connects at the first use, and the host waits there for the peer: left to
the first step, a receive posted ahead could wait for a send that waits for it.

On gloo a wait blocks the host, and the messages carry a tag made of chunk and microbatch as well. On NCCL a wait makes the
current stream wait; a dead peer is found by NCCL's own watchdog after the same time-out. A pending transfer keeps a reference
to its buffer until it completed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.actions import SENDS
from pipeline.plan import Plan
from pipeline.rendezvous import Queue, queue_of
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError, naming

__all__ = ["PeerLostError", "Pending", "Transport", "gather_rows", "queues_of"]


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
        """On the CPU block the host until the transfer completed; on a GPU make the current stream wait for it.

        Raises:
            PeerLostError: names the peer's rank and the transfer.
        """
        if self.done:
            return
        with naming([self.peer], self.what, self.timeout.total_seconds()):
            if self.buffer.is_cuda:
                self.work.wait()  # with a time-out of its own it would block the host
            else:
                self.work.wait(self.timeout)
        self.done = True


def queues_of(plan: Plan) -> list[Queue]:
    """The queues that a plan sends on, in one order on all ranks. Evaluation and calibration use the same ones."""
    return sorted({queue_of(action, plan.placement) for row in plan.actions for action in row if action.kind in SENDS})


class Transport:
    """Sends and receives along the pipeline axis of a mesh. Made by all ranks of the mesh together.

    Args:
        mesh: its pipeline peers are the ends.
        queues: what will be used, between pipeline ranks; the same on all ranks of the mesh.
        microbatches: the most of a step or an evaluation, for tags.
        timeout: seconds to wait for a peer.
        device: of the tensors that will be sent.

    Raises:
        PeerLostError: a peer did not come.
    """

    def __init__(
        self, mesh: Mesh, queues: Iterable[Queue], microbatches: int, timeout: float, device: torch.device | str = "cpu"
    ) -> None:
        self._mesh, self._microbatches = mesh, microbatches
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[Queue, Any] = {}
        for queue in sorted(queues):  # one order on all ranks: nobody waits in a circle
            self._make_group(queue)
        for queue in sorted(self._groups):
            self._connect(queue, torch.device(device))

    def _make_group(self, queue: Queue) -> None:
        """A process group for a queue, in this pipeline and in those of the other replicas; all ranks call it alike."""
        lines = sorted({tuple(Mesh(self._mesh.sizes, rank).peers("pp")) for rank in range(self._mesh.world)})
        for line in lines:
            ends = sorted((line[queue.src], line[queue.dst]))
            group = dist.new_group(ends, timeout=self._timeout)
            if self._mesh.rank in ends:
                self._groups[queue] = group

    def _connect(self, queue: Queue, device: torch.device) -> None:
        """One message from a queue's source to its destination."""
        source, destination = (self._mesh.rank_at(pp=end) for end in (queue.src, queue.dst))
        token = torch.zeros(1, device=device)
        with naming([source + destination - self._mesh.rank], f"connecting rank {source} to rank {destination}"):
            if self._mesh.rank == source:
                dist.send(token, destination, group=self._groups[queue])
            else:
                dist.recv(token, source, group=self._groups[queue])

    def send(self, tensor: torch.Tensor, stage_rank: int, direction: str, chunk: int, microbatch: int) -> Pending:
        """Start sending ``tensor`` of ``chunk`` to pipeline rank ``stage_rank``."""
        queue = Queue(self._mesh.coord("pp"), stage_rank, direction)
        return self._start(dist.isend, "SEND", queue, stage_rank, tensor, chunk, microbatch)

    def receive(self, tensor: torch.Tensor, stage_rank: int, direction: str, chunk: int, microbatch: int) -> Pending:
        """Start receiving into ``tensor`` what pipeline rank ``stage_rank`` sends as its ``chunk``."""
        queue = Queue(stage_rank, self._mesh.coord("pp"), direction)
        return self._start(dist.irecv, "RECV", queue, stage_rank, tensor, chunk, microbatch)

    def close(self) -> None:
        """Give the communicators back; all ranks that made the transport call it, with no transfer in flight."""
        for queue in sorted(self._groups):
            dist.destroy_process_group(self._groups.pop(queue))

    def _start(
        self, call: Any, word: str, queue: Queue, stage_rank: int, tensor: torch.Tensor, chunk: int, microbatch: int
    ) -> Pending:
        peer = self._mesh.rank_at(pp=stage_rank)
        what = f"{word}_{queue.direction} of chunk {chunk}, microbatch {microbatch}"
        with naming([peer], what):
            work = call(tensor, peer, group=self._groups[queue], tag=chunk * self._microbatches + microbatch)
        return Pending(peer, what, work, tensor, self._timeout)


def gather_rows(rows: torch.Tensor, mine: torch.Tensor, mesh: Mesh, axis: str) -> None:
    """All-gather ``mine`` ``[n]`` along an axis or a line into ``rows`` ``[size, n]``, in order of coordinate.

    Raises:
        PeerLostError: a peer of the axis was lost.
    """
    group = mesh.group(axis)
    if group is None:
        rows[0].copy_(mine)
        return
    with naming(mesh.others(axis), f"a gather over {axis}"):
        dist.all_gather(list(rows.unbind(0)), mine.contiguous(), group=group)
