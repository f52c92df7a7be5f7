"""How tensor parallelism cuts one dimension of a logical parameter: which of its rows (or columns) a rank holds.

A cut is a record of sizes; asked for a number of ranks and one of them it gives that rank's *pieces*, in the order in which
they lie in its local tensor. Rows that belong together stay together: the gate's and the up projection's of the same features,
a KV head's queries, keys and values. What two ranks must both hold (a KV head with more ranks than heads) is a *copy* on all
but the first of them; its gradient is a part on each, and their sum is everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qeffect_lm.errors import UsageError

WIDE = 1024  # rows a rank, from which on pieces of a vocabulary begin at multiples of
ROWS = 64  # so that products on a GPU are aligned


class Piece(NamedTuple):
    """Rows ``start … start + length`` of the whole.

    Attributes:
        copy: another rank of the axis saves and counts them.
        shared: (which, of how many): the piece is held by several ranks, whose gradients are added; None: it is not.
    """

    start: int
    length: int
    copy: bool = False
    shared: tuple[int, int] | None = None


class Cut(Protocol):
    """Of one dimension."""

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        """Of rank ``rank`` among ``size``.

        Raises:
            UsageError: it cannot be cut so; says which numbers do not go together.
        """
        ...


@dataclass(frozen=True)
class Even:
    """``total`` in ``blocks`` equal blocks, each cut into equal pieces: rank t holds piece t of every block."""

    total: int
    blocks: int = 1

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        block, rest = divmod(self.total, self.blocks)
        if rest or block % size:
            raise UsageError(f"{block} features cannot be cut into {size} equal pieces (parallel.tp)")
        length = block // size
        return tuple(Piece(number * block + rank * length, length) for number in range(self.blocks))


@dataclass(frozen=True)
class GroupedHeads:
    """Rows of a fused projection: per KV head its query heads, then k, then v.

    With at least as many KV heads as ranks a rank holds whole groups. With fewer, several ranks share a KV head: each has its
    own queries of the group, and all have k and v.
    """

    heads: int
    kv_heads: int
    head_dim: int

    def local(self, size: int) -> tuple[int, int]:
        """Query and KV heads of a rank."""
        if self.heads % size or (self.kv_heads % size and size % self.kv_heads):
            raise UsageError(f"{self.heads} query and {self.kv_heads} KV heads cannot be cut for {size} ranks (parallel.tp)")
        return self.heads // size, max(1, self.kv_heads // size)

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        own, kv = self.local(size)
        d, queries = self.head_dim, self.heads // self.kv_heads * self.head_dim
        run = queries + 2 * d
        if self.kv_heads >= size:
            return (Piece(rank * kv * run, kv * run),)
        group, place = divmod(rank, size // self.kv_heads)
        first, copy, shared = group * run, place > 0, (group, self.kv_heads)
        return (
            Piece(first + place * own * d, own * d),
            Piece(first + queries, d, copy, shared),
            Piece(first + queries + d, d, copy, shared),
        )


@dataclass(frozen=True)
class Vocabulary:
    """Rows of a table, one per token id, in order; the last ranks have fewer where they do not divide. Nothing is padded."""

    total: int

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        length = -(-self.total // size)
        if length >= WIDE:
            length = -(-length // ROWS) * ROWS
        if (size - 1) * length >= self.total:  # so few that rounding up leaves the last rank none
            low, more = divmod(self.total, size)
            if not low:
                raise UsageError(f"a vocabulary of {self.total} cannot be cut for {size} ranks (parallel.tp)")
            return (Piece(rank * low + min(rank, more), low + (rank < more)),)
        start = rank * length
        return (Piece(start, min(length, self.total - start)),)


def length_of(pieces: Sequence[Piece]) -> int:
    """Of a rank's part of the dimension."""
    return sum(piece.length for piece in pieces)
