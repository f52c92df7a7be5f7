"""I3, ``WeightVersion``: cached weights have versions.

A parameter's version is an integer that only :meth:`WeightVersions.bump` moves: the optimizer step, a load, a gather, or
an outside writer that says so. Torch's own counters are not used, since writes through raw storage do not move them. A
cached FP8 weight records the version and the scale epoch it was made from and the layouts it holds; a reader states
what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qeffect_lm.contract.errors import StaleWeightError


@dataclass(frozen=True)
class CacheRecord:
    """Where a cached weight comes from: source version, scale epoch, layouts present, casts made so far."""

    version: int
    epoch: int
    layouts: frozenset[str]


class WeightVersions:
    """Versions of one rank's parameters and of their cached FP8 forms."""

    def __init__(self, names: Iterable[str]) -> None:
        self.versions: dict[str, int] = dict.fromkeys(names, 0)
        self.caches: dict[str, CacheRecord] = {}
        self.casts: dict[str, int] = {}
        self.refreshes = 0
        self._stale: set[str] = set()
        self._epochs: dict[int, int] = {}  # how many caches have each epoch
        self._present: set[tuple[tuple[str, str], ...]] = set()  # reads whose caches exist in their layouts

    def bump(self, names: Iterable[str] | None = None) -> None:
        """Say that parameters (all, without ``names``) were written; their caches are stale from here on."""
        for name in list(self.versions) if names is None else names:
            self.versions[name] += 1
            if name in self.caches:
                self._stale.add(name)

    def refreshed(self, name: str, *, epoch: int, layouts: Iterable[str]) -> None:
        """A cache was made from the current version with the scale of ``epoch``."""
        before = self.caches.get(name)
        if before is not None:
            self._epochs[before.epoch] -= 1
            if not self._epochs[before.epoch]:
                del self._epochs[before.epoch]
        self._epochs[epoch] = self._epochs.get(epoch, 0) + 1
        record = CacheRecord(self.versions[name], epoch, frozenset(layouts))
        if before is not None and before.layouts != record.layouts:
            self._present.clear()
        self.caches[name] = record
        self.casts[name] = self.casts.get(name, 0) + 1
        self._stale.discard(name)

    def require(
        self,
        name: str,
        layout: str,
        *,
        epoch: int | None,
        version: int | None = None,
        reader: str = "",
        microbatch: int | None = None,
    ) -> None:
        """A reader needs ``layout`` of the cache of ``name`` at ``version`` (None: the current one) and ``epoch`` (None: any).

        Raises:
            StaleWeightError: names both versions or epochs.
        """
        wanted = self.versions[name] if version is None else version
        record = self.caches.get(name)
        if record is None:
            raise StaleWeightError(f"{reader or 'a reader'} needs the cached weight {name!r}, never made", layer=name)
        place = {"layer": name, "microbatch": microbatch}
        if record.version != wanted or (version is not None and self.versions[name] != version):
            raise StaleWeightError(
                f"{reader or 'a reader'} needs {name!r} at version {wanted}, the cache holds version "
                f"{record.version}, the parameter is at {self.versions[name]}: refresh the cache after the last bump",
                cached_version=record.version,
                parameter_version=self.versions[name],
                **place,
            )
        if epoch is not None and record.epoch != epoch:
            raise StaleWeightError(
                f"{reader or 'a reader'} needs {name!r} quantised with the scale of epoch {epoch}, the cache has epoch "
                f"{record.epoch}",
                cached_epoch=record.epoch,
                epoch=epoch,
                **place,
            )
        if layout not in record.layouts:
            raise StaleWeightError(
                f"{reader or 'a reader'} needs layout {layout!r} of {name!r}, the cache holds {sorted(record.layouts)}",
                **place,
            )

    def require_all(
        self,
        reads: tuple[tuple[str, str], ...],
        *,
        epoch: int | None,
        reader: str = "",
        microbatch: int | None = None,
    ) -> None:
        """The reads of a graph: a few comparisons while nothing is stale, else the first stale one raises."""
        wrong_epoch = epoch is not None and (len(self._epochs) > 1 or epoch not in self._epochs)
        if self._stale or wrong_epoch or reads not in self._present:
            for name, layout in reads:
                self.require(name, layout, epoch=epoch, reader=reader, microbatch=microbatch)
            self._present.add(reads)

    @property
    def stale(self) -> frozenset[str]:
        return frozenset(self._stale)

    def state(self) -> dict[str, dict[str, int]]:
        """Versions and, per cache, version and epoch: what a checkpoint saves."""
        return {
            "versions": dict(self.versions),
            "cache_version": {name: record.version for name, record in self.caches.items()},
            "cache_epoch": {name: record.epoch for name, record in self.caches.items()},
        }
