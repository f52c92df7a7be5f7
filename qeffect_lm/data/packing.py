"""Samples of a token set: ``seq_len + 1`` tokens each, of which the first ``seq_len`` are inputs and the last the targets.

``stream``  the stream of all tokens cut at multiples of ``seq_len``; neighbours share one token.
``whole``   whole documents as long as they fit (:func:`~qeffect_lm.data.index.packed`), then padding, whose loss mask is 0.

With ``reset`` documents do not see each other: each row says where every token's document begins, for attention and positions,
and the first token of a document is nobody's target. A document that goes on from an earlier sample begins anew.

A pair ``PREFIX.mask`` of the same documents, of ones and zeros, says which tokens count as targets (fine-tuning: the answers').
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.index import IndexCache, content_hash, document_starts, packed
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.manifest import open_mask
from qeffect_lm.errors import UsageError

Numbers = npt.NDArray[np.int64]
PACKINGS = ("stream", "whole")


@dataclass
class Rows:
    """Samples ``[n]``: ``tokens`` int64 ``[n, seq_len + 1]``; ``mask`` float32 and ``starts`` int32 ``[n, seq_len]``: which
    targets count, and the place in its row where each input's document begins (None: documents see each other)."""

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int32] | None


@dataclass
class Samples:
    """The samples of one token set, by number.

    Args:
        packing: ``stream`` or ``whole``.
        reset: documents do not see each other.
        digest: the data's SHA-256; None: it is computed.

    Raises:
        UsageError: a ``seq_len`` that is not positive, fewer tokens than one sample, or a mask of other documents.
    """

    dataset: IndexedDataset
    seq_len: int
    packing: str = "stream"
    reset: bool = False
    cache: IndexCache = field(default_factory=IndexCache)
    digest: str | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UsageError(f"seq_len must be at least 1, not {self.seq_len}")
        if self.packing not in PACKINGS:
            raise UsageError(f"packing {self.packing!r}: there are {', '.join(PACKINGS)}")
        self.size = num_windows(self.dataset, self.seq_len) if self.packing == "stream" else 0
        self.mask = open_mask(self.dataset)
        self._sha = self.digest
        self._starts: Numbers | None = None
        if self.reset or self.packing == "whole":
            self._starts = document_starts(self.dataset, self.sha256(), self.cache)
        if self.packing == "whole":
            assert self._starts is not None
            self._pieces, self._firsts = packed(self._starts, self.seq_len, self.sha256(), self.cache)
            self.size = len(self._firsts) - 1
            if not self.size:
                raise UsageError(f"dataset {self.dataset.prefix} has no document of two tokens or more")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self.seq_len, self.packing, self.reset, self.cache, self.sha256())

    def sha256(self) -> str:
        """The digest of the token set, and of its mask where there is one."""
        if self._sha is None:
            self._sha = content_hash(self.dataset, self.cache)
            if self.mask is not None:
                self._sha += "+" + content_hash(self.mask, self.cache)
        return self._sha

    def read(self, numbers: Numbers) -> Rows:
        """The samples ``numbers`` ``[n]``, each in ``range(size)``."""
        return self._windows(numbers) if self.packing == "stream" else self._whole(numbers)

    def counted(self, numbers: Numbers) -> int:
        """How many targets of the samples ``numbers`` (any shape) count; without reading their tokens where that will do."""
        numbers = numbers.reshape(-1)
        if self.mask is not None:
            return int(np.count_nonzero(self.read(numbers).mask))
        if self.packing == "stream":
            hidden = 0
            if self._starts is not None:
                first = numbers * self.seq_len
                low, high = self._documents_in(first)
                hidden = int((high - low).sum())
            return len(numbers) * self.seq_len - hidden
        pieces, _, row = self._pieces_of(numbers)
        _, sizes = self._spans(pieces)
        return int((sizes - 1).sum()) if self.reset else int(sizes.sum()) - len(np.unique(row))

    # ---- the stream -----------------------------------------------------------------------------------------------

    def _documents_in(self, first: Numbers) -> tuple[Numbers, Numbers]:
        """Which documents begin in windows at tokens ``first``, past their first token: numbers [low, high)."""
        assert self._starts is not None
        low = np.searchsorted(self._starts[:-1], first, side="right")
        return low, np.searchsorted(self._starts[:-1], first + self.seq_len, side="right")

    def _windows(self, numbers: Numbers) -> Rows:
        first = numbers * self.seq_len
        places = first[:, None] + np.arange(self.seq_len + 1, dtype=np.int64)
        tokens = np.asarray(self.dataset.tokens[places], dtype=np.int64)
        mask = np.ones((len(numbers), self.seq_len), dtype=np.float32)
        if self.mask is not None:
            mask *= self.mask.tokens[places[:, 1:]] != 0
        if self._starts is None:
            return Rows(tokens, mask, None)
        low, high = self._documents_in(first)
        row = np.repeat(np.arange(len(numbers)), high - low)
        document = _ranges(low, high)
        begins = np.zeros(tokens.shape, dtype=bool)
        begins[row, self._starts[document] - first[row]] = True
        return self._reset(tokens, mask, begins)

    @staticmethod
    def _reset(tokens: npt.NDArray[np.int64], mask: npt.NDArray[np.float32], begins: npt.NDArray[np.bool_]) -> Rows:
        """``begins`` ``[n, seq_len + 1]``: where a document begins."""
        mask[begins[:, 1:]] = 0
        place = np.arange(mask.shape[1], dtype=np.int32)
        starts = np.maximum.accumulate(np.where(begins[:, :-1], place, np.int32(0)), axis=1)
        return Rows(tokens, mask, starts)

    # ---- whole documents ------------------------------------------------------------------------------------------

    def _pieces_of(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The pieces of samples, each one's place in its row, and its row."""
        low, high = self._firsts[numbers], self._firsts[numbers + 1]
        row = np.repeat(np.arange(len(numbers)), high - low)
        pieces = _ranges(low, high)
        _, sizes = self._spans(pieces)
        before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        head = np.flatnonzero(np.diff(row, prepend=-1))
        return pieces, before - before[head][row], row

    def _spans(self, pieces: Numbers) -> tuple[Numbers, Numbers]:
        """First token and number of tokens of each piece."""
        assert self._starts is not None
        document = np.searchsorted(self._pieces, pieces, side="right") - 1
        first = self._starts[document] + (pieces - self._pieces[document]) * self.seq_len
        return first, np.minimum(self._starts[document + 1] - first, self.seq_len + 1)

    def _whole(self, numbers: Numbers) -> Rows:
        shape = len(numbers), self.seq_len + 1
        tokens, counts = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        pieces, place, row = self._pieces_of(numbers)
        first, sizes = self._spans(pieces)
        begins = np.zeros(shape, dtype=bool)
        begins[row, place] = True
        for r, to, source, size in zip(row.tolist(), place.tolist(), first.tolist(), sizes.tolist(), strict=True):
            tokens[r, to : to + size] = self.dataset.tokens[source : source + size]
            counts[r, to : to + size] = True if self.mask is None else self.mask.tokens[source : source + size] != 0
        filled = np.bincount(row, weights=sizes, minlength=len(numbers)).astype(np.int64)
        short = np.flatnonzero(filled <= self.seq_len)
        begins[short, filled[short]] = True  # the padding is a document of its own
        mask = counts[:, 1:].astype(np.float32)
        return self._reset(tokens, mask, begins) if self.reset else Rows(tokens, mask, None)


def _ranges(low: Numbers, high: Numbers) -> Numbers:
    """``[low[0], …, high[0] - 1, low[1], …]``."""
    counts = high - low
    before = np.cumsum(counts) - counts
    made: Numbers = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(low - before, counts)
    return made


def num_windows(dataset: IndexedDataset, seq_len: int) -> int:
    """Number of windows of ``seq_len + 1`` tokens (neighbours share one); UsageError when there is not even
    one."""
    if seq_len < 1:
        raise UsageError(f"seq_len must be at least 1, not {seq_len}")
    windows = (dataset.num_tokens - 1) // seq_len
    if windows < 1:
        raise UsageError(
            f"dataset {dataset.prefix} has {dataset.num_tokens} tokens, but one sample of seq_len {seq_len} "
            f"needs {seq_len + 1}: use more text or a seq_len of at most {dataset.num_tokens - 1}"
        )
    return windows
