"""What tensor-parallel peers settle outside of their layers: sums of gradients of which each has a part, and that they agree.

Most parameters are cut, and a rank finishes the gradient of its piece alone. Two kinds are not:

* what all ranks hold whole and apply to tokens (sequence parallelism) or heads of their own: norms, biases that are added after
  a sum, learned positions. The gradient is the sum over all ranks;
* keys and values of a KV head that several ranks share. The gradient is the sum over those ranks.

Both go through one buffer of a chunk and one sum: a shared piece has a place there for each KV head, of which a rank
fills its own and leaves zeros in the others, so that no groups of some of the ranks are needed. Every rank gets the same bytes,
whatever other chunks there are (:mod:`pipeline.ordered`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.ordered import OrderedSum
from qeffect_lm.contract.errors import CollectiveError
from qeffect_lm.layers.dropout import host_key
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.parallel.cuts import length_of
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import naming

if TYPE_CHECKING:
    from pipeline.step_end import StepEnd
    from qeffect_lm.contract.ledger import Ledger


class PartialSums:
    """The sums of one rank.

    Args:
        flat: this rank's buffers; their specs say what is summed or shared.
        mesh: with a process group along ``tp``.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh) -> None:
        self._others = mesh.others("tp")
        self.buffers: dict[int, torch.Tensor] = {}
        self._parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # (gradient, its place in the buffer)
        for chunk, size in sorted(sizes_of(flat.entry(name).spec for name in flat.trainable_names).items()):
            wanted = [part for name in flat.trainable_names for part in _parts_of(flat, name, chunk)]
            buffer = self.buffers[chunk] = torch.zeros(size, dtype=flat.grad_buffer.dtype, device=flat.device)
            parts, at = self._parts.setdefault(chunk, []), 0
            for grad, place, places in wanted:
                first = at + place * grad.numel()
                parts.append((grad, buffer[first : first + grad.numel()].view(grad.shape)))
                at += places * grad.numel()
            assert at == size, (chunk, at, size)
        longest = max((buffer.numel() for buffer in self.buffers.values()), default=0)
        self.ordered = OrderedSum(mesh, "tp", longest, flat.grad_buffer)

    @property
    def chunks(self) -> list[int]:
        """Those that have any."""
        return list(self.buffers)

    def sum_(self, chunk: int) -> None:
        """Add up a chunk's parts, in the main gradients' dtype. Nothing to do for a chunk without any.

        Raises:
            PeerLostError: a peer was lost.
        """
        buffer = self.buffers.get(chunk)
        if buffer is None:
            return
        buffer.zero_()
        for grad, place in self._parts[chunk]:
            place.copy_(grad)
        with naming(self._others, f"the sum of chunk {chunk}'s shared gradients over tp"):
            self.ordered.sum_(buffer)
        for grad, place in self._parts[chunk]:
            grad.copy_(place)


def sizes_of(specs: Iterable[ParamSpec]) -> dict[int, int]:
    """Chunk → elements of its buffer of a :class:`PartialSums`, of parameters that train."""
    found: Counter[int] = Counter()
    for spec in specs:
        places = sum(piece.length * piece.shared[1] for piece in spec.pieces if piece.shared is not None)
        found[spec.group] += spec.numel * spec.summed + (spec.numel // length_of(spec.pieces) * places if places else 0)
    return {chunk: size for chunk, size in found.items() if size}


def agree_on_collectives(ledger: Ledger, end: StepEnd, agreed: int) -> int:
    """What F and I exchange with their peers, the same in the same order on all of them: compared after a capture,
    and in eager execution after the first step, while there are more than ``agreed`` of them. Returns how many there are.

    Raises:
        CollectiveError: on every peer.
    """
    count = len(ledger.collectives.known)
    if not end.exchanging or count == agreed:
        return agreed
    told = ledger.collectives.listed()
    if not end.agree_on_(host_key(repr(told)) >> 1):
        raise CollectiveError(
            "peers exchange different things, or in another order: start all ranks with the same configuration "
            f"and version of this program ({count} actions here, {sum(len(names) for _, names in told)} exchanges)"
        )
    return count


def _parts_of(flat: FlatBuffers, name: str, chunk: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Of a parameter what is summed: views of its main gradient, each with its place and of how many."""
    spec = flat.entry(name).spec
    if spec.group != chunk:
        return
    if spec.summed:
        yield flat.grad(name), 0, 1
    at = 0
    for piece in spec.pieces:
        if piece.shared is not None:
            assert spec.dimension is not None
            yield flat.grad(name).narrow(spec.dimension, at, piece.length), *piece.shared
        at += piece.length
