"""Statistics of token sets, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from qeffect_lm.data import stats
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter
from qeffect_lm.errors import UsageError


def make(prefix: Path, tokens: list[int] | np.ndarray, vocab_size: int) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        writer.add_document(tokens)
    return IndexedDataset(prefix)


@pytest.mark.parametrize("vocab_size", [100, 70000])
def test_unigram_entropy(tmp_path: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform over 8 ids: ln 8. One id: 0. (1/2, 1/4, 1/4): 1.5 ln 2. In blocks smaller than the set, too."""
    monkeypatch.setattr(stats, "_BLOCK", 3)
    for name, tokens, expected in [
        ("a", list(range(8)) * 5, math.log(8)),
        ("b", [3] * 10, 0.0),
        ("c", [1, 1, 2, 99], 1.5 * math.log(2)),
    ]:
        dataset = make(tmp_path / name, tokens, vocab_size)
        assert stats.unigram_entropy(dataset, vocab_size) == pytest.approx(expected, abs=1e-12)


def test_token_counts(tmp_path: Path) -> None:
    dataset = make(tmp_path / "a", [0, 2, 2, 4], 5)
    assert stats.token_counts(dataset, 6).tolist() == [1, 0, 2, 0, 1, 0]


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path / "a", [0, 2, 49], 50)
    with pytest.raises(UsageError, match="token id 49, outside the vocabulary of 49"):
        stats.unigram_entropy(dataset, 49)
    stats.unigram_entropy(dataset, 50)
