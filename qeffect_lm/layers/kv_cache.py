"""Keys and values of sequences that are being generated, in storages that never move."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class KVCache:
    """Keys and values of sequences of different lengths, one in each row, of at most ``capacity`` tokens.

    A layer's storages, ``[rows, capacity, kv_heads, head_dim]``, are made at its first use and stay where they are. Where a
    row's next token goes is a number on the device, so a captured pass serves every step. Around a pass of ``count`` tokens
    per row: :meth:`begin`, the layers (:meth:`extend`, :meth:`mask`), and then ``lengths`` is moved on.

    Attributes:
        lengths: int64 ``[rows]``, the tokens that each row has seen: the position of its next one.
        limit: how many places of the storages a pass looks at; more than any position of it.
        fresh: the rows have seen nothing, so that a pass attends to its own keys only, as one without a cache.
    """

    lengths: torch.Tensor
    capacity: int
    limit: int
    fresh: bool = False
    entries: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    first_row: int = 0  # of these rows in the storages
    rows_there: int = 0

    def __post_init__(self) -> None:
        self.rows_there = self.rows_there or self.rows
        self.positions = self.lengths[:, None]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    @staticmethod
    def empty(rows: int, capacity: int, device: torch.device | str = "cpu") -> KVCache:
        """A cache of ``rows`` sequences that have seen nothing."""
        return KVCache(torch.zeros(rows, dtype=torch.int64, device=device), capacity, capacity)

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    def fresh_row(self, number: int) -> KVCache:
        """Row ``number`` alone, over the same storages, for the first pass of a new sequence. Its length becomes 0."""
        part = self.lengths[number : number + 1]
        part.zero_()
        return KVCache(
            part, self.capacity, self.capacity, fresh=True, entries=self.entries, first_row=self.first_row + number,
            rows_there=self.rows_there,
        )  # fmt: skip

    def begin(self, count: int) -> None:
        """A pass of ``count`` tokens per row begins: ``positions``, int64 ``[rows, count]``, are those of its tokens."""
        self.positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        self._masks = {}

    def extend(self, name: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in a layer's keys and values of this pass, ``[rows, kv_heads, count, head_dim]``.

        Returns what the pass attends to: the same, where the rows are fresh, else the first ``limit`` places of the storages,
        ``[rows, kv_heads, limit, head_dim]``, of which :meth:`mask` says who sees what.
        """
        if name not in self.entries:
            shape = (self.rows_there, self.capacity, k.shape[1], k.shape[3])
            # Zeros, not whatever was there: masked places enter the sums as 0 times their value.
            self.entries[name] = (k.new_zeros(shape), v.new_zeros(shape))
        stored_k, stored_v = (part[self.first_row : self.first_row + self.rows] for part in self.entries[name])
        if self.fresh:
            for stored, new in ((stored_k, k), (stored_v, v)):
                stored[:, : k.shape[2]].copy_(new.transpose(1, 2))
            return k, v
        first = torch.arange(self.rows, device=self.lengths.device)[:, None] * self.capacity
        places = (first + self.positions).reshape(-1)
        for stored, new in ((stored_k, k), (stored_v, v)):
            flat = stored.view(-1, *stored.shape[2:])
            flat.index_copy_(0, places, new.transpose(1, 2).reshape(-1, *stored.shape[2:]))
        return stored_k[:, : self.limit].transpose(1, 2), stored_v[:, : self.limit].transpose(1, 2)

    def mask(self, window: int | None = None) -> torch.Tensor:
        """Bool ``[rows, 1, count, limit]``: the places that each token of the pass sees: its own and those before it, with a
        ``window`` the last ``window`` of them. Made once for all layers."""
        key = (self.limit, window)
        if key not in self._masks:
            places = torch.arange(self.limit, device=self.lengths.device)
            at = self.positions[:, None, :, None]
            seen = places <= at
            self._masks[key] = seen if window is None else seen & (places > at - window)
        return self._masks[key]
