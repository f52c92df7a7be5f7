"""What F and I exchange with other ranks: declared beforehand, complete at each action's end, in one order.

A collective is met by its peers' in the order in which each of them calls: one that is left out, or that comes in another order
on one rank, leaves a part where a sum should be, or meets the wrong one, unnoticed where sizes agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from qeffect_lm.contract.errors import CollectiveError

_Key = tuple[str, int]  # F or I, and a chunk


class Collectives:
    """Of one rank. ``known``: what each F and I exchanged, in order, as its first one did."""

    def __init__(self) -> None:
        self._declared: dict[_Key, frozenset[str]] = {}
        self.known: dict[_Key, tuple[str, ...]] = {}

    def declare(self, kind: str, chunk: int, names: Iterable[str]) -> None:
        """Every F (or I) of ``chunk`` makes at least these, ``<layer>.gather``, ``.scatter`` or ``.sum``, in any order."""
        self._declared[kind, chunk] = frozenset(names)

    def fault(self, kind: str, chunk: int, microbatch: int, told: tuple[str, ...]) -> CollectiveError | None:
        """What is wrong with an action that made the exchanges ``told``, in order; None where nothing is."""
        missing = self._declared.get((kind, chunk), frozenset()).difference(told)
        action = f"{chunk}{kind}{microbatch}"
        if missing:
            layer, _, what = min(missing).rpartition(".")
            message = f"{action} ended without the {what} of {layer!r} among its peers: what it computed with is a part"
            return CollectiveError(message, layer=layer, chunk=chunk, microbatch=microbatch)
        if (kind, chunk) not in self._declared and not told:
            return None
        first = self.known.setdefault((kind, chunk), told)
        if first == told:
            return None
        place = next((i for i, (a, b) in enumerate(zip(first, told, strict=False)) if a != b), min(len(first), len(told)))
        now, before = (names[place] if place < len(names) else "nothing" for names in (told, first))
        message = f"{action} exchanges {now} with its peers, as number {place}, where earlier ones exchanged {before}"
        return CollectiveError(message, chunk=chunk, microbatch=microbatch)

    def listed(self) -> list[tuple[str, tuple[str, ...]]]:
        """All that is known, sorted: equal on all peers."""
        return sorted((f"{chunk}{kind}", names) for (kind, chunk), names in self.known.items())
