"""The few words ranks exchange while saving and loading, independent of how they are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from checkpoint.layout import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Communicator(Protocol):
    """A group of ranks; every method is called by all of them in the same order. Objects are picklable."""

    rank: int
    world: int

    def gather(self, obj: Any) -> list[Any] | None:
        """All ranks' objects in rank order, on rank 0; None elsewhere."""
        ...

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


class SingleProcess:
    """A group of one."""

    rank = 0
    world = 1

    def gather(self, obj: Any) -> list[Any] | None:
        return [obj]

    def broadcast(self, obj: Any) -> Any:
        return obj

    def barrier(self) -> None:
        return None


class GroupCommunicator:
    """The ranks of a torch.distributed process group (None: the default group), by its object collectives.

    Meant for a gloo group. A lost peer raises :class:`CheckpointError` once the group's own timeout has
    passed.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self._root = 0 if group is None else dist.get_global_rank(group, 0)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, obj: Any) -> list[Any] | None:
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        self._call(self._dist.gather_object, obj, out, dst=self._root)
        return out

    def broadcast(self, obj: Any) -> Any:
        cell = [obj if self.rank == 0 else None]
        self._call(self._dist.broadcast_object_list, cell, src=self._root)
        return cell[0]

    def barrier(self) -> None:
        self._call(self._dist.barrier)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, group=self._group, **kwargs)
        except RuntimeError as error:  # gloo's and torch's own errors for a dead or silent peer
            others = [str(rank) for rank in range(self.world) if rank != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
            raise CheckpointError(
                f"{who} was lost during the exchange of checkpoint state, as rank {self.rank} sees it: "
                f"{(str(error).splitlines() or [type(error).__name__])[0].split('. This is typically')[0]}"
            ) from error
