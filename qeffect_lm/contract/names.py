"""Groups of names that are looked up again and again: hashed once, compared by identity."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Names(tuple):
    """A tuple that remembers its hash; a deep copy is itself."""

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash: int = super().__hash__()
            return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __deepcopy__(self, memo: object) -> Names:
        return self


class Interned:
    """One :class:`Names` per distinct content, so that equal groups are one object."""

    def __init__(self) -> None:
        self._known: dict[Names, Names] = {}

    def of(self, names: Iterable[Hashable]) -> Names:
        made = Names(names)
        return self._known.setdefault(made, made)
