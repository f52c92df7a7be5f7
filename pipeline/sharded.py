"""What replicas exchange when they share the optimizer's state (ZeRO stage 1): sums of gradients, and updated parameters.

Both go bucket by bucket (:mod:`qeffect_lm.optim.buckets`), in place on the flat buffers, in one order on all ranks.

The sum's order is ours and fixed. A library's reduce-scatter adds in an order of its own, which may change with the number of
ranks, the message's size or the network, and takes pieces of one size only. So each rank sends every owner its part as it is,
and the owner adds what it got in order of rank, ``((g0 + g1) + g2) + ...``, in the main gradients' dtype. A rank sends and
receives as many bytes as in a ring's reduce-scatter; the price is a buffer of one bucket. Bits depend on the gradients and the
number of replicas alone: not on bucket sizes, timing, or the backend. They are those of replicas that share nothing
(:mod:`pipeline.ordered`).

On gloo and NCCL the same calls are made: ``all_to_all_single`` with sizes, and a broadcast by each owner.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.ordered import added_
from qeffect_lm.optim.buckets import Bucket
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import naming


class ShardExchange:
    """The exchanges of one rank with the replicas of a mesh.

    Args:
        flat: sharded buffers.
        mesh: with a process group along ``replicas``.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh) -> None:
        assert flat.buckets is not None
        self._grads, self._params = flat.grad_buffer, flat.param_buffer
        self._group, self._rank, self._peers = mesh.group("replicas"), mesh.coord("replicas"), mesh.peers("replicas")
        self._others = mesh.others("replicas")
        self.buckets = [bucket for bucket in flat.buckets.buckets if bucket.trainable]
        most = max([bucket.sizes[self._rank] for bucket in self.buckets], default=0)
        self.received = torch.zeros(len(self._peers) * most, dtype=self._grads.dtype, device=flat.device)

    def reduce_(self, chunk: int) -> None:
        """Sum a chunk's buckets over the replicas. Afterwards this rank's pieces hold the sums; the rest means nothing.

        Raises:
            PeerLostError: a replica was lost.
        """
        for number, bucket in enumerate(self.buckets):
            if bucket.group == chunk:
                with naming(self._others, f"the reduction of gradient bucket {number} over the replicas"):
                    self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        ranks, size = len(self._peers), bucket.sizes[self._rank]
        received = self.received[: ranks * size]
        mine = self._grads[bucket.start : bucket.stop]
        dist.all_to_all_single(received, mine, [size] * ranks, bucket.sizes, group=self._group)
        if not size:
            return
        added_(self._grads[slice(*bucket.piece(self._rank))], received.view(ranks, size))

    def share_(self) -> None:
        """Give every replica the parameters that this rank updated, and take theirs; as bytes, so all hold the same ones.

        Raises:
            PeerLostError: a replica was lost.
        """
        for number, bucket in enumerate(self.buckets):
            with naming(self._others, f"the exchange of parameter bucket {number} over the replicas"):
                for owner, peer in enumerate(self._peers):
                    start, stop = bucket.piece(owner)
                    if start < stop:
                        dist.broadcast(self._params[start:stop].view(torch.uint8), peer, group=self._group)

    def sum_(self, values: torch.Tensor) -> None:
        """Add ``values`` of all replicas, in place; exact where at most one of them is not zero.

        Raises:
            PeerLostError: a replica was lost.
        """
        with naming(self._others, "the sum of norms over the replicas"):
            dist.all_reduce(values, group=self._group)
