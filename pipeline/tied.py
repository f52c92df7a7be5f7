"""Tied weights: one parameter that two layers use, each with a main gradient of its own.

The embedding and the head of a model may be one weight. Both write gradients, on one rank or, with pipeline stages, on two,
each into its own place, counted and checked like any other. Their sum is made once a step, when all of it is there:

1. at REDUCE the head's gradient is added to the embedding's, on the embedding's rank: ``embedding + head``, of one replica;
2. what follows knows the embedding only: sum over replicas, norm (it counts once), clip, optimizer, one master, one pair of
   moments;
3. after STEP the embedding's rank sends the new parameter, as bytes, to the head's rank, whose copy so never differs.

The numbers are those of one rank that holds both, whatever the schedule and the number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import naming

TIED = -1
"""Group, in place of a chunk, of the parameters that other layers' weights are: no single chunk completes their gradients."""


class TiedWeights:
    """The sums and exchanges of one rank.

    Args:
        flat: this rank's buffers.
        ties: tied weight → the parameter that it is, of the whole model.
        places: weight or parameter → the pipeline coordinate of the rank that holds it, for each name in ``ties``.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh, ties: Mapping[str, str], places: Mapping[str, int]) -> None:
        self._flat, self._mesh, self._group = flat, mesh, mesh.group("pp")
        me = mesh.coord("pp")
        self._here = [(source, copy) for copy, source in ties.items() if places[copy] == places[source] == me]
        apart = [(source, copy) for copy, source in ties.items() if places[copy] != places[source]]
        peers = mesh.peers("pp")
        self._copies = [(source, peers[places[copy]]) for source, copy in apart if places[source] == me]
        self._sources = [(copy, peers[places[source]]) for source, copy in apart if places[copy] == me]
        trained = [source for source, _ in self._copies if source in flat.trainable_names]
        self.received = {source: torch.zeros_like(flat.grad(source)) for source in trained}

    def collect_(self) -> None:
        """Add the tied weights' main gradients to those of the parameters.

        Raises:
            PeerLostError: the rank that holds the other one was lost.
        """
        grads = self._flat.gradient_names
        for source, copy in self._here:
            if source in grads:
                self._flat.grad(source).add_(self._flat.grad(copy))
        for copy, peer in self._sources:
            if copy in grads:
                self._send(self._flat.grad(copy), peer, copy)
        for source, peer in self._copies:
            if source in grads:
                self._receive(self.received[source], peer, source)
                self._flat.grad(source).add_(self.received[source])

    def share_(self) -> None:
        """Bring the copies up to date. Errors as :meth:`collect_`."""
        for source, peer in self._copies:
            self._send(self._flat.param(source), peer, source)
        for copy, peer in self._sources:
            self._receive(self._flat.param(copy), peer, copy)

    def _send(self, tensor: torch.Tensor, peer: int, name: str) -> None:
        with naming([peer], f"the exchange of {name}"):
            dist.send(tensor.view(torch.uint8), peer, group=self._group)

    def _receive(self, tensor: torch.Tensor, peer: int, name: str) -> None:
        with naming([peer], f"the exchange of {name}"):
            dist.recv(tensor.view(torch.uint8), peer, group=self._group)
