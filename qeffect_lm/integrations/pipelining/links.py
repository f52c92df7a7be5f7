"""What goes over a stage's border: tensors of known shapes into planned buffers, announced once.

A stage's outputs are a tensor or a tuple of tensors. Before the first microbatch goes from a stage to the next, a header of
fixed size tells their dtypes and shapes; from then on both ends know, and the receiver keeps as many buffers as
microbatches are ever held at once by the plan (:mod:`pipeline.slots`), not one for each microbatch. Gradients need no
header: their receiver made the outputs that they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.p2p import Pending, Transport
from pipeline.rendezvous import Queue
from qeffect_lm.errors import UsageError

HEADER = 4096  # bytes; a header that does not fit is refused
MOST = 32  # tensors over one border

_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip


@dataclass(frozen=True)
class Meta:
    """One tensor over a border."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad and tensor.dtype.is_floating_point)

    def buffer(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class GroupLine:
    """A process group as the line of pipeline ranks that :class:`pipeline.p2p.Transport` asks for."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank()

    def coord(self, axis: str) -> int:
        return self.ranks.index(self.rank)

    def rank_at(self, *, pp: int) -> int:
        return self.ranks[pp]


class GroupTransport(Transport):
    """A communicator of its own for each queue.

    Its two ends make it by themselves. Where the default group is bound to a device, NCCL splits new groups from that one,
    which all its ranks have to take part in: then all pipelines make all queues of all of them, in one order.
    """

    def __init__(
        self, line: GroupLine, queues: Iterable[Queue], microbatches: int, timeout: float, device: torch.device
    ) -> None:
        super().__init__(line, queues, microbatches * (MOST + 1), timeout, device)  # type: ignore[arg-type]

    def _make_group(self, queue: Queue) -> None:
        together = dist.distributed_c10d._get_default_group().bound_device_id is not None
        for line in self._lines() if together else [self._mesh.ranks]:  # type: ignore[attr-defined]
            ends = sorted((line[queue.src], line[queue.dst]))
            if together or self._mesh.rank in ends:
                group = dist.new_group(ends, timeout=self._timeout, use_local_synchronization=not together)
                if self._mesh.rank in ends:
                    self._groups[queue] = group

    def _lines(self) -> list[list[int]]:
        """The ranks of every pipeline, the same list on all ranks of the world."""
        found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, self._mesh.ranks)  # type: ignore[attr-defined]
        return sorted({tuple(line): line for line in found}.values())

    def _connect(self, queue: Queue, device: torch.device) -> None:
        if queue in self._groups:
            super()._connect(queue, device)


class Border:
    """One direction of one border: a stage's outputs to the next stage, or their gradients back.

    Args:
        chunk: the stage that sends.
        peer: pipeline rank at the other end.
        direction: ``F`` or ``B``.
        slots: microbatch → which buffer it is received into.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        *,
        chunk: int,
        peer: int,
        direction: str,
        slots: dict[int, int] | None = None,
    ) -> None:
        self._transport, self._device = transport, device
        self.chunk, self.peer, self.direction = chunk, peer, direction
        self._slots = slots or {}
        self.metas: tuple[Meta, ...] | None = None  # what comes, once it is known
        self._announced = direction == "B"  # gradients are as their receiver's outputs
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._header: tuple[Pending, torch.Tensor] | None = None
        self._arriving: dict[int, list[Pending]] = {}
        self._leaving: dict[int, list[Pending]] = {}

    @property
    def buffers(self) -> int:
        """How many sets of receive buffers there are."""
        return len(self._buffers)

    # ---- the sender --------------------------------------------------------------------------------------------

    def send(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; :meth:`settle` waits for all of a step.

        Raises:
            UsageError: the tensors are not those that were announced.
        """
        for before in [m for m, sent in self._leaving.items() if all(p.work.is_completed() for p in sent)]:
            for pending in self._leaving.pop(before):  # what has left is not kept until the step's end
                pending.wait()
        metas = tuple(map(Meta.of, tensors))
        if self.metas is None:
            self.metas = metas
        elif [(m.shape, m.dtype) for m in metas] != [(m.shape, m.dtype) for m in self.metas]:
            raise UsageError(
                f"stage {self.chunk} sends {_text(metas)} for microbatch {microbatch}, and sent {_text(self.metas)} before: "
                "all microbatches of a schedule have one shape; make another schedule for another"
            )
        sent = []
        if not self._announced:
            sent.append(self._start(self._transport.send, self._packed(metas), microbatch, 0))
            self._announced = True
        for number, tensor in enumerate(tensors):
            sent.append(self._start(self._transport.send, tensor.detach().contiguous(), microbatch, number + 1))
        self._leaving[microbatch] = sent

    def settle(self) -> None:
        """No message is in flight any more."""
        for pending in [p for sent in self._leaving.values() for p in sent]:
            pending.wait()
        self._leaving.clear()

    # ---- the receiver ------------------------------------------------------------------------------------------

    def post(self, microbatch: int) -> None:
        """Start receiving, if it is known by now what will come; else :meth:`receive` does, when it is needed."""
        if self.metas is not None and microbatch not in self._arriving:
            buffers = self._buffers_of(microbatch)
            self._arriving[microbatch] = [
                self._start(self._transport.receive, buffer, microbatch, number + 1) for number, buffer in enumerate(buffers)
            ]

    def receive(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        """What the peer sent, in buffers that stay its until the plan gives them to another microbatch."""
        if self.metas is None:
            header = torch.zeros(HEADER, dtype=torch.uint8, device=self._device)
            self._start(self._transport.receive, header, microbatch, 0).wait()
            self.metas = _unpacked(header)
        self.post(microbatch)
        for pending in self._arriving.pop(microbatch):
            pending.wait()
        return self._buffers_of(microbatch)

    def _buffers_of(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        assert self.metas is not None
        slot = self._slots.get(microbatch, microbatch)
        if slot not in self._buffers:
            self._buffers[slot] = tuple(meta.buffer(self._device) for meta in self.metas)
        return self._buffers[slot]

    def _start(self, call: Any, tensor: torch.Tensor, microbatch: int, number: int) -> Pending:
        pending: Pending = call(tensor, self.peer, self.direction, self.chunk, microbatch * (MOST + 1) + number)
        return pending

    def _packed(self, metas: Sequence[Meta]) -> torch.Tensor:
        if len(metas) > MOST:
            raise UsageError(f"stage {self.chunk} has {len(metas)} outputs; at most {MOST} tensors go from stage to stage")
        for meta in metas:
            if str(meta.dtype).removeprefix("torch.") not in _DTYPES:
                raise UsageError(f"stage {self.chunk} has an output of {meta.dtype}, which no stage sends")
        told = [[str(meta.dtype).removeprefix("torch."), list(meta.shape), meta.requires_grad] for meta in metas]
        text = json.dumps(told).encode()
        if len(text) > HEADER:
            raise UsageError(f"stage {self.chunk}: the shapes of its {len(metas)} outputs take more than {HEADER} bytes")
        header = torch.zeros(HEADER, dtype=torch.uint8)
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return header.to(self._device)


def _unpacked(header: torch.Tensor) -> tuple[Meta, ...]:
    text = bytes(header.cpu().tolist()).rstrip(b"\0")
    return tuple(Meta(tuple(shape), _DTYPES[dtype], needs) for dtype, shape, needs in json.loads(text))


def _text(metas: Sequence[Meta]) -> str:
    return ", ".join(f"{str(meta.dtype).removeprefix('torch.')} {list(meta.shape)}" for meta in metas)
